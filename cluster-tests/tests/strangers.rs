//! Strangers on both networks of a real cluster: 10,000 garbled KV addresses in tickets, through the prefill node's
//! gRPC port, and 10,000 garbled hellos, through UCX, to the decode node. A node that gives one of them to UCX ends
//! (UCX aborts, or reads past the end), so: both nodes live, each was refused and counted, and honest requests beside
//! them get their tokens. A prefill node's own address is in its hellos alone, and who cannot answer one has no
//! connection to it.
use std::time::Duration;

use anyhow::{Context, bail};
use prost::Message;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_cluster_tests::client::{ask, decoded, local_tokens, token_ids};
use tandem_cluster_tests::process::Process;
use tandem_cluster_tests::{Cluster, Options};
use tandem_kvtransfer::Arena;
use tandem_kvtransfer::PeerId;
use tandem_kvtransfer::handshake::HELLO_HEAD_BYTES;
use tandem_kvtransfer::ucx::stranger::Stranger;
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile};
use tandem_memory::HostMemory;
use tandem_proto::v1;
use tandem_proto::v1::decode_client::DecodeClient;
use tandem_proto::v1::decode_command::Command as DecodeCommand;
use tandem_proto::v1::decode_event::Event as DecodeEvent;
use tandem_proto::v1::prefill_client::PrefillClient;
use tandem_proto::v1::prefill_command::Command as PrefillCommand;
use tandem_proto::v1::prefill_event::Event as PrefillEvent;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

const ROUNDS: u64 = 20;
/// Of a round; and as many hellos.
const TICKETS: u64 = 500;
/// Of a round, beside those: nothing of them is a ticket.
const NOISE: usize = 5;
const NEW_TOKENS: u32 = 8;
/// The head of an address: magic, length, tag.
const HEAD_BYTES: usize = 22;
/// A node counts what it was sent within this time.
const SOON: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_refused_and_counted_and_honest_requests_beside_them_served() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Options::default()).await?;
    let mut attack = Attack::start(&cluster).await?;
    for round in 0..ROUNDS {
        attack.round(&cluster, round).await?;
        let refused = [counted(&cluster.prefill, "ticket").await?, counted(&cluster.decode, "ticket").await?];
        assert_eq!(refused, [(round + 1) * TICKETS, 0], "round {round}");
        attack.hellos.garbled(attack.decode, TICKETS, round).await?;
        attack.until_counted(&cluster.decode, (round + 1) * TICKETS).await?;
        let prompt = attack.prompt();
        let expected = local_tokens(attack.to_decode.clone(), spec(&prompt)).await?;
        let mut request = ask(token_ids(prompt), NEW_TOKENS);
        request.ignore_eos = true;
        assert_eq!(cluster.answer(request).await?.tokens, expected, "through the router, round {round}");
    }
    drop(attack);
    for process in [&mut cluster.router, &mut cluster.prefill, &mut cluster.decode] {
        assert!(process.is_alive());
        assert!(!process.log().contains("panicked"), "{}", process.log());
    }
    cluster.idle(Duration::from_secs(40)).await.map(drop)
}

struct Attack {
    rng: StdRng,
    to_prefill: PrefillClient<Channel>,
    to_decode: DecodeClient<Channel>,
    prefill_incarnation: u64,
    hellos: Hellos,
    /// The node, as the stranger's worker calls it.
    decode: PeerId,
}

impl Attack {
    /// The stranger knows decode's address from a ticket. It gives prefill one with its own address, and cannot prove
    /// to the hello that comes that the ticket is its own.
    async fn start(cluster: &Cluster) -> anyhow::Result<Self> {
        let mut attack = Self {
            rng: StdRng::seed_from_u64(1),
            to_prefill: PrefillClient::connect(cluster.prefill.url("grpc")).await?,
            to_decode: DecodeClient::connect(cluster.decode.url("grpc")).await?,
            prefill_incarnation: u64::from_str_radix(cluster.prefill.ready("incarnation"), 16)?,
            hellos: Hellos::start(),
            decode: PeerId(0),
        };
        let prompt = attack.prompt();
        let (ticket, _decode) = attack.reserve(&prompt).await?;
        let own = attack.hellos.with(|stranger| stranger.address()).await?;
        let mut call = Call::start(attack.to_prefill.clone(), &prompt).await?;
        let refused = call.deliver(&v1::Ticket { address: own, ..ticket.clone() }).await?;
        let Err(refused) = refused else { bail!("delivered to a stranger who granted nothing") };
        assert_eq!(refused.code, i32::from(Code::Unavailable), "{refused:?}");
        let peers = attack.hellos.with(|stranger| stranger.peers()).await?;
        assert_eq!(peers.len(), 0, "a hello of a hand-off that nobody granted makes no connection");
        attack.decode = attack.hellos.with(move |stranger| stranger.connect(&ticket.address)).await??;
        Ok(attack)
    }

    /// Garbled tickets in one call, and the honest one after them; and calls whose ticket is noise.
    async fn round(&mut self, cluster: &Cluster, round: u64) -> anyhow::Result<()> {
        let prompt = self.prompt();
        for _ in 0..NOISE {
            let noise: Vec<u8> = (0..self.rng.random_range(0..600)).map(|_| self.rng.random()).collect();
            let mut call = Call::start(self.to_prefill.clone(), &prompt).await?;
            if let Ok(Ok(delivered)) = call.deliver_bytes(noise).await {
                bail!("noise was delivered: {delivered:?}");
            }
        }
        let expected = local_tokens(self.to_decode.clone(), spec(&prompt)).await?;
        let (ticket, decode) = self.reserve(&prompt).await?;
        let mut call = Call::start(self.to_prefill.clone(), &prompt).await?;
        for _ in 0..TICKETS {
            let address = garbled(&mut self.rng, &ticket.address, HEAD_BYTES, 0);
            let refused = call.deliver(&v1::Ticket { address, ..ticket.clone() }).await;
            let refused = refused.with_context(|| format!("round {round}: {}", cluster.prefill.log()))?;
            let Err(refused) = refused else { bail!("a garbled ticket was delivered") };
            assert_eq!(refused.code, i32::from(Code::FailedPrecondition), "{refused:?}");
            assert!(refused.message.contains("KV address"), "{refused:?}");
        }
        if let Err(refused) = call.deliver(&ticket).await? {
            bail!("the honest ticket was refused: {refused:?}");
        }
        let (rest, _) = decoded(decode).await?;
        assert_eq!([call.first, rest].concat(), expected, "round {round}");
        Ok(())
    }

    /// A grant of the decode node, and its stream.
    async fn reserve(&self, prompt: &[u32]) -> anyhow::Result<(v1::Ticket, Streaming<v1::DecodeEvent>)> {
        let start = v1::DecodeStart {
            spec: Some(spec(prompt)),
            prefill_incarnation: self.prefill_incarnation,
            ..v1::DecodeStart::default()
        };
        let start = v1::DecodeCommand { command: Some(DecodeCommand::Start(start)) };
        let mut decode = self.to_decode.clone().generate(tokio_stream::iter([start])).await?.into_inner();
        let Some(DecodeEvent::Reserved(reserved)) = decode.message().await?.and_then(|event| event.event) else {
            bail!("decode did not reserve");
        };
        Ok((v1::Ticket::decode(reserved.ticket.as_slice())?, decode))
    }

    /// New to the caches.
    fn prompt(&mut self) -> Vec<u32> {
        (0..40).map(|_| self.rng.random_range(17..49_152)).collect()
    }

    /// Exactly `all` hellos, and no more.
    async fn until_counted(&self, node: &Process, all: u64) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            match counted(node, "hello").await? {
                refused if refused == all => return Ok(()),
                refused if refused > all || start.elapsed() > SOON => bail!("{}: {refused} of {all}", node.name),
                _ => sleep(Duration::from_millis(5)).await,
            }
        }
    }
}

fn spec(prompt: &[u32]) -> v1::RequestSpec {
    v1::RequestSpec {
        request_id: "stranger".to_owned(),
        prompt: prompt.to_vec(),
        sampling: Some(v1::Sampling::default()),
        max_tokens: NEW_TOKENS,
        ignore_eos: true,
        ..v1::RequestSpec::default()
    }
}

/// What a stranger makes of honest bytes: cut, one bit changed after `from`, other bytes behind a head, or nothing of
/// them.
fn garbled(rng: &mut StdRng, honest: &[u8], head: usize, from: usize) -> Vec<u8> {
    let mut bytes = honest.to_vec();
    match rng.random_range(0..4) {
        0 => bytes.truncate(rng.random_range(0..honest.len())),
        1 => bytes[rng.random_range(from..honest.len())] ^= 1u8 << rng.random_range(0..8),
        2 => bytes[head..].iter_mut().for_each(|byte| *byte = rng.random()),
        _ => bytes = (0..rng.random_range(0..4000)).map(|_| rng.random()).collect(),
    }
    bytes
}

/// A call of the prefill node that has started.
struct Call {
    commands: mpsc::Sender<v1::PrefillCommand>,
    events: Streaming<v1::PrefillEvent>,
    /// The first token, when it was said.
    first: Vec<u32>,
}

impl Call {
    async fn start(mut node: PrefillClient<Channel>, prompt: &[u32]) -> anyhow::Result<Self> {
        let (commands, receiver) = mpsc::channel(1);
        commands.send(v1::PrefillCommand { command: Some(PrefillCommand::Start(spec(prompt))) }).await?;
        let events = node.prefill(ReceiverStream::new(receiver)).await?.into_inner();
        Ok(Self { commands, events, first: Vec::new() })
    }

    /// What became of a ticket.
    async fn deliver(&mut self, ticket: &v1::Ticket) -> anyhow::Result<Result<v1::Delivered, v1::Undelivered>> {
        self.deliver_bytes(ticket.encode_to_vec()).await
    }

    async fn deliver_bytes(&mut self, ticket: Vec<u8>) -> anyhow::Result<Result<v1::Delivered, v1::Undelivered>> {
        let command = Some(PrefillCommand::Deliver(v1::Deliver { ticket }));
        self.commands.send(v1::PrefillCommand { command }).await?;
        loop {
            match self.events.message().await?.and_then(|event| event.event) {
                Some(PrefillEvent::FirstToken(first)) => self.first = vec![first.token_id],
                Some(PrefillEvent::Delivered(delivered)) => return Ok(Ok(delivered)),
                Some(PrefillEvent::Undelivered(undelivered)) => return Ok(Err(undelivered)),
                None => bail!("the call ended without a word on the ticket"),
            }
        }
    }
}

/// What the stranger is to do, on its own thread.
type Work = Box<dyn FnOnce(&mut Stranger) + Send>;

/// A stranger's worker on a thread of its own.
#[derive(Clone)]
struct Hellos {
    work: std::sync::mpsc::Sender<Work>,
}

impl Hellos {
    fn start() -> Self {
        let (work, works) = std::sync::mpsc::channel::<Box<dyn FnOnce(&mut Stranger) + Send>>();
        std::thread::spawn(move || {
            let arena = Arena::new(HostMemory::zeroed(64 * 8).expect("little"), 64, 1);
            let mut stranger = Stranger::start(arena, UcxConfig::new(UcxProfile::Shm)).expect("UCX, as the nodes have");
            loop {
                match works.recv_timeout(Duration::from_millis(1)) {
                    Ok(work) => work(&mut stranger),
                    Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                    Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
                }
                stranger.turn();
            }
        });
        Self { work }
    }

    async fn with<T: Send + 'static>(
        &self,
        does: impl FnOnce(&mut Stranger) -> T + Send + 'static,
    ) -> anyhow::Result<T> {
        let (reply, done) = oneshot::channel();
        let work = Box::new(move |stranger: &mut Stranger| _ = reply.send(does(stranger)));
        self.work.send(work).ok().context("the stranger is gone")?;
        done.await.context("the stranger is gone")
    }

    /// `count` of them to one node.
    async fn garbled(&self, to: PeerId, count: u64, seed: u64) -> anyhow::Result<()> {
        self.with(move |stranger| {
            let mut rng = StdRng::seed_from_u64(seed);
            let key = v1::HandoffKey { secret: (0..32).map(|_| rng.random()).collect() };
            let ticket =
                v1::Ticket { handoff_id: rng.random::<[u8; 16]>().to_vec(), key: Some(key), ..Default::default() };
            let honest = stranger.hello(&ticket).expect("a whole key");
            for _ in 0..count {
                let hello = garbled(&mut rng, &honest, HELLO_HEAD_BYTES, 0);
                stranger.say_hello(to, hello);
                stranger.turn();
            }
        })
        .await
    }
}

/// KV addresses that a node has refused.
async fn counted(node: &Process, from: &str) -> anyhow::Result<u64> {
    let text = reqwest::get(format!("{}/metrics", node.url("admin"))).await?.text().await?;
    let line = text.lines().find(|line| {
        line.starts_with("tandem_kv_rejected_addresses_total") && line.contains(&format!("from=\"{from}\""))
    });
    let value = line.and_then(|line| line.rsplit(' ').next()).context("no such metric")?;
    Ok(value.parse::<f64>()? as u64)
}
