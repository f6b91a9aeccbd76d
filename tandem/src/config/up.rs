//! The command line of `tandem up`, resolved: which processes there are, and the flags of each.
//!
//! Next: [`crate::up`], which starts them.
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use tandem_client::state;
use tandem_config::{ConfigArgs, Resolved};
use tandem_proto::device::DeviceChoice;

/// File name of the model that `make setup` puts into the cache.
pub const DEFAULT_MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// A local cluster.
pub struct Up {
    /// Prefill nodes; 0 when every decode node computes its own prompts.
    pub prefill: usize,
    /// Decode nodes.
    pub decode: usize,
    /// Routers; every node joins all of them.
    pub routers: usize,
    /// Address of the first router's HTTP API.
    pub http: Listen,
    /// Address of the first router's gRPC API.
    pub grpc: Listen,
    /// GGUF file or safetensors directory of the router; nodes have it among their flags.
    pub model: PathBuf,
    /// Where the state of the cluster is told to the other commands.
    pub state: PathBuf,
    /// One log file a process.
    pub logs: PathBuf,
    /// The user's secret for nodes that join; `None`: one is made.
    pub join_token_file: Option<PathBuf>,
    /// Give every node its own cores.
    pub pinning: Pinning,
    /// Start a child again that died.
    pub on_death: OnDeath,
    /// Bound of the start of one process.
    pub start_timeout: Duration,
    /// Bound of the drain at the end.
    pub grace: Duration,
    /// Threads of a node: as many as its cores, or a number.
    pub threads: Option<usize>,
    /// What nodes compute on; with several GPUs each node gets its own.
    pub device: DeviceChoice,
    /// Directory of libucp.so.0 that nodes have among their flags.
    pub ucx_lib_dir: Option<PathBuf>,
    /// Flags for every process.
    pub shared_args: Vec<String>,
    /// Flags for both kinds of nodes.
    pub node_args: Vec<String>,
    /// Flags for prefill nodes alone.
    pub prefill_args: Vec<String>,
    /// Flags for decode nodes alone.
    pub decode_args: Vec<String>,
    /// Flags for the router alone.
    pub router_args: Vec<String>,
    /// Start nothing, and say whether this would start.
    pub check: bool,
    /// Where all of this is from, if a process was started with it.
    pub sources: Option<Box<Resolved>>,
}

/// Where the router listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// As the user said; port 0: any.
    At(String),
    /// Nobody said anything: here, or where this is in use at the next port that is free.
    From(&'static str),
}

/// Without a word of the user: the port that most OpenAI servers take, and the one beside it.
const HTTP: &str = "127.0.0.1:8000";
const GRPC: &str = "127.0.0.1:8001";

impl Listen {
    fn new(asked: Option<String>, default: &'static str) -> Self {
        asked.map_or(Self::From(default), Self::At)
    }

    /// For the router's flag.
    pub fn address(&self) -> &str {
        match self {
            Self::At(address) => address,
            Self::From(address) => address,
        }
    }
}

/// Whether nodes get their own cores.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pinning {
    /// The CPUs are split between the nodes, which lend them to each other while they have nothing to do.
    LentCores,
    /// The CPUs are split between the nodes.
    OwnCores,
    /// The kernel decides.
    Free,
}

/// What happens when a child dies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum OnDeath {
    /// It is reported.
    Report,
    /// It is reported and started again.
    Restart,
}

/// Start a local cluster and keep it until Ctrl-C
#[derive(Args)]
pub struct UpArgs {
    /// Prefill nodes [default: 1, with --aggregated 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=64))]
    prefill: Option<u16>,
    /// Decode nodes [default: 1, with --aggregated 2: as many nodes as without]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    decode: Option<u16>,
    /// No prefill nodes: every decode node computes the prompts of its own requests. For comparison: the CPUs of both
    /// roles go to the decode nodes, so that `--aggregated --decode 2` has those of `--prefill 1 --decode 1`
    #[arg(long)]
    aggregated: bool,
    /// Routers. Each of them serves all clients with all nodes; the others have any free ports, which are printed
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=8))]
    routers: u16,
    /// Address of the OpenAI HTTP API; port 0 takes any free one [default: 127.0.0.1:8000, or the next free port]
    #[arg(long, value_name = "ADDR")]
    http: Option<String>,
    /// Address of the gRPC API; port 0 takes any free one [default: 127.0.0.1:8001, or the next free port]
    #[arg(long, value_name = "ADDR")]
    grpc: Option<String>,
    /// GGUF file or safetensors directory [default: the model of `make setup` in the cache directory]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// Where `make setup` puts the model [default: ~/.cache/tandem]
    #[arg(long, env = "TANDEM_CACHE", value_name = "DIR")]
    cache: Option<PathBuf>,
    /// One log file a process [default: a new directory below the system's temporary one]
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Let the kernel place the nodes, instead of splitting the CPUs between them
    #[arg(long)]
    no_pin: bool,
    /// Keep a node's cores for it alone, instead of lending them to the others while it has nothing to do
    #[arg(long)]
    no_lend: bool,
    /// Start a process again that died
    #[arg(long)]
    restart: bool,
    /// API keys of the clients, with rates and priorities: see the router's --help. Nodes then join on a port of their
    /// own, and the live page has one
    #[arg(long, value_name = "FILE|DIR|env:NAME")]
    api_keys: Option<PathBuf>,
    /// Secret by which nodes may join, from a file [default: a random one, made beside the state file and removed at
    /// the end]
    #[arg(long, value_name = "FILE")]
    join_token_file: Option<PathBuf>,
    /// Seconds that a process may take to start
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    start_timeout: u64,
    /// Seconds that running requests may take to finish at the end; what then still runs ends with an error, a few
    /// seconds later
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    grace: u64,
    #[command(flatten)]
    sources: ConfigArgs,
    #[command(flatten)]
    pass: PassThrough,
}

/// Flags that go on to the nodes and the router.
#[derive(Args)]
#[command(next_help_heading = "Passed on to the nodes and the router")]
struct PassThrough {
    /// What to compute on: the CPU, GPUs (cuda:N: all nodes on that one; cuda: the nodes take the GPUs in turn),
    /// or auto, GPUs where there are some
    #[arg(long, value_name = "cpu|cuda|cuda:N|auto", default_value_t)]
    device: DeviceChoice,
    /// KV data type
    #[arg(long, value_name = "bf16|int8|f32")]
    kv_dtype: Option<String>,
    /// Tokens of a KV block
    #[arg(long, value_name = "TOKENS", value_parser = ["16", "32", "64", "128"])]
    block_size: Option<String>,
    /// KV blocks of a node
    #[arg(long, value_name = "N")]
    kv_blocks: Option<usize>,
    /// Memory of a node's KV, instead of blocks: 2GiB, or a share such as 25% of what its model leaves
    #[arg(long, value_name = "SIZE", conflicts_with = "kv_blocks")]
    kv_memory: Option<String>,
    /// Compute every prompt as if it were the first
    #[arg(long)]
    no_prefix_caching: bool,
    /// Guess tokens from what followed the last ones before, and verify them beside the next one
    #[arg(long, value_name = "ngram|off", value_parser = ["ngram", "off"])]
    speculate: Option<String>,
    /// Instruction set of the compute kernels
    #[arg(long, value_name = "auto|amx|avx512|avx2|portable")]
    isa: Option<String>,
    /// Numbers to compute in: f32 gives the same bits on every machine, bf16 is faster; see the nodes' --help
    #[arg(long, value_name = "auto|f32|bf16")]
    arithmetic: Option<String>,
    /// Sequences of a running batch
    #[arg(long, value_name = "N")]
    max_num_seqs: Option<usize>,
    /// Tokens of a step
    #[arg(long, value_name = "N")]
    max_num_batched_tokens: Option<usize>,
    /// Threads of a node [default: its cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Nodes serve at once; the first requests are slower, and planned with a guess; see the nodes' --help
    #[arg(long)]
    skip_warm_up: bool,
    /// KV transports, the preferred one first [default: all that work here]
    #[arg(long, value_name = "auto|ucx|ucx/shm|ucx/rdma|ucx/tcp|tcp,…")]
    transport: Option<String>,
    /// What UCX may use
    #[arg(long, value_name = "shm|tcp|rdma")]
    ucx_profile: Option<String>,
    /// Network devices for KV over UCX, as UCX names them: mlx5_0:1 or eth0
    #[arg(long, value_name = "DEVICE,…")]
    kv_device: Option<String>,
    /// UCX's own transports instead of its profile's: rc,ud,self
    #[arg(long, value_name = "TLS,…")]
    ucx_tls: Option<String>,
    /// Encrypt KV over tcp; UCX then moves KV within the host only
    #[arg(long)]
    kv_encrypt: bool,
    /// Decode copies KV out of prefill's memory (auto), or KV goes through UCX's queue (off)
    #[arg(long, value_name = "auto|off")]
    kv_one_copy: Option<String>,
    /// Directory of libucp.so.0 [default: the system's]
    #[arg(long, value_name = "DIR")]
    ucx_lib_dir: Option<PathBuf>,
    /// OTLP/gRPC collector for spans, log lines and metrics
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Jaeger's pages, as http://host:16686: the live page, `tandem trace` and `tandem explain` link to them
    #[arg(long, value_name = "URL")]
    jaeger_ui: Option<String>,
    /// How lines of the logs look
    #[arg(long, value_name = "text|json", value_parser = ["text", "json"])]
    log_format: Option<String>,
    /// Name of the model in the APIs
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Nodes without a model: fast, and the tokens mean nothing; how fast: --prefill-arg and --decode-arg with
    /// --simulated-step-us=N, --simulated-token-us=N, --simulated-context-ns=N
    #[arg(long)]
    simulated: bool,
    /// One more flag for every prefill node; repeatable
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    prefill_arg: Vec<String>,
    /// One more flag for every decode node; repeatable
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    decode_arg: Vec<String>,
    /// One more flag for the router; repeatable
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    router_arg: Vec<String>,
}

impl UpArgs {
    /// Prefill and decode nodes.
    fn nodes(&self) -> anyhow::Result<(usize, usize)> {
        let (prefill, decode) = match (self.aggregated, self.prefill) {
            (false, Some(0)) => anyhow::bail!("--prefill 0: without prefill nodes a cluster is --aggregated"),
            (true, Some(1..)) => anyhow::bail!("--aggregated: there are no prefill nodes; leave --prefill out"),
            (false, prefill) => (prefill.unwrap_or(1), self.decode.unwrap_or(1)),
            (true, _) => (0, self.decode.unwrap_or(2)),
        };
        Ok((prefill.into(), decode.into()))
    }

    /// # Errors
    /// Flags that do not go together, no model.
    pub fn resolve(self, state: PathBuf) -> anyhow::Result<Up> {
        let (prefill, decode) = self.nodes()?;
        let model = default_model(self.model, self.cache)?;
        if !model.exists() {
            let model = model.display();
            anyhow::bail!(
                "no model at {model}: `make setup` downloads the default one, --model PATH takes a GGUF file or a directory"
            );
        }
        let logs = match self.log_dir {
            Some(logs) => logs,
            None => state::private_temp_dir()?.join(format!("logs-{}", std::process::id())),
        };
        let (mut shared_args, mut node_args) = self.pass.to_args();
        // Each process has its own tables in it.
        let file = self.sources.config.iter().map(|file| file.display().to_string());
        shared_args.extend(file.flat_map(|file| ["--config".to_owned(), file]));
        node_args.extend(["--model".to_owned(), model.display().to_string()]);
        let mut router_args = self.pass.router_arg;
        if self.pass.simulated && self.pass.device != DeviceChoice::Cpu {
            anyhow::bail!("--simulated nodes compute on no device; leave --device {} out", self.pass.device);
        }
        if self.aggregated {
            router_args.extend(["--local-prefill".to_owned(), "always".to_owned()]);
        }
        router_args.extend(self.pass.jaeger_ui.into_iter().flat_map(|url| ["--jaeger-ui".into(), url]));
        router_args
            .extend(self.pass.served_model_name.into_iter().flat_map(|name| ["--served-model-name".into(), name]));
        if let Some(keys) = self.api_keys {
            router_args.extend(["--api-keys".to_owned(), keys.display().to_string()]);
        }
        // Nodes have no keys, and the page is not clients'.
        if has_flag(&router_args, "--api-keys") {
            let missing = ["--nodes", "--admin"].into_iter().filter(|flag| !has_flag(&router_args, flag));
            let missing: Vec<&str> = missing.flat_map(|flag| [flag, "127.0.0.1:0"]).collect();
            router_args.extend(missing.into_iter().map(str::to_owned));
        }
        if self.routers > 1 {
            // The first one would have it, and the others would end.
            let taken = ["--nodes", "--admin"]
                .into_iter()
                .find(|flag| values(&router_args, flag).any(|address| !address.ends_with(":0")));
            if let Some(flag) = taken {
                anyhow::bail!("--routers {}: a fixed port in {flag} is one router's; take port 0", self.routers);
            }
        }
        if has_flag(&router_args, "--tls-cert") {
            anyhow::bail!(
                "`tandem up` starts its router without TLS: start tandem-router and the nodes by hand for --tls-cert"
            );
        }
        Ok(Up {
            prefill,
            decode,
            routers: self.routers.into(),
            http: Listen::new(self.http, HTTP),
            grpc: Listen::new(self.grpc, GRPC),
            model,
            state,
            logs,
            join_token_file: self.join_token_file,
            pinning: match (self.no_pin, self.no_lend) {
                (true, _) => Pinning::Free,
                (false, true) => Pinning::OwnCores,
                (false, false) => Pinning::LentCores,
            },
            on_death: if self.restart { OnDeath::Restart } else { OnDeath::Report },
            start_timeout: Duration::from_secs(self.start_timeout),
            grace: Duration::from_secs(self.grace),
            threads: self.pass.threads,
            device: self.pass.device,
            ucx_lib_dir: self.pass.ucx_lib_dir,
            shared_args,
            node_args,
            prefill_args: self.pass.prefill_arg,
            decode_args: self.pass.decode_arg,
            router_args,
            check: self.sources.check,
            sources: None,
        })
    }
}

impl PassThrough {
    /// Flags for every process, and flags for the nodes.
    fn to_args(&self) -> (Vec<String>, Vec<String>) {
        let mut shared = Vec::new();
        if let Some(url) = &self.otlp_endpoint {
            shared.extend(["--otlp-endpoint".to_owned(), url.clone()]);
        }
        if let Some(format) = &self.log_format {
            shared.extend(["--log-format".to_owned(), format.clone()]);
        }
        let number = |n: &Option<usize>| n.map(|n| n.to_string());
        let lib_dir = self.ucx_lib_dir.as_ref().map(|dir| dir.display().to_string());
        let pairs = [
            ("--kv-dtype", self.kv_dtype.clone()),
            ("--block-size", self.block_size.clone()),
            ("--kv-blocks", number(&self.kv_blocks)),
            ("--kv-memory", self.kv_memory.clone()),
            ("--speculate", self.speculate.clone()),
            ("--isa", self.isa.clone()),
            ("--arithmetic", self.arithmetic.clone()),
            ("--max-num-seqs", number(&self.max_num_seqs)),
            ("--max-num-batched-tokens", number(&self.max_num_batched_tokens)),
            ("--transport", self.transport.clone()),
            ("--ucx-profile", self.ucx_profile.clone()),
            ("--kv-device", self.kv_device.clone()),
            ("--ucx-tls", self.ucx_tls.clone()),
            ("--kv-one-copy", self.kv_one_copy.clone()),
            ("--ucx-lib-dir", lib_dir),
        ];
        let given = pairs.into_iter().filter_map(|(flag, value)| value.map(|value| [flag.to_owned(), value]));
        let switches = [
            ("--no-prefix-caching", self.no_prefix_caching),
            ("--skip-warm-up", self.skip_warm_up),
            ("--simulated", self.simulated),
            ("--kv-encrypt", self.kv_encrypt),
        ];
        let switches = switches.into_iter().filter(|(_, on)| *on).map(|(flag, _)| flag.to_owned());
        (shared, given.flatten().chain(switches).collect())
    }
}

/// The one that is named, else that of `make setup` in the cache.
///
/// # Errors
/// Nothing says where the cache is.
pub fn default_model(model: Option<PathBuf>, cache: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    match (model, cache) {
        (Some(model), _) => Ok(model),
        (None, Some(cache)) => Ok(cache.join(DEFAULT_MODEL)),
        (None, None) => {
            let home = std::env::home_dir().context("no home directory: give --model PATH or --cache DIR")?;
            Ok(home.join(".cache/tandem").join(DEFAULT_MODEL))
        }
    }
}

/// What the flag is given each time, in either form: `--flag value` or `--flag=value`.
pub fn values<'a>(args: &'a [String], flag: &'a str) -> impl Iterator<Item = &'a str> {
    args.iter().enumerate().filter_map(move |(at, arg)| match arg.strip_prefix(flag)? {
        "" => args.get(at + 1).map(String::as_str),
        rest => rest.strip_prefix('='),
    })
}

/// In either form, `--flag value` or `--flag=value`.
pub fn has_flag(args: &[String], flag: &str) -> bool {
    args.iter().any(|arg| arg.strip_prefix(flag).is_some_and(|rest| rest.is_empty() || rest.starts_with('=')))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tandem_proto::device::DeviceChoice;

    use super::super::{CommandLine, Config};
    use super::Listen;

    #[test]
    fn flags_reach_the_processes_they_are_for() {
        let model = tempfile::NamedTempFile::new().unwrap();
        let path = model.path().to_str().unwrap();
        let line = [
            "tandem",
            "up",
            "--model",
            path,
            "--kv-dtype",
            "f32",
            "--block-size",
            "32",
            "--kv-memory",
            "25%",
            "--speculate",
            "off",
            "--arithmetic",
            "f32",
            "--otlp-endpoint",
            "http://c:1",
            "--log-format",
            "json",
            "--simulated",
            "--prefill-arg=--debug-flip-byte",
            "--log-dir",
            "/nowhere/logs",
            "--threads",
            "3",
        ];
        let Config::Up(up) =
            CommandLine::try_parse_from(line).unwrap().command.resolve("/nowhere/state".into()).unwrap()
        else {
            panic!("not `up`");
        };
        assert_eq!(up.shared_args, ["--otlp-endpoint", "http://c:1", "--log-format", "json"]);
        let (flags, model) = up.node_args.split_at(11);
        let (kv, rest) = flags.split_at(4);
        assert_eq!(kv, ["--kv-dtype", "f32", "--block-size", "32"]);
        assert_eq!(rest, ["--kv-memory", "25%", "--speculate", "off", "--arithmetic", "f32", "--simulated"]);
        assert_eq!(model, ["--model", &up.model.display().to_string()]);
        assert_eq!(up.prefill_args, ["--debug-flip-byte"]);
        assert_eq!((up.prefill, up.decode, up.threads), (1, 1, Some(3)));
        assert_eq!(up.device, DeviceChoice::Cpu, "of which nothing need be said");
    }

    #[test]
    fn ports_are_fixed_where_nobody_says_otherwise() {
        let model = tempfile::NamedTempFile::new().unwrap();
        let ports = |flags: &str| {
            let line = ["tandem", "up", "--model", model.path().to_str().unwrap()].into_iter();
            let line = CommandLine::try_parse_from(line.chain(flags.split_whitespace())).unwrap();
            let Config::Up(up) = line.command.resolve("/nowhere/state".into()).unwrap() else { panic!("not `up`") };
            (up.http, up.grpc)
        };
        assert_eq!(ports(""), (Listen::From("127.0.0.1:8000"), Listen::From("127.0.0.1:8001")));
        assert_eq!(ports("--http 0.0.0.0:80"), (Listen::At("0.0.0.0:80".into()), Listen::From("127.0.0.1:8001")));
    }

    #[test]
    fn an_aggregated_cluster_has_decode_nodes_only() {
        let model = tempfile::NamedTempFile::new().unwrap();
        let up = |flags: &str| {
            let line = ["tandem", "up", "--model", model.path().to_str().unwrap()].into_iter();
            let line = CommandLine::try_parse_from(line.chain(flags.split_whitespace()))?;
            let Config::Up(up) = line.command.resolve("/nowhere/state".into())? else { panic!("not `up`") };
            anyhow::Ok((up.prefill, up.decode, up.router_args.join(" ")))
        };
        let (always, never) = ("--local-prefill always".to_owned(), String::new());
        assert_eq!(up("").unwrap(), (1, 1, never.clone()));
        assert_eq!(up("--prefill 2 --decode 3").unwrap(), (2, 3, never));
        assert_eq!(up("--aggregated").unwrap(), (0, 2, always.clone()));
        assert_eq!(up("--aggregated --prefill 0 --decode 4").unwrap(), (0, 4, always));
        assert!(up("--prefill 0").unwrap_err().to_string().contains("--aggregated"));
        assert!(up("--aggregated --prefill 1").unwrap_err().to_string().contains("no prefill nodes"));
        assert!(up("--decode 0").is_err());
    }

    #[test]
    fn with_api_keys_nodes_and_operators_have_ports_of_their_own() {
        let model = tempfile::NamedTempFile::new().unwrap();
        let router_args = |flags: &str| {
            let line = ["tandem", "up", "--model", model.path().to_str().unwrap()].into_iter();
            let line = CommandLine::try_parse_from(line.chain(flags.split_whitespace()))?;
            let Config::Up(up) = line.command.resolve("/nowhere/state".into())? else { panic!("not `up`") };
            anyhow::Ok(up.router_args.join(" "))
        };
        assert_eq!(router_args("").unwrap(), "");
        let with_keys = "--api-keys k.json --nodes 127.0.0.1:0 --admin 127.0.0.1:0";
        assert_eq!(router_args("--api-keys k.json").unwrap(), with_keys);
        assert_eq!(router_args("--router-arg=--api-keys --router-arg=k.json").unwrap(), with_keys);
        let chosen = "--router-arg=--api-keys=k.json --router-arg=--nodes=127.0.0.1:7";
        let with_page = "--api-keys=k.json --nodes=127.0.0.1:7 --admin 127.0.0.1:0";
        assert_eq!(router_args(chosen).unwrap(), with_page);
        assert!(router_args("--router-arg=--tls-cert=c.pem").unwrap_err().to_string().contains("without TLS"));
    }

    #[test]
    fn several_routers_share_no_port() {
        let model = tempfile::NamedTempFile::new().unwrap();
        let routers = |flags: &str| {
            let line = ["tandem", "up", "--model", model.path().to_str().unwrap()].into_iter();
            let line = CommandLine::try_parse_from(line.chain(flags.split_whitespace()))?;
            let Config::Up(up) = line.command.resolve("/nowhere/state".into())? else { panic!("not `up`") };
            anyhow::Ok(up.routers)
        };
        assert_eq!(routers("").unwrap(), 1);
        assert_eq!(routers("--routers 3 --api-keys k.json --router-arg=--admin=127.0.0.1:0").unwrap(), 3);
        let error = routers("--routers 2 --router-arg=--admin=127.0.0.1:9").unwrap_err().to_string();
        assert!(error.contains("--admin"), "{error}");
        assert_eq!(routers("--routers 1 --router-arg=--admin --router-arg=127.0.0.1:9").unwrap(), 1);
        assert!(routers("--routers 0").is_err());
    }

    #[test]
    fn a_device_is_named_for_all_nodes() {
        let model = tempfile::NamedTempFile::new().unwrap();
        let device = |flags: &str| {
            let line = ["tandem", "up", "--model", model.path().to_str().unwrap()].into_iter();
            let line = CommandLine::try_parse_from(line.chain(flags.split_whitespace()))?;
            let Config::Up(up) = line.command.resolve("/nowhere/state".into())? else { panic!("not `up`") };
            anyhow::Ok(up.device)
        };
        assert_eq!(device("--device cuda").unwrap(), DeviceChoice::Cuda(None));
        assert_eq!(device("--device auto").unwrap(), DeviceChoice::Auto);
        assert!(device("--device gpu").unwrap_err().to_string().contains("cuda:N"));
        assert!(device("--device auto --simulated").unwrap_err().to_string().contains("--device auto out"));
    }

    #[test]
    fn a_block_size_that_no_node_takes_is_refused() {
        let error = CommandLine::try_parse_from(["tandem", "up", "--block-size", "48"]).err().unwrap().to_string();
        assert!(error.contains("16, 32, 64, 128"), "{error}");
    }

    #[test]
    fn a_missing_model_says_what_to_run() {
        let line = ["tandem", "up", "--model", "/nowhere/m.gguf"];
        let error = CommandLine::try_parse_from(line).unwrap().command.resolve("/nowhere/state".into()).err().unwrap();
        assert!(error.to_string().contains("make setup"), "{error}");
    }
}
