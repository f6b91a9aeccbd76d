//! What a launch is: a value that somebody with a stream queues. And the checks that all launches share.
use std::fmt;

/// Arguments of a kernel at most.
pub const MOST_ARGUMENTS: usize = 24;

/// Device memory that a kernel gets: an address and the bytes behind it that it may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mem {
    /// Device address of the first byte.
    pub address: u64,
    /// Length.
    pub bytes: usize,
}

impl Mem {
    /// `bytes` bytes at `address`.
    pub const fn new(address: u64, bytes: usize) -> Self {
        Self { address, bytes }
    }
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// A pointer; 0 is none.
    Ptr(u64),
    /// `unsigned int`.
    U32(u32),
    /// `float`.
    F32(f32),
    /// `unsigned long long`.
    U64(u64),
}

impl Arg {
    /// Bytes of the parameter, as `cuFuncGetParamInfo` tells them.
    pub fn bytes(self) -> usize {
        match self {
            Self::Ptr(_) | Self::U64(_) => 8,
            Self::U32(_) | Self::F32(_) => 4,
        }
    }

    /// Its bytes at the beginning of a little-endian word.
    pub fn word(self) -> u64 {
        match self {
            Self::Ptr(word) | Self::U64(word) => word,
            Self::U32(value) => value.into(),
            Self::F32(value) => value.to_bits().into(),
        }
    }
}

/// At most `bytes` of a memory from `at` on.
pub(crate) fn part(mem: Mem, at: usize, bytes: usize) -> Mem {
    Mem::new(mem.address + at as u64, bytes.min(mem.bytes.saturating_sub(at)))
}

/// One launch of one kernel. With no blocks there is nothing to do, and it must not be queued.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
    args: [Arg; MOST_ARGUMENTS],
    count: usize,
}

impl Launch {
    pub(super) fn new(kernel: &'static str, grid: [u32; 3], block: u32, args: &[Arg]) -> Self {
        let mut all = [Arg::U32(0); MOST_ARGUMENTS];
        all[..args.len()].copy_from_slice(args);
        Self { kernel, grid, block, shared_bytes: 0, args: all, count: args.len() }
    }

    pub(super) fn with_shared(self, shared_bytes: u32) -> Self {
        Self { shared_bytes, ..self }
    }

    /// The arguments.
    pub fn args(&self) -> &[Arg] {
        &self.args[..self.count]
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.grid.contains(&0)
    }
}

/// Why a launch is none: a bug of the caller, or a model that these kernels do not compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The kernel or group of kernels.
    pub kernel: &'static str,
    /// What does not fit.
    pub why: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}: {}", self.kernel, self.why)
    }
}

impl std::error::Error for Refused {}

/// Checks of one launch's arguments.
pub(crate) struct Checks(pub &'static str);

impl Checks {
    /// The address of `elements` elements of `size` bytes at `memory`.
    pub fn array(&self, what: &str, memory: Mem, elements: usize, size: usize) -> Result<Arg, Refused> {
        let aligned = memory.address != 0 && memory.address.is_multiple_of(size.min(16) as u64);
        match elements.checked_mul(size) {
            Some(bytes) if bytes <= memory.bytes && aligned => Ok(Arg::Ptr(memory.address)),
            _ => self.refuse(format!("{what} needs {elements} × {size} bytes, and is {memory:x?}")),
        }
    }

    /// The same of what may be absent.
    pub fn optional(&self, what: &str, memory: Option<Mem>, elements: usize, size: usize) -> Result<Arg, Refused> {
        memory.map_or(Ok(Arg::Ptr(0)), |memory| self.array(what, memory, elements, size))
    }

    /// The same of rows that are read or written 16 bytes at a time.
    pub fn wide(&self, what: &str, memory: Mem, elements: usize, size: usize) -> Result<Arg, Refused> {
        self.require(memory.address.is_multiple_of(16), || format!("{what} at {:#x} is not aligned", memory.address))?;
        self.array(what, memory, elements, size)
    }

    /// A size as the kernels take it.
    pub fn size(&self, what: &str, value: usize) -> Result<u32, Refused> {
        match u32::try_from(value) {
            Ok(value) if value <= i32::MAX.cast_unsigned() => Ok(value),
            _ => self.refuse(format!("{what} of {value} is too much")),
        }
    }

    /// A product of sizes.
    pub fn area(&self, what: &str, sizes: &[usize]) -> Result<usize, Refused> {
        let area = sizes.iter().try_fold(1usize, |area, &size| area.checked_mul(size));
        area.map_or_else(|| self.refuse(format!("{what} of {sizes:?} is too much")), Ok)
    }

    /// What must hold.
    pub fn require(&self, holds: bool, why: impl FnOnce() -> String) -> Result<(), Refused> {
        if holds { Ok(()) } else { self.refuse(why()) }
    }

    /// Refuses.
    pub fn refuse<T>(&self, why: String) -> Result<T, Refused> {
        Err(Refused { kernel: self.0, why })
    }
}
