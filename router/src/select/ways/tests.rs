//! Ways between few nodes in virtual time; and between random ones against a comparison of each two.
use proptest::prelude::*;
use tandem_proto::v1::transport_info::Reach;
use tandem_proto::v1::{HostReach, NetworkReach, TransportInfo};
use tandem_proto::ways::common_way;

use super::super::tests::node;
use super::*;

fn transport(name: &str, reach: Reach) -> TransportInfo {
    let backend = name.split('/').next().unwrap_or_default().to_owned();
    TransportInfo { backend, name: format!("{name}(detail)"), build_id: format!("{name}/1"), reach: Some(reach) }
}

fn shm(boot_id: &str) -> TransportInfo {
    transport("ucx/shm", Reach::Host(HostReach { boot_id: boot_id.into(), ..HostReach::default() }))
}

fn tcp(loopback: bool, boot_id: &str) -> TransportInfo {
    let reach = NetworkReach { loopback, boot_id: boot_id.into(), ..NetworkReach::default() };
    transport("tcp", Reach::Network(reach))
}

fn registered(transports: Vec<TransportInfo>) -> v1::Register {
    v1::Register { compatibility_digest: 1, transports, ..v1::Register::default() }
}

fn enter(ways: &mut Ways, session: u64, role: Role, info: &v1::Register) -> NodeView {
    NodeView { domains: ways.enter(role, info), ..node(session, role) }
}

/// A pair on one host with shared memory and sockets.
fn two_ways() -> (Ways, NodeView, NodeView) {
    let (mut ways, info) = (Ways::default(), registered(vec![shm("a"), tcp(true, "a")]));
    let prefill = enter(&mut ways, 1, Role::Prefill, &info);
    let decode = enter(&mut ways, 2, Role::Decode, &info);
    (ways, prefill, decode)
}

fn name(ways: &Ways, prefill: &NodeView, decode: &NodeView) -> Option<(String, Option<String>)> {
    let told = ways.describe(prefill, decode, ways.between(prefill, decode)?)?;
    Some((told.name.to_string(), told.instead_of.map(|name| name.to_string())))
}

#[test]
fn a_way_that_failed_cools_down_for_its_pair_and_the_next_is_taken() {
    let (mut ways, prefill, decode) = two_ways();
    let now = Instant::now();
    let [fast, slow] = [("ucx/shm", None), ("tcp", Some("ucx/shm"))]
        .map(|(name, failed)| Some((name.to_owned(), failed.map(str::to_owned))));
    assert_eq!(name(&ways, &prefill, &decode), fast);
    let shm = ways.between(&prefill, &decode).expect("a way");
    let fallback = ways.failed(&prefill, &decode, shm, now).expect("there is another way");
    assert_eq!((&*fallback.from, &*fallback.to, fallback.cool_down), ("ucx/shm", "tcp", FIRST_COOL_DOWN));
    assert_eq!(name(&ways, &prefill, &decode), slow);
    let other = NodeView { session: 9, ..prefill.clone() };
    assert_eq!(name(&ways, &other, &decode), fast, "of this pair alone");
    assert_eq!(ways.failed(&prefill, &decode, shm, now), None, "a hand-off that began before");
    ways.refresh(now + FIRST_COOL_DOWN);
    assert_eq!(name(&ways, &prefill, &decode), fast, "it is tried again");
    let mut at = now + FIRST_COOL_DOWN;
    for expected in [10, 20, 40, 80, 160, 300, 300] {
        let again = ways.failed(&prefill, &decode, shm, at).expect("there is another way");
        assert_eq!(again.cool_down.as_secs(), expected);
        at += again.cool_down;
    }
    ways.refresh(at);
    ways.succeeded((1, 2), shm);
    assert_eq!(ways.failed(&prefill, &decode, shm, at).map(|again| again.cool_down), Some(FIRST_COOL_DOWN));
    assert_eq!(
        ways.fallbacks().iter().map(|((from, to), count)| (&**from, &**to, *count)).collect::<Vec<_>>(),
        [("ucx/shm", "tcp", 9)]
    );
}

#[test]
fn where_all_ways_fail_the_fastest_is_taken_and_one_alone_has_nothing_to_remember() {
    let (mut ways, prefill, decode) = two_ways();
    let now = Instant::now();
    let shm = ways.between(&prefill, &decode).expect("a way");
    ways.failed(&prefill, &decode, shm, now).expect("a fall-back");
    let tcp = ways.between(&prefill, &decode).expect("a way");
    assert_ne!(shm, tcp);
    assert!(ways.failed(&prefill, &decode, tcp, now).is_some_and(|back| &*back.to == "ucx/shm"));
    assert_eq!(ways.between(&prefill, &decode), Some(shm));
    let alone = NodeView { domains: [tcp].into(), ..decode };
    assert_eq!((ways.failed(&prefill, &alone, tcp, now), ways.between(&prefill, &alone)), (None, Some(tcp)));
}

#[test]
fn what_failed_is_forgotten_with_its_node_and_is_bounded() {
    let (mut ways, prefill, decode) = two_ways();
    let now = Instant::now();
    let shm = ways.between(&prefill, &decode).expect("a way");
    ways.failed(&prefill, &decode, shm, now).expect("a fall-back");
    assert!(ways.leave(decode.session, &decode.domains).is_empty(), "the other node is still in them");
    assert!(ways.failing.is_empty());
    for session in 10..10 + 2 * MAX_FAILING as u64 {
        ways.failed(&NodeView { session, ..prefill.clone() }, &decode, shm, now);
    }
    assert_eq!(ways.failing.len(), MAX_FAILING);
    let later = now + FIRST_COOL_DOWN;
    assert!(ways.failed(&prefill, &decode, shm, later).is_some(), "those that are over make room");
    assert_eq!(ways.leave(prefill.session, &prefill.domains).len(), prefill.domains.len());
    assert!(ways.numbers.is_empty() && ways.domains.iter().all(Option::is_none));
}

#[test]
fn pairs_without_a_way_are_told_with_what_each_has() {
    let mut ways = Ways::default();
    let here = registered(vec![shm("a"), tcp(true, "a")]);
    let (there, net) = (registered(vec![shm("b"), tcp(true, "b")]), registered(vec![tcp(false, "b")]));
    let prefill = enter(&mut ways, 1, Role::Prefill, &here);
    let far = enter(&mut ways, 2, Role::Decode, &there);
    let near = enter(&mut ways, 3, Role::Decode, &net);
    assert!(is_alone(&prefill, &[prefill.clone(), far.clone()]) && !is_alone(&prefill, std::slice::from_ref(&prefill)));
    assert!(!is_alone(&prefill, &[prefill.clone(), far.clone(), near.clone()]));
    ways.look_for_gaps([(&prefill, &here), (&far, &there), (&near, &net)].into_iter());
    let apart = ways.apart().clone();
    assert_eq!(apart.len(), 1);
    assert!(apart[0].is_of("decode2") && apart[0].is_of("prefill1") && !apart[0].is_of("decode3"));
    assert!(apart[0].why.contains("prefill1 offers ucx/shm on host a") && apart[0].why.contains("loopback of host b"));
    let stranger = v1::Register { compatibility_digest: 2, ..there };
    ways.look_for_gaps([(&prefill, &here), (&far, &stranger)].into_iter());
    assert!(ways.apart().is_empty(), "they would not understand each other");
}

fn any_transports() -> impl Strategy<Value = Vec<TransportInfo>> {
    let boot = || prop::sample::select(vec!["a", "b", "c"]);
    let tcp = (any::<bool>(), boot()).prop_map(|(loopback, boot)| tcp(loopback, boot));
    (prop::option::of(boot().prop_map(shm)), prop::option::of(tcp), any::<bool>()).prop_map(|(shm, tcp, turned)| {
        let mut transports: Vec<_> = shm.into_iter().chain(tcp).collect();
        if turned {
            transports.reverse();
        }
        transports
    })
}

fn any_nodes() -> impl Strategy<Value = Vec<(Role, v1::Register)>> {
    let role = prop_oneof![Just(Role::Prefill), Just(Role::Decode)];
    let node = (role, any_transports(), 1u64..3).prop_map(|(role, transports, compatibility_digest)| {
        (role, v1::Register { compatibility_digest, ..registered(transports) })
    });
    prop::collection::vec(node, 0..24)
}

proptest! {
    /// The numbers say what a comparison of the two registrations says, whoever came and went before.
    #[test]
    fn numbers_say_what_the_registrations_say(nodes in any_nodes(), leaving in prop::collection::vec(any::<bool>(), 24)) {
        let mut ways = Ways::default();
        let mut views: Vec<(NodeView, &v1::Register)> = Vec::new();
        for (session, (role, info)) in (1..).zip(&nodes) {
            views.push((enter(&mut ways, session, *role, info), info));
            if leaving[session as usize - 1] {
                let (gone, _) = views.remove(views.len() / 2);
                ways.leave(gone.session, &gone.domains);
            }
        }
        let of = |role| views.iter().filter(move |(view, _)| view.role == role);
        let mut apart = 0;
        for (prefill, sends) in of(Role::Prefill) {
            for (decode, receives) in of(Role::Decode) {
                let fit = sends.compatibility_digest == receives.compatibility_digest;
                let expected = common_way(&sends.transports, &receives.transports).filter(|_| fit);
                let told = ways.between(prefill, decode).and_then(|way| ways.describe(prefill, decode, way));
                let told = told.map(|way| (way.name.to_string(), way.build_id.to_string()));
                apart += usize::from(fit && told.is_none());
                prop_assert_eq!(told, expected.map(|way| (way.name, way.domain.build_id)));
            }
        }
        ways.look_for_gaps(views.iter().map(|(view, info)| (view, *info)));
        prop_assert_eq!(ways.apart().len(), apart.min(MAX_APART));
        views.iter().for_each(|(view, _)| drop(ways.leave(view.session, &view.domains)));
        prop_assert!(ways.numbers.is_empty() && ways.domains.iter().all(Option::is_none));
    }
}
