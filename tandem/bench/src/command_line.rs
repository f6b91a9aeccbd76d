//! The command line of `tandem bench`: its flags, and how they become a [job](super::job).
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use tandem_client::connect::{Address, Headers, TlsArgs, with_scheme};
use tandem_client::state;

use super::arrivals::{Process, Rate};
use super::job::{Api, Asking, Bench, Endpoint, Report, Reporting, RowPlan, Run, TraceChoice, What};
use super::record::Objectives;
use super::rows::{Row, TRACE_ROW};
use super::runner::{Bounds, Form, Load};
use super::session::Loading;
use super::sweep;
use super::workload::{Lengths, Prefix, Shape};

/// Requests under way at most: each costs a connection.
const MAX_IN_FLIGHT: u32 = 65_536;
/// Own rows are called so.
const OWN_ROW: &str = "own";
/// Measured, and sent before that, unless told otherwise.
const SECONDS: f64 = 30.0;
const WARMUP_S: f64 = 3.0;
/// Requests of a trace unless told otherwise.
const TRACE_REQUESTS: usize = 200;

/// Load a server with requests and report latencies, throughput and goodput.
///
/// Measures the running `tandem up`, or any server with OpenAI's HTTP API (--url). Requests are sent at their intended
/// moments whether or not earlier ones are answered, and latencies count from those moments; with --concurrency a fixed
/// number is kept under way. Prompts are new to the server in every interval, except where a row shares prefixes on
/// purpose.
///
/// Rows: A short chat · B long prefill · C long decode · D mixed saturation · E shared prefix, cold and warm apart ·
/// F trace (a file with --trace, else made from the seed); or your own with --input and --output.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, verbatim_doc_comment)]
#[command(after_help = EXAMPLES)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: Option<BenchCommand>,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    work: WorkArgs,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    report: ReportArgs,
    /// Raw records, one JSON line each; `tandem bench report FILE` reads them
    #[arg(long, value_name = "FILE", help_heading = "What comes out")]
    records: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  tandem bench                                        row A against the running `tandem up`, 4 requests at once
  tandem bench --row A,B,E --rate 2 --seconds 60      three rows, Poisson arrivals, 2 a second
  tandem bench --input 512 --output 64 --sweep        where goodput breaks, by bisection
  tandem bench --trace mooncake.jsonl --trace-scale 32 --trace-speed 2
  tandem bench --url http://a:8000 --against http://b:8000 --row D --repeats 5 --html ab.html
  tandem bench report run.jsonl --html run.html";

#[derive(Subcommand)]
enum BenchCommand {
    /// Make the reports again, from the raw records
    Report {
        /// As --records wrote them
        records: PathBuf,
        #[command(flatten)]
        report: ReportArgs,
    },
}

#[derive(Args)]
#[command(next_help_heading = "The server")]
struct TargetArgs {
    /// The server: http://HOST:PORT for OpenAI's API, or grpc://HOST:PORT for Tandem's own; https:// and grpcs:// for
    /// TLS [default: the running `tandem up`]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// A second server: intervals go to the two in turn, and the report compares them
    #[arg(long, value_name = "URL")]
    against: Option<String>,
    /// Which API [default: grpc for `tandem up`, completions for http:// URLs]
    #[arg(long, value_enum)]
    api: Option<ApiName>,
    /// HTTP side of the grpc:// server, for model name and tokenizer
    #[arg(long, value_name = "URL")]
    http: Option<String>,
    /// The same of the second server
    #[arg(long, value_name = "URL", requires = "against")]
    against_http: Option<String>,
    /// Name of the model [default: the server's first]
    #[arg(long)]
    model: Option<String>,
    /// Sent as `authorization: Bearer KEY`; never written into reports
    #[arg(long, env = "TANDEM_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// Header (or gRPC metadata) `name: value` of every request; repeatable
    #[arg(long, value_name = "NAME: VALUE")]
    header: Vec<String>,
    #[command(flatten)]
    tls: TlsArgs,
    /// JSON object whose fields go into every HTTP body
    #[arg(long, value_name = "JSON")]
    extra_body: Option<String>,
    /// How prompts travel [default: ids over gRPC, text over HTTP]
    #[arg(long, value_enum)]
    prompt: Option<FormName>,
    /// Answers may end before the wanted length; for servers that do not know `ignore_eos`
    #[arg(long)]
    stop_at_eos: bool,
    /// gRPC connections; HTTP opens as many as there are requests at once
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    connections: u16,
    /// Seconds for one answer
    #[arg(long, default_value_t = 120.0, value_name = "SECONDS")]
    timeout: f64,
}

#[derive(Args)]
#[command(next_help_heading = "What to ask")]
struct WorkArgs {
    /// Rows, as letters A to F with commas [default: A, or your own]
    #[arg(long, value_delimiter = ',', value_name = "ROWS")]
    row: Vec<String>,
    /// Prompt tokens of your own row: N or N..M
    #[arg(long, value_name = "TOKENS", requires = "output")]
    input: Option<Lengths>,
    /// Tokens to generate of your own row: N or N..M
    #[arg(long, value_name = "TOKENS", requires = "input")]
    output: Option<Lengths>,
    /// Share of your own row's prompts that is common to a group, 0 to 1; measured cold and then warm
    #[arg(long, value_name = "SHARE", requires = "input")]
    prefix_reuse: Option<f64>,
    /// Groups of prompts with a common prefix
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    prefix_groups: u32,
    /// Trace of row F: Mooncake's JSON lines or Azure's CSV [default: made from the seed, like Mooncake's
    /// conversations]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Divide the trace's lengths, and its blocks of 512 tokens, by this (a power of two where there are blocks)
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    trace_scale: u32,
    /// Replay so many times as fast
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR")]
    trace_speed: f64,
    /// Leave out so many seconds at the trace's beginning
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS")]
    trace_from: f64,
    /// Replay so many requests at most
    #[arg(long, default_value_t = TRACE_REQUESTS, value_name = "N")]
    trace_requests: usize,
    /// Decides lengths and arrivals
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Decides contents [default: new ones in every run, so that no cache knows them]
    #[arg(long, value_name = "NUMBER")]
    salt: Option<u64>,
}

#[derive(Args)]
#[command(next_help_heading = "How much at once")]
struct LoadArgs {
    /// Open loop: requests a second, N or a ramp N..M; several with commas, one interval each
    #[arg(long, value_delimiter = ',', value_name = "RATE", conflicts_with_all = ["concurrency", "sweep"])]
    rate: Vec<String>,
    /// Closed loop: so many requests under way; several with commas [default: 4; B: 2, D: 32; F keeps its own times]
    #[arg(long, value_delimiter = ',', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536), conflicts_with = "sweep")]
    concurrency: Vec<u32>,
    /// Find the highest rate at which 90 % of the requests are good, beginning at RATE
    #[arg(long, value_name = "RATE", num_args = 0..=1, default_missing_value = "1")]
    sweep: Option<f64>,
    /// A sweep never goes beyond this rate
    #[arg(long, default_value_t = 10_000.0, value_name = "RATE")]
    sweep_max: f64,
    /// Open loop: how requests arrive
    #[arg(long, value_enum, default_value_t = ArrivalsName::Poisson)]
    arrivals: ArrivalsName,
    /// Of gamma arrivals: standard deviation of the gaps by their mean; above 1 is bursty
    #[arg(long, default_value_t = 2.0)]
    cv: f64,
    /// Seconds that are measured [default: 30]
    #[arg(long)]
    seconds: Option<f64>,
    /// Measure so many requests instead of seconds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    requests: Option<u64>,
    /// Seconds of the same load before the measurement [default: 3]
    #[arg(long, value_name = "SECONDS")]
    warmup: Option<f64>,
    /// Seconds that answers may take when nothing is sent any more; the rest counts as unfinished
    #[arg(long, default_value_t = 30.0, value_name = "SECONDS")]
    drain: f64,
    /// Every interval so many times; of a sweep, every rate [default: 1; 3 in a sweep]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    repeats: Option<u32>,
    /// Open loop: requests that wait for answers at most; more are not sent and count as failed
    #[arg(long, default_value_t = 4_096, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_IN_FLIGHT)))]
    max_in_flight: u32,
    /// Threads of the generator
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
}

#[derive(Args)]
#[command(next_help_heading = "What comes out")]
struct ReportArgs {
    /// A good answer has its first token within so many milliseconds …
    #[arg(long, default_value_t = 1_000.0, value_name = "MS")]
    ttft_ms: f64,
    /// … and further ones within so many each, in the mean
    #[arg(long, default_value_t = 100.0, value_name = "MS")]
    tpot_ms: f64,
    /// JSON with what is known of the server's hardware (weight_bytes, memory_gb_per_s, …), for predictions
    #[arg(long, value_name = "FILE")]
    hardware: Option<PathBuf>,
    /// Numbers as JSON, with vLLM's key names
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Numbers as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// One page with plots, for a browser without a network
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum ApiName {
    Grpc,
    Completions,
    Chat,
}

#[derive(Clone, Copy, ValueEnum)]
enum FormName {
    Text,
    Ids,
}

#[derive(Clone, Copy, ValueEnum)]
enum ArrivalsName {
    Poisson,
    Gamma,
    Constant,
}

impl BenchArgs {
    /// # Errors
    /// Numbers that make no sense; no URL and no running cluster.
    pub fn resolve(self, state: &Path) -> anyhow::Result<Bench> {
        if let Some(BenchCommand::Report { records, report }) = self.command {
            return Ok(Bench::Report(Report { records, report: report.resolve()? }));
        }
        let endpoints = self.target.endpoints(state)?;
        let process = self.load.process();
        let rows = self.work.rows()?;
        let loading = |what: What| {
            let loads = self.load.of_row(&what, process)?;
            anyhow::Ok(RowPlan { what, loads })
        };
        let rows = rows.into_iter().map(loading).collect::<anyhow::Result<_>>()?;
        Ok(Bench::Run(Box::new(Run {
            endpoints,
            rows,
            bounds: self.load.bounds(self.target.timeout)?,
            repeats: self.load.repeats.unwrap_or(1),
            seed: self.work.seed,
            salt: self.work.salt,
            threads: self.load.threads.into(),
            trace: self.work.trace_choice()?,
            asking: self.target.asking()?,
            report: self.report.resolve()?,
            records: self.records,
        })))
    }
}

impl TargetArgs {
    fn endpoints(&self, state: &Path) -> anyhow::Result<Vec<Endpoint>> {
        let first = match &self.url {
            Some(url) => self.endpoint(url, self.http.as_deref())?,
            None => self.running(state::load(state)?),
        };
        let second = self.against.as_deref().map(|url| self.endpoint(url, self.against_http.as_deref())).transpose()?;
        if let (Some(second), Some(_), Some(_)) = (&second, &self.url, &self.http)
            && second.http.is_none()
        {
            bail!("--http is the side of --url alone: give --against-http for {}", second.name);
        }
        Ok([first].into_iter().chain(second).collect())
    }

    fn running(&self, running: state::State) -> Endpoint {
        let api = match self.api.unwrap_or(ApiName::Grpc) {
            ApiName::Grpc => Api::Grpc(running.grpc),
            ApiName::Completions => Api::Completions(running.http.clone()),
            ApiName::Chat => Api::Chat(running.http.clone()),
        };
        Endpoint { name: api.url().to_owned(), api, http: Some(running.http), processes: running.processes }
    }

    fn endpoint(&self, url: &str, side: Option<&str>) -> anyhow::Result<Endpoint> {
        let api = match (Address::parse(url)?, self.api) {
            (Address::Grpc(grpc), None | Some(ApiName::Grpc)) => Api::Grpc(grpc),
            (Address::Grpc(_), Some(_)) => {
                bail!("{url} is a gRPC address: give the HTTP one for --api completions or chat")
            }
            (_, Some(ApiName::Grpc)) => bail!("{url} is an HTTP address: for --api grpc give grpc://HOST:PORT"),
            (Address::Http(http) | Address::Both { http, .. }, Some(ApiName::Chat)) => Api::Chat(http),
            (Address::Http(http) | Address::Both { http, .. }, None | Some(ApiName::Completions)) => {
                Api::Completions(http)
            }
        };
        let http = match &api {
            Api::Grpc(_) => side.map(with_scheme),
            Api::Completions(url) | Api::Chat(url) => Some(url.clone()),
        };
        Ok(Endpoint { name: api.url().to_owned(), api, http, processes: Vec::new() })
    }

    fn asking(self) -> anyhow::Result<Asking> {
        let headers = Headers::new(&self.header, self.api_key.as_deref())?;
        let extra = match &self.extra_body {
            Some(json) => serde_json::from_str(json).context("--extra-body is no JSON object")?,
            None => serde_json::Map::new(),
        };
        let form = self.prompt.map(|form| match form {
            FormName::Text => Form::Text,
            FormName::Ids => Form::Ids,
        });
        Ok(Asking {
            model: self.model,
            headers,
            tls: self.tls.resolve(),
            extra,
            form,
            ignore_eos: !self.stop_at_eos,
            connections: self.connections.into(),
        })
    }
}

impl WorkArgs {
    fn rows(&self) -> anyhow::Result<Vec<What>> {
        let mut rows = Vec::new();
        for name in &self.row {
            rows.push(match Row::named(name) {
                Some(row) => What::Matrix(row),
                None if name.eq_ignore_ascii_case(TRACE_ROW) => What::Trace,
                None => bail!("no row `{name}`: there are A to F, and your own with --input and --output"),
            });
        }
        if self.trace.is_some() && !rows.iter().any(|row| matches!(row, What::Trace)) {
            rows.push(What::Trace);
        }
        if let Some((input, output)) = self.input.zip(self.output) {
            let prefix = match self.prefix_reuse {
                Some(share) if (0.0..=1.0).contains(&share) => Some(Prefix { share, groups: self.prefix_groups }),
                Some(share) => bail!("--prefix-reuse is a share between 0 and 1, not {share}"),
                None => None,
            };
            let prefix = prefix.filter(|prefix| prefix.share > 0.0);
            rows.push(What::Own(OWN_ROW.to_owned(), Shape { input, output, prefix }));
        }
        if rows.is_empty() {
            rows.extend(Row::named("A").map(What::Matrix));
        }
        Ok(rows)
    }

    fn trace_choice(self) -> anyhow::Result<TraceChoice> {
        if !(self.trace_speed.is_finite() && self.trace_speed > 0.0) {
            bail!("--trace-speed is a factor above 0, not {}", self.trace_speed);
        }
        Ok(TraceChoice {
            file: self.trace,
            scale: self.trace_scale,
            speed: self.trace_speed,
            from_s: not_negative("--trace-from", self.trace_from)?,
            requests: self.trace_requests,
        })
    }
}

impl LoadArgs {
    fn process(&self) -> Process {
        match self.arrivals {
            ArrivalsName::Poisson => Process::Poisson,
            ArrivalsName::Gamma => Process::Gamma { cv: self.cv },
            ArrivalsName::Constant => Process::Constant,
        }
    }

    fn of_row(&self, what: &What, process: Process) -> anyhow::Result<Vec<Loading>> {
        if let Some(start_rate) = self.sweep {
            if matches!(what, What::Trace) {
                bail!("row F keeps its own times: a sweep of it is --trace-speed, one run each");
            }
            let start_rate = positive("--sweep", start_rate)?;
            let defaults = sweep::Settings::default();
            let settings = sweep::Settings {
                start_rate,
                max_rate: positive("--sweep-max", self.sweep_max)?.max(start_rate),
                repeats: self.repeats.unwrap_or(defaults.repeats),
                ..defaults
            };
            return Ok(vec![Loading::Sweep(process, settings)]);
        }
        let rates = self.rate.iter().map(|text| Ok(Loading::Fixed(Load::Rate(process, self.rate(text)?))));
        let slots = self.concurrency.iter().map(|slots| Ok(Loading::Fixed(Load::Concurrency(*slots))));
        let loads: Vec<Loading> = rates.chain(slots).collect::<anyhow::Result<_>>()?;
        Ok(match what {
            _ if !loads.is_empty() => loads,
            What::Matrix(row) => vec![Loading::Fixed(Load::Concurrency(row.concurrency))],
            What::Own(..) => vec![Loading::Fixed(Load::Concurrency(4))],
            What::Trace => {
                self.keep_to_the_trace()?;
                vec![Loading::Fixed(Load::Trace)]
            }
        })
    }

    /// Row F at its own times is as long as it is.
    fn keep_to_the_trace(&self) -> anyhow::Result<()> {
        let flags = [
            ("--requests", self.requests.is_some()),
            ("--seconds", self.seconds.is_some()),
            ("--warmup", self.warmup.is_some()),
        ];
        if let Some((flag, _)) = flags.into_iter().find(|(_, is_given)| *is_given) {
            bail!(
                "{flag} says nothing to row F, which keeps the trace's own times: --trace-requests, --trace-from and \
                 --trace-speed choose what is replayed; measure other rows in a run of their own, or give --rate"
            );
        }
        Ok(())
    }

    /// `N`, or `N..M` over the measured seconds.
    fn rate(&self, text: &str) -> anyhow::Result<Rate> {
        let number = |part: &str| {
            let number = part.trim().parse::<f64>().with_context(|| format!("--rate: `{part}` is no number"))?;
            positive("--rate", number)
        };
        Ok(match text.split_once("..") {
            Some((from, to)) => Rate { from: number(from)?, to: number(to)?, over_s: self.seconds.unwrap_or(SECONDS) },
            None => Rate::constant(number(text)?),
        })
    }

    fn bounds(&self, timeout_s: f64) -> anyhow::Result<Bounds> {
        let duration = |flag, seconds| {
            let seconds = not_negative(flag, seconds)?;
            Duration::try_from_secs_f64(seconds).ok().with_context(|| format!("{flag}: {seconds} s is too long"))
        };
        Ok(Bounds {
            warmup_s: not_negative("--warmup", self.warmup.unwrap_or(WARMUP_S))?,
            seconds: positive("--seconds", self.seconds.unwrap_or(SECONDS))?,
            requests: self.requests,
            drain: duration("--drain", self.drain)?,
            timeout: duration("--timeout", positive("--timeout", timeout_s)?)?,
            max_in_flight: self.max_in_flight as usize,
        })
    }
}

impl ReportArgs {
    fn resolve(self) -> anyhow::Result<Reporting> {
        let objectives =
            Objectives { ttft_ms: positive("--ttft-ms", self.ttft_ms)?, tpot_ms: positive("--tpot-ms", self.tpot_ms)? };
        Ok(Reporting { objectives, hardware: self.hardware, json: self.json, csv: self.csv, html: self.html })
    }
}

/// A day is enough for everything here, and no sum of such numbers overflows.
const MOST: f64 = 86_400.0 * 1e3;

fn positive(flag: &str, number: f64) -> anyhow::Result<f64> {
    if number > 0.0 && number <= MOST { Ok(number) } else { bail!("{flag} is a number above 0, not {number}") }
}

fn not_negative(flag: &str, number: f64) -> anyhow::Result<f64> {
    if (0.0..=MOST).contains(&number) { Ok(number) } else { bail!("{flag} is 0 or more, not {number}") }
}

#[cfg(test)]
mod tests;
