//! What was seen of a machine, as plain data. The part that a node sees is what `tandem-decode-node facts` prints
//! (`node/src/facts.rs` has the same fields).
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// As its nodes find it.
    pub node: Found<NodeFacts>,
    /// Version of NVIDIA's kernel module, where it is loaded.
    pub nvidia_module: Option<String>,
    /// Links between GPUs, as `nvidia-smi topo -m` names them; empty with less than two.
    pub gpu_links: Vec<GpuLink>,
    /// RDMA devices.
    pub rdma_devices: Vec<String>,
    /// Whether the driver of GDRCopy is loaded.
    pub gdrcopy: bool,
    /// When the kernel gives memory huge pages: "always", "madvise" or "never".
    pub transparent_huge_pages: Option<String>,
    /// Bytes of memory that a process may lock.
    pub memlock: MemoryLock,
    /// Free bytes of /dev/shm.
    pub shared_memory_bytes: Option<u64>,
    /// What is to be served.
    pub model: Model,
}

/// It, or why it is not there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Found<T> {
    /// It.
    There(T),
    /// Why not.
    Missing {
        /// A sentence.
        missing: String,
    },
}

impl<T> Found<T> {
    /// It, if it is there.
    pub fn there(&self) -> Option<&T> {
        match self {
            Self::There(found) => Some(found),
            Self::Missing { .. } => None,
        }
    }
}

/// What a node prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// Compute threads of a node that has all CPUs.
    pub threads: usize,
    /// Memory of the machine, or of the control group if that is less.
    pub memory_bytes: Option<u64>,
    /// What of it is free.
    pub memory_available_bytes: Option<u64>,
    /// The CPU kernels that would be taken.
    pub kernels: Found<Kernels>,
    /// What moves KV.
    pub ucx: Found<Ucx>,
    /// GPUs.
    pub cuda: Found<Cuda>,
}

/// CPU kernels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernels {
    /// Their name.
    pub isa: String,
    /// The name of their order of additions.
    pub arithmetic: String,
}

/// A UCX that can be opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ucx {
    /// Of the library.
    pub version: String,
    /// What it can open here.
    pub transports: Vec<String>,
}

/// A driver with its cards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cuda {
    /// The newest CUDA that it serves.
    pub driver: String,
    /// Version of the compiler of kernels.
    pub nvrtc: Found<String>,
    /// Version of the library of large products.
    pub cublaslt: Found<String>,
    /// In the driver's order.
    pub cards: Vec<Card>,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// N of `cuda:N`.
    pub number: u32,
    /// As its maker calls it.
    pub name: String,
    /// Compute capability: "9.0".
    pub capability: String,
    /// PCI address.
    pub pci: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// Why no node can compute on it.
    pub unusable: Option<String>,
}

/// How two GPUs are joined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuLink {
    /// Their numbers.
    pub between: (usize, usize),
    /// "NV18", "PIX", "SYS".
    pub link: String,
}

/// The limit of locked memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryLock {
    /// None.
    Unlimited,
    /// So many bytes.
    Bytes(u64),
    /// The system does not say.
    Unknown,
}

/// A model's file or directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Model {
    /// Where it is looked for.
    pub path: PathBuf,
    /// Whether something is there.
    pub exists: bool,
}
