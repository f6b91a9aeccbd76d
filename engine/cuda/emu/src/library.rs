//! Opening the emulator's libraries, and its three functions for tests. The crate's only unsafe code.
use std::ffi::{CStr, CString, c_char, c_int, c_longlong, c_void};
use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

/// Where `build.rs` left the libraries, or why it made none.
const FOLDER: Option<&str> = option_env!("EMULATOR_FOLDER");
const NOT_BUILT: Option<&str> = option_env!("EMULATOR_ABSENT");

/// In the order of opening: the driver first, on which the others depend; last the names that cudarc tries first.
const LIBRARIES: [&str; 5] = ["libcuda.so.1", "libcuda.so", "libnvrtc.so.13", "libnvrtc.so", "libnvidia-ml.so.1"];
/// Those that a program may do without: `EMU_CUBLASLT=none`.
const CUBLASLT: [&str; 2] = ["libcublasLt.so.13", "libcublasLt.so"];

/// Why there is no emulated driver, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent(String);

impl fmt::Display for Absent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for Absent {}

/// Makes every later `dlopen("libcuda.so.1")` of this process, by whichever library, find the emulated driver. To be
/// called before the first CUDA call. True if the emulator is there; `TANDEM_GPU=real` and `none` keep it out.
pub fn install() -> bool {
    opened().is_ok()
}

/// Why [`install`] answers false; empty where it answers true.
#[must_use]
pub fn absence() -> String {
    opened().as_ref().err().map(ToString::to_string).unwrap_or_default()
}

/// The folder to put into `LD_LIBRARY_PATH` of a child process that is to run on the emulated driver. None where
/// nothing was built.
#[must_use]
pub fn library_dir() -> Option<&'static Path> {
    FOLDER.map(Path::new)
}

/// `emu_set` of the driver: false for an unknown key, or without a driver.
pub(crate) fn set(key: &CStr, value: i64) -> bool {
    // SAFETY: the driver only reads the key, a C string that outlives the call.
    opened().as_ref().is_ok_and(|emulator| unsafe { (emulator.set)(key.as_ptr(), value) } == 0)
}

/// `emu_get` of the driver.
pub(crate) fn get(key: &CStr) -> Option<i64> {
    let emulator = opened().as_ref().ok()?;
    // SAFETY: as above.
    Some(unsafe { (emulator.get)(key.as_ptr()) }).filter(|value| *value >= 0)
}

pub(crate) fn last_error() -> String {
    let Ok(emulator) = opened() else { return String::new() };
    // SAFETY: the driver answers a C string that is valid until this thread asks again; it is copied here.
    unsafe { CStr::from_ptr((emulator.message)()) }.to_string_lossy().into_owned()
}

/// The driver's functions for tests: runtime settings, counts, the last error.
struct Emulator {
    set: unsafe extern "C" fn(*const c_char, c_longlong) -> c_int,
    get: unsafe extern "C" fn(*const c_char) -> c_longlong,
    message: unsafe extern "C" fn() -> *const c_char,
}

fn opened() -> &'static Result<Emulator, Absent> {
    static OPENED: OnceLock<Result<Emulator, Absent>> = OnceLock::new();
    OPENED.get_or_init(open)
}

fn open() -> Result<Emulator, Absent> {
    match std::env::var("TANDEM_GPU").unwrap_or_default().as_str() {
        "" | "emulate" => {}
        "none" | "real" => return Err(Absent("TANDEM_GPU keeps the emulated driver out".into())),
        other => return Err(Absent(format!("TANDEM_GPU={other} is none of real, emulate, none"))),
    }
    let reason = NOT_BUILT.unwrap_or("build.rs made no libraries");
    let folder = FOLDER.ok_or_else(|| Absent(reason.to_owned()))?;
    let handles = LIBRARIES.map(|name| load(&Path::new(folder).join(name)));
    let [driver, rest @ ..] = handles;
    let driver = driver?;
    rest.into_iter().collect::<Result<Vec<_>, _>>()?;
    if std::env::var("EMU_CUBLASLT").as_deref() != Ok("none") {
        CUBLASLT.iter().try_for_each(|name| load(&Path::new(folder).join(name)).map(drop))?;
    }
    // SAFETY: the signatures are those of driver/settings.cpp, which the same build compiled.
    unsafe {
        Ok(Emulator {
            set: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, c_longlong) -> c_int>(symbol(
                driver, c"emu_set",
            )?),
            get: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> c_longlong>(symbol(
                driver, c"emu_get",
            )?),
            message: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *const c_char>(symbol(
                driver,
                c"emu_message",
            )?),
        })
    }
}

/// Opens a library for the life of the process: what it answers for by name must stay.
fn load(path: &Path) -> Result<*mut c_void, Absent> {
    let text = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|error| Absent(error.to_string()))?;
    // SAFETY: the libraries have no initializer that depends on anything; the path is a C string.
    let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() { Err(Absent(format!("cannot open {}: {}", path.display(), reason()))) } else { Ok(handle) }
}

fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void, Absent> {
    // SAFETY: a handle that is never closed, and a C string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    if address.is_null() {
        Err(Absent(format!("no {} in the emulated driver", name.to_string_lossy())))
    } else {
        Ok(address)
    }
}

/// What the loader says of the call that failed just now, in this thread.
fn reason() -> String {
    // SAFETY: dlerror answers null or a C string that is valid until this thread's next call of the loader.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    }
}
