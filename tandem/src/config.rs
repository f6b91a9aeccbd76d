//! The command line and the environment, resolved once: the rest of the program sees only [`Config`].
//!
//! - [`up`]: the part of `tandem up`. [`compose`]: that of `tandem compose`. [`doctor`]: that of `tandem doctor`. That
//!   of `tandem bench` is [`BenchArgs`].
//!
//! Next: [`crate::up`], the largest command.
pub mod compose;
pub mod doctor;
pub mod up;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use tandem_bench::{Bench, BenchArgs};
use tandem_client::connect::{Address, Headers, Router, TlsArgs};
use tandem_client::state::{self, State};
use tandem_config::shell::Shell;
use tandem_config::{Resolved, UP};

/// What to do, with every default filled in.
pub enum Config {
    /// Run a local cluster.
    Up(up::Up),
    /// Stream the answer to one prompt.
    Generate(Generate),
    /// Talk.
    Chat(Chat),
    /// Draw a trace.
    Trace(Trace),
    /// Explain a choice of nodes.
    Explain(Explain),
    /// Show the cluster.
    Top(Top),
    /// Measure.
    Bench(Bench),
    /// Write a compose file.
    Compose(compose::Compose),
    /// Look at this machine.
    Doctor(doctor::Doctor),
    /// Write a shell's completions.
    Completions(Shell),
    /// Write man pages into this directory.
    Man(PathBuf),
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
    /// Whom.
    pub router: Router,
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
    /// Which router has it.
    pub router: Router,
    /// Trace id, or `last`.
    pub id: String,
    /// Columns to draw in.
    pub width: usize,
}

/// Why one request went where it went.
pub struct Explain {
    /// Which router has it.
    pub router: Router,
    /// Trace id, or `last`.
    pub id: String,
}

/// The cluster over the whole terminal.
pub struct Top {
    /// Where its live page is.
    pub router: Router,
}

impl Config {
    /// Parses the process's arguments, for `up` beside variables and a file; ends the process for `--help` and wrong
    /// flags, as clap does.
    pub fn from_command_line() -> anyhow::Result<Self> {
        let (words, environment) = (std::env::args_os().collect(), std::env::vars_os().collect());
        let resolved = Resolved::of(UP, without_empty_variables(command()), words, environment);
        let resolved = resolved.unwrap_or_else(|refused| refused.exit());
        let parsed = CommandLine::from_arg_matches(resolved.matches());
        let CommandLine { command, state } = parsed.unwrap_or_else(|error| error.exit());
        let state = match state {
            Some(path) => path,
            None => state::default_path(runtime_dir()?),
        };
        let mut config = command.resolve(state)?;
        if let Self::Up(up) = &mut config {
            up.sources = Some(Box::new(resolved));
        }
        Ok(config)
    }
}

/// The command line, as clap has it.
pub fn command() -> clap::Command {
    CommandLine::command()
}

/// `TANDEM_STATE= tandem …` is as without the variable; clap takes an empty one for a value.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |name: &OsStr| std::env::var_os(name).is_some_and(|value| value.is_empty());
    let without = |arg: Arg| if arg.get_env().is_some_and(is_empty) { arg.env(None) } else { arg };
    command.mut_args(without).mut_subcommands(without_empty_variables)
}

/// Below the flags, in `--help` and in the man page.
const AFTER: &str = "\
Exit codes: 0 done; 1 an error, which is the last line on standard error, or for `doctor`: something is lacking; 2 \
wrong flags, variables or configuration file; 130 `bench` was ended by a second Ctrl-C; 141 the reader of the output \
went away.";

#[derive(Parser)]
#[command(
    name = "tandem",
    version,
    about = "Starts a local Tandem cluster, talks to it, draws its traces, measures it",
    after_long_help = AFTER
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
    // What it is stands above its arguments.
    Up(Box<up::UpArgs>),
    /// Stream the answer to one prompt
    Generate(GenerateArgs),
    /// Talk with the model; without a message, line by line from the terminal
    Chat(ChatArgs),
    /// Draw the timeline of a request
    Trace(TraceArgs),
    /// Explain why a request went to its nodes: all candidates in predicted milliseconds, and what then happened
    Explain(ExplainArgs),
    /// Show the cluster as it is now: nodes, KV, links, recent requests
    Top(TopArgs),
    Bench(Box<BenchArgs>),
    Compose(compose::ComposeArgs),
    Doctor(doctor::DoctorArgs),
    /// Write the script that makes a shell complete commands and flags
    ///
    /// bash: tandem completions bash > ~/.local/share/bash-completion/completions/tandem
    Completions {
        /// Which shell
        shell: Shell,
    },
    /// Write man pages, one of each command, into a directory
    ///
    /// tandem man ~/.local/share/man/man1
    Man {
        /// Made when missing
        dir: PathBuf,
    },
}

/// How to reach the router.
#[derive(Args)]
#[command(next_help_heading = "The router")]
struct RouterArgs {
    /// The router: http://HOST:PORT, or grpc://HOST:PORT for its gRPC port; https:// and grpcs:// for TLS [default: the
    /// running `tandem up`]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Sent as `authorization: Bearer KEY`
    #[arg(long, env = "TANDEM_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// Header (or gRPC metadata) `name: value` of every request; repeatable
    #[arg(long, value_name = "NAME: VALUE")]
    header: Vec<String>,
    #[command(flatten)]
    tls: TlsArgs,
}

impl RouterArgs {
    /// The router that is named, or that of the running `tandem up`.
    ///
    /// # Errors
    /// Neither is there, or headers that cannot be sent.
    fn resolve(self, state: &std::path::Path) -> anyhow::Result<Router> {
        let (address, cluster) = match self.url {
            Some(url) => (Address::parse(&url)?, state::load(state).ok()),
            None => {
                let cluster = state::load(state)?;
                let State { http, grpc, .. } = cluster.clone();
                (Address::Both { http, grpc }, Some(cluster))
            }
        };
        let headers = Headers::new(&self.header, self.api_key.as_deref())?;
        Ok(Router { address, cluster, headers, tls: self.tls.resolve() })
    }
}

#[derive(Args)]
struct SamplingArgs {
    /// Tokens to generate at most
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// 0 is greedy
    #[arg(long, value_name = "NUMBER", default_value_t = 0.0)]
    temperature: f32,
    /// Nucleus sampling; 1: off
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    top_p: f32,
    /// Sample of the best k only; 0: off
    #[arg(long, value_name = "N", default_value_t = 0)]
    top_k: u32,
    /// Cut off tokens with less than this share of the likeliest one's probability; 0: off
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    min_p: f32,
    /// Against tokens of prompt and answer, above 1; 1: off
    #[arg(long, value_name = "NUMBER", default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Against tokens of the answer, -2 to 2
    #[arg(long, value_name = "NUMBER", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Against tokens of the answer, for each time that they are in it; -2 to 2
    #[arg(long, value_name = "NUMBER", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// No end of the answer before so many tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    min_tokens: u32,
    /// Continue after the end-of-sequence token
    #[arg(long)]
    ignore_eos: bool,
    /// Seed of the sampler
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    seed: u64,
    /// String that ends the answer; repeatable
    #[arg(long, value_name = "TEXT")]
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
    #[command(flatten)]
    router: RouterArgs,
}

#[derive(Args)]
struct ChatArgs {
    /// One message; without it, a conversation
    message: Option<String>,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    router: RouterArgs,
}

#[derive(Args)]
struct TraceArgs {
    /// Trace id, or `last`
    #[arg(default_value = "last")]
    id: String,
    /// Columns to draw in
    #[arg(long, value_name = "COLUMNS", env = "COLUMNS", default_value_t = 120)]
    width: usize,
    #[command(flatten)]
    router: RouterArgs,
}

#[derive(Args)]
struct ExplainArgs {
    /// Trace id, or `last`
    #[arg(default_value = "last")]
    id: String,
    #[command(flatten)]
    router: RouterArgs,
}

#[derive(Args)]
struct TopArgs {
    #[command(flatten)]
    router: RouterArgs,
}

impl TopArgs {
    fn resolve(self, state: &std::path::Path) -> anyhow::Result<Top> {
        let running = self.router.url.is_none();
        let mut router = self.router.resolve(state)?;
        // The page is at the admin port where the router has one. A cluster of an earlier version has no page, and says
        // so.
        let page = router.cluster.as_ref().map(|cluster| cluster.page.clone()).filter(|page| !page.is_empty());
        if let Some(page) = page.filter(|_| running) {
            router.address = Address::Http(page);
        }
        Ok(Top { router })
    }
}

impl Command {
    fn resolve(self, state: PathBuf) -> anyhow::Result<Config> {
        Ok(match self {
            Self::Up(args) => Config::Up(args.resolve(state)?),
            Self::Generate(GenerateArgs { text, sampling, router }) => {
                let options = sampling.resolve(router.resolve(&state)?);
                let text = if text == "-" { std::io::read_to_string(std::io::stdin())? } else { text };
                Config::Generate(Generate { options, text })
            }
            Self::Chat(ChatArgs { message, system, sampling, router }) => {
                Config::Chat(Chat { options: sampling.resolve(router.resolve(&state)?), message, system })
            }
            Self::Trace(TraceArgs { id, width, router }) => {
                Config::Trace(Trace { router: router.resolve(&state)?, id, width })
            }
            Self::Explain(ExplainArgs { id, router }) => {
                Config::Explain(Explain { router: router.resolve(&state)?, id })
            }
            Self::Top(args) => Config::Top(args.resolve(&state)?),
            Self::Bench(args) => Config::Bench(args.resolve(&state)?),
            Self::Compose(args) => Config::Compose(args.resolve()?),
            Self::Doctor(args) => Config::Doctor(args.resolve()?),
            Self::Completions { shell } => Config::Completions(shell),
            Self::Man { dir } => Config::Man(dir),
        })
    }
}

impl SamplingArgs {
    fn resolve(self, router: Router) -> Sampling {
        Sampling {
            router,
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
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        CommandLine::command().debug_assert();
    }
}
