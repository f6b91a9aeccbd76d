//! Every fault that the driver can have, at every place where it can have it: the nth allocation, copy, launch, capture
//! and so on fails while a model is loaded and answers. Each run is a process of its own, as some errors are for good.
//! A run ends with a typed error or with the right tokens, and leaves nothing behind.
mod support;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use support::*;
use tandem_cuda::{CudaConfig, CudaLoader};
use tandem_cuda_emu::{Count, Fault, count, fail_nth, seen};
use tandem_engine::{
    Batch, BlockPool, Engine, EngineError, Executor, SchedulerConfig, SequenceEvent, SequenceRequest, Speculate, Tokens,
};
use tandem_memory::Run;

/// What a run can meet: not what ends it before it begins, what is of other processes' memory, nor large products.
fn faults() -> impl Iterator<Item = Fault> {
    Fault::ALL.into_iter().filter(|fault| !matches!(fault, Fault::Init | Fault::IpcOpen | Fault::Matmul))
}

#[test]
fn whatever_fails_is_an_error_or_does_not_matter() {
    if !device() || !emulated() {
        return;
    }
    let clean = scenario("scenario_steps", None);
    assert!(clean.contains_key("tokens") && !clean.contains_key("error"), "{clean:?}");
    let mut problems = Vec::new();
    for fault in faults() {
        let name = fault.name();
        let times: u32 = clean[name].parse().expect("a number");
        assert!(times > 0, "no {name} in the scenario");
        let runs = at_each_place(times, |nth| scenario("scenario_steps", Some(format!("{name}:{nth}"))));
        let failed = runs.iter().filter(|(_, run)| run.contains_key("error")).count();
        for (nth, run) in &runs {
            problems.extend(problem(&clean, run, fault).map(|why| format!("{name}:{nth}: {why}: {run:?}")));
        }
        println!("{name}: {times} places, an error at {failed}");
        assert!(failed > 0, "{name} never mattered");
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// What `run` comes to for each of 1 to `times`, on up to eight cores.
fn at_each_place<T: Send>(times: u32, run: impl Fn(u32) -> T + Sync) -> Vec<(u32, T)> {
    let next = AtomicU32::new(1);
    let take = || std::iter::repeat_with(|| next.fetch_add(1, Relaxed)).take_while(|&nth| nth <= times);
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let mut runs: Vec<(u32, T)> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..cores).map(|_| scope.spawn(|| take().map(|nth| (nth, run(nth))).collect::<Vec<_>>())).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a run that failed")).collect()
    });
    runs.sort_by_key(|&(nth, _)| nth);
    runs
}

/// What is wrong with how a run ended.
fn problem(clean: &BTreeMap<String, String>, run: &BTreeMap<String, String>, fault: Fault) -> Option<&'static str> {
    let is_sticky = matches!(fault, Fault::Launch | Fault::Copy);
    match (run.get("tokens"), run.get("error")) {
        (Some(tokens), None) if *tokens != clean["tokens"] => Some("wrong tokens"),
        (Some(_), None) => None,
        (None, Some(error)) if error.len() < 10 => Some("an error that says nothing"),
        (None, Some(error)) if is_sticky && !error.contains("lost") => {
            Some("an error for good that is told as another")
        }
        (None, Some(error)) if !is_sticky && error.contains("lost") => Some("an error that is told as one for good"),
        (None, Some(_)) if !is_sticky && run["left"] != clean["left"] => Some("something is left"),
        (None, Some(_)) => None,
        _ => Some("neither tokens nor an error"),
    }
}

#[test]
fn a_lost_device_ends_the_engine() {
    if !device() || !emulated() {
        return;
    }
    let clean = scenario("scenario_engine", None);
    assert_eq!(clean["stopped"], "None", "{clean:?}");
    let launches: u32 = clean["launch"].parse().expect("a number");
    let run = scenario("scenario_engine", Some(format!("launch:{}", launches - 3)));
    assert!(run["end"].contains("lost") && run["stopped"].contains("the device is lost"), "{run:?}");
    // Steps overlap: whatever fails while one is under way ends the sequence in words, and the engine where it must.
    assert_ne!(clean["ahead"], "0", "{clean:?}");
    for nth in launches - 9..=launches {
        let run = scenario("scenario_engine", Some(format!("launch:{nth}")));
        assert!(run["end"].contains("lost") && run["stopped"].contains("the device is lost"), "{nth}: {run:?}");
    }
    let submits: u32 = clean["submit"].parse().expect("a number");
    for nth in submits - 15..submits {
        let run = scenario("scenario_engine", Some(format!("submit:{nth}")));
        assert!(run["end"].contains("Failed") && run["stopped"] == "None", "{nth}: {run:?}");
        assert_eq!(run["free"], clean["free"], "{nth}: a block is lost");
    }
    // What is refused once fails its step alone.
    let run = scenario("scenario_engine", Some(format!("submit:{submits}")));
    assert!(run["end"].contains("Failed") && run["stopped"] == "None", "{run:?}");
}

#[test]
fn a_device_that_a_transfer_finds_lost_ends_an_idle_engine() {
    if !device() || !emulated() {
        return;
    }
    let run = scenario("scenario_memory", None);
    assert_eq!((&*run["before"], &*run["digests"]), ("None", "differ"), "{run:?}");
    assert!(run["stopped"].contains("the GPU is lost") && run["submit"].contains("the GPU is lost"), "{run:?}");
}

/// Runs one of the tests below in a process of its own; what it printed, by name.
fn scenario(name: &str, fault: Option<String>) -> BTreeMap<String, String> {
    let text = in_child(name, ("EMU_FAIL", &fault.unwrap_or_default())).expect("an emulated device");
    let line = |line: &str| line.strip_prefix("| ")?.split_once(": ").map(|(name, text)| (name.into(), text.into()));
    text.lines().filter_map(line).collect()
}

fn say(name: &str, value: impl std::fmt::Display) {
    // The harness writes before the first line without an end.
    println!("\n| {name}: {}", value.to_string().replace('\n', " "));
}

fn say_counts() {
    for fault in faults() {
        say(fault.name(), seen(fault).unwrap_or(0));
    }
    let kinds = [Count::UsedBytes, Count::Allocations, Count::Streams, Count::Events, Count::Graphs, Count::Modules];
    say("left", kinds.map(|kind| count(kind).unwrap_or(0).to_string()).join(" "));
}

/// Few buckets, so that there are few places.
fn small() -> CudaConfig {
    CudaConfig { max_step_tokens: 4, max_running: 2, ..config(&family("llama.gguf")) }
}

#[test]
#[ignore = "one run of the tests above"]
fn scenario_steps() {
    if !device() {
        return;
    }
    match steps() {
        Ok(tokens) => say("tokens", format!("{tokens:?}")),
        Err(error) => say("error", error),
    }
    say_counts();
}

/// A prompt in chunks, two sequences that decode, the KV memory in between; at last steps that overlap.
fn steps() -> Result<Vec<u32>, EngineError> {
    let mut executor = CudaLoader::open(&small())?.load(8)?;
    let pool = BlockPool::new(8, 16);
    let (first, second, mut tokens) = (lease(&pool, 20), lease(&pool, 20), Vec::new());
    run(&mut executor, vec![item(1, given(&[5, 6, 7]), 0, &first, None)])?;
    let items = vec![
        item(1, given(&[8]), 3, &first, Some(choose(&greedy()))),
        item(2, given(&[9, 10]), 0, &second, Some(choose(&on_host()))),
    ];
    tokens.extend(run(&mut executor, items)?.iter().map(token));
    let (memory, bytes) = (executor.memory(), executor.spec().block_bytes);
    let (mut block, mut digest) = (vec![0; bytes], [0]);
    memory.read(first.blocks()[0] as usize * bytes, &mut block);
    memory.write(first.blocks()[0] as usize * bytes, &block);
    memory.digests(&[Run { at: first.blocks()[0] as usize * bytes, bytes }], &mut digest);
    if let Some(why) = memory.lost() {
        return Err(EngineError::DeviceLost(why.to_owned()));
    }
    if digest != [xxhash_rust::xxh3::xxh3_64(&block)] {
        return Err(EngineError::Executor("the hash is not that of the bytes that were read".into()));
    }
    for step in 0..2 {
        let items = vec![
            item(1, Tokens::Last, 4 + step, &first, Some(choose(&greedy()))),
            item(2, Tokens::Last, 2 + step, &second, Some(choose(&on_host()))),
        ];
        tokens.extend(run(&mut executor, items)?.iter().map(token));
    }
    // Two under way: the second continues what the first chooses.
    for step in 0..2 {
        let ahead = item(1, Tokens::Last, 6 + step, &first, Some(choose(&greedy())));
        executor.begin(&Batch { items: vec![ahead], report_layers: Vec::new() })?;
    }
    for _ in 0..2 {
        tokens.extend(executor.finish(&mut |_| {})?.iter().map(token));
    }
    Ok(tokens)
}

#[test]
#[ignore = "one run of the tests above"]
fn scenario_engine() {
    if !device() {
        return;
    }
    let engine = engine();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let end = runtime.block_on(async {
        let mut stream = engine.submit(small_request(&engine)).expect("valid");
        loop {
            let event = tokio::time::timeout(Duration::from_secs(60), stream.next()).await.expect("hangs");
            if let Some(end @ (SequenceEvent::Finished { .. } | SequenceEvent::Failed(_))) = event {
                return end;
            }
        }
    });
    // The loop ends behind the event of the failure.
    let lost = matches!(&end, SequenceEvent::Failed(EngineError::DeviceLost(_)));
    while lost && engine.stopped().is_none() {
        std::thread::yield_now();
    }
    say("end", format!("{end:?}"));
    say("stopped", format!("{:?}", engine.stopped()));
    say("ahead", engine.load().steps_ahead);
    engine.shutdown();
    say("free", engine.pool().free());
    drop(engine);
    say_counts();
}

fn engine() -> Engine {
    let executor = CudaLoader::open(&small()).and_then(|loader| loader.load(8)).expect("loads");
    let limits = SchedulerConfig {
        max_running: 2,
        max_step_tokens: 4,
        inbox: 4,
        prefix_caching: true,
        speculate: Speculate::Off,
    };
    Engine::start(Box::new(executor), limits)
}

fn small_request(engine: &Engine) -> SequenceRequest {
    request(engine.pool().try_reserve(2).expect("room").into(), vec![5, 6, 7, 8, 9], 3)
}

/// A copy of a transfer fails for good while nothing runs.
#[test]
#[ignore = "one run of the tests above"]
fn scenario_memory() {
    if !device() {
        return;
    }
    let engine = engine();
    let memory = engine.memory();
    say("before", format!("{:?}", engine.stopped()));
    assert!(fail_nth(Fault::Copy, 1));
    memory.read(0, &mut [0; 64]);
    let piece = [Run { at: 0, bytes: 64 }];
    let (mut first, mut second) = ([0], [0]);
    memory.digests(&piece, &mut first);
    memory.digests(&piece, &mut second);
    say("digests", if first == second { "agree" } else { "differ" });
    say("stopped", format!("{:?}", engine.stopped()));
    say("submit", engine.submit(small_request(&engine)).map(drop).expect_err("refused"));
}
