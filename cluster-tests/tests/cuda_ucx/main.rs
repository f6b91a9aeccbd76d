//! KV from GPU to GPU by UCX's `cuda_ipc`, without the host's memory in between. The GPUs are emulated
//! (`engine/cuda/emu`), the programs do not know; UCX is PyPI's, which was built with CUDA (`deploy/gpu/ucx.sh`).
//! With `TANDEM_GPU=real` they are the machine's: both processes take the first one where there is no second.
//!
//! - `library`: two processes that have a GPU's memory and a transport each, and nothing else (`peer`).
//! - `cluster`: a prefill and a decode node on a GPU each, behind a router.
//!
//! Without a C++ compiler there is no emulated driver, and where that UCX cannot be fetched there is none: these tests
//! are then skipped with a word. With `TANDEM_REQUIRE_UCX_CUDA=1` they fail.
mod cluster;
mod library;
mod peer;

use std::path::{Path, PathBuf};
use std::process::Command;

use tandem_cuda::Device;

/// What processes with GPUs and such a UCX need.
struct Machine {
    environment: Vec<(String, String)>,
    ucx: PathBuf,
    /// The GPU of the second process.
    second: u32,
}

impl Machine {
    /// With GPUs for two processes. `None`: the test is to be skipped.
    fn for_two() -> Option<Self> {
        match Self::found() {
            Ok(machine) => Some(machine),
            Err(reason) => {
                let required = std::env::var_os("TANDEM_REQUIRE_UCX_CUDA").is_some_and(|value| value == "1");
                assert!(!required, "TANDEM_REQUIRE_UCX_CUDA=1, and {reason}");
                eprintln!("SKIP: {reason}");
                None
            }
        }
    }

    fn found() -> Result<Self, String> {
        let mut environment = vec![
            // Which of its protocols UCX takes for what.
            ("UCX_PROTO_INFO".to_owned(), "y".to_owned()),
        ];
        let second = if std::env::var_os("TANDEM_GPU").is_some_and(|value| value == "real") {
            u32::from(Device::all().map_err(|error| error.to_string())?.len() > 1)
        } else {
            let driver = tandem_cuda_emu::library_dir().ok_or("no emulated CUDA driver was built, which needs g++")?;
            environment.push(("LD_LIBRARY_PATH".to_owned(), driver.display().to_string()));
            environment.push(("EMU_DEVICES".to_owned(), "2".to_owned()));
            1
        };
        Ok(Self { environment, ucx: ucx_with_cuda()?, second })
    }
}

/// Its folder: `TANDEM_TEST_UCX_CUDA`, or where it is fetched to.
fn ucx_with_cuda() -> Result<PathBuf, String> {
    if let Some(folder) = std::env::var_os("TANDEM_TEST_UCX_CUDA") {
        return Ok(folder.into());
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/gpu/ucx.sh");
    let run = |flags: &[&str]| {
        let output =
            Command::new(&script).args(flags).output().map_err(|error| format!("{}: {error}", script.display()))?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let errors = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        output.status.success().then_some(said).ok_or(format!("UCX with CUDA cannot be fetched: {errors}"))
    };
    run(&[])?;
    run(&["--path"]).map(PathBuf::from)
}

/// The line by which a receiver's UCX says that it copies out of the sender's GPU memory by itself, and nobody else.
fn is_zero_copy(line: &str) -> bool {
    line.contains("| zero-copy read from remote") && line.contains("cuda_ipc/cuda")
}
