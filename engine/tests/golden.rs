//! Greedy tokens of the real model against an independent engine (`smollm2/mod.rs`).
//! A difference is rounding only where the oracle's two best logits almost tie: every token up to the first such step
//! must be equal. `--nocapture` prints how near each prompt comes.
mod smollm2;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_engine::cpu::{CpuExecutor, ModelConfig};
use tandem_engine::ops::simd::{ArithmeticChoice, Isa, IsaChoice};
use tandem_engine::{Batch, BatchItem, BlockPool, Choose, Chosen, Executor, KvDtype, SamplingParams, Tokens};

const MAX_STEPS: usize = 64;

#[test]
fn f32_kv_gives_the_oracles_tokens() {
    compare(Runner::load(KvDtype::F32, ArithmeticChoice::F32), 0.02, 0.05);
}

#[test]
fn bf16_kv_gives_the_oracles_tokens() {
    compare(Runner::load(KvDtype::Bf16, ArithmeticChoice::F32), 0.05, 0.05);
}

/// Measured: differences at gaps of 0.019 and less, first log-probabilities up to 0.17 away.
#[test]
fn int8_kv_gives_the_oracles_tokens_where_it_is_sure() {
    compare(Runner::load(KvDtype::Int8, ArithmeticChoice::F32), 0.1, 0.3);
}

/// Measured: differences at gaps of 0.080 and less, first log-probabilities up to 0.26 away.
#[test]
fn int8_kv_and_bf16_kernels_give_the_oracles_tokens_where_it_is_sure() {
    compare(Runner::load(KvDtype::Int8, ArithmeticChoice::Auto), 0.2, 0.5);
}

/// On machines without bf16 kernels this is the test above.
#[test]
fn bf16_kernels_give_the_oracles_tokens() {
    // Tiles round the weights, too. On emulated ones a token differed where the gap is 0.080, which is 0.037 in the
    // oracle's own bf16.
    let tie = if Isa::choose(IsaChoice::Amx, false).is_some() { 0.1 } else { 0.05 };
    // The oracle itself, with bf16 activations, is up to 0.097 away from its f32 log-probabilities.
    compare(Runner::load(KvDtype::Bf16, ArithmeticChoice::Auto), tie, 0.1);
}

#[test]
#[ignore = "prints tokens a second; run with --release -- --ignored --nocapture"]
fn speed() {
    let mut runner = Runner::load(KvDtype::Bf16, ArithmeticChoice::F32);
    let mut prompt = |rows: usize, items: usize, start: usize| {
        let blocks = || Arc::new(runner.pool.try_reserve((start + rows).div_ceil(16)).expect("room"));
        let tokens: Vec<u32> = (0..rows as u32).map(|i| 1000 + i * 7).collect();
        let given = || Tokens::Given(tokens.clone());
        let item = |seq| BatchItem { seq, tokens: given(), start, blocks: blocks(), choose: Some(greedy()) };
        let batch = Batch { items: (0..items as u64).map(item).collect(), report_layers: Vec::new() };
        runner.step(&batch);
        let (begin, mut steps) = (Instant::now(), 0);
        while begin.elapsed() < Duration::from_millis(700) {
            runner.step(&batch);
            steps += 1;
        }
        let speed = (rows * items * steps) as f64 / begin.elapsed().as_secs_f64();
        println!("{items} × {rows} tokens from position {start}: {speed:.0} tokens/s");
    };
    for (rows, items, start) in [
        (128, 1, 0),
        (512, 1, 0),
        (1024, 1, 0),
        (2048, 1, 0),
        (1, 1, 8),
        (1, 1, 256),
        (1, 1, 1024),
        (1, 4, 256),
        (1, 8, 256),
    ] {
        prompt(rows, items, start);
    }
}

/// `tie`: the gap from which on tokens must be equal; `near`: how close the first step's log-probabilities must be.
fn compare(mut runner: Runner, tie: f32, near: f32) {
    let golden = smollm2::golden();
    assert_eq!(golden.prompts.len(), 14);
    // Eight at a time: the batch is part of what is tested.
    for prompts in golden.prompts.chunks(8) {
        let results = runner.generate(prompts);
        for (prompt, (tokens, first)) in prompts.iter().zip(results) {
            let want = &prompt.out.f32;
            let far = want.top5_first.iter().map(|&(token, logprob)| (first[token as usize] - logprob).abs());
            let far = far.fold(0.0f32, f32::max);
            let equal = tokens.iter().zip(&want.tokens).take_while(|(got, want)| got == want).count();
            let gap = want.gap.get(equal).map_or("all".into(), |gap| format!("then a gap of {gap:.3}"));
            println!("{:<24} first step within {far:.3}, {equal:>2} tokens equal, {gap}", prompt.name);
            let sure = want.sure(tie);
            assert_eq!(&tokens[..sure.len()], sure, "{}", prompt.name);
            assert!(far < near, "{}: log-probabilities of the first step are {far} off", prompt.name);
        }
    }
}

struct Runner {
    executor: CpuExecutor,
    pool: BlockPool,
}

impl Runner {
    fn load(kv_dtype: KvDtype, arithmetic: ArithmeticChoice) -> Self {
        let config = ModelConfig { kv_dtype, blocks: 256, threads: 2, arithmetic, ..ModelConfig::default() };
        let executor = smollm2::executor(config);
        let pool = BlockPool::new(256, 16);
        Self { executor, pool }
    }

    fn step(&mut self, batch: &Batch) -> Vec<Chosen> {
        self.executor.begin(batch).expect("a batch");
        self.executor.finish(&mut |_| {}).expect("a step").to_vec()
    }

    /// Greedy tokens and the log-probabilities of the first step, for each prompt; all run as one batch.
    fn generate(&mut self, prompts: &[smollm2::Prompt]) -> Vec<(Vec<u32>, Vec<f32>)> {
        let eos = self.executor.spec().eos_token_id;
        let mut items: Vec<BatchItem> = prompts
            .iter()
            .enumerate()
            .map(|(seq, prompt)| {
                let blocks = self.pool.blocks_for(prompt.ids.len() + MAX_STEPS);
                let blocks = Arc::new(self.pool.try_reserve(blocks).expect("room for eight prompts"));
                let tokens = Tokens::Given(prompt.ids.clone());
                BatchItem { seq: seq as u64, tokens, start: 0, blocks, choose: Some(greedy()) }
            })
            .collect();
        let mut results = vec![(Vec::new(), Vec::new()); prompts.len()];
        while !items.is_empty() {
            let batch = Batch { items, report_layers: Vec::new() };
            let chosen = self.step(&batch);
            items = Vec::new();
            for (index, item) in batch.items.into_iter().enumerate() {
                let (tokens, first) = &mut results[item.seq as usize];
                if tokens.is_empty() {
                    *first = log_softmax(self.executor.logits().of(index).expect("wanted"));
                }
                let Chosen::Token(sampled) = &chosen[index] else { panic!("{:?}", chosen[index]) };
                tokens.push(sampled.token);
                if sampled.token != eos && tokens.len() < MAX_STEPS {
                    items.push(BatchItem { tokens: Tokens::Last, start: item.end(), ..item });
                }
            }
        }
        results
    }
}

fn greedy() -> Choose {
    Choose {
        sampling: Arc::new(SamplingParams::GREEDY),
        uniform: 0.0,
        forbidden: None,
        history: None,
        drafts: Vec::new(),
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&logit| f64::from(logit - greatest).exp()).sum();
    logits.iter().map(|&logit| logit - greatest - total.ln() as f32).collect()
}
