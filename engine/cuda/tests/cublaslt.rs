//! Products by cuBLASLt: the same bits as a plain chain of additions, what it says when it cannot, and that it may be
//! absent. Counts and planned faults are the process's: the tests take turns.
mod support;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::bf16;
use support::{device, emulated, in_child};
use tandem_cuda::cublaslt::{Lt, Operands, Output, Prepared, Shape};
use tandem_cuda::kernels::launch::Mem;
use tandem_cuda::{Buffer, Context, CudaError, Device, Graph, Pinned, Stream, cublaslt_version};
use tandem_cuda_emu::{Count, Fault, Setting, count, fail_nth, seen, set};

/// `None` where there is no device.
fn turn() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    device().then_some(turn)
}

struct Gpu {
    lt: Lt,
    stream: Stream,
    context: Arc<Context>,
}

impl Gpu {
    fn open() -> Self {
        let context = Context::of(&Device::numbered(0).expect("a device")).expect("a context");
        let lt = Lt::open(&context).expect("room").expect("cuBLASLt is there: LD_LIBRARY_PATH names its folder?");
        Self { lt, stream: Stream::new(&context).expect("a stream"), context }
    }

    fn prepare(&self, shape: Shape) -> Arc<Prepared> {
        self.lt.prepare(shape).expect("prepares").expect("an algorithm")
    }

    fn holding<T: Copy>(&self, values: &[T]) -> Buffer {
        Buffer::holding(&self.context, "a test", values).expect("room")
    }

    fn run(&self, product: &Prepared, operands: &Operands) -> Result<(), CudaError> {
        // SAFETY: the tests read results, which waits, before they drop what the product uses.
        unsafe { self.lt.run(&self.stream, product, operands) }
    }

    fn read(&self, buffer: &Buffer) -> Vec<f32> {
        self.stream.synchronize().expect("done");
        let mut values = vec![0.0; buffer.bytes() / 4];
        buffer.read(0, &mut values).expect("reads");
        values
    }
}

/// Between -1 and 1, the same in every run.
fn random(seed: u64, count: usize) -> impl Iterator<Item = f32> {
    (0..count as u64).map(move |index| {
        let word = xxhash_rust::xxh3::xxh3_64(&[seed.to_le_bytes(), index.to_le_bytes()].concat());
        (word >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    })
}

/// `rows` of `k` values, and NaN between the rows.
fn matrix(seed: u64, rows: usize, k: usize, stride: usize) -> Vec<bf16> {
    let mut values = vec![bf16::NAN; (rows - 1) * stride + k];
    let mut random = random(seed, rows * k);
    for row in values.chunks_mut(stride) {
        row[..k].iter_mut().zip(&mut random).for_each(|(to, value)| *to = bf16::from_f32(value));
    }
    values
}

/// A product with its operands, on the host and on the device.
struct Case {
    shape: Shape,
    x: Vec<bf16>,
    weight: Vec<bf16>,
    before: Vec<f32>,
    device: [Buffer; 3],
}

impl Case {
    fn new(gpu: &Gpu, shape: Shape) -> Self {
        let Shape { rows, n, k, x_stride, weight_stride } = shape;
        let (x, weight) = (matrix(1, rows, k, x_stride), matrix(2, n, k, weight_stride));
        let before: Vec<f32> = random(3, rows * n).collect();
        let device = [gpu.holding(&before), gpu.holding(&x), gpu.holding(&weight)];
        Self { shape, x, weight, before, device }
    }

    fn operands(&self, output: impl Fn(Mem) -> Output) -> Operands {
        let [out, x, weight] = &self.device;
        Operands { output: output(out.mem()), x: x.mem(), weight: weight.mem() }
    }

    /// One f32 accumulator an output, in ascending `k`.
    fn chains(&self) -> Vec<f32> {
        let Shape { rows, n, k, x_stride, weight_stride } = self.shape;
        let chain = |row: usize, column: usize| {
            let (x, weight) = (&self.x[row * x_stride..][..k], &self.weight[column * weight_stride..][..k]);
            x.iter().zip(weight).fold(0.0, |sum: f32, (x, weight)| sum + x.to_f32() * weight.to_f32())
        };
        (0..rows * n).map(|index| chain(index / n, index % n)).collect()
    }

    /// The bits on the emulated device; within the rounding of a sum on a card, which rounds sets of 16 its own way.
    fn assert_is(&self, got: &[f32], want: &[f32], what: &str) {
        assert_eq!(got.len(), want.len());
        let allowed = 1e-6 * self.shape.k as f32;
        for (index, (got, want)) in got.iter().zip(want).enumerate() {
            let is_same = got.to_bits() == want.to_bits() || (!emulated() && (got - want).abs() <= allowed);
            assert!(is_same, "{what}, {:?}: value {index} is {got:e}, not {want:e}", self.shape);
        }
    }
}

fn packed(rows: usize, n: usize, k: usize) -> Shape {
    Shape { rows, n, k, x_stride: k, weight_stride: k }
}

#[test]
fn products_are_plain_chains_of_additions() {
    let Some(_turn) = turn() else { return };
    let gpu = Gpu::open();
    println!("cuBLASLt {}", cublaslt_version().expect("it is there"));
    let shapes = [
        packed(1, 4, 8),
        packed(16, 8, 16),
        packed(33, 20, 96),
        packed(130, 72, 2144),
        Shape { x_stride: 128, weight_stride: 104, ..packed(17, 28, 96) },
        Shape { weight_stride: 4096, ..packed(40, 64, 1056) },
    ];
    for shape in shapes {
        let (case, product) = (Case::new(&gpu, shape), gpu.prepare(shape));
        let (chains, out) = (case.chains(), &case.device[0]);
        gpu.run(&product, &case.operands(Output::Add)).expect("queued");
        let sums: Vec<f32> = chains.iter().zip(&case.before).map(|(chain, before)| chain + before).collect();
        case.assert_is(&gpu.read(out), &sums, "added");
        gpu.run(&product, &case.operands(Output::Store)).expect("queued");
        case.assert_is(&gpu.read(out), &chains, "stored");
    }
}

/// On a card as well: which rows are computed together, and how many, chooses tiles, and must not choose bits. (For a
/// row or two the library of a card has kernels of another order, and it is not asked.)
#[test]
fn a_row_s_bits_do_not_depend_on_the_other_rows() {
    let Some(_turn) = turn() else { return };
    let gpu = Gpu::open();
    let (most, n, k) = if emulated() { (130, 24, 1056) } else { (4096, 1024, 4096) };
    let case = Case::new(&gpu, packed(most, n, k));
    gpu.run(&gpu.prepare(case.shape), &case.operands(Output::Store)).expect("queued");
    let all = gpu.read(&case.device[0]);
    let mut differ = Vec::new();
    for rows in [1, 2, 8, 16, 32, 33, 40, 48, 64, 65, 127, 129, 200, 500, 1024, 3000] {
        if rows < most {
            gpu.run(&gpu.prepare(packed(rows, n, k)), &case.operands(Output::Store)).expect("queued");
            let some = gpu.read(&case.device[0]);
            if (0..rows * n).any(|index| some[index].to_bits() != all[index].to_bits()) {
                differ.push(rows);
            }
        }
    }
    println!("in other bits: products of {differ:?} rows");
    assert!(differ.iter().all(|rows| *rows <= 32 && !emulated()), "{differ:?}");
}

#[test]
fn a_graph_records_products_in_the_order_of_the_stream() {
    let Some(_turn) = turn() else { return };
    let gpu = Gpu::open();
    let case = Case::new(&gpu, packed(20, 12, 160));
    let (product, out) = (gpu.prepare(case.shape), &case.device[0]);
    let (store, add) = (case.operands(Output::Store), case.operands(Output::Add));
    gpu.run(&product, &store).expect("queued");
    gpu.run(&product, &add).expect("queued");
    let twice = gpu.read(out);
    let before = count(Count::Matmuls);
    let queue = || [&store, &add, &add].into_iter().try_for_each(|operands| gpu.run(&product, operands));
    let mut graph = Graph::capture(&gpu.stream, queue).expect("recorded");
    assert_eq!(gpu.read(out), twice, "recorded, not run");
    drop(product);
    for _ in 0..2 {
        graph.launch(&gpu.stream).expect("queued");
    }
    let chains = case.chains();
    let want: Vec<f32> = chains.iter().map(|chain| chain + chain + chain).collect();
    case.assert_is(&gpu.read(out), &want, "of the graph");
    assert_eq!(count(Count::Matmuls), before.map(|before| before + 6));
}

#[test]
fn products_run_between_what_is_before_and_behind_them_in_the_stream() {
    let Some(_turn) = turn() else { return };
    let gpu = Gpu::open();
    let case = Case::new(&gpu, packed(4, 8, 64));
    let product = gpu.prepare(case.shape);
    let bytes = case.device[1].bytes();
    let words: Vec<u32> =
        case.x.chunks(2).map(|pair| pair[0].to_bits() as u32 | (pair[1].to_bits() as u32) << 16).collect();
    let [x, nothing] = [words.clone(), vec![u32::MAX; words.len()]].map(|words| {
        let mut pinned = Pinned::new(&gpu.context, bytes).expect("room");
        // SAFETY: nothing is copied yet.
        unsafe { pinned.slice_mut::<u32>(0, words.len()) }.copy_from_slice(&words);
        pinned
    });
    let strict = set(Setting::StrictHost(true));
    let upload = |from: &Pinned| case.device[1].upload(0, from, 0, bytes, &gpu.stream).expect("queued");
    upload(&nothing);
    upload(&x);
    gpu.run(&product, &case.operands(Output::Store)).expect("queued");
    upload(&nothing);
    case.assert_is(&gpu.read(&case.device[0]), &case.chains(), "between copies");
    assert_eq!(set(Setting::StrictHost(false)), strict);
}

#[test]
fn products_are_prepared_once_and_nothing_is_left_of_them() {
    let Some(_turn) = turn() else { return };
    let alive = || [Count::CublasLtObjects, Count::UsedBytes, Count::Allocations, Count::Streams].map(count);
    let before = alive();
    let gpu = Gpu::open();
    let shape = packed(4, 8, 64);
    assert!(Arc::ptr_eq(&gpu.prepare(shape), &gpu.prepare(shape)));
    // Not what the library computes: its rows do not begin at multiples of 16 bytes.
    for wrong in [packed(4, 6, 64), packed(4, 8, 60), packed(0, 8, 64)] {
        assert!(gpu.lt.prepare(wrong).expect("an answer").is_none(), "{wrong:?}");
    }
    let filled = count(Count::CublasLtObjects);
    for rows in 5..4200 {
        gpu.prepare(packed(rows, 8, 64));
    }
    // A handle, and four objects a product: far fewer products than were asked for.
    assert!(count(Count::CublasLtObjects).is_none_or(|alive| alive < 4 * 4096 + 8), "{filled:?}");
    gpu.prepare(shape);
    drop(gpu);
    assert_eq!(alive(), before);
}

#[test]
fn memory_that_is_too_small_or_not_aligned_is_refused() {
    let Some(_turn) = turn() else { return };
    let gpu = Gpu::open();
    let case = Case::new(&gpu, Shape { x_stride: 72, ..packed(4, 8, 64) });
    let product = gpu.prepare(case.shape);
    let sound = case.operands(Output::Store);
    let (Output::Store(out) | Output::Add(out)) = sound.output;
    let short = |mem: Mem| Mem::new(mem.address, mem.bytes - 1);
    let moved = |mem: Mem| Mem::new(mem.address + 8, mem.bytes);
    for (wrong, word) in [
        (Operands { output: Output::Add(short(out)), ..sound }, "out needs 32 × 4 bytes"),
        (Operands { x: short(sound.x), ..sound }, "x needs 280 × 2 bytes"),
        (Operands { weight: short(sound.weight), ..sound }, "weight needs 512 × 2 bytes"),
        (Operands { x: moved(sound.x), ..sound }, "is not aligned"),
    ] {
        let why = gpu.run(&product, &wrong).expect_err("refused").to_string();
        assert!(why.contains("cublasLtMatmul") && why.contains(word), "{why}");
    }
    gpu.run(&product, &sound).expect("queued");
    case.assert_is(&gpu.read(&case.device[0]), &case.chains(), "afterwards");
}

#[test]
fn a_refused_product_is_an_error_and_the_next_one_runs() {
    let Some(_turn) = turn() else { return };
    if !emulated() {
        return;
    }
    let gpu = Gpu::open();
    let case = Case::new(&gpu, packed(4, 8, 64));
    let (product, operands) = (gpu.prepare(case.shape), case.operands(Output::Store));
    let asked = seen(Fault::Matmul).expect("counted");
    assert!(fail_nth(Fault::Matmul, 2));
    gpu.run(&product, &operands).expect("the first one");
    let error = gpu.run(&product, &operands).expect_err("the second one");
    let CudaError::CublasLt { call: "cublasLtMatmul", status } = &error else { panic!("{error:?}") };
    assert!(status == "CUBLAS_STATUS_EXECUTION_FAILED" && !error.is_lost());
    // While a stream is captured, the capture fails.
    assert!(fail_nth(Fault::Matmul, 1));
    let error = Graph::capture(&gpu.stream, || gpu.run(&product, &operands)).expect_err("not recorded");
    assert!(matches!(error, CudaError::CublasLt { .. }), "{error:?}");
    gpu.run(&product, &operands).expect("the next one");
    case.assert_is(&gpu.read(&case.device[0]), &case.chains(), "afterwards");
    assert_eq!(seen(Fault::Matmul), Some(asked + 4));
}

#[test]
fn without_the_library_or_with_an_old_one_there_is_none() {
    // On a machine with a cuBLASLt in the system's folders, that one is found, and does not start on this driver.
    in_child("scenario_absent", ("EMU_CUBLASLT", "none"));
    let said = in_child("scenario_absent", ("EMU_CUBLASLT", "11803"));
    assert!(said.is_none_or(|said| said.contains("older than 12")));
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn scenario_absent() {
    assert!(device() && emulated());
    let context = Context::of(&Device::numbered(0).expect("a device")).expect("a context");
    assert!(Lt::open(&context).expect("no error").is_none());
    assert_eq!(count(Count::UsedBytes), Some(0), "no workspace either");
    println!("{:?}", cublaslt_version());
}

#[test]
fn a_product_that_goes_wrong_loses_the_device() {
    in_child("scenario_lost", ("EMU_FAIL", "launch:2"));
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn scenario_lost() {
    assert!(device() && emulated());
    let gpu = Gpu::open();
    let case = Case::new(&gpu, packed(4, 8, 64));
    let (product, operands) = (gpu.prepare(case.shape), case.operands(Output::Store));
    gpu.run(&product, &operands).expect("queued");
    gpu.stream.synchronize().expect("the first one");
    gpu.run(&product, &operands).expect("queued");
    let error = gpu.stream.synchronize().expect_err("the second one");
    assert!(error.is_lost() && error.to_string().contains("cublasLtMatmul"), "{error}");
    // The library's own status does not say it.
    let error = gpu.run(&product, &operands).expect_err("no more");
    assert!(error.is_lost(), "{error:?}");
}
