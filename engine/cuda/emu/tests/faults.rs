//! Planned faults, devices, images and launches that are refused.
mod rig;

use cudarc::driver::sys::{self, CUresult};
use rig::{Arg, Gpu, Outcome, Shape, check, passes_in_child, refused};
use tandem_cuda_emu::{Fault, Setting, fail_nth, seen, set};

const BLOCK: Shape = Shape(1, 128, 0);

#[test]
fn the_nth_call_fails_and_only_that() {
    passes_in_child("the_nth_call_fails_and_only_that", "alloc", &[("EMU_FAIL", "alloc:3,submit:2")], || {
        let Some(gpu) = Gpu::open() else { return };
        let out = gpu.alloc(512).expect("the first");
        gpu.alloc(64).expect("the second");
        refused(gpu.alloc(64), CUresult::CUDA_ERROR_OUT_OF_MEMORY, "planned fault: allocation");
        gpu.alloc(64).expect("the fourth");
        assert_eq!(seen(Fault::Alloc), Some(4));
        let launch =
            || gpu.launch("right_add", BLOCK, &[Arg::Pointer(out), Arg::Pointer(out), Arg::F32(1.0), Arg::U32(1)]);
        launch().expect("the first");
        refused(launch(), CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "planned fault");
        launch().expect("the third");
        assert!(fail_nth(Fault::Alloc, 1));
        refused(gpu.alloc(64), CUresult::CUDA_ERROR_OUT_OF_MEMORY, "planned fault");
    });
}

#[test]
fn a_kernel_or_copy_that_goes_wrong_is_found_at_the_next_wait_and_stays() {
    for (fault, status) in
        [(Fault::Launch, CUresult::CUDA_ERROR_LAUNCH_FAILED), (Fault::Copy, CUresult::CUDA_ERROR_ECC_UNCORRECTABLE)]
    {
        let test = "a_kernel_or_copy_that_goes_wrong_is_found_at_the_next_wait_and_stays";
        passes_in_child(test, fault.name(), &[], || {
            let Some(gpu) = Gpu::open() else { return };
            let out = gpu.upload(&[1.0f32; 128]);
            gpu.synchronize(gpu.stream).expect("an end");
            assert!(fail_nth(fault, 1));
            let arguments = [Arg::Pointer(out), Arg::Pointer(out), Arg::F32(1.0), Arg::U32(128)];
            gpu.launch("right_add", BLOCK, &arguments).expect("the launch itself");
            refused(gpu.download::<f32>(out, 128), status, "planned fault");
            assert_eq!(gpu.alloc(64).expect_err("a lost context").status, status);
        });
    }
}

#[test]
fn the_other_kinds_fail_where_they_are_asked() {
    passes_in_child("the_other_kinds_fail_where_they_are_asked", "others", &[], || {
        let Some(gpu) = Gpu::open() else { return };
        let image = rig::compile(rig::SOURCE, "--gpu-architecture=sm_90").expect("an image");
        let load = || {
            let mut module = std::ptr::null_mut();
            // SAFETY: an image that ends with a zero.
            check(unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) })
        };
        assert!(fail_nth(Fault::Module, 1));
        refused(load(), CUresult::CUDA_ERROR_INVALID_IMAGE, "planned fault");
        load().expect("a module");
        assert!(fail_nth(Fault::HostAlloc, 1));
        let mut start = std::ptr::null_mut();
        // SAFETY: a place for the result.
        let outcome = check(unsafe { sys::cuMemHostAlloc(&mut start, 64, 0) });
        refused(outcome, CUresult::CUDA_ERROR_OUT_OF_MEMORY, "planned fault");
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        let capture = || -> Outcome<sys::CUgraph> {
            let mut graph = std::ptr::null_mut();
            // SAFETY: a stream of this test.
            unsafe {
                check(sys::cuStreamBeginCapture_v2(gpu.stream, mode))?;
                check(sys::cuStreamEndCapture(gpu.stream, &mut graph))?;
            }
            Ok(graph)
        };
        assert!(fail_nth(Fault::Capture, 1));
        refused(capture(), CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "planned fault");
        let graph = capture().expect("a graph");
        assert!(fail_nth(Fault::Instantiate, 1));
        let mut executable = std::ptr::null_mut();
        // SAFETY: a graph of this test.
        let outcome = check(unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) });
        refused(outcome, CUresult::CUDA_ERROR_OUT_OF_MEMORY, "planned fault");
        assert!(fail_nth(Fault::Compile, 1));
        let log = rig::compile(rig::SOURCE, "--gpu-architecture=sm_90").expect_err("a planned fault");
        assert!(log.contains("planned fault: compilation"), "{log}");
    });
}

#[test]
fn launches_that_a_driver_refuses() {
    passes_in_child("launches_that_a_driver_refuses", "launches", &[], || {
        let Some(gpu) = Gpu::open() else { return };
        let out = gpu.alloc(512).expect("memory");
        let all = [Arg::Pointer(out), Arg::Pointer(out), Arg::F32(1.0), Arg::U32(1)];
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        refused(gpu.launch("right_add", Shape(0, 128, 0), &all), invalid, "no grid of 0 x 1 x 1");
        refused(gpu.launch("right_add", Shape(1, 1025, 0), &all), invalid, "no block of 1025 x 1 x 1");
        refused(gpu.launch("right_add", Shape(1, 128, 49_153), &all), invalid, "49153 bytes of dynamic shared memory");
        refused(gpu.launch("right_add", BLOCK, &all[..3]), invalid, "argument 4 of 4 cannot be read: too few");
        refused(gpu.launch("nothing", BLOCK, &all), CUresult::CUDA_ERROR_NOT_FOUND, "no kernel nothing");
        let function = gpu.function("right_add").expect("a function");
        // What a launch can compare its arguments with.
        let sizes: Vec<(usize, usize)> = (0..)
            .map_while(|i| {
                let (mut offset, mut bytes) = (0, 0);
                // SAFETY: places for the results.
                let status = unsafe { sys::cuFuncGetParamInfo(function, i, &mut offset, &mut bytes) };
                (status == CUresult::CUDA_SUCCESS).then_some((offset, bytes))
            })
            .collect();
        assert_eq!(sizes, [(0, 8), (8, 8), (16, 4), (20, 4)]);
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a function of this test.
        unsafe {
            refused(check(sys::cuFuncSetAttribute(function, attribute, 300_000)), invalid, "the device has 232448");
            check(sys::cuFuncSetAttribute(function, attribute, 200_000)).expect("an opt-in");
        }
        gpu.launch("right_add", Shape(1, 128, 200_000), &all).expect("a launch");
        gpu.synchronize(gpu.stream).expect("an end");
    });
}

#[test]
fn programs_that_nvrtc_refuses() {
    passes_in_child("programs_that_nvrtc_refuses", "programs", &[], || {
        if !tandem_cuda_emu::device() {
            return;
        }
        let refusal = |source: &str, option: &str, words: &str| {
            let log = rig::compile(source, option).expect_err("a refusal");
            assert!(log.contains(words), "`{log}` has no `{words}`");
        };
        let arch = "--gpu-architecture=sm_90";
        refusal("__global__ void f() {}", arch, "no kernel is declared");
        refusal("\nTANDEM_KERNEL(unknown)", arch, "planted.cu(2): error: kernel \"unknown\" is not among");
        refusal("#include <cuda_bf16.h>", arch, "could not open source file \"cuda_bf16.h\"");
        refusal("TANDEM_KERNEL(right_add)", "--gpu-architecture=sm_12345", "invalid value for --gpu-architecture");
        // A macro's body is no code.
        let macros = "#define MADE(NAME) \\\n  TANDEM_KERNEL(NAME)\nTANDEM_KERNEL(right_add)";
        assert!(!rig::compile(macros, arch).expect("an image").is_empty());
        let hidden = "#ifdef TANDEM_EMULATE\n#include <nothing>\n#endif\nTANDEM_KERNEL(right_add)";
        assert!(!rig::compile(hidden, arch).expect("an image").is_empty());
        assert!(rig::compile(hidden, "--gpu-architecture=compute_80").expect("PTX").is_empty(), "no machine code");
    });
}

#[test]
fn images_for_other_devices_and_other_bytes_are_refused() {
    let test = "images_for_other_devices_and_other_bytes_are_refused";
    passes_in_child(test, "images", &[("EMU_ARCH", "90")], || {
        let Some(_gpu) = Gpu::open() else { return };
        let load = |image: &[u8]| {
            let mut module = std::ptr::null_mut();
            // SAFETY: bytes that end with a zero.
            check(unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) })
        };
        refused(load(b"\x7fELF\0"), CUresult::CUDA_ERROR_INVALID_IMAGE, "not an image");
        for (arch, runs) in [("sm_80", false), ("sm_90", true), ("sm_90a", true), ("sm_100", false)] {
            let image =
                rig::compile("TANDEM_KERNEL(right_add)", &format!("--gpu-architecture={arch}")).expect("an image");
            match runs {
                true => load(&image).expect("a module"),
                false => refused(load(&image), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU, "the device is 90"),
            }
        }
    });
}

#[test]
fn devices_are_as_many_as_the_environment_says() {
    let init = || {
        assert!(tandem_cuda_emu::install());
        // SAFETY: a plain call.
        check(unsafe { sys::cuInit(0) })
    };
    let count = || {
        let mut devices = 0;
        // SAFETY: a place for the result.
        check(unsafe { sys::cuDeviceGetCount(&mut devices) }).map(|()| devices)
    };
    let test = "devices_are_as_many_as_the_environment_says";
    /// An environment, and how many devices there are; none: cuInit fails.
    type Case<'a> = (&'a [(&'a str, &'a str)], Option<i32>);
    let cases: [Case; 6] = [
        (&[("EMU_DEVICES", "3")], Some(3)),
        (&[("EMU_DEVICES", "3"), ("CUDA_VISIBLE_DEVICES", "2,0")], Some(2)),
        (&[("EMU_DEVICES", "3"), ("CUDA_VISIBLE_DEVICES", "1,7,2")], Some(1)),
        (&[("CUDA_VISIBLE_DEVICES", "")], None),
        (&[("EMU_DEVICES", "0")], None),
        (&[("EMU_FAIL", "init:1")], None),
    ];
    for (number, (variables, expected)) in cases.into_iter().enumerate() {
        passes_in_child(test, &number.to_string(), variables, || {
            if !tandem_cuda_emu::device() {
                return;
            }
            match expected {
                Some(devices) => {
                    init().expect("devices");
                    assert_eq!(count().expect("a count"), devices);
                }
                None => assert_eq!(init().expect_err("no device").status, CUresult::CUDA_ERROR_NO_DEVICE),
            }
        });
    }
}

#[test]
fn what_is_held_is_counted() {
    passes_in_child("what_is_held_is_counted", "counts", &[], || {
        use tandem_cuda_emu::{Count, count};
        let Some(gpu) = Gpu::open() else { return };
        assert_eq!(
            (count(Count::Streams), count(Count::Modules), count(Count::Allocations)),
            (Some(1), Some(1), Some(0))
        );
        let memory = gpu.alloc(100).expect("memory");
        assert_eq!((count(Count::UsedBytes), count(Count::Allocations)), (Some(100), Some(1)));
        gpu.free(memory).expect("an end");
        assert_eq!((count(Count::UsedBytes), count(Count::Events)), (Some(0), Some(0)));
        gpu.new_event();
        assert_eq!(count(Count::Events), Some(1));
        assert!(set(Setting::MemoryBytes(1000)));
        refused(gpu.alloc(1001), CUresult::CUDA_ERROR_OUT_OF_MEMORY, "1000 bytes");
    });
}

#[test]
fn threads_compile_side_by_side() {
    passes_in_child("threads_compile_side_by_side", "threads", &[], || {
        if !tandem_cuda_emu::device() {
            return;
        }
        let compile_many = || {
            for _ in 0..200 {
                let image = rig::compile("TANDEM_KERNEL(right_add)", "--gpu-architecture=sm_90").expect("an image");
                assert!(!image.is_empty());
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(compile_many);
            }
        });
    });
}
