//! A client that is its own router: it opens both legs at once and carries the ticket over.
use anyhow::bail;
use futures::StreamExt;
use tandem_cluster_tests::Cluster;
use tandem_proto::v1;
use tandem_proto::v1::decode_client::DecodeClient;
use tandem_proto::v1::decode_command::Command as DecodeCommand;
use tandem_proto::v1::decode_event::Event as DecodeEvent;
use tandem_proto::v1::prefill_client::PrefillClient;
use tandem_proto::v1::prefill_command::Command as PrefillCommand;
use tandem_proto::v1::prefill_event::Event as PrefillEvent;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

/// Connections to one node of each role.
#[derive(Clone)]
pub struct Direct {
    prefill: PrefillClient<Channel>,
    decode: DecodeClient<Channel>,
    prefill_incarnation: u64,
}

impl Direct {
    /// To the nodes of `cluster`, by the ways to prefill and decode.
    pub async fn connect(cluster: &Cluster, [prefill, decode]: [String; 2]) -> anyhow::Result<Self> {
        let incarnation = cluster.prefill.ready("incarnation").trim_start_matches("0x");
        Ok(Self {
            prefill: PrefillClient::connect(prefill).await?,
            decode: DecodeClient::connect(decode).await?,
            prefill_incarnation: u64::from_str_radix(incarnation, 16)?,
        })
    }

    /// Runs a request and calls `token` at each token.
    pub async fn ask(&self, prompt: Vec<u32>, max_tokens: u32, mut token: impl FnMut()) -> anyhow::Result<()> {
        let spec = v1::RequestSpec { prompt, max_tokens, ignore_eos: true, ..v1::RequestSpec::default() };
        let (commands, receiver) = mpsc::channel(2);
        commands.send(command(PrefillCommand::Start(spec.clone()))).await?;
        let start = v1::DecodeStart {
            spec: Some(spec),
            prefill_incarnation: self.prefill_incarnation,
            ..v1::DecodeStart::default()
        };
        let start = v1::DecodeCommand { command: Some(DecodeCommand::Start(start)) };
        let (mut to_prefill, mut to_decode) = (self.prefill.clone(), self.decode.clone());
        let (prefill, decode) = tokio::try_join!(
            to_prefill.prefill(ReceiverStream::new(receiver)),
            // The call's own end would be a cancellation.
            to_decode.generate(tokio_stream::iter([start]).chain(tokio_stream::pending())),
        )?;
        let (mut prefill, mut decode) = (prefill.into_inner(), decode.into_inner());
        // Decode has the first token with the KV, and may have ended before prefill's own word of it is here.
        let (mut delivered, mut finished) = (false, false);
        while !(delivered && finished) {
            tokio::select! {
                biased;
                event = prefill.message(), if !delivered => match event?.and_then(|event| event.event) {
                    Some(PrefillEvent::FirstToken(_)) => token(),
                    Some(PrefillEvent::Delivered(_)) => delivered = true,
                    other => bail!("prefill: {other:?}"),
                },
                event = decode.message(), if !finished => match event?.and_then(|event| event.event) {
                    Some(DecodeEvent::Reserved(reserved)) => {
                        let ticket = v1::Deliver { ticket: reserved.ticket };
                        commands.send(command(PrefillCommand::Deliver(ticket))).await?;
                    }
                    Some(DecodeEvent::Token(_) | DecodeEvent::FirstToken(_)) => token(),
                    Some(DecodeEvent::Finished(_)) => finished = true,
                    Some(DecodeEvent::Verified(_)) => {}
                    None => bail!("decode ended early"),
                },
            }
        }
        Ok(())
    }
}

fn command(command: PrefillCommand) -> v1::PrefillCommand {
    v1::PrefillCommand { command: Some(command) }
}
