//! Capture and replay, and what a driver refuses while a stream is captured.
mod rig;

use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use rig::{Arg, Gpu, Outcome, Shape, check, passes_in_child, refused};

const COUNT: usize = 128;
const BLOCK: Shape = Shape(1, 128, 0);

fn add_one(gpu: &Gpu, stream: sys::CUstream, out: u64, input: u64) -> Outcome {
    let arguments = [Arg::Pointer(out), Arg::Pointer(input), Arg::F32(1.0), Arg::U32(COUNT as u32)];
    gpu.launch_on(stream, "right_add", BLOCK, &arguments)
}

fn begin(gpu: &Gpu) {
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: a stream of this test.
    check(unsafe { sys::cuStreamBeginCapture_v2(gpu.stream, mode) }).expect("a capture");
}

fn end(gpu: &Gpu) -> Outcome<sys::CUgraph> {
    let mut graph = std::ptr::null_mut();
    // SAFETY: a place for the result.
    check(unsafe { sys::cuStreamEndCapture(gpu.stream, &mut graph) })?;
    Ok(graph)
}

fn instantiate(graph: sys::CUgraph) -> Outcome<sys::CUgraphExec> {
    let mut executable = std::ptr::null_mut();
    // SAFETY: a graph of this test.
    check(unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) })?;
    Ok(executable)
}

fn record(event: sys::CUevent, stream: sys::CUstream) -> Outcome {
    // SAFETY: handles of this test.
    check(unsafe { sys::cuEventRecord(event, stream) })
}

fn wait(stream: sys::CUstream, event: sys::CUevent) -> Outcome {
    // SAFETY: handles of this test.
    check(unsafe { sys::cuStreamWaitEvent(stream, event, 0) })
}

#[test]
fn a_graph_replays_with_the_inputs_of_the_replay() {
    for order in ["late", "eager", "random"] {
        let variables = &[("EMU_ORDER", order), ("EMU_SEED", "5")];
        passes_in_child("a_graph_replays_with_the_inputs_of_the_replay", order, variables, || {
            let Some(gpu) = Gpu::open() else { return };
            let (host, input) = (gpu.pinned(&[1.0f32; COUNT]), gpu.alloc(COUNT * 4).expect("memory"));
            let (middle, out) = (gpu.alloc(COUNT * 4).expect("memory"), gpu.alloc(COUNT * 4).expect("memory"));
            begin(&gpu);
            // SAFETY: pinned memory that is never freed.
            check(unsafe { sys::cuMemcpyHtoDAsync_v2(input, host.as_ptr().cast(), COUNT * 4, gpu.stream) })
                .expect("a copy");
            add_one(&gpu, gpu.stream, middle, input).expect("a launch");
            add_one(&gpu, gpu.stream, out, middle).expect("a launch");
            let executable = instantiate(end(&gpu).expect("a graph")).expect("an executable");
            assert_eq!(tandem_cuda_emu::count(tandem_cuda_emu::Count::Launches), Some(0), "captured, not run");
            for round in 0..3u16 {
                host[0] = f32::from(round);
                // SAFETY: handles of this test.
                check(unsafe { sys::cuGraphLaunch(executable, gpu.stream) }).expect("a replay");
                let got = gpu.download::<f32>(out, COUNT).expect("values");
                assert_eq!((got[0], got[1]), (f32::from(round) + 2.0, 3.0));
            }
            assert_eq!(tandem_cuda_emu::count(tandem_cuda_emu::Count::Launches), Some(6));
        });
    }
}

/// Two branches that join; without the join of the second, the end is refused.
#[test]
fn branches_run_in_any_order_that_events_allow_and_must_be_joined() {
    for seed in ["1", "2", "3", "4", "5", "6", "7", "8"] {
        let variables = &[("EMU_ORDER", "random"), ("EMU_SEED", seed)];
        passes_in_child("branches_run_in_any_order_that_events_allow_and_must_be_joined", seed, variables, || {
            let Some(gpu) = Gpu::open() else { return };
            let input = gpu.upload(&[1.0f32; COUNT]);
            let buffers = [0; 3].map(|_| gpu.alloc(COUNT * 4).expect("memory"));
            let (side, fork, join) = (gpu.new_stream().expect("a stream"), gpu.new_event(), gpu.new_event());
            for is_joined in [true, false] {
                begin(&gpu);
                add_one(&gpu, gpu.stream, buffers[0], input).expect("a launch");
                record(fork, gpu.stream).expect("a record");
                wait(side, fork).expect("a wait");
                add_one(&gpu, side, buffers[1], buffers[0]).expect("a launch");
                record(join, side).expect("a record");
                if is_joined {
                    wait(gpu.stream, join).expect("a wait");
                }
                add_one(&gpu, gpu.stream, buffers[2], buffers[0]).expect("a launch");
                if !is_joined {
                    refused(end(&gpu), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "not joined");
                    continue;
                }
                let executable = instantiate(end(&gpu).expect("a graph")).expect("an executable");
                // SAFETY: handles of this test.
                check(unsafe { sys::cuGraphLaunch(executable, gpu.stream) }).expect("a replay");
                assert_eq!(gpu.download::<f32>(buffers[1], COUNT).expect("values"), [3.0; COUNT]);
                assert_eq!(gpu.download::<f32>(buffers[2], COUNT).expect("values"), [3.0; COUNT]);
            }
        });
    }
}

/// What may not happen in a capture: the call is refused, and so is the capture's end.
#[test]
fn calls_that_wait_or_allocate_end_a_capture() {
    passes_in_child("calls_that_wait_or_allocate_end_a_capture", "refusals", &[], || {
        let Some(gpu) = Gpu::open() else { return };
        let memory = gpu.upload(&[1.0f32; COUNT]);
        let (outside, event) = (gpu.new_stream().expect("a stream"), gpu.new_event());
        record(event, outside).expect("a record");
        let pageable = [0.0f32; COUNT];
        let unsupported = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        // SAFETY: handles and memory of this test.
        let calls: [(&str, &dyn Fn() -> CUresult, CUresult); 9] = unsafe {
            [
                ("cuStreamSynchronize", &|| sys::cuStreamSynchronize(gpu.stream), unsupported),
                ("cuStreamSynchronize", &|| sys::cuStreamSynchronize(outside), unsupported),
                ("cuCtxSynchronize", &|| sys::cuCtxSynchronize(), unsupported),
                ("cuMemAlloc", &|| sys::cuMemAlloc_v2(&mut 0, 64), unsupported),
                ("cuMemFree", &|| sys::cuMemFree_v2(memory), unsupported),
                ("cuEventQuery", &|| sys::cuEventQuery(event), unsupported),
                ("cuMemAllocAsync", &|| sys::cuMemAllocAsync(&mut 0, 64, gpu.stream), unsupported),
                (
                    "pageable memory",
                    &|| sys::cuMemcpyHtoDAsync_v2(memory, pageable.as_ptr().cast(), COUNT * 4, gpu.stream),
                    unsupported,
                ),
                (
                    "outside of the capture",
                    &|| sys::cuStreamWaitEvent(gpu.stream, event, 0),
                    CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                ),
            ]
        };
        for (words, call, status) in calls {
            begin(&gpu);
            refused(check(call()), status, words);
            let launched = add_one(&gpu, gpu.stream, memory, memory);
            refused(launched, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "lost");
            refused(end(&gpu), CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "lost");
        }
        // The stream and the memory are as before.
        add_one(&gpu, gpu.stream, memory, memory).expect("a launch");
        assert_eq!(gpu.download::<f32>(memory, COUNT).expect("values"), [2.0; COUNT]);
    });
}

#[test]
fn captures_begin_and_end_where_they_may() {
    passes_in_child("captures_begin_and_end_where_they_may", "ends", &[], || {
        let Some(gpu) = Gpu::open() else { return };
        refused(end(&gpu), CUresult::CUDA_ERROR_ILLEGAL_STATE, "not being captured");
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the legacy stream.
        let legacy = unsafe { sys::cuStreamBeginCapture_v2(std::ptr::null_mut(), mode) };
        refused(check(legacy), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "legacy stream");
        begin(&gpu);
        let event = gpu.new_event();
        record(event, gpu.stream).expect("a record");
        // SAFETY: an event of this test.
        refused(check(unsafe { sys::cuEventQuery(event) }), CUresult::CUDA_ERROR_CAPTURED_EVENT, "in a capture");
        let memory = end(&gpu).map(|_| ());
        memory.expect("an empty graph");
        let other = gpu.new_stream().expect("a stream");
        refused(wait(other, event), CUresult::CUDA_ERROR_CAPTURED_EVENT, "has ended");
    });
}

/// Only in relaxed mode may a thread allocate meanwhile.
#[test]
fn a_relaxed_capture_lets_the_thread_allocate() {
    passes_in_child("a_relaxed_capture_lets_the_thread_allocate", "relaxed", &[], || {
        let Some(gpu) = Gpu::open() else { return };
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a stream of this test.
        check(unsafe { sys::cuStreamBeginCapture_v2(gpu.stream, mode) }).expect("a capture");
        gpu.alloc(64).expect("memory");
        end(&gpu).expect("a graph");
    });
}
