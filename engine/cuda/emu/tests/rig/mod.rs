//! A device, its kernels and launches for the tests of this folder: raw calls of the driver, each checked.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::disallowed_methods, reason = "a child gets its case by the environment")]

use std::ffi::{CStr, CString, c_void};
use std::process::{Command, Output};

use cudarc::driver::sys::{self, CUresult};
use cudarc::nvrtc::result as nvrtc;

/// The test's kernels, as text: what NVRTC gets, and where the lines of the mistakes are.
pub const SOURCE: &str = include_str!("../planted.cu");
const HEADER: &str = include_str!("../../../kernels/device.cuh");

/// A failed call: its status, and what the emulator says of it.
#[derive(Debug)]
pub struct Failure {
    pub status: CUresult,
    pub message: String,
}

pub type Outcome<T = ()> = Result<T, Failure>;

pub fn check(status: CUresult) -> Outcome {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        status => Err(Failure { status, message: tandem_cuda_emu::last_error() }),
    }
}

/// Expects this status and words of the message.
pub fn refused<T: std::fmt::Debug>(outcome: Outcome<T>, status: CUresult, words: &str) {
    let failure = outcome.expect_err("a refusal");
    assert_eq!(failure.status, status, "{}", failure.message);
    assert!(failure.message.contains(words), "`{}` has no `{words}`", failure.message);
}

pub struct Gpu {
    pub context: sys::CUcontext,
    module: sys::CUmodule,
    pub stream: sys::CUstream,
}

/// A kernel's argument.
#[derive(Clone, Copy)]
pub enum Arg {
    Pointer(u64),
    U32(u32),
    F32(f32),
}

/// Grid and block (along x), dynamic shared memory.
#[derive(Clone, Copy)]
pub struct Shape(pub u32, pub u32, pub u32);

impl Gpu {
    /// The first device with the test's kernels. None: there is no emulator, and the test is skipped.
    pub fn open() -> Option<Gpu> {
        Self::open_device(0)
    }

    pub fn open_device(ordinal: i32) -> Option<Gpu> {
        tandem_cuda_emu::device().then(|| Self::at(ordinal).expect("a device"))
    }

    fn at(ordinal: i32) -> Outcome<Gpu> {
        let mut gpu = Gpu { context: std::ptr::null_mut(), module: std::ptr::null_mut(), stream: std::ptr::null_mut() };
        // SAFETY: plain calls of the driver with places for their results.
        unsafe {
            check(sys::cuInit(0))?;
            let mut device = 0;
            check(sys::cuDeviceGet(&mut device, ordinal))?;
            check(sys::cuDevicePrimaryCtxRetain(&mut gpu.context, device))?;
            check(sys::cuCtxSetCurrent(gpu.context))?;
            let image = compile(SOURCE, "--gpu-architecture=sm_90").expect("the test's kernels");
            check(sys::cuModuleLoadData(&mut gpu.module, image.as_ptr().cast()))?;
        }
        gpu.stream = gpu.new_stream()?;
        Ok(gpu)
    }

    /// One that does not synchronize with the default stream.
    pub fn new_stream(&self) -> Outcome<sys::CUstream> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: a place for the result.
        check(unsafe { sys::cuStreamCreate(&mut stream, 1) })?;
        Ok(stream)
    }

    pub fn new_event(&self) -> sys::CUevent {
        let mut event = std::ptr::null_mut();
        // SAFETY: a place for the result.
        check(unsafe { sys::cuEventCreate(&mut event, 0) }).expect("an event");
        event
    }

    pub fn function(&self, name: &str) -> Outcome<sys::CUfunction> {
        let name = CString::new(name).expect("a name");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name is a C string.
        check(unsafe { sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()) })?;
        Ok(function)
    }

    pub fn alloc(&self, bytes: usize) -> Outcome<u64> {
        let mut address = 0;
        // SAFETY: a place for the result.
        check(unsafe { sys::cuMemAlloc_v2(&mut address, bytes) })?;
        Ok(address)
    }

    pub fn free(&self, address: u64) -> Outcome {
        // SAFETY: the driver checks the address.
        check(unsafe { sys::cuMemFree_v2(address) })
    }

    pub fn upload<T: Copy>(&self, values: &[T]) -> u64 {
        let address = self.alloc(size_of_val(values)).expect("memory");
        // SAFETY: the values are readable, the allocation is as long.
        check(unsafe { sys::cuMemcpyHtoDAsync_v2(address, values.as_ptr().cast(), size_of_val(values), self.stream) })
            .expect("a copy");
        address
    }

    /// Waits for the stream.
    pub fn download<T: Copy + Default>(&self, address: u64, count: usize) -> Outcome<Vec<T>> {
        let mut values = vec![T::default(); count];
        let bytes = size_of_val(values.as_slice());
        // SAFETY: the vector is writable for so many bytes, and the copy to pageable memory ends within the call.
        check(unsafe { sys::cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), address, bytes, self.stream) })?;
        self.synchronize(self.stream)?;
        Ok(values)
    }

    /// Pinned memory, never freed: tests are short.
    pub fn pinned<T: Copy>(&self, values: &[T]) -> &'static mut [T] {
        let mut start: *mut c_void = std::ptr::null_mut();
        // SAFETY: the allocation is page-aligned and as long as the values that are written to it.
        unsafe {
            check(sys::cuMemHostAlloc(&mut start, size_of_val(values), 0)).expect("pinned memory");
            std::ptr::copy_nonoverlapping(values.as_ptr(), start.cast(), values.len());
            std::slice::from_raw_parts_mut(start.cast(), values.len())
        }
    }

    pub fn synchronize(&self, stream: sys::CUstream) -> Outcome {
        // SAFETY: the driver checks the handle.
        check(unsafe { sys::cuStreamSynchronize(stream) })
    }

    pub fn launch(&self, name: &str, shape: Shape, arguments: &[Arg]) -> Outcome {
        self.launch_on(self.stream, name, shape, arguments)
    }

    pub fn launch_on(&self, stream: sys::CUstream, name: &str, shape: Shape, arguments: &[Arg]) -> Outcome {
        let function = self.function(name)?;
        let mut pointers: Vec<*mut c_void> = arguments
            .iter()
            .map(|argument| match argument {
                Arg::Pointer(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            })
            .collect();
        // What a caller with too few arguments would have behind its list.
        pointers.push(std::ptr::null_mut());
        let Shape(grid, block, dynamic) = shape;
        // SAFETY: the arguments outlive the call, which copies them.
        check(unsafe {
            sys::cuLaunchKernel(
                function,
                grid,
                1,
                1,
                block,
                1,
                1,
                dynamic,
                stream,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

/// The emulated NVRTC's image, or its log.
pub fn compile(source: &str, architecture: &str) -> Result<Vec<u8>, String> {
    let (text, header) = (CString::new(source).expect("text"), CString::new(HEADER).expect("text"));
    let (names, headers) = ([c"device.cuh".as_ptr()], [header.as_ptr()]);
    let mut program = std::ptr::null_mut();
    // SAFETY: C strings that outlive the program; sizes are asked for before the buffers are made.
    unsafe {
        use cudarc::nvrtc::sys as raw;
        raw::nvrtcCreateProgram(
            &mut program,
            text.as_ptr(),
            c"planted.cu".as_ptr(),
            1,
            headers.as_ptr(),
            names.as_ptr(),
        )
        .result()
        .expect("a program");
        let compiled = nvrtc::compile_program(program, &[architecture]);
        let log = nvrtc::get_program_log(program).expect("a log");
        let log = CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned();
        let outcome = compiled.map_err(|error| format!("{error}: {log}")).map(|()| {
            let mut bytes = 0;
            raw::nvrtcGetCUBINSize(program, &mut bytes).result().expect("a size");
            let mut image = vec![0u8; bytes];
            if bytes > 0 {
                raw::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()).result().expect("an image");
            }
            image
        });
        nvrtc::destroy_program(program).expect("an end");
        outcome
    }
}

/// Whether this process is the child that runs the case; see [`in_child`].
fn is_child_of(case: &str) -> bool {
    std::env::var("EMU_TEST_CHILD").is_ok_and(|value| value == case)
}

/// Runs `body` in a process of its own (this program with this test only) and gives the child's output, or None in
/// that child, after `body`. Errors of kernels are sticky, and settings are the process's.
pub fn in_child(test: &str, case: &str, variables: &[(&str, &str)], body: impl FnOnce()) -> Option<Output> {
    if std::env::var_os("EMU_TEST_CHILD").is_some() {
        if is_child_of(case) {
            body();
        }
        return None;
    }
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env("EMU_TEST_CHILD", case);
    for (name, value) in variables {
        command.env(name, value);
    }
    Some(command.output().expect("the child's output"))
}

/// The same for a body that asserts by itself.
pub fn passes_in_child(test: &str, case: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    if let Some(output) = in_child(test, case, variables, body) {
        let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        // A name that no test has would run nothing, and succeed.
        assert!(output.status.success() && text.contains("1 passed"), "{case}: {text}");
    }
}

/// "planted.cu:17": the line of `// MISTAKE name`.
pub fn place_of(mistake: &str) -> String {
    let mark = format!("// MISTAKE {mistake}");
    let line = SOURCE.lines().position(|line| line.ends_with(&mark)).expect("a marked line");
    format!("planted.cu:{}", line + 1)
}
