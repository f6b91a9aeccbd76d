//! Memory for weights and KV: on huge pages where the system has them. Kernels walk through more of it than the
//! processor has page table entries at hand, and a walk through the page table costs as much as the bytes it finds.
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

const PAGE: usize = 4096;

/// Zeroed words, every page touched.
pub fn zeroed_words(words: usize) -> Arc<[AtomicU64]> {
    let mut memory = Arc::<[AtomicU64]>::new_uninit_slice(words);
    if let Some(uninit) = Arc::get_mut(&mut memory) {
        prefer_huge_pages(uninit);
        uninit.iter_mut().for_each(|word| _ = word.write(AtomicU64::new(0)));
    }
    // SAFETY: nobody else has the new `Arc`, so every word was written just now.
    unsafe { memory.assume_init() }
}

/// Zeroed bytes, whose pages nobody touched yet if they are many.
pub(super) fn zeroed_bytes(bytes: usize) -> Vec<u8> {
    let mut memory = vec![0; bytes];
    prefer_huge_pages(&mut memory);
    memory
}

/// A wish, for pages that are not touched yet: small ones serve as well.
fn prefer_huge_pages<T>(memory: &mut [T]) {
    let range = memory.as_mut_ptr_range();
    let (start, end) = (range.start.addr().next_multiple_of(PAGE), range.end.addr() / PAGE * PAGE);
    if let Some(bytes) = end.checked_sub(start).filter(|bytes| *bytes > 0) {
        // SAFETY: whole pages inside the memory; the advice changes no content.
        unsafe { libc::madvise(range.start.with_addr(start).cast(), bytes, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn all_sizes_are_zero() {
        for size in [0, 1, 511, 512, 5000, 1 << 20] {
            assert!(zeroed_bytes(size).iter().all(|byte| *byte == 0));
            let words = zeroed_words(size);
            assert!(words.len() == size && words.iter().all(|word| word.load(Relaxed) == 0));
        }
    }
}
