//! The generator against servers in this process: what is sent, when, and what becomes of a server that is slow,
//! refuses, hangs or dies. In real time, as short as it can be; nothing here waits longer than what it measures.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context;
use reqwest::header::HeaderMap;
use tandem_client::connect::Tls;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::arrivals::{Process, Rate};
use super::client::http::{Api, Dialect, HttpClient};
use super::client::{Asking, Client};
use super::metronome::Clock;
use super::progress::Progress;
use super::prompt::Vocabulary;
use super::record::{Interval, Objectives, Outcome, Record};
use super::runner::{Bounds, Form, Load, Part, Target, Watch, measure};
use super::stats::figures::Figures;
use super::workload::{Cache, Draw, Mix, Prefix, Shape, Workload};

mod fake_grpc;

/// What the fake server does with a request after it has read it.
#[derive(Clone, Copy)]
enum Manner {
    /// So many tokens, so far apart, after the first.
    Answer { first: Duration, tokens: u32, gap: Duration },
    /// 429 with this `retry-after`.
    Refuse(&'static str),
    /// Nothing, ever.
    Hang,
    /// A token, and then the connection is gone.
    Die,
    /// An error in the middle of the stream.
    Fail,
}

/// An HTTP server of one connection a request. Counts requests; keeps their bodies.
struct Fake {
    url: String,
    asked: Arc<AtomicUsize>,
    bodies: Arc<std::sync::Mutex<Vec<serde_json::Value>>>,
}

impl Fake {
    async fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let fake = Self { url, asked: Arc::default(), bodies: Arc::default() };
        let (asked, bodies) = (Arc::clone(&fake.asked), Arc::clone(&fake.bodies));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (asked, bodies) = (Arc::clone(&asked), Arc::clone(&bodies));
                tokio::spawn(async move {
                    // A client that leaves ends its connection's task.
                    let _ = answer(stream, manner, &asked, &bodies).await;
                });
            }
        });
        fake
    }

    fn target(&self) -> Target {
        let asking = Asking { model: "m".into(), ignore_eos: true, timeout: Duration::from_secs(5) };
        let connections = super::client::http::connections(HeaderMap::new(), &Tls::default(), "").unwrap();
        let how = (Api::Completions, Dialect::Tandem);
        let client = HttpClient::new(connections, &self.url, how, asking, serde_json::Map::new());
        target(Client::Http(client))
    }

    fn prompts(&self) -> Vec<String> {
        self.bodies.lock().unwrap().iter().map(|body| body["prompt"].as_str().unwrap().to_owned()).collect()
    }
}

fn target(client: Client) -> Target {
    Target { client, vocabulary: Arc::new(Vocabulary::measured(1.0, 1.0)), form: Form::Text }
}

async fn answer(
    mut stream: TcpStream,
    manner: Manner,
    asked: &AtomicUsize,
    bodies: &std::sync::Mutex<Vec<serde_json::Value>>,
) -> anyhow::Result<()> {
    let body = read_request(&mut stream).await?;
    asked.fetch_add(1, Ordering::SeqCst);
    bodies.lock().unwrap().push(serde_json::from_slice(&body)?);
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    let token = "data: {\"choices\":[{\"text\":\" a\",\"finish_reason\":null}]}\n\n";
    match manner {
        Manner::Answer { first, tokens, gap } => {
            tokio::time::sleep(first).await;
            stream.write_all(head.as_bytes()).await?;
            for index in 0..tokens {
                if index > 0 {
                    tokio::time::sleep(gap).await;
                }
                stream.write_all(token.as_bytes()).await?;
            }
            let end = format!(
                "data: {{\"choices\":[{{\"text\":\"\",\"finish_reason\":\"length\"}}]}}\n\ndata: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":11,\"completion_tokens\":{tokens},\"prompt_tokens_details\":{{\"cached_tokens\":3}}}},\"tandem\":{{\"trace_id\":\"t1\",\"ttft_ms\":4.5,\"prefill_instance\":\"p0\",\"decode_instance\":\"d0\"}}}}\n\ndata: [DONE]\n\n"
            );
            stream.write_all(end.as_bytes()).await?;
        }
        Manner::Refuse(after) => {
            let refusal = format!(
                "HTTP/1.1 429 Too Many\r\nretry-after: {after}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            );
            stream.write_all(refusal.as_bytes()).await?;
        }
        Manner::Hang => std::future::pending().await,
        Manner::Die => {
            stream.write_all(format!("{head}{token}").as_bytes()).await?;
        }
        Manner::Fail => {
            let error = "data: {\"error\":{\"message\":\"a node died\"}}\n\n";
            stream.write_all(format!("{head}{token}{error}").as_bytes()).await?;
        }
    }
    Ok(stream.shutdown().await?)
}

async fn read_request(stream: &mut TcpStream) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let head_end = loop {
        let mut piece = [0u8; 4096];
        let read = stream.read(&mut piece).await?;
        anyhow::ensure!(read > 0, "the client left");
        bytes.extend_from_slice(&piece[..read]);
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..head_end]).to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).context("no length")?;
    let mut body = bytes.split_off(head_end);
    let begun = body.len();
    body.resize(length.trim().parse()?, 0);
    stream.read_exact(&mut body[begun..]).await?;
    Ok(body)
}

fn part(load: Load) -> Part {
    let shape = Shape { input: "8..12".parse().unwrap(), output: "3".parse().unwrap(), prefix: None };
    let bounds = Bounds {
        warmup_s: 0.0,
        seconds: 0.3,
        requests: None,
        drain: Duration::from_secs(5),
        timeout: Duration::from_secs(5),
        max_in_flight: 64,
    };
    Part {
        workload: Arc::new(Workload { name: "own".into(), mix: Mix::Shapes(vec![(1.0, shape)]) }),
        endpoint: 0,
        repeat: 0,
        draw: Draw { seed: 1, content: 2, cache: Cache::Cold },
        load,
        bounds,
    }
}

fn watch() -> Watch {
    Watch {
        clock: Clock::start(),
        stop: CancellationToken::new(),
        progress: Arc::new(Progress::default()),
        lost: Arc::default(),
    }
}

const GOALS: Objectives = Objectives { ttft_ms: 1e3, tpot_ms: 1e3 };
const QUICK: Manner = Manner::Answer { first: Duration::ZERO, tokens: 3, gap: Duration::ZERO };
const EVERY_10_MS: Load = Load::Rate(Process::Constant, Rate { from: 100.0, to: 100.0, over_s: 0.0 });

fn kinds(interval: &Interval) -> Vec<String> {
    let kind = |record: &Record| match &record.outcome {
        Outcome::Failed { kind, .. } => kind.clone(),
        other => format!("{other:?}"),
    };
    interval.records.iter().map(kind).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_loop_sends_at_its_moments() {
    let fake = Fake::start(QUICK).await;
    let interval = measure(&fake.target(), &part(EVERY_10_MS), &watch()).await.unwrap();
    // 10 ms, 20 ms, …, 290 ms.
    assert_eq!(interval.records.len(), 29);
    assert_eq!((interval.rate, interval.concurrency, interval.seconds), (Some(100.0), None, 0.3));
    let first = &interval.records[0];
    assert_eq!((first.outcome.clone(), first.prompt_tokens, first.cached_tokens), (Outcome::Ok, 11, 3));
    assert_eq!((first.phases.unwrap().ttft_ms, first.trace_id.as_deref()), (4.5, Some("t1")));
    assert_eq!((first.nodes.prefill.as_deref(), first.nodes.decode.as_deref()), (Some("p0"), Some("d0")));
    for (index, record) in (0..).zip(&interval.records) {
        let intended = first.intended + 0.01 * f64::from(index);
        assert_eq!(record.index, index);
        assert!((record.intended - intended).abs() < 1e-9);
        assert!(record.intended <= record.sent && record.sent <= record.chunks[0].0, "{record:?}");
        assert_eq!(record.chunks.iter().map(|(_, tokens)| tokens).sum::<u32>(), 3);
        assert!(record.chunks.iter().all(|(at, _)| *at <= record.ended));
    }
}

/// No coordinated omission: a server that is slower than the requests come changes nothing about when they are meant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_server_does_not_slow_the_open_loop() {
    // Long after the last is sent, also where sending is late.
    let first = Duration::from_secs(2);
    let slow = Manner::Answer { first, tokens: 1, gap: Duration::ZERO };
    let fake = Fake::start(slow).await;
    let interval = measure(&fake.target(), &part(EVERY_10_MS), &watch()).await.unwrap();
    assert_eq!(interval.records.len(), 29);
    let last = &interval.records[28];
    assert!((last.intended - interval.records[0].intended - 0.28).abs() < 1e-9);
    // All were sent before the first answer came.
    assert!(last.sent < interval.records[0].chunks[0].0, "{last:?}");
    let waited = |record: &Record| record.chunks[0].0 - record.intended;
    assert!(interval.records.iter().all(|record| waited(record) >= first.as_secs_f64()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_loop_keeps_its_number_under_way() {
    let fake = Fake::start(Manner::Answer { first: Duration::from_millis(20), tokens: 2, gap: Duration::ZERO }).await;
    let mut part = part(Load::Concurrency(3));
    part.bounds.requests = Some(12);
    let interval = measure(&fake.target(), &part, &watch()).await.unwrap();
    assert_eq!(interval.records.len(), 12);
    assert_eq!((interval.rate, interval.concurrency), (None, Some(3)));
    for record in &interval.records {
        let under_way = |other: &&Record| other.intended <= record.intended && record.intended < other.ended;
        assert!(interval.records.iter().filter(under_way).count() <= 3);
    }
    // Four rounds of three.
    assert!(interval.seconds >= 0.08, "{}", interval.seconds);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn warm_up_is_sent_and_not_measured() {
    let fake = Fake::start(QUICK).await;
    let mut part = part(EVERY_10_MS);
    part.bounds.warmup_s = 0.1;
    part.bounds.seconds = 0.1;
    let interval = measure(&fake.target(), &part, &watch()).await.unwrap();
    assert_eq!((interval.records.len(), fake.asked.load(Ordering::SeqCst)), (9, 18));
    part.load = Load::Concurrency(1);
    let interval = measure(&fake.target(), &part, &watch()).await.unwrap();
    assert!(interval.measured().all(|record| record.index > 0) && !interval.records.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_are_new_and_prefixes_are_primed() {
    let fake = Fake::start(QUICK).await;
    let prefix = Some(Prefix { share: 0.5, groups: 2 });
    let shape = Shape { input: "40".parse().unwrap(), output: "1".parse().unwrap(), prefix };
    let mut part = part(Load::Concurrency(1));
    part.workload = Arc::new(Workload { name: "own".into(), mix: Mix::Shapes(vec![(1.0, shape)]) });
    part.bounds.requests = Some(10);
    part.draw.cache = Cache::Warm;
    measure(&fake.target(), &part, &watch()).await.unwrap();
    let prompts = fake.prompts();
    assert_eq!(prompts.len(), 12, "two primers and ten requests");
    let beginning = |prompt: &String| prompt.split(' ').take(20).collect::<Vec<_>>().join(" ");
    let primed: Vec<String> = prompts[..2].iter().map(beginning).collect();
    assert_ne!(primed[0], primed[1]);
    assert!(prompts[2..].iter().all(|prompt| primed.contains(&beginning(prompt))));
    let distinct: std::collections::HashSet<&String> = prompts.iter().collect();
    assert_eq!(distinct.len(), 12);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_servers_cost_records_and_never_the_run() {
    let cases = [
        (Manner::Refuse("7"), "Refused { retry_after_s: Some(7.0) }"),
        (Manner::Refuse("soon"), "Refused { retry_after_s: None }"),
        (Manner::Hang, "timeout"),
        (Manner::Die, "cut"),
        (Manner::Fail, "error event"),
    ];
    for (manner, wanted) in cases {
        let fake = Fake::start(manner).await;
        let mut part = part(Load::Concurrency(2));
        part.bounds.requests = Some(4);
        if matches!(manner, Manner::Hang) {
            // The others end by themselves, and not always so soon.
            part.bounds.timeout = Duration::from_millis(100);
        }
        let interval = measure(&fake.target(), &part, &watch()).await.unwrap();
        assert_eq!(kinds(&interval), [wanted; 4]);
        let chunks: usize = interval.records.iter().map(|record| record.chunks.len()).sum();
        assert_eq!(chunks, if matches!(manner, Manner::Die | Manner::Fail) { 4 } else { 0 });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_loop_does_not_ask_in_a_circle() {
    for manner in [Manner::Refuse("0.1"), Manner::Refuse("soon"), Manner::Fail] {
        let fake = Fake::start(manner).await;
        let interval = measure(&fake.target(), &part(Load::Concurrency(2)), &watch()).await.unwrap();
        // Two slots that rest 0.1 s each time.
        let asked = fake.asked.load(Ordering::SeqCst);
        assert!(
            asked >= 2 && asked as f64 <= 2.0 * (interval.seconds / 0.1 + 2.0),
            "{asked} in {} s",
            interval.seconds
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_loop_counts_what_comes_inside_its_window() {
    let fake = Fake::start(Manner::Answer { first: Duration::from_millis(60), tokens: 2, gap: Duration::ZERO }).await;
    let mut part = part(Load::Concurrency(3));
    (part.bounds.warmup_s, part.bounds.seconds) = (0.2, 0.2);
    let interval = measure(&fake.target(), &part, &watch()).await.unwrap();
    let (from, to) = interval.window_from.map(|from| (from, from + interval.seconds)).unwrap();
    let served = Figures::of(&[&interval], GOALS).served;
    let inside = interval.records.iter().filter(|record| from <= record.ended && record.ended < to).count();
    assert_eq!((served.completed, served.seconds), (inside, interval.seconds));
    let before = interval.records.iter().filter(|record| record.intended < from).count();
    assert!(before >= 1 && interval.measured().count() + before == interval.records.len(), "{before} were under way");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_without_an_answer_goes_on_until_each_slot_had_one() {
    let fake = Fake::start(Manner::Answer { first: Duration::from_millis(100), tokens: 1, gap: Duration::ZERO }).await;
    let mut part = part(Load::Concurrency(2));
    part.bounds.seconds = 0.02;
    let interval = measure(&fake.target(), &part, &watch()).await.unwrap();
    assert!((0.1..4.0).contains(&interval.seconds), "{}", interval.seconds);
    assert!(interval.notes[0].starts_with("no answer ended within the 0.02 s"), "{:?}", interval.notes);
    assert!(Figures::of(&[&interval], GOALS).request_throughput() > 0.0);
    part.bounds.drain = Duration::from_millis(20);
    let hung = Fake::start(Manner::Hang).await;
    let interval = measure(&hung.target(), &part, &watch()).await.unwrap();
    assert!(interval.seconds < 2.0, "bounded by the drain: {}", interval.seconds);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_that_could_not_be_sent_is_said() {
    let fake = Fake::start(Manner::Fail).await;
    let shape = Shape {
        input: "40".parse().unwrap(),
        output: "1".parse().unwrap(),
        prefix: Some(Prefix { share: 0.5, groups: 2 }),
    };
    let mut part = part(Load::Concurrency(1));
    part.workload = Arc::new(Workload { name: "own".into(), mix: Mix::Shapes(vec![(1.0, shape)]) });
    part.bounds.requests = Some(1);
    part.draw.cache = Cache::Warm;
    let interval = measure(&fake.target(), &part, &watch()).await.unwrap();
    assert!(interval.notes[0].starts_with("2 of 2 shared prefixes could not be sent"), "{:?}", interval.notes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_there_is_a_failure_to_connect() {
    let mut fake = Fake::start(QUICK).await;
    // A port that was just free.
    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap();
    fake.url = format!("http://{}", unused.local_addr().unwrap());
    drop(unused);
    let mut part = part(Load::Concurrency(1));
    part.bounds.requests = Some(2);
    assert_eq!(kinds(&measure(&fake.target(), &part, &watch()).await.unwrap()), ["connect"; 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_drain_and_the_users_wish_end_what_hangs() {
    let fake = Fake::start(Manner::Hang).await;
    let mut part = part(EVERY_10_MS);
    part.bounds.seconds = 0.05;
    part.bounds.drain = Duration::from_millis(50);
    let interval = measure(&fake.target(), &part, &watch()).await.unwrap();
    assert_eq!(kinds(&interval), ["Unfinished"; 4]);

    for load in [EVERY_10_MS, Load::Concurrency(2)] {
        part.load = load;
        part.bounds.seconds = 1e6;
        part.bounds.drain = Duration::from_secs(1_000);
        let watch = watch();
        let stop = watch.stop.clone();
        let asked = fake.asked.load(Ordering::SeqCst);
        let (seen, target) = (Arc::clone(&fake.asked), fake.target());
        let wish = async move {
            while seen.load(Ordering::SeqCst) < asked + 2 {
                tokio::task::yield_now().await;
            }
            stop.cancel();
        };
        let (interval, ()) = tokio::join!(measure(&target, &part, &watch), wish);
        let interval = interval.unwrap();
        assert!(interval.records.len() >= 2 && kinds(&interval).iter().all(|kind| kind == "Unfinished"));
        assert!(interval.seconds < 100.0, "as long as it took, not as long as was wanted");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_generator_has_no_room_for_is_said() {
    let fake = Fake::start(Manner::Hang).await;
    let mut part = part(EVERY_10_MS);
    part.bounds.seconds = 0.06;
    part.bounds.drain = Duration::ZERO;
    part.bounds.max_in_flight = 2;
    let interval = measure(&fake.target(), &part, &watch()).await.unwrap();
    assert_eq!(kinds(&interval), ["Unfinished", "Unfinished", "not sent", "not sent", "not sent"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trace_keeps_its_own_times() {
    let fake = Fake::start(QUICK).await;
    let recorded = super::trace::synthetic::generate(1, 12);
    let seconds = recorded.last().unwrap().at_s;
    let selection = super::trace::Selection {
        scale: 32,
        speed: seconds / 0.2,
        from_s: 0.0,
        requests: 100,
        most_tokens: 500,
        seed: 0,
    };
    let trace = super::trace::prepare(recorded, &selection).unwrap();
    let mut part = part(Load::Trace);
    part.workload = Arc::new(Workload { name: "F".into(), mix: Mix::Trace(Arc::new(trace.clone())) });
    let interval = measure(&fake.target(), &part, &watch()).await.unwrap();
    assert_eq!((interval.records.len(), interval.rate, interval.concurrency), (12, None, None));
    let start = interval.records[0].intended - trace.requests[0].at_s;
    for (record, request) in interval.records.iter().zip(&trace.requests) {
        assert!((record.intended - start - request.at_s).abs() < 1e-6);
        assert_eq!(record.max_tokens, request.output_tokens);
    }
}
