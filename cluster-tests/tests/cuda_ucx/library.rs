//! Hand-offs between two processes with a GPU's memory each.
use std::time::Duration;

use nix::sys::signal::Signal;

use super::peer::Peer;
use super::{Machine, is_zero_copy};

/// What is under way between two processes that run arrives within this time.
const ARRIVED: Duration = Duration::from_millis(300);

/// A receiver on the first GPU, full of canaries, and a sender on the second one.
fn pair(machine: &Machine) -> (Peer, Peer) {
    let (mut receiver, sender) = (Peer::start(machine, 0), sender(machine));
    receiver.order("sing");
    (receiver, sender)
}

fn sender(machine: &Machine) -> Peer {
    let mut sender = Peer::start(machine, machine.second);
    sender.order("fill");
    sender
}

/// A whole hand-off.
fn hand_over(receiver: &mut Peer, sender: &mut Peer, id: u8) {
    let ticket = receiver.order(&format!("accept {id}"));
    receiver.tell("verify");
    sender.tell(&format!("open {ticket}"));
    sender.tell("push 4");
    assert_eq!(sender.order("seal"), "acknowledged");
    assert_eq!(receiver.answer(), "verified");
    assert_eq!(receiver.order("wrong-words"), "0");
    assert_eq!(sender.order("freed"), "freed");
}

#[test]
fn bytes_go_from_gpu_to_gpu_in_one_copy_and_to_the_right_places() {
    let Some(machine) = Machine::for_two() else { return };
    let (mut receiver, mut sender) = pair(&machine);
    for id in 1..=3 {
        hand_over(&mut receiver, &mut sender, id);
    }
    let log = receiver.log();
    assert!(log.lines().any(is_zero_copy), "the receiver's UCX took another way:\n{log}");
}

/// The sender hashes what it has when it seals; what it sent was another bit.
#[test]
fn a_bit_that_was_flipped_on_the_gpu_is_refused() {
    let Some(machine) = Machine::for_two() else { return };
    let (mut receiver, mut sender) = pair(&machine);
    let ticket = receiver.order("accept 1");
    receiver.tell("verify");
    sender.tell(&format!("open {ticket}"));
    sender.tell("push 4");
    assert_eq!(sender.order("freed"), "freed", "all was read");
    sender.tell("flip");
    let (said, told) = (sender.order("seal"), receiver.answer());
    assert!(said.contains("checksum") && told.contains("checksum"), "{said}; {told}");
    sender.order("fill");
    receiver.order("sing");
    hand_over(&mut receiver, &mut sender, 2);
}

#[allow(clippy::disallowed_methods, reason = "a write that must not come has no event")]
fn give_late_writes_time() {
    std::thread::sleep(ARRIVED);
}

/// SIGKILL in the middle: the blocks come back, nobody writes into them any more, and the next sender is served.
#[test]
fn a_killed_sender_writes_into_no_freed_block() {
    let Some(machine) = Machine::for_two() else { return };
    let (mut receiver, mut first) = pair(&machine);
    for id in 1..=3 {
        let ticket = receiver.order(&format!("accept {id}"));
        let before: u64 = receiver.order("received").parse().expect("a number");
        first.tell(&format!("open {ticket}"));
        first.tell("push 3");
        assert_eq!(receiver.order(&format!("await-bytes {}", before + u64::from(id))), "here");
        first.kill();
        let told = receiver.order("verify");
        assert!(told.starts_with("PeerGone"), "{told}");
        assert_eq!(receiver.order("freed"), "freed");
        receiver.order("sing");
        give_late_writes_time();
        assert_eq!(receiver.order("silenced"), "0", "words of freed blocks that were written");
        first = sender(&machine);
        hand_over(&mut receiver, &mut first, 100 + id);
        receiver.order("sing");
    }
}

/// SIGSTOP in the middle, and the receiver gives the hand-off up: as it reads by itself, nothing is left to wait for.
#[test]
fn a_frozen_sender_holds_no_block_and_wakes_up_among_strangers() {
    let Some(machine) = Machine::for_two() else { return };
    let (mut receiver, mut first) = pair(&machine);
    let ticket = receiver.order("accept 1");
    first.tell(&format!("open {ticket}"));
    first.tell("push 3");
    assert_eq!(receiver.order("await-bytes 1"), "here");
    first.signal(Signal::SIGSTOP);
    receiver.tell("abandon");
    assert_eq!(receiver.order("freed"), "freed");
    receiver.order("sing");
    first.signal(Signal::SIGCONT);
    give_late_writes_time();
    assert_eq!(receiver.order("silenced"), "0", "words of freed blocks that were written");
    let mut next = sender(&machine);
    hand_over(&mut receiver, &mut next, 2);
}
