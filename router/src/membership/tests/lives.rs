//! Lives of nodes: what a verdict ends, who takes whose place, and which bookings a report includes.
use tandem_proto::ErrorKind;

use super::*;
use crate::select::Work;

#[test]
fn a_life_that_was_declared_dead_does_not_come_back() {
    let (membership, start) = (membership(), Instant::now());
    let of = |life| v1::Register { life, ..register("p", v1::Role::Prefill, 7) };
    let later = start + LEASE * 2;
    membership.register(of(7), start).unwrap();
    membership.expire(later);
    let error = membership.register(of(7), later).unwrap_err();
    assert_eq!(error.kind, ErrorKind::DeclaredDead);
    assert!(error.message.contains("this life (0000000000000007) was declared dead"), "{}", error.message);
    // The next one of the same process, and the same one twice: its stream is lost, and that was not seen.
    let next = membership.register(of(8), later).unwrap();
    assert_eq!(membership.register(of(7), later).unwrap_err().kind, ErrorKind::DeclaredDead);
    assert!(!dead(&next));
    let error = membership.register(proving(of(8), 7), later).unwrap_err();
    assert_eq!((error.kind, dead(&next)), (ErrorKind::DeclaredDead, true));
    // Another router knows nothing of all this.
    let other = Membership::new(Expected { model_digest: 9, eos_token_id: 2 }, LEASE);
    other.register(of(7), later).unwrap();
}

#[test]
fn a_node_has_one_life_here_whatever_addresses_this_router_has() {
    let (membership, now) = (membership(), Instant::now());
    let of = |life, link| v1::Register { life, link, ..register("p", v1::Role::Prefill, 7) };
    let first = membership.register(of(1, 1), now).unwrap();
    let error = membership.register(of(2, 2), now).unwrap_err();
    assert_eq!((error.kind, dead(&first)), (ErrorKind::Unavailable, false));
    assert!(error.message.contains("by another address"), "{}", error.message);
    // Its stream by the first one was lost, and this side had not seen it.
    let again = membership.register(proving(of(3, 1), 7), now).unwrap();
    assert!(dead(&first) && !dead(&again));
    // Another process of that name.
    let other = v1::Register { link: 2, ..register("p", v1::Role::Prefill, 8) };
    membership.register(other, now + SUSPECT).unwrap();
    assert!(dead(&again));
    assert_eq!(membership.totals().deaths, [0, 1, 1]);
}

#[test]
fn a_life_is_over_for_who_shows_its_secret_or_when_it_is_silent() {
    let (membership, start) = (membership(), Instant::now());
    let of = |life| v1::Register {
        life,
        secret_digest: life_digest(&secret(life)).to_vec(),
        ..register("p", v1::Role::Prefill, 7)
    };
    let first = membership.register(of(1), start).unwrap();
    // Who has the token, incarnation and link, all of which travel; secrets of other lives; the digest itself.
    let digest = v1::LifeSecret { secret: of(1).secret_digest };
    for wrong in [of(2), proving(of(2), 2), proving(of(2), 3), v1::Register { ended: vec![digest], ..of(2) }] {
        let refused = membership.register(wrong, start + LEASE / 6).unwrap_err();
        assert_eq!((refused.kind, dead(&first)), (ErrorKind::Unavailable, false));
        assert!(refused.message.contains("this is no proof"), "{refused}");
        assert_eq!(refused.retry_after, Some(LEASE / 3 + Duration::from_millis(1)));
    }
    // The router has not seen one of its lives.
    let third = membership.register(proving(proving(of(3), 1), 2), start).unwrap();
    assert!(dead(&first) && !dead(&third));
    let silent = membership.register(of(4), start + SUSPECT).unwrap();
    assert!(dead(&third) && !dead(&silent));
    // A node of before secrets can show none.
    membership.leave(silent.session, "it left");
    let old = v1::Register { secret_digest: Vec::new(), ..of(5) };
    let old = membership.register(old, start).unwrap();
    let empty = v1::Register { ended: vec![v1::LifeSecret::default()], ..of(6) };
    assert_eq!(membership.register(empty, start).unwrap_err().kind, ErrorKind::Unavailable);
    assert!(!dead(&old));
}

/// The same, which shows the secret of this life.
fn proving(register: v1::Register, life: u64) -> v1::Register {
    let mut register = register;
    register.ended.push(v1::LifeSecret { secret: secret(life).to_vec() });
    register
}

#[test]
fn a_booking_that_was_on_its_way_at_a_report_still_counts() {
    let (membership, now) = (membership(), Instant::now());
    let [p, _d] = [("p", v1::Role::Prefill), ("d", v1::Role::Decode)]
        .map(|(id, role)| membership.register(register(id, role, 1), now).unwrap().session);
    let routed = || membership.table.with(|table| table.routed_of(p));
    let (first, second) = (route(&membership, 100, 10).unwrap(), route(&membership, 60, 10).unwrap());
    assert_eq!((routed().requests, routed().tokens), (2, 160));
    let seen = |prompts| {
        let own = Some(v1::CallCounts { requests: prompts, prompts, prompt_tokens: 0 });
        membership.report(p, &v1::Load { own, ..v1::Load::default() }, now);
        routed()
    };
    let left = seen(1);
    assert_eq!((left.requests, left.tokens), (1, 60), "the second one is on its way");
    assert_eq!(seen(2), Work::default());
    let third = route(&membership, 30, 10).unwrap();
    drop((first, second));
    assert_eq!(routed().tokens, 30, "what was reported is not taken back");
    assert_eq!(seen(0).tokens, 30);
    drop(third);
    assert_eq!(routed(), Work::default());
}
