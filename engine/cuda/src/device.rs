//! Devices as the driver lists them, before anything is done with one. Whether there is a driver at all is asked first:
//! the bindings open its library at first use and panic where there is none.
use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute as Attribute};

use crate::driver::{self, Failure, Status};
use crate::error::{CudaError, gib};

/// The oldest driver that works: the first whose functions tell their parameters' sizes (CUDA 12.4).
const OLDEST_DRIVER: i32 = 12_040;
/// The oldest architecture: the first with bf16 tensor cores and asynchronous copies (A100).
const OLDEST_ARCH: (i32, i32) = (8, 0);

/// Kernels of this device see a network card's writes in order.
const ORDERED_FOR_OWNER: c_int = sys::CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as c_int;
const FLUSH_BY_CALL: c_int =
    sys::CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as c_int;

/// Room for a card's name.
const NAME_BYTES: usize = 256;

/// A card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The driver's number for it, after `CUDA_VISIBLE_DEVICES`.
    pub number: u32,
    /// As its maker calls it.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// `0000:65:00.0`: what other tools call it.
    pub pci_id: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// What network cards write reaches its kernels in order only by a call of the driver, and there is such a call.
    pub(crate) needs_flush: bool,
    /// The driver's handle.
    pub(crate) handle: CUdevice,
}

/// Version of the driver, as CUDA counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverVersion(i32);

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// Opens the driver.
///
/// # Errors
/// [`CudaError::Unavailable`] when there is none, it finds no card, or it is too old.
pub fn driver() -> Result<DriverVersion, CudaError> {
    // SAFETY: opens a shared library by its system name and runs its initializers, which the driver's may be trusted
    // with: it is what this program was told to use.
    if !unsafe { sys::is_culib_present() } {
        let why = "no NVIDIA driver: libcuda.so.1 is not on this machine (or not in this container: start it with \
                   --gpus all)";
        return Err(CudaError::Unavailable(why.into()));
    }
    // SAFETY: takes no flag but 0, and may be called again.
    unsafe { driver::cuInit(0) }.map_err(|failure| {
        CudaError::Unavailable(match failure.is(Status::NO_DEVICE) {
            true => "the NVIDIA driver finds no GPU (is CUDA_VISIBLE_DEVICES empty?)".into(),
            false => format!("the NVIDIA driver does not start: {}", CudaError::from(failure)),
        })
    })?;
    let mut version = 0;
    // SAFETY: writes the one integer.
    unsafe { driver::cuDriverGetVersion(&mut version) }?;
    let (version, oldest) = (DriverVersion(version), DriverVersion(OLDEST_DRIVER));
    match version < oldest {
        true => Err(CudaError::Unavailable(format!(
            "the NVIDIA driver supports CUDA {version}, and {oldest} is the oldest that works: update the driver"
        ))),
        false => Ok(version),
    }
}

impl Device {
    /// All that the driver shows to this process.
    ///
    /// # Errors
    /// As [`driver`].
    pub fn all() -> Result<Vec<Self>, CudaError> {
        driver()?;
        let mut count = 0;
        // SAFETY: writes the one integer.
        unsafe { driver::cuDeviceGetCount(&mut count) }?;
        (0..u32::try_from(count).unwrap_or(0)).map(Self::read).collect()
    }

    /// The one of this number.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] when there is none of this number, or its architecture is too old; as [`driver`].
    pub fn numbered(number: u32) -> Result<Self, CudaError> {
        let all = Self::all()?;
        let count = all.len();
        let device = all.into_iter().find(|device| device.number == number).ok_or_else(|| {
            CudaError::Unavailable(format!("there is no GPU {number}: the NVIDIA driver shows {count} of them"))
        })?;
        device.check_arch().map(|()| device)
    }

    /// Whether its architecture has what the kernels are made of.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] when it has not.
    pub fn check_arch(&self) -> Result<(), CudaError> {
        let (Self { number, name, capability, .. }, oldest) = (self, OLDEST_ARCH);
        match *capability < oldest {
            true => Err(CudaError::Unavailable(format!(
                "GPU {number} ({name}) has compute capability {}.{}, and {}.{} is the oldest that works",
                capability.0, capability.1, oldest.0, oldest.1
            ))),
            false => Ok(()),
        }
    }

    /// The name of its architecture for compilers: `sm_80`; of Hopper's the one with all of its instructions, `sm_90a`.
    pub fn arch(&self) -> String {
        let (major, minor) = self.capability;
        format!("sm_{major}{minor}{}", if (major, minor) == (9, 0) { "a" } else { "" })
    }

    fn read(number: u32) -> Result<Self, CudaError> {
        let ordinal = c_int::try_from(number).unwrap_or(c_int::MAX);
        let mut handle = 0;
        // SAFETY: writes the one handle.
        unsafe { driver::cuDeviceGet(&mut handle, ordinal) }?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: the handle is one that `cuDeviceGet` gave; writes the one integer.
            unsafe { driver::cuDeviceGetAttribute(&mut value, attribute, handle) }.map(|()| value)
        };
        let mut memory = 0;
        // SAFETY: as above.
        unsafe { driver::cuDeviceTotalMem_v2(&mut memory, handle) }?;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(Self {
            number,
            // SAFETY: writes at most so many bytes of it, and a zero behind.
            name: text::<NAME_BYTES>(|text, length| unsafe { driver::cuDeviceGetName(text, length, handle) })?,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            // SAFETY: as above.
            pci_id: text::<16>(|text, length| unsafe { driver::cuDeviceGetPCIBusId(text, length, handle) })?,
            memory_bytes: memory as u64,
            multiprocessors: u32::try_from(multiprocessors).unwrap_or(1),
            needs_flush: attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)? < ORDERED_FOR_OWNER
                && attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)? & FLUSH_BY_CALL != 0,
            handle,
        })
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, name, capability, pci_id, memory_bytes, .. } = self;
        write!(f, "GPU {number}: {name} at {pci_id}, sm_{}{}, {}", capability.0, capability.1, gib(*memory_bytes))
    }
}

/// A text of at most `BYTES - 1` bytes that the driver writes.
fn text<const BYTES: usize>(write: impl Fn(*mut c_char, c_int) -> Result<(), Failure>) -> Result<String, CudaError> {
    let mut text: [c_char; BYTES] = [0; BYTES];
    // The last byte stays zero.
    write(text.as_mut_ptr(), BYTES as c_int - 1)?;
    // SAFETY: the array ends in a zero, and lives until the text is copied.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(capability: (i32, i32)) -> Device {
        Device {
            number: 1,
            name: "Test".into(),
            capability,
            pci_id: "0000:01:00.0".into(),
            memory_bytes: 24 << 30,
            multiprocessors: 84,
            needs_flush: false,
            handle: 1,
        }
    }

    #[test]
    fn old_architectures_are_refused_by_name() {
        let why = device((7, 5)).check_arch().expect_err("too old").to_string();
        assert!(why.contains("GPU 1 (Test)") && why.contains("7.5") && why.contains("8.0"), "{why}");
        assert_eq!(device((8, 0)).check_arch(), Ok(()));
        assert_eq!([device((9, 0)).arch(), device((8, 6)).arch()], ["sm_90a", "sm_86"]);
        assert_eq!(device((12, 0)).to_string(), "GPU 1: Test at 0000:01:00.0, sm_120, 24.00 GiB");
    }

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(DriverVersion(12_040).to_string(), "12.4");
        assert!(DriverVersion(13_000) > DriverVersion(OLDEST_DRIVER));
    }
}
