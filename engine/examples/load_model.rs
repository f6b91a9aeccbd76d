//! How a model loads, and that it answers:
//! `cargo run --release --example load_model -p tandem-engine -- MODEL [threads] [blocks] [stop token id…]`. Prints
//! what it should take and what it took: the most memory of this process's own while it loaded (pages of mapped files
//! left out: the system takes them back when it needs them), how long that was, and 16 greedy tokens.
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use tandem_engine::cpu::{ModelConfig, ModelLoader};
use tandem_engine::memory::MemoryFiles;
use tandem_engine::{Engine, Executor, SamplingParams, SchedulerConfig, SequenceEvent, SequenceRequest, Speculate};

type Failure = Box<dyn std::error::Error>;

/// Between two looks at the memory.
const LOOK: Duration = Duration::from_millis(20);
const ANSWER: u32 = 16;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Failure> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).init();
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("which model?")?.into();
    let threads = arguments.next().map_or(Ok(2), |threads| threads.parse())?;
    let blocks = arguments.next().map_or(Ok(64), |blocks| blocks.parse())?;
    let stop_token_ids = arguments.map(|id| id.parse()).collect::<Result<Vec<u32>, _>>()?;
    let config = ModelConfig { path, threads, max_running: 4, ..ModelConfig::default() };

    let loader = ModelLoader::open(&config)?;
    let weights = loader.footprint().weights;
    let kept = weights + (blocks * loader.block_bytes()) as u64;
    let (stop, stopped) = channel();
    let (before, watch) = (Memory::now()?, std::thread::spawn(move || watch(&stopped)));
    let begun = Instant::now();
    let executor = loader.load(blocks, &MemoryFiles::default())?;
    let seconds = begun.elapsed().as_secs_f64();
    drop(stop);
    let most = watch.join().map_err(|_| "the thread that looks at the memory failed")?;
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let own = most.own.saturating_sub(before.own);
    println!("to be kept: weights {:.2} GiB, with the KV arena {:.2} GiB", gib(weights), gib(kept));
    println!(
        "most of this process's own while loading: {:.2} GiB, {:.1} % of that",
        gib(own),
        100.0 * own as f64 / kept as f64
    );
    println!("most of mapped files: {:.2} GiB; now {:.2} GiB", gib(most.files), gib(Memory::now()?.files));
    println!("loaded in {seconds:.1} s, digest {:016x}", executor.spec().model_digest);
    let limits = SchedulerConfig {
        max_running: 4,
        max_step_tokens: 512,
        inbox: 4,
        prefix_caching: false,
        speculate: Speculate::Off,
    };
    answer(&Engine::start(Box::new(executor), limits), stop_token_ids).await
}

/// Of this process, in bytes, as Linux counts them (proc(5)).
#[derive(Clone, Copy, Default)]
struct Memory {
    own: u64,
    files: u64,
}

impl Memory {
    fn now() -> std::io::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let field = |name: &str| -> u64 {
            let value = status.lines().find_map(|line| line.strip_prefix(name));
            value.and_then(|value| value.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0) * 1024
        };
        Ok(Self { own: field("RssAnon:"), files: field("RssFile:") })
    }
}

fn watch(stopped: &Receiver<()>) -> Memory {
    let mut most = Memory::default();
    while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        let now = Memory::now().unwrap_or_default();
        most = Memory { own: most.own.max(now.own), files: most.files.max(now.files) };
    }
    most
}

async fn answer(engine: &Engine, stop_token_ids: Vec<u32>) -> Result<(), Failure> {
    let prompt: Vec<u32> = (0..32).map(|i| (i * 7919 % engine.spec().vocab_size) as u32).collect();
    let lease = Arc::new(engine.pool().try_reserve(engine.pool().blocks_for(prompt.len() + ANSWER as usize))?);
    let begun = Instant::now();
    let mut stream = engine.submit(SequenceRequest {
        id: "answer".into(),
        prompt_len: prompt.len(),
        tokens: prompt,
        computed: 0,
        lease,
        max_new_tokens: ANSWER,
        sampling: SamplingParams::GREEDY.into(),
        ignore_eos: false,
        stop_token_ids,
        deadline: None,
        priority: 0,
        report_layers: Vec::new(),
    })?;
    while let Some(event) = stream.next().await {
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        match event {
            SequenceEvent::Failed(error) => return Err(error.into()),
            SequenceEvent::Token { id, logprob, .. } => {
                println!("{ms:8.0} ms: token {id}, log-probability {logprob:.3}")
            }
            SequenceEvent::Finished { reason, .. } => println!("{ms:8.0} ms: finished: {reason:?}"),
            _ => {}
        }
    }
    Ok(())
}
