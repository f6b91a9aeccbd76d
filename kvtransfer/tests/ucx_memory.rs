//! UCX in the process leaves the memory functions of the process alone: neither their code nor the allocator behind
//! `malloc` changes under threads that use them. The settings that see to it are those of `ucx-sys`, made here by
//! `.cargo/config.toml`.
#![cfg(target_env = "gnu")]
#![allow(unsafe_code)]

use std::sync::Arc;

use tandem_kvtransfer::Arena;
use tandem_kvtransfer::ucx::presence::or_skip;
use tandem_kvtransfer::ucx::{UcxConfig, UcxProfile, UcxTransport};
use tandem_memory::HostMemory;

const BLOCK_BYTES: usize = 4096;
/// Less than what glibc maps one by one.
const PIECE_BYTES: usize = 64 << 10;
const PIECES: usize = 64;
/// Of a function's start: more than a jump takes.
const CODE_BYTES: usize = 16;

fn arena() -> Arc<Arena> {
    let words: Vec<u64> = (0..64 * BLOCK_BYTES as u64 / 8).collect();
    Arena::new(HostMemory::holding(&words).expect("little"), BLOCK_BYTES, 1)
}

/// The first bytes of the functions that UCX knows how to watch.
fn code() -> Vec<(&'static str, [u8; CODE_BYTES])> {
    let functions = [
        ("mmap", libc::mmap as *const ()),
        ("munmap", libc::munmap as *const ()),
        ("mremap", libc::mremap as *const ()),
        ("shmat", libc::shmat as *const ()),
        ("shmdt", libc::shmdt as *const ()),
        ("brk", libc::brk as *const ()),
        ("sbrk", libc::sbrk as *const ()),
        ("madvise", libc::madvise as *const ()),
    ];
    // SAFETY: code of libc, which is readable and longer than that.
    functions.map(|(name, start)| (name, unsafe { start.cast::<[u8; CODE_BYTES]>().read_unaligned() })).to_vec()
}

/// Bytes that glibc's allocator has given out.
fn in_use() -> usize {
    // SAFETY: no arguments, and it takes the locks that it needs.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

/// Asks glibc about pieces that `Vec` asked `malloc` for.
fn glibc_answers_for_malloc() -> bool {
    let before = in_use();
    let pieces: Vec<Vec<u8>> = (0..PIECES).map(|_| vec![1; PIECE_BYTES]).collect();
    let grown = in_use().saturating_sub(before);
    drop(std::hint::black_box(pieces));
    grown > PIECES * PIECE_BYTES / 2
}

#[test]
fn ucx_changes_neither_the_allocator_nor_the_code_of_libc() {
    let before = code();
    assert!(glibc_answers_for_malloc(), "this test's own measure is wrong");
    for profile in [UcxProfile::Shm, UcxProfile::Tcp] {
        let started = UcxTransport::start(arena(), UcxConfig::new(profile));
        let Some(transport) = or_skip(started) else { return };
        assert!(glibc_answers_for_malloc(), "{profile}: UCX put its own allocator behind malloc");
        assert_eq!(code(), before, "{profile}: UCX changed the code of libc's functions, or where they are");
        drop(transport);
        assert!(glibc_answers_for_malloc(), "{profile}: UCX put its own allocator behind malloc");
    }
}
