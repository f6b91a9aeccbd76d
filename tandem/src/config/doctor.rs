//! The command line of `tandem doctor`, resolved.
//!
//! Next: [`crate::doctor`], which looks and judges.
use std::path::PathBuf;

use clap::Args;
use tandem_proto::device::DeviceChoice;

use super::up::default_model;

/// What to look at.
pub struct Doctor {
    /// What nodes here are to compute on.
    pub device: DeviceChoice,
    /// The model that they are to serve.
    pub model: PathBuf,
    /// Where libucp is; `None`: where the dynamic linker finds it.
    pub ucx_lib_dir: Option<PathBuf>,
    /// How the report is printed.
    pub form: Form,
}

/// How a report is printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Say what this machine has for Tandem, and what it lacks: CPU, memory, UCX, GPUs, model. Exits with 0 when nodes can
/// serve here, with 1 when something that they need is not there
#[derive(Args)]
pub struct DoctorArgs {
    /// What nodes are to compute on: with a GPU, what it needs is asked for as well
    #[arg(long, value_name = "cpu|cuda|cuda:N|auto", default_value_t)]
    device: DeviceChoice,
    /// GGUF file or safetensors directory [default: the model of `make setup` in the cache directory]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// Where `make setup` puts the model [default: ~/.cache/tandem]
    #[arg(long, env = "TANDEM_CACHE", value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Directory of libucp.so.0 [default: the system's]
    #[arg(long, value_name = "DIR")]
    ucx_lib_dir: Option<PathBuf>,
    /// One JSON object: `facts` and `findings`
    #[arg(long)]
    json: bool,
}

impl DoctorArgs {
    /// # Errors
    /// Nobody says where the model is.
    pub fn resolve(self) -> anyhow::Result<Doctor> {
        Ok(Doctor {
            device: self.device,
            model: default_model(self.model, self.cache)?,
            ucx_lib_dir: self.ucx_lib_dir,
            form: if self.json { Form::Json } else { Form::Text },
        })
    }
}
