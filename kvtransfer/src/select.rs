//! Starts a node's transports once, at its start, and says which. A fall-back that nobody asked for is a warning one
//! cannot miss: the cluster works, several times slower than its hardware.
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use tandem_memory::Place;

use crate::arena::Arena;
use crate::error::TransferError;
use crate::tcp::{TcpConfig, TcpTransport};
use crate::transport::Transport;
use crate::ucx::{UcxConfig, UcxProfile, UcxTransport};

/// A backend, as people name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// `ucx/shm`, `ucx/tcp`, `ucx/rdma`.
    Ucx(UcxProfile),
    /// `tcp`.
    Tcp,
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ucx(profile) => write!(f, "ucx/{profile}"),
            Self::Tcp => f.write_str("tcp"),
        }
    }
}

/// A backend that a node is to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Which.
    pub kind: TransportKind,
    /// Whether the node starts without it.
    pub need: Need,
}

/// See [`Wanted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Somebody asked for it: without it the node does not start.
    Asked,
    /// Where it works; where not, there is a warning.
    IfPossible,
}

/// Everything that any choice needs.
#[derive(Clone, Debug)]
pub struct TransportConfig {
    /// The fastest first, each once.
    pub wanted: Vec<Wanted>,
    /// For UCX: of each profile in `wanted`.
    pub ucx: Vec<UcxConfig>,
    /// Where the tcp backend listens; peers connect to it as it is.
    pub tcp_listen: SocketAddr,
    /// For TCP.
    pub tcp: TcpConfig,
}

/// A transport that runs, and which one it is.
pub type Started = (TransportKind, Arc<dyn Transport>);

/// Starts the transports that `config` asks for over `arena`, in its order. At least one.
///
/// # Errors
/// Those of a backend that was asked for; if none works, those of the last one.
pub fn select(config: &TransportConfig, arena: &Arc<Arena>) -> Result<Vec<Started>, TransferError> {
    let mut started = Vec::new();
    let (mut failures, mut last) = (Vec::new(), None);
    for Wanted { kind, need } in &config.wanted {
        match (start(*kind, config, arena), need) {
            (Ok(transport), _) => started.push((*kind, transport)),
            (Err(error), Need::Asked) => return Err(error),
            (Err(error), Need::IfPossible) => {
                failures.push(format!("{kind} does not work here: {error}"));
                last = Some(error);
            }
        }
    }
    if started.is_empty() {
        return Err(last.unwrap_or_else(|| TransferError::peer_gone("no KV transport was asked for")));
    }
    if !failures.is_empty() {
        match started.as_slice() {
            [(TransportKind::Tcp, _)] if matches!(arena.memory().place(), Place::Cuda { .. }) => {
                let why = failures.join("; ");
                tracing::warn!("KV of this GPU is staged through main memory and travels over tcp: {why}");
            }
            [(TransportKind::Tcp, _)] => tracing::warn!("{}", fallback_warning(&failures.join("\n  "))),
            _ => tracing::warn!("{}", failures.join("; ")),
        }
    }
    for (_, transport) in &started {
        let info = transport.info();
        tracing::info!(transport = info.name, build = info.build_id, "KV transport started");
    }
    Ok(started)
}

fn start(
    kind: TransportKind,
    config: &TransportConfig,
    arena: &Arc<Arena>,
) -> Result<Arc<dyn Transport>, TransferError> {
    Ok(match kind {
        TransportKind::Ucx(profile) => {
            let ucx = config.ucx.iter().find(|ucx| ucx.profile == profile).cloned();
            UcxTransport::start(arena.clone(), ucx.unwrap_or_else(|| UcxConfig::new(profile)))?
        }
        TransportKind::Tcp => TcpTransport::bind(config.tcp_listen, arena.clone(), config.tcp.clone())?,
    })
}

fn fallback_warning(failures: &str) -> String {
    let line = "=".repeat(78);
    format!(
        "\n{line}\n  KV TRANSPORT: FALLING BACK TO PLAIN TCP\n\n  {failures}\n\n  \
         Hand-offs will be several times slower than over shared memory or RDMA.\n  \
         Install UCX (Debian: apt install libucx0) or name its directory with\n  \
         --ucx-lib-dir; ask for --transport tcp to accept TCP silently, or for\n  \
         --transport ucx to make this an error.\n{line}"
    )
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tandem_memory::HostMemory;

    use super::*;

    const SHM: TransportKind = TransportKind::Ucx(UcxProfile::Shm);

    fn without_ucx(wanted: &[(TransportKind, Need)]) -> Result<Vec<String>, TransferError> {
        let arena = Arena::new(HostMemory::zeroed(64 * 8).expect("little"), 64, 1);
        let ucx = UcxConfig { lib_dir: Some("/nonexistent".into()), ..UcxConfig::new(UcxProfile::Shm) };
        let wanted = wanted.iter().map(|(kind, need)| Wanted { kind: *kind, need: *need }).collect();
        let tcp_listen = (Ipv4Addr::LOCALHOST, 0).into();
        let config = TransportConfig { wanted, ucx: vec![ucx], tcp_listen, tcp: TcpConfig::default() };
        let started = select(&config, &arena)?;
        Ok(started.into_iter().map(|(_, transport)| transport.info().name).collect())
    }

    #[test]
    fn what_nobody_asked_for_may_be_missing() {
        let started = without_ucx(&[(SHM, Need::IfPossible), (TransportKind::Tcp, Need::Asked)]);
        assert_eq!(started, Ok(vec!["tcp".to_owned()]));
        assert!(without_ucx(&[(SHM, Need::Asked), (TransportKind::Tcp, Need::Asked)]).is_err());
        assert!(without_ucx(&[(SHM, Need::IfPossible)]).is_err(), "nothing is left");
        assert!(without_ucx(&[]).is_err());
    }

    #[test]
    fn the_warning_is_large_and_says_what_to_do() {
        let text = fallback_warning("ucx/shm does not work here: no libucp.so.0");
        assert!(text.lines().count() >= 10 && text.contains("no libucp.so.0") && text.contains("--ucx-lib-dir"));
    }
}
