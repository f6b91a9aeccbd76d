//! How long the choice of nodes takes, and whether that grows linearly: medians over random clusters of 10, 100 and
//! 1,000 nodes, half of each role, for prompts of 2,000 tokens. Once the choice alone, once with the node table around
//! it: views brought up to date, the plan's work booked and given back; then a prediction by the table alone, and the
//! answer that no node has room. `cargo bench -p tandem-router --bench select`.
use std::hint::black_box;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_proto::v1;
use tandem_router::capacity::{Ahead, Capacity, Demand};
use tandem_router::membership::{Expected, Membership};
use tandem_router::select::calibrate::Links;
use tandem_router::select::cost::StepCost;
use tandem_router::select::pending_streams::PendingStreams;
use tandem_router::select::policy::Policy;
use tandem_router::select::processor::Processor;
use tandem_router::select::ways::Ways;
use tandem_router::select::{Cluster, LocalPrefill, NodeView, Role, Settings, Wish, Work, select};

const DEMAND: Demand = Demand { prompt_tokens: 2_000, max_tokens: 256, answer_tokens: 256, hashes: Vec::new() };
const BLOCK_TOKENS: u32 = 16;
const NODES: [usize; 3] = [10, 100, 1_000];
/// The share of nodes that hold some of the prompt.
const CACHED: f64 = 0.2;
const ROUNDS: usize = 2_000;

fn main() {
    println!("{:>6} {:>14} {:>12} {:>12} {:>14}", "nodes", "policy", "median µs", "p99 µs", "ns a node");
    for nodes in NODES {
        for (policy, local) in [
            (Policy::Joint, LocalPrefill::Never),
            (Policy::Joint, LocalPrefill::Auto),
            (Policy::LeastLoaded, LocalPrefill::Never),
        ] {
            let settings = Settings { policy, local, ..Settings::default() };
            let name = match (policy, local) {
                (Policy::Joint, LocalPrefill::Auto) => "joint, local",
                _ => policy.as_str(),
            };
            tell(nodes, name, measure(nodes, &settings));
        }
        tell(nodes, "with the table", measure_table(nodes));
        tell(nodes, "predicted", measure_prediction(nodes));
        tell(nodes, "no room", measure_room(nodes));
    }
}

fn tell(nodes: usize, name: &str, (median, p99): (Duration, Duration)) {
    let (median_us, p99_us) = (micros(median), micros(p99));
    println!("{nodes:>6} {name:>14} {median_us:>12.2} {p99_us:>12.2} {:>14.1}", median_us * 1e3 / nodes as f64);
}

/// The same through the node table.
fn measure_table(count: usize) -> (Duration, Duration) {
    let (membership, wish) = (table(count), Wish::default());
    timed(|now| drop(black_box(membership.route(&DEMAND, &wish, now)).expect("every node can take the request")))
}

/// What a request is told before it may enter, where it has a deadline.
fn measure_prediction(count: usize) -> (Duration, Duration) {
    let membership = table(count);
    timed(|now| assert!(black_box(membership.predict(&DEMAND, now)).is_some(), "all have measured their steps"))
}

/// All nodes are looked at: each has enough before it.
fn measure_room(count: usize) -> (Duration, Duration) {
    let membership = table(count);
    let ahead = Ahead { requests: 10_000, ..Ahead::default() };
    timed(|now| assert!(!black_box(membership.has_room(&DEMAND, &ahead, 4, now)), "nobody has room"))
}

/// Median and 99th percentile of `act`.
fn timed(act: impl Fn(Instant)) -> (Duration, Duration) {
    let time = |_| {
        let start = Instant::now();
        act(start);
        start.elapsed()
    };
    let mut times: Vec<Duration> = (0..ROUNDS).map(time).collect();
    times.sort_unstable();
    (times[ROUNDS / 2], times[ROUNDS * 99 / 100])
}

fn table(count: usize) -> Membership {
    let expected = Expected { model_digest: 1, eos_token_id: 0 };
    let membership = Membership::new(expected, Duration::from_secs(3)).with_local_prefill(LocalPrefill::Auto);
    let (mut rng, now) = (StdRng::seed_from_u64(count as u64), Instant::now());
    for index in 0..count {
        let view = node(index, &mut rng);
        let role = if view.role == Role::Prefill { v1::Role::Prefill } else { v1::Role::Decode };
        let transport =
            v1::TransportInfo { backend: "mem".into(), name: "mem".into(), build_id: "1".into(), reach: None };
        let registered = membership.register(
            v1::Register {
                node_id: view.node_id.to_string(),
                role: role.into(),
                incarnation: view.session,
                compatibility_digest: 1,
                protocol: tandem_proto::PROTOCOL_VERSION,
                model_digest: 1,
                endpoint: "http://127.0.0.1:1".into(),
                transports: vec![transport],
                total_blocks: view.total_blocks,
                block_tokens: BLOCK_TOKENS,
                max_context_tokens: view.max_context_tokens,
                max_running: view.max_running,
                max_batched_tokens: view.max_step_tokens,
                arithmetic: "f32".into(),
                kv_order: "bf16-pairs".into(),
                life: view.session,
                ..v1::Register::default()
            },
            now,
        );
        let StepCost { base_ms, token_ms, context_ms, decode_token_ms, decode_context_ms } = view.step_cost;
        let load = v1::Load {
            running: view.running,
            queued_tokens: rng.random_range(0..8_000),
            free_blocks: view.free_blocks,
            running_tokens: view.reported.context,
            step_cost: Some(v1::StepCost {
                base_ms,
                token_ms,
                context_ms,
                decode_token_ms: Some(decode_token_ms),
                decode_context_ms: Some(decode_context_ms),
            }),
            ..v1::Load::default()
        };
        membership.report(registered.expect("accepted").session, &load, now);
    }
    membership
}

/// Median and 99th percentile of one choice.
fn measure(count: usize, settings: &Settings) -> (Duration, Duration) {
    let mut rng = StdRng::seed_from_u64(count as u64);
    let mut nodes: Vec<NodeView> = (0..count).map(|index| node(index, &mut rng)).collect();
    let (links, mut ways) = (links(count, &mut rng), Ways::default());
    let mem = v1::TransportInfo { backend: "mem".into(), ..v1::TransportInfo::default() };
    ways.enter(Role::Prefill, &v1::Register { transports: vec![mem], ..v1::Register::default() });
    let wish = Wish::default();
    let mut times = Vec::with_capacity(ROUNDS);
    for turn in 0..ROUNDS as u64 {
        // Loads change between two requests, as they do in a cluster.
        let changed = rng.random_range(0..count);
        nodes[changed].backlog_ms = rng.random_range(0.0..500.0);
        let start = Instant::now();
        let plan = select(&Cluster { nodes: &nodes, links: &links, ways: &ways }, &DEMAND, &wish, settings, turn);
        times.push(start.elapsed());
        assert!(black_box(plan).is_ok(), "every node can take the request");
    }
    times.sort_unstable();
    (times[ROUNDS / 2], times[ROUNDS * 99 / 100])
}

fn node(index: usize, rng: &mut StdRng) -> NodeView {
    let role = if index.is_multiple_of(2) { Role::Prefill } else { Role::Decode };
    let requests = rng.random_range(0..32);
    let speed = rng.random_range(0.8..1.25);
    NodeView {
        session: index as u64 + 1,
        node_id: format!("{}-{index}", role.as_str()).into(),
        role,
        domains: [0].into(),
        block_tokens: BLOCK_TOKENS,
        total_blocks: 8_192,
        free_blocks: rng.random_range(1_024..8_192),
        max_context_tokens: 8_192,
        max_running: 64,
        max_step_tokens: 512,
        draining: false,
        shut: rng.random_bool(0.01),
        running: requests,
        reported: Work { requests, context: u64::from(requests) * 700, ..Work::default() },
        routed: Work::default(),
        held: Work::default(),
        pending_streams: PendingStreams::default(),
        processor: Processor::reported(Some(&v1::Processor { id: index as u64 + 1, cores: 8, threads: 8 })),
        step_cost: StepCost {
            base_ms: 3.0 * speed,
            token_ms: 0.05 * speed,
            context_ms: 0.00002 * speed,
            decode_token_ms: 0.05 * speed,
            decode_context_ms: 0.00002 * speed,
        },
        prefill_factor: rng.random_range(0.8..1.3),
        backlog_ms: rng.random_range(0.0..500.0),
        computes_prompts: true,
        cached_blocks_of_prompt: if rng.random_bool(CACHED) { rng.random_range(1..125) } else { 0 },
    }
}

/// As many pairs as a router that has run for a while knows.
fn links(count: usize, rng: &mut StdRng) -> Links {
    let mut links = Links::default();
    for _ in 0..4 * count {
        let prefill = 2 * rng.random_range(0..count as u64 / 2) + 1;
        let decode = 2 * rng.random_range(0..count as u64 / 2) + 2;
        links.observe((prefill, decode), 0, 46_000_000, 125, rng.random_range(10.0..60.0));
    }
    links
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
