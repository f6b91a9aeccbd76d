//! Products: beside the formula, and bits over rows, kernels and the order of segments.
use std::process::Command;

use half::bf16;
use tandem_cuda::Buffer;
use tandem_cuda::kernels::launch::Mem;
use tandem_cuda::kernels::product::{Output, Plan, Product, SEGMENT, Split, product, product_by, product_split};
use tandem_cuda_emu::{Count, count};

use crate::gpu::{Gpu, Random, assert_same_bits};

/// Blocks of the kernels for few rows that stay: twice as many. Three of them go through several parts of a product.
const MULTIPROCESSORS: usize = 2;

/// Operands.
struct Operands {
    x: Vec<bf16>,
    weight: Vec<bf16>,
    rows: usize,
    n: usize,
    k: usize,
}

impl Operands {
    fn random(seed: u64, rows: usize, n: usize, k: usize) -> Self {
        let mut random = Random(seed);
        Self { x: random.halves(rows * k), weight: random.halves(n * k), rows, n, k }
    }

    /// The first `rows` rows of the product, stored.
    fn multiply(&self, gpu: &Gpu, plan: Option<Plan>, rows: usize) -> Vec<f32> {
        let out = gpu.space::<f32>(rows * self.n);
        let (x, weight) = (gpu.holding(&self.x[..rows * self.k]), gpu.holding(&self.weight));
        let output = Output::Store(out.mem());
        let asked = Product { output, x: x.mem(), weight: weight.mem(), rows, n: self.n, k: self.k };
        gpu.launch(match plan {
            Some(plan) => product_by(plan, &asked, MULTIPROCESSORS),
            None => product(&asked, MULTIPROCESSORS),
        });
        gpu.read(&out)
    }

    /// All rows, segments side by side.
    fn multiply_split(&self, gpu: &Gpu, output: impl Fn(Mem) -> Output, out: &Buffer) {
        let &Self { rows, n, k, .. } = self;
        let scratch = gpu.space::<u8>(Split::bytes(rows, n, k));
        let (x, weight) = (gpu.holding(&self.x), gpu.holding(&self.weight));
        let asked = Product { output: output(out.mem()), x: x.mem(), weight: weight.mem(), rows, n, k };
        for launch in product_split(&asked, scratch.mem(), MULTIPROCESSORS).expect("launches") {
            gpu.launch(Ok(launch));
        }
        gpu.read::<u8>(out);
    }

    /// The product in f64, and the sum of the absolute values of its terms.
    fn reference(&self, row: usize, column: usize) -> (f64, f64) {
        let (x, weight) = (&self.x[row * self.k..][..self.k], &self.weight[column * self.k..][..self.k]);
        let terms = || x.iter().zip(weight).map(|(x, weight)| x.to_f64() * weight.to_f64());
        (terms().sum(), terms().map(f64::abs).sum())
    }
}

#[test]
fn every_kernel_agrees_with_the_formula_and_all_with_each_other() {
    let Some(gpu) = Gpu::get() else { return };
    // One segment, a part of one, several; k that fills no stage; n that fills no tile, one for several turns of a
    // block, and an odd one.
    for (rows, n, k) in [(3, 700, 64), (17, 33, 96), (5, 40, 1056), (2, 18, 4192), (66, 8, 1120), (3, 8, 2 * 4096 + 32)]
    {
        let operands = Operands::random(5, rows, n, k);
        let first = operands.multiply(&gpu, Some(Plan::Few8), rows);
        for (at, &got) in first.iter().enumerate() {
            let (want, size) = operands.reference(at / n, at % n);
            // f32 additions in groups of 16: far below one rounding a term.
            assert!((f64::from(got) - want).abs() <= size * 1e-6, "{got} {want} at {at} of {rows} x {n} x {k}");
        }
        for plan in Plan::ALL {
            let what = || format!("{plan:?} of {rows} x {n} x {k}");
            assert_same_bits(&operands.multiply(&gpu, Some(plan), rows), &first, &what);
        }
        let out = gpu.space::<f32>(rows * n);
        operands.multiply_split(&gpu, Output::Store, &out);
        assert_same_bits(&gpu.read::<f32>(&out), &first, &|| format!("split {rows} x {n} x {k}"));
    }
}

/// The test above over kernels with a mistake, `engine/cuda/emu/tests/unordered.cu`: one that adds segments as they
/// arrive, by atomics, and one that adds them from the last to the first.
#[test]
fn segments_that_are_added_by_a_wrong_kernel_are_noticed() {
    if Gpu::get().is_none() || count(Count::Launches).is_none() {
        return;
    }
    for planted in [None, Some("unordered"), Some("reversed")] {
        let mut child = Command::new(std::env::current_exe().expect("a path"));
        let test = "products::every_kernel_agrees_with_the_formula_and_all_with_each_other";
        child.args([test, "--exact"]).env_remove("EMU_PLANTED").env_remove("EMU_CHECK");
        // Warps arrive in any order, not in that of their numbers.
        child.env("EMU_SEED", "7").envs(planted.map(|name| ("EMU_PLANTED", name)));
        let output = child.output().expect("runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), planted.is_none(), "{planted:?}: {said}");
        assert!(
            said.contains(if planted.is_some() { "split 3 x 8 x 8224" } else { "1 passed" }),
            "{planted:?}: {said}"
        );
    }
}

#[test]
fn a_rows_bits_are_the_same_in_batches_of_1_to_70_rows() {
    let Some(gpu) = Gpu::get() else { return };
    let operands = Operands::random(6, 70, 20, 4192);
    let whole = operands.multiply(&gpu, Some(Plan::Tiles64), 70);
    // The checker is slow: rows at the edges of the kernels' tiles, where one accesses other than its neighbours.
    let edges = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 69, 70];
    let rows = (1..=70).filter(|rows| !tandem_cuda_emu::is_checked() || edges.contains(rows));
    for rows in rows {
        let what = || format!("{rows} rows by {:?}", Plan::of(rows, operands.n));
        assert_same_bits(&operands.multiply(&gpu, None, rows), &whole[..rows * operands.n], &what);
    }
    // And wherever it stands among others.
    for shift in [1, 7, 30] {
        let x = [&operands.x[shift * operands.k..], &operands.x[..shift * operands.k]].concat();
        let shifted = Operands { x, weight: operands.weight.clone(), ..operands };
        let got = shifted.multiply(&gpu, None, operands.rows);
        let (behind, before) = got.split_at((operands.rows - shift) * operands.n);
        assert_same_bits(&[before, behind].concat(), &whole, &|| format!("shifted by {shift}"));
    }
}

/// The product by launches of single segments, in this order, each added to the ones before.
fn by_segments(gpu: &Gpu, operands: &Operands, order: impl Iterator<Item = usize>) -> Vec<f32> {
    let &Operands { rows, n, k, .. } = operands;
    let out = gpu.holding(&vec![0f32; rows * n]);
    let cut = |matrix: &[bf16], at: usize| -> Vec<bf16> {
        matrix.chunks(k).flat_map(|row| &row[at..(at + SEGMENT).min(k)]).copied().collect()
    };
    for segment in order {
        let at = segment * SEGMENT;
        let (x, weight) = (gpu.holding(&cut(&operands.x, at)), gpu.holding(&cut(&operands.weight, at)));
        let (output, k) = (Output::Add(out.mem()), SEGMENT.min(k - at));
        gpu.launch(product(&Product { output, x: x.mem(), weight: weight.mem(), rows, n, k }, MULTIPROCESSORS));
        gpu.read::<f32>(&out);
    }
    gpu.read(&out)
}

#[test]
fn segments_are_added_in_ascending_order_and_another_order_is_noticed() {
    let Some(gpu) = Gpu::get() else { return };
    let operands = Operands::random(7, 4, 24, 2 * SEGMENT + 64);
    for plan in Plan::ALL {
        let whole = operands.multiply(&gpu, Some(plan), operands.rows);
        assert_same_bits(&by_segments(&gpu, &operands, 0..3), &whole, &|| format!("{plan:?}"));
        // What additions in the order of arrival would do.
        let planted = by_segments(&gpu, &operands, [2, 0, 1].into_iter());
        let same = planted.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(!same, "the comparison does not see the order of additions");
    }
}

#[test]
fn results_are_added_to_what_is_there_or_gate_each_other() {
    let Some(gpu) = Gpu::get() else { return };
    for (rows, n, k) in [(3, 24, 96), (40, 10, 64), (20, 7, 64), (2, 8, 4128)] {
        let operands = Operands::random(8, rows, n, k);
        let stored = operands.multiply(&gpu, None, rows);
        let before = Random(9).normals(rows * n);
        let sum = gpu.holding(&before);
        operands.multiply_split(&gpu, Output::Add, &sum);
        let want: Vec<f32> = before.iter().zip(&stored).map(|(before, stored)| before + stored).collect();
        assert_same_bits(&gpu.read::<f32>(&sum), &want, &|| format!("added, split {rows} x {n} x {k}"));
        for plan in Plan::ALL {
            let what = |what: &str| format!("{what} by {plan:?}, {rows} x {n} x {k}");
            let (x, weight, sum) = (gpu.holding(&operands.x), gpu.holding(&operands.weight), gpu.holding(&before));
            let asked = |output| Product { output, x: x.mem(), weight: weight.mem(), rows, n, k };
            gpu.launch(product_by(plan, &asked(Output::Add(sum.mem())), MULTIPROCESSORS));
            assert_same_bits(&gpu.read::<f32>(&sum), &want, &|| what("added"));
            if n % 2 != 0 {
                continue;
            }
            let gated = gpu.space::<bf16>(rows * n / 2);
            gpu.launch(product_by(plan, &asked(Output::SwiGlu(gated.mem())), MULTIPROCESSORS));
            for (got, pair) in gpu.read::<bf16>(&gated).iter().zip(stored.chunks(2)) {
                let (gate, up) = (f64::from(pair[0]), f64::from(pair[1]));
                let want = gate / (1.0 + (-gate).exp()) * up;
                assert!((got.to_f64() - want).abs() <= want.abs() * 0.00392, "{got} {want}, {}", what("gated"));
            }
        }
    }
}
