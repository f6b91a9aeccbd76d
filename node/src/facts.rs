//! What this machine has, as a node finds it: for `tandem doctor`, and for `tandem up`, which shares GPUs out. The
//! process that asks is a node's, so the answer is a node's: the same libraries, environment and limits. It prints one
//! JSON object and ends. A driver or a library that crashes takes only this process with it.
//!
//! Next: `tandem/src/doctor.rs`, which reads it.
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use serde::Serialize;
use tandem_cuda::Device;
use tandem_engine::KvDtype;
use tandem_engine::memory::MemoryFiles;
use tandem_engine::ops::choice;
use tandem_engine::ops::simd::{ArithmeticChoice, IsaChoice};
use tandem_kvtransfer::ucx::survey::survey;

use crate::processor;

/// `tandem-decode-node facts`, for programs.
#[derive(Parser)]
#[command(name = "facts")]
pub struct FactsArgs {
    /// Folder of libucp.so.0, instead of the system's.
    #[arg(long)]
    ucx_lib_dir: Option<PathBuf>,
}

#[derive(Serialize)]
struct Facts {
    /// Compute threads of a node that is not told how many.
    threads: usize,
    memory_bytes: Option<u64>,
    memory_available_bytes: Option<u64>,
    kernels: Found<Kernels>,
    ucx: Found<Ucx>,
    cuda: Found<Cuda>,
}

/// It, or why it is not there.
#[derive(Serialize)]
#[serde(untagged)]
enum Found<T> {
    There(T),
    Missing { missing: String },
}

/// The CPU's, with nothing asked for.
#[derive(Serialize)]
struct Kernels {
    isa: &'static str,
    arithmetic: &'static str,
}

#[derive(Serialize)]
struct Ucx {
    version: String,
    transports: Vec<String>,
}

#[derive(Serialize)]
struct Cuda {
    /// The newest CUDA that the driver serves.
    driver: String,
    nvrtc: Found<String>,
    cublaslt: Found<String>,
    cards: Vec<Card>,
}

#[derive(Serialize)]
struct Card {
    number: u32,
    name: String,
    capability: String,
    pci: String,
    memory_bytes: u64,
    /// Why no node can compute on it.
    unusable: Option<String>,
}

impl FactsArgs {
    /// Prints them.
    pub fn print(self) -> ExitCode {
        let facts = self.gather();
        let printed = serde_json::to_string(&facts)
            .map_err(std::io::Error::from)
            .and_then(|text| writeln!(std::io::stdout(), "{text}"));
        match printed {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        }
    }

    fn gather(self) -> Facts {
        let memory = MemoryFiles::default();
        let kernels = choice::choose(IsaChoice::Auto, ArithmeticChoice::Auto, KvDtype::Bf16)
            .map(|isa| Kernels { isa: isa.name(), arithmetic: isa.arithmetic().name() });
        let ucx = survey(self.ucx_lib_dir.as_deref())
            .map(|survey| Ucx { version: survey.version, transports: survey.transports });
        Facts {
            threads: processor::default_threads(),
            memory_bytes: memory.total(),
            memory_available_bytes: memory.available(),
            kernels: kernels.into(),
            ucx: ucx.into(),
            cuda: cuda().into(),
        }
    }
}

fn cuda() -> Result<Cuda, tandem_cuda::CudaError> {
    let driver = tandem_cuda::device::driver()?.to_string();
    let cards = Device::all()?.into_iter().map(|device| Card {
        unusable: device.check_arch().err().map(|error| error.to_string()),
        number: device.number,
        capability: format!("{}.{}", device.capability.0, device.capability.1),
        name: device.name,
        pci: device.pci_id,
        memory_bytes: device.memory_bytes,
    });
    Ok(Cuda {
        driver,
        nvrtc: tandem_cuda::nvrtc_version().into(),
        cublaslt: tandem_cuda::cublaslt_version().into(),
        cards: cards.collect(),
    })
}

impl<T, E: ToString> From<Result<T, E>> for Found<T> {
    fn from(result: Result<T, E>) -> Self {
        match result {
            Ok(found) => Self::There(found),
            Err(why) => Self::Missing { missing: why.to_string() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_says_why() {
        let facts = FactsArgs { ucx_lib_dir: Some("/nonexistent".into()) }.gather();
        let facts = serde_json::to_value(facts).unwrap();
        assert!(facts["threads"].as_u64().unwrap() > 0 && facts["memory_bytes"].as_u64().unwrap() > 0, "{facts}");
        assert!(facts["kernels"]["isa"].is_string(), "{facts}");
        assert!(facts["ucx"]["missing"].as_str().unwrap().contains("/nonexistent"), "{facts}");
    }
}
