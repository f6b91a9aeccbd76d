//! The driver with events in an order that UCX rarely gives. Each test's thread owns a worker; without UCX they skip.
use std::sync::atomic::AtomicU64;

use tandem_proto::Incarnation;

use super::*;
use crate::incoming::Incoming;
use crate::registry::{AnswerLink, Claim};
use crate::session::PeerId;
use crate::transport::Grant;

const LEASE: Duration = Duration::from_secs(60);

struct Nobody;

impl AnswerLink for Nobody {
    fn answer(&self, _: PeerId, _: HandoffId, _: Answer) {}
}

/// `None`: there is no UCX here.
fn driver() -> Option<Driver> {
    let config = UcxConfig::new(UcxProfile::Shm);
    let api = Api::load(None).ok()?;
    let arena = Arena::new((0..64).map(|_| AtomicU64::new(0)).collect(), 64);
    let shared = Shared {
        registry: Registry::new(arena.clone(), Arc::default(), Box::new(Nobody)),
        arena,
        pending: Arc::default(),
        queue: Queue::new().expect("eventfd"),
        address: Arc::default(),
        failure: Arc::default(),
    };
    Some(Driver::open(api, config, "test".to_owned(), shared).expect("UCX is there"))
}

/// A grant whose only range is claimed by `peer`, and the owner of its blocks.
fn claimed(driver: &Driver, peer: EndpointId) -> (Incoming, Claim, Arc<()>) {
    let owner = Arc::new(());
    let grant = Grant {
        handoff: HandoffId([1; 16]),
        prefill_incarnation: Incarnation(1),
        decode_incarnation: Incarnation(2),
        compatibility_digest: 3,
        blocks: vec![0],
        owner: owner.clone(),
        lease: LEASE,
    };
    let incoming = driver.shared.registry.accept(grant, Default::default(), Vec::new()).expect("accept");
    let range = DataHeader { handoff: HandoffId([1; 16]), first: 0, count: 1 };
    let claim = driver.shared.registry.claim(peer.into(), range, 64).expect("claim");
    (incoming, claim, owner)
}

#[test]
fn a_receive_that_fails_after_its_endpoint_was_let_go_frees_its_blocks() {
    let Some(mut driver) = driver() else { return };
    let gone = EndpointId(77);
    let (incoming, claim, owner) = claimed(&driver, gone);
    driver.shared.registry.cancelled_by(gone.into(), HandoffId([1; 16]));
    assert_eq!(driver.shared.registry.quarantined(), 1);
    driver.finished(gone, Work::Receive { claim, target: Vec::new() }, false);
    assert_eq!(driver.shared.registry.quarantined(), 0);
    assert_eq!(Arc::strong_count(&owner), 1);
    drop(incoming);
}

#[test]
fn a_receive_that_fails_before_that_waits_for_the_others_of_its_endpoint() {
    let Some(mut driver) = driver() else { return };
    let closed = EndpointId(77);
    let (incoming, claim, owner) = claimed(&driver, closed);
    driver.closed.push(Closed { id: closed, confirmed: true, loss: Loss::Dead });
    driver.finished(closed, Work::Receive { claim, target: Vec::new() }, false);
    assert_eq!(Arc::strong_count(&owner), 2, "held");
    driver.tick(Instant::now());
    assert_eq!(Arc::strong_count(&owner), 1);
    drop(incoming);
}
