//! Writes that do not end: the blocks of an abandoned hand-off stay away from everybody until the writer has ended, and
//! a writer that overstays its grace is cut off. Processes that are stopped in the middle are in `ucx_fault.rs`.
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use tandem_kvtransfer::mem::{Fate, Frame, MemFaults, MemNetwork, MemTransport, Weather, Window};
use tandem_kvtransfer::tcp::stranger::Stranger;
use tandem_kvtransfer::tcp::{TcpConfig, TcpTransport};
use tandem_kvtransfer::wire::{DataHeader, Header, Units};
use tandem_kvtransfer::{Arena, Counters, Grant, Held, Incoming, TransferErrorKind, Transport};
use tandem_memory::HostMemory;
use tandem_proto::{HandoffId, Incarnation};
use tokio::sync::oneshot;

const ID: HandoffId = HandoffId([3; 16]);
const BLOCK_BYTES: usize = 4096;
const GRACE: Duration = Duration::from_millis(300);
/// For what takes a grace.
const PROMPT: Duration = Duration::from_secs(5);

fn arena() -> Arc<Arena> {
    Arena::new(HostMemory::zeroed(8 * BLOCK_BYTES).expect("little"), BLOCK_BYTES, 1)
}

/// The receiver errs when the owner was dropped.
fn accept(transport: &dyn Transport) -> (Incoming, oneshot::Receiver<()>) {
    let (sender, freed) = oneshot::channel::<()>();
    let grant = Grant {
        handoff: ID,
        prefill_incarnation: Incarnation(1),
        decode_incarnation: Incarnation(2),
        compatibility_digest: 3,
        blocks: vec![5, 2],
        units: 1,
        held: Held::default(),
        owner: Arc::new(std::sync::Mutex::new(sender)),
        lease: Duration::from_secs(30),
    };
    (transport.accept(grant).expect("accept"), freed)
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(PROMPT, waiting).await.is_ok(), "never: {what}");
}

/// Dropped while a write is open: quarantine for the grace and no longer.
async fn is_freed_after_the_grace(incoming: Incoming, freed: oneshot::Receiver<()>, counters: &Counters) {
    let start = Instant::now();
    drop(incoming);
    assert_eq!((counters.quarantined_blocks.load(Relaxed), counters.fenced_peers.load(Relaxed)), (2, 0));
    tokio::time::timeout(PROMPT, freed).await.expect("in time").expect_err("dropped");
    assert!(start.elapsed() >= GRACE, "{:?}", start.elapsed());
    until("the gauge falls", || counters.quarantined_blocks.load(Relaxed) == 0).await;
    assert_eq!((counters.quarantined_handoffs.load(Relaxed), counters.fenced_peers.load(Relaxed)), (1, 1));
}

/// Frames arrive; writing never goes on.
struct Stuck;

impl Weather for Stuck {
    fn travel(&self, _: u64, _: u64, _: Frame) -> BoxFuture<'static, Fate> {
        std::future::ready(Fate::UNHARMED).boxed()
    }

    fn pass(&self, _: u64, _: u64, _: Window) -> BoxFuture<'static, ()> {
        std::future::pending().boxed()
    }
}

#[tokio::test]
async fn a_stalled_copy_over_mem() {
    let network = MemNetwork::under(Arc::new(Stuck));
    let receiver = MemTransport::new(&network, arena(), MemFaults { grace: Some(GRACE), ..MemFaults::default() });
    let sender = MemTransport::new(&network, arena(), MemFaults::default());
    let (incoming, freed) = accept(&*receiver);
    let mut outgoing = sender.open(&incoming.ticket()).await.expect("open");
    let counters = receiver.counters();
    outgoing.push(0, &[0, 1], Arc::new(())).await.expect("queued");
    until("the range is claimed", || counters.open_writes.load(Relaxed) > 0).await;
    is_freed_after_the_grace(incoming, freed, &counters).await;
    assert_eq!(outgoing.ended().await.kind, TransferErrorKind::Cancelled);
}

/// A byte now and then keeps a socket from timing out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_range_that_trickles_in_over_tcp() {
    let config = TcpConfig { grace: GRACE, ..TcpConfig::default() };
    let receiver = TcpTransport::bind((Ipv4Addr::LOCALHOST, 0).into(), arena(), config).expect("bind");
    let counters = receiver.counters();
    let (incoming, freed) = accept(&*receiver);
    let mut stranger = Stranger::connect(&incoming.ticket(), PROMPT).expect("welcome");
    let range = DataHeader { handoff: ID, first: 0, count: 2, units: Units::ALL };
    stranger.send_head(&Header::Data(range).encode(), 2 * BLOCK_BYTES as u64).expect("it reads");
    let mut stream = stranger.into_socket();
    // Until it hangs up: every 50 ms, paced by the wait for an answer that does not come.
    stream.set_read_timeout(Some(Duration::from_millis(50))).expect("timeout");
    let trickling = std::thread::spawn(move || {
        let mut bytes = 0;
        while stream.write_all(&[7]).is_ok() && !matches!(stream.read(&mut [0; 64]), Ok(0)) && bytes < BLOCK_BYTES {
            bytes += 1;
        }
        bytes
    });
    until("the range is claimed", || counters.open_writes.load(Relaxed) > 0).await;
    is_freed_after_the_grace(incoming, freed, &counters).await;
    assert!(trickling.join().expect("no panic") < 100, "it was cut off");
}
