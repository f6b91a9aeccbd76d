//! A router with several nodes of each role, each connection over a [`Link`] that can be cut or slowed. What a fault
//! does to a fleet is undone by [`Fleet::repair`], so that one fleet serves many faults.
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use tandem_proto::v1;
use tandem_proto::v1::inference_client::InferenceClient;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};
use tonic::{Status, Streaming};

use crate::cluster::{POLL, free_port, model, words};
use crate::link::{Link, Quality};
use crate::process::Process;

/// From a start to the entry in the router's table, while other fleets start too.
const REGISTERED: Duration = Duration::from_secs(30);
/// No answer in a fleet takes longer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// A node that does not answer its admin port within this is not looked at.
const LOOK: Duration = Duration::from_secs(2);

/// What a node does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Reads prompts.
    Prefill,
    /// Generates tokens.
    Decode,
}

impl Role {
    /// As in program names.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Which fleet.
#[derive(Clone, Debug)]
pub struct FleetOptions {
    /// `ucx` (shared memory, one copy), `ucx-queue` (shared memory, through UCX's queue), `ucx-tcp` or `tcp`.
    pub transport: &'static str,
    /// Nodes of each role.
    pub nodes: usize,
    /// Nodes without a model.
    pub simulated: bool,
    /// Flags for the router.
    pub router_args: String,
    /// Flags for prefill nodes.
    pub prefill_args: String,
    /// Flags for decode nodes.
    pub decode_args: String,
}

impl Default for FleetOptions {
    fn default() -> Self {
        Self {
            transport: "ucx",
            nodes: 2,
            simulated: true,
            router_args: String::new(),
            prefill_args: String::new(),
            decode_args: String::new(),
        }
    }
}

/// A running fleet; everything is killed and removed on drop.
pub struct Fleet {
    /// The only router.
    pub router: Process,
    /// All nodes, prefill nodes first.
    pub members: Vec<Member>,
    /// Between clients and router.
    pub entrance: Link,
    options: FleetOptions,
    // Fields drop in order: processes before their directory.
    dir: TempDir,
}

/// A node and its links.
pub struct Member {
    /// What it does.
    pub role: Role,
    /// The program.
    pub process: Process,
    name: String,
    /// Where the router calls it.
    calls: Link,
    /// Where it reports to the router.
    reports: Link,
    /// Where KV arrives over tcp.
    kv: Link,
}

/// What a node says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    /// Blocks that nobody holds.
    pub free_blocks: f64,
    /// All blocks.
    pub total_blocks: f64,
    /// Sequences in the batch.
    pub running: f64,
    /// Calls that wait for something.
    pub waiting: f64,
    /// Hand-offs verified since start.
    pub verified: f64,
    /// Tokens generated since start.
    pub generated: f64,
    /// KV peers lost since start.
    pub lost_peers: f64,
    /// KV peers cut off since start.
    pub fenced_peers: f64,
    /// What its KV transport could not read since start.
    pub garbage: f64,
}

impl Counts {
    /// Nothing runs, nothing waits, every block is free.
    pub fn is_idle(&self) -> bool {
        self.free_blocks == self.total_blocks && self.total_blocks > 0.0 && self.in_flight() == 0.0
    }

    /// Calls.
    pub fn in_flight(&self) -> f64 {
        self.running + self.waiting
    }
}

impl Member {
    /// All its links.
    pub fn links_become(&self, quality: Quality) {
        [&self.calls, &self.reports, &self.kv].iter().for_each(|link| link.becomes(quality));
    }

    /// Where UCX listens for other nodes, over sockets: no other door of it does.
    ///
    /// # Errors
    /// `/proc` is not readable.
    pub fn ucx_ports(&self) -> anyhow::Result<BTreeSet<u16>> {
        let mut ports = self.process.listening_ports()?;
        for key in ["grpc", "admin"] {
            ports.remove(&address(&self.process, key)?.port());
        }
        Ok(ports)
    }

    /// What it says of itself, straight from its admin port.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn counts(&self) -> anyhow::Result<Counts> {
        let text = async { reqwest::get(format!("{}/metrics", self.process.url("admin"))).await?.text().await };
        let text = tokio::time::timeout(LOOK, text).await.context("it does not answer")??;
        let sum = |part: &str| -> f64 {
            let lines = text.lines().filter(|line| !line.starts_with('#') && line.contains(part));
            lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
        };
        Ok(Counts {
            free_blocks: sum("state=\"free\""),
            total_blocks: sum("state=\"total\""),
            running: sum("tandem_requests_running{"),
            waiting: sum("tandem_requests_waiting{"),
            verified: sum("state=\"verified\""),
            generated: sum("vllm:generation_tokens_total{"),
            lost_peers: sum("tandem_kv_lost_peers_total"),
            fenced_peers: sum("tandem_kv_fenced_peers_total"),
            garbage: sum("tandem_kv_protocol_errors_total"),
        })
    }
}

impl Fleet {
    /// All nodes, registered.
    ///
    /// # Errors
    /// A program does not start, or is not registered in time; with the logs.
    pub async fn start(options: FleetOptions) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let router = start_router(&options, dir.path()).await?;
        let entrance = Link::new().await?;
        entrance.leads_to(address(&router, "grpc")?);
        let mut members = Vec::new();
        for role in [Role::Prefill, Role::Decode] {
            for index in 0..options.nodes {
                members.push(start_member(&options, role, index, &router, dir.path()).await?);
            }
        }
        let fleet = Self { router, members, entrance, options, dir };
        fleet.registered().await?;
        Ok(fleet)
    }

    /// Heals all links, wakes and starts who does not run, and waits until all nodes are registered and idle.
    ///
    /// # Errors
    /// Something does not come back in time.
    pub async fn repair(&mut self) -> anyhow::Result<()> {
        self.entrance.becomes(Quality::Good);
        self.router.wake();
        for member in &self.members {
            member.links_become(Quality::Good);
            member.process.wake();
        }
        self.restart_dead().await?;
        self.registered().await?;
        self.settled(REGISTERED).await.map(drop)
    }

    /// Starts what has ended.
    ///
    /// # Errors
    /// It does not start.
    pub async fn restart_dead(&mut self) -> anyhow::Result<()> {
        if !self.router.is_alive() {
            self.router = start_router(&self.options, self.dir.path()).await?;
            self.entrance.leads_to(address(&self.router, "grpc")?);
        }
        for member in &mut self.members {
            member.reports.leads_to(address(&self.router, self.router.join_key())?);
            if !member.process.is_alive() {
                let kv = free_port()?;
                member.process = start_node(&self.options, member, kv, self.dir.path()).await?;
                member.calls.leads_to(address(&member.process, "grpc")?);
                member.kv.leads_to(SocketAddr::from(([127, 0, 0, 1], kv)));
            }
        }
        Ok(())
    }

    /// The answer as a stream of messages.
    ///
    /// # Errors
    /// The router's status, when it refuses at once.
    pub async fn open(&self, request: v1::GenerateRequest) -> Result<Streaming<v1::GenerateResponse>, Status> {
        let connect = InferenceClient::connect(self.entrance_url());
        let mut client = connect.await.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut request = tonic::Request::new(request);
        request.set_timeout(ANSWER_TIMEOUT);
        Ok(client.generate(request).await?.into_inner())
    }

    /// How its KV travels.
    pub fn transport(&self) -> &'static str {
        self.options.transport
    }

    /// Nodes of each role.
    pub fn nodes(&self) -> u32 {
        self.options.nodes as u32
    }

    /// Where clients connect.
    pub fn entrance_url(&self) -> String {
        format!("http://{}", self.entrance.address())
    }

    /// The links between the router and all nodes.
    pub fn routers_links_become(&self, quality: Quality) {
        for member in &self.members {
            member.calls.becomes(quality);
            member.reports.becomes(quality);
        }
    }

    /// What all nodes of a role say, summed; nodes that do not answer are left out.
    pub async fn sum(&self, role: Role) -> Counts {
        let looks = self.members.iter().filter(|member| member.role == role).map(Member::counts);
        let looks = futures::future::join_all(looks).await;
        looks.into_iter().flatten().fold(Counts::default(), |sum, one| Counts {
            free_blocks: sum.free_blocks + one.free_blocks,
            total_blocks: sum.total_blocks + one.total_blocks,
            running: sum.running + one.running,
            waiting: sum.waiting + one.waiting,
            verified: sum.verified + one.verified,
            generated: sum.generated + one.generated,
            lost_peers: sum.lost_peers + one.lost_peers,
            fenced_peers: sum.fenced_peers + one.fenced_peers,
            garbage: sum.garbage + one.garbage,
        })
    }

    /// What each node says that answers, by its process.
    pub async fn counts(&self) -> BTreeMap<u32, Counts> {
        let looks =
            self.members.iter().map(|member| async { Some((member.process.pid(), member.counts().await.ok()?)) });
        futures::future::join_all(looks).await.into_iter().flatten().collect()
    }

    /// The node of a role that has most to do.
    ///
    /// # Errors
    /// No node of the role answers.
    pub async fn busiest(&self, role: Role) -> anyhow::Result<usize> {
        let mut busiest = None;
        for (index, member) in self.members.iter().enumerate().filter(|(_, member)| member.role == role) {
            let Ok(counts) = member.counts().await else { continue };
            if busiest.is_none_or(|(_, most)| counts.in_flight() > most) {
                busiest = Some((index, counts.in_flight()));
            }
        }
        busiest.map(|(index, _)| index).with_context(|| format!("no {} node answers", role.as_str()))
    }

    /// Waits until every node that lives is idle, by its own word, and says how long that took.
    ///
    /// # Errors
    /// A block is still away when the time is over.
    pub async fn settled(&mut self, within: Duration) -> anyhow::Result<Duration> {
        let start = Instant::now();
        loop {
            let mut busy = Vec::new();
            for member in &mut self.members {
                if member.process.is_alive() {
                    match member.counts().await {
                        Ok(counts) if counts.is_idle() => {}
                        counts => busy.push(format!("{}: {counts:?}", member.name)),
                    }
                }
            }
            if busy.is_empty() {
                return Ok(start.elapsed());
            }
            if start.elapsed() > within {
                bail!("not idle within {within:?}: {}", busy.join("; "));
            }
            sleep(POLL).await;
        }
    }

    /// Waits until the router lists all nodes, with none of them draining.
    ///
    /// # Errors
    /// It does not in time; with what it lists.
    pub async fn registered(&self) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            let listed = self.listed().await;
            match &listed {
                Ok(names) if names.len() == self.members.len() => return Ok(()),
                _ if start.elapsed() > REGISTERED => bail!("the router lists {listed:?}"),
                _ => sleep(POLL).await,
            }
        }
    }

    /// What the router knows of its nodes (`/debug/cluster`), for messages.
    ///
    /// # Errors
    /// The router does not answer.
    pub async fn router_view(&self) -> anyhow::Result<String> {
        Ok(reqwest::get(format!("{}/debug/cluster", self.router.operators_url())).await?.text().await?)
    }

    async fn listed(&self) -> anyhow::Result<Vec<String>> {
        let url = format!("{}/debug/cluster", self.router.operators_url());
        let cluster: serde_json::Value = reqwest::get(url).await?.json().await?;
        let nodes = cluster["nodes"].as_array().context("a list of nodes")?;
        let ready = nodes.iter().filter(|node| node["draining"] == false);
        Ok(ready.filter_map(|node| Some(node["id"].as_str()?.to_owned())).collect())
    }
}

async fn start_router(options: &FleetOptions, logs: &Path) -> anyhow::Result<Process> {
    let mut args = words("--http 127.0.0.1:0 --grpc 127.0.0.1:0 --model");
    args.push(model()?.display().to_string());
    // What these runs are about is the hand-off.
    args.extend(words("--local-prefill never"));
    args.extend(words(&options.router_args));
    Process::start("router", "tandem-router", &args, logs).await
}

async fn start_member(
    options: &FleetOptions,
    role: Role,
    index: usize,
    router: &Process,
    logs: &Path,
) -> anyhow::Result<Member> {
    let (calls, reports, kv) = (Link::new().await?, Link::new().await?, Link::new().await?);
    reports.leads_to(address(router, router.join_key())?);
    let (name, port) = (format!("{}-{index}", role.as_str()), free_port()?);
    let process = start_node_with(options, role, &name, [&calls, &reports, &kv], port, logs).await?;
    calls.leads_to(address(&process, "grpc")?);
    kv.leads_to(SocketAddr::from(([127, 0, 0, 1], port)));
    Ok(Member { role, process, name, calls, reports, kv })
}

async fn start_node(options: &FleetOptions, member: &Member, kv: u16, logs: &Path) -> anyhow::Result<Process> {
    let links = [&member.calls, &member.reports, &member.kv];
    start_node_with(options, member.role, &member.name, links, kv, logs).await
}

async fn start_node_with(
    options: &FleetOptions,
    role: Role,
    name: &str,
    [calls, reports, kv]: [&Link; 3],
    kv_port: u16,
    logs: &Path,
) -> anyhow::Result<Process> {
    let (calls, reports, kv, model) = (calls.address(), reports.address(), kv.address(), model()?);
    let mut args = words("--listen 127.0.0.1:0 --admin 127.0.0.1:0");
    args.extend(words(&format!("--router http://{reports} --advertise-host {calls} --node-id {name}")));
    let transport = match options.transport {
        "ucx-tcp" => "ucx --ucx-profile tcp",
        "ucx-queue" => "ucx --kv-one-copy off",
        transport => transport,
    };
    args.extend(words(&format!("--transport {transport} --model {}", model.display())));
    if options.transport == "tcp" {
        args.extend(words(&format!("--kv-listen 127.0.0.1:{kv_port} --kv-advertise {kv}")));
    }
    if options.simulated {
        args.push("--simulated".to_owned());
    }
    args.extend(words(match role {
        Role::Prefill => &options.prefill_args,
        Role::Decode => &options.decode_args,
    }));
    Process::start(name, &format!("tandem-{}-node", role.as_str()), &args, logs).await
}

fn address(process: &Process, key: &str) -> anyhow::Result<SocketAddr> {
    let address = process.ready(key);
    address.trim_start_matches("http://").parse().with_context(|| format!("{key} of a ready line is {address}"))
}
