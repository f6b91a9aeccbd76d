//! Two processes that share a device's memory.
#![allow(clippy::disallowed_methods, reason = "the child gets the handle by the environment")]

mod rig;

use cudarc::driver::sys::{self, CUresult};
use rig::{Gpu, check, refused};

const COUNT: usize = 1000;

/// The child maps the parent's memory, reads it, and writes its answer into it.
#[test]
fn another_process_reads_and_writes_an_allocation() {
    let test = "another_process_reads_and_writes_an_allocation";
    if std::env::var_os("EMU_TEST_CHILD").is_some() {
        return answer_as_child();
    }
    let Some(gpu) = Gpu::open() else { return };
    let values: Vec<u32> = (0..COUNT as u32).collect();
    let memory = gpu.upload(&values);
    gpu.synchronize(gpu.stream).expect("an end");
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: a place for the result.
    check(unsafe { sys::cuIpcGetMemHandle(&mut handle, memory) }).expect("a handle");
    let mut mapped = 0;
    // SAFETY: a handle of this process, which the driver refuses.
    let own = check(unsafe { sys::cuIpcOpenMemHandle_v2(&mut mapped, handle, 1) });
    refused(own, CUresult::CUDA_ERROR_INVALID_CONTEXT, "the process that made the handle");
    let text: String = handle.reserved.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    rig::passes_in_child(test, "child", &[("EMU_TEST_HANDLE", &text)], || unreachable!("the child answers above"));
    let got = gpu.download::<u32>(memory, COUNT).expect("values");
    assert!(got.iter().zip(&values).all(|(got, value)| *got == value * 2));
    let pool = {
        let mut address = 0;
        // SAFETY: a place for the result.
        check(unsafe { sys::cuMemAllocAsync(&mut address, 64, gpu.stream) }).expect("pool memory");
        address
    };
    // SAFETY: a place for the result.
    let outcome = check(unsafe { sys::cuIpcGetMemHandle(&mut handle, pool) });
    refused(outcome, CUresult::CUDA_ERROR_INVALID_VALUE, "not in memory of cuMemAlloc");
}

fn answer_as_child() {
    let Ok(text) = std::env::var("EMU_TEST_HANDLE") else { return };
    let gpu = Gpu::open().expect("a device");
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    for (byte, digits) in handle.reserved.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).expect("digits");
        *byte = u8::from_str_radix(digits, 16).expect("digits") as _;
    }
    let mut mapped = 0;
    // SAFETY: a handle of the parent, which waits for this process.
    check(unsafe { sys::cuIpcOpenMemHandle_v2(&mut mapped, handle, 1) }).expect("the parent's memory");
    let values = gpu.download::<u32>(mapped, COUNT).expect("values");
    assert_eq!(values, (0..COUNT as u32).collect::<Vec<_>>());
    let doubled: Vec<u32> = values.iter().map(|value| value * 2).collect();
    // SAFETY: the mapping has so many words.
    unsafe {
        check(sys::cuMemcpyHtoD_v2(mapped, doubled.as_ptr().cast(), COUNT * 4)).expect("a copy");
        check(sys::cuIpcCloseMemHandle(mapped)).expect("an end");
    }
}
