//! The prefix index at the size of a large cluster: 1,000 nodes and up to as many hashes as it may hold. Prints
//! medians. `cargo bench -p tandem-router --bench index`
//!
//! A look-up's time is mostly memory: "cold" rows go through prompts in turn, whose entries are in no cache by then;
//! "hot" rows ask for one prompt again and again.
#![allow(clippy::unwrap_used, reason = "a benchmark has nobody to report errors to")]
use std::hint::black_box;
use std::time::{Duration, Instant};

use tandem_proto::hash::sequence_hashes;
use tandem_proto::{CacheSalt, SequenceHash, SequenceKey};
use tandem_router::index::{CacheChanges, PrefixIndex};

const NODES: u64 = 1_000;
/// Of a prompt.
const BLOCKS: usize = 1_000;
/// So many prompts of a kind, far from each other.
const PROMPTS: u64 = 64;
/// Changes of a message, as nodes send them at most.
const MESSAGE: usize = 1_024;
const RUNS: usize = 2_001;

fn main() {
    for hashes in [500_000, 4_000_000] {
        let mut cluster = Cluster::new(hashes);
        println!("{NODES} nodes, {hashes} hashes; prompts of {BLOCKS} blocks; median and 99th percentile");
        println!("\nlook-up (PrefixIndex::matches)");
        cluster.look_ups();
        println!("\nchanges (PrefixIndex::apply, {MESSAGE} of them in a message)");
        cluster.messages();
        println!("\na node's death (PrefixIndex::remove)");
        cluster.deaths();
        println!();
    }
    let tokens: Vec<u32> = (0..BLOCKS as u32 * 16).collect();
    let key = SequenceKey::new(7, CacheSalt::NONE);
    println!("hashes of a prompt, once for each attempt");
    row("16,000 tokens", 1, time(201, || drop(black_box(sequence_hashes(key, black_box(&tokens), 16)))));
}

type Prompt = Vec<SequenceHash>;

/// As a sequence's: any numbers, no two alike.
fn hashes(prompt: u64, blocks: usize) -> Prompt {
    let spread = |x: u64| {
        let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    };
    let name = |number| u128::from(spread(number)) << 64 | u128::from(spread(!number));
    (0..blocks as u64).map(|block| name(prompt << 32 | block).into()).collect()
}

struct Cluster {
    index: PrefixIndex,
    /// Number of each node's next change.
    next: Vec<u64>,
}

impl Cluster {
    /// Each node holds blocks of its own; together they fill the index but for what the prompts need.
    fn new(limit: usize) -> Self {
        let mut cluster = Self { index: PrefixIndex::new(limit, 0x5eed), next: vec![0; NODES as usize] };
        let own = (limit - 5 * PROMPTS as usize * BLOCKS) / NODES as usize;
        for node in 0..NODES {
            cluster.tell(node, true, &hashes(node, own), false);
        }
        cluster
    }

    fn tell(&mut self, node: u64, snapshot: bool, hashes: &[SequenceHash], removed: bool) {
        let next = &mut self.next[node as usize];
        let removed = if removed { vec![u8::MAX; hashes.len().div_ceil(8)] } else { Vec::new() };
        let events = CacheChanges { first: *next, snapshot, hashes: hashes.to_vec(), removed };
        *next += hashes.len() as u64;
        self.index.apply(node, &events).unwrap();
    }

    /// Prompts of which each node holds so many blocks.
    fn prompts(&mut self, name: u64, blocks: impl Fn(u64, u64) -> usize) -> Vec<Prompt> {
        let prompts: Vec<Prompt> = (0..PROMPTS).map(|i| hashes(name + i, BLOCKS)).collect();
        for (i, prompt) in prompts.iter().enumerate() {
            for node in 0..NODES {
                match blocks(node, i as u64) {
                    0 => {}
                    blocks => self.tell(node, false, &prompt[..blocks], false),
                }
            }
        }
        prompts
    }

    fn look_ups(&mut self) {
        let nobody: Vec<Prompt> = (0..PROMPTS).map(|i| hashes(90_000 + i, BLOCKS)).collect();
        let few = self.prompts(10_000, |node, i| if node % 250 == i { BLOCKS } else { 0 });
        let system = self.prompts(20_000, |node, i| match node {
            _ if node % 500 == i => BLOCKS,
            _ if node % 2 == 0 => 64,
            _ => 0,
        });
        let ten =
            self.prompts(30_000, |node, i| if node % 100 == i { (node as usize / 100 + 1) * BLOCKS / 10 } else { 0 });
        let all = self.prompts(40_000, |_, i| if i < 4 { BLOCKS } else { 0 });
        let staircase = self.prompts(50_000, |node, i| if i < 4 { node as usize + 1 } else { 0 });
        self.look_up("nobody holds it", &nobody, 0);
        self.look_up("4 nodes hold all of it", &few, 4);
        self.look_up("2 hold all, 500 its first 64 blocks", &system, 500);
        self.look_up("10 nodes, each 100 blocks more", &ten, 10);
        self.look_up("all 1,000 hold all of it", &all[..4], 1_000);
        self.look_up("1,000 nodes, each one block more", &staircase[..4], 1_000);
    }

    fn look_up(&mut self, name: &str, prompts: &[Prompt], nodes: usize) {
        assert!(prompts.iter().all(|prompt| self.index.matches(prompt).len().abs_diff(nodes) <= 2), "{name}");
        let mut turn = 0;
        let cold = time(RUNS, || {
            turn += 1;
            black_box(self.index.matches(black_box(&prompts[turn % prompts.len()])));
        });
        row(&format!("{name}, cold"), 1, cold);
        let hot = time(RUNS, || drop(black_box(self.index.matches(black_box(&prompts[0])))));
        row(&format!("{name}, hot"), 1, hot);
    }

    fn messages(&mut self) {
        let fresh: Vec<Prompt> = (0..400).map(|i| hashes(60_000 + i, MESSAGE)).collect();
        let before = self.index.totals().evicted;
        for (name, node, removed) in [
            ("new hashes, the oldest forgotten for them", 0, false),
            ("hashes that one other node holds", 1, false),
            ("hashes that two other nodes hold", 2, false),
            ("hashes that two other nodes hold, removed", 0, true),
            ("hashes that nobody else holds, removed", 1, true),
        ] {
            let mut messages = fresh.iter();
            let times = time(fresh.len(), || self.tell(node, false, messages.next().unwrap(), removed));
            row(name, MESSAGE, times);
        }
        assert!(self.index.totals().evicted - before > 100_000, "the index was full");
    }

    fn deaths(&mut self) {
        let mut nodes = 500..NODES;
        let times = time(101, || self.index.remove(nodes.next().unwrap()));
        row("of its own blocks and parts of prompts", 1, times);
    }
}

fn time(runs: usize, mut what: impl FnMut()) -> Vec<Duration> {
    let mut times: Vec<Duration> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            what();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times
}

fn row(name: &str, of: usize, times: Vec<Duration>) {
    let micros = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1e6;
    let each = if of > 1 { format!("  {:6.0} ns each", micros(50) * 1e3 / of as f64) } else { String::new() };
    println!("  {name:<50} {:9.2} µs {:9.2} µs{each}", micros(50), micros(99));
}
