//! The node table with time as an argument: expiry, replacement, refusal, booking.
mod lives;
mod lock;
mod names;
mod node_capacity;
mod predictions;
mod retries;
mod ways;

use tandem_ports::life_digest;
use tandem_proto::{ErrorKind, SequenceHash};

use super::breaker::Circuit;
use super::*;
use crate::select::numerics::Numerics;
use crate::select::{Avoid, Plan, Role};

const LEASE: Duration = Duration::from_secs(3);
/// Who was silent for so long is suspect.
const SUSPECT: Duration = Duration::from_millis(LEASE.as_millis() as u64 / 2 + 1);

fn membership() -> Membership {
    Membership::new(Expected { model_digest: 9, eos_token_id: 2 }, LEASE)
}

pub(crate) fn register(node_id: &str, role: v1::Role, incarnation: u64) -> v1::Register {
    v1::Register {
        node_id: node_id.into(),
        role: role.into(),
        incarnation,
        compatibility_digest: 5,
        protocol: tandem_proto::PROTOCOL_VERSION,
        model_digest: 9,
        model_name: "m".into(),
        endpoint: "http://127.0.0.1:1".into(),
        transports: vec![v1::TransportInfo {
            backend: "mem".into(),
            name: "mem".into(),
            build_id: "1".into(),
            reach: None,
        }],
        total_blocks: 64,
        block_tokens: 16,
        max_context_tokens: 1024,
        max_running: 8,
        eos_token_id: 2,
        max_batched_tokens: 512,
        processor: None,
        arithmetic: "f32".into(),
        kv_order: "bf16-pairs".into(),
        life: incarnation,
        link: 1,
        secret_digest: life_digest(&secret(incarnation)).to_vec(),
        ended: Vec::new(),
    }
}

/// Of a life.
fn secret(life: u64) -> [u8; 32] {
    std::array::from_fn(|byte| life.to_le_bytes()[byte % 8])
}

fn route(membership: &Membership, prompt: u32, max: u32) -> Result<Route, NoPair> {
    membership.route(&ask(prompt, max), &Wish::default(), Instant::now())
}

/// Before any answer has ended.
fn ask(prompt_tokens: u32, max_tokens: u32) -> Demand {
    Demand { prompt_tokens, max_tokens, answer_tokens: max_tokens.clamp(1, 256), hashes: Vec::new() }
}

fn prefill_of(route: &Route) -> u64 {
    route.prefill.as_ref().expect("a pair").session
}

fn dead(node: &Node) -> bool {
    node.dead.is_cancelled()
}

/// What a node reports that has measured its steps: 10 ms and 1 ms a token.
fn measured(queued_tokens: u64) -> v1::Load {
    let step_cost = Some(v1::StepCost { base_ms: 10.0, token_ms: 1.0, ..v1::StepCost::default() });
    v1::Load { free_blocks: 64, queued_tokens, step_cost, ..v1::Load::default() }
}

/// A prefill and a decode node that have measured their steps.
fn measured_pair(start: Instant) -> (Membership, Arc<Node>, Arc<Node>) {
    let membership = membership();
    let prefill = membership.register(register("p", v1::Role::Prefill, 1), start).unwrap();
    let decode = membership.register(register("d", v1::Role::Decode, 1), start).unwrap();
    for node in [&prefill, &decode] {
        membership.report(node.session, &measured(0), start);
    }
    (membership, prefill, decode)
}

fn at(start: Instant, millis: u64) -> Instant {
    start + Duration::from_millis(millis)
}

#[test]
fn silence_longer_than_the_lease_is_death() {
    let (membership, start) = (membership(), Instant::now());
    let prefill = membership.register(register("p", v1::Role::Prefill, 1), start).unwrap();
    let decode = membership.register(register("d", v1::Role::Decode, 1), start).unwrap();
    membership.report(decode.session, &v1::Load::default(), start + LEASE);
    membership.expire(start + LEASE);
    assert!(membership.has_pair());
    membership.expire(start + LEASE + Duration::from_millis(1));
    assert!(dead(&prefill) && !dead(&decode) && !membership.has_pair());
    assert!(prefill.why.get().unwrap().contains("silent for 3000 ms"));
}

#[test]
fn a_router_that_stood_still_does_not_blame_its_nodes() {
    let (membership, start) = (membership(), Instant::now());
    let node = membership.register(register("p", v1::Role::Prefill, 1), start).unwrap();
    let mut now = start;
    let mut watch = |from: Duration, until: Duration| {
        now = start + from;
        while now <= start + until {
            membership.expire(now);
            now += LEASE / 10;
        }
    };
    watch(Duration::ZERO, LEASE / 2);
    watch(LEASE * 5 / 4, LEASE * 3 / 2);
    assert!(!dead(&node), "half of the time went by unheard");
    watch(LEASE * 3 / 2, LEASE * 2);
    assert!(dead(&node), "and now it is silent");
}

#[test]
fn a_router_that_stood_still_for_its_lease_has_no_nodes_before_they_come_again() {
    let (membership, start) = (membership(), Instant::now());
    let of = |id, role, life| v1::Register { life, ..register(id, role, 1) };
    let prefill = membership.register(of("p", v1::Role::Prefill, 1), start).unwrap();
    membership.register(of("d", v1::Role::Decode, 2), start).unwrap();
    membership.expire(start);
    let route = |now| membership.route(&ask(8, 4), &Wish::default(), now).map(drop);
    route(start + LEASE).unwrap();
    // The request wakes before the watch does.
    let woken = start + LEASE + Duration::from_millis(1);
    assert!(route(woken).is_err() && dead(&prefill), "its own half of the lease has ended");
    membership.register(of("p", v1::Role::Prefill, 3), woken).unwrap();
    membership.register(of("d", v1::Role::Decode, 4), woken).unwrap();
    route(woken).unwrap();
}

#[test]
fn a_new_incarnation_replaces_the_old_one() {
    let (membership, now) = (membership(), Instant::now());
    let old = membership.register(register("p", v1::Role::Prefill, 1), now).unwrap();
    let new = membership.register(register("p", v1::Role::Prefill, 2), now + SUSPECT).unwrap();
    assert!(dead(&old) && !dead(&new));
    // The late end of the old stream does not touch the new node.
    membership.leave(old.session, "late");
    assert_eq!(membership.totals().prefill_nodes, 1);
}

#[test]
fn deaths_are_counted_by_their_reason_and_drained_nodes_are_none() {
    let (membership, start) = (membership(), Instant::now());
    let join = |id: &str, life: u64, after: Duration| {
        membership.register(register(id, v1::Role::Decode, life), start + after).unwrap().session
    };
    join("replaced", 1, Duration::ZERO);
    join("silent", 2, Duration::ZERO);
    let (replacement, lost, drained) =
        (join("replaced", 3, SUSPECT), join("lost", 4, SUSPECT), join("drained", 5, SUSPECT));
    membership.leave(lost, "its stream was cut");
    membership.draining(drained, start);
    membership.leave(drained, "it left");
    membership.report(replacement, &v1::Load::default(), start + LEASE);
    membership.expire(start + LEASE + Duration::from_millis(1));
    let deaths = DEATHS.map(|death| (death.as_str(), membership.totals().deaths[death as usize]));
    assert_eq!(deaths, [("silent", 1), ("stream_lost", 1), ("replaced", 1)]);
}

#[test]
fn requests_on_nodes_wait_beyond_the_places_of_a_batch() {
    let (membership, now) = (membership(), Instant::now());
    let few = |id, role| v1::Register { max_running: 2, ..register(id, role, 1) };
    membership.register(few("p", v1::Role::Prefill), now).unwrap();
    membership.register(few("d", v1::Role::Decode), now).unwrap();
    let mut routes: Vec<Route> = (0..5).map(|_| route(&membership, 16, 16).unwrap()).collect();
    let totals = membership.totals();
    assert_eq!((totals.with_prefill, totals.beyond_prefill, totals.beyond_decode), (5, 3, 3));
    assert_eq!(totals.waiting(), 3, "each once, though it is beyond both batches");
    // First tokens: who had them wait for decode.
    routes.iter().for_each(Route::prefilled);
    assert_eq!((membership.totals().beyond_prefill, membership.totals().waiting()), (0, 3));
    routes.truncate(2);
    assert_eq!(membership.totals().waiting(), 0);
}

#[test]
fn what_does_not_match_is_refused_in_words() {
    type Change = fn(&mut v1::Register);
    let cases: [(Change, &str); 15] = [
        (|r| r.model_digest = 1, "digest"),
        (|r| r.compatibility_digest = 0, "compatibility_digest"),
        (|r| r.incarnation = 0, "incarnation"),
        (|r| r.node_id = "a b".into(), "visible ASCII"),
        (|r| r.role = 77, "no role"),
        (|r| r.transports.clear(), "0 transports; a node has 1 to 8"),
        (|r| r.transports[0].build_id.clear(), "lacks its backend, name or build id"),
        (|r| r.transports[0].name = "x".repeat(129), "printable bytes"),
        (|r| r.transports.push(r.transports[0].clone()), "transport 1 twice"),
        (|r| r.endpoint = "ftp://x".into(), "http://host:port"),
        (|r| r.protocol = 0, "speaks protocol 0"),
        (|r| r.block_tokens = 48, "blocks of 48 tokens"),
        (|r| r.arithmetic = String::new(), "arithmetic is no name"),
        (|r| r.kv_order = "a b".into(), "kv_order is no name"),
        (|r| r.kv_order = "x".repeat(65), "kv_order is no name"),
    ];
    for (change, words) in cases {
        let mut info = register("p", v1::Role::Prefill, 1);
        change(&mut info);
        let error = membership().register(info, Instant::now()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Incompatible);
        assert!(error.message.contains(words), "{}", error.message);
    }
}

#[test]
fn all_nodes_have_one_block_size() {
    let (membership, now) = (membership(), Instant::now());
    let mut lives = 0;
    let mut of_size = |id, role, block_tokens| {
        lives += 1;
        v1::Register { block_tokens, ..register(id, role, lives) }
    };
    membership.register(of_size("p", v1::Role::Prefill, 64), now).unwrap();
    let error = membership.register(of_size("d", v1::Role::Decode, 16), now).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Incompatible);
    assert!(error.message.contains("blocks of 16 tokens, node `p` has 64") && error.message.contains("--block-size"));
    membership.register(of_size("d", v1::Role::Decode, 64), now).unwrap();
    // 64 blocks of 64 tokens hold what 64 of 16 would not.
    let route = route(&membership, 600, 400).unwrap();
    assert_eq!(route.candidates[0].blocks_short, 0);
    assert_eq!(membership.json()["nodes"][0]["block_tokens"], 64);
    // The last node of the old size may come back with another.
    membership.leave(prefill_of(&route), "it left");
    membership.register(of_size("d", v1::Role::Decode, 16), now + SUSPECT).unwrap();
}

#[test]
fn all_nodes_compute_alike() {
    let (membership, now) = (membership(), Instant::now());
    let dots = |id, role, life| v1::Register { arithmetic: "bf16-dots".into(), ..register(id, role, life) };
    membership.register(register("p", v1::Role::Prefill, 1), now).unwrap();
    let error = membership.register(dots("d", v1::Role::Decode, 1), now).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Incompatible);
    assert!(error.message.contains("`bf16-dots`, node `p` in `f32`"), "{}", error.message);
    assert!(error.message.contains("--arithmetic"), "{}", error.message);
    let int8 = v1::Register { kv_order: "int8-pairs".into(), ..register("d", v1::Role::Decode, 2) };
    let error = membership.register(int8, now).unwrap_err();
    assert!(error.message.contains("--kv-dtype"), "{}", error.message);
    // Who was refused was never in the table, and may come back as it should be.
    assert!(!membership.has_pair());
    membership.register(register("d", v1::Role::Decode, 2), now).unwrap();
    let began = route(&membership, 16, 16).unwrap();
    assert_eq!(membership.json()["nodes"][0]["arithmetic"], "f32");
    assert_eq!(membership.json()["nodes"][0]["kv_order"], "bf16-pairs");
    // All nodes are replaced by others, while an answer waits to go on.
    let continues = Some(Numerics::of(&began.decode.info));
    let [prefill, decode] = [prefill_of(&began), began.decode.session];
    [prefill, decode].into_iter().for_each(|session| membership.leave(session, "it left"));
    membership.register(dots("p", v1::Role::Prefill, 4), now).unwrap();
    membership.register(dots("d", v1::Role::Decode, 5), now).unwrap();
    let wish = Wish { continues: continues.clone(), ..Wish::default() };
    let why = membership.route(&ask(16, 16), &wish, now).unwrap_err();
    assert_eq!(
        why.to_string(),
        "the answer began in `f32` over KV `bf16-pairs`, the available nodes compute in `bf16-dots` over KV `bf16-pairs`"
    );
    let fresh = route(&membership, 16, 16).expect("a new answer may begin");
    assert_ne!(Some(Numerics::of(&fresh.decode.info)), continues);
}

#[test]
fn a_draining_node_gets_nothing_new() {
    let (membership, now) = (membership(), Instant::now());
    membership.register(register("p", v1::Role::Prefill, 1), now).unwrap();
    let decode = membership.register(register("d", v1::Role::Decode, 1), now).unwrap();
    membership.draining(decode.session, now);
    assert_eq!(route(&membership, 10, 10).unwrap_err(), NoPair::NoNode(Role::Decode));
    assert!(!dead(&decode));
    // Its running requests read their last events from their own connections.
    membership.leave(decode.session, "it left");
    assert!(!dead(&decode));
}

#[test]
fn a_node_that_leaves_without_draining_is_dead() {
    let (membership, now) = (membership(), Instant::now());
    let decode = membership.register(register("d", v1::Role::Decode, 1), now).unwrap();
    membership.leave(decode.session, "it left");
    assert!(dead(&decode));
}

#[test]
fn bookings_spread_a_burst_and_go_with_their_request() {
    let (membership, now) = (membership(), Instant::now());
    for (id, role) in [("p0", v1::Role::Prefill), ("p1", v1::Role::Prefill), ("d", v1::Role::Decode)] {
        membership.register(register(id, role, 1), now).unwrap();
    }
    let (first, second) = (route(&membership, 100, 10).unwrap(), route(&membership, 100, 10).unwrap());
    assert_ne!(prefill_of(&first), prefill_of(&second));
    let busy = prefill_of(&first);
    drop(second);
    // The first one's work is still booked, the second one's is not.
    assert_ne!(prefill_of(&route(&membership, 100, 10).unwrap()), busy);
    // A report replaces the booking, and the drop of a replaced booking takes nothing away.
    membership.report(busy, &v1::Load::default(), now);
    drop(first);
    let shown = membership.json();
    assert_eq!(shown["nodes"].as_array().unwrap().len(), 3);
}

#[test]
fn the_table_is_bounded() {
    let (membership, now) = (membership(), Instant::now());
    for i in 0..MAX_NODES {
        membership.register(register(&format!("p{i}"), v1::Role::Prefill, 1), now).unwrap();
    }
    let error = membership.register(register("one-more", v1::Role::Prefill, 1), now).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Overloaded);
}

#[test]
fn a_node_that_drained_is_not_declared_dead() {
    let (membership, now) = (membership(), Instant::now());
    let node = membership.register(register("p", v1::Role::Prefill, 7), now).unwrap();
    membership.draining(node.session, now);
    membership.leave(node.session, "its stream was cut");
    membership.register(register("p", v1::Role::Prefill, 7), now).unwrap();
}

#[test]
fn a_node_that_keeps_failing_is_tried_last_and_one_request_at_a_time_tries_whether_it_is_well() {
    let (membership, start) = (membership(), Instant::now());
    let nodes = [("p", v1::Role::Prefill), ("d0", v1::Role::Decode), ("d1", v1::Role::Decode)]
        .map(|(id, role)| membership.register(register(id, role, 1), start).unwrap());
    let wish = |avoid: &[u64]| Wish { avoid: Avoid { nodes: avoid.to_vec(), pairs: vec![] }, ..Wish::default() };
    let load = v1::Load { free_blocks: 64, ..v1::Load::default() };
    let route = |avoid: &[u64], now| {
        nodes.iter().for_each(|node| membership.report(node.session, &load, now));
        membership.route(&ask(100, 10), &wish(avoid), now).unwrap()
    };
    let (bad, good) = {
        let first = route(&[], start);
        let bad = first.decode.session;
        (bad, route(&[bad], start).decode.session)
    };
    for _ in 0..3 {
        route(&[good], start).failed(Role::Decode, start);
    }
    assert_eq!(membership.breakers(start).opened, [0, 1]);
    let shown = membership.json();
    assert_eq!(shown["nodes"].as_array().unwrap().iter().filter(|node| node["breaker"] == "open").count(), 1);
    // Whatever else speaks against the good one.
    assert!((0..4).all(|_| route(&[good], start).decode.session == good));
    let later = start + Duration::from_secs(2);
    let probe = route(&[good], later);
    assert_eq!(probe.decode.session, bad);
    assert_eq!(route(&[good], later).decode.session, good, "one probe at a time");
    probe.failed(Role::Decode, later);
    drop(probe);
    assert_eq!(route(&[good], later + Duration::from_millis(3_999)).decode.session, good);
    let later = later + Duration::from_secs(4);
    // A probe that ends without a verdict, because its client left, is no verdict.
    drop(route(&[good], later));
    let probe = route(&[good], later);
    assert_eq!(probe.decode.session, bad);
    probe.succeeded(Role::Decode);
    assert_eq!(route(&[good], later).decode.session, bad);
    assert!(membership.breakers(later).nodes.iter().all(|(_, _, circuit)| *circuit == Circuit::Closed));
}

#[test]
fn a_namesake_replaces_a_node_that_is_silent_and_no_other() {
    let (membership, start) = (membership(), Instant::now());
    let node = membership.register(register("d0", v1::Role::Decode, 1), start).unwrap();
    let at = |after| membership.register(register("d0", v1::Role::Decode, 2), start + after);
    let refused = at(LEASE / 2).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unavailable);
    assert!(refused.message.contains("another process") && refused.message.contains("--node-id"), "{refused}");
    assert_eq!(refused.retry_after, Some(Duration::from_millis(1)), "{refused}");
    assert_eq!(at(LEASE / 6).unwrap_err().retry_after, Some(LEASE / 3 + Duration::from_millis(1)));
    assert!(!dead(&node));
    let later = at(SUSPECT).unwrap();
    assert!(dead(&node) && !dead(&later));
}

#[test]
fn a_node_that_was_silent_for_half_the_lease_is_tried_last() {
    let (membership, start) = (membership(), Instant::now());
    let nodes = [("p", v1::Role::Prefill), ("d0", v1::Role::Decode), ("d1", v1::Role::Decode)]
        .map(|(id, role)| membership.register(register(id, role, 1), start).unwrap());
    let later = start + SUSPECT;
    let load = v1::Load { free_blocks: 64, running: 3, ..v1::Load::default() };
    let heard = membership.route(&ask(100, 10), &Wish::default(), start).unwrap().decode.session;
    [nodes[0].session, heard].iter().for_each(|session| membership.report(*session, &load, later));
    assert!((0..8).all(|_| membership.route(&ask(100, 10), &Wish::default(), later).unwrap().decode.session == heard));
}

#[test]
fn preemptions_are_counted_since_a_node_joined_and_stay_when_it_leaves() {
    let (membership, now) = (membership(), Instant::now());
    let report = |node: &Node, preemptions| {
        membership.report(node.session, &v1::Load { preemptions, ..v1::Load::default() }, now);
        membership.totals().preemptions
    };
    let [a, b] = ["d0", "d1"].map(|id| membership.register(register(id, v1::Role::Decode, 1), now).unwrap());
    assert_eq!([report(&a, 7), report(&a, 9), report(&b, 0), report(&b, 3)], [0, 2, 2, 5]);
    membership.leave(a.session, "gone");
    assert_eq!(membership.totals().preemptions, 5);
    let again = membership.register(register("d0", v1::Role::Decode, 2), now).unwrap();
    assert_eq!([report(&again, 9), report(&again, 10)], [5, 6], "the same process");
}

#[test]
fn nodes_of_one_kind_are_a_group_and_the_numbers_are_used_again() {
    let (membership, now) = (membership(), Instant::now());
    let mut lives = 0;
    let mut of_kind = |id: &str, role, compatibility_digest| {
        lives += 1;
        v1::Register { compatibility_digest, ..register(id, role, lives) }
    };
    let old = membership.register(of_kind("p", v1::Role::Prefill, 5), now).unwrap();
    membership.register(of_kind("d", v1::Role::Decode, 6), now).unwrap();
    assert!(!membership.has_pair());
    assert_eq!(route(&membership, 10, 10).unwrap_err(), NoPair::Incompatible);
    membership.leave(old.session, "it left");
    membership.register(of_kind("q", v1::Role::Prefill, 7), now).unwrap();
    assert!(!membership.has_pair(), "the number that is free is not the decode node's");
    membership.register(of_kind("r", v1::Role::Prefill, 6), now).unwrap();
    assert_eq!(route(&membership, 10, 10).unwrap().candidates.len(), 1);
}

fn stored(first: u64, snapshot: bool, hashes: &[u128]) -> CacheChanges {
    CacheChanges { first, snapshot, hashes: names(hashes), removed: Vec::new() }
}

fn names(hashes: &[u128]) -> Vec<SequenceHash> {
    hashes.iter().copied().map(SequenceHash::from).collect()
}

#[test]
fn the_cached_blocks_of_a_node_go_with_it() {
    let (membership, now) = (membership().with_index_blocks(5), Instant::now());
    let prefill = membership.register(register("p", v1::Role::Prefill, 1), now).unwrap();
    let decode = membership.register(register("d", v1::Role::Decode, 2), now).unwrap();
    membership.kv_events(prefill.session, &stored(0, true, &[1, 2, 3]), now).unwrap();
    membership.kv_events(decode.session, &stored(0, true, &[1, 2]), now).unwrap();
    let cached = |membership: &Membership| -> Vec<u32> {
        membership.table.with(|table| table.cached_of(&names(&[1, 2, 3, 4]), now))
    };
    assert_eq!(cached(&membership), [3, 2]);
    let shown = membership.json();
    assert_eq!((&shown["index"]["blocks"], &shown["index"]["limit"]), (&json!(3), &json!(5)));
    assert_eq!((&shown["nodes"][0]["indexed_blocks"], &shown["nodes"][1]["indexed_blocks"]), (&json!(2), &json!(3)));
    let gap = membership.kv_events(prefill.session, &stored(9, false, &[7]), now).unwrap_err();
    assert_eq!((gap.expected, gap.found, membership.index().gaps), (Some(3), 9, 1));
    // Another life of it, death by its stream's end, and a drained one's leave: what they held is gone at once.
    let next = membership.register(register("p", v1::Role::Prefill, 3), now + SUSPECT).unwrap();
    assert_eq!((cached(&membership), membership.index().blocks), (vec![2, 0], 2));
    membership.kv_events(prefill.session, &stored(0, true, &[1]), now).unwrap();
    membership.kv_events(next.session, &stored(0, true, &[1]), now).unwrap();
    assert_eq!(cached(&membership), [2, 1], "what comes late from a dead one is ignored");
    membership.leave(decode.session, "it left");
    assert_eq!(cached(&membership), [1]);
    membership.draining(next.session, now);
    membership.leave(next.session, "it left");
    assert_eq!((cached(&membership), membership.index().blocks), (vec![], 0));
}

#[test]
fn a_node_that_tells_of_its_cache_is_not_silent() {
    let (membership, start) = (membership(), Instant::now());
    let node = membership.register(register("p", v1::Role::Prefill, 1), start).unwrap();
    membership.kv_events(node.session, &stored(0, true, &[]), start + LEASE).unwrap();
    membership.expire(start + LEASE);
    membership.expire(start + LEASE * 2);
    assert!(!dead(&node));
}
