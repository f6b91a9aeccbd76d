//! How much of a hand-off hides behind the prefill, and what it costs: `make bench-handoff`.
//!
//! Two clusters of one prefill and one decode node take turns with the same prompts: one pushes the KV while it
//! computes (`--push overlap`, the default), the other all of it after the forward pass (`--push whole`). The figures
//! are those that every client gets with its last message, and the client's own gaps between tokens. Beside them stands
//! what the machine takes to copy as much memory, and to read it after it lay as long.
mod machine;
mod shaped;
mod table;

use std::path::{Path, PathBuf};

use clap::Parser;
use machine::Machine;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shaped::Shaped;
use table::{Measured, Row};
use tandem_cluster_tests::Process;
use tandem_cluster_tests::client::{ask, token_ids};
use tandem_cluster_tests::cluster::{model, words};
use tandem_proto::v1::generate_response::Event;
use tandem_proto::v1::inference_client::InferenceClient;
use tokio::time::Instant;

/// Enough for a steady step time after the hand-off.
const ANSWER_TOKENS: u32 = 24;

#[derive(Parser)]
struct Args {
    /// Prompts of each size for each way to push
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Tokens of the prompts
    #[arg(long, value_delimiter = ',', default_values_t = [512, 2048, 8000])]
    prompts: Vec<u32>,
    /// `ucx`, `tcp`, and `shaped`: tcp between network namespaces over a link of 1 Gbit/s, which takes root
    #[arg(long, value_delimiter = ',', default_values = ["ucx", "tcp", "shaped"])]
    links: Vec<String>,
    /// The model, instead of SmolLM2-135M: its weights are in each of four nodes
    #[arg(long)]
    model: Option<PathBuf>,
    /// KV blocks of each node
    #[arg(long, default_value_t = 2048)]
    kv_blocks: usize,
    /// Compute threads of each node
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Further flags for the nodes
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    node_args: String,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let mut rows = Vec::new();
    for link in &args.links {
        let shaped = if link == "shaped" { Some(Shaped::set_up()?) } else { None };
        let transport = if link == "ucx" { "ucx" } else { "tcp" };
        let dir = tempfile::tempdir()?;
        let mut clusters = Vec::new();
        for push in ["whole", "overlap"] {
            clusters.push(Cluster::start(push, transport, shaped.as_ref(), &args, dir.path()).await?);
        }
        for &prompt in &args.prompts {
            let machine = Machine::new(clusters[0].measure(&random_prompt(prompt, u64::MAX)).await?.bytes)?;
            let (mut measured, mut references) = ([Vec::new(), Vec::new()], Vec::new());
            for round in 0..args.rounds {
                let tokens = random_prompt(prompt, round as u64);
                for (cluster, measured) in clusters.iter().zip(&mut measured) {
                    machine.write();
                    measured.push(cluster.measure(&tokens).await?);
                    references.push(machine.measure());
                }
            }
            let [whole, overlap] = measured;
            let row = Row { link: link.clone(), prompt, whole, overlap, references };
            eprintln!("{link}, {prompt} tokens: done");
            rows.push(row);
        }
    }
    table::print(&rows);
    Ok(())
}

fn random_prompt(tokens: u32, seed: u64) -> Vec<u32> {
    let mut rng = StdRng::seed_from_u64(seed << 32 | u64::from(tokens));
    (0..tokens).map(|_| rng.random_range(100..40_000)).collect()
}

/// A router and two nodes that push in one way.
struct Cluster {
    router: Process,
    _nodes: [Process; 2],
}

impl Cluster {
    async fn start(
        push: &str,
        transport: &str,
        shaped: Option<&Shaped>,
        args: &Args,
        dir: &Path,
    ) -> anyhow::Result<Self> {
        let (here, there) = shaped.map_or(("127.0.0.1", "127.0.0.1"), Shaped::addresses);
        let mut flags = words(&format!("--http {here}:0 --grpc {here}:0 --local-prefill never --model"));
        let model = args.model.clone().map_or_else(model, Ok)?.display().to_string();
        flags.push(model.clone());
        let router = Process::start(&format!("{push}-router"), "tandem-router", &flags, dir).await?;
        let node = |address: &str, role: &str, own: &str| {
            let flags = format!(
                "--router {} --listen {address}:0 --admin {address}:0 --kv-listen {address}:0 --transport {transport} \
                 --node-id {push}-{role} --threads {} --kv-blocks {} --no-prefix-caching --speculate off {} {own} --model",
                router.url("grpc"),
                args.threads,
                args.kv_blocks,
                args.node_args
            );
            Ok::<_, anyhow::Error>([words(&flags), vec![model.clone()]].concat())
        };
        let (prefill, decode) = (node(here, "prefill", &format!("--push {push}"))?, node(there, "decode", "")?);
        let (name, program) = (format!("{push}-decode"), "tandem-decode-node");
        let prefill = Process::start(&format!("{push}-prefill"), "tandem-prefill-node", &prefill, dir).await?;
        let decode = match shaped {
            Some(shaped) => Process::start_in_namespace(shaped.namespace(), &name, program, &decode, dir).await?,
            None => Process::start(&name, program, &decode, dir).await?,
        };
        let cluster = Self { router, _nodes: [prefill, decode] };
        cluster.warm_up().await?;
        Ok(cluster)
    }

    /// Waits for both nodes, and lets them touch their memory.
    async fn warm_up(&self) -> anyhow::Result<()> {
        let prompt = random_prompt(600, u64::from(u32::MAX));
        let start = Instant::now();
        loop {
            match self.measure(&prompt).await {
                Ok(_) => return Ok(()),
                Err(error) if start.elapsed().as_secs() > 30 => return Err(error),
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(100)).await,
            }
        }
    }

    async fn measure(&self, prompt: &[u32]) -> anyhow::Result<Measured> {
        let mut request = ask(token_ids(prompt.to_vec()), ANSWER_TOKENS);
        request.ignore_eos = true;
        let mut client = InferenceClient::connect(self.router.url("grpc")).await?;
        let mut stream = client.generate(request).await?.into_inner();
        let mut tokens = Vec::new();
        while let Some(message) = stream.message().await? {
            match message.event {
                Some(Event::Token(_)) => tokens.push(Instant::now()),
                Some(Event::Finish(finish)) => return Ok(Measured::new(&finish.timings.unwrap_or_default(), &tokens)),
                None => {}
            }
        }
        anyhow::bail!("the answer ended without its last message")
    }
}
