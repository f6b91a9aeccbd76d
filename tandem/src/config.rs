//! The command line and the environment, resolved once: the rest of the program sees only [`Config`].
//!
//! - [`bench`]: the part of `tandem bench`.
//!
//! Next: [`crate::up`], the largest command.
pub mod bench;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use tonic::metadata::AsciiMetadataValue;

use crate::state::{self, State};

/// File name of the model that `make setup` puts into the cache.
pub const DEFAULT_MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// What to do, with every default filled in.
pub enum Config {
    /// Run a local cluster.
    Up(Up),
    /// Stream the answer to one prompt.
    Generate(Generate),
    /// Talk.
    Chat(Chat),
    /// Draw a trace.
    Trace(Trace),
    /// Explain a choice of nodes.
    Explain(Explain),
    /// Measure.
    Bench(bench::Bench),
}

/// A local cluster.
pub struct Up {
    /// Prefill nodes; 0 when every decode node computes its own prompts.
    pub prefill: usize,
    /// Decode nodes.
    pub decode: usize,
    /// Address of the router's HTTP API; port 0: any.
    pub http: String,
    /// Address of the router's gRPC API; port 0: any.
    pub grpc: String,
    /// GGUF file or safetensors directory of the router; nodes have it among their flags.
    pub model: PathBuf,
    /// Where the state of the cluster is told to the other commands.
    pub state: PathBuf,
    /// One log file a process.
    pub logs: PathBuf,
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
}

/// Whether nodes get their own cores.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pinning {
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

/// One prompt.
pub struct Generate {
    /// Where, and how to sample.
    pub options: Sampling,
    /// The prompt.
    pub text: String,
}

/// A conversation.
pub struct Chat {
    /// Where, and how to sample.
    pub options: Sampling,
    /// One message, or none: read them from the terminal.
    pub message: Option<String>,
    /// The system message, where one is given.
    pub system: Option<String>,
}

/// How to ask.
pub struct Sampling {
    /// The router's gRPC URL.
    pub url: String,
    /// The running `tandem up`, where there is one: for hints.
    pub cluster: Option<State>,
    /// Sent with every request.
    pub authorization: Option<AsciiMetadataValue>,
    /// At most so many tokens.
    pub max_tokens: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// 1: off.
    pub top_p: f32,
    /// 0: off.
    pub top_k: u32,
    /// 0: off.
    pub min_p: f32,
    /// 1: off.
    pub repetition_penalty: f32,
    /// 0: off.
    pub presence_penalty: f32,
    /// 0: off.
    pub frequency_penalty: f32,
    /// No end before so many tokens.
    pub min_tokens: u32,
    /// Go on after the end-of-sequence token.
    pub ignore_eos: bool,
    /// Of the sampler.
    pub seed: u64,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Bound of the whole answer.
    pub timeout: Duration,
}

/// One trace.
pub struct Trace {
    /// The router's HTTP URL.
    pub url: String,
    /// Trace id, or `last`.
    pub id: String,
    /// Columns to draw in.
    pub width: usize,
}

/// Why one request went where it went.
pub struct Explain {
    /// The router's HTTP URL.
    pub url: String,
    /// Trace id, or `last`.
    pub id: String,
}

impl Config {
    /// Parses the process's arguments; ends the process for `--help` and wrong flags, as clap does.
    pub fn from_command_line() -> anyhow::Result<Self> {
        let mut arguments = without_empty_variables(CommandLine::command()).get_matches();
        let CommandLine { command, state } =
            CommandLine::from_arg_matches_mut(&mut arguments).unwrap_or_else(|error| error.exit());
        let state = match state {
            Some(path) => path,
            None => state::default_path(runtime_dir()?),
        };
        command.resolve(state)
    }
}

/// `TANDEM_STATE= tandem …` is as without the variable; clap takes an empty one for a value.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |name: &OsStr| std::env::var_os(name).is_some_and(|value| value.is_empty());
    let without = |arg: Arg| if arg.get_env().is_some_and(is_empty) { arg.env(None) } else { arg };
    command.mut_args(without).mut_subcommands(without_empty_variables)
}

#[derive(Parser)]
#[command(
    name = "tandem",
    version,
    about = "Starts a local Tandem cluster, talks to it, draws its traces, measures it"
)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
    /// File by which `up` tells the other commands where the cluster is
    #[arg(long, global = true, env = "TANDEM_STATE", value_name = "FILE")]
    state: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Command {
    /// Start a local cluster and keep it until Ctrl-C
    Up(Box<UpArgs>),
    /// Stream the answer to one prompt
    Generate(GenerateArgs),
    /// Talk with the model; without a message, line by line from the terminal
    Chat(ChatArgs),
    /// Draw the timeline of a request
    Trace(TraceArgs),
    /// Say why a request went to its nodes: all candidates in predicted milliseconds, and what then happened
    Explain(ExplainArgs),
    // What it is stands above its arguments.
    Bench(Box<bench::BenchArgs>),
}

#[derive(Args)]
struct UpArgs {
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
    /// Address of the OpenAI HTTP API (port 0: any free one)
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDR")]
    http: String,
    /// Address of the gRPC API (port 0: any free one)
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDR")]
    grpc: String,
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
    /// Start a process again that died
    #[arg(long)]
    restart: bool,
    /// API keys of the clients, with rates and priorities: see the router's --help. Nodes then join on a port of their own
    #[arg(long, value_name = "FILE")]
    api_keys: Option<PathBuf>,
    /// Seconds that a process may take to start
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    start_timeout: u64,
    /// Seconds that running requests may take to finish at the end
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    grace: u64,
    #[command(flatten)]
    pass: PassThrough,
}

/// Flags that go on to the nodes and the router.
#[derive(Args)]
#[command(next_help_heading = "Passed on to the nodes and the router")]
struct PassThrough {
    /// KV data type
    #[arg(long, value_name = "bf16|int8|f32")]
    kv_dtype: Option<String>,
    /// Tokens of a KV block
    #[arg(long, value_name = "TOKENS", value_parser = ["16", "32", "64", "128"])]
    block_size: Option<String>,
    /// KV blocks of a node
    #[arg(long, value_name = "N")]
    kv_blocks: Option<usize>,
    /// Memory of a node's KV, instead of blocks: 2GiB, or a share of the machine's such as 25%
    #[arg(long, value_name = "SIZE", conflicts_with = "kv_blocks")]
    kv_memory: Option<String>,
    /// Compute every prompt as if it were the first
    #[arg(long)]
    no_prefix_caching: bool,
    /// Instruction set of the compute kernels
    #[arg(long, value_name = "auto|amx|avx512|avx2|portable")]
    isa: Option<String>,
    /// The same bits whatever else is in the batch; `false` is faster, see the nodes' --help [default: true]
    #[arg(long, value_name = "BOOL")]
    batch_invariant: Option<bool>,
    /// Sequences of a running batch
    #[arg(long, value_name = "N")]
    max_num_seqs: Option<usize>,
    /// Tokens of a step
    #[arg(long, value_name = "N")]
    max_num_batched_tokens: Option<usize>,
    /// Threads of a node [default: its cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// KV transport
    #[arg(long, value_name = "auto|ucx|tcp")]
    transport: Option<String>,
    /// What UCX may use
    #[arg(long, value_name = "shm|tcp|rdma")]
    ucx_profile: Option<String>,
    /// Directory of libucp.so.0 [default: the system's]
    #[arg(long, value_name = "DIR")]
    ucx_lib_dir: Option<PathBuf>,
    /// OTLP/gRPC collector for the traces
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Name of the model in the APIs
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Nodes without a model: fast, and the tokens mean nothing; how fast: --prefill-arg and --decode-arg with --simulated-step-us=N,
    /// --simulated-token-us=N, --simulated-context-ns=N
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

#[derive(Args)]
struct SamplingArgs {
    /// The router's gRPC address [default: that of the running `tandem up`]
    #[arg(long, visible_alias = "grpc", value_name = "URL")]
    url: Option<String>,
    /// Sent as `authorization: Bearer KEY`
    #[arg(long, env = "TANDEM_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// Tokens to generate at most
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Nucleus sampling; 1: off
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Sample of the best k only; 0: off
    #[arg(long, default_value_t = 0)]
    top_k: u32,
    /// Cut off tokens with less than this share of the likeliest one's probability; 0: off
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Against tokens of prompt and answer, above 1; 1: off
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Against tokens of the answer, -2 to 2
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Against tokens of the answer, for each time that they are in it; -2 to 2
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// No end of the answer before so many tokens
    #[arg(long, default_value_t = 0)]
    min_tokens: u32,
    /// Go on after the end-of-sequence token
    #[arg(long)]
    ignore_eos: bool,
    /// Seed of the sampler
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// String that ends the answer; repeatable
    #[arg(long)]
    stop: Vec<String>,
    /// Seconds for the whole answer
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    timeout: u64,
}

#[derive(Args)]
struct GenerateArgs {
    /// The prompt; `-` reads it from standard input
    text: String,
    #[command(flatten)]
    sampling: SamplingArgs,
}

#[derive(Args)]
struct ChatArgs {
    /// One message; without it, a conversation
    message: Option<String>,
    /// System message
    #[arg(long)]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
}

#[derive(Args)]
struct TraceArgs {
    /// Trace id, or `last`
    #[arg(default_value = "last")]
    id: String,
    /// The router's HTTP address [default: that of the running `tandem up`]
    #[arg(long, visible_alias = "http", value_name = "URL")]
    url: Option<String>,
    /// Columns to draw in
    #[arg(long, env = "COLUMNS", default_value_t = 120)]
    width: usize,
}

#[derive(Args)]
struct ExplainArgs {
    /// Trace id, or `last`
    #[arg(default_value = "last")]
    id: String,
    /// The router's HTTP address [default: that of the running `tandem up`]
    #[arg(long, visible_alias = "http", value_name = "URL")]
    url: Option<String>,
}

/// The router's HTTP URL: as given, or that of the running `tandem up`.
fn http_url(url: Option<String>, state: &std::path::Path) -> anyhow::Result<String> {
    match url {
        Some(url) => Ok(with_scheme(&url)),
        None => Ok(state::load(state)?.http),
    }
}

impl Command {
    fn resolve(self, state: PathBuf) -> anyhow::Result<Config> {
        Ok(match self {
            Self::Up(args) => Config::Up(args.resolve(state)?),
            Self::Generate(GenerateArgs { text, sampling }) => {
                let text = if text == "-" { std::io::read_to_string(std::io::stdin())? } else { text };
                Config::Generate(Generate { options: sampling.resolve(&state)?, text })
            }
            Self::Chat(ChatArgs { message, system, sampling }) => {
                Config::Chat(Chat { options: sampling.resolve(&state)?, message, system })
            }
            Self::Trace(TraceArgs { id, url, width }) => {
                Config::Trace(Trace { url: http_url(url, &state)?, id, width })
            }
            Self::Explain(ExplainArgs { id, url }) => Config::Explain(Explain { url: http_url(url, &state)?, id }),
            Self::Bench(args) => Config::Bench(args.resolve(&state)?),
        })
    }
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

    fn resolve(self, state: PathBuf) -> anyhow::Result<Up> {
        let (prefill, decode) = self.nodes()?;
        let model = match (self.model, self.cache) {
            (Some(model), _) => model,
            (None, Some(cache)) => cache.join(DEFAULT_MODEL),
            (None, None) => {
                let home = std::env::home_dir().context("no home directory: give --model PATH or --cache DIR")?;
                home.join(".cache/tandem").join(DEFAULT_MODEL)
            }
        };
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
        let (shared_args, mut node_args) = self.pass.to_args();
        node_args.extend(["--model".to_owned(), model.display().to_string()]);
        let mut router_args = self.pass.router_arg;
        if self.aggregated {
            router_args.extend(["--local-prefill".to_owned(), "always".to_owned()]);
        }
        router_args
            .extend(self.pass.served_model_name.into_iter().flat_map(|name| ["--served-model-name".into(), name]));
        if let Some(keys) = self.api_keys {
            router_args.extend(["--api-keys".to_owned(), keys.display().to_string()]);
        }
        // Nodes have no keys.
        if has_flag(&router_args, "--api-keys") && !has_flag(&router_args, "--nodes") {
            router_args.extend(["--nodes", "127.0.0.1:0"].map(str::to_owned));
        }
        if has_flag(&router_args, "--tls-cert") {
            anyhow::bail!(
                "`tandem up` starts its router without TLS: start tandem-router and the nodes by hand for --tls-cert"
            );
        }
        Ok(Up {
            prefill,
            decode,
            http: self.http,
            grpc: self.grpc,
            model,
            state,
            logs,
            pinning: if self.no_pin { Pinning::Free } else { Pinning::OwnCores },
            on_death: if self.restart { OnDeath::Restart } else { OnDeath::Report },
            start_timeout: Duration::from_secs(self.start_timeout),
            grace: Duration::from_secs(self.grace),
            threads: self.pass.threads,
            shared_args,
            node_args,
            prefill_args: self.pass.prefill_arg,
            decode_args: self.pass.decode_arg,
            router_args,
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
        let number = |n: &Option<usize>| n.map(|n| n.to_string());
        let lib_dir = self.ucx_lib_dir.as_ref().map(|dir| dir.display().to_string());
        let pairs = [
            ("--kv-dtype", self.kv_dtype.clone()),
            ("--block-size", self.block_size.clone()),
            ("--kv-blocks", number(&self.kv_blocks)),
            ("--kv-memory", self.kv_memory.clone()),
            ("--isa", self.isa.clone()),
            ("--batch-invariant", self.batch_invariant.map(|on| on.to_string())),
            ("--max-num-seqs", number(&self.max_num_seqs)),
            ("--max-num-batched-tokens", number(&self.max_num_batched_tokens)),
            ("--transport", self.transport.clone()),
            ("--ucx-profile", self.ucx_profile.clone()),
            ("--ucx-lib-dir", lib_dir),
        ];
        let given = pairs.into_iter().filter_map(|(flag, value)| value.map(|value| [flag.to_owned(), value]));
        let switches = [("--no-prefix-caching", self.no_prefix_caching), ("--simulated", self.simulated)];
        let switches = switches.into_iter().filter(|(_, on)| *on).map(|(flag, _)| flag.to_owned());
        (shared, given.flatten().chain(switches).collect())
    }
}

/// The metadata of an API key, which no log prints.
fn bearer(key: &str) -> anyhow::Result<AsciiMetadataValue> {
    let value: Result<AsciiMetadataValue, _> = format!("Bearer {key}").parse();
    let mut value = value.context("--api-key has characters that no header may have")?;
    value.set_sensitive(true);
    Ok(value)
}

impl SamplingArgs {
    fn resolve(self, state: &std::path::Path) -> anyhow::Result<Sampling> {
        let (url, cluster) = match self.url {
            Some(url) => (with_scheme(&url), state::load(state).ok()),
            None => {
                let cluster = state::load(state)?;
                (cluster.grpc.clone(), Some(cluster))
            }
        };
        Ok(Sampling {
            url,
            cluster,
            authorization: self.api_key.as_deref().map(bearer).transpose()?,
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos,
            seed: self.seed,
            stop: self.stop,
            timeout: Duration::from_secs(self.timeout),
        })
    }
}

/// The runtime directory is read through clap like every other setting.
#[derive(Parser)]
#[command(ignore_errors = true, disable_help_flag = true)]
struct Environment {
    #[arg(long, env = "XDG_RUNTIME_DIR")]
    runtime_dir: Option<PathBuf>,
}

fn runtime_dir() -> anyhow::Result<PathBuf> {
    match Environment::try_parse_from(["tandem"]).ok().and_then(|environment| environment.runtime_dir) {
        Some(dir) if dir.is_dir() => Ok(dir),
        _ => state::private_temp_dir(),
    }
}

/// In either form, `--flag value` or `--flag=value`.
fn has_flag(args: &[String], flag: &str) -> bool {
    args.iter().any(|arg| arg.strip_prefix(flag).is_some_and(|rest| rest.is_empty() || rest.starts_with('=')))
}

/// `host:port` becomes `http://host:port`.
pub fn with_scheme(address: &str) -> String {
    if address.contains("://") { address.trim_end_matches('/').to_owned() } else { format!("http://{address}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        CommandLine::command().debug_assert();
    }

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
            "--batch-invariant",
            "false",
            "--otlp-endpoint",
            "http://c:1",
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
        assert_eq!(up.shared_args, ["--otlp-endpoint", "http://c:1"]);
        let (flags, model) = up.node_args.split_at(9);
        let (kv, rest) = flags.split_at(4);
        assert_eq!(kv, ["--kv-dtype", "f32", "--block-size", "32"]);
        assert_eq!(rest, ["--kv-memory", "25%", "--batch-invariant", "false", "--simulated"]);
        assert_eq!(model, ["--model", &up.model.display().to_string()]);
        assert_eq!(up.prefill_args, ["--debug-flip-byte"]);
        assert_eq!((up.prefill, up.decode, up.threads), (1, 1, Some(3)));
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
    fn with_api_keys_nodes_have_a_port_of_their_own() {
        let model = tempfile::NamedTempFile::new().unwrap();
        let router_args = |flags: &str| {
            let line = ["tandem", "up", "--model", model.path().to_str().unwrap()].into_iter();
            let line = CommandLine::try_parse_from(line.chain(flags.split_whitespace()))?;
            let Config::Up(up) = line.command.resolve("/nowhere/state".into())? else { panic!("not `up`") };
            anyhow::Ok(up.router_args.join(" "))
        };
        assert_eq!(router_args("").unwrap(), "");
        let with_keys = "--api-keys k.json --nodes 127.0.0.1:0";
        assert_eq!(router_args("--api-keys k.json").unwrap(), with_keys);
        assert_eq!(router_args("--router-arg=--api-keys --router-arg=k.json").unwrap(), with_keys);
        let chosen = "--router-arg=--api-keys=k.json --router-arg=--nodes=127.0.0.1:7";
        assert_eq!(router_args(chosen).unwrap(), "--api-keys=k.json --nodes=127.0.0.1:7");
        assert!(router_args("--router-arg=--tls-cert=c.pem").unwrap_err().to_string().contains("without TLS"));
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

    #[test]
    fn addresses_get_a_scheme_once() {
        assert_eq!(with_scheme("127.0.0.1:1"), "http://127.0.0.1:1");
        assert_eq!(with_scheme("http://127.0.0.1:1/"), "http://127.0.0.1:1");
    }
}
