//! Command lines of `tandem bench`, and what they become.
use clap::Parser;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    bench: BenchArgs,
}

fn resolve(line: &str) -> anyhow::Result<Bench> {
    let arguments = ["bench"].into_iter().chain(line.split_whitespace());
    Line::try_parse_from(arguments)?.bench.resolve(Path::new("/nowhere/state"))
}

fn run(line: &str) -> Box<Run> {
    match resolve(line).unwrap() {
        Bench::Run(run) => run,
        Bench::Report(_) => panic!("a report"),
    }
}

#[test]
fn endpoints_by_scheme() {
    let run = run("--url h:1 --against http://h:2/v1/ --api chat");
    assert_eq!(run.endpoints[0].api, Api::Chat("http://h:1".into()));
    assert_eq!(run.endpoints[1].api, Api::Chat("http://h:2/v1".into()));
    let run = self::run("--url grpc://h:1 --http h:2");
    assert_eq!(run.endpoints[0].api, Api::Grpc("http://h:1".into()));
    assert_eq!(run.endpoints[0].http.as_deref(), Some("http://h:2"));
    let run = self::run("--url grpc://h:1 --http h:2 --against grpc://h:3 --against-http h:4");
    let sides: Vec<Option<&str>> = run.endpoints.iter().map(|endpoint| endpoint.http.as_deref()).collect();
    assert_eq!(sides, [Some("http://h:2"), Some("http://h:4")]);
    let error = resolve("--url grpc://h:1 --http h:2 --against grpc://h:3").err().unwrap().to_string();
    assert!(error.contains("--against-http"), "one HTTP side cannot be that of both: {error}");
    for wrong in ["--url http://h:1 --api grpc", "--url grpc://h:1 --api chat", "--url ftp://h", "--row A"] {
        assert!(resolve(wrong).is_err(), "{wrong}");
    }
    assert!(resolve("").err().unwrap().to_string().contains("tandem up"));
}

#[test]
fn rows_and_their_loads() {
    let loads = |line: &str| -> Vec<Vec<Loading>> { run(line).rows.into_iter().map(|row| row.loads).collect() };
    let slots = |slots| Loading::Fixed(Load::Concurrency(slots));
    assert_eq!(loads("--url h:1 --row A,d,F"), [vec![slots(4)], vec![slots(32)], vec![Loading::Fixed(Load::Trace)]]);
    assert_eq!(loads("--url h:1 --concurrency 1,8"), [vec![slots(1), slots(8)]]);
    let ramp = Rate { from: 1.0, to: 5.0, over_s: 9.0 };
    let process = Process::Gamma { cv: 3.0 };
    let rates = [Rate::constant(2.0), ramp].map(|rate| Loading::Fixed(Load::Rate(process, rate)));
    assert_eq!(loads("--url h:1 --rate 2,1..5 --seconds 9 --arrivals gamma --cv 3"), [rates.to_vec()]);
    let own = run("--url h:1 --input 5..9 --output 3 --prefix-reuse 0.5 --sweep");
    assert!(matches!(&own.rows[0].what, What::Own(_, shape) if shape.prefix.is_some()));
    assert!(matches!(own.rows[0].loads[..], [Loading::Sweep(_, settings)] if settings.repeats == 3));
}

#[test]
fn a_trace_keeps_its_own_times() {
    for flag in ["--requests 5", "--seconds 5", "--warmup 0"] {
        let error = resolve(&format!("--url h:1 --row F {flag}")).err().unwrap().to_string();
        assert!(error.contains("--trace-requests"), "{flag}: {error}");
        assert!(resolve(&format!("--url h:1 --row F --rate 2 {flag}")).is_ok(), "{flag}: at a rate it means something");
    }
    let bounds = run("--url h:1 --row F").bounds;
    assert_eq!((bounds.seconds, bounds.warmup_s), (30.0, 3.0));
}

#[test]
fn nonsense_is_refused() {
    for wrong in [
        "--row G",
        "--rate 0",
        "--rate x",
        "--rate -1",
        "--rate nan",
        "--seconds 0",
        "--timeout inf",
        "--warmup -1",
        "--input 5",
        "--input 0 --output 1",
        "--input 5 --output 5 --prefix-reuse 2",
        "--rate 1 --concurrency 1",
        "--rate 1 --sweep",
        "--row F --sweep",
        "--header x",
        "--extra-body []",
        "--trace-speed 0",
        "--concurrency 0",
        "--trace-scale 0",
        "--ttft-ms 0",
    ] {
        assert!(resolve(&format!("--url h:1 {wrong}")).is_err(), "{wrong}");
    }
}

#[test]
fn a_report_needs_no_server() {
    let Bench::Report(report) = resolve("report r.jsonl --html x.html --ttft-ms 50").unwrap() else {
        panic!("no report")
    };
    assert_eq!(report.report.objectives.ttft_ms, 50.0);
    assert_eq!(report.report.html, Some("x.html".into()));
}
