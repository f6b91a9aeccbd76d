//! What a node's program does beside being a node, by its first word: `facts`, `kernels`. Both are made for other
//! programs: `tandem doctor`, and the build of an image.
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use crate::facts::FactsArgs;

/// Compiles the kernels for GPUs that need not be here, and prints the files' names: for images of containers.
#[derive(Parser)]
#[command(name = "kernels")]
struct KernelsArgs {
    /// Architecture of the GPUs, such as sm_80 (A100), sm_89 (L40S) or sm_90a (H100, H200). Repeatable
    #[arg(long, required = true)]
    arch: Vec<String>,
    /// Folder for the files. Nodes find them there if TANDEM_KERNELS names it
    #[arg(long)]
    into: PathBuf,
}

/// Does what the process was asked for, if its first word is one of these; ends the process when its flags are wrong.
pub fn done() -> Option<ExitCode> {
    let mut words = std::env::args_os().skip(1).peekable();
    match words.peek()?.to_str()? {
        "facts" => Some(FactsArgs::parse_from(words).print()),
        "kernels" => Some(KernelsArgs::parse_from(words).compile()),
        _ => None,
    }
}

impl KernelsArgs {
    fn compile(&self) -> ExitCode {
        for arch in &self.arch {
            match tandem_cuda::compile::ahead(arch, &self.into) {
                Ok(files) => {
                    let names: String = files.iter().map(|file| format!("{}\n", file.display())).collect();
                    if std::io::stdout().write_all(names.as_bytes()).is_err() {
                        return ExitCode::FAILURE;
                    }
                }
                Err(error) => {
                    eprintln!("error: {error}");
                    return ExitCode::FAILURE;
                }
            }
        }
        ExitCode::SUCCESS
    }
}
