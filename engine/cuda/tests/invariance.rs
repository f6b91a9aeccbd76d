//! The same bits, whatever a row is computed beside: over batch sizes, buckets, chunks, phases, prefixes that are there
//! already, resumes in the middle, and block sizes.
mod support;

use std::sync::Arc;

use support::*;
use tandem_cuda::kernels::product::Split;
use tandem_cuda::{CudaConfig, CudaExecutor, CudaLoader, Device};
use tandem_engine::{BatchItem, BlockPool, Choose, Executor, KvLease, SamplingParams, Tokens};

const PROMPT: usize = 45;
const STEPS: usize = 4;
/// One with windows and norms of heads, one with biases, one with neither.
const MODELS: [&str; 3] = ["qwen3", "qwen2.gguf", "llama"];

#[test]
fn bits_do_not_depend_on_chunks_phases_or_resumes() {
    if !device() {
        return;
    }
    for name in MODELS {
        let mut executor = load(&family(name));
        let ids = prompt(PROMPT);
        let (logits, tokens) = generate(&mut executor, &ids, PROMPT, STEPS);
        // Chunks of one are decode rows: by graph; all others single launches.
        for chunk in [1, 2, 7, 16, 33] {
            let (other, _) = generate_choosing_each(&mut executor, &ids, chunk);
            assert_eq!(bits(&other), bits(&logits[0]), "{name}: chunks of {chunk}");
        }
        // As a prompt what was generated before.
        let whole = [&ids[..], &tokens].concat();
        for (step, wanted) in logits.iter().enumerate() {
            let length = PROMPT + step;
            let (resumed, _) = generate(&mut executor, &whole[..length], length, 0);
            assert_eq!(bits(&resumed[0]), bits(wanted), "{name}: resumed after {step}");
        }
        // Another executor, into whose memory the blocks are copied half-way.
        assert_eq!(
            bits(&moved(&mut executor, &mut load(&family(name)), &whole)),
            bits(&logits[STEPS]),
            "{name}: moved"
        );
    }
}

/// Logits of the last of `ids`, in chunks that all choose.
fn generate_choosing_each(executor: &mut CudaExecutor, ids: &[u32], chunk: usize) -> (Vec<f32>, Vec<u32>) {
    let blocks = lease(&BlockPool::new(BLOCKS, 16), ids.len());
    for (index, piece) in ids.chunks(chunk).enumerate() {
        let step = item(1, given(piece), index * chunk, &blocks, Some(choose(&on_host())));
        run(executor, vec![step]).expect("a step");
    }
    (executor.logits().of(0).expect("wanted").to_vec(), ids.to_vec())
}

/// Logits of the last of `ids`: the first half computed by `from`, the rest by `to` over a copy of the blocks.
fn moved(from: &mut CudaExecutor, to: &mut CudaExecutor, ids: &[u32]) -> Vec<f32> {
    let half = ids.len() / 2;
    let (here, pool) = (lease(&BlockPool::new(BLOCKS, 16), ids.len()), BlockPool::new(BLOCKS, 16));
    let _others = lease(&pool, 100);
    let there = lease(&pool, ids.len());
    prefill(from, 9, &ids[..half], 0, 20, &here);
    let bytes = from.spec().block_bytes;
    let mut block = vec![0; bytes];
    for (source, target) in here.blocks().iter().zip(there.blocks()) {
        from.memory().read(*source as usize * bytes, &mut block);
        to.memory().write(*target as usize * bytes, &block);
    }
    prefill(to, 3, &ids[half..], half, 7, &there)
}

#[test]
fn bits_do_not_depend_on_neighbours_or_buckets() {
    if !device() {
        return;
    }
    for name in MODELS {
        let mut executor = load(&family(name));
        let ids = prompt(PROMPT);
        let (logits, tokens) = generate(&mut executor, &ids, PROMPT, 2);
        // With so many other sequences: buckets of 1 to 48, and a step of a prompt's chunk beside decode rows.
        for (neighbours, chunk) in [(0, 0), (1, 0), (2, 0), (6, 0), (14, 0), (33, 0), (3, 5), (1, 60)] {
            let pool = BlockPool::new(BLOCKS, 16);
            let (own, others) = (lease(&pool, PROMPT + 2), lease_each(&pool, neighbours));
            prefill(&mut executor, 1, &ids, 0, PROMPT, &own);
            let mut items: Vec<BatchItem> = (0..neighbours).map(|n| neighbour(n, &others[n])).collect();
            let place = neighbours / 2;
            items.insert(place, item(1, given(&tokens[..1]), PROMPT, &own, Some(choose(&on_host()))));
            let long = lease(&pool, chunk.max(1));
            if chunk > 0 {
                items.push(item(500, given(&prompt(chunk)), 0, &long, None));
            }
            run(&mut executor, items).expect("a step");
            let got = executor.logits().of(place).expect("wanted");
            assert_eq!(bits(got), bits(&logits[1]), "{name}: {neighbours} neighbours, a chunk of {chunk}");
        }
    }
}

/// Beyond a partition of keys: decode rows have theirs side by side where a card would be idle else, prompts one after
/// another.
#[test]
fn bits_do_not_depend_on_who_merges_partitions() {
    if !device() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    longer(&family("llama"), folder.path(), 2048);
    let config = CudaConfig { max_step_tokens: 512, ..config(folder.path()) };
    let mut executor = CudaLoader::open(&config).and_then(|loader| loader.load(BLOCKS)).expect("loads");
    let ids = prompt(1100);
    let mut logits = Vec::new();
    for chunk in [512, 200] {
        let blocks = lease(&BlockPool::new(BLOCKS, 16), ids.len());
        logits.push(bits(&prefill(&mut executor, 1, &ids, 0, chunk, &blocks)));
        // The last token once more, as a decode row, alone and among others.
        let pool = BlockPool::new(BLOCKS, 16);
        let (_own, others) = (lease(&pool, ids.len()), lease_each(&pool, 12));
        for neighbours in [0, 12] {
            let last = given(&ids[ids.len() - 1..]);
            let mut items = vec![item(1, last, ids.len() - 1, &blocks, Some(choose(&on_host())))];
            items.extend((0..neighbours).map(|n| neighbour(n, &others[n])));
            run(&mut executor, items).expect("a step");
            logits.push(bits(executor.logits().of(0).expect("wanted")));
        }
    }
    assert!(logits[1..].iter().all(|other| *other == logits[0]));
}

/// Over several segments of `k`: by kernels for few rows and for many, in blocks of their own, with a second launch
/// that adds them; and by cuBLASLt, where there is one. (`kernels/products.rs` has them one after another in a block
/// as well.)
#[test]
fn bits_do_not_depend_on_how_a_product_is_split() {
    if !device() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    wide(folder.path());
    let config = CudaConfig { max_running: 80, ..config(folder.path()) };
    let load = |library| {
        let config = CudaConfig { library, ..config.clone() };
        CudaLoader::open(&config).and_then(|loader| loader.load(BLOCKS)).expect("loads")
    };
    let mut executors = [load(false), load(true)];
    let ids = prompt(72);
    let last = ids.len() - 1;
    let mut logits = Vec::new();
    for (library, chunk, neighbours) in [(0, 72, 70), (0, 40, 0), (0, 20, 3), (1, 72, 70)] {
        let executor = &mut executors[library];
        let pool = BlockPool::new(BLOCKS, 16);
        let blocks = lease(&pool, ids.len());
        logits.push(bits(&prefill(executor, 1, &ids, 0, chunk, &blocks)));
        // The last token once more, as a decode row. Among 70 others the head's product is split as well.
        let others = lease_each(&pool, neighbours);
        let mut items = vec![item(1, given(&ids[last..]), last, &blocks, Some(choose(&on_host())))];
        items.extend((0..neighbours).map(|n| neighbour(n, &others[n])));
        run(executor, items).expect("a step");
        logits.push(bits(executor.logits().of(0).expect("wanted")));
    }
    let multiprocessors = Device::numbered(0).expect("a device").multiprocessors as usize;
    assert!([1, 4, 71, 72].iter().all(|&rows| Split::pays(rows, VOCABULARY, WIDE, multiprocessors)));
    assert!(logits[1..].iter().all(|other| *other == logits[0]), "bits differ");
}

fn lease_each(pool: &BlockPool, count: usize) -> Vec<Arc<KvLease>> {
    (0..count).map(|_| lease(pool, 16)).collect()
}

/// A sequence of one token, chosen by the device.
fn neighbour(index: usize, blocks: &Arc<KvLease>) -> BatchItem {
    item(100 + index as u64, given(&[3 + index as u32]), 0, blocks, Some(choose(&greedy())))
}

#[test]
fn bits_do_not_depend_on_who_computed_the_prefix() {
    if !device() {
        return;
    }
    let mut executor = load(&family("llama"));
    let ids = prompt(64);
    let (cold, _) = generate(&mut executor, &ids, 64, 0);
    let blocks = lease(&BlockPool::new(BLOCKS, 16), 64);
    // Another sequence has computed the first blocks, in other chunks.
    prefill(&mut executor, 10, &ids[..48], 0, 13, &blocks);
    executor.forget(10);
    let warm = prefill(&mut executor, 11, &ids[48..], 48, 16, &blocks);
    assert_eq!(bits(&warm), bits(&cold[0]));
}

#[test]
fn bits_do_not_depend_on_the_size_of_blocks() {
    if !device() {
        return;
    }
    let ids = prompt(PROMPT);
    let mut all = [16, 32, 64, 128].map(|block_tokens| {
        let config = CudaConfig { block_tokens, ..config(&family("qwen3")) };
        let mut executor = CudaLoader::open(&config).and_then(|loader| loader.load(12)).expect("loads");
        let pool = BlockPool::new(12, block_tokens);
        let blocks = lease(&pool, PROMPT);
        bits(&prefill(&mut executor, 1, &ids, 0, 20, &blocks))
    });
    let first = std::mem::take(&mut all[0]);
    assert!(all[1..].iter().all(|other| *other == first));
}

/// Decode steps of several sequences with the token from the device, from the host's slot, and given.
#[test]
fn the_last_token_is_the_given_one_wherever_it_is_kept() {
    if !device() {
        return;
    }
    let mut executor = load(&family("mistral.gguf"));
    let rules = |host: bool| if host { on_host() } else { greedy() };
    let mut answers = Vec::new();
    for (hosts, last) in [(false, true), (true, true), (false, false)] {
        let pool = BlockPool::new(BLOCKS, 16);
        let leases: Vec<_> = (0..3).map(|_| lease(&pool, 48)).collect();
        let mut tokens: Vec<Vec<u32>> = (0..3).map(|n| prompt(7 + 4 * n)).collect();
        for step in 0..6 {
            let sampling: Vec<Arc<SamplingParams>> = (0..3).map(|n| rules(hosts || n == 1)).collect();
            let items = (0..3).filter(|n| step < 3 || *n != 2 || step == 5).map(|n| {
                let all = &tokens[n];
                let choose: Choose = choose(&sampling[n]);
                match step {
                    0 => item(n as u64, given(all), 0, &leases[n], Some(choose)),
                    // The last sequence is not in every step.
                    _ if last => item(n as u64, Tokens::Last, all.len() - 1, &leases[n], Some(choose)),
                    _ => item(n as u64, given(&all[all.len() - 1..]), all.len() - 1, &leases[n], Some(choose)),
                }
            });
            let items: Vec<BatchItem> = items.collect();
            let of: Vec<usize> = items.iter().map(|item| item.seq as usize).collect();
            let chosen = run(&mut executor, items).expect("a step");
            of.iter().zip(&chosen).for_each(|(&n, chosen)| tokens[n].push(token(chosen)));
        }
        (0..3).for_each(|seq| executor.forget(seq));
        assert_eq!(executor.slots(), 0);
        answers.push(tokens);
    }
    assert!(answers[0] == answers[1] && answers[1] == answers[2], "{answers:?}");
}
