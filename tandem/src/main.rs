//! `tandem`: the user's hands. Starts a local cluster, talks to a running one, and draws its traces.
//!
//! This file is the life of the process and nothing else: configuration, one command, exit code.
//!
//! - [`config`]: the command line and the environment, resolved once.
//! - [`up`]: a local cluster as child processes; [`launch`] starts one of them, [`cores`] splits the CPUs, [`state`] tells
//!   the other commands where the cluster is.
//! - [`generate`] and [`chat`]: the gRPC client.
//! - [`trace`]: fetches a trace; [`waterfall`] draws it (pure).
#![forbid(unsafe_code)]

mod bench;
mod chat;
mod config;
mod cores;
mod generate;
mod launch;
mod state;
mod trace;
mod up;
mod waterfall;

use std::process::ExitCode;

use config::Config;

// One thread on purpose: the kernel ends a child when the *thread* that started it ends (prctl(2), PR_SET_PDEATHSIG).
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Config::from_command_line()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tandem: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(config: anyhow::Result<Config>) -> anyhow::Result<()> {
    match config? {
        Config::Up(up) => up::run(up).await,
        Config::Generate(ask) => generate::run(ask).await,
        Config::Chat(chat) => chat::run(chat).await,
        Config::Trace(trace) => trace::run(trace).await,
    }
}
