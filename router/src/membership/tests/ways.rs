//! Which nodes make a pair, by which way, and what is learnt of the ways.
use tandem_proto::v1::TransportInfo;
use tandem_proto::v1::transport_info::Reach;

use super::*;
use crate::select::Candidate;

/// A node of this host: it shares memory there, and listens on the network, or nowhere else.
fn on_host(id: &str, role: v1::Role, host: &str, networked: bool) -> v1::Register {
    let shm = v1::HostReach { boot_id: host.into(), ..v1::HostReach::default() };
    let tcp = v1::NetworkReach { loopback: !networked, boot_id: host.into(), ..v1::NetworkReach::default() };
    let transport = |name: &str, reach| TransportInfo {
        backend: name.into(),
        name: name.into(),
        build_id: "1".into(),
        reach: Some(reach),
    };
    let transports = vec![transport("shm", Reach::Host(shm)), transport("tcp", Reach::Network(tcp))];
    v1::Register { transports, ..register(id, role, 1) }
}

fn ways_of(route: &Route) -> Vec<(Option<String>, String, Option<String>)> {
    let of = |plan: &Candidate| {
        let (prefill, way) = (plan.prefill_id.as_ref(), plan.way.as_ref());
        (prefill.map(|id| id.to_string()), plan.decode_id.to_string(), way.map(|way| way.name.to_string()))
    };
    let mut ways: Vec<_> = route.candidates.iter().map(of).collect();
    ways.sort();
    ways
}

#[test]
fn each_pair_has_its_best_way_and_those_without_one_are_no_pairs() {
    let (membership, now) = (membership(), Instant::now());
    for info in [
        on_host("p-a", v1::Role::Prefill, "a", true),
        on_host("d-a", v1::Role::Decode, "a", true),
        on_host("d-b", v1::Role::Decode, "b", true),
        on_host("d-c", v1::Role::Decode, "c", false),
    ] {
        membership.register(info, now).unwrap();
    }
    let pair = |decode: &str, way: &str| (Some("p-a".to_owned()), decode.to_owned(), Some(way.to_owned()));
    let told = route(&membership, 16, 16).unwrap();
    assert_eq!(ways_of(&told), [pair("d-a", "shm"), pair("d-b", "tcp")]);
    assert_eq!(told.apart.len(), 1);
    assert!(told.apart[0].is_of("d-c") && told.apart[0].why.starts_with("no common way: p-a offers shm on host a"));
    let far = membership.register(on_host("p-c", v1::Role::Prefill, "c", false), now).unwrap();
    drop(told);
    let told = route(&membership, 16, 16).unwrap();
    assert!(ways_of(&told).contains(&(Some("p-c".into()), "d-c".into(), Some("shm".into()))));
    assert!(ways_of(&told).contains(&(Some("p-c".into()), "d-a".into(), Some("tcp".into()))), "it can dial");
    drop(told);
    membership.leave(far.session, "it left");
    assert_eq!(ways_of(&route(&membership, 16, 16).unwrap()).len(), 2);
}

#[test]
fn nodes_without_a_way_are_refused_with_words_or_serve_alone() {
    let (membership, now) = (membership(), Instant::now());
    membership.register(on_host("p", v1::Role::Prefill, "a", false), now).unwrap();
    let alone = membership.clone().with_local_prefill(LocalPrefill::Auto);
    membership.register(on_host("d", v1::Role::Decode, "b", false), now).unwrap();
    assert!(!membership.has_pair() && alone.has_pair());
    let why = route(&membership, 16, 16).unwrap_err();
    assert!(matches!(why, NoPair::NoWay(_)), "{why}");
    let why = why.to_string();
    assert!(why.starts_with("no common way: p offers shm on host a") && why.contains("--kv-listen"), "{why}");
    let local = route(&alone, 16, 16).unwrap();
    assert_eq!((local.plan(), local.way(), local.apart.len()), (Plan::Local, None, 1));
}

#[test]
fn a_way_that_failed_is_left_alone_for_a_time_and_speeds_are_of_ways() {
    let (membership, start) = (membership(), Instant::now());
    for (id, role) in [("p", v1::Role::Prefill), ("d", v1::Role::Decode)] {
        let node = membership.register(on_host(id, role, "a", true), start).unwrap();
        let step_cost = Some(v1::StepCost { token_ms: 1.0, ..v1::StepCost::default() });
        membership.report(node.session, &v1::Load { free_blocks: 64, step_cost, ..v1::Load::default() }, start);
    }
    let way = |now| {
        let route = membership.route(&ask(96, 10), &Wish::default(), now).unwrap();
        let way = route.way().unwrap().clone();
        (way.name.to_string(), way.instead_of.map(|name| name.to_string()), route)
    };
    let (name, _, first) = way(start);
    assert_eq!(name, "shm");
    first.handed_off(&v1::Verified { bytes: 6_000, blocks: 6, copying_ms: 600.0, ..v1::Verified::default() });
    assert!(way(start).2.candidates[0].terms.exposed_ms > 400.0, "its speed is known");
    first.handoff_failed("the peer is gone", start);
    let (name, failed, second) = way(start);
    assert_eq!((name.as_str(), failed.as_deref()), ("tcp", Some("shm")));
    assert_eq!(second.candidates[0].terms.exposed_ms, 0.0, "of this way nothing is known");
    let fallbacks = membership.way_fallbacks();
    assert_eq!(fallbacks.iter().map(|((from, to), n)| (&**from, &**to, *n)).collect::<Vec<_>>(), [("shm", "tcp", 1)]);
    let later = start + crate::select::ways::FIRST_COOL_DOWN;
    assert_eq!(way(later).0, "shm", "tried again");
}

#[test]
fn verified_hand_offs_teach_the_speed_of_a_way() {
    let start = Instant::now();
    let (membership, ..) = measured_pair(start);
    let route = |now| membership.route(&ask(96, 10), &Wish::default(), now).unwrap();
    let first = route(start);
    assert_eq!(first.candidates[0].terms.exposed_ms, 0.0, "nothing is known");
    let kv = v1::Verified { bytes: 6_000, blocks: 6, copying_ms: 600.0, ..v1::Verified::default() };
    first.handed_off(&kv);
    drop(first);
    let next = route(start);
    let terms = next.candidates[0].terms;
    assert!((terms.exposed_ms - (600.0 - terms.prefill_ms)).abs() < 1e-6, "{terms:?}");
}
