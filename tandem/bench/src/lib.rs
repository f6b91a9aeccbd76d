//! `tandem bench`: loads a server and says what it did. This file is the life of a run: connect, measure, report. Owns
//! no part of serving, and knows routers only as a client does.
//!
//! - [`command_line`]: the flags; [`job`]: what they come to.
//!
//! What is asked, all pure and seeded:
//! - [`arrivals`]: when; [`workload`]: how long, and what is shared; [`rows`]: the matrix A to F; [`trace`]: recorded
//!   traffic; [`piece`]s become words in [`prompt`]; [`seed`]: where randomness comes from.
//!
//! Asking:
//! - [`setup`]: from the command line to connected [`server`]s whose tokens are counted right ([`calibrate`]).
//! - [`session`]: the order of intervals; [`runner`]: one interval; [`client`]: one request; [`metronome`]: its moment.
//! - [`progress`], [`machine`]: for the terminal and for the report's head.
//!
//! What comes of it:
//! - [`record`]: what a run leaves behind, the one form that the two halves share; [`recording`]: the same as a file.
//!   [`file_error`]: why a recording or a trace cannot be read. [`cost_model`]: what is known of the server's speed.
//! - [`stats`]: what a client saw, as numbers; [`sweep`] chooses the rates that find the knee of goodput.
//! - [`report`]: the numbers as text, JSON, CSV and a page.
#![forbid(unsafe_code)]
// They panic where nobody reads: `tandem_client::terminal` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod arrivals;
mod calibrate;
mod client;
mod command_line;
mod cost_model;
mod file_error;
mod job;
mod machine;
mod metronome;
mod piece;
mod progress;
mod prompt;
mod record;
mod recording;
mod report;
mod rows;
mod runner;
mod seed;
mod server;
mod session;
mod setup;
mod stats;
mod sweep;
#[cfg(test)]
mod tests;
mod trace;
mod workload;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use tandem_client::terminal::{print, say};
use tokio_util::sync::CancellationToken;

pub use self::command_line::BenchArgs;
use self::cost_model::Model;
pub use self::job::Bench;
use self::job::Reporting;
use self::metronome::Clock;
use self::progress::Progress;
use self::record::{Interval, Run, RunInfo};
use self::recording::Recorder;
use self::runner::{Load, Part, Watch};
use self::session::{Session, Terms};
use self::setup::Connected;
use self::stats::Distribution;

/// Lateness of the generator itself from which on its numbers are suspect, milliseconds at the 99th percentile.
const SUSPECT_LAG_MS: f64 = 1.0;

/// Measures, or reads what was measured; then says it.
///
/// # Errors
/// No server, a trace or a file that cannot be used. What the server does wrong is in the report.
pub async fn run(bench: Bench) -> anyhow::Result<()> {
    match bench {
        Bench::Run(run) => measure(*run).await,
        Bench::Report(job::Report { records, report }) => {
            let run = recording::read(&records)?;
            let hardware = setup::hardware(report.hardware.as_deref())?;
            publish(&run, hardware.as_ref(), &report)
        }
    }
}

async fn measure(config: job::Run) -> anyhow::Result<()> {
    let mut servers = Vec::new();
    for endpoint in &config.endpoints {
        servers.push(setup::connect(endpoint, &config.asking, config.bounds.timeout).await?);
    }
    let mut notes: Vec<String> = servers.iter().flat_map(|server| server.notes.clone()).collect();
    let rows = setup::rows(&config, &servers, &mut notes)?;
    notes.iter().for_each(|note| say!("tandem bench: {note}"));
    let terms = Terms {
        endpoints: u8::try_from(servers.len())?,
        repeats: config.repeats,
        seed: config.seed,
        salt: config.salt.unwrap_or_else(setup::new_salt),
        bounds: config.bounds,
        objectives: config.report.objectives,
    };
    let hardware = setup::hardware(config.report.hardware.as_deref())?;
    let info = RunInfo { salt: terms.salt, ..setup::info(&config, &servers) };
    let watch = Watch {
        clock: Clock::start(),
        stop: stop_on_ctrl_c(),
        progress: Arc::new(Progress::default()),
        lost: Arc::default(),
    };
    let run = intervals(&servers, Session::new(&rows, terms), info, &watch, config.records.as_deref()).await?;
    publish(&run, hardware.as_ref(), &config.report)?;
    match watch.lost.get() {
        Some(why) => bail!("{why}"),
        None => Ok(()),
    }
}

/// Measures all intervals, or those until the user has had enough or nobody is there any more.
async fn intervals(
    servers: &[Connected],
    mut session: Session,
    info: RunInfo,
    watch: &Watch,
    records: Option<&Path>,
) -> anyhow::Result<Run> {
    let mut run = Run { info, intervals: Vec::new() };
    let written = |path: &Path| format!("cannot write {}", path.display());
    let mut recorder = match records {
        Some(path) => Some(Recorder::create(path, &run.info).with_context(|| written(path))?),
        None => None,
    };
    let line = watch.progress.draw();
    while let Some(part) = session.next(run.intervals.last()) {
        watch.progress.begin(title(&part), part.expected_s());
        let interval = runner::measure(&servers[usize::from(part.endpoint)].target, &part, watch).await?;
        if let (Some(recorder), Some(path)) = (&mut recorder, records) {
            recorder.interval(&interval).with_context(|| written(path))?;
        }
        run.intervals.push(interval);
        if watch.stop.is_cancelled() || watch.lost.get().is_some() {
            break;
        }
    }
    drop(line);
    note_lag(&mut run);
    run.info.notes.extend(session.notes().iter().cloned());
    setup::learn(servers, &mut run.info).await;
    if let (Some(mut recorder), Some(path)) = (recorder, records) {
        recorder.info(&run.info).with_context(|| written(path))?;
    }
    Ok(run)
}

/// The first Ctrl-C ends the measurement and keeps what was measured; the second one ends the program.
fn stop_on_ctrl_c() -> CancellationToken {
    let stop = CancellationToken::new();
    let cancel = stop.clone();
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            say!("\ntandem bench: interrupted: the report is of what was measured so far; once more to end at once");
            cancel.cancel();
            if tokio::signal::ctrl_c().await.is_ok() {
                std::process::exit(130);
            }
        }
    });
    stop
}

fn title(part: &Part) -> String {
    let load = match part.load {
        Load::Rate(_, rate) if rate.from == rate.to => format!("{}/s", rate.to),
        Load::Rate(_, rate) => format!("{}..{}/s", rate.from, rate.to),
        Load::Concurrency(slots) => format!("{slots} at once"),
        Load::Trace => "its own times".to_owned(),
    };
    let endpoint = report::endpoint_letter(part.endpoint);
    format!("{} {load} {endpoint}{}", part.workload.name, part.repeat + 1)
}

/// The self-check: how late requests were sent, by this program's own fault.
fn note_lag(run: &mut Run) {
    let records = run.intervals.iter().flat_map(|interval: &Interval| &interval.records);
    let lag_ms = Distribution::of(records.map(|record| ((record.sent - record.intended) * 1e3).max(0.0)));
    run.info.own_lag_p99_ms = lag_ms.percentile(0.99).unwrap_or(0.0);
    run.info.own_lag_max_ms = lag_ms.max().unwrap_or(0.0);
    if run.info.own_lag_p99_ms > SUSPECT_LAG_MS {
        say!(
            "tandem bench: the generator itself was {:.1} ms late at p99 ({:.1} ms at worst): the numbers are suspect; \
             give it CPUs of its own or less to send",
            run.info.own_lag_p99_ms,
            run.info.own_lag_max_ms
        );
    }
}

/// Text to standard output, files where they are wanted.
fn publish(run: &Run, hardware: Option<&Model>, wanted: &Reporting) -> anyhow::Result<()> {
    let summary = report::summarize(run, wanted.objectives, hardware);
    // A reader who has seen enough still gets the files.
    let printed = print(&report::text(&summary));
    let write = |path: &Path, text: String| {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    if let Some(path) = &wanted.json {
        write(path, format!("{:#}\n", report::json(&summary)))?;
    }
    if let Some(path) = &wanted.csv {
        write(path, report::csv(&summary))?;
    }
    if let Some(path) = &wanted.html {
        write(path, report::html(&summary))?;
    }
    printed
}

#[cfg(test)]
mod lag_tests {
    use super::record::Outcome;
    use super::report::fixture;
    use super::*;

    #[test]
    fn one_late_request_of_many_is_the_worst_and_not_the_99th_percentile() {
        let mut records = vec![fixture::with_outcome(1.0, Outcome::Ok); 200];
        records[7].sent += 1.0;
        let mut run = Run { intervals: vec![fixture::interval(1.0, records)], ..Run::default() };
        note_lag(&mut run);
        assert_eq!((run.info.own_lag_p99_ms, run.info.own_lag_max_ms), (0.0, 1000.0));
    }
}
