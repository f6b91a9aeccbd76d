//! What the machine itself takes for as much memory as a hand-off moves: the reference beside each row.
//!
//! Memory that was not touched for seconds is slower than before, on some machines more than on others and at some
//! hours more than at others. A hand-off meets such memory twice: where KV lands, and where the first decode step
//! reads it.
use std::array;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use tandem_memory::{HostMemory, KvMemory};

/// Eight words.
const LINE: usize = 8;

/// Memory like that of two nodes.
pub struct Machine {
    from: Arc<HostMemory>,
    to: Arc<HostMemory>,
    held: Arc<HostMemory>,
}

/// In milliseconds.
#[derive(Clone, Copy)]
pub struct Reference {
    /// One thread copies all, to where nothing was written since the last request.
    pub copy_ms: f64,
    /// How much longer one thread reads what lay since the request began than it does right after that.
    pub lain_ms: f64,
}

impl Machine {
    pub fn new(bytes: usize) -> anyhow::Result<Self> {
        let [from, to, held] = array::from_fn(|_| HostMemory::shareable(bytes.next_multiple_of(size_of::<u64>())));
        let machine = Self { from: from?, to: to?, held: held? };
        for memory in [&machine.from, &machine.to, &machine.held] {
            memory.touch(0..memory.bytes());
        }
        Ok(machine)
    }

    /// To be called as a request begins: from now on it lies.
    pub fn write(&self) {
        for memory in [&self.from, &self.held] {
            memory.words().iter().enumerate().for_each(|(i, word)| word.store(i as u64, Relaxed));
        }
    }

    /// To be called as the request has ended.
    pub fn measure(&self) -> Reference {
        let (first, again) = (self.read_ms(), self.read_ms());
        let start = Instant::now();
        self.to.words().iter().zip(self.from.words()).for_each(|(to, from)| to.store(from.load(Relaxed), Relaxed));
        Reference { copy_ms: start.elapsed().as_secs_f64() * 1e3, lain_ms: first - again }
    }

    fn read_ms(&self) -> f64 {
        let start = Instant::now();
        let sum = self.held.words().iter().step_by(LINE).fold(0u64, |sum, word| sum.wrapping_add(word.load(Relaxed)));
        std::hint::black_box(sum);
        start.elapsed().as_secs_f64() * 1e3
    }
}
