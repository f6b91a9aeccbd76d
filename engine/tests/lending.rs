//! Cores that come and go while a model computes change nothing of what it computes; and an engine lends its own when
//! it has nothing to run.
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tandem_engine::cpu::{CpuExecutor, Lend, ModelConfig};
use tandem_engine::ops::lending::Lending;
use tandem_engine::{
    Batch, BatchItem, BlockPool, Choose, Engine, Executor, KvLease, SamplingParams, SchedulerConfig, Seq,
    SequenceEvent, SequenceRequest, Speculate, Tokens,
};

#[allow(dead_code, reason = "the outputs of the other engine are not looked at")]
mod smollm2;

const BLOCKS: usize = 256;
const OWN: usize = 0;
const OTHERS: usize = 1;

fn executor(lending: Option<&Path>) -> CpuExecutor {
    let lending = lending.map(|file| Lend { file: file.to_owned(), own: vec![OWN] });
    smollm2::executor(ModelConfig { blocks: BLOCKS, threads: 1, lending, ..ModelConfig::default() })
}

/// Two prompts, and then steps of both: the bits of all logits.
fn logits(executor: &mut CpuExecutor, prompts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let blocks = BlockPool::new(BLOCKS, 16);
    let greedy = Arc::new(SamplingParams::GREEDY);
    let choose = Choose { sampling: greedy, uniform: 0.5, forbidden: None, history: None, drafts: Vec::new() };
    let leases: Vec<_> = prompts.iter().map(|_| Arc::new(blocks.try_reserve(20).expect("room"))).collect();
    let item = |seq: usize, tokens, start| BatchItem {
        seq: seq as Seq,
        tokens,
        start,
        blocks: Arc::clone(&leases[seq]),
        choose: Some(choose.clone()),
    };
    let mut all = Vec::new();
    for step in 0..24 {
        let items = prompts.iter().enumerate().map(|(seq, prompt)| match step {
            0 => item(seq, Tokens::Given(prompt.clone()), 0),
            step => item(seq, Tokens::Last, prompt.len() + step - 1),
        });
        executor.begin(&Batch { items: items.collect(), report_layers: Vec::new() }).expect("a batch");
        executor.finish(&mut |_| {}).expect("a step");
        let logits = executor.logits();
        let of_items = (0..prompts.len()).map(|item| logits.of(item).expect("it chose a token"));
        all.extend(of_items.map(|logits| logits.iter().map(|logit| logit.to_bits()).collect()));
    }
    all
}

#[test]
fn borrowed_cores_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cores");
    let prompts: Vec<Vec<u32>> = [200, 37].map(|n| (0..n).map(|token| 1000 + token).collect()).into();
    let alone = logits(&mut executor(None), &prompts);

    let mut helped = executor(Some(&file));
    let mut other = Lending::join(&file, &[OTHERS]).unwrap();
    let (stop, mut lent) = (AtomicBool::new(false), 0.0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 0.. {
                other.lend();
                std::thread::park_timeout(Duration::from_micros(700 * (turn % 7)));
                other.take_back();
                std::thread::park_timeout(Duration::from_micros(300 * (turn % 5)));
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for _ in 0..3 {
            helped.rest();
            assert!(logits(&mut helped, &prompts) == alone, "other logits");
            lent += helped.lent_share();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(
        lent > 0.0 || std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1),
        "nothing was borrowed"
    );
}

/// An answer that is far from its end while its first tokens are read, whatever they are.
fn request(lease: KvLease) -> SequenceRequest {
    SequenceRequest {
        id: "test".into(),
        tokens: (0..30).map(|token| 1000 + token).collect(),
        prompt_len: 30,
        computed: 0,
        lease: Arc::new(lease),
        max_new_tokens: 200,
        sampling: SamplingParams::GREEDY.into(),
        ignore_eos: true,
        stop_token_ids: Vec::new(),
        deadline: None,
        priority: 0,
        report_layers: Vec::new(),
    }
}

#[tokio::test]
async fn an_engine_lends_its_core_while_it_has_nothing_to_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cores");
    let config = SchedulerConfig {
        max_running: 4,
        max_step_tokens: 512,
        inbox: 4,
        prefix_caching: false,
        speculate: Speculate::Off,
    };
    let engine = Engine::start(Box::new(executor(Some(&file))), config);
    let place = Lending::join(&file, &[OTHERS]).unwrap().place(OWN);
    assert!(!place.is_lent(), "it has not warmed up");
    engine.warm_up(512).await.unwrap();
    let lent_soon = || {
        let begun = Instant::now();
        while !place.is_lent() && begun.elapsed() < Duration::from_secs(5) {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        place.is_lent()
    };
    assert!(lent_soon());
    let mut stream = engine.submit(request(engine.pool().try_reserve(15).unwrap())).unwrap();
    let mut tokens = 0;
    while tokens < 8 {
        if let SequenceEvent::Token { .. } = stream.next().await.expect("an answer of more tokens") {
            tokens += 1;
            assert!(!place.is_lent(), "in the middle of an answer");
        }
    }
    // Cancels the rest: this thread may read a token many steps late, and the answer must not have ended by then.
    drop(stream);
    assert!(lent_soon());
}
