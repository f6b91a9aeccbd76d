//! An emulated CUDA driver, for tests on machines without a card.
//!
//! `build.rs` compiles a `libcuda.so.1` (fibers for threads, streams, graphs, memory that faults), a
//! `libnvrtc.so.13`, a `libcublasLt.so.13` and the product's kernels for the processor. [`install`] opens them by
//! path; glibc then answers every later `dlopen` by SONAME from what is loaded, so that cudarc and UCX find them
//! without an environment variable. The product does not know: it finds a card, compiles its kernels and launches them.
//!
//! # What it finds
//! Wrong numbers, each time and not sometimes: a missing wait (operations of a stream run as late as allowed, copies of
//! `cp.async` land at their wait), memory that nobody wrote (NaN). Errors that name kernel, block, thread and line: an
//! access past an allocation, to freed memory or misaligned; a divergent barrier, a deadlock, a kernel that does not
//! end; with `EMU_CHECK=1` also races, overruns to the byte and pointers of the host. Calls that a driver
//! refuses: while a stream is captured, with a wrong shape or too much shared memory.
//!
//! # What it cannot find
//! Speed, occupancy, the rounding of tensor cores, weak memory order between blocks, streams that really run at the
//! same time, kernels that wait for other blocks.
//!
//! # Environment
//! Read at the first call of the driver; a value that is not understood ends the process.
//!
//! | variable | meaning |
//! |---|---|
//! | `TANDEM_GPU` | `real`: leave the machine's driver; `emulate`; `none`. Unset: `emulate` |
//! | `TANDEM_REQUIRE_EMU=1` | [`device`] fails where there is no emulator, instead of skipping |
//! | `EMU_DEVICES` | how many devices (1); `CUDA_VISIBLE_DEVICES` chooses among them |
//! | `EMU_MEMORY_MB` | memory of each (4096) |
//! | `EMU_ARCH`, `EMU_DRIVER_VERSION` | compute capability times 10 (90), version (13000) |
//! | `EMU_CUBLASLT` | `none`: no cuBLASLt; or its version (130002) |
//! | `EMU_ORDER` | `late` (default), `eager`, `random`: when operations of streams run |
//! | `EMU_SEED` | order of lanes and blocks, and of streams under `random`; 0: ascending |
//! | `EMU_THREADS` | threads of the system over a grid's blocks (1) |
//! | `EMU_CHECK=1` | run the kernels with the access checker: 3 times slower |
//! | `EMU_UNINITIALISED=1` | with `EMU_CHECK=1`: also find reads of memory that nobody wrote |
//! | `EMU_STRICT_HOST=1` | the host faults where it touches device memory |
//! | `EMU_WATCHDOG_S` | seconds of processor time a launch may take (60; 0: any) |
//! | `EMU_POISON_MB` | larger allocations begin as zeros (256; 0: all) |
//! | `EMU_FAIL` | planned faults, `alloc:7,copy:2`: see [`Fault`] |
//! | `EMU_PLANTED` | `unordered`, `reversed`: wrong kernels (`tests/unordered.cu`) in place of the product's |
//! | `EMU_LOG=1` | print each call that fails |
//!
//! Sticky errors, settings and counts are the process's: a test of an error runs in a process of its own.
#![allow(clippy::disallowed_methods, reason = "tests choose the emulator by the environment")]

mod library;

pub use library::{Absent, absence, install, library_dir};

use std::ffi::CString;

/// The first line of a test that needs a device: true if there is one (emulated, or real with `TANDEM_GPU=real`), else
/// it prints why the test is skipped.
///
/// # Panics
/// With `TANDEM_REQUIRE_EMU=1`, where there is none.
#[must_use]
pub fn device() -> bool {
    if std::env::var_os("TANDEM_GPU").is_some_and(|value| value == "real") || install() {
        return true;
    }
    let reason = absence();
    let is_required = std::env::var_os("TANDEM_REQUIRE_EMU").is_some_and(|value| value == "1");
    assert!(!is_required, "TANDEM_REQUIRE_EMU=1, and there is no emulated driver: {reason}");
    eprintln!("SKIP: no device: {reason}");
    false
}

/// A kind of planned fault. Its name is what `EMU_FAIL` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `init`: `cuInit` finds no device.
    Init,
    /// `alloc`: `cuMemAlloc` and `cuMemAllocAsync` are out of memory.
    Alloc,
    /// `host_alloc`: `cuMemHostAlloc` and `cuMemHostRegister` are out of memory.
    HostAlloc,
    /// `submit`: `cuLaunchKernel` and `cuGraphLaunch` refuse, and nothing is lost.
    Submit,
    /// `launch`: a kernel goes wrong while it runs; every later call fails.
    Launch,
    /// `copy`: a copy or memset goes wrong while it runs; every later call fails.
    Copy,
    /// `capture`: `cuStreamEndCapture` finds the capture invalidated.
    Capture,
    /// `instantiate`: `cuGraphInstantiate` is out of memory.
    Instantiate,
    /// `module`: `cuModuleLoadData` finds the image invalid.
    Module,
    /// `compile`: `nvrtcCompileProgram` fails.
    Compile,
    /// `ipc_open`: `cuIpcOpenMemHandle` cannot map.
    IpcOpen,
    /// `matmul`: `cublasLtMatmul` refuses, and nothing is lost.
    Matmul,
}

impl Fault {
    /// All kinds, for tests that let each of them happen.
    pub const ALL: [Fault; 12] = [
        Fault::Init,
        Fault::Alloc,
        Fault::HostAlloc,
        Fault::Submit,
        Fault::Launch,
        Fault::Copy,
        Fault::Capture,
        Fault::Instantiate,
        Fault::Module,
        Fault::Compile,
        Fault::IpcOpen,
        Fault::Matmul,
    ];

    /// As `EMU_FAIL` writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Fault::Init => "init",
            Fault::Alloc => "alloc",
            Fault::HostAlloc => "host_alloc",
            Fault::Submit => "submit",
            Fault::Launch => "launch",
            Fault::Copy => "copy",
            Fault::Capture => "capture",
            Fault::Instantiate => "instantiate",
            Fault::Module => "module",
            Fault::Compile => "compile",
            Fault::IpcOpen => "ipc_open",
            Fault::Matmul => "matmul",
        }
    }
}

/// When operations of a stream run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// When somebody synchronizes or polls.
    Late = 0,
    /// At once.
    Eager = 1,
    /// At a time that the seed chooses.
    Random = 2,
}

/// What can be changed while the process runs, between two launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Order of lanes and blocks; 0: ascending.
    Seed(u32),
    /// Threads of the system over a grid's blocks.
    Threads(u32),
    /// When operations of streams run.
    Order(Order),
    /// Whether the host faults where it touches device memory.
    StrictHost(bool),
    /// Whether new memory is NaN.
    Poison(bool),
    /// Memory of each device.
    MemoryBytes(u64),
    /// Seconds of processor time a launch may take; 0: any.
    WatchdogSeconds(u32),
    /// What [`Fault::Submit`] answers; any number, as later drivers have further ones.
    SubmitStatus(u32),
}

/// Changes a setting. False where there is no emulated driver.
pub fn set(setting: Setting) -> bool {
    let (key, value) = match setting {
        Setting::Seed(seed) => ("seed", i64::from(seed)),
        Setting::Threads(threads) => ("threads", i64::from(threads)),
        Setting::Order(order) => ("order", order as i64),
        Setting::StrictHost(is_strict) => ("strict", i64::from(is_strict)),
        Setting::Poison(is_poison) => ("poison", i64::from(is_poison)),
        Setting::MemoryBytes(bytes) => ("memory_bytes", i64::try_from(bytes).unwrap_or(i64::MAX)),
        Setting::WatchdogSeconds(seconds) => ("watchdog_s", i64::from(seconds)),
        Setting::SubmitStatus(status) => ("submit_status", i64::from(status)),
    };
    write(key, value)
}

/// Lets the `nth` fault of this kind from now on happen (1: the next). False where there is no emulated driver.
pub fn fail_nth(fault: Fault, nth: u32) -> bool {
    write(&format!("fail_{}", fault.name()), i64::from(nth))
}

/// How many times it could have happened so far. None where there is no emulated driver.
#[must_use]
pub fn seen(fault: Fault) -> Option<u64> {
    read(&format!("seen_{}", fault.name()))
}

/// What the process has done and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Grids that ran, those in graphs included.
    Launches,
    /// Blocks of them.
    Blocks,
    /// Threads of them.
    ThreadsRun,
    /// Bytes of device memory that the program holds.
    UsedBytes,
    /// Allocations that are alive, pinned and registered memory included.
    Allocations,
    /// Streams that are alive.
    Streams,
    /// Events that are alive.
    Events,
    /// Graphs that are alive, instantiated or not.
    Graphs,
    /// Modules that are loaded.
    Modules,
    /// Flushes of what network cards have written to a device's memory.
    Flushes,
    /// Products of cuBLASLt that ran, those in graphs included.
    Matmuls,
    /// Handles and descriptors of cuBLASLt that are alive.
    CublasLtObjects,
}

/// A count. None where there is no emulated driver.
#[must_use]
pub fn count(count: Count) -> Option<u64> {
    read(match count {
        Count::Launches => "launches",
        Count::Blocks => "blocks",
        Count::ThreadsRun => "threads_run",
        Count::UsedBytes => "used_bytes",
        Count::Allocations => "allocations",
        Count::Streams => "streams",
        Count::Events => "events",
        Count::Graphs => "graphs",
        Count::Modules => "modules",
        Count::Flushes => "flushes",
        Count::Matmuls => "matmuls",
        Count::CublasLtObjects => "cublaslt_objects",
    })
}

/// Whether kernels run with the access checker, which takes three times as long.
#[must_use]
pub fn is_checked() -> bool {
    read("checked") == Some(1)
}

/// What the last error was, in words: kernel, block, thread, line. Empty if there was none.
#[must_use]
pub fn last_error() -> String {
    library::last_error()
}

fn write(key: &str, value: i64) -> bool {
    CString::new(key).is_ok_and(|key| library::set(&key, value))
}

fn read(key: &str) -> Option<u64> {
    u64::try_from(library::get(&CString::new(key).ok()?)?).ok()
}
