//! Flags, read once, from the command line, the environment and a file. The rest of the router sees only [`Config`].
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum};
use tandem_config::{ConfigArgs, ROUTER, Resolved};
use tandem_etcd::{EtcdAddress, EtcdArgs};
use tandem_ports::{NodeTlsFiles, TlsFiles, reactor_threads};
use tandem_telemetry::{Collector, LogFilter, LogFormat};

use crate::admission::keys::KeySource;
use crate::http::Origin;
use crate::limits::pools::Pools;
use crate::limits::{Limits, MOST_ATTEMPTS};
use crate::membership::origin::NodeEndpoints;
use crate::membership::{DEFAULT_INDEX_BLOCKS, breaker};
use crate::select::policy::Policy;
use crate::select::{self, LocalPrefill};
use crate::traces::{DEFAULT_RING, JaegerUi};

/// The router of a Tandem cluster: gRPC and OpenAI HTTP in front, prefill and decode nodes behind.
#[derive(Debug, Parser)]
#[command(name = "tandem-router", version)]
struct Flags {
    /// Address of the OpenAI HTTP API; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000")]
    http: SocketAddr,
    /// Address of the gRPC API, on which nodes join too; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:50051")]
    grpc: SocketAddr,
    /// Where this port of --http or --grpc is in use, take the next one that is free; the `ready` line has it
    #[arg(long, value_name = "http|grpc,…", value_enum, value_delimiter = ',')]
    next_free_port: Vec<ClientPort>,
    /// Address on which nodes join, instead of the gRPC API's, so that clients cannot join as nodes. Within TLS only by
    /// --node-tls-cert
    #[arg(long, value_name = "ADDR")]
    nodes: Option<SocketAddr>,
    /// Which endpoints of nodes are dialled: those at the host that the node calls from, or any that it names
    #[arg(long, default_value = "own", value_enum)]
    node_endpoints: NodeEndpoints,
    /// File with the cluster's secret, one line of 16 to 1024 characters, the same on all nodes: only those that have
    /// it may join. A second line holds a token that is accepted and not shown. Read again at SIGHUP, and when it
    /// changes
    #[arg(long, value_name = "FILE")]
    join_token_file: Option<PathBuf>,
    /// This router's certificate among the nodes, PEM: both sides show one, within TLS 1.3 (mTLS). Its URI is
    /// spiffe://TRUST-DOMAIN/tandem/router, the nodes' .../prefill[/NODE-ID] and .../decode[/NODE-ID]. These three
    /// files are read again at SIGHUP, and when they change
    #[arg(long, value_name = "FILE", requires_all = ["node_tls_key", "node_tls_ca", "nodes"])]
    node_tls_cert: Option<PathBuf>,
    /// That certificate's private key, PEM
    #[arg(long, value_name = "FILE", requires = "node_tls_cert")]
    node_tls_key: Option<PathBuf>,
    /// Authorities of that certificate and of the nodes', PEM
    #[arg(long, value_name = "FILE", requires = "node_tls_cert")]
    node_tls_ca: Option<PathBuf>,
    /// Take nodes' certificates without such a name, too: whoever has one of these authorities may be any node
    #[arg(long, requires = "node_tls_cert")]
    node_tls_any_name: bool,
    /// Where in etcd nodes look for routers, by the same address as their --router: this one stands there while it
    /// serves. etcds:// is within TLS
    #[arg(long, value_name = "etcd://HOST:PORT[,HOST:PORT…]/PREFIX")]
    register: Option<EtcdAddress>,
    /// Host, or host:port, under which nodes reach --nodes (--grpc without it), when that listens on all interfaces or
    /// behind another port. --register writes it
    #[arg(long, value_name = "HOST[:PORT]", requires = "register")]
    advertise_host: Option<String>,
    #[command(flatten)]
    etcd: EtcdArgs,
    /// Address of a port for probes, scrapers and people: /health/live, /health/ready, /metrics, /debug/cluster, and
    /// the live page at /. It answers while the others are full. It has no TLS. Only the live page's data needs an API
    /// key. Without this port all of it is on the HTTP API's, unless there are API keys; with it, the page is only here
    #[arg(long, value_name = "ADDR")]
    admin: Option<SocketAddr>,
    /// Connections that each port may have open. A later one takes the place of the one that is idle or half-open
    /// longest. Fewer where the system allows the process fewer descriptors
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_connections: u32,
    /// Certificate of both client ports, PEM: from then on they speak TLS only; nodes need a port of their own,
    /// --nodes. These three files are read again at SIGHUP, and when they change
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "nodes"])]
    tls_cert: Option<PathBuf>,
    /// The certificate's private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Clients must show a certificate that one of these authorities signed (mTLS), PEM. --api-keys may name them: what
    /// such a client sends without a key is its tenant's
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Web pages of this origin (https://host[:port]) may read answers of the HTTP API; repeatable, `*` is all
    /// [default: none]
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<Origin>,
    /// GGUF file or safetensors directory of the model (its tokenizer and chat template; the weights stay on the nodes)
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Name under which the model is served [default: the file's own]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    served_model_name: Option<String>,
    /// Name of this router in traces, logs and metrics: each router of a cluster has its own, also on several hosts
    /// [default: router- and the port of --grpc]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    router_id: Option<String>,
    #[command(flatten)]
    collector: Collector,
    /// Jaeger's pages, as http://host:16686: the live page, `tandem trace` and `tandem explain` link to them
    #[arg(long, value_name = "URL")]
    jaeger_ui: Option<JaegerUi>,
    /// How log lines look: `text` for people, `json` for programs. --log-filter or RUST_LOG chooses
    /// them; `access=off` leaves out the line of each request
    #[arg(long, value_name = "text|json", default_value_t)]
    log_format: LogFormat,
    /// Which lines are logged, such as warn or info,access=off; the file's is read again at SIGHUP [default: that of
    /// RUST_LOG, or info]
    #[arg(long, value_name = "FILTER")]
    log_filter: Option<LogFilter>,
    /// Share of traces sent to the collector when `traceparent` does not decide. Slow and failed ones are always sent
    #[arg(long, value_name = "0..1", default_value_t = 1.0, value_parser = share)]
    trace_sample_ratio: f64,
    /// Recent traces that the router keeps itself, for /api/traces and `tandem trace`; some 6 KiB each
    #[arg(long, value_name = "N", default_value_t = DEFAULT_RING as u32, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    trace_ring: u32,
    /// Requests that may wait in the router for a slot and for room on nodes; 0: a request with a slot starts at once
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_queue: u16,
    /// Requests that may wait on each decode node, so that it never idles; and one on each prefill node, unless this is
    /// 0. The others wait in the router, in order
    #[arg(long, value_name = "N", default_value_t = 4)]
    node_queue: u16,
    /// Refuse requests (429) whose predicted time to the first token, queue included, is longer; without it only those
    /// that would miss their own deadline
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    max_ttft_ms: Option<u32>,
    /// Classes of requests by prompt tokens, each with its share of slots and service, as
    /// interactive=0-2048:3,document=2049-:1 [default: one for all]
    #[arg(long, value_name = "POOLS")]
    pools: Option<Pools>,
    /// API keys, of at least 22 characters: a JSON file, {"keys": [{"name": "a", "key": "…" or "sha256": "…",
    /// "certificate": "spiffe://…" or a common name, "weight": 1, "requests_per_minute": 60, "tokens_per_minute":
    /// 10000, "max_concurrent_requests": 8, "min_priority": 0, "share_prefix_cache": false}]}; a directory with a file
    /// for each tenant, of its name, that holds its key; or a variable, env:NAME, with such JSON or the only key. Read
    /// again at SIGHUP. Traces show the key's own requests; health needs no key. Nodes, which have none, need a port of
    /// their own, --nodes
    #[arg(long, value_name = "FILE|DIR|env:NAME", requires = "nodes")]
    api_keys: Option<KeySource>,
    /// Routers behind one load balancer: each of N routers allows an N-th part of a key's limits. Routers need not know
    /// of each other; nodes join all of them
    #[arg(long, value_name = "N", default_value_t = NonZeroU32::MIN)]
    replicas: NonZeroU32,
    /// Requests that may run at the same time
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..))]
    max_inflight: u16,
    /// Silence after which a node counts as dead: its requests are retried on others
    #[arg(long, value_name = "MS", default_value_t = 3000, value_parser = clap::value_parser!(u32).range(50..=600_000))]
    lease_ms: u32,
    /// Most tokens of an answer whose client sets no limit; without it what the context and the nodes' KV memory have
    /// room for
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens_default: Option<u32>,
    /// Longest time of a request, a day at most; a client's own deadline counts if it is earlier
    #[arg(long, value_name = "MS", default_value_t = 600_000, value_parser = clap::value_parser!(u32).range(1..=i64::from(tandem_proto::MAX_REQUEST_MS)))]
    max_request_ms: u32,
    /// Attempts of a request: a node that fails costs one, and another pair continues the answer
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_ATTEMPTS)))]
    max_attempts: u32,
    /// Time that a request may spend on retries without progress, waiting for nodes included
    #[arg(long, value_name = "MS", default_value_t = 30_000)]
    replan_ms: u32,
    /// Share of the running requests that may be retries at once; 32 always may. Others wait for their turn, within
    /// --replan-ms; a request whose retry failed too does not wait, and fails
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=100))]
    retry_budget_percent: u32,
    /// Whether decode nodes compute prompts, too: `never` (each prompt on a prefill node), `always` (none there:
    /// aggregated serving), `auto` (where it is predicted to cost less, or no sound prefill node is available)
    #[arg(long, default_value = "auto", value_name = "auto|never|always")]
    local_prefill: LocalPrefill,
    /// Silence of both nodes after which an attempt fails. Keep it long: nodes send nothing while a request is queued
    /// behind long prompts. A hung node is noticed earlier, by --lease-ms and its own --max-step-ms
    #[arg(long, value_name = "MS", default_value_t = 600_000, value_parser = clap::value_parser!(u32).range(1..))]
    silence_ms: u32,
    /// Time after which a client that reads none of its tokens is disconnected
    #[arg(long, value_name = "MS", default_value_t = 30_000, value_parser = clap::value_parser!(u32).range(1..))]
    client_stall_ms: u32,
    /// Failures in a row after which a node is ranked last, for --breaker-open-ms
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    breaker_failures: u32,
    /// How long such a node is ranked last; doubles, up to 30 s, each time that it fails again
    #[arg(long, value_name = "MS", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=600_000))]
    breaker_open_ms: u32,
    /// How the nodes of a request are chosen
    #[arg(long, value_enum, default_value_t)]
    policy: Policy,
    /// Time to the first token that users call good. Its ratio to --tpot-objective-ms weighs first tokens against the
    /// others in the joint policy
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=3_600_000))]
    ttft_objective_ms: u32,
    /// Time per further token that users call good
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=3_600_000))]
    tpot_objective_ms: u32,
    /// Choices that cost at most this much more than the cheapest count as equal: of two random ones the emptier is
    /// taken
    #[arg(long, value_name = "PERCENT", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=100))]
    near_optimal_percent: u32,
    /// KV blocks in the router's index of what nodes have cached; about 50 bytes each, least recently used ones are
    /// dropped
    #[arg(long, value_name = "N", default_value_t = DEFAULT_INDEX_BLOCKS as u32, value_parser = clap::value_parser!(u32).range(1..=1_000_000_000))]
    index_blocks: u32,
    /// How long running requests may take to end after SIGTERM; then they end with an error, within two seconds
    #[arg(long, value_name = "MS", default_value_t = 30_000)]
    drain_ms: u32,
    /// I/O threads, some 40,000 tokens a second each; more threads cost more wake-ups [default: one for four cores, at
    /// least one]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    _sources: ConfigArgs,
}

fn share(text: &str) -> Result<f64, String> {
    let number = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=1.0).contains(&number) { Ok(number) } else { Err("not between 0 and 1".to_owned()) }
}

/// A port for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ClientPort {
    /// The OpenAI API's.
    Http,
    /// gRPC's.
    Grpc,
}

/// What the process is to do.
#[derive(Clone, Debug)]
pub struct Config {
    /// Address of the HTTP API.
    pub http: SocketAddr,
    /// Address of the gRPC API.
    pub grpc: SocketAddr,
    /// Ports of which one that is in use is passed over.
    pub next_free_port: Vec<ClientPort>,
    /// Where nodes join, if not there.
    pub nodes: Option<SocketAddr>,
    /// Which endpoints of theirs are dialled.
    pub node_endpoints: NodeEndpoints,
    /// The cluster's secret.
    pub join_token_file: Option<PathBuf>,
    /// Where in etcd this router is to be found, if it is.
    pub register: Option<EtcdAddress>,
    /// Replaces the host, and the port if it has one, of the nodes' port there.
    pub advertise_host: Option<String>,
    /// How etcd is reached.
    pub etcd: EtcdArgs,
    /// Where probes and scrapers ask and people look, if they have a port of their own.
    pub admin: Option<SocketAddr>,
    /// Of each port.
    pub max_connections: usize,
    /// Of the ports for clients.
    pub tls: Option<TlsFiles>,
    /// Between this router and its nodes.
    pub node_tls: Option<NodeTlsFiles>,
    /// Whose web pages may read answers.
    pub cors_origins: Vec<Origin>,
    /// GGUF file or safetensors directory.
    pub model: PathBuf,
    /// Replaces the model's own name.
    pub served_model_name: Option<String>,
    /// In traces, logs and metrics, if not by its port.
    pub router_id: Option<String>,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Which there are.
    pub log_filter: LogFilter,
    /// Who gets spans, log lines and metrics.
    pub collector: Collector,
    /// Where people look at traces.
    pub jaeger_ui: Option<JaegerUi>,
    /// Of traces that begin here, the share that it gets.
    pub trace_sample_ratio: f64,
    /// Traces that are kept.
    pub trace_ring: usize,
    /// Bounds of requests.
    pub limits: Limits,
    /// Where API keys are; without it nobody needs one.
    pub api_keys: Option<KeySource>,
    /// Routers that divide the keys' rates.
    pub replicas: NonZeroU32,
    /// Silence after which a node is dead.
    pub lease: Duration,
    /// When a node is tried last.
    pub breakers: breaker::Settings,
    /// How nodes are chosen.
    pub choice: select::Settings,
    /// Blocks in the prefix index at most.
    pub index_blocks: usize,
    /// Bound of the drain.
    pub drain: Duration,
    /// Threads of the reactor.
    pub threads: usize,
}

/// The command line, as clap has it.
pub fn command() -> clap::Command {
    Flags::command()
}

impl Config {
    /// From the process's flags, variables and file, and how these came about; wrong ones end the process with a
    /// message.
    pub fn load() -> (Self, Resolved) {
        let (flags, resolved) = tandem_config::load::<Flags>(ROUTER);
        (flags.into(), resolved)
    }

    /// From what was resolved later.
    ///
    /// # Errors
    /// Flags that clap would refuse.
    pub fn of(resolved: &Resolved) -> Result<Self, clap::Error> {
        Flags::from_arg_matches(resolved.matches()).map(Self::from)
    }
}

impl From<Flags> for Config {
    fn from(flags: Flags) -> Self {
        let millis = |value: u32| Duration::from_millis(value.into());
        Self {
            http: flags.http,
            grpc: flags.grpc,
            next_free_port: flags.next_free_port,
            nodes: flags.nodes,
            node_endpoints: flags.node_endpoints,
            join_token_file: flags.join_token_file,
            register: flags.register,
            advertise_host: flags.advertise_host,
            etcd: flags.etcd,
            admin: flags.admin,
            max_connections: flags.max_connections as usize,
            tls: flags.tls_cert.zip(flags.tls_key).map(|(cert, key)| TlsFiles {
                cert,
                key,
                client_ca: flags.tls_client_ca,
            }),
            node_tls: flags
                .node_tls_cert
                .zip(flags.node_tls_key)
                .zip(flags.node_tls_ca)
                .map(|((cert, key), ca)| NodeTlsFiles { cert, key, ca, any_name: flags.node_tls_any_name }),
            cors_origins: flags.cors_origin,
            model: flags.model,
            served_model_name: flags.served_model_name,
            router_id: flags.router_id,
            log_format: flags.log_format,
            log_filter: flags.log_filter.unwrap_or_default(),
            collector: flags.collector,
            jaeger_ui: flags.jaeger_ui,
            trace_sample_ratio: flags.trace_sample_ratio,
            trace_ring: flags.trace_ring as usize,
            limits: Limits {
                max_inflight: flags.max_inflight.into(),
                max_queue: flags.max_queue.into(),
                node_queue: flags.node_queue.into(),
                max_ttft: flags.max_ttft_ms.map(millis),
                pools: flags.pools.unwrap_or_default(),
                max_tokens_default: flags.max_tokens_default.unwrap_or(u32::MAX),
                max_request: millis(flags.max_request_ms),
                max_attempts: flags.max_attempts,
                replan: millis(flags.replan_ms),
                retry_budget_percent: flags.retry_budget_percent,
                silence: millis(flags.silence_ms),
                client_stall: millis(flags.client_stall_ms),
            },
            api_keys: flags.api_keys,
            replicas: flags.replicas,
            lease: millis(flags.lease_ms),
            breakers: breaker::Settings { failures: flags.breaker_failures, open: millis(flags.breaker_open_ms) },
            choice: select::Settings {
                policy: flags.policy,
                ttft_objective_ms: flags.ttft_objective_ms.into(),
                tpot_objective_ms: flags.tpot_objective_ms.into(),
                near_optimal: f64::from(flags.near_optimal_percent) / 100.0,
                local: flags.local_prefill,
            },
            index_blocks: flags.index_blocks as usize,
            drain: millis(flags.drain_ms),
            threads: flags.threads.map_or_else(reactor_threads, usize::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_and_limits() {
        let config: Config = Flags::try_parse_from(["r", "--model", "m.gguf"]).unwrap().into();
        assert_eq!((config.limits.max_queue, config.limits.max_inflight), (256, 512));
        assert_eq!((config.limits.node_queue, config.limits.max_ttft, config.api_keys), (4, None, None));
        assert_eq!(config.limits.pools, Pools::default());
        assert_eq!(config.limits.max_tokens_default, u32::MAX, "what the context leaves");
        assert_eq!(config.lease, Duration::from_secs(3));
        assert_eq!(config.threads, reactor_threads());
        assert_eq!((config.max_connections, config.admin), (4096, None));
        assert_eq!((config.limits.max_attempts, config.limits.replan), (4, Duration::from_secs(30)));
        assert_eq!(config.limits.retry_budget_percent, 20);
        assert_eq!((config.breakers.failures, config.breakers.open), (3, Duration::from_secs(2)));
        assert!(config.tls.is_none() && config.nodes.is_none() && config.cors_origins.is_empty());
        for wrong in [["--tls-cert", "c.pem"], ["--tls-key", "k.pem"], ["--cors-origin", "example.org"]] {
            let args = ["r", "--model", "m.gguf"].into_iter().chain(wrong);
            assert!(Flags::try_parse_from(args).is_err(), "{wrong:?}");
        }
        let tls = ["--tls-cert", "c.pem", "--tls-key", "k.pem", "--tls-client-ca", "ca.pem"];
        let unjoined = Flags::try_parse_from(["r", "--model", "m.gguf"].into_iter().chain(tls)).unwrap_err();
        assert!(unjoined.to_string().contains("--nodes"), "{unjoined}");
        let args = ["r", "--model", "m.gguf", "--nodes", "127.0.0.1:0"].into_iter().chain(tls);
        let config: Config = Flags::try_parse_from(args).unwrap().into();
        assert_eq!(config.tls.unwrap().client_ca.unwrap().to_str(), Some("ca.pem"));
        let keys = ["--api-keys", "keys.json"];
        let open = Flags::try_parse_from(["r", "--model", "m.gguf"].into_iter().chain(keys)).unwrap_err();
        assert!(open.to_string().contains("--nodes"), "{open}");
        let args = ["r", "--model", "m.gguf", "--nodes", "127.0.0.1:0"].into_iter().chain(keys);
        assert!(Config::from(Flags::try_parse_from(args).unwrap()).api_keys.is_some());
        let among_nodes = ["--node-tls-cert", "c.pem", "--node-tls-key", "k.pem", "--node-tls-ca", "ca.pem"];
        let args = |flags: &[&'static str]| {
            Flags::try_parse_from(["r", "--model", "m.gguf", "--nodes", "127.0.0.1:0"].iter().chain(flags))
        };
        assert!(!Config::from(args(&among_nodes).unwrap()).node_tls.unwrap().any_name);
        for half in [&among_nodes[..2], &among_nodes[..4], &among_nodes[2..], &["--node-tls-any-name"]] {
            assert!(args(half).unwrap_err().to_string().contains("--node-tls-"), "{half:?}");
        }
        let unjoined = Flags::try_parse_from(["r", "--model", "m.gguf"].into_iter().chain(among_nodes)).unwrap_err();
        assert!(unjoined.to_string().contains("--nodes"), "{unjoined}");
        assert_eq!((config.choice.policy, config.choice.step_weight()), (Policy::Joint, 10.0));
        assert_eq!(config.index_blocks, 4_000_000);
        assert_eq!((config.trace_sample_ratio, config.trace_ring), (1.0, 1_000));
        let chosen = ["r", "--model", "m.gguf", "--policy", "round-robin", "--tpot-objective-ms", "50"];
        let config: Config = Flags::try_parse_from(chosen).unwrap().into();
        assert_eq!((config.choice.policy, config.choice.step_weight()), (Policy::RoundRobin, 20.0));
        let shaped =
            ["r", "--model", "m.gguf", "--max-ttft-ms", "2000", "--pools", "a=0-9,b=10-:2", "--node-queue", "0"];
        let shaped: Config = Flags::try_parse_from(shaped).unwrap().into();
        assert_eq!((shaped.limits.max_ttft, shaped.limits.node_queue), (Some(Duration::from_secs(2)), 0));
        assert_eq!(shaped.limits.pools.of(10), 1);
        for wrong in [
            ["--max-ttft-ms", "0"],
            ["--pools", "a=1-"],
            ["--node-queue", "-1"],
            ["--tpot-objective-ms", "0"],
            ["--policy", "best"],
            ["--index-blocks", "0"],
            ["--max-attempts", "0"],
            ["--max-tokens-default", "0"],
            ["--max-attempts", "17"],
            ["--breaker-failures", "0"],
            ["--retry-budget-percent", "101"],
            ["--threads", "0"],
            ["--max-connections", "0"],
            ["--admin", "8080"],
            ["--trace-sample-ratio", "1.1"],
            ["--trace-sample-ratio", "NaN"],
            ["--trace-ring", "0"],
        ] {
            let args = ["r", "--model", "m.gguf"].into_iter().chain(wrong);
            assert!(Flags::try_parse_from(args).is_err(), "{wrong:?}");
        }
        assert_eq!(config.choice.local, LocalPrefill::Auto);
        for (word, mode) in [("never", LocalPrefill::Never), ("always", LocalPrefill::Always)] {
            let flags = Flags::try_parse_from(["r", "--model", "m.gguf", "--local-prefill", word]).unwrap();
            assert_eq!(Config::from(flags).choice.local, mode);
        }
        for wrong in [
            ["--local-prefill", "sometimes"],
            ["--lease-ms", "0"],
            ["--max-inflight", "0"],
            ["--http", "nowhere"],
            ["--unknown", "1"],
        ] {
            let args = ["r", "--model", "m.gguf"].into_iter().chain(wrong);
            assert!(Flags::try_parse_from(args).is_err(), "{wrong:?}");
        }
    }
}
