//! Streams, events and host memory: what a program forgot to wait for has not happened.
mod rig;

use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUresult};
use rig::{Arg, Gpu, Shape, check, passes_in_child, refused};

const COUNT: usize = 128;
const BLOCK: Shape = Shape(1, 128, 0);

/// `out[i] = in[i] + 1` on a stream.
fn add_one(gpu: &Gpu, stream: sys::CUstream, out: u64, input: u64) {
    let arguments = [Arg::Pointer(out), Arg::Pointer(input), Arg::F32(1.0), Arg::U32(COUNT as u32)];
    gpu.launch_on(stream, "right_add", BLOCK, &arguments).expect("a launch");
}

fn fetch(gpu: &Gpu, stream: sys::CUstream, to: &mut [f32], from: u64) {
    // SAFETY: pinned memory that is never freed.
    check(unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, size_of_val(to), stream) }).expect("a copy");
    let _ = gpu;
}

#[test]
fn results_are_not_there_before_the_wait() {
    passes_in_child("results_are_not_there_before_the_wait", "late", &[("EMU_ORDER", "late")], || {
        let Some(gpu) = Gpu::open() else { return };
        let (input, out) = (gpu.upload(&[1.0f32; COUNT]), gpu.alloc(COUNT * 4).expect("memory"));
        let host = gpu.pinned(&[7.0f32; COUNT]);
        add_one(&gpu, gpu.stream, out, input);
        fetch(&gpu, gpu.stream, host, out);
        assert_eq!(host[0], 7.0, "read before the synchronization");
        gpu.synchronize(gpu.stream).expect("an end");
        assert_eq!(host, [2.0; COUNT]);
    });
}

#[test]
fn a_pinned_source_is_read_when_the_copy_runs() {
    passes_in_child("a_pinned_source_is_read_when_the_copy_runs", "pinned", &[], || {
        let Some(gpu) = Gpu::open() else { return };
        let (host, target) = (gpu.pinned(&[1.0f32; COUNT]), gpu.alloc(COUNT * 4).expect("memory"));
        // SAFETY: pinned memory that is never freed.
        check(unsafe { sys::cuMemcpyHtoDAsync_v2(target, host.as_ptr().cast(), COUNT * 4, gpu.stream) })
            .expect("a copy");
        host[0] = 5.0;
        assert_eq!(gpu.download::<f32>(target, COUNT).expect("values")[0], 5.0, "written too early");
        let mut pageable = vec![1.0f32; COUNT];
        let target = gpu.upload(&pageable);
        pageable[0] = 5.0;
        assert_eq!(gpu.download::<f32>(target, COUNT).expect("values")[0], 1.0, "staged at the call");
    });
}

/// Two streams: the second reads what the first writes.
fn chain(gpu: &Gpu, with_wait: bool) -> f32 {
    let second = gpu.new_stream().expect("a stream");
    let input = gpu.upload(&[1.0f32; COUNT]);
    gpu.synchronize(gpu.stream).expect("an end");
    let (middle, out) = (gpu.alloc(COUNT * 4).expect("memory"), gpu.alloc(COUNT * 4).expect("memory"));
    add_one(gpu, gpu.stream, middle, input);
    if with_wait {
        let event = gpu.new_event();
        // SAFETY: handles of this test.
        unsafe {
            check(sys::cuEventRecord(event, gpu.stream)).expect("a record");
            check(sys::cuStreamWaitEvent(second, event, 0)).expect("a wait");
        }
    }
    add_one(gpu, second, out, middle);
    let host = gpu.pinned(&[0.0f32; COUNT]);
    fetch(gpu, second, host, out);
    gpu.synchronize(second).expect("an end");
    host[0]
}

#[test]
fn a_missing_wait_between_streams_is_a_wrong_number() {
    passes_in_child("a_missing_wait_between_streams_is_a_wrong_number", "late", &[], || {
        let Some(gpu) = Gpu::open() else { return };
        assert!(chain(&gpu, false).is_nan(), "nobody waited for the first stream");
        assert_eq!(chain(&gpu, true), 3.0);
    });
    for seed in ["1", "2", "3", "4"] {
        let variables = &[("EMU_ORDER", "random"), ("EMU_SEED", seed)];
        passes_in_child("a_missing_wait_between_streams_is_a_wrong_number", seed, variables, || {
            let Some(gpu) = Gpu::open() else { return };
            assert_eq!(chain(&gpu, true), 3.0);
        });
    }
}

#[test]
fn the_default_stream_waits_for_blocking_streams_and_they_for_it() {
    passes_in_child("the_default_stream_waits_for_blocking_streams_and_they_for_it", "legacy", &[], || {
        let Some(gpu) = Gpu::open() else { return };
        let mut blocking = std::ptr::null_mut();
        // SAFETY: a place for the result.
        check(unsafe { sys::cuStreamCreate(&mut blocking, 0) }).expect("a stream");
        let legacy = std::ptr::null_mut();
        let input = gpu.upload(&[1.0f32; COUNT]);
        gpu.synchronize(gpu.stream).expect("an end");
        let buffers = [0; 3].map(|_| gpu.alloc(COUNT * 4).expect("memory"));
        add_one(&gpu, blocking, buffers[0], input);
        add_one(&gpu, legacy, buffers[1], buffers[0]);
        add_one(&gpu, blocking, buffers[2], buffers[1]);
        let host = gpu.pinned(&[0.0f32; COUNT]);
        fetch(&gpu, blocking, host, buffers[2]);
        gpu.synchronize(blocking).expect("an end");
        assert_eq!(host[0], 4.0);
    });
}

#[test]
fn polls_get_a_stream_on_and_events_are_ready_in_order() {
    passes_in_child("polls_get_a_stream_on_and_events_are_ready_in_order", "polls", &[], || {
        let Some(gpu) = Gpu::open() else { return };
        let (input, out) = (gpu.upload(&[1.0f32; COUNT]), gpu.alloc(COUNT * 4).expect("memory"));
        let (first, last) = (gpu.new_event(), gpu.new_event());
        // SAFETY: handles of this test.
        unsafe {
            check(sys::cuEventRecord(first, gpu.stream)).expect("a record");
            add_one(&gpu, gpu.stream, out, input);
            check(sys::cuEventRecord(last, gpu.stream)).expect("a record");
            let mut polls = 0;
            while sys::cuEventQuery(last) == CUresult::CUDA_ERROR_NOT_READY {
                polls += 1;
                assert!(polls < 100, "polling must get the stream on");
            }
            assert!(polls > 0, "nothing has run at the first poll");
            assert_eq!(sys::cuEventQuery(first), CUresult::CUDA_SUCCESS);
            let mut elapsed_ms = -1.0;
            check(sys::cuEventElapsedTime_v2(&mut elapsed_ms, first, last)).expect("a time");
            assert!(elapsed_ms >= 0.0);
        }
    });
}

#[test]
fn a_host_function_may_wait_for_another_thread_in_the_driver() {
    static STEPS: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn wait_for_the_other(_: *mut std::ffi::c_void) {
        STEPS.store(1, Ordering::SeqCst);
        while STEPS.load(Ordering::SeqCst) != 2 {
            std::thread::yield_now();
        }
    }
    passes_in_child("a_host_function_may_wait_for_another_thread_in_the_driver", "host function", &[], || {
        let Some(gpu) = Gpu::open() else { return };
        // SAFETY: the function takes no data.
        check(unsafe { sys::cuLaunchHostFunc(gpu.stream, Some(wait_for_the_other), std::ptr::null_mut()) })
            .expect("a function");
        let context = gpu.context as usize;
        let other = std::thread::spawn(move || {
            while STEPS.load(Ordering::SeqCst) != 1 {
                std::thread::yield_now();
            }
            // SAFETY: the device's context, which stays.
            unsafe {
                check(sys::cuCtxSetCurrent(context as sys::CUcontext)).expect("a context");
                check(sys::cuCtxGetCurrent(&mut std::ptr::null_mut())).expect("a context");
            }
            STEPS.store(2, Ordering::SeqCst);
        });
        gpu.synchronize(gpu.stream).expect("an end");
        other.join().expect("the other thread");
    });
}

#[test]
fn copies_outside_of_an_allocation_are_refused() {
    passes_in_child("copies_outside_of_an_allocation_are_refused", "bounds", &[], || {
        let Some(gpu) = Gpu::open() else { return };
        let memory = gpu.upload(&[1u8; 100]);
        refused(
            gpu.download::<u8>(memory, 101),
            CUresult::CUDA_ERROR_INVALID_VALUE,
            "101 bytes at offset 0 of an allocation of 100",
        );
        refused(gpu.free(memory + 8), CUresult::CUDA_ERROR_INVALID_VALUE, "no allocation begins");
        gpu.free(memory).expect("an end");
        refused(gpu.download::<u8>(memory, 4), CUresult::CUDA_ERROR_INVALID_VALUE, "has been freed");
        refused(gpu.alloc(5 << 30), CUresult::CUDA_ERROR_OUT_OF_MEMORY, "4294967296 bytes");
        assert_eq!(tandem_cuda_emu::count(tandem_cuda_emu::Count::UsedBytes), Some(0));
    });
}

/// In strict mode the process ends where the host reads device memory, and says so.
#[test]
fn the_host_cannot_read_device_memory_in_strict_mode() {
    let test = "the_host_cannot_read_device_memory_in_strict_mode";
    let output = rig::in_child(test, "strict", &[("EMU_STRICT_HOST", "1")], || {
        let Some(gpu) = Gpu::open() else { std::process::exit(0) };
        let memory = gpu.upload(&[3.0f32; COUNT]);
        assert_eq!(gpu.download::<f32>(memory, COUNT).expect("values"), [3.0; COUNT], "copies work as ever");
        // SAFETY: none: this is the mistake.
        let value = unsafe { std::ptr::read_volatile(memory as *const f32) };
        println!("read {value}");
        std::process::exit(0);
    });
    let Some(output) = output else { return };
    let text = String::from_utf8_lossy(&output.stderr);
    if text.contains("SKIP") {
        return;
    }
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("the host touched device memory"), "{text}");
}
