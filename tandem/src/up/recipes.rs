//! What each process of a cluster is started with: its flags, its cores, its device.
use std::path::Path;

use tandem_client::terminal::say;
use tandem_proto::device::DeviceChoice;

use crate::config::up::{Listen, Pinning, Up, has_flag};
use crate::cores::{self, LendingFile};
use crate::doctor::facts::Found;
use crate::doctor::gather;
use crate::gpus;
use crate::launch::{Recipe, Wrappers};

/// The router's flag for ports that nobody chose.
pub const NEXT_FREE_PORT: &str = "--next-free-port";

/// The flags of router and nodes for the token.
pub fn join_token_args(token: &Path) -> Vec<String> {
    flags([("--join-token-file", &token.display().to_string())])
}

/// The first one has the addresses that were asked for, the others any ports of the same hosts.
pub fn router_recipe(config: &Up, joining: &[String], programs: &Path, number: usize) -> Recipe {
    let mut args = flags([("--model", &config.model.display().to_string())]);
    let address = |first: &str| match number {
        0 => first.to_owned(),
        _ => first.rsplit_once(':').map_or_else(|| first.to_owned(), |(host, _)| format!("{host}:0")),
    };
    let ports = [("http", &config.http), ("grpc", &config.grpc)];
    for (name, listen) in ports {
        args.extend(flags([(&*format!("--{name}"), &*address(listen.address()))]));
        if number == 0 && matches!(listen, Listen::From(_)) {
            args.push(format!("{NEXT_FREE_PORT}={name}"));
        }
    }
    // What it has to say to those that still run then, it says before `drain` kills it.
    if !has_flag(&config.router_args, "--drain-ms") {
        args.extend(flags([("--drain-ms", &config.grace.as_millis().to_string())]));
    }
    // Clients spread over the routers, so each has its part of a key's rates.
    if config.routers > 1 && !has_flag(&config.router_args, "--replicas") {
        args.extend(flags([("--replicas", &config.routers.to_string())]));
    }
    args.extend_from_slice(joining);
    args.extend(config.shared_args.iter().chain(&config.router_args).cloned());
    let name = if number == 0 { "router".to_owned() } else { format!("router-{number}") };
    Recipe { name, program: programs.join("tandem-router"), args, cpus: Vec::new() }
}

/// What each node computes on, prefill nodes first.
pub async fn devices_of(config: &Up) -> anyhow::Result<Vec<DeviceChoice>> {
    let facts = match gpus::wants_facts(config.device) {
        true => gather::node(config.ucx_lib_dir.as_deref()).await,
        false => Found::Missing { missing: "nobody asked".to_owned() },
    };
    let spread = gpus::spread(config.device, config.prefill + config.decode, &facts)?;
    if let Some(note) = spread.note {
        say!("tandem: note: {note}");
    }
    Ok(spread.devices)
}

/// Of all nodes, prefill nodes first.
pub fn node_recipes(
    config: &Up,
    cpus: Vec<Vec<usize>>,
    programs: &Path,
    joining: &[String],
    devices: &[DeviceChoice],
) -> Vec<Recipe> {
    let names = |role: &'static str, count| (0..count).map(move |index| (role, format!("{role}-{index}")));
    // The CPUs are split by the number of nodes, whatever their roles.
    let names = names("prefill", config.prefill).chain(names("decode", config.decode));
    let recipe = |(((role, name), cpus), device): (((&str, String), Vec<usize>), &DeviceChoice)| {
        let own = if role == "prefill" { &config.prefill_args } else { &config.decode_args };
        let mut args = [joining, &flags([("--node-id", &name)])].concat();
        // Without a number a node takes one for each core that it is pinned to.
        if let Some(threads) = config.threads {
            args.extend(flags([("--threads", &threads.to_string())]));
        }
        if *device != DeviceChoice::Cpu {
            args.extend(flags([("--device", &device.to_string())]));
        }
        args.extend(config.shared_args.iter().chain(&config.node_args).chain(own).cloned());
        Recipe { name, program: programs.join(format!("tandem-{role}-node")), args, cpus }
    };
    names.zip(cpus).zip(devices).map(recipe).collect()
}

/// Tells nodes that have cores of their own how to lend them.
pub fn lend_cores(config: &Up, nodes: &mut [Recipe]) -> Option<LendingFile> {
    // Who computes on a GPU has cores for little else than to wait for it.
    let on_gpus = nodes.iter().any(|node| node.args.iter().any(|arg| arg == "--device"));
    if on_gpus
        || config.pinning != Pinning::LentCores
        || nodes.len() < 2
        || nodes.iter().any(|node| node.cpus.is_empty())
    {
        return None;
    }
    let file = LendingFile::new();
    match &file {
        Ok(file) => {
            let path = file.path().display().to_string();
            nodes.iter_mut().for_each(|node| node.args.extend(flags([("--lend-cores", &path)])));
        }
        Err(error) => say!("tandem: note: the nodes do not lend each other cores: {error}"),
    }
    file.ok()
}

/// The CPUs of each node; empty lists where nothing is pinned, which is said.
pub fn cores_of(config: &Up, wrappers: Wrappers, nodes: usize) -> Vec<Vec<usize>> {
    let free = vec![Vec::new(); nodes];
    if config.pinning == Pinning::Free {
        return free;
    }
    let available = cores::available();
    match cores::split(&available, nodes) {
        Some(split) if wrappers.affinity => split,
        Some(_) => {
            say!("tandem: note: no `taskset` here: the nodes are not pinned to cores");
            free
        }
        None => {
            say!("tandem: note: {nodes} nodes on {} CPUs: the nodes are not pinned to cores", available.len());
            free
        }
    }
}

/// Names and values, one after the other.
pub fn flags<const N: usize>(pairs: [(&str, &str); N]) -> Vec<String> {
    pairs.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value.to_owned()]).collect()
}

/// Replaces the value of a flag that is there, in either form.
pub fn set_flag(args: &mut [String], flag: &str, value: &str) {
    let with_value = format!("{flag}=");
    let Some(at) = args.iter().position(|arg| arg == flag || arg.starts_with(&with_value)) else { return };
    if args[at] != flag {
        args[at] = with_value + value;
    } else if let Some(old) = args.get_mut(at + 1) {
        value.clone_into(old);
    }
}
