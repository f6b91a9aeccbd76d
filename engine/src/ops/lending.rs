//! Cores that the nodes of one machine lend each other. A node whose engine has nothing to do lends its cores; a node
//! that computes puts threads of its own on them ([`super::pool`]). So a lone request is not served by a part of the
//! machine, and nodes under load still do not disturb each other.
//!
//! All they share is a small file in memory: for each core, whether its node has work, and which guest is on it. The
//! owner says that it has work and waits, [`PATIENCE`] at most, for the guest's present task. A guest looks before each
//! task. **The file affects speed only.** No wait on it is unbounded, and whatever it says, every task is computed once
//! and has the same bits: so nodes that were killed or stopped, or a file full of nonsense, do no harm.
#![allow(unsafe_code)]
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};

/// Cores with higher numbers are not lent.
const CORES: usize = 1024;
/// The longest wait for a guest: longer than a decode step's task takes. A guest that is still on the core was stopped
/// or killed, or computes a task of a long prompt; the owner shares the core with that one until the task ends.
const PATIENCE: Duration = Duration::from_millis(2);
/// Between two looks whether the guest has left.
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// No node has the core: the file's zeros.
const NOBODYS: u32 = 0;
/// Its node has nothing to do.
const LENT: u32 = 1;
/// Its node has work.
const NEEDED: u32 = 2;

/// What the file says of one core. A cache line each: its owner and guests write it.
#[repr(C, align(64))]
struct Core {
    /// [`NOBODYS`], [`LENT`] or [`NEEDED`]; anything else is as needed.
    state: AtomicU32,
    /// Process that has a thread on it; 0: none.
    guest: AtomicU32,
}

/// The file, in memory.
struct Table(MmapRaw);

impl Table {
    /// Opens the file; the first node creates it.
    fn open(path: &Path) -> io::Result<Self> {
        const BYTES: usize = CORES * size_of::<Core>();
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no plain file"));
        }
        allocate(&file, BYTES)?;
        MmapOptions::new().len(BYTES).map_raw(&file).map(Self)
    }

    fn cores(&self) -> &[Core] {
        // SAFETY: the mapping is at least so long, begins at a page, and lives as long as `self`. A core is two atomic
        // words, which may hold anything and be changed by anyone.
        unsafe { slice::from_raw_parts(self.0.as_ptr().cast::<Core>(), CORES) }
    }
}

/// Makes the file at least so long, with memory behind all of it: a page that is missing later ends the process.
fn allocate(file: &File, bytes: usize) -> io::Result<()> {
    // SAFETY: changes nothing of this process.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// A node's part in the lending. Its cores are lent from its end on, too: it has nothing to do then.
pub struct Lending {
    table: Arc<Table>,
    own: Vec<usize>,
    lends: bool,
}

impl Lending {
    /// Of a node whose threads run on the cores `own`. It needs them itself until [`Lending::lend`].
    ///
    /// # Errors
    /// The file can neither be opened nor made.
    pub fn join(file: &Path, own: &[usize]) -> io::Result<Self> {
        let table = Arc::new(Table::open(file)?);
        let own = own.iter().copied().filter(|core| *core < CORES).collect();
        let mut lending = Self { table, own, lends: true };
        lending.take_back();
        Ok(lending)
    }

    /// This node has nothing to do.
    pub fn lend(&mut self) {
        self.lends = true;
        self.own().for_each(|core| core.state.store(LENT, Ordering::SeqCst));
    }

    /// This node has work: waits until no guest is on its cores, for [`PATIENCE`] at most. Whether they were lent.
    pub fn take_back(&mut self) -> bool {
        if !std::mem::take(&mut self.lends) {
            return false;
        }
        self.own().for_each(|core| core.state.store(NEEDED, Ordering::SeqCst));
        let begun = Instant::now();
        for core in self.own() {
            while core.guest.load(Ordering::SeqCst) != 0 {
                if begun.elapsed() > PATIENCE {
                    core.guest.store(0, Ordering::SeqCst);
                    break;
                }
                // Not a spin: the guest's thread may wait for this core to finish its task.
                std::thread::park_timeout(LOOK_EVERY);
            }
        }
        true
    }

    /// Cores of the other nodes, as far as they have come.
    pub fn others(&self) -> Vec<usize> {
        let cores = self.table.cores().iter().enumerate();
        let of_nodes = cores.filter(|(_, core)| core.state.load(Ordering::Relaxed) != NOBODYS);
        of_nodes.map(|(number, _)| number).filter(|number| !self.own.contains(number)).collect()
    }

    /// For a thread that runs on another's core.
    pub fn place(&self, core: usize) -> Place {
        Place { table: Arc::clone(&self.table), core: core.min(CORES - 1) }
    }

    fn own(&self) -> impl Iterator<Item = &Core> {
        self.own.iter().map(|number| &self.table.cores()[*number])
    }
}

impl Drop for Lending {
    fn drop(&mut self) {
        self.lend();
    }
}

/// Another node's core.
#[derive(Clone)]
pub struct Place {
    table: Arc<Table>,
    core: usize,
}

impl Place {
    /// Its number.
    pub fn core(&self) -> usize {
        self.core
    }

    /// Whether its node has nothing to do. A guest looks before each task.
    pub fn is_lent(&self) -> bool {
        self.shared().state.load(Ordering::SeqCst) == LENT
    }

    /// Whether, besides, no guest is there.
    pub fn is_free(&self) -> bool {
        self.is_lent() && self.shared().guest.load(Ordering::Relaxed) == 0
    }

    /// Takes it, if it is free. Either the guest's look sees that the owner has work, or the owner sees the guest: both
    /// write before they read, in one total order.
    pub fn take(&self) -> Option<Stay<'_>> {
        let taken = self.shared().guest.compare_exchange(0, id(), Ordering::SeqCst, Ordering::Relaxed);
        taken.ok().map(|_| Stay(self)).filter(|_| self.is_lent())
    }

    fn shared(&self) -> &Core {
        &self.table.cores()[self.core]
    }
}

/// A guest's time on a core, until it is dropped.
pub struct Stay<'a>(&'a Place);

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        // Unless the owner stopped waiting, and another guest is there.
        let _ = self.0.shared().guest.compare_exchange(id(), 0, Ordering::SeqCst, Ordering::Relaxed);
    }
}

/// Of this process. Never 0.
fn id() -> u32 {
    std::process::id()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A file and two nodes with a core each.
    fn nodes() -> (tempfile::TempDir, Lending, Lending) {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = [[3], [5]].map(|own| Lending::join(&folder.path().join("cores"), &own).unwrap());
        (folder, one, two)
    }

    #[test]
    fn a_core_is_lent_only_while_its_node_has_nothing_to_do() {
        let (_folder, mut one, mut two) = nodes();
        assert_eq!((one.others(), two.others()), (vec![5], vec![3]));
        let place = two.place(3);
        assert!(!place.is_lent() && place.take().is_none(), "it has not lent it yet");
        one.lend();
        assert!(place.is_free());
        let stay = place.take().unwrap();
        assert!(place.is_lent() && !place.is_free() && place.take().is_none(), "one guest a core");
        drop(stay);
        one.take_back();
        assert!(place.take().is_none() && !place.is_free());
        drop(one);
        assert!(place.is_free(), "a node that has ended needs no core");
        two.lend();
    }

    #[test]
    fn the_owner_waits_for_the_guest() {
        let (_folder, mut one, two) = nodes();
        one.lend();
        let place = two.place(3);
        std::thread::scope(|scope| {
            let stay = place.take().unwrap();
            let guest = scope.spawn(|| {
                while place.is_lent() {
                    std::thread::yield_now();
                }
                drop(stay);
            });
            one.take_back();
            assert!(one.own().all(|core| core.guest.load(Ordering::SeqCst) == 0));
            guest.join().unwrap();
        });
    }

    #[test]
    fn a_guest_that_was_killed_is_not_waited_for() {
        let (_folder, mut one, two) = nodes();
        one.lend();
        let place = two.place(3);
        std::mem::forget(place.take().unwrap());
        let begun = Instant::now();
        one.take_back();
        assert!(begun.elapsed() >= PATIENCE);
        one.lend();
        assert!(place.take().is_some());
    }

    #[test]
    fn whatever_the_file_says_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("cores");
        fs::write(&file, vec![0xa5; 100]).unwrap();
        let mut one = Lending::join(&file, &[40, 2000]).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().len(), 64 << 10);
        assert_eq!(one.others(), [0, 1], "of the nonsense");
        assert!(one.place(0).take().is_none() && one.place(5000).take().is_none());
        one.lend();
        one.take_back();
        assert!(Lending::join(folder.path(), &[0]).is_err() && Lending::join(&file.join("x"), &[0]).is_err());
    }
}
