//! What the router adds to a request, and how many tokens one core of it streams: `make bench-router`.
//!
//! The nodes are simulated: a step takes a millisecond, so what is measured is the way and not the model. *direct* is a
//! client that drives both nodes itself, over gRPC, as the router would (every prompt on the prefill node, in both).
//! The other routers proxy an OpenAI server, which is our router with its nodes; what they add is measured against a
//! client of that server. *A bare relay* is the direct way through a process that does nothing but pass bytes on: the
//! least that any router can add on this machine. With `--compare-seen` two more routers of ours show what traces and
//! logs cost ([`seen`]). All take turns in one run. A round in which other guests took this
//! machine's processors counts for none of them.
mod direct;
mod load;
mod peers;
mod relay;
mod seen;
mod stolen;
mod table;
mod way;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::ensure;
use clap::Parser;
use direct::Direct;
use peers::Peer;
use seen::Compared;
use stolen::Stolen;
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::{Cluster, Options, Process};
use way::Way;

/// `make bench-router`
#[derive(Parser)]
struct Args {
    /// Times that every way has its turn
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of a turn
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Requests a second, at random moments (Poisson)
    #[arg(long, default_value_t = 200.0)]
    rate: f64,
    /// Streams at once, for the tokens of a core; 0 to leave that out
    #[arg(long, default_value_t = 64)]
    streams: usize,
    /// Python with `sglang-router` and `vllm-router`, to measure them as well
    #[arg(long)]
    python: Option<PathBuf>,
    /// Another router than this build's: the absolute path of the program
    #[arg(long, default_value = "tandem-router")]
    router: String,
    /// Pass bytes on to these, and nothing else
    #[arg(long, hide = true)]
    relay: Vec<SocketAddr>,
    /// Flags for the router, such as `--threads 1`
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    router_args: String,
    /// Measure two more routers: one that logs nothing, and one that logs and exports its spans to a collector
    #[arg(long)]
    compare_seen: bool,
    /// These two alone, and the direct way: for many short turns, since what differs is less than what a machine does
    #[arg(long, requires = "compare_seen", conflicts_with = "python")]
    only_seen: bool,
    /// Further flags for the one that is seen, such as `--log-format json`
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    seen_args: String,
    /// Further flags for the one that is not, which turn off what else can be
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    unseen_args: String,
    /// Path on the HTTP port of the one that is seen, read all the time, as its page reads events
    #[arg(long, value_name = "PATH")]
    watch: Option<String>,
    /// Take spans, and nothing else
    #[arg(long, hide = true)]
    collector: bool,
}

/// Rounds that are tried for one that counts.
const MOST_TRIES: usize = 3;
/// Share of the processors' time that other guests may take in a round.
const MOST_STOLEN: f64 = 0.01;

/// What was measured of one subject in one round.
struct Turn {
    latencies: load::Latencies,
    /// Of a way with a router, if streams were asked for.
    streamed: Option<load::Streamed>,
}

/// One way to the nodes, and who is in it.
struct Subject {
    name: &'static str,
    way: Way,
    /// Whose processor time counts.
    router: Option<u32>,
    /// Place in the list of the way without this router.
    without: Option<usize>,
}

// One thread: a client takes as little as it can from those who are measured.
#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if !args.relay.is_empty() {
        return relay::run(&args.relay).await;
    }
    if args.collector {
        return seen::collect().await;
    }
    let cluster = Cluster::start(Options {
        simulated: true,
        node_args: words("--simulated-step-us 1000 --kv-blocks 8192 --max-num-seqs 256 --no-prefix-caching"),
        router_args: words(&format!("--max-inflight 4096 {}", args.router_args)),
        router_program: args.router.clone(),
        ..Options::default()
    })
    .await?;
    let http = cluster.router.url("http");
    let model = served_model(&http).await?;
    let peers = match &args.python {
        Some(python) => peers::start(python, &http, cluster.dir()).await?,
        None => Vec::new(),
    };
    let relay = relay::start(&cluster).await?;
    let mut subjects = subjects(&cluster, &relay, &model, &peers).await?;
    if args.only_seen {
        subjects.truncate(1); // the direct way, which the others are measured against
    }
    let compared = if args.compare_seen { Some(Compared::start(&cluster, &args).await?) } else { None };
    if let Some(compared) = &compared {
        for (names, router) in [(UNSEEN, &compared.unseen), (SEEN, &compared.seen)] {
            subjects.extend(ours(names, router, &model).await?);
        }
    }
    let mut rounds = Vec::new();
    for number in 0..args.rounds * MOST_TRIES {
        if rounds.len() == args.rounds {
            break;
        }
        let before = Stolen::look()?;
        let turns = round(&subjects, &args, number).await?;
        match before.share_since()? {
            share if share > MOST_STOLEN => eprintln!("{:.1} % of the processors were taken: not counted", share * 1e2),
            _ => rounds.push(turns),
        }
    }
    ensure!(!rounds.is_empty(), "other guests of this machine's host took its processors all the time");
    table::latency(&subjects, &rounds);
    if args.streams > 0 {
        println!();
        table::streaming(&subjects, &rounds);
    }
    if compared.is_some() {
        println!();
        table::cost(&subjects, &rounds, [UNSEEN, SEEN]);
    }
    println!("\nMedians of {} rounds.", rounds.len());
    Ok(())
}

/// A turn of each subject, in their order. Another one begins each time: what follows a load on the machine is not
/// always the same way.
async fn round(subjects: &[Subject], args: &Args, number: usize) -> anyhow::Result<Vec<Turn>> {
    let (first, mut turns) = (number % subjects.len(), Vec::new());
    for subject in subjects.iter().cycle().skip(first).take(subjects.len()) {
        eprintln!("round {}: {}", number + 1, subject.name);
        let latencies = load::open_loop(&subject.way, args.rate, args.seconds, number as u64, subject.router).await?;
        let streamed = match subject.router {
            Some(router) if args.streams > 0 => {
                Some(load::streams(&subject.way, args.streams, args.seconds, router).await?)
            }
            _ => None,
        };
        turns.push(Turn { latencies, streamed });
    }
    turns.rotate_right(first);
    Ok(turns)
}

async fn subjects(cluster: &Cluster, relay: &Process, model: &str, peers: &[Peer]) -> anyhow::Result<Vec<Subject>> {
    let over_http = |url: &str| Way::http(url, model);
    let nodes = [cluster.prefill.url("grpc"), cluster.decode.url("grpc")];
    let direct = Way::Direct(Direct::connect(cluster, nodes).await?);
    let relayed = Way::Direct(Direct::connect(cluster, relay::NODES.map(|node| relay.url(node))).await?);
    let mut subjects = vec![
        Subject { name: "direct", way: direct, router: None, without: None },
        Subject { name: "a bare relay", way: relayed, router: Some(relay.pid()), without: Some(0) },
    ];
    subjects.extend(ours(["tandem, gRPC", "tandem, HTTP"], cluster, model).await?);
    // Our HTTP API, which they stand before.
    let without = Some(subjects.len() - 1);
    for peer in peers {
        let way = over_http(&peer.url)?;
        subjects.push(Subject { name: peer.name, way, router: Some(peer.pid()), without });
    }
    Ok(subjects)
}

/// Names of the ways to the routers that are compared.
const UNSEEN: [&str; 2] = ["tandem unseen, gRPC", "tandem unseen, HTTP"];
const SEEN: [&str; 2] = ["tandem seen, gRPC", "tandem seen, HTTP"];

/// Both ways to the router of `cluster`, by these names.
async fn ours([grpc, http]: [&'static str; 2], cluster: &Cluster, model: &str) -> anyhow::Result<[Subject; 2]> {
    let (router, without) = (Some(cluster.router.pid()), Some(0));
    let over_http = Way::http(&cluster.router.url("http"), model)?;
    Ok([
        Subject { name: grpc, way: Way::grpc(cluster).await?, router, without },
        Subject { name: http, way: over_http, router, without },
    ])
}

async fn served_model(http: &str) -> anyhow::Result<String> {
    let models: serde_json::Value = reqwest::get(format!("{http}/v1/models")).await?.json().await?;
    Ok(models["data"][0]["id"].as_str().unwrap_or_default().to_owned())
}
