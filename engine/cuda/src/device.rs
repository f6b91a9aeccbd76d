//! Devices as the driver lists them, before anything is done with one. Whether there is a driver at all is asked first:
//! the bindings open its library at first use and panic where there is none.
use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use cudarc::driver::{result, sys::CUdevice};

use crate::error::{CudaError, check, failed, gib};

/// The oldest driver that works: the first whose functions tell their parameters' sizes (CUDA 12.4).
const OLDEST_DRIVER: i32 = 12_040;
/// The oldest architecture: the first with bf16 tensor cores and asynchronous copies (A100).
const OLDEST_ARCH: (i32, i32) = (8, 0);

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
    result::init().map_err(|error| match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            CudaError::Unavailable("the NVIDIA driver finds no GPU (is CUDA_VISIBLE_DEVICES empty?)".into())
        }
        _ => CudaError::Unavailable(format!("the NVIDIA driver does not start: {}", failed("cuInit", error))),
    })?;
    let mut version = 0;
    // SAFETY: writes the one integer.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
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
        let count = result::device::get_count().map_err(|error| failed("cuDeviceGetCount", error))?;
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
        let handle = result::device::get(ordinal).map_err(|error| failed("cuDeviceGet", error))?;
        let attribute = |attribute| {
            // SAFETY: the handle is one that `cuDeviceGet` gave.
            unsafe { result::device::get_attribute(handle, attribute) }
                .map_err(|error| failed("cuDeviceGetAttribute", error))
        };
        let name = result::device::get_name(handle).map_err(|error| failed("cuDeviceGetName", error))?;
        // SAFETY: as above.
        let memory = unsafe { result::device::total_mem(handle) };
        let memory = memory.map_err(|error| failed("cuDeviceTotalMem", error))?;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(Self {
            number,
            name,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            pci_id: pci_id(handle)?,
            memory_bytes: memory as u64,
            multiprocessors: u32::try_from(multiprocessors).unwrap_or(1),
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

fn pci_id(handle: CUdevice) -> Result<String, CudaError> {
    // `dddd:bb:dd.f` and a zero, by the driver's reference.
    let mut text: [c_char; 16] = [0; 16];
    let length = text.len() as c_int - 1;
    // SAFETY: writes at most `length` bytes, so that the last stays zero.
    check("cuDeviceGetPCIBusId", unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), length, handle) })?;
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
