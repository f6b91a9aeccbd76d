//! A prefill and a decode node in this process, with the model and over the in-process transport; the router's part in
//! it is the least that works.
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Parser;
use tandem_kvtransfer::mem::{MemFaults, MemNetwork, MemTransport};
use tandem_node::{Node, NodeArgs};
use tandem_proto::v1::decode_client::DecodeClient;
use tandem_proto::v1::decode_command::Command as DecodeCommand;
use tandem_proto::v1::decode_event::Event as DecodeEvent;
use tandem_proto::v1::prefill_client::PrefillClient;
use tandem_proto::v1::prefill_command::Command as PrefillCommand;
use tandem_proto::v1::prefill_event::Event as PrefillEvent;
use tandem_proto::v1::{self, Role};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::service::Routes;
use tonic::transport::{Channel, Server};

use crate::client::{decoded, local_tokens};
use crate::cluster::model;

/// A decode node's reservation ends after it.
const LEASE: std::time::Duration = std::time::Duration::from_secs(60);

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    node: NodeArgs,
}

/// Two nodes.
pub struct Pair {
    prefill: Arc<Node>,
    to_prefill: PrefillClient<Channel>,
    to_decode: DecodeClient<Channel>,
}

impl Pair {
    /// Starts both with `flags` beside the model's.
    ///
    /// # Errors
    /// The model is not there, or a flag is wrong.
    pub async fn start(flags: &str) -> anyhow::Result<Self> {
        let network = MemNetwork::default();
        let prefill = node(Role::Prefill, &network, flags).await?;
        let decode = node(Role::Decode, &network, flags).await?;
        let to_prefill = PrefillClient::new(serve(tandem_prefill_node::routes(prefill.clone())).await?);
        let to_decode = DecodeClient::new(serve(tandem_decode_node::routes(decode, LEASE)).await?);
        Ok(Self { prefill, to_prefill, to_decode })
    }

    /// The tokens of an answer from both nodes, and the bytes of KV that moved for it.
    ///
    /// # Errors
    /// Those of the nodes.
    pub async fn answer(&self, spec: v1::RequestSpec) -> anyhow::Result<(Vec<u32>, u64)> {
        let start = v1::DecodeStart {
            spec: Some(spec.clone()),
            prefill_incarnation: self.prefill.incarnation().0,
            ..Default::default()
        };
        let start = v1::DecodeCommand { command: Some(DecodeCommand::Start(start)) };
        let mut decode = self.to_decode.clone().generate(tokio_stream::iter([start])).await?.into_inner();
        let Some(DecodeEvent::Reserved(reserved)) = decode.message().await?.and_then(|event| event.event) else {
            bail!("decode did not reserve");
        };
        let commands = [PrefillCommand::Start(spec), PrefillCommand::Deliver(v1::Deliver { ticket: reserved.ticket })];
        let commands = commands.map(|command| v1::PrefillCommand { command: Some(command) });
        let mut prefill = self.to_prefill.clone().prefill(tokio_stream::iter(commands)).await?.into_inner();
        let Some(PrefillEvent::FirstToken(first)) = prefill.message().await?.and_then(|event| event.event) else {
            bail!("prefill gave no first token");
        };
        if first.finished.is_some() {
            return Ok((vec![first.token_id], 0));
        }
        let delivered = async { prefill.message().await?.context("prefill ended without a delivery") };
        let (_, (rest, kv_bytes)) = tokio::try_join!(delivered, decoded(decode))?;
        Ok(([vec![first.token_id], rest].concat(), kv_bytes))
    }

    /// The tokens of an answer from the decode node alone.
    ///
    /// # Errors
    /// Those of the node.
    pub async fn local_tokens(&self, spec: v1::RequestSpec) -> anyhow::Result<Vec<u32>> {
        local_tokens(self.to_decode.clone(), spec).await
    }
}

async fn node(role: Role, network: &MemNetwork, flags: &str) -> anyhow::Result<Arc<Node>> {
    let model = model()?.display().to_string();
    let flags =
        ["node", "--router", "http://127.0.0.1:1", "--model", &model].into_iter().chain(flags.split_whitespace());
    let config = Cli::try_parse_from(flags)?.node.resolve(role)?;
    Node::start_with(&config, |arena| Ok(MemTransport::new(network, arena, MemFaults::default()))).await
}

async fn serve(routes: Routes) -> anyhow::Result<Channel> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(Server::builder().add_routes(routes).serve_with_incoming(TcpListenerStream::new(listener)));
    Ok(Channel::from_shared(url)?.connect().await?)
}
