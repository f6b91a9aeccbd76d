//! A device with the kernels loaded, memory on it, and random numbers that are the same in every run.
use std::sync::Arc;

use half::bf16;
use tandem_cuda::compile::Folders;
use tandem_cuda::kernels::launch::{Launch, Refused};
use tandem_cuda::loaded::Kernels;
use tandem_cuda::{Buffer, Context, Device, Stream};

/// Everything that a test of a kernel needs.
pub struct Gpu {
    context: Arc<Context>,
    stream: Stream,
    kernels: Arc<Kernels>,
}

impl Gpu {
    /// `None`, and a word of why, where there is no device.
    pub fn get() -> Option<Self> {
        if !tandem_cuda_emu::device() {
            return None;
        }
        let context = Context::of(&Device::numbered(0).expect("a device")).expect("a context");
        let stream = Stream::new(&context).expect("a stream");
        let kernels = Kernels::load(&context, &Folders::default()).expect("kernels");
        Some(Self { context, stream, kernels })
    }

    /// Of cases that differ in values alone: 1, each; with the access checker every eighth. What a kernel accesses
    /// depends on its shapes, and what it computes is compared without the checker.
    pub fn stride() -> usize {
        if tandem_cuda_emu::is_checked() { 8 } else { 1 }
    }

    /// Memory that holds `values`, and ends behind them.
    pub fn holding<T: Copy>(&self, values: &[T]) -> Buffer {
        Buffer::holding(&self.context, "a test", values).expect("memory")
    }

    /// Memory for `count` of `T`, which holds anything.
    pub fn space<T>(&self, count: usize) -> Buffer {
        Buffer::new(&self.context, "a test", count * size_of::<T>()).expect("memory")
    }

    /// Queues a launch. The buffers that it names outlive the next [`Gpu::read`] in every test here.
    pub fn launch(&self, launch: Result<Launch, Refused>) {
        // SAFETY: sizes are checked by the launch, indices are the test's, and whoever launches reads the results
        // before it frees what the launch uses.
        unsafe { self.kernels.launch(&self.stream, launch) }.expect("queued");
    }

    /// What is in `buffer`, after all that is queued.
    pub fn read<T: Copy + Default>(&self, buffer: &Buffer) -> Vec<T> {
        self.stream.synchronize().expect("done");
        let mut values = vec![T::default(); buffer.bytes() / size_of::<T>()];
        buffer.read(0, &mut values).expect("read");
        values
    }
}

/// Random numbers (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    /// Below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.word() % end as u64) as usize
    }

    /// 0 to 1.
    pub fn share(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// About normal, standard deviation 1.
    pub fn normal(&mut self) -> f32 {
        ((0..4).map(|_| self.share()).sum::<f64>() - 2.0) as f32 * 1.73
    }

    pub fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }

    pub fn halves(&mut self, count: usize) -> Vec<bf16> {
        (0..count).map(|_| bf16::from_f32(self.normal())).collect()
    }
}

/// Panics unless the bits of all values are equal.
pub fn assert_same_bits<T: Bits>(got: &[T], want: &[T], what: &dyn Fn() -> String) {
    assert_eq!(got.len(), want.len(), "{}", what());
    if let Some(at) = got.iter().zip(want).position(|(got, want)| got.bits() != want.bits()) {
        panic!("{}: value {at} is {:?}, not {:?}", what(), got[at], want[at]);
    }
}

/// A number with bits.
pub trait Bits: Copy + std::fmt::Debug {
    fn bits(self) -> u32;
}

impl Bits for f32 {
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Bits for bf16 {
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}
