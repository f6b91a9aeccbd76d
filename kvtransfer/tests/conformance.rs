//! What every transport must do, as one suite of functions over a constructor of a pair, run for each backend.
//! A new backend adds one constructor and one line at the end of this file. Cases stand in `suite/`.
mod suite;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use suite::{Pair, arena, shareable_arena};
use tandem_kvtransfer::mem::{MemFaults, MemNetwork, MemTransport};
use tandem_kvtransfer::tcp::{Protection, TcpConfig, TcpTransport};
use tandem_kvtransfer::ucx::presence::or_skip;
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport};
use tandem_kvtransfer::{Arena, Faults, Transport};

/// Both ends in this process; `None`: the backend cannot run here, and said so. `faults` are the sender's.
type MakePair = fn(block_bytes: usize, faults: Faults) -> Option<Pair>;

fn mem(block_bytes: usize, send: Faults) -> Option<Pair> {
    let network = MemNetwork::default();
    let faults = MemFaults { send, ..MemFaults::default() };
    let (from, to) = (arena(block_bytes), arena(block_bytes));
    let sender: Arc<dyn Transport> = MemTransport::new(&network, from.clone(), faults);
    let receiver = MemTransport::new(&network, to.clone(), MemFaults::default());
    Some(Pair { sender, receiver, from, to })
}

fn tcp(block_bytes: usize, faults: Faults) -> Option<Pair> {
    sockets(Protection::Bound, block_bytes, faults)
}

fn tcp_encrypted(block_bytes: usize, faults: Faults) -> Option<Pair> {
    sockets(Protection::Encrypted, block_bytes, faults)
}

fn sockets(protection: Protection, block_bytes: usize, faults: Faults) -> Option<Pair> {
    let bind = |arena, faults| {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        TcpTransport::bind(address, arena, TcpConfig { faults, protection, ..TcpConfig::default() }).expect("bind")
    };
    let (from, to) = (arena(block_bytes), arena(block_bytes));
    let sender = bind(from.clone(), faults);
    let receiver = bind(to.clone(), Faults::default());
    Some(Pair { sender, receiver, from, to })
}

fn ucx(profile: UcxProfile, block_bytes: usize, faults: Faults) -> Option<Pair> {
    ucx_over(profile, arena(block_bytes), arena(block_bytes), faults)
}

fn ucx_over(profile: UcxProfile, from: Arc<Arena>, to: Arc<Arena>, faults: Faults) -> Option<Pair> {
    let start = |arena, faults| or_skip(UcxTransport::start(arena, UcxConfig { faults, ..UcxConfig::new(profile) }));
    let sender = start(from.clone(), faults)?;
    let receiver = start(to.clone(), Faults::default())?;
    Some(Pair { sender, receiver, from, to })
}

fn ucx_shm(block_bytes: usize, faults: Faults) -> Option<Pair> {
    ucx(UcxProfile::Shm, block_bytes, faults)
}

/// The receiver copies by itself: the sender's memory may be mapped.
fn ucx_one_copy(block_bytes: usize, faults: Faults) -> Option<Pair> {
    let pair = ucx_over(UcxProfile::Shm, shareable_arena(block_bytes), arena(block_bytes), faults)?;
    assert!(pair.sender.info().name.ends_with(", one copy"), "{}", pair.sender.info().name);
    Some(pair)
}

fn ucx_tcp(block_bytes: usize, faults: Faults) -> Option<Pair> {
    ucx(UcxProfile::Tcp, block_bytes, faults)
}

macro_rules! conformance {
    ($backend:ident: $($case:ident)*) => {
        mod $backend {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    super::suite::$case(super::$backend as super::MakePair).await;
                }
            )*
        }
    };
    ($($backend:ident)*) => {
        $(conformance!($backend:
            random_block_tables_arrive_and_nothing_else_changes
            two_hundred_handoffs_interleaved
            an_id_is_single_use
            an_expired_lease_is_refused
            a_wrong_incarnation_is_refused
            a_wrong_prompt_is_refused
            wrong_tokens_are_refused
            a_flipped_byte_is_corrupt
            a_truncated_push_is_refused
            a_seal_before_all_blocks_is_refused
            a_block_sent_twice_is_refused
            blocks_outside_the_grant_are_not_sent
            another_build_is_incompatible
            dropping_the_receiving_end_midway_returns_its_blocks
            dropping_the_sending_end_midway_ends_the_receiving_one
            blocks_arrive_in_units
            a_unit_out_of_order_is_refused
            a_missing_unit_is_incomplete
            keep_alives_carry_a_slow_handoff_beyond_its_lease
            silence_for_the_lease_ends_a_handoff
            an_unused_grant_expires_without_a_waiter
            the_sender_dies
            the_receiver_dies
        );)*
    };
}

conformance!(mem tcp tcp_encrypted ucx_shm ucx_one_copy ucx_tcp);
