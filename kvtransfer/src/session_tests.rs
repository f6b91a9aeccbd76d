//! Tests of `session.rs`: time is a number, peers are numbers, owners are counted.
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::wire::Units;

const ID: HandoffId = HandoffId([7; 16]);
const PEER: PeerId = PeerId(1);
const LEASE: Duration = Duration::from_secs(5);
const GRACE: Duration = Duration::from_secs(2);

struct Setup {
    sessions: Sessions,
    owner: Arc<()>,
    now: Instant,
}

fn offered(blocks: u32) -> Setup {
    let (mut sessions, owner, now) = (Sessions::new(GRACE), Arc::new(()), Instant::now());
    let offer = offer((100..100 + blocks).collect(), 1, owner.clone());
    sessions.offer(ID, offer, now).unwrap();
    Setup { sessions, owner, now }
}

/// The same, and [`PEER`] has opened it.
fn opened(blocks: u32) -> Setup {
    let mut setup = offered(blocks);
    setup.sessions.open(PEER, ID, setup.now).unwrap();
    setup
}

fn offer(blocks: Vec<u32>, units: u8, owner: Arc<()>) -> Offer {
    Offer { blocks, block_bytes: 64, units, owner, lease: LEASE }
}

fn range(first: u32, count: u32) -> DataHeader {
    DataHeader { handoff: ID, first, count, units: Units::ALL }
}

fn refusal(result: Result<Pieces, Rejected>) -> Refusal {
    result.unwrap_err().refusal
}

#[test]
fn the_whole_way() {
    let Setup { mut sessions, owner, now } = offered(3);
    assert_eq!(sessions.state(ID), Some(State::Offered));
    assert_eq!(sessions.open(PEER, ID, now), Ok(()));
    assert_eq!(sessions.state(ID), Some(State::Reserved));
    assert_eq!(sessions.claim(PEER, range(1, 2), 128, now), Ok(Pieces { blocks: vec![101, 102], units: 0..1, of: 1 }));
    assert_eq!(sessions.state(ID), Some(State::Writing));
    assert_eq!(sessions.written(range(1, 2), now), None);
    assert_eq!(sessions.claim(PEER, range(0, 1), 64, now), Ok(Pieces { blocks: vec![100], units: 0..1, of: 1 }));
    // The seal may overtake the end of a claimed write.
    assert_eq!(sessions.seal(PEER, ID, v1::Seal::default(), now), Ok(None));
    let arrived = sessions.written(range(0, 1), now).expect("complete");
    assert_eq!(arrived.bytes, 192);
    assert_eq!(sessions.state(ID), Some(State::Sealed));
    assert_eq!(sessions.verified(ID), Some(PEER));
    assert_eq!(Arc::strong_count(&owner), 1);
    assert_eq!(refusal(sessions.claim(PEER, range(0, 1), 64, now)), Refusal::Used);
}

#[test]
fn every_broken_rule_ends_the_handoff() {
    type Break = fn(&mut Sessions, Instant) -> Rejected;
    let cases: [(Refusal, Break); 7] = [
        (Refusal::Length, |s, now| s.claim(PEER, range(0, 1), 63, now).unwrap_err()),
        (Refusal::Length, |s, now| s.claim(PEER, range(0, 2), 64, now).unwrap_err()),
        (Refusal::OutOfRange, |s, now| s.claim(PEER, range(3, 1), 64, now).unwrap_err()),
        (Refusal::OutOfRange, |s, now| s.claim(PEER, range(u32::MAX, u32::MAX), 64, now).unwrap_err()),
        (Refusal::OutOfRange, |s, now| s.claim(PEER, range(0, 0), 0, now).unwrap_err()),
        (Refusal::Expired, |s, now| s.claim(PEER, range(0, 1), 64, now + LEASE).unwrap_err()),
        (Refusal::Incomplete, |s, now| s.seal(PEER, ID, v1::Seal::default(), now).unwrap_err()),
    ];
    for (expected, break_rule) in cases {
        let Setup { mut sessions, owner, now } = opened(3);
        assert_eq!(break_rule(&mut sessions, now), Rejected { refusal: expected, aborted: true });
        assert_eq!(Arc::strong_count(&owner), 1, "{expected:?}");
        assert_eq!(refusal(sessions.claim(PEER, range(0, 1), 64, now)), Refusal::Used);
    }
}

#[test]
fn exactly_once() {
    let Setup { mut sessions, now, .. } = opened(3);
    sessions.claim(PEER, range(0, 2), 128, now).unwrap();
    assert_eq!(refusal(sessions.claim(PEER, range(1, 1), 64, now)), Refusal::AlreadyWritten);
}

#[test]
fn units_come_once_in_order_and_all() {
    let (mut sessions, owner, now) = (Sessions::new(GRACE), Arc::new(()), Instant::now());
    sessions.offer(ID, offer(vec![100, 101], 4, owner.clone()), now).unwrap();
    sessions.open(PEER, ID, now).unwrap();
    let units = |units: Range<u8>, first, count| DataHeader { units: Units::new(units, 4), ..range(first, count) };
    let pieces = sessions.claim(PEER, units(0..2, 0, 1), 32, now);
    assert_eq!(pieces, Ok(Pieces { blocks: vec![100], units: 0..2, of: 4 }));
    // Another block, whole.
    sessions.claim(PEER, range(1, 1), 64, now).unwrap();
    sessions.claim(PEER, units(2..3, 0, 1), 16, now).unwrap();
    for done in [range(1, 1), units(2..3, 0, 1), units(0..2, 0, 1)] {
        assert_eq!(sessions.written(done, now), None);
    }
    sessions.claim(PEER, units(3..4, 0, 1), 16, now).unwrap();
    assert_eq!(sessions.seal(PEER, ID, v1::Seal::default(), now), Ok(None));
    assert_eq!(sessions.written(units(3..4, 0, 1), now).map(|arrived| arrived.bytes), Some(128));

    let broken = [
        (Refusal::OutOfOrder, units(1..2, 0, 1), 16),
        (Refusal::OutOfOrder, units(1..2, 0, 2), 32),
        (Refusal::OutOfRange, units(0..5, 0, 1), 80),
        (Refusal::OutOfRange, units(3..3, 0, 1), 0),
        (Refusal::Length, units(0..1, 0, 1), 64),
    ];
    for (expected, range, len) in broken {
        let (mut sessions, owner) = (Sessions::new(GRACE), Arc::new(()));
        sessions.offer(ID, offer(vec![100, 101], 4, owner.clone()), now).unwrap();
        sessions.open(PEER, ID, now).unwrap();
        assert_eq!(refusal(sessions.claim(PEER, range, len, now)), expected);
        assert_eq!(Arc::strong_count(&owner), 1);
    }
    let (mut sessions, owner) = (Sessions::new(GRACE), Arc::new(()));
    sessions.offer(ID, offer(vec![100], 4, owner), now).unwrap();
    sessions.open(PEER, ID, now).unwrap();
    sessions.claim(PEER, units(0..3, 0, 1), 48, now).unwrap();
    assert_eq!(sessions.seal(PEER, ID, v1::Seal::default(), now).unwrap_err().refusal, Refusal::Incomplete);
    assert_eq!(refusal(sessions.claim(PEER, units(2..4, 0, 1), 32, now)), Refusal::Used);
}

#[test]
fn whatever_the_peer_does_right_begins_the_lease_anew() {
    let Setup { mut sessions, now, .. } = opened(2);
    let after = |leases: u32| now + LEASE * leases / 4;
    sessions.claim(PEER, range(0, 1), 64, after(3)).unwrap();
    assert_eq!(sessions.next_timeout(), Some(after(7)));
    sessions.written(range(0, 1), after(6));
    sessions.keep_alive(PEER, ID, after(9)).unwrap();
    assert_eq!(sessions.keep_alive(PeerId(2), ID, after(12)).unwrap_err().refusal, Refusal::WrongPeer);
    assert_eq!(sessions.next_timeout(), Some(after(13)), "strangers extend nothing");
    assert!(sessions.expire(after(12)).is_empty());
    assert_eq!(sessions.keep_alive(PEER, ID, after(13)).unwrap_err().refusal, Refusal::Expired);
}

#[test]
fn strangers_can_do_nothing() {
    let Setup { mut sessions, now, .. } = opened(1);
    let unknown = DataHeader { handoff: HandoffId([8; 16]), first: 0, count: 1, units: Units::ALL };
    assert_eq!(sessions.claim(PEER, unknown, 64, now), Err(Rejected { refusal: Refusal::Unknown, aborted: false }));
    sessions.claim(PEER, range(0, 1), 64, now).unwrap();
    let other = PeerId(2);
    assert_eq!(
        sessions.seal(other, ID, v1::Seal::default(), now),
        Err(Rejected { refusal: Refusal::WrongPeer, aborted: false })
    );
    assert_eq!(sessions.cancelled_by(other, ID, now), None);
    assert_eq!(sessions.state(ID), Some(State::Writing));
}

#[test]
fn an_id_is_single_use() {
    let Setup { mut sessions, now, owner } = opened(1);
    sessions.abort(ID, now).unwrap();
    assert_eq!(sessions.offer(ID, offer(vec![1], 1, owner), now), Err(Refusal::Used));
}

#[test]
fn quarantine_keeps_the_owner_until_the_writer_is_done() {
    let Setup { mut sessions, owner, now } = opened(2);
    sessions.claim(PEER, range(0, 1), 64, now).unwrap();
    assert_eq!(sessions.abort(ID, now), Some(Ended { peer: Some(PEER), quarantined: true }));
    assert_eq!((Arc::strong_count(&owner), sessions.quarantined().handoffs), (2, 1));
    assert_eq!(sessions.written(range(0, 1), now), None);
    assert_eq!((Arc::strong_count(&owner), sessions.quarantined().handoffs), (1, 0));
}

#[test]
fn a_writer_that_overstays_its_grace_is_to_be_cut_off_until_it_is_fenced() {
    let Setup { mut sessions, owner, now } = opened(3);
    sessions.claim(PEER, range(0, 1), 64, now).unwrap();
    sessions.abort(ID, now).unwrap();
    assert_eq!(sessions.quarantined(), Quarantined { handoffs: 1, blocks: 3 });
    assert_eq!(sessions.next_timeout(), Some(now + GRACE));
    assert_eq!(sessions.overstayed(now + GRACE - Duration::from_nanos(1)), []);
    assert_eq!(sessions.overstayed(now + GRACE), [PEER]);
    assert_eq!(sessions.overstayed(now + GRACE), [], "asked");
    assert_eq!(sessions.overstayed(now + GRACE * 2), [PEER], "and again");
    assert_eq!(Arc::strong_count(&owner), 2);
    sessions.fence(PEER, now + GRACE * 2);
    assert_eq!((Arc::strong_count(&owner), sessions.quarantined()), (1, Quarantined::default()));
    assert_eq!(sessions.next_timeout(), None);
}

#[test]
fn what_cannot_be_read_ends_its_own_handoff_only() {
    let Setup { mut sessions, now, .. } = opened(1);
    assert_eq!(sessions.unreadable(PEER, HandoffId([8; 16]), now).refusal, Refusal::Unknown);
    sessions.claim(PEER, range(0, 1), 64, now).unwrap();
    assert_eq!(sessions.unreadable(PeerId(2), ID, now), Rejected { refusal: Refusal::WrongPeer, aborted: false });
    assert_eq!(sessions.unreadable(PEER, ID, now), Rejected { refusal: Refusal::Malformed, aborted: true });
    assert_eq!(sessions.unreadable(PEER, ID, now), Rejected { refusal: Refusal::Used, aborted: false });
}

#[test]
fn fencing_a_peer_ends_its_handoffs_and_quarantine() {
    let Setup { mut sessions, owner, now } = opened(2);
    sessions.claim(PEER, range(0, 1), 64, now).unwrap();
    sessions.abort(ID, now).unwrap();
    assert_eq!(sessions.fence(PeerId(2), now), vec![]);
    assert_eq!(Arc::strong_count(&owner), 2);
    assert_eq!(sessions.fence(PEER, now), vec![], "it had ended before");
    assert_eq!((Arc::strong_count(&owner), sessions.quarantined().handoffs), (1, 0));
    assert_eq!(sessions.written(range(0, 1), now), None, "a late completion is harmless");

    let Setup { mut sessions, owner, now } = opened(2);
    sessions.claim(PEER, range(0, 1), 64, now).unwrap();
    assert_eq!(sessions.fence(PEER, now), vec![ID]);
    assert_eq!(Arc::strong_count(&owner), 1);
}

#[test]
fn withdrawn_tickets_end_what_nobody_has_opened() {
    let Setup { mut sessions, owner, now } = offered(1);
    let (opened, of_opened) = (HandoffId([8; 16]), Arc::new(()));
    sessions.offer(opened, offer(vec![1], 1, of_opened.clone()), now).unwrap();
    sessions.open(PEER, opened, now).unwrap();
    assert_eq!(sessions.withdraw(now), vec![ID]);
    assert_eq!((Arc::strong_count(&owner), Arc::strong_count(&of_opened)), (1, 2));
    assert_eq!(sessions.state(opened), Some(State::Reserved));
}

#[test]
fn a_sealed_handoff_needs_its_peer_no_more() {
    let Setup { mut sessions, owner, now } = opened(1);
    sessions.claim(PEER, range(0, 1), 64, now).unwrap();
    sessions.written(range(0, 1), now);
    sessions.seal(PEER, ID, v1::Seal::default(), now).unwrap().expect("whole");
    assert_eq!(sessions.lost_by(PEER, ID, now), None);
    assert_eq!(sessions.fence(PEER, now), vec![]);
    assert_eq!((sessions.state(ID), Arc::strong_count(&owner)), (Some(State::Sealed), 2));
    assert_eq!(sessions.verified(ID), Some(PEER));

    let Setup { mut sessions, owner, now } = opened(1);
    sessions.claim(PEER, range(0, 1), 64, now).unwrap();
    assert_eq!(sessions.lost_by(PeerId(2), ID, now), None);
    assert_eq!(sessions.lost_by(PEER, ID, now), Some(Ended { peer: Some(PEER), quarantined: true }));
    assert_eq!(Arc::strong_count(&owner), 2, "it may still write");
}

#[test]
fn expiry_ends_what_is_late_but_not_what_is_being_verified() {
    let Setup { mut sessions, owner, now } = opened(1);
    assert!(sessions.expire(now).is_empty());
    assert_eq!(sessions.expire(now + LEASE).len(), 1);
    assert_eq!(Arc::strong_count(&owner), 1);

    let Setup { mut sessions, now, .. } = opened(1);
    sessions.claim(PEER, range(0, 1), 64, now).unwrap();
    sessions.written(range(0, 1), now);
    sessions.seal(PEER, ID, v1::Seal::default(), now).unwrap().expect("complete");
    assert!(sessions.expire(now + LEASE).is_empty());
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Claim { peer: u64, first: u32, count: u32, short: bool },
    Finish { ok: bool },
    Seal { peer: u64 },
    Cancel { peer: u64 },
    Abort,
    Fence { peer: u64 },
    Expire { late: bool },
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (1u64..3, 0u32..5, 0u32..4, prop::bool::weighted(0.05))
            .prop_map(|(peer, first, count, short)| Step::Claim { peer, first, count, short }),
        8 => prop::bool::weighted(0.9).prop_map(|ok| Step::Finish { ok }),
        2 => (1u64..3).prop_map(|peer| Step::Seal { peer }),
        1 => (1u64..3).prop_map(|peer| Step::Cancel { peer }),
        1 => Just(Step::Abort),
        1 => (1u64..3).prop_map(|peer| Step::Fence { peer }),
        1 => any::<bool>().prop_map(|late| Step::Expire { late }),
    ]
}

proptest! {
    /// Whatever comes in whatever order: no block is claimed twice, the owner is there while a writer is, and an
    /// arrival means that all blocks were written.
    #[test]
    fn random_schedules_keep_the_invariants(steps in prop::collection::vec(any_step(), 0..60)) {
        let Setup { mut sessions, owner, now } = opened(5);
        let (mut claimed, mut writing, mut written) = (HashSet::new(), Vec::new(), 0);
        for step in steps {
            let mut arrived = None;
            match step {
                Step::Claim { peer, first, count, short } => {
                    let range = range(first, count);
                    let len = u64::from(count) * 64 - u64::from(short && count > 0);
                    if let Ok(pieces) = sessions.claim(PeerId(peer), range, len, now) {
                        prop_assert!(pieces.blocks.iter().all(|block| claimed.insert(*block)));
                        writing.push((PeerId(peer), range));
                    }
                }
                Step::Finish { ok } => {
                    if let Some((_, range)) = writing.pop() {
                        if ok {
                            written += range.count;
                            arrived = sessions.written(range, now);
                        } else {
                            sessions.failed(ID, now);
                        }
                    }
                }
                Step::Seal { peer } => {
                    arrived = sessions.seal(PeerId(peer), ID, v1::Seal::default(), now).unwrap_or(None);
                }
                Step::Cancel { peer } => {
                    sessions.cancelled_by(PeerId(peer), ID, now);
                }
                Step::Abort => {
                    sessions.abort(ID, now);
                }
                Step::Fence { peer } => {
                    sessions.fence(PeerId(peer), now);
                    writing.retain(|(writer, _)| *writer != PeerId(peer));
                }
                Step::Expire { late } => {
                    sessions.expire(if late { now + LEASE } else { now });
                }
            }
            if arrived.is_some() {
                prop_assert_eq!(written, 5);
                prop_assert!(writing.is_empty());
            }
            prop_assert!(writing.is_empty() || Arc::strong_count(&owner) == 2, "a writer without an owner");
        }
        sessions.abort(ID, now);
        for (_, range) in writing {
            sessions.written(range, now);
        }
        prop_assert_eq!((Arc::strong_count(&owner), sessions.quarantined().handoffs), (1, 0));
    }
}

#[test]
fn only_who_opened_a_handoff_may_act_on_it() {
    let Setup { mut sessions, now, .. } = offered(2);
    let foreign = |refusal| Rejected { refusal, aborted: false };
    assert_eq!(sessions.claim(PEER, range(0, 1), 64, now), Err(foreign(Refusal::Unauthenticated)));
    assert_eq!(sessions.keep_alive(PEER, ID, now), Err(foreign(Refusal::Unauthenticated)));
    assert_eq!(sessions.seal(PEER, ID, v1::Seal::default(), now), Err(foreign(Refusal::Unauthenticated)));
    assert_eq!(sessions.cancelled_by(PEER, ID, now), None);
    assert_eq!(sessions.state(ID), Some(State::Offered), "none of it counts");
    assert_eq!(sessions.next_timeout(), Some(now + LEASE));
    assert_eq!(sessions.open(PEER, HandoffId([8; 16]), now), Err(Refusal::Unknown));
    assert_eq!(sessions.open(PEER, ID, now + LEASE), Err(Refusal::Expired));
    assert_eq!(sessions.open(PEER, ID, now), Ok(()));
    assert_eq!(sessions.open(PEER, ID, now), Ok(()), "again");
    assert_eq!(sessions.open(PeerId(2), ID, now), Err(Refusal::WrongPeer));
    sessions.claim(PEER, range(0, 1), 64, now).unwrap();
    sessions.abort(ID, now).unwrap();
    assert_eq!(sessions.open(PEER, ID, now), Err(Refusal::Used), "in quarantine");
    sessions.written(range(0, 1), now);
    assert_eq!(sessions.open(PEER, ID, now), Err(Refusal::Used), "over");
}
