//! One planted mistake each: it must be found, and the message must name the kernel and the line.
mod rig;

use cudarc::driver::sys::CUresult;
use rig::{Arg, Gpu, Shape};

const PLAIN: &[(&str, &str)] = &[];
const CHECKED: &[(&str, &str)] = &[("EMU_CHECK", "1")];

/// What a kernel is launched with.
struct Case {
    kernel: &'static str,
    shape: Shape,
    /// Behind `out`, an allocation of 512 bytes.
    arguments: fn(&Gpu) -> Vec<Arg>,
}

fn out_only(_: &Gpu) -> Vec<Arg> {
    Vec::new()
}

fn floats(gpu: &Gpu, count: usize) -> Arg {
    Arg::Pointer(gpu.upload(&vec![1.0f32; count]))
}

/// Launches it in a child, and expects the error, the kernel's name, the line of its mistake, and the words.
fn found(test: &str, variables: &[(&str, &str)], case: &Case, status: CUresult, words: &str) {
    rig::passes_in_child(test, &format!("{} {variables:?}", case.kernel), variables, || {
        let Some(gpu) = Gpu::open() else { return };
        let out = gpu.alloc(512).expect("memory");
        let arguments = [vec![Arg::Pointer(out)], (case.arguments)(&gpu)].concat();
        let launched = gpu.launch(case.kernel, case.shape, &arguments).and_then(|()| gpu.synchronize(gpu.stream));
        let failure = launched.expect_err("the mistake must be found");
        println!("{}", failure.message);
        assert_eq!(failure.status, status, "{}", failure.message);
        for part in [&format!("kernel {}", case.kernel), words, &rig::place_of(case.kernel)] {
            assert!(failure.message.contains(part), "no `{part}` in `{}`", failure.message);
        }
        // Sticky: nothing works any more.
        assert_eq!(gpu.alloc(16).expect_err("a lost context").status, status);
    });
}

/// A mistake that both builds of the kernels find.
macro_rules! found_always {
    ($name:ident, $shape:expr, $arguments:expr, $status:ident, $words:expr) => {
        #[test]
        fn $name() {
            let case = Case { kernel: stringify!($name), shape: $shape, arguments: $arguments };
            for variables in [PLAIN, CHECKED] {
                found(stringify!($name), variables, &case, CUresult::$status, $words);
            }
        }
    };
}

/// A mistake that the checker finds.
macro_rules! found_by_checker {
    ($name:ident, $shape:expr, $arguments:expr, $status:ident, $words:expr) => {
        #[test]
        fn $name() {
            let case = Case { kernel: stringify!($name), shape: $shape, arguments: $arguments };
            found(stringify!($name), CHECKED, &case, CUresult::$status, $words);
        }
    };
}

const BLOCK: Shape = Shape(1, 128, 0);
const WARP: Shape = Shape(1, 32, 0);

found_by_checker!(missing_barrier, BLOCK, out_only, CUDA_ERROR_LAUNCH_FAILED, "race in shared memory");
found_by_checker!(missing_syncwarp, WARP, out_only, CUDA_ERROR_LAUNCH_FAILED, "race in shared memory");
found_by_checker!(shuffle_as_barrier, WARP, out_only, CUDA_ERROR_LAUNCH_FAILED, "race in shared memory");
found_by_checker!(
    missing_second_barrier,
    Shape(1, 128, 0),
    |gpu| {
        // The second tile goes past `out`, but the race comes first.
        vec![floats(gpu, 256), Arg::U32(2)]
    },
    CUDA_ERROR_LAUNCH_FAILED,
    "race in shared memory"
);
found_by_checker!(
    missing_copy_wait,
    BLOCK,
    |gpu| vec![floats(gpu, 128)],
    CUDA_ERROR_LAUNCH_FAILED,
    "cp.async of thread"
);
found_by_checker!(
    two_blocks_one_word,
    Shape(2, 32, 0),
    out_only,
    CUDA_ERROR_LAUNCH_FAILED,
    "race in global memory: write after a write by block"
);
found_by_checker!(add_without_atomic, WARP, out_only, CUDA_ERROR_LAUNCH_FAILED, "race in global memory");
found_by_checker!(
    reads_other_block,
    Shape(2, 64, 0),
    out_only,
    CUDA_ERROR_LAUNCH_FAILED,
    "race in global memory: read after a write by block"
);
found_by_checker!(one_outside, BLOCK, out_only, CUDA_ERROR_ILLEGAL_ADDRESS, "write: illegal address");
found_by_checker!(
    reads_outside,
    BLOCK,
    |gpu| vec![floats(gpu, 254)],
    CUDA_ERROR_ILLEGAL_ADDRESS,
    "0 bytes past the end of an allocation of 1016 bytes"
);
found_by_checker!(misaligned, Shape(1, 8, 0), out_only, CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned access");

found_always!(
    divergent_barrier,
    BLOCK,
    out_only,
    CUDA_ERROR_LAUNCH_FAILED,
    "threads of one block meet at different barriers"
);
found_always!(
    deadlock,
    BLOCK,
    out_only,
    CUDA_ERROR_LAUNCH_FAILED,
    "deadlock: no thread of the block can go on: 64 at the barrier"
);
found_always!(exited_lane, WARP, out_only, CUDA_ERROR_LAUNCH_FAILED, "exited");
found_always!(far_outside, BLOCK, out_only, CUDA_ERROR_ILLEGAL_ADDRESS, "past the end of an allocation of 512 bytes");
found_always!(
    past_dynamic_shared,
    Shape(1, 128, 256),
    out_only,
    CUDA_ERROR_ILLEGAL_ADDRESS,
    "past 256 bytes of dynamic shared memory"
);
found_always!(
    copy_to_global,
    Shape(1, 8, 0),
    |gpu| vec![floats(gpu, 128)],
    CUDA_ERROR_ILLEGAL_ADDRESS,
    "the destination is not in shared memory"
);
found_always!(failed_assertion, BLOCK, |_| vec![Arg::U32(64)], CUDA_ERROR_ASSERT, "assert(blockDim.x <= count)");
found_always!(division_by_zero, BLOCK, |_| vec![Arg::U32(0)], CUDA_ERROR_LAUNCH_FAILED, "integer division by zero");

#[test]
fn a_kernel_that_does_not_end_is_stopped() {
    for kernel in ["endless", "endless_barriers"] {
        let arguments: fn(&Gpu) -> Vec<Arg> = if kernel == "endless" { out_only } else { |_| vec![Arg::U32(1)] };
        let case = Case { kernel, shape: Shape(1, 64, 0), arguments };
        let variables = &[("EMU_WATCHDOG_S", "1")];
        let test = "a_kernel_that_does_not_end_is_stopped";
        found(test, variables, &case, CUresult::CUDA_ERROR_LAUNCH_TIMEOUT, "did not end within 1 s");
    }
}

#[test]
fn freed_memory_faults() {
    for variables in [PLAIN, CHECKED] {
        let freed = |gpu: &Gpu| {
            let gone = gpu.alloc(1024).expect("memory");
            gpu.free(gone).expect("an end");
            vec![Arg::Pointer(gone)]
        };
        let case = Case { kernel: "reads", shape: BLOCK, arguments: freed };
        found("freed_memory_faults", variables, &case, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, "use after free");
    }
}

#[test]
fn host_memory_in_a_kernel_is_found() {
    let host = |_: &Gpu| {
        let values = vec![1.0f32; 128].leak();
        vec![Arg::Pointer(values.as_ptr() as u64)]
    };
    let case = Case { kernel: "reads", shape: BLOCK, arguments: host };
    let words = "in no allocation: memory of the host?";
    found("host_memory_in_a_kernel_is_found", CHECKED, &case, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, words);
}

#[test]
fn memory_of_another_device_is_found() {
    let variables = &[("EMU_CHECK", "1"), ("EMU_DEVICES", "2")];
    let other = |gpu: &Gpu| {
        let second = Gpu::open_device(1).expect("a second device");
        let address = second.alloc(512).expect("memory");
        // SAFETY: the first device's context, which stays.
        rig::check(unsafe { cudarc::driver::sys::cuCtxSetCurrent(gpu.context) }).expect("the first device");
        vec![Arg::Pointer(address)]
    };
    let case = Case { kernel: "reads", shape: BLOCK, arguments: other };
    let words = "read of another device's memory";
    found("memory_of_another_device_is_found", variables, &case, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, words);
}

#[test]
fn memory_that_nobody_wrote_is_nan() {
    rig::passes_in_child("memory_that_nobody_wrote_is_nan", "nan", PLAIN, || {
        let Some(gpu) = Gpu::open() else { return };
        let (out, fresh) = (gpu.alloc(512).expect("memory"), gpu.alloc(512).expect("memory"));
        gpu.launch("reads", BLOCK, &[Arg::Pointer(out), Arg::Pointer(fresh)]).expect("a launch");
        assert!(gpu.download::<f32>(out, 128).expect("values").iter().all(|value| value.is_nan()));
        gpu.launch("uninitialised_shared", BLOCK, &[Arg::Pointer(out)]).expect("a launch");
        let values = gpu.download::<f32>(out, 128).expect("values");
        assert!(values[..64].iter().all(|value| *value == 1.0) && values[64..].iter().all(|value| value.is_nan()));
        // A copy that nobody waited for has not landed.
        let input = gpu.upload(&[1.0f32; 128]);
        gpu.launch("missing_copy_wait", BLOCK, &[Arg::Pointer(out), Arg::Pointer(input)]).expect("a launch");
        assert!(gpu.download::<f32>(out, 128).expect("values").iter().all(|value| value.is_nan()));
    });
}
