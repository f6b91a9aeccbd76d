//! The nodes of a request's next attempt: where there is room, among those against which least speaks.
use super::*;

#[test]
fn a_request_that_runs_goes_where_there_is_room() {
    let (membership, now) = (membership().with_choice(in_turn()), Instant::now());
    let join = |id: &str, role| membership.register(register(id, role, 1), now).unwrap().session;
    join("p", v1::Role::Prefill);
    let [full, other] = ["d0", "d1"].map(|id| join(id, v1::Role::Decode));
    let report = |session: u64, requests| {
        let others = Some(v1::CallCounts { requests, ..v1::CallCounts::default() });
        membership.report(session, &v1::Load { free_blocks: 64, others, ..v1::Load::default() }, now);
    };
    report(full, 8);
    let again = |wish: &Wish, unsound, without_room| {
        let accepts = Accepts { unsound, without_room, node_queue: 0 };
        membership.route_again(&ask(16, 16), wish, accepts, now).map(|route| route.decode.session)
    };
    let (any, in_turn) = (Wish::default(), || route(&membership, 16, 16).unwrap().decode.session);
    assert!((0..4).any(|_| in_turn() == full), "the policy looks at no load");
    assert!((0..4).all(|_| again(&any, false, false) == Ok(other)));
    report(other, 8);
    assert_eq!(again(&any, true, false), Err(NotYet::NoRoom));
    assert!(again(&any, false, true).is_ok());
    // Room is no reason for a node that failed the request, as long as another one is there.
    let avoid = |nodes: &[u64]| Wish { avoid: Avoid { nodes: nodes.to_vec(), pairs: Vec::new() }, ..Wish::default() };
    report(full, 0);
    assert_eq!(again(&avoid(&[full]), true, false), Err(NotYet::NoRoom));
    assert_eq!(again(&avoid(&[full, other]), false, false), Err(NotYet::Unsound));
    assert_eq!(again(&avoid(&[full, other]), true, false), Ok(full));
    assert_eq!(membership.totals().with_prefill, 0, "nothing stays booked");
}

#[test]
fn the_room_of_a_decode_that_was_let_go_is_free() {
    let (membership, now) = (membership(), Instant::now());
    membership.register(register("p", v1::Role::Prefill, 1), now).unwrap();
    let one = v1::Register { max_running: 1, ..register("d", v1::Role::Decode, 1) };
    membership.register(one, now).unwrap();
    let first = route(&membership, 16, 16).unwrap();
    let wish = Wish { keep: Some(prefill_of(&first)), ..Wish::default() };
    let again = || {
        membership.route_again(&ask(16, 16), &wish, Accepts { unsound: false, without_room: false, node_queue: 0 }, now)
    };
    assert_eq!(again().unwrap_err(), NotYet::NoRoom);
    first.decode_lost();
    assert!(again().is_ok());
}

/// Nodes are taken in turn, whatever their load is.
fn in_turn() -> select::Settings {
    select::Settings { policy: select::policy::Policy::RoundRobin, ..select::Settings::default() }
}
