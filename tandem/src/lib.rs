//! `tandem`: the user's hands. Starts a local cluster, talks to a running one, and draws its traces.
//!
//! This file is the life of the process and nothing else: configuration, one command, exit code. It is a library so
//! that the reference of all programs' flags can be made from the flags themselves ([`command`]).
//!
//! - [`config`]: the command line and the environment, resolved once.
//! - [`up`]: a local cluster as child processes; [`launch`] starts one of them, [`cores`] splits the CPUs, [`gpus`]
//!   shares out GPUs, [`state`] tells the other commands where the cluster is, [`join_token`] is the secret of its
//!   nodes.
//! - [`connect`]: how every command reaches a router: key, headers, TLS.
//! - [`generate`] and [`chat`]: the gRPC client; [`wrong_port`]: its hint when a port speaks HTTP/1.1.
//! - [`trace`]: fetches a trace, whose form is in [`span`]; [`waterfall`] draws it (pure). [`explain`]: the choice of
//!   nodes in it.
//! - [`top`]: the cluster as it is now, over the whole terminal.
//! - [`bench`]: the load generator, and its report.
//! - [`compose`]: writes the docker-compose file of a host. [`doctor`]: what this machine has and what it lacks.
//! - [`shell`]: completions and man pages, made from the flags.
//! - [`sse`]: server-sent events out of bytes (pure).
//! - [`terminal`]: standard output and standard error, whose readers may end first.
#![forbid(unsafe_code)]
// They panic where nobody reads: `terminal` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod chat;
mod compose;
mod config;
mod connect;
mod cores;
mod doctor;
mod explain;
mod generate;
mod gpus;
mod join_token;
mod launch;
mod shell;
mod span;
mod sse;
mod state;
mod terminal;
mod top;
mod trace;
mod up;
mod waterfall;
mod wrong_port;

use std::process::ExitCode;

use anyhow::Context;
use tokio::runtime::{Builder, Runtime};

use bench::job::Bench;
use config::Config;
use terminal::{OUTPUT_CLOSED_STATUS, OutputClosed, say};

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
    let mut builder = match config {
        Config::Bench(Bench::Run(run)) => {
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(run.threads);
            builder
        }
        // One thread on purpose: the kernel ends a child when the *thread* that started it ends (prctl(2),
        // PR_SET_PDEATHSIG).
        _ => Builder::new_current_thread(),
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
        Config::Bench(bench) => bench::run(bench).await,
        Config::Compose(compose) => compose::run(&compose),
        Config::Doctor(doctor) => doctor::run(doctor).await,
        Config::Completions(shell) => shell::completions(shell),
        Config::Man(dir) => shell::man(&dir),
    }
}
