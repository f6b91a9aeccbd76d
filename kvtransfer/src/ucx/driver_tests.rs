//! The driver with events in an order that UCX rarely gives. Each test's thread owns a worker; without UCX they skip.
//! Long because each rare order of events is a test of its own, and all need the same two drivers.
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tandem_memory::HostMemory;
use tandem_proto::{HandoffId, Incarnation, v1};
use tokio::sync::oneshot;

use super::super::address::CheckedAddress;
use super::super::commands::Opened;
use super::super::ids::OperationId;
use super::super::operations::Operation;
use super::super::origin::Origin;
use super::super::presence::or_skip;
use super::super::process::ProcessName;
use super::super::queue::Queue;
use super::*;
use crate::arena::Arena;
use crate::error::Refusal;
use crate::handshake::{HELLO_HEAD_BYTES, Hello, Secret};
use crate::incoming::Incoming;
use crate::registry::{Claim, PeerLink, Registry};
use crate::session::DEFAULT_GRACE;
use crate::terms::{Grant, Held, PeerId};
use crate::wire::{Answer, DataHeader, Units, encode_seal};

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
    let loaded =
        Api::load(None).map_err(|error| TransferError::new(TransferErrorKind::Incompatible, error.to_string()));
    let api = or_skip(loaded)?;
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
    let incoming = Incoming::accept(registry, grant(handoff, owner.clone()), Default::default(), Vec::new());
    (incoming.expect("accept"), owner)
}

/// `peer` has said hello, and is welcome.
fn opened_by(registry: &Registry, ticket: &v1::Ticket, peer: PeerId) {
    open_as(registry, ticket, peer).expect("open");
}

fn open_as(registry: &Registry, ticket: &v1::Ticket, peer: PeerId) -> Result<(), Refusal> {
    let payload = Secret::of(ticket).expect("a key").hello([1; 16], &[]);
    let authenticated = registry.authenticate(&Hello::parse(&payload).expect("whole"))?;
    registry.open(peer, &authenticated)
}

/// The hello of `sender` for a ticket.
fn hello(sender: &Driver, ticket: &v1::Ticket) -> Vec<u8> {
    Secret::of(ticket).expect("a key").hello([1; 16], &sender.desk.about(EndpointId(1)))
}

/// A ticket of nobody.
fn invented(handoff: HandoffId) -> v1::Ticket {
    let key = Some(v1::HandoffKey { secret: vec![1; 32] });
    v1::Ticket { handoff_id: handoff.0.to_vec(), key, ..v1::Ticket::default() }
}

/// The same, with its only range claimed by `peer`.
fn claimed(driver: &Driver, peer: EndpointId) -> (Incoming, Claim, Arc<()>) {
    let (incoming, owner) = granted(&driver.desk.shared.registry, HandoffId([1; 16]));
    opened_by(driver.desk.registry(), &incoming.ticket(), peer.into());
    let range = DataHeader { handoff: HandoffId([1; 16]), first: 0, count: 1, units: Units::ALL };
    let claim = driver.desk.shared.registry.claim(peer.into(), range, 64).expect("claim");
    (incoming, claim, owner)
}

#[test]
fn a_receive_that_fails_after_its_endpoint_was_let_go_frees_its_blocks() {
    let (runtime, Some(mut driver)) = (runtime(), driver()) else { return };
    let _entered = runtime.enter();
    let gone = EndpointId(77);
    let (incoming, claim, owner) = claimed(&driver, gone);
    driver.desk.shared.registry.cancelled_by(gone.into(), HandoffId([1; 16]));
    assert_eq!(driver.desk.registry().quarantined().handoffs, 1);
    driver.finished(gone, Cargo::Receive { claim, target: Vec::new() }, false);
    assert_eq!(driver.desk.registry().quarantined().handoffs, 0);
    assert_eq!(Arc::strong_count(&owner), 1);
    drop(incoming);
}

#[test]
fn a_receive_that_fails_before_that_waits_for_the_others_of_its_endpoint() {
    let (runtime, Some(mut driver)) = (runtime(), driver()) else { return };
    let _entered = runtime.enter();
    let closed = EndpointId(77);
    let (incoming, claim, owner) = claimed(&driver, closed);
    driver.custody.closed(Closed { id: closed, confirmed: true });
    driver.finished(closed, Cargo::Receive { claim, target: Vec::new() }, false);
    assert_eq!(Arc::strong_count(&owner), 2, "held");
    let until = Instant::now() + Duration::from_secs(4);
    while driver.custody.has_waiting() {
        driver.turn();
        assert!(Instant::now() < until, "the probe does not come back");
    }
    assert_eq!(Arc::strong_count(&owner), 1);
    drop(incoming);
}

/// An open hand-off of a driver, as the transport asks for it.
fn opening(driver: &mut Driver, receiver: &Receiver) -> oneshot::Receiver<Result<Opened, TransferError>> {
    opening_of(driver, receiver, &invented(HandoffId([1; 16])))
}

fn opening_of(
    driver: &mut Driver,
    receiver: &Receiver,
    ticket: &v1::Ticket,
) -> oneshot::Receiver<Result<Opened, TransferError>> {
    let (reply, opened) = oneshot::channel();
    let address = CheckedAddress::parse(&receiver.shared.address(), &driver.desk.key).expect("an honest address");
    let handoff = HandoffId::from_wire(&ticket.handoff_id).expect("16 bytes");
    let secret = Secret::of(ticket).expect("a key");
    driver.run_command(Command::Open { handoff, address, secret, reply });
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
        Self::that(move |driver| {
            let _ = start.recv();
            driver.run();
        })
    }

    /// One whose driver is left to `work`. `None`: there is no UCX here.
    fn that(work: impl FnOnce(Driver) + Send + 'static) -> Option<Self> {
        let (known, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let Some(driver) = driver() else { return };
            let _ = known.send(driver.desk.shared.clone());
            work(driver);
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
    let granted = granted(&receiver.shared.registry, HandoffId([1; 16]));
    let mut opened = opening_of(&mut sender, &receiver, &granted.0.ticket());
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
    sender.sending.on_answer(&sender.desk, HandoffId([1; 16]), Answer::Refused(Refusal::WrongPeer));
    let error = opened.try_recv().expect("told").err().expect("refused");
    assert_eq!(error.refusal, Some(Refusal::WrongPeer));
    drop(go);
    receiver.end();
}

fn on_hello(driver: &mut Driver, payload: &[u8]) {
    driver.receiving.on_hello(&mut driver.desk, tandem_proto::PROTOCOL_VERSION, payload, |_| false);
}

/// What a stranger makes of an honest hello.
fn garbled(rng: &mut StdRng, honest: &[u8]) -> Vec<u8> {
    let mut bytes = honest.to_vec();
    match rng.random_range(0..4) {
        0 => bytes.truncate(rng.random_range(0..honest.len())),
        1 => bytes[rng.random_range(0..honest.len())] ^= 1 << rng.random_range(0..8),
        // The head with anything behind it.
        2 => bytes[HELLO_HEAD_BYTES..].iter_mut().for_each(|byte| *byte = rng.random()),
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
        let granted = granted(&receiver.shared.registry, handoff);
        let mut opened = opening_of(&mut sender, &receiver, &granted.0.ticket());
        let opened = until_opened(&mut sender, &mut opened).expect("welcome");
        let honest = hello(&sender, &granted.0.ticket());
        for _ in 0..HELLOS {
            let hello = garbled(&mut rng, &honest);
            sender.desk.post_frame(opened.endpoint, Header::hello(), hello);
            sender.turn();
        }
        let (all, until) = (u64::from(round + 1) * HELLOS, Instant::now() + Duration::from_secs(4));
        while counters.rejected_hellos.load(Relaxed) < all {
            sender.turn();
            assert!(Instant::now() < until, "{} of {all} were refused", counters.rejected_hellos.load(Relaxed));
        }
    }
    let all = u64::from(ROUNDS) * HELLOS;
    let counted = (counters.rejected_hellos.load(Relaxed), counters.protocol_errors.load(Relaxed));
    assert_eq!(counted, (all, all));
    assert_eq!(counters.lost_peers.load(Relaxed), 0);
    receiver.end();
}

#[test]
fn a_hello_of_another_key_reaches_no_endpoint() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let (Some(mut receiver), Some(sender), Some(stranger)) = (
        driver(),
        driver(),
        driver_with(UcxConfig { address_keys: [1; 32].into(), ..UcxConfig::new(UcxProfile::Shm) }),
    ) else {
        return;
    };
    let (incoming, _owner) = granted(receiver.desk.registry(), HandoffId([1; 16]));
    let ticket = incoming.ticket();
    // The hand-off's key and not the cluster's; the cluster's and not the hand-off's; a replay with another nonce.
    let mut replayed = hello(&sender, &ticket);
    replayed[16] ^= 1;
    let hellos = [hello(&stranger, &ticket), hello(&sender, &invented(HandoffId([1; 16]))), replayed];
    for (said, payload) in hellos.iter().enumerate() {
        on_hello(&mut receiver, payload);
        assert_eq!(receiver.desk.endpoints.all(), vec![]);
        assert_eq!(receiver.desk.registry().counters().rejected_hellos.load(Relaxed), said as u64 + 1);
    }
    assert_eq!(receiver.desk.registry().counters().refused_for(Refusal::Unauthenticated), 2);
    on_hello(&mut receiver, &hello(&sender, &ticket));
    assert_eq!(receiver.desk.endpoints.all().len(), 1, "the right one, at last");
}

#[test]
fn a_welcome_without_the_key_is_none() {
    let (go, start) = std::sync::mpsc::channel();
    let (Some(mut sender), Some(receiver)) = (driver(), Receiver::new(start)) else { return };
    let mut opened = opening(&mut sender, &receiver);
    for payload in [vec![], vec![0; 48], vec![0; 4000]] {
        sender.sending.on_welcome(&mut sender.desk, HandoffId([1; 16]), &payload, Way::Sent);
        assert!(opened.try_recv().is_err(), "it still waits");
    }
    assert_eq!(sender.desk.registry().counters().protocol_errors.load(Relaxed), 3);
    drop(go);
    receiver.end();
}

#[test]
fn a_hello_for_a_handoff_that_is_not_the_senders_is_refused_and_takes_no_place() {
    let (runtime, (go, start)) = (runtime(), std::sync::mpsc::channel());
    let (Some(mut sender), Some(receiver)) = (driver(), Receiver::new(start)) else { return };
    let (_entered, registry) = (runtime.enter(), receiver.shared.registry.clone());
    go.send(()).expect("the receiver waits");
    let refusal = |sender: &mut Driver, ticket: &v1::Ticket| {
        let mut opened = opening_of(sender, &receiver, ticket);
        until_opened(sender, &mut opened).err().expect("refused").refusal
    };
    let (incoming, _) = granted(&registry, HandoffId([2; 16]));
    let ticket = incoming.ticket();
    drop(incoming);
    assert_eq!(refusal(&mut sender, &ticket), Some(Refusal::Used));
    let (bound, _) = granted(&registry, HandoffId([3; 16]));
    opened_by(&registry, &bound.ticket(), PeerId(u64::MAX));
    assert_eq!(refusal(&mut sender, &bound.ticket()), Some(Refusal::WrongPeer));
    // Without a key it is told because it has been here before.
    assert_eq!(refusal(&mut sender, &invented(HandoffId([1; 16]))), Some(Refusal::Unknown));
    let counted = [Refusal::Unknown, Refusal::Used, Refusal::WrongPeer].map(|why| registry.counters().refused_for(why));
    assert_eq!(counted, [1, 1, 1]);
    receiver.end();
}

#[test]
fn a_flood_of_hellos_for_nothing_leaves_room_for_honest_ones() {
    let (Some(mut receiver), Some(sender)) = (driver(), driver()) else { return };
    let runtime = runtime();
    let _entered = runtime.enter();
    // More than the table of hand-offs holds.
    for number in 0..20_000u128 {
        let hello = hello(&sender, &invented(HandoffId(number.to_le_bytes())));
        on_hello(&mut receiver, &hello);
        receiver.progress();
        receiver.handle_events();
    }
    let honest = HandoffId([0xff; 16]);
    let granted = granted(receiver.desk.registry(), honest);
    on_hello(&mut receiver, &hello(&sender, &granted.0.ticket()));
    assert_eq!(receiver.desk.registry().counters().refused_for(Refusal::Overloaded), 0);
    assert_eq!(receiver.desk.registry().counters().refused_for(Refusal::Unknown), 20_000);
    let endpoint = receiver.desk.endpoints.all()[0];
    assert!(receiver.receiving.uses(endpoint), "the honest one is listed");
}

/// A driver with an endpoint to a peer that lives.
fn connected() -> Option<(Driver, EndpointId, Receiver)> {
    let (_, start) = std::sync::mpsc::channel();
    let (mut driver, peer) = (driver()?, Receiver::new(start)?);
    let _opening = opening(&mut driver, &peer);
    let endpoint = driver.desk.endpoints.all()[0];
    Some((driver, endpoint, peer))
}

/// UCX says `status` of an endpoint, and it is closed.
fn fails(driver: &mut Driver, endpoint: EndpointId, status: ucx_sys::ucs_status_t) {
    // SAFETY: the callback reads no pointer: its argument is the endpoint's number.
    unsafe { inbox::on_endpoint_failed(endpoint.0 as usize as *mut std::ffi::c_void, std::ptr::null_mut(), status) };
    let until = Instant::now() + Duration::from_secs(10);
    driver.handle_events();
    while driver.desk.endpoints.has(endpoint) || driver.custody.has_waiting() {
        driver.turn();
        assert!(Instant::now() < until, "the endpoint does not close");
    }
}

/// UCX has not ended this receive.
fn hangs(driver: &mut Driver, endpoint: EndpointId, claim: Claim) -> OperationId {
    let operation = driver.desk.operations.next_id();
    let cargo = Cargo::Receive { claim, target: Vec::new() };
    driver.desk.operations.insert(operation, Operation { endpoint, deadline: None, request: None, cargo });
    operation
}

#[test]
fn no_word_of_ucx_frees_blocks_under_the_writes_of_a_peer_that_lives() {
    let runtime = runtime();
    let _entered = runtime.enter();
    for status in [UCS_ERR_IO_ERROR, ucx_sys::UCS_ERR_CONNECTION_RESET] {
        let Some((mut driver, endpoint, peer)) = connected() else { return };
        let (incoming, claim, owner) = claimed(&driver, endpoint);
        let operation = hangs(&mut driver, endpoint, claim);
        drop(incoming);
        fails(&mut driver, endpoint, status);
        assert_eq!(Arc::strong_count(&owner), 2, "status {status}");
        assert_eq!(driver.desk.registry().quarantined().handoffs, 1, "status {status}");
        driver.desk.completed(operation, UCS_ERR_IO_ERROR);
        driver.hand_out_ends();
        assert_eq!(Arc::strong_count(&owner), 1, "status {status}");
        peer.end();
    }
}

#[test]
fn blocks_come_back_when_the_process_behind_the_peer_has_ended() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let Some((mut driver, endpoint, peer)) = connected() else { return };
    let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().expect("cat");
    let origin = Origin { process: ProcessName::of(child.id()).expect("it lives"), ..driver.desk.origin(endpoint) };
    let address = driver.desk.endpoints.address(endpoint).expect("open");
    assert_eq!(driver.desk.answer_to(&address, &origin, |_| false), Ok(endpoint));
    let (incoming, claim, owner) = claimed(&driver, endpoint);
    hangs(&mut driver, endpoint, claim);
    drop(incoming);
    fails(&mut driver, endpoint, ucx_sys::UCS_ERR_CONNECTION_RESET);
    assert_eq!(Arc::strong_count(&owner), 2, "it lives");
    child.kill().expect("it lives");
    let until = Instant::now() + Duration::from_secs(10);
    while Arc::strong_count(&owner) > 1 {
        driver.turn();
        assert!(Instant::now() < until, "the blocks do not come back");
    }
    child.wait().expect("killed");
    assert_eq!(driver.desk.registry().counters().fenced_peers.load(Relaxed), 0, "nobody was cut off");
    peer.end();
}

#[test]
fn a_new_worker_ends_grants_that_nobody_has_opened() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let Some(mut driver) = driver() else { return };
    let before = driver.desk.shared.address();
    let (incoming, owner) = granted(driver.desk.registry(), HandoffId([1; 16]));
    driver.start_anew("a test");
    assert_ne!(driver.desk.shared.address(), before);
    assert_eq!(Arc::strong_count(&owner), 1);
    let expected = crate::Expected { prompt_tokens: 1, sequence_hashes: vec![5.into()] };
    let error = runtime.block_on(incoming.verified(expected)).expect_err("its ticket leads nowhere");
    assert_eq!(error.kind, TransferErrorKind::PeerGone);
}

/// One hand-off from its hello to the verdict. How long its welcome took.
fn hand_off(sender: &mut Driver, receiver: &Receiver, runtime: &tokio::runtime::Runtime, id: u8) -> Duration {
    let (handoff, start) = (HandoffId([id; 16]), Instant::now());
    let (incoming, _owner) = granted(&receiver.shared.registry, handoff);
    let ticket = incoming.ticket();
    let mut opened = opening_of(sender, receiver, &ticket);
    let opened = until_opened(sender, &mut opened).expect("welcome");
    let took = start.elapsed();
    let range = DataHeader { handoff, first: 0, count: 1, units: Units::ALL };
    let credit = opened.credit.clone().try_acquire_many_owned(64).expect("credit");
    let runs = vec![crate::Run { at: 0, bytes: 64 }];
    sender.run_command(Command::Push { endpoint: opened.endpoint, range, runs, owner: Arc::new(()), credit });
    sender.hand_out_ends();
    let seal = crate::seal_for(&sender.desk.shared.arena, &[0], &ticket, 1, vec![5.into()]);
    sender.run_command(Command::Seal { handoff, payload: encode_seal(&seal) });
    let expected = crate::Expected { prompt_tokens: 1, sequence_hashes: vec![5.into()] };
    let verified = runtime.spawn(incoming.verified(expected));
    let until = Instant::now() + Duration::from_secs(20);
    while !verified.is_finished() {
        sender.turn();
        runtime.block_on(tokio::task::yield_now());
        assert!(Instant::now() < until, "hand-off {id} does not arrive");
    }
    runtime.block_on(verified).expect("no panic").expect("verified");
    took
}

/// One whose UCX says every few milliseconds that it lives: rings that nobody reads are soon full.
fn talkative() -> Option<Driver> {
    driver_with(UcxConfig { keep_alive: Duration::from_millis(5), ..UcxConfig::new(UcxProfile::Shm) })
}

/// Turns for so long, as a driver that has nothing to do makes them. Whether it could sleep then.
fn may_sleep_after(driver: &mut Driver, time: Duration) -> bool {
    let until = Instant::now() + time;
    while Instant::now() < until {
        driver.turn();
        std::thread::yield_now();
    }
    (0..100).any(|_| {
        driver.turn();
        driver.desk.worker.arm() == Ok(true)
    })
}

/// Whether it comes to be able to, however late the peer gets a processor to read on.
fn comes_to_sleep_after(driver: &mut Driver, time: Duration) -> bool {
    let until = Instant::now() + time + Duration::from_secs(10);
    let mut sleeps = may_sleep_after(driver, time);
    while !sleeps && Instant::now() < until {
        sleeps = may_sleep_after(driver, Duration::from_millis(10));
    }
    sleeps
}

#[test]
fn an_idle_driver_can_sleep_however_long_it_is_there() {
    let Some(mut driver) = talkative() else { return };
    let (_, start) = std::sync::mpsc::channel();
    let Some(peer) = Receiver::new(start) else { return };
    let _opening = opening(&mut driver, &peer);
    // A probe that finds this worker's ring full, as under load: UCX makes the two workers known to each other.
    if let Some(prober) = &mut driver.prober {
        (0..32).for_each(|_| _ = prober.send(false, Instant::now()));
    }
    for _ in 0..200 {
        driver.prober.iter().for_each(Prober::tend);
        driver.turn();
    }
    assert!(comes_to_sleep_after(&mut driver, Duration::from_secs(2)), "a ring is full, and nobody empties it");
    peer.end();
}

#[test]
fn a_driver_before_a_full_ring_leaves_its_core_to_others() {
    let Some(mut driver) = talkative() else { return };
    let (tell, told) = std::sync::mpsc::channel();
    let Some(peer) = Receiver::that(move |mut receiver| {
        // It reads until it is told to stand still, and again from the next word on.
        while told.try_recv().is_err() {
            receiver.turn();
        }
        let _ = told.recv();
        receiver.run();
    }) else {
        return;
    };
    let _opening = opening(&mut driver, &peer);
    assert!(comes_to_sleep_after(&mut driver, Duration::from_millis(500)), "the peer reads");
    tell.send(()).expect("it is there");
    assert!(!may_sleep_after(&mut driver, Duration::from_secs(2)), "the peer's ring is full");
    let start = Instant::now();
    driver.sleep(FULL);
    assert!(start.elapsed() >= BLIND_TICK, "{:?}", start.elapsed());
    tell.send(()).expect("it is there");
    assert!(comes_to_sleep_after(&mut driver, Duration::from_secs(1)), "the peer reads again");
    peer.end();
}

#[test]
fn a_peer_that_has_closed_its_side_is_met_again_without_a_wait() {
    let (runtime, (go, start)) = (runtime(), std::sync::mpsc::channel());
    let (Some(mut sender), Some(receiver)) = (driver(), Receiver::new(start)) else { return };
    let _entered = runtime.enter();
    go.send(()).expect("the receiver waits");
    hand_off(&mut sender, &receiver, &runtime, 1);
    // The sender has closed its side, and the receiver does not know.
    let closed = sender.desk.endpoints.all()[0];
    sender.desk.lose(closed, Loss::GivenUp, TransferError::peer_gone("a test"));
    sender.hand_out_ends();
    let took = hand_off(&mut sender, &receiver, &runtime, 2);
    assert!(took < sender.desk.config.stall_timeout, "the welcome went to the side that is closed: {took:?}");
    // The receiver has, and the sender does not know. Its first endpoint led to the one that is closed.
    for endpoint in (1..20).map(EndpointId) {
        let _ = receiver.shared.queue.send_now(Command::CutOff { endpoint });
    }
    let took = hand_off(&mut sender, &receiver, &runtime, 3);
    assert!(took < sender.desk.config.stall_timeout, "its ranges went to the side that is closed: {took:?}");
    receiver.end();
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
        let registry = driver.desk.shared.registry.clone();
        let seal = v1::Seal { handoff_id: vec![1; 16], ..v1::Seal::default() };
        registry.seal(endpoint.into(), HandoffId([1; 16]), &encode_seal(&seal));
        let other = HandoffId([2; 16]);
        let (half, _owner) = granted(&registry, other);
        opened_by(&registry, &half.ticket(), endpoint.into());
        let range = DataHeader { handoff: other, first: 0, count: 1, units: Units::ALL };
        let claim = registry.claim(endpoint.into(), range, 64).expect("claim");
        [HandoffId([1; 16]), other].into_iter().for_each(|handoff| driver.receiving.list(handoff, endpoint));
        if writing {
            hangs(&mut driver, endpoint, claim);
        } else {
            drop(claim);
        }
        fails(&mut driver, endpoint, UCS_ERR_IO_ERROR);
        let reopened = |incoming: &Incoming| open_as(&registry, &incoming.ticket(), endpoint.into());
        assert_eq!(reopened(&half), Err(Refusal::Used), "half of it was here");
        assert_eq!(reopened(&whole), Ok(()), "it is being verified");
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
    driver.desk.completed(operation, ucx_sys::UCS_OK);
    driver.hand_out_ends();
    assert!(!driver.desk.operations.is_extended(endpoint), "it is closed, and nothing would remove it");
    drop(incoming);
    peer.end();
}
