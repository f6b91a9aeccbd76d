//! Correct kernels: the right numbers, and no alarm, in every order of lanes, blocks and streams, with and without the
//! checker.
mod rig;

use half::bf16;
use rig::{Arg, Gpu, Shape};

#[test]
fn correct_kernels_are_right_over_seeds_with_and_without_the_checker() {
    for check in ["0", "1"] {
        for seed in ["0", "1", "2", "3", "4", "5", "6", "7"] {
            let order = if seed == "0" { "late" } else { "random" };
            let variables = &[("EMU_CHECK", check), ("EMU_SEED", seed), ("EMU_ORDER", order)];
            let test = "correct_kernels_are_right_over_seeds_with_and_without_the_checker";
            rig::passes_in_child(test, &format!("check {check} seed {seed}"), variables, || {
                let Some(gpu) = Gpu::open() else { return };
                sums(&gpu);
                pipeline(&gpu);
                product(&gpu);
                collectives(&gpu);
                histogram(&gpu);
            });
        }
    }
}

#[test]
fn blocks_may_run_on_several_threads() {
    rig::passes_in_child(
        "blocks_may_run_on_several_threads",
        "threads",
        &[("EMU_THREADS", "4"), ("EMU_SEED", "3")],
        || {
            let Some(gpu) = Gpu::open() else { return };
            sums(&gpu);
            pipeline(&gpu);
        },
    );
}

fn sums(gpu: &Gpu) {
    let values: Vec<f32> = (0..4 * 1000).map(|i| (i % 7) as f32).collect();
    let (input, out) = (gpu.upload(&values), gpu.alloc(4 * 4).expect("memory"));
    let arguments = [Arg::Pointer(out), Arg::Pointer(input), Arg::U32(1000)];
    gpu.launch("right_block_sum", Shape(4, 128, 0), &arguments).expect("a launch");
    let expected: Vec<f32> = values.chunks(1000).map(|part| part.iter().sum()).collect();
    assert_eq!(gpu.download::<f32>(out, 4).expect("sums"), expected);
    let added = gpu.alloc(4000 * 4).expect("memory");
    let arguments = [Arg::Pointer(added), Arg::Pointer(input), Arg::F32(0.5), Arg::U32(4000)];
    gpu.launch("right_add", Shape(32, 128, 0), &arguments).expect("a launch");
    let got = gpu.download::<f32>(added, 4000).expect("values");
    assert!(got.iter().zip(&values).all(|(got, value)| *got == value + 0.5));
}

fn pipeline(gpu: &Gpu) {
    let values: Vec<f32> = (0..8 * 128).map(|i| i as f32).collect();
    let (input, out) = (gpu.upload(&values), gpu.alloc(8 * 128 * 4).expect("memory"));
    gpu.launch("right_pipeline", Shape(1, 128, 0), &[Arg::Pointer(out), Arg::Pointer(input), Arg::U32(8)])
        .expect("a launch");
    let expected: Vec<f32> = values.chunks(128).flat_map(|tile| tile.iter().rev().copied()).collect();
    assert_eq!(gpu.download::<f32>(out, 8 * 128).expect("tiles"), expected);
}

fn product(gpu: &Gpu) {
    let a: Vec<bf16> = (0..256).map(|i| bf16::from_f32((i % 13) as f32 - 6.0)).collect();
    let b: Vec<bf16> = (0..128).map(|i| bf16::from_f32((i % 11) as f32 - 5.0)).collect();
    let (left, right, out) = (gpu.upload(&a), gpu.upload(&b), gpu.alloc(16 * 8 * 4).expect("memory"));
    gpu.launch("right_product", Shape(1, 32, 0), &[Arg::Pointer(out), Arg::Pointer(left), Arg::Pointer(right)])
        .expect("a launch");
    let got = gpu.download::<f32>(out, 16 * 8).expect("a product");
    for (i, value) in got.iter().enumerate() {
        let (row, column) = (i / 8, i % 8);
        let expected: f32 = (0..16).map(|k| a[row * 16 + k].to_f32() * b[column * 16 + k].to_f32()).sum();
        assert_eq!(*value, expected, "row {row}, column {column}");
    }
}

fn collectives(gpu: &Gpu) {
    let out = gpu.alloc(7 * 32 * 4).expect("memory");
    gpu.launch("right_collectives", Shape(1, 32, 0), &[Arg::Pointer(out)]).expect("a launch");
    let got = gpu.download::<u32>(out, 7 * 32).expect("words");
    for lane in 0..32u32 {
        let at = |part: usize| got[part * 32 + lane as usize];
        assert_eq!(at(0), lane ^ 5, "xor");
        assert_eq!(at(1), 0xaaaa_aaaa, "ballot");
        assert_eq!(at(2), 7, "argmax: the first of equals, never NaN");
        assert_eq!(at(3), (lane / 4 * 4) * 4 + 6, "sums of four");
        assert_eq!(at(4), if lane == 31 { 31 } else { lane + 1 }, "down");
        assert_eq!(at(5), if lane % 8 < 2 { lane } else { lane - 2 }, "up within eight");
        assert_eq!(at(6), 10, "count at a barrier");
    }
}

fn histogram(gpu: &Gpu) {
    let values: Vec<u32> = (0..1000).map(|i| i * i).collect();
    let (input, out, marks) =
        (gpu.upload(&values), gpu.alloc(16 * 4).expect("memory"), gpu.alloc(128).expect("memory"));
    let arguments = [Arg::Pointer(out), Arg::Pointer(marks), Arg::Pointer(input), Arg::U32(1000)];
    gpu.launch("right_histogram", Shape(1, 128, 64), &arguments).expect("a launch");
    let mut expected = [0u32; 16];
    values.iter().for_each(|value| expected[(value % 16) as usize] += 1);
    assert_eq!(gpu.download::<u32>(out, 16).expect("bins"), expected);
    assert_eq!(gpu.download::<u8>(marks, 128).expect("marks"), (0..128).collect::<Vec<u8>>());
}
