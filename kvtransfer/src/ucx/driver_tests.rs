//! The driver with events in an order that UCX rarely gives. Each test's thread owns a worker; without UCX they skip.
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_memory::HostMemory;
use tandem_proto::{Incarnation, v1};

use super::super::hello::Hello;
use super::*;
use crate::error::Refusal;
use crate::incoming::Incoming;
use crate::registry::{Claim, PeerLink};
use crate::session::{DEFAULT_GRACE, PeerId};
use crate::transport::{Grant, Held};
use crate::wire::{Units, encode_seal};

/// Says nothing of whether the peer lives.
const UCS_ERR_IO_ERROR: ucx_sys::ucs_status_t = -3;
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
    let arena = Arena::new(HostMemory::zeroed(64 * 8).expect("little"), 64, 1);
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

/// Of one block.
fn grant(handoff: HandoffId, owner: Arc<()>) -> Grant {
    Grant {
        handoff,
        prefill_incarnation: Incarnation(1),
        decode_incarnation: Incarnation(2),
        compatibility_digest: 3,
        blocks: vec![0],
        units: 1,
        held: Held::default(),
        owner,
        lease: LEASE,
    }
}

/// A grant of one block that is out, and the block's owner.
fn granted(registry: &Arc<Registry>, handoff: HandoffId) -> (Incoming, Arc<()>) {
    let owner = Arc::new(());
    let incoming = registry.accept(grant(handoff, owner.clone()), Default::default(), Vec::new());
    (incoming.expect("accept"), owner)
}

/// The same, with its only range claimed by `peer`.
fn claimed(driver: &Driver, peer: EndpointId) -> (Incoming, Claim, Arc<()>) {
    let (incoming, owner) = granted(&driver.shared.registry, HandoffId([1; 16]));
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
fn opening(driver: &mut Driver, receiver: &Receiver) -> oneshot::Receiver<Result<Opened, TransferError>> {
    opening_of(driver, receiver, HandoffId([1; 16]))
}

fn opening_of(
    driver: &mut Driver,
    receiver: &Receiver,
    handoff: HandoffId,
) -> oneshot::Receiver<Result<Opened, TransferError>> {
    let (reply, opened) = oneshot::channel();
    let address = CheckedAddress::parse(&receiver.shared.address(), &driver.key).expect("an honest address");
    driver.open_handoff(handoff, &address, reply);
    opened
}

/// Turns until the hand-off is open or refused.
fn until_opened(
    driver: &mut Driver,
    opened: &mut oneshot::Receiver<Result<Opened, TransferError>>,
) -> Result<Opened, TransferError> {
    let until = Instant::now() + Duration::from_secs(4);
    loop {
        driver.turn();
        match opened.try_recv() {
            Ok(opened) => return opened,
            Err(_) => assert!(Instant::now() < until, "no answer"),
        }
    }
}

/// A driver on a thread of its own.
struct Receiver {
    shared: Shared,
    thread: std::thread::JoinHandle<()>,
}

impl Receiver {
    /// It works from the moment that `start` says so, or is gone. `None`: there is no UCX here.
    fn new(start: std::sync::mpsc::Receiver<()>) -> Option<Self> {
        let (known, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let Some(driver) = driver() else { return };
            let _ = known.send(driver.shared.clone());
            let _ = start.recv();
            driver.run();
        });
        let shared = told.recv().ok()?;
        Some(Self { shared, thread })
    }

    fn end(self) {
        self.shared.queue.close();
        self.thread.join().expect("no panic");
    }
}

#[test]
fn no_range_can_be_sent_before_the_receiver_has_read_the_hello() {
    let (runtime, (go, start)) = (runtime(), std::sync::mpsc::channel());
    let (Some(mut sender), Some(receiver)) = (driver(), Receiver::new(start)) else { return };
    let _entered = runtime.enter();
    let _granted = granted(&receiver.shared.registry, HandoffId([1; 16]));
    let mut opened = opening(&mut sender, &receiver);
    for _ in 0..1000 {
        sender.turn();
    }
    assert!(opened.try_recv().is_err(), "nobody has read the hello");
    go.send(()).expect("the receiver waits");
    assert!(until_opened(&mut sender, &mut opened).is_ok());
    receiver.end();
}

#[test]
fn a_receiver_that_does_not_answer_is_a_timeout() {
    let (go, start) = std::sync::mpsc::channel();
    let config = UcxConfig { stall_timeout: Duration::from_millis(50), ..UcxConfig::new(UcxProfile::Shm) };
    let (Some(mut sender), Some(receiver)) = (driver_with(config), Receiver::new(start)) else { return };
    let mut opened = opening(&mut sender, &receiver);
    let error = until_opened(&mut sender, &mut opened).err().expect("nobody has read the hello");
    assert_eq!(error.kind, TransferErrorKind::Timeout);
    go.send(()).expect("the receiver waits");
    receiver.end();
}

#[test]
fn an_answer_instead_of_a_welcome_reaches_whoever_opens() {
    let (go, start) = std::sync::mpsc::channel();
    let (Some(mut sender), Some(receiver)) = (driver(), Receiver::new(start)) else { return };
    let mut opened = opening(&mut sender, &receiver);
    sender.on_answer(HandoffId([1; 16]), Answer::Refused(Refusal::WrongPeer));
    let error = opened.try_recv().expect("told").err().expect("refused");
    assert_eq!(error.refusal, Some(Refusal::WrongPeer));
    drop(go);
    receiver.end();
}

/// What a stranger makes of an honest hello. The hand-off's id, in front, needs no check of this kind.
fn garbled(rng: &mut StdRng, honest: &[u8]) -> Vec<u8> {
    let mut bytes = honest.to_vec();
    match rng.random_range(0..4) {
        0 => bytes.truncate(rng.random_range(0..honest.len())),
        1 => bytes[rng.random_range(16..honest.len())] ^= 1 << rng.random_range(0..8),
        // The build and the head of an address, with anything behind them.
        2 => bytes[16 + 2 + 4 + 22..].iter_mut().for_each(|byte| *byte = rng.random()),
        _ => bytes = (0..rng.random_range(0..4000)).map(|_| rng.random()).collect(),
    }
    bytes
}

#[test]
fn five_thousand_garbled_hellos_are_refused_and_honest_ones_beside_them_welcome() {
    const ROUNDS: u8 = 20;
    const HELLOS: u64 = 250;
    let (runtime, (go, start)) = (runtime(), std::sync::mpsc::channel());
    let (Some(mut sender), Some(receiver)) = (driver(), Receiver::new(start)) else { return };
    let (_entered, counters) = (runtime.enter(), receiver.shared.registry.counters().clone());
    go.send(()).expect("the receiver waits");
    let mut rng = StdRng::seed_from_u64(1);
    for round in 0..ROUNDS {
        let handoff = HandoffId([round; 16]);
        let _granted = granted(&receiver.shared.registry, handoff);
        let mut opened = opening_of(&mut sender, &receiver, handoff);
        let opened = until_opened(&mut sender, &mut opened).expect("welcome");
        let honest = Hello::encode(handoff, "test", None, &sender.shared.address());
        for _ in 0..HELLOS {
            let hello = garbled(&mut rng, &honest);
            sender.post_frame(opened.endpoint, Header::hello(), hello);
            sender.turn();
        }
        let (all, until) = (u64::from(round + 1) * HELLOS, Instant::now() + Duration::from_secs(4));
        while counters.rejected_hello_addresses.load(Relaxed) < all {
            sender.turn();
            assert!(
                Instant::now() < until,
                "{} of {all} were refused",
                counters.rejected_hello_addresses.load(Relaxed)
            );
        }
    }
    let all = u64::from(ROUNDS) * HELLOS;
    let counted = (counters.rejected_hello_addresses.load(Relaxed), counters.protocol_errors.load(Relaxed));
    assert_eq!(counted, (all, all));
    assert_eq!(counters.lost_peers.load(Relaxed), 0);
    receiver.end();
}

#[test]
fn a_hello_of_another_key_reaches_no_endpoint() {
    let (Some(mut receiver), Some(stranger)) =
        (driver(), driver_with(UcxConfig { address_key: [1; 32], ..UcxConfig::new(UcxProfile::Shm) }))
    else {
        return;
    };
    let hello = Hello::encode(HandoffId([1; 16]), "test", None, &stranger.shared.address());
    receiver.on_hello(tandem_proto::PROTOCOL_VERSION, &hello);
    assert_eq!(receiver.endpoints.all(), vec![]);
    assert_eq!(receiver.shared.registry.counters().rejected_hello_addresses.load(Relaxed), 1);
}

#[test]
fn a_hello_for_a_handoff_that_nobody_granted_is_refused_and_takes_no_place() {
    let (runtime, (go, start)) = (runtime(), std::sync::mpsc::channel());
    let (Some(mut sender), Some(receiver)) = (driver(), Receiver::new(start)) else { return };
    let (_entered, registry) = (runtime.enter(), receiver.shared.registry.clone());
    go.send(()).expect("the receiver waits");
    let refusal = |sender: &mut Driver, handoff| {
        let mut opened = opening_of(sender, &receiver, handoff);
        until_opened(sender, &mut opened).err().expect("refused").refusal
    };
    assert_eq!(refusal(&mut sender, HandoffId([1; 16])), Some(Refusal::Unknown));
    let (incoming, _) = granted(&registry, HandoffId([2; 16]));
    drop(incoming);
    assert_eq!(refusal(&mut sender, HandoffId([2; 16])), Some(Refusal::Used));
    let _bound = registry.accept(grant(HandoffId([3; 16]), Arc::new(())), Default::default(), Vec::new());
    registry.keep_alive(PeerId(u64::MAX), HandoffId([3; 16]));
    assert_eq!(refusal(&mut sender, HandoffId([3; 16])), Some(Refusal::WrongPeer));
    let counted = [Refusal::Unknown, Refusal::Used, Refusal::WrongPeer].map(|why| registry.counters().refused_for(why));
    assert_eq!(counted, [1, 1, 1]);
    receiver.end();
}

#[test]
fn a_flood_of_hellos_for_nothing_leaves_room_for_honest_ones() {
    let (Some(mut receiver), Some(sender)) = (driver(), driver()) else { return };
    let runtime = runtime();
    let _entered = runtime.enter();
    let address = sender.shared.address();
    // More than the table of hand-offs holds.
    for number in 0..20_000u128 {
        let hello = Hello::encode(HandoffId(number.to_le_bytes()), "test", None, &address);
        receiver.on_hello(tandem_proto::PROTOCOL_VERSION, &hello);
        receiver.progress();
        receiver.handle_events();
    }
    let honest = HandoffId([0xff; 16]);
    let _granted = granted(&receiver.shared.registry, honest);
    receiver.on_hello(tandem_proto::PROTOCOL_VERSION, &Hello::encode(honest, "test", None, &address));
    assert_eq!(receiver.shared.registry.counters().refused_for(Refusal::Overloaded), 0);
    assert_eq!(receiver.shared.registry.counters().refused_for(Refusal::Unknown), 20_000);
    let endpoint = receiver.endpoints.all()[0];
    assert!(receiver.receiving.uses(endpoint), "the honest one is listed");
}

/// A driver with an endpoint to a peer that lives.
fn connected() -> Option<(Driver, EndpointId, Receiver)> {
    let (_, start) = std::sync::mpsc::channel();
    let (mut driver, peer) = (driver()?, Receiver::new(start)?);
    let _opening = opening(&mut driver, &peer);
    let endpoint = driver.endpoints.all()[0];
    Some((driver, endpoint, peer))
}

/// UCX says `status` of an endpoint, and it is closed.
fn fails(driver: &mut Driver, endpoint: EndpointId, status: ucx_sys::ucs_status_t) {
    // SAFETY: the callback reads no pointer: its argument is the endpoint's number.
    unsafe { inbox::on_endpoint_failed(endpoint.0 as usize as *mut std::ffi::c_void, std::ptr::null_mut(), status) };
    let until = Instant::now() + Duration::from_secs(10);
    driver.handle_events();
    while driver.endpoints.has(endpoint) || driver.probe.is_some() || !driver.closed.is_empty() {
        driver.turn();
        assert!(Instant::now() < until, "the endpoint does not close");
    }
}

/// UCX has not ended this receive.
fn hangs(driver: &mut Driver, endpoint: EndpointId, claim: Claim) -> OperationId {
    let operation = driver.operations.next_id();
    let work = Work::Receive { claim, target: Vec::new() };
    driver.operations.insert(operation, Operation { endpoint, deadline: None, request: None, work });
    operation
}

#[test]
fn only_a_failure_that_proves_the_peer_dead_frees_blocks_under_its_writes() {
    let runtime = runtime();
    let _entered = runtime.enter();
    for (status, held) in [(UCS_ERR_IO_ERROR, 1), (ucx_sys::UCS_ERR_CONNECTION_RESET, 0)] {
        let Some((mut driver, endpoint, peer)) = connected() else { return };
        let (incoming, claim, owner) = claimed(&driver, endpoint);
        hangs(&mut driver, endpoint, claim);
        drop(incoming);
        fails(&mut driver, endpoint, status);
        assert_eq!(Arc::strong_count(&owner) - 1, held, "status {status}");
        assert_eq!(driver.shared.registry.quarantined().handoffs, held, "status {status}");
        peer.end();
    }
}

#[test]
fn a_handoff_that_is_here_in_whole_outlives_its_connection() {
    let runtime = runtime();
    let _entered = runtime.enter();
    // With a write of another hand-off under way, and without.
    for writing in [true, false] {
        let Some((mut driver, endpoint, peer)) = connected() else { return };
        let (whole, claim, _) = claimed(&driver, endpoint);
        claim.written();
        let registry = driver.shared.registry.clone();
        let seal = v1::Seal { handoff_id: vec![1; 16], ..v1::Seal::default() };
        registry.seal(endpoint.into(), HandoffId([1; 16]), &encode_seal(&seal));
        let other = HandoffId([2; 16]);
        let (_half, _owner) = granted(&registry, other);
        let range = DataHeader { handoff: other, first: 0, count: 1, units: Units::ALL };
        let claim = registry.claim(endpoint.into(), range, 64).expect("claim");
        [HandoffId([1; 16]), other].into_iter().for_each(|handoff| driver.receiving.list(handoff, endpoint));
        if writing {
            hangs(&mut driver, endpoint, claim);
        } else {
            drop(claim);
        }
        fails(&mut driver, endpoint, UCS_ERR_IO_ERROR);
        assert_eq!(registry.admits(endpoint.into(), other), Err(Refusal::Used), "half of it was here");
        assert_eq!(registry.admits(endpoint.into(), HandoffId([1; 16])), Ok(()), "it is being verified");
        drop(whole);
        peer.end();
    }
}

#[test]
fn a_late_completion_leaves_nothing_of_its_endpoint() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let Some((mut driver, endpoint, peer)) = connected() else { return };
    let (incoming, claim, _owner) = claimed(&driver, endpoint);
    let operation = hangs(&mut driver, endpoint, claim);
    fails(&mut driver, endpoint, UCS_ERR_IO_ERROR);
    driver.completed(operation, UCS_OK);
    assert!(!driver.operations.is_extended(endpoint), "it is closed, and nothing would remove it");
    drop(incoming);
    peer.end();
}
