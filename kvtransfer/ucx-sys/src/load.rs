//! Opens `libucs.so.0` and `libucp.so.0`, checks the version and resolves every function that is used. The libraries
//! stay open for the life of the process: UCX has threads and, where an operator lets it watch memory, hooks in libc.
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::types::*;

/// The API version that is asked for: the oldest that is served.
pub const API_VERSION: (c_uint, c_uint) = (1, 13);

/// Version of the loaded library. Two versions do not work together over any transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 1
    pub major: u32,
    /// 13 and later.
    pub minor: u32,
    /// Patch release.
    pub release: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

impl Version {
    fn is_served(self) -> bool {
        self.major == API_VERSION.0 && self.minor >= API_VERSION.1
    }
}

/// Why UCX cannot be used in this process. None of these is fatal: the caller picks another transport.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Not installed, or not where it was looked for.
    #[error("cannot open {file}: {reason}; install UCX 1.13 or later (Debian: libucx0) or name its directory")]
    Open {
        /// Name or path that was opened.
        file: String,
        /// The dynamic linker's words.
        reason: String,
    },
    /// Opened, but not the library that it should be.
    #[error("{file} has no function {symbol}: {reason}")]
    Symbol {
        /// Name or path of the library.
        file: String,
        /// The missing function.
        symbol: &'static str,
        /// The dynamic linker's words.
        reason: String,
    },
    /// Older or newer than what this file describes.
    #[error("UCX {0} is not served: 1.13 up to 2.0 is")]
    Version(Version),
    /// A process holds at most one UCX.
    #[error("UCX of {loaded} is already loaded, {asked} cannot be loaded beside it")]
    AnotherLoaded {
        /// Where the loaded one came from.
        loaded: String,
        /// What was asked for.
        asked: String,
    },
}

macro_rules! ucx_api {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) $(-> $ret:ty)?;)*) => {
        /// The resolved functions. Their contracts are those of `ucp.h`.
        pub struct Api {
            /// Of the loaded library.
            pub version: Version,
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg: $type),*) $(-> $ret)?,)*
        }

        impl Api {
            fn resolve(libraries: &[OpenLibrary; 2]) -> Result<Self, LoadError> {
                let mut api = Self {
                    version: Version { major: 0, minor: 0, release: 0 },
                    $($name: {
                        // SAFETY: the type is the declaration of `ucp.h`, which has not changed since 1.13.
                        unsafe { symbol(libraries, stringify!($name))? }
                    },)*
                };
                api.version = api.read_version();
                Ok(api)
            }
        }
    };
}

ucx_api! {
    /// Text of a status.
    ucs_status_string(status: ucs_status_t) -> *const c_char;
    /// Version of the library.
    ucp_get_version(major: *mut c_uint, minor: *mut c_uint, release: *mut c_uint);
    /// Reads the environment.
    ucp_config_read(prefix: *const c_char, file: *const c_char, config: *mut ucp_config_h) -> ucs_status_t;
    /// Sets one variable, named without `UCX_`.
    ucp_config_modify(config: ucp_config_h, name: *const c_char, value: *const c_char) -> ucs_status_t;
    /// Frees a configuration.
    ucp_config_release(config: ucp_config_h);
    /// `ucp_init` is an inline function around this one.
    ucp_init_version(major: c_uint, minor: c_uint, params: *const ucp_params, config: ucp_config_h,
        context: *mut ucp_context_h) -> ucs_status_t;
    /// Frees a context.
    ucp_cleanup(context: ucp_context_h);
    /// Prints the transports that were opened.
    ucp_context_print_info(context: ucp_context_h, stream: *mut libc::FILE);
    /// Registers memory.
    ucp_mem_map(context: ucp_context_h, params: *const ucp_mem_map_params, memh: *mut ucp_mem_h) -> ucs_status_t;
    /// Undoes `ucp_mem_map`.
    ucp_mem_unmap(context: ucp_context_h, memh: ucp_mem_h) -> ucs_status_t;
    /// A worker for the calling thread.
    ucp_worker_create(context: ucp_context_h, params: *const ucp_worker_params, worker: *mut ucp_worker_h)
        -> ucs_status_t;
    /// Destroys a worker with all its endpoints.
    ucp_worker_destroy(worker: ucp_worker_h);
    /// Lets UCX work; returns whether there was work.
    ucp_worker_progress(worker: ucp_worker_h) -> c_uint;
    /// Descriptor to poll.
    ucp_worker_get_efd(worker: ucp_worker_h, fd: *mut c_int) -> ucs_status_t;
    /// Asks for an event at the descriptor.
    ucp_worker_arm(worker: ucp_worker_h) -> ucs_status_t;
    /// The address to give to peers.
    ucp_worker_get_address(worker: ucp_worker_h, address: *mut ucp_address_h, length: *mut usize) -> ucs_status_t;
    /// Frees it.
    ucp_worker_release_address(worker: ucp_worker_h, address: ucp_address_h);
    /// Sets the callback of a message id.
    ucp_worker_set_am_recv_handler(worker: ucp_worker_h, param: *const ucp_am_handler_param) -> ucs_status_t;
    /// Connects to a peer.
    ucp_ep_create(worker: ucp_worker_h, params: *const ucp_ep_params, ep: *mut ucp_ep_h) -> ucs_status_t;
    /// Closes an endpoint.
    ucp_ep_close_nbx(ep: ucp_ep_h, param: *const ucp_request_param) -> ucs_status_ptr_t;
    /// Sends an active message.
    ucp_am_send_nbx(ep: ucp_ep_h, id: c_uint, header: *const c_void, header_length: usize, buffer: *const c_void,
        count: usize, param: *const ucp_request_param) -> ucs_status_ptr_t;
    /// Receives the payload of a rendezvous message.
    ucp_am_recv_data_nbx(worker: ucp_worker_h, descriptor: *mut c_void, buffer: *mut c_void, count: usize,
        param: *const ucp_request_param) -> ucs_status_ptr_t;
    /// Refuses it.
    ucp_am_data_release(worker: ucp_worker_h, data: *mut c_void);
    /// Status of a request.
    ucp_request_check_status(request: *mut c_void) -> ucs_status_t;
    /// Gives a request back.
    ucp_request_free(request: *mut c_void);
}

static LOADED: Mutex<Option<(Option<PathBuf>, &'static Api)>> = Mutex::new(None);

impl Api {
    /// Loads UCX from `directory`, or from where the dynamic linker finds it. Later calls return the same instance.
    ///
    /// # Errors
    /// [`LoadError`] when it is absent, incomplete, of a version that is not served, or when another one is loaded.
    pub fn load(directory: Option<&Path>) -> Result<&'static Self, LoadError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((from, api)) = &*loaded {
            if from.as_deref() == directory {
                return Ok(api);
            }
            return Err(LoadError::AnotherLoaded { loaded: place(from.as_deref()), asked: place(directory) });
        }
        let libraries = [OpenLibrary::open(directory, "libucs.so.0")?, OpenLibrary::open(directory, "libucp.so.0")?];
        let api = Self::resolve(&libraries)?;
        if !api.version.is_served() {
            return Err(LoadError::Version(api.version));
        }
        let api: &'static Self = Box::leak(Box::new(api));
        *loaded = Some((directory.map(Path::to_path_buf), api));
        Ok(api)
    }

    /// UCX's text for `status`.
    pub fn describe(&self, status: ucs_status_t) -> String {
        // SAFETY: takes any value and returns a string that is never freed.
        let text = unsafe { CStr::from_ptr((self.ucs_status_string)(status)) };
        text.to_string_lossy().into_owned()
    }

    fn read_version(&self) -> Version {
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: three valid places to write to.
        unsafe { (self.ucp_get_version)(&mut major, &mut minor, &mut release) };
        Version { major, minor, release }
    }
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").field("version", &self.version).finish_non_exhaustive()
    }
}

fn place(directory: Option<&Path>) -> String {
    directory.map_or_else(|| "the system".to_owned(), |path| path.display().to_string())
}

struct OpenLibrary {
    file: String,
    /// Never closed, not even when refused: its constructors have run.
    library: ManuallyDrop<Library>,
}

impl OpenLibrary {
    fn open(directory: Option<&Path>, name: &str) -> Result<Self, LoadError> {
        let path = directory.map_or_else(|| PathBuf::from(name), |directory| directory.join(name));
        let file = path.display().to_string();
        // SAFETY: UCX's constructors only read the environment and install hooks that stay valid, as it is never
        // closed.
        match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => Ok(Self { file, library: ManuallyDrop::new(library) }),
            Err(error) => Err(LoadError::Open { file, reason: error.to_string() }),
        }
    }
}

/// # Safety
/// `T` is the function pointer type of `name`.
unsafe fn symbol<T: Copy>(libraries: &[OpenLibrary; 2], name: &'static str) -> Result<T, LoadError> {
    let open = &libraries[usize::from(!name.starts_with("ucs_"))];
    // SAFETY: the caller gives the right type, and the library is never closed.
    match unsafe { open.library.get::<T>(name.as_bytes()) } {
        Ok(symbol) => Ok(*symbol),
        Err(error) => Err(LoadError::Symbol { file: open.file.clone(), symbol: name, reason: error.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_directory_is_a_clear_error_and_no_obstacle_to_a_later_load() {
        let error = Api::load(Some(Path::new("/nonexistent/ucx"))).expect_err("nothing is there");
        let text = error.to_string();
        assert!(matches!(error, LoadError::Open { .. }), "{text}");
        assert!(text.contains("/nonexistent/ucx/libucs.so.0") && text.contains("libucx0"), "{text}");
        if let Ok(api) = Api::load(None) {
            assert!(api.version.is_served());
            assert_eq!(api.describe(UCS_ERR_BUSY), "Device is busy");
            let again = Api::load(None).expect("the same one");
            assert!(std::ptr::eq(api, again));
            let other = Api::load(Some(Path::new("/elsewhere"))).expect_err("one per process");
            assert!(matches!(other, LoadError::AnotherLoaded { .. }));
        }
    }

    #[test]
    fn versions() {
        let served = |major, minor| Version { major, minor, release: 0 }.is_served();
        assert!(served(1, 13) && served(1, 22));
        assert!(!served(1, 12) && !served(2, 0) && !served(0, 99));
    }
}
