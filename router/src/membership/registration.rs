//! What a node must be to join: its fields are there and bounded, since they end up in labels, spans and messages, and
//! its model is the router's. Whether it fits the nodes that are there is [`super::table`]'s question. Pure.
use http::Uri;
use http::uri::{Authority, Scheme};
use tandem_ports::{LIFE_SECRET_BYTES, MAX_ENDED_LIVES};
use tandem_proto::v1::TransportInfo;
use tandem_proto::v1::transport_info::Reach;
use tandem_proto::ways::{MAX_SUBNETS, MAX_TRANSPORTS};
use tandem_proto::{BLOCK_TOKENS, Error, ErrorKind, PROTOCOL_VERSION, v1};

use super::Expected;
use crate::select::Role;

const MAX_NODE_ID_BYTES: usize = 128;
/// Of each word in what a node tells of its transports.
const MAX_TRANSPORT_WORD_BYTES: usize = 128;
/// Of the names by which nodes are compared.
const MAX_NAME_BYTES: usize = 64;

/// Checks what a node says of itself.
///
/// # Errors
/// `Incompatible`, with the field that is wrong and what it should be.
pub(super) fn check(info: &v1::Register, expected: &Expected) -> Result<(Role, Authority), Error> {
    let role = self::role(info)?;
    let refuse = |why: String| Error::new(ErrorKind::Incompatible, format!("node `{}`: {why}", info.node_id));
    if info.protocol != PROTOCOL_VERSION {
        let (node, router) = (info.protocol, PROTOCOL_VERSION);
        let why = format!("it speaks protocol {node}, the router {router}: run one version of Tandem in a cluster");
        return Err(refuse(why));
    }
    check_transports(&info.transports).map_err(refuse)?;
    for (field, name) in [("arithmetic", &info.arithmetic), ("kv_order", &info.kv_order)] {
        if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.chars().all(|c| c.is_ascii_graphic()) {
            return Err(refuse(format!("{field} is no name of 1 to {MAX_NAME_BYTES} visible ASCII characters")));
        }
    }
    for (name, missing) in [
        ("incarnation", info.incarnation == 0),
        ("life", info.life == 0),
        ("compatibility_digest", info.compatibility_digest == 0),
        ("total_blocks", info.total_blocks == 0),
        ("max_context_tokens", info.max_context_tokens == 0),
        ("max_running", info.max_running == 0),
    ] {
        if missing {
            return Err(refuse(format!("{name} is empty")));
        }
    }
    if !BLOCK_TOKENS.contains(&(info.block_tokens as usize)) {
        return Err(refuse(format!("blocks of {} tokens; a block holds {BLOCK_TOKENS:?}", info.block_tokens)));
    }
    if info.model_digest != expected.model_digest {
        return Err(refuse(format!(
            "its model file has digest {:016x}, the router's has {:016x}: start both with the same --model",
            info.model_digest, expected.model_digest
        )));
    }
    if info.eos_token_id != expected.eos_token_id {
        let (node, router) = (info.eos_token_id, expected.eos_token_id);
        return Err(refuse(format!("its end-of-sequence token is {node}, the router's {router}")));
    }
    if ![0, LIFE_SECRET_BYTES].contains(&info.secret_digest.len()) || info.ended.len() > MAX_ENDED_LIVES {
        return Err(refuse(format!(
            "a digest of {LIFE_SECRET_BYTES} bytes, and secrets of {MAX_ENDED_LIVES} lives at most"
        )));
    }
    let endpoint = endpoint(&info.endpoint)
        .ok_or_else(|| refuse(format!("endpoint `{}` is not http://host:port or https://host:port", info.endpoint)))?;
    Ok((role, endpoint))
}

/// What a node is whose id is one.
///
/// # Errors
/// `Incompatible`, with the field that is wrong and what it should be.
pub(super) fn role(info: &v1::Register) -> Result<Role, Error> {
    let refuse = |why: String| Error::new(ErrorKind::Incompatible, why);
    let printable = info.node_id.chars().all(|c| c.is_ascii_graphic());
    if info.node_id.is_empty() || info.node_id.len() > MAX_NODE_ID_BYTES || !printable {
        return Err(refuse(format!("a node id has 1 to {MAX_NODE_ID_BYTES} visible ASCII characters")));
    }
    match info.role() {
        v1::Role::Prefill => Ok(Role::Prefill),
        v1::Role::Decode => Ok(Role::Decode),
        v1::Role::Unspecified => Err(refuse(format!("node `{}`: no role", info.node_id))),
    }
}

/// What a node offers ends up in labels, spans and messages.
fn check_transports(transports: &[TransportInfo]) -> Result<(), String> {
    if transports.is_empty() || transports.len() > MAX_TRANSPORTS {
        return Err(format!("{} transports; a node has 1 to {MAX_TRANSPORTS}", transports.len()));
    }
    for (at, TransportInfo { backend, name, build_id, reach }) in transports.iter().enumerate() {
        let mut told = vec![backend, name, build_id];
        match reach {
            Some(Reach::Host(host)) => told.push(&host.boot_id),
            Some(Reach::Network(network)) => told.extend([&network.boot_id, &network.address]),
            Some(Reach::Fabric(fabric)) if fabric.subnets.len() > MAX_SUBNETS => {
                return Err(format!("transport {at} is on more than {MAX_SUBNETS} subnets"));
            }
            Some(Reach::Fabric(fabric)) => told.extend(&fabric.subnets),
            None => {}
        }
        if [backend, name, build_id].iter().any(|word| word.is_empty()) {
            return Err(format!("transport {at} lacks its backend, name or build id"));
        }
        if told.iter().any(|word| word.len() > MAX_TRANSPORT_WORD_BYTES || word.chars().any(char::is_control)) {
            return Err(format!("transport {at} has a word of more than {MAX_TRANSPORT_WORD_BYTES} printable bytes"));
        }
        if transports[..at].iter().any(|other| (&other.backend, &other.build_id) == (backend, build_id)) {
            return Err(format!("transport {build_id} twice"));
        }
    }
    Ok(())
}

/// Host and port of `http://host:port`, or of `https://host:port`, and nothing else: what the router would leave out is
/// no address of a node. Whether it is dialled within TLS is the router's matter.
fn endpoint(url: &str) -> Option<Authority> {
    let parts = url.parse::<Uri>().ok()?.into_parts();
    let bare = parts.path_and_query.is_none_or(|path| path == "/");
    let authority = parts.authority.filter(|authority| authority.port().is_some() && !authority.as_str().contains('@'));
    authority.filter(|_| bare && [Some(Scheme::HTTP), Some(Scheme::HTTPS)].contains(&parts.scheme))
}
