//! After its first rounds a step allocates nothing: neither the thread that runs it nor those that help. A program of
//! its own, because it counts what the whole process allocates.
#[allow(dead_code, reason = "the oracle's answers are other tests' matter")]
mod smollm2;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tandem_engine::cpu::{CpuExecutor, ModelConfig};
use tandem_engine::ops::simd::ArithmeticChoice;
use tandem_engine::{Batch, BatchItem, BlockPool, Choose, Executor, SamplingParams, Seq, Tokens};

/// Steps that must pass without an allocation, one after another.
const CLEAN_STEPS: usize = 16;
/// Rounds of so many steps in which memory may still grow: each thread has its own, and makes it when it first gets a
/// task of that kind. On a busy machine that takes a while.
const ROUNDS: usize = 40;
const BLOCKS: usize = 256;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: the system's allocator does all the work, with the caller's arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[test]
fn a_step_allocates_nothing() {
    for arithmetic in [ArithmeticChoice::F32, ArithmeticChoice::Auto] {
        let config = ModelConfig { blocks: BLOCKS, threads: 2, arithmetic, ..ModelConfig::default() };
        let mut executor = smollm2::executor(config);
        let blocks = BlockPool::new(BLOCKS, 16);
        let greedy = Arc::new(SamplingParams::GREEDY);
        let item = |tokens: usize, start: usize| BatchItem {
            seq: start as Seq,
            tokens: Tokens::Given((0..tokens as u32).map(|token| 1000 + token).collect()),
            start,
            blocks: Arc::new(blocks.try_reserve(blocks.blocks_for(start + tokens)).expect("room")),
            choose: Some(Choose {
                sampling: Arc::clone(&greedy),
                uniform: 0.5,
                forbidden: None,
                history: None,
                drafts: Vec::new(),
            }),
        };
        // One whose attention is split, several, a prompt's chunk beside them.
        let batch = |items| Batch { items, report_layers: vec![1, 15] };
        let alone = batch(vec![item(1, 1100)]);
        let decode = batch(vec![item(1, 700), item(1, 0), item(1, 33), item(1, 40), item(1, 16)]);
        let mixed = batch(vec![item(1, 9), item(150, 20), item(40, 600)]);
        let last = |item: &BatchItem| BatchItem { tokens: Tokens::Last, ..item.clone() };
        let continued = batch(decode.items.iter().map(last).collect());
        for batch in [&alone, &decode, &continued, &mixed] {
            settles(&mut executor, batch);
        }
    }
}

fn settles(executor: &mut CpuExecutor, batch: &Batch) {
    let mut allocations = 0;
    for _ in 0..ROUNDS {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..CLEAN_STEPS {
            executor.begin(batch).expect("a batch");
            executor.finish(&mut |_| {}).expect("a step");
        }
        allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
        if allocations == 0 {
            return;
        }
    }
    panic!("{allocations} allocations in the last {CLEAN_STEPS} steps of {} items", batch.items.len());
}
