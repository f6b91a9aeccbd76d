//! `tandem`: the user's hands. Starts a local cluster, talks to a running one, and draws its traces.
//!
//! This file is the life of the process and nothing else: configuration, one command, exit code. It is a library so
//! that the reference of all programs' flags can be made from the flags themselves ([`command`]).
//!
//! - [`config`]: the command line and the environment, resolved once.
//! - [`up`]: a local cluster as child processes; [`launch`] starts one of them, [`cores`] splits the CPUs, [`gpus`]
//!   shares out GPUs, [`join_token`] is the secret of its nodes.
//! - [`generate`] and [`chat`]: the gRPC client.
//! - [`trace`]: fetches a trace, whose form is in [`span`]; [`waterfall`] draws it (pure). [`explain`]: the choice of
//!   nodes in it.
//! - [`top`]: the cluster as it is now, over the whole terminal.
//! - [`compose`]: writes the docker-compose file of a host. [`doctor`]: what this machine has and what it lacks.
//! - [`shell`]: completions and man pages, made from the flags.
//!
//! `tandem bench` is [`tandem_bench`]. How a router is reached, where the local cluster is and where one prints is
//! [`tandem_client`]'s.
#![forbid(unsafe_code)]
// They panic where nobody reads: `tandem_client::terminal` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod chat;
mod compose;
mod config;
mod cores;
mod doctor;
mod explain;
mod generate;
mod gpus;
mod join_token;
mod launch;
mod shell;
mod span;
mod top;
mod trace;
mod up;
mod waterfall;

use std::process::ExitCode;

use anyhow::Context;
use tandem_client::terminal::{OUTPUT_CLOSED_STATUS, OutputClosed, say};
use tokio::runtime::{Builder, Runtime};

use config::Config;

/// The command line, as clap has it.
pub fn command() -> clap::Command {
    config::command()
}

/// Does what the command line says.
pub fn run_process() -> ExitCode {
    let outcome = Config::from_command_line().and_then(|config| {
        let runtime = runtime(&config).context("no runtime")?;
        runtime.block_on(run(config))
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<OutputClosed>() => ExitCode::from(OUTPUT_CLOSED_STATUS),
        Err(error) => {
            say!("tandem: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn runtime(config: &Config) -> std::io::Result<Runtime> {
    let threads = if let Config::Bench(bench) = config { bench.threads() } else { None };
    let mut builder = match threads {
        Some(threads) => {
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(threads);
            builder
        }
        // One thread on purpose: the kernel ends a child when the *thread* that started it ends (prctl(2),
        // PR_SET_PDEATHSIG).
        None => Builder::new_current_thread(),
    };
    builder.enable_all().build()
}

async fn run(config: Config) -> anyhow::Result<()> {
    match config {
        Config::Up(up) => up::run(up).await,
        Config::Generate(ask) => generate::run(ask).await,
        Config::Chat(chat) => chat::run(chat).await,
        Config::Trace(trace) => trace::run(trace).await,
        Config::Explain(explain) => explain::run(explain).await,
        Config::Top(top) => top::run(top).await,
        Config::Bench(bench) => tandem_bench::run(bench).await,
        Config::Compose(compose) => compose::run(&compose),
        Config::Doctor(doctor) => doctor::run(doctor).await,
        Config::Completions(shell) => shell::completions(shell),
        Config::Man(dir) => shell::man(&dir),
    }
}
