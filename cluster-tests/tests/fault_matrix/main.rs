//! DESIGN's failure table as a program: every fault × victim × moment over real processes and real transports, printed
//! as a table. `cargo test --release -p tandem-cluster-tests --test fault_matrix -- --rounds 20` repeats it.
//!
//! Nodes are simulated: their tokens are a hash of the KV that they read, so that a wrong block shows as a wrong
//! answer, and their times are set, so that each moment can be met. What happens in a cell is in [`cell`].
mod cell;
mod fault;
mod garbage;
mod moment;
mod severed;

use std::process::ExitCode;
use std::time::Instant;

use cell::{Cell, Report, Setting};
use clap::Parser;
use fault::{Fault, Victim};
use futures::StreamExt;
use moment::Moment;
use tandem_cluster_tests::Fleet;
use tandem_cluster_tests::reference::Reference;

const TRANSPORTS: [&str; 4] = ["ucx", "ucx-queue", "ucx-tcp", "tcp"];

#[derive(Parser)]
struct Args {
    /// How often each cell.
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// Transports: shared memory with one copy, the same through UCX's queue, UCX over sockets, and our own tcp.
    #[arg(long, value_delimiter = ',', value_parser = TRANSPORTS, default_values = TRANSPORTS)]
    transports: Vec<String>,
    /// Fleets at a time [default: all, which mostly wait]
    #[arg(long)]
    jobs: Option<usize>,
    /// Only cells whose name (fault/victim/moment) contains this.
    #[arg(default_value = "")]
    only: String,
    /// The test runner's own flags, which mean nothing here.
    #[arg(long, hide = true)]
    nocapture: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    severed::enter_own_network();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let failed = runtime.block_on(async {
        let mut failed = 0;
        for round in 1..=args.rounds {
            failed += run_round(round, &args).await;
        }
        failed
    });
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Every cell once; a fleet for each transport and moment, several at a time. Returns how many cells failed.
async fn run_round(round: u32, args: &Args) -> usize {
    let start = Instant::now();
    let reference = &Reference::start().expect("the model of `make setup`");
    let settings = args.transports.iter().flat_map(|transport| {
        let known = TRANSPORTS.into_iter().find(|known| known == transport).unwrap_or_default();
        Moment::ALL.map(|moment| Setting { transport: known, moment })
    });
    let jobs = args.jobs.unwrap_or(args.transports.len() * Moment::ALL.len());
    let reports: Vec<Report> = futures::stream::iter(settings)
        .map(|setting| run_setting(setting, &args.only, reference))
        .buffer_unordered(jobs.max(1))
        .collect::<Vec<_>>()
        .await
        .concat();
    let failed = reports.iter().filter(|report| report.problem.is_some()).count();
    print_table(&reports);
    for report in reports.iter().filter(|report| report.problem.is_some()) {
        println!("FAILED {}: {}", report.cell, report.problem.as_deref().unwrap_or_default());
    }
    // The last words are those of cargo's own runner, which scripts sum up.
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    let (passed, seconds) = (reports.len() - failed, start.elapsed().as_secs_f64());
    println!("round {round}: {} cells\n", reports.len());
    println!("test result: {verdict}. {passed} passed; {failed} failed; 0 ignored; finished in {seconds:.2}s\n");
    failed
}

/// All cells of one transport and moment, one after the other in one fleet.
async fn run_setting(setting: Setting, only: &str, reference: &Reference) -> Vec<Report> {
    let cells: Vec<Cell> = Victim::ALL
        .into_iter()
        .flat_map(|victim| Fault::ALL.map(|fault| Cell { setting, victim, fault }))
        .filter(|cell| cell.victim.can_suffer(cell.fault) && cell.to_string().contains(only))
        .collect();
    let mut fleet = None;
    let mut reports = Vec::new();
    for cell in cells {
        let started = match fleet.take() {
            Some(fleet) => Ok(fleet),
            None => Fleet::start(setting.fleet()).await,
        };
        let report = match started {
            Ok(mut started) => {
                let report = cell.run(&mut started, reference).await;
                // A fleet that failed is not trusted with the next cell.
                if report.problem.is_none() {
                    fleet = Some(started);
                }
                report
            }
            Err(error) => Report::failed(cell, format!("no fleet: {error:#}")),
        };
        println!("{report}");
        reports.push(report);
    }
    reports
}

fn print_table(reports: &[Report]) {
    println!("\n| victim, fault | touches | {} |", Moment::ALL.map(Moment::as_str).join(" | "));
    println!("|---|---|{}", "---|".repeat(Moment::ALL.len()));
    for victim in Victim::ALL {
        for fault in Fault::ALL.into_iter().filter(|fault| victim.can_suffer(*fault)) {
            let cells = Moment::ALL.map(|moment| {
                let of_cell = |report: &&Report| {
                    report.cell.victim == victim && report.cell.fault == fault && report.cell.setting.moment == moment
                };
                // In the order of the transports, whichever ended first.
                let mut cells: Vec<_> = reports.iter().filter(of_cell).collect();
                cells.sort_by_key(|report| TRANSPORTS.iter().position(|it| *it == report.cell.setting.transport));
                let texts: Vec<_> = cells.into_iter().map(Report::short).collect();
                texts.join(", ")
            });
            let row = (victim.as_str(), fault.as_str(), victim.touches(fault));
            println!("| {} {} | {} | {} |", row.0, row.1, row.2, cells.join(" | "));
        }
    }
    println!("(outcome, longest pause in s, for each transport in turn)");
    let sum = |of: fn(&Report) -> f64| reports.iter().map(of).sum::<f64>();
    let (lost, fenced) = (sum(|report| report.lost_peers), sum(|report| report.fenced_peers));
    println!("the survivors have lost {lost} KV peers, and cut off {fenced} whose writes did not end\n");
}
