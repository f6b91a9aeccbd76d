//! The last act of the driver's thread, however it ends: told to, out of workers, or by a panic. Whoever waits for it
//! learns that it is gone, and the transport says why it failed. Knows no UCX.
use super::commands::Shared;
use crate::error::TransferError;

/// Lives as long as the thread's work, and longer than the driver itself: when it is dropped, UCX's worker is
/// destroyed.
pub(super) struct Ending(pub(super) Shared);

impl Drop for Ending {
    fn drop(&mut self) {
        let reason = if std::thread::panicking() { "its thread panicked" } else { "its thread has ended" };
        // The first reason stands: the driver knows better. Nobody asks after a shutdown that was asked for.
        self.0.failure.get_or_init(|| reason.to_owned());
        self.0.queue.end();
        self.0.pending.all_gone(&TransferError::peer_gone("the KV transport has ended"));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tandem_proto::{HandoffId, Incarnation, v1};
    use tokio::sync::oneshot;

    use super::super::address::CheckedAddress;
    use super::super::commands::Command;
    use super::super::presence::or_skip;
    use super::super::queue::Queue;
    use super::super::{UcxConfig, UcxProfile, UcxTransport};
    use super::*;
    use tandem_memory::HostMemory;

    use crate::arena::Arena;
    use crate::error::TransferErrorKind;
    use crate::handshake::Secret;
    use crate::registry::{PeerLink, Registry};
    use crate::session::DEFAULT_GRACE;
    use crate::terms::{Grant, Held, PeerId};
    use crate::transport::Transport;
    use crate::wire::Answer;

    struct Nobody;

    impl PeerLink for Nobody {
        fn answer(&self, _: PeerId, _: HandoffId, _: Answer) {}

        fn cut_off(&self, _: PeerId) {}
    }

    fn arena() -> Arc<Arena> {
        Arena::new(HostMemory::zeroed(64 * 8).expect("little"), 64, 1)
    }

    fn secret() -> Secret {
        let key = Some(v1::HandoffKey { secret: vec![1; 32] });
        Secret::of(&v1::Ticket { handoff_id: vec![1; 16], key, ..v1::Ticket::default() }).expect("whole")
    }

    #[tokio::test]
    async fn a_panic_of_the_driver_ends_every_wait_for_it() {
        let shared = Shared {
            registry: Registry::new(arena(), Arc::default(), Box::new(Nobody), DEFAULT_GRACE),
            arena: arena(),
            pending: Arc::default(),
            queue: Queue::new().expect("eventfd"),
            address: Arc::default(),
            failure: Arc::default(),
        };
        let (reply, opened) = oneshot::channel();
        let address = CheckedAddress::own(&[1]).expect("short");
        let command = Command::Open { handoff: HandoffId([1; 16]), address: address.clone(), secret: secret(), reply };
        assert!(shared.queue.send(command).await.is_ok());
        let ending = Ending(shared.clone());
        let driver = std::thread::spawn(move || {
            let _ending = ending;
            panic!("on purpose");
        });
        driver.join().expect_err("it panicked");
        assert!(opened.await.is_err(), "the reply was dropped with its command");
        assert_eq!(shared.failure.get().map(String::as_str), Some("its thread panicked"));
        let (reply, _opened) = oneshot::channel();
        let late = Command::Open { handoff: HandoffId([2; 16]), address, secret: secret(), reply };
        assert!(shared.queue.send(late).await.is_err());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_transport_without_its_thread_says_so_and_refuses() {
        let start = || or_skip(UcxTransport::start(arena(), UcxConfig::new(UcxProfile::Shm)));
        let (Some(transport), Some(peer)) = (start(), start()) else { return };
        assert_eq!(transport.failed(), None);
        let grant = |id| Grant {
            handoff: HandoffId([id; 16]),
            prefill_incarnation: Incarnation(1),
            decode_incarnation: Incarnation(2),
            compatibility_digest: 3,
            blocks: vec![0],
            units: 1,
            held: Held::default(),
            owner: Arc::new(()),
            lease: Duration::from_secs(60),
        };
        let incoming = peer.accept(grant(1)).expect("accept");
        // What the driver does when UCX gives it no new worker.
        transport.shared.failure.get_or_init(|| "no worker".to_owned());
        transport.shared.queue.close();
        let ticket = incoming.ticket();
        let opening = tokio::time::timeout(Duration::from_secs(20), transport.open(&ticket));
        assert!(opening.await.expect("no wait for a thread that is gone").is_err());
        assert_eq!(transport.failed().as_deref(), Some("UCX: no worker"));
        let refused = transport.accept(grant(2)).err().expect("nobody would receive it");
        assert_eq!(refused.kind, TransferErrorKind::Io);
    }
}
