//! The driver with events in an order that UCX rarely gives. Each test's thread owns a worker; without UCX they skip.
use std::sync::atomic::AtomicU64;

use tandem_proto::Incarnation;

use super::*;
use crate::incoming::Incoming;
use crate::registry::{Claim, PeerLink};
use crate::session::{DEFAULT_GRACE, PeerId};
use crate::transport::{Grant, Held};
use crate::wire::Units;

const LEASE: Duration = Duration::from_secs(60);

struct Nobody;

impl PeerLink for Nobody {
    fn answer(&self, _: PeerId, _: HandoffId, _: Answer) {}

    fn cut_off(&self, _: PeerId) {}
}

/// `None`: there is no UCX here.
fn driver() -> Option<Driver> {
    driver_with(UcxConfig::new(UcxProfile::Shm))
}

fn driver_with(config: UcxConfig) -> Option<Driver> {
    let api = Api::load(None).ok()?;
    let arena = Arena::new((0..64).map(|_| AtomicU64::new(0)).collect(), 64);
    let shared = Shared {
        registry: Registry::new(arena.clone(), Arc::default(), Box::new(Nobody), DEFAULT_GRACE),
        arena,
        pending: Arc::default(),
        queue: Queue::new().expect("eventfd"),
        address: Arc::default(),
        failure: Arc::default(),
    };
    Some(Driver::open(api, config, "test".to_owned(), shared).expect("UCX is there"))
}

/// Grants start a task that watches their leases.
fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime")
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
        units: 1,
        held: Held::default(),
        owner: owner.clone(),
        lease: LEASE,
    };
    let incoming = driver.shared.registry.accept(grant, Default::default(), Vec::new()).expect("accept");
    let range = DataHeader { handoff: HandoffId([1; 16]), first: 0, count: 1, units: Units::ALL };
    let claim = driver.shared.registry.claim(peer.into(), range, 64).expect("claim");
    (incoming, claim, owner)
}

#[test]
fn a_receive_that_fails_after_its_endpoint_was_let_go_frees_its_blocks() {
    let (runtime, Some(mut driver)) = (runtime(), driver()) else { return };
    let _entered = runtime.enter();
    let gone = EndpointId(77);
    let (incoming, claim, owner) = claimed(&driver, gone);
    driver.shared.registry.cancelled_by(gone.into(), HandoffId([1; 16]));
    assert_eq!(driver.shared.registry.quarantined().handoffs, 1);
    driver.finished(gone, Work::Receive { claim, target: Vec::new() }, false);
    assert_eq!(driver.shared.registry.quarantined().handoffs, 0);
    assert_eq!(Arc::strong_count(&owner), 1);
    drop(incoming);
}

#[test]
fn a_receive_that_fails_before_that_waits_for_the_others_of_its_endpoint() {
    let (runtime, Some(mut driver)) = (runtime(), driver()) else { return };
    let _entered = runtime.enter();
    let closed = EndpointId(77);
    let (incoming, claim, owner) = claimed(&driver, closed);
    driver.closed.push(Closed { id: closed, confirmed: true, loss: Loss::Dead });
    driver.finished(closed, Work::Receive { claim, target: Vec::new() }, false);
    assert_eq!(Arc::strong_count(&owner), 2, "held");
    driver.tick(Instant::now());
    assert_eq!(Arc::strong_count(&owner), 1);
    drop(incoming);
}

/// An open hand-off of a driver, as the transport asks for it.
fn opening(driver: &mut Driver, address: Vec<u8>) -> oneshot::Receiver<Result<Opened, TransferError>> {
    let (reply, opened) = oneshot::channel();
    driver.open_handoff(HandoffId([1; 16]), &address, reply);
    opened
}

/// One turn without sleep.
fn turn(driver: &mut Driver) {
    driver.progress();
    driver.handle_events();
    driver.tick(Instant::now());
}

/// A driver on a thread of its own.
struct Receiver {
    address: Vec<u8>,
    queue: Arc<Queue<Command>>,
    thread: std::thread::JoinHandle<()>,
}

impl Receiver {
    /// It works from the moment that `start` says so, or is gone. `None`: there is no UCX here.
    fn new(start: std::sync::mpsc::Receiver<()>) -> Option<Self> {
        let (known, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let Some(driver) = driver() else { return };
            let _ = known.send((driver.shared.address(), driver.shared.queue.clone()));
            let _ = start.recv();
            driver.run();
        });
        let (address, queue) = told.recv().ok()?;
        Some(Self { address, queue, thread })
    }

    fn end(self) {
        self.queue.close();
        self.thread.join().expect("no panic");
    }
}

#[test]
fn no_range_can_be_sent_before_the_receiver_has_read_the_hello() {
    let (go, start) = std::sync::mpsc::channel();
    let (Some(mut sender), Some(receiver)) = (driver(), Receiver::new(start)) else { return };
    let mut opened = opening(&mut sender, receiver.address.clone());
    for _ in 0..1000 {
        turn(&mut sender);
    }
    assert!(opened.try_recv().is_err(), "nobody has read the hello");
    go.send(()).expect("the receiver waits");
    let until = Instant::now() + Duration::from_secs(4);
    let opened = loop {
        turn(&mut sender);
        match opened.try_recv() {
            Ok(opened) => break opened,
            Err(_) => assert!(Instant::now() < until, "no welcome"),
        }
    };
    assert!(opened.is_ok());
    receiver.end();
}

#[test]
fn a_receiver_that_does_not_answer_is_a_timeout() {
    let (go, start) = std::sync::mpsc::channel();
    let config = UcxConfig { stall_timeout: Duration::from_millis(50), ..UcxConfig::new(UcxProfile::Shm) };
    let (Some(mut sender), Some(receiver)) = (driver_with(config), Receiver::new(start)) else { return };
    let mut opened = opening(&mut sender, receiver.address.clone());
    let until = Instant::now() + Duration::from_secs(4);
    let error = loop {
        turn(&mut sender);
        match opened.try_recv() {
            Ok(opened) => break opened.err().expect("nobody has read the hello"),
            Err(_) => assert!(Instant::now() < until, "it waits for ever"),
        }
    };
    assert_eq!(error.kind, TransferErrorKind::Timeout);
    go.send(()).expect("the receiver waits");
    receiver.end();
}

#[test]
fn an_answer_instead_of_a_welcome_reaches_whoever_opens() {
    let (go, start) = std::sync::mpsc::channel();
    let (Some(mut sender), Some(receiver)) = (driver(), Receiver::new(start)) else { return };
    let mut opened = opening(&mut sender, receiver.address.clone());
    sender.on_answer(HandoffId([1; 16]), Answer::Refused(crate::error::Refusal::WrongPeer));
    let error = opened.try_recv().expect("told").err().expect("refused");
    assert_eq!(error.refusal, Some(crate::error::Refusal::WrongPeer));
    drop(go);
    receiver.end();
}
