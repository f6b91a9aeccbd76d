//! Memory for weights: on huge pages where the system has them. Kernels walk through more of it than the
//! processor has page table entries at hand, and a walk through the page table costs as much as the bytes it finds.
//!
//! Matrices lie one behind the other in slabs that begin at a huge page. A mapping of its own would begin and end
//! between two, and a matrix of less than some megabytes would have small pages only.
use std::ops::{Deref, DerefMut};
use std::slice;
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapOptions, MmapRaw};

const PAGE_BYTES: usize = 4096;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Of what matrices share. A page takes memory only when it is first written; where the system counts memory that is
/// only asked for (strict overcommit), it counts all of it.
const SLAB_BYTES: usize = 64 << 20;
/// Larger ones have a slab to themselves, so that little of the shared one is left unused.
const MOST_SHARED_BYTES: usize = SLAB_BYTES / 4;

/// Where the next matrix begins, as long as there is room.
static SHARED: Mutex<Option<Slab>> = Mutex::new(None);

/// Zeroed bytes that begin at a page, as packed weights should: a vector or a row of a tile is then one line of cache
/// and never two. A page takes memory, on the socket of the thread that does so, when it is first written. Of a huge
/// page that several matrices share, this is the first one's.
pub(super) struct WeightMemory {
    map: Arc<MmapRaw>,
    /// Of the map: a multiple of a page.
    start: usize,
    bytes: usize,
}

/// A mapping from which matrices are cut. It ends with the slab and the last of them.
struct Slab {
    map: Arc<MmapRaw>,
    /// Of the map: up to here it is given away. A multiple of a page, as is the end.
    used: usize,
    /// Of the map: up to here it may be, and huge pages are asked for.
    end: usize,
}

impl WeightMemory {
    /// # Panics
    /// If the system has no such memory to give.
    pub fn zeroed(bytes: usize) -> Self {
        if bytes > MOST_SHARED_BYTES {
            return Slab::new(bytes).cut(bytes);
        }
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let slab = shared.take().filter(|slab| slab.left() >= bytes);
        shared.insert(slab.unwrap_or_else(|| Slab::new(SLAB_BYTES))).cut(bytes)
    }

    fn first(&self) -> *mut u8 {
        // SAFETY: `start` is inside the map, or at its end.
        unsafe { self.map.as_mut_ptr().add(self.start) }
    }
}

impl Slab {
    /// Of so many bytes at least, from the first huge page on.
    fn new(bytes: usize) -> Self {
        let map = MmapOptions::new().len(bytes.saturating_add(HUGE_PAGE_BYTES)).map_anon().map(MmapRaw::from);
        let map = map.unwrap_or_else(|error| panic!("no memory of {bytes} bytes for weights: {error}"));
        let before = map.as_ptr().addr().wrapping_neg() % HUGE_PAGE_BYTES;
        let whole = bytes.next_multiple_of(PAGE_BYTES);
        // SAFETY: whole pages inside the map; the advice, a wish, changes no content.
        unsafe { libc::madvise(map.as_mut_ptr().add(before).cast(), whole, libc::MADV_HUGEPAGE) };
        Self { map: Arc::new(map), used: before, end: before + whole }
    }

    fn left(&self) -> usize {
        self.end - self.used
    }

    /// The next so many bytes, and what is behind them in their last page.
    fn cut(&mut self, bytes: usize) -> WeightMemory {
        assert!(bytes <= self.left());
        let start = self.used;
        self.used += bytes.next_multiple_of(PAGE_BYTES);
        WeightMemory { map: Arc::clone(&self.map), start, bytes }
    }
}

impl Deref for WeightMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: inside the map, which lives as long; nobody else has these bytes.
        unsafe { slice::from_raw_parts(self.first(), self.bytes) }
    }
}

impl DerefMut for WeightMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.first(), self.bytes) }
    }
}

impl Drop for WeightMemory {
    /// Gives the pages back, though the slab stays as long as a neighbour does. Of a huge page that it shares with one
    /// the system may keep this part.
    fn drop(&mut self) {
        let whole = self.bytes.next_multiple_of(PAGE_BYTES);
        // SAFETY: whole pages that only this had, and that are not cut from the slab again.
        unsafe { libc::madvise(self.first().cast(), whole, libc::MADV_DONTNEED) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_sizes_are_zero_and_lie_apart() {
        let sizes = [0, 1, 511, 512, 5000, 1 << 17, 3 << 20, 1 << 21, 1 << 21, 1 << 21];
        let mut all: Vec<WeightMemory> = sizes.into_iter().map(|size| WeightMemory::zeroed(size * 8)).collect();
        for (number, memory) in all.iter_mut().enumerate() {
            assert!(memory.len() == sizes[number] * 8 && memory.iter().all(|byte| *byte == 0));
            assert_eq!(memory.as_ptr().addr() % PAGE_BYTES, 0);
            memory.fill(number as u8 + 1);
        }
        // Every second one ends; the others keep what they hold.
        let left: Vec<_> = all.into_iter().enumerate().filter(|(number, _)| number % 2 == 0).collect();
        for (number, memory) in left {
            assert!(memory.iter().all(|byte| *byte == number as u8 + 1));
        }
    }

    #[test]
    fn slabs_begin_at_a_huge_page_and_end_with_the_last_matrix() {
        let mut slab = Slab::new(SLAB_BYTES);
        let map = Arc::downgrade(&slab.map);
        let [one, two] = [slab.cut(10), slab.cut(10)];
        assert_eq!(one.as_ptr().addr() % HUGE_PAGE_BYTES, 0);
        assert_eq!(two.as_ptr().addr() - one.as_ptr().addr(), PAGE_BYTES);
        drop((slab, one));
        assert!(map.upgrade().is_some());
        drop(two);
        assert!(map.upgrade().is_none());
    }

    #[test]
    fn a_slab_gives_away_so_many_bytes_and_asks_for_huge_pages_of_all() {
        let mut slab = Slab::new(SLAB_BYTES);
        let (first, bytes) = (slab.used, slab.left());
        assert_eq!(bytes, SLAB_BYTES);
        let all = slab.cut(bytes);
        assert_eq!((slab.left(), all.len()), (0, SLAB_BYTES));
        let Ok(maps) = std::fs::read_to_string("/proc/self/smaps") else { return };
        let flags_at = |address: usize| {
            let mut inside = false;
            maps.lines().find_map(|line| {
                if let Some((from, to)) = line.split(' ').next().and_then(|range| range.split_once('-'))
                    && let (Ok(from), Ok(to)) = (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
                {
                    inside = (from..to).contains(&address);
                }
                line.strip_prefix("VmFlags:").filter(|_| inside).map(str::to_owned)
            })
        };
        for at in [first, first + SLAB_BYTES - 1] {
            let flags = flags_at(slab.map.as_ptr().addr() + at).expect("the map is listed");
            // A kernel without huge pages takes no such advice.
            assert!(flags.contains(" hg") || !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists());
        }
    }

    #[test]
    fn a_full_slab_is_followed_by_another() {
        let largest = [(); 9].map(|()| WeightMemory::zeroed(MOST_SHARED_BYTES));
        assert!(largest.iter().all(|memory| memory.len() == MOST_SHARED_BYTES));
        let mut starts: Vec<_> = largest.iter().map(|memory| memory.as_ptr().addr()).collect();
        starts.sort_unstable();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= MOST_SHARED_BYTES));
    }

    #[test]
    fn what_is_dropped_takes_no_memory() {
        let mut slab = Slab::new(SLAB_BYTES);
        let at = slab.used;
        let [mut one, two] = [slab.cut(HUGE_PAGE_BYTES), slab.cut(PAGE_BYTES)];
        one.fill(7);
        drop(one);
        // SAFETY: inside the map, and no matrix has it any more.
        let byte = unsafe { slab.map.as_ptr().add(at).read_volatile() };
        assert_eq!((byte, two.len()), (0, PAGE_BYTES), "its pages went back");
    }
}
