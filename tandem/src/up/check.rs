//! `tandem up --check`: what the cluster would be started with, each program asked for its own part. And a word on
//! flags of the file that would have no effect, since `tandem up` gives its children flags of its own.
use std::process::Stdio;

use anyhow::{Context, bail, ensure};
use tandem_client::terminal::print;
use tandem_config::{DECODE, PREFILL, Program, ROUTER};
use tokio::process::Command;

use super::programs_dir;
use super::recipes::{flags, join_token_args, node_recipes, router_recipe};
use crate::config::up::{Pinning, Up, has_flag};
use crate::launch::Recipe;

/// Prints all values with their sources, the cluster's first.
///
/// # Errors
/// One of the programs refuses its part.
pub async fn check(config: &Up) -> anyhow::Result<()> {
    print(&config.sources.as_ref().map(|sources| sources.report()).unwrap_or_default())?;
    for (_, recipe) in recipes(config)? {
        let mut command = Command::new(&recipe.program);
        let child = command.args(&recipe.args).arg("--check").stdin(Stdio::null()).kill_on_drop(true).status();
        let status = child.await.with_context(|| format!("cannot start {}", recipe.program.display()))?;
        ensure!(status.success(), "{} would not start ({status})", recipe.name);
    }
    Ok(())
}

/// # Errors
/// The file has a flag in a child's table that the child gets from `tandem up`.
pub fn refuse_overruled(config: &Up) -> anyhow::Result<()> {
    let Some(sources) = config.sources.as_ref().filter(|sources| sources.path().is_some()) else { return Ok(()) };
    let lends = config.pinning == Pinning::LentCores;
    for (program, recipe) in recipes(config)? {
        for (flag, place) in sources.flags_for(&program) {
            if has_flag(&recipe.args, &format!("--{flag}")) || (lends && flag == "lend-cores") {
                bail!(
                    "{place}: `tandem up` gives --{flag} to {} itself: leave it out, or put it into [up]",
                    program.name
                );
            }
        }
    }
    Ok(())
}

/// One process of each kind that there would be, as far as it is known before one of them runs.
fn recipes(config: &Up) -> anyhow::Result<Vec<(Program, Recipe)>> {
    let programs = programs_dir()?;
    let mut joining = config.join_token_file.as_deref().map(join_token_args).unwrap_or_default();
    let router = router_recipe(config, &joining, &programs, 0);
    joining.extend(flags([("--router", &format!("http://{}", config.grpc.address()))]));
    let devices = vec![config.device; config.prefill + config.decode];
    let unpinned = vec![Vec::new(); devices.len()];
    let mut nodes = node_recipes(config, unpinned, &programs, &joining, &devices);
    let decode = nodes.pop().map(|recipe| (DECODE, recipe));
    let prefill = (config.prefill > 0).then(|| (PREFILL, nodes.swap_remove(0)));
    Ok([Some((ROUTER, router)), prefill, decode].into_iter().flatten().collect())
}
