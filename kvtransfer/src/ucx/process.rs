//! Has a process of this machine ended? By the kernel's word, not UCX's: a peer names its process when it says hello,
//! and we hold a descriptor of it (pidfd), which tells its end even when its number is given to another process.
//!
//! Nothing is known of a process in another PID namespace, on another machine or of another boot: there the kernel
//! would speak of somebody else. The name is checked against the kernel while the peer lives; it is the peer's word
//! that this process is its own.
//!
//! ```text
//! 0..16  boot id of the machine
//! 16..24 inode of the PID namespace   (little endian)
//! 24..28 pid
//! 28..36 its start, in clock ticks since the boot
//! ```
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Of a name as it travels.
pub(super) const NAME_BYTES: usize = 36;

/// What tells a process from every other one of a cluster. All zeros: it does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ProcessName {
    boot: [u8; 16],
    namespace: u64,
    pid: u32,
    started: u64,
}

impl ProcessName {
    /// Of this process; unknown where `/proc` is not what it should be.
    pub(super) fn own() -> Self {
        Self::of(std::process::id()).unwrap_or_default()
    }

    pub(super) fn encode(self) -> [u8; NAME_BYTES] {
        let mut bytes = [0; NAME_BYTES];
        bytes[..16].copy_from_slice(&self.boot);
        bytes[16..24].copy_from_slice(&self.namespace.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.pid.to_le_bytes());
        bytes[28..].copy_from_slice(&self.started.to_le_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8; NAME_BYTES]) -> Self {
        let mut name = Self::default();
        name.boot.copy_from_slice(&bytes[..16]);
        let word = |at: usize| bytes[at..at + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        name.namespace = word(16);
        name.pid = bytes[24..28].iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
        name.started = word(28);
        name
    }

    /// Of one that this process can see.
    pub(super) fn of(pid: u32) -> io::Result<Self> {
        let garbled = || io::Error::from(io::ErrorKind::InvalidData);
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let boot = u128::from_str_radix(&boot.trim().replace('-', ""), 16).map_err(|_| garbled())?;
        // "pid:[4026531836]"
        let link = fs::read_link("/proc/self/ns/pid")?;
        let inode: String = link.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
        let namespace = inode.parse().map_err(|_| garbled())?;
        Ok(Self { boot: boot.to_be_bytes(), namespace, pid, started: start_of(pid)? })
    }
}

/// A process that was alive when we looked, and whose end will be known.
#[derive(Debug)]
pub(super) struct Watch(OwnedFd);

impl Watch {
    /// `None`: it is none that this process can see, or it has ended already.
    pub(super) fn on(name: &ProcessName) -> Option<Self> {
        let own = ProcessName::own();
        let is_visible = name.boot == own.boot && name.namespace == own.namespace && own != ProcessName::default();
        let pid = libc::pid_t::try_from(name.pid).ok().filter(|pid| is_visible && *pid > 0)?;
        // SAFETY: two numbers; the result is checked.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let fd = libc::c_int::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: just opened, and nobody else owns it.
        let watch = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        // The number may have been given away before the descriptor was opened: then the start differs. After it, the
        // descriptor keeps to the process it was opened for, which is the named one if that still lives.
        let is_named = start_of(name.pid).is_ok_and(|started| started == name.started);
        (is_named && !watch.has_ended()).then_some(watch)
    }

    /// It runs no more, and its memory is gone or going: a zombie has none.
    pub(super) fn has_ended(&self) -> bool {
        let mut entry = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry. An error counts as alive.
        let ready = unsafe { libc::poll(&mut entry, 1, 0) };
        ready == 1 && entry.revents & libc::POLLIN != 0
    }
}

/// Field 22 of `/proc/PID/stat`. The second field, the name in brackets, may hold anything.
fn start_of(pid: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let started = stat.rsplit_once(')').and_then(|(_, after)| after.split_whitespace().nth(19)?.parse().ok());
    started.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_end_of_a_child_is_seen_before_it_is_reaped() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("cat");
        let watch = Watch::on(&ProcessName::of(child.id()).expect("it lives")).expect("a child of ours");
        assert!(!watch.has_ended());
        child.kill().expect("it lives");
        while !watch.has_ended() {
            std::thread::yield_now();
        }
        child.wait().expect("killed");
        assert!(watch.has_ended(), "and for ever");
    }

    #[test]
    fn nobody_watches_a_process_that_may_be_another_one() {
        let own = ProcessName::own();
        assert!(Watch::on(&own).is_some());
        let others = [
            ProcessName { started: own.started + 1, ..own },
            ProcessName { boot: [1; 16], ..own },
            ProcessName { namespace: own.namespace + 1, ..own },
            ProcessName { pid: u32::MAX, ..own },
            ProcessName { pid: 0, ..own },
            ProcessName::default(),
        ];
        assert!(others.iter().all(|other| Watch::on(other).is_none()));
    }

    proptest! {
        #[test]
        fn names_round_trip(boot: [u8; 16], namespace: u64, pid: u32, started: u64) {
            let name = ProcessName { boot, namespace, pid, started };
            prop_assert_eq!(ProcessName::parse(&name.encode()), name);
        }
    }
}
