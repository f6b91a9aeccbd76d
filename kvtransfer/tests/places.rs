//! KV memory that is not the processor's own: what copies bytes moves it, what hands addresses to a library refuses it.
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use tandem_kvtransfer::mem::{MemFaults, MemNetwork, MemTransport};
use tandem_kvtransfer::tcp::{TcpConfig, TcpTransport};
use tandem_kvtransfer::ucx::presence::or_skip;
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport};
use tandem_kvtransfer::{Arena, Expected, Grant, Held, Run, TransferErrorKind, Transport, seal_for};
use tandem_memory::{HostMemory, KvMemory, Place};
use tandem_proto::{HandoffId, Incarnation};

const BLOCK_BYTES: usize = 3 * 4104;
const LAYERS: usize = 3;

/// Bytes that only its own functions reach.
struct OnDevice(Arc<HostMemory>);

impl KvMemory for OnDevice {
    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn place(&self) -> Place<'_> {
        Place::Cuda { device: 3, address: 0x7000_0000_0000 }
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        self.0.read(at, out);
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.0.write(at, bytes);
    }

    fn digests(&self, pieces: &[Run], out: &mut [u64]) {
        self.0.digests(pieces, out);
    }
}

fn arena(first_word: u64) -> Arc<Arena> {
    let words: Vec<u64> = (first_word..).take(8 * BLOCK_BYTES / 8).collect();
    Arena::new(Arc::new(OnDevice(HostMemory::holding(&words).expect("little"))), BLOCK_BYTES, LAYERS)
}

#[tokio::test]
async fn bytes_are_copied_wherever_they_lie() {
    let (network, (from, to)) = (MemNetwork::default(), (arena(1), arena(1 << 32)));
    let mem =
        |arena: &Arc<Arena>| -> Arc<dyn Transport> { MemTransport::new(&network, arena.clone(), MemFaults::default()) };
    hand_over(&mem(&from), &from, &mem(&to), &to).await;
    let (from, to) = (arena(1), arena(1 << 32));
    let tcp = |arena: &Arc<Arena>| -> Arc<dyn Transport> {
        TcpTransport::bind((Ipv4Addr::LOCALHOST, 0).into(), arena.clone(), TcpConfig::default()).expect("bind")
    };
    hand_over(&tcp(&from), &from, &tcp(&to), &to).await;
}

async fn hand_over(sender: &Arc<dyn Transport>, from: &Arena, receiver: &Arc<dyn Transport>, to: &Arena) {
    let grant = Grant {
        handoff: HandoffId([7; 16]),
        prefill_incarnation: Incarnation(1),
        decode_incarnation: Incarnation(2),
        compatibility_digest: 3,
        blocks: vec![6, 1],
        units: 3,
        held: Held::default(),
        owner: Arc::new(()),
        lease: Duration::from_secs(20),
    };
    let incoming = receiver.accept(grant).expect("accept");
    let seal = seal_for(from, &[2, 5], &incoming.ticket(), 9, vec![5.into(); 2]);
    let mut outgoing = sender.open(&incoming.ticket()).await.expect("open");
    let verified = tokio::spawn(incoming.verified(Expected { prompt_tokens: 9, sequence_hashes: vec![5.into(); 2] }));
    for layer in 0..3 {
        outgoing.push_units(layer..layer + 1, 0, &[2, 5], Arc::new(())).await.expect("push");
    }
    outgoing.seal(seal).await.expect("seal");
    verified.await.expect("no panic").expect("verified");
    assert_eq!([2, 5].map(|block| from.checksum(block)), [6, 1].map(|block| to.checksum(block)));
}

/// Another scheme could let the sender write.
#[test]
fn operators_do_not_choose_who_writes_into_a_device() {
    for variable in ["RNDV_SCHEME", "CUDA_IPC_ENABLE_GET_ZCOPY"] {
        let config = UcxConfig { operators: vec![variable.into()], ..UcxConfig::new(UcxProfile::Shm) };
        let error = UcxTransport::start(arena(0), config).err().expect("refused");
        assert!(error.to_string().contains(&format!("UCX_{variable}")), "{error}");
    }
}

#[test]
fn a_ucx_without_cuda_refuses_device_memory_and_says_so() {
    let start = |arena| UcxTransport::start(arena, UcxConfig::new(UcxProfile::Shm));
    let host = Arena::new(HostMemory::zeroed(4096).expect("little"), 64, 1);
    if or_skip(start(host)).is_none() {
        return;
    }
    let error = start(arena(0)).err().expect("no device here");
    assert_eq!(error.kind, TransferErrorKind::Incompatible);
    assert!(error.to_string().contains("CUDA device 3"), "{error}");
}
