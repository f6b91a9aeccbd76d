//! `tandem up`: routers and their nodes as child processes, from start to drain.
//!
//! One owner: [`run`] holds all children. Next: `recipes.rs`, what each of them is started with; [`crate::launch`], the
//! start of one of them; `check.rs`, which starts none.
mod check;
mod recipes;

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::future::{join_all, select_all};
use tandem_client::connect::with_scheme;
use tandem_client::state::{self, State};
use tandem_client::terminal::{print, say};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep, timeout_at};

use crate::config::up::{Listen, OnDeath, Up, values};
use crate::cores::{self, LendingFile};
use crate::join_token::JoinToken;
use crate::launch::{Member, Recipe, Wrappers, check_writable};
use recipes::{
    NEXT_FREE_PORT, cores_of, devices_of, flags, join_token_args, lend_cores, node_recipes, router_recipe, set_flag,
};

/// What a router needs after its drain, the grace: a second to tell clients that their answers end, one for the last
/// bytes, and some for the rest of its end.
const LAST_WORDS: Duration = Duration::from_secs(4);
/// Between two looks at /health while the nodes register.
const HEALTH_INTERVAL: Duration = Duration::from_millis(50);
/// Between the death of a child and its restart, doubled at every failure up to the second one.
const RESTART_DELAYS: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));

/// Starts the cluster, keeps it until a signal, drains it.
///
/// # Errors
/// Another cluster has the state file, a process does not start, or the router dies and may not be restarted.
pub async fn run(config: Up) -> anyhow::Result<()> {
    check::refuse_overruled(&config)?;
    if config.check {
        return check::check(&config).await;
    }
    let mut stop = Stop::new()?;
    // Held to the last line, past the end of the children.
    let claim = state::claim(&config.state)?;
    let join_token = JoinToken::of_cluster(&config.state, config.join_token_file.as_deref())?;
    let mut cluster = tokio::select! {
        cluster = Cluster::start(&config, &join_token) => cluster?,
        // Dropped children are killed.
        () = stop.asked() => bail!("stopped before the cluster was ready"),
    };
    let published = claim.publish(&cluster.state())?;
    cluster.announce()?;
    let outcome = tokio::select! {
        outcome = cluster.supervise() => outcome,
        () = stop.asked() => Ok(()),
    };
    drop(published);
    say!("tandem: stopping");
    tokio::select! {
        () = cluster.drain() => {}
        () = stop.asked() => cluster.kill().await,
    }
    outcome
}

/// The signals that end the cluster.
struct Stop {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Stop {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hang_up.recv() => {}
        }
    }
}

struct Cluster<'a> {
    config: &'a Up,
    join_token: &'a JoinToken,
    wrappers: Wrappers,
    /// Of each router that is there, in the order of `members`. The state file names the first one.
    routers: Vec<Addresses>,
    /// The routers, then the nodes.
    members: Vec<Member>,
    /// For nodes that are started again, too.
    _lending: Option<LendingFile>,
    /// Whether nodes are in each other's way on the same cores.
    crowded: bool,
}

/// A router's.
struct Addresses {
    http: String,
    grpc: String,
    /// Where it shows its live page: at the admin port, or HTTP's.
    page: String,
    /// Where nodes join: gRPC's port, or one of their own.
    join: String,
}

impl Addresses {
    fn of(router: &Member) -> anyhow::Result<Self> {
        let ready = |key| router.ready.get(key).map(with_scheme);
        let (http, grpc) = (ready("http")?, ready("grpc")?);
        let page = ready("admin").unwrap_or_else(|_| http.clone());
        let join = ready("nodes").unwrap_or_else(|_| grpc.clone());
        Ok(Self { http, grpc, page, join })
    }
}

impl<'a> Cluster<'a> {
    /// Routers first, then all nodes at once, then /health.
    async fn start(config: &'a Up, join_token: &'a JoinToken) -> anyhow::Result<Self> {
        std::fs::create_dir_all(&config.logs).with_context(|| format!("cannot make {}", config.logs.display()))?;
        check_writable(&config.logs).with_context(|| {
            format!("no log can be written in {}: make room, or give --log-dir DIR", config.logs.display())
        })?;
        let wrappers = Wrappers::find();
        say!("tandem: logs in {}", config.logs.display());
        if !wrappers.death_signal {
            say!("tandem: note: no `setpriv --pdeathsig` here: a kill -9 of this process leaves its children behind");
        }
        let programs = programs_dir()?;
        let devices = devices_of(config).await?;
        let launch = async |recipe: Recipe| recipe.launch(wrappers, &config.logs, config.start_timeout).await;
        let mut joining = join_token_args(join_token.path());
        let recipes = (0..config.routers).map(|number| router_recipe(config, &joining, &programs, number));
        let mut members = Vec::new();
        for router in join_all(recipes.map(&launch)).await {
            members.push(router?);
        }
        let routers = members.iter().map(Addresses::of).collect::<anyhow::Result<Vec<_>>>()?;
        routers.iter().for_each(|router| joining.extend(flags([("--router", &router.join)])));
        let cpus = cores_of(config, wrappers, devices.len());
        let mut nodes = node_recipes(config, cpus, &programs, &joining, &devices);
        let lending = lend_cores(config, &mut nodes);
        let nodes = join_all(nodes.into_iter().map(&launch)).await;
        for node in nodes {
            members.push(node?);
        }
        let mut cluster = Self { config, join_token, wrappers, routers, members, _lending: lending, crowded: false };
        cluster.crowded = nodes_crowd(&cluster.healthy().await?);
        Ok(cluster)
    }

    /// Waits until the routers can serve, or a child dies. Returns what the first one has of its nodes.
    async fn healthy(&mut self) -> anyhow::Result<serde_json::Value> {
        let deadline = Instant::now() + self.config.start_timeout;
        let (http, nodes) = (self.first().http.clone(), self.nodes().len());
        let all = join_all(self.routers.iter().map(|router| wait_for_health(router.page.clone(), nodes)));
        let healthy = timeout_at(deadline, all);
        tokio::select! {
            (member, status) = next_death(&mut self.members) => {
                let member = &self.members[member];
                bail!("{} died during the start ({status})\n{}", member.recipe.name, member.log.tail());
            }
            healthy = healthy => {
                let registered = healthy.with_context(|| {
                    format!("the nodes did not register with {http} in time\n{}", self.members[0].log.tail())
                })?;
                registered.into_iter().next().context("a cluster has a router")
            }
        }
    }

    /// The router that the other commands talk to.
    fn first(&self) -> &Addresses {
        &self.routers[0]
    }

    fn nodes(&self) -> &[Member] {
        &self.members[self.routers.len()..]
    }

    fn state(&self) -> State {
        let processes = self.members.iter().map(|member| (member.recipe.name.clone(), member.pid().unwrap_or(0)));
        State {
            http: self.first().http.clone(),
            grpc: self.first().grpc.clone(),
            page: self.first().page.clone(),
            pid: std::process::id(),
            processes: processes.collect(),
            logs: self.config.logs.clone(),
            join_token_file: self.join_token.path().to_owned(),
        }
    }

    fn announce(&self) -> anyhow::Result<()> {
        for (router, addresses) in self.members.iter().zip(&self.routers).skip(1) {
            print_router(router, addresses)?;
        }
        for node in self.nodes() {
            print_node(node)?;
        }
        self.warn_of_fallback()?;
        self.tell_of_other_ports();
        say!("tandem: the cluster as it is now: {}/ in a browser, or `tandem top`", self.first().page);
        self.tell_of_local_prompts();
        print(&format!("ready http={} grpc={}\n", self.first().http, self.first().grpc))
    }

    /// The nodes warn, too, but into their logs.
    fn warn_of_fallback(&self) -> anyhow::Result<()> {
        let transport = |pair: &[String]| pair[0] == "--transport" && pair[1] != "auto";
        let asked = self.config.node_args.windows(2).any(transport);
        // Nodes on GPUs say it in one line: few machines have a UCX with CUDA.
        let fallen = |node: &Member| {
            anyhow::Ok(node.ready.get("device")? == "cpu" && !node.ready.get("transport")?.contains("ucx/"))
        };
        if !asked && self.nodes().iter().map(fallen).collect::<Result<Vec<_>, _>>()?.contains(&true) {
            let line = "=".repeat(78);
            say!(
                "{line}\n  WARNING: UCX is not in use: KV travels over plain TCP, several times slower.\n  \
                 Why stands in {}.\n  Install UCX (Debian: apt install libucx0), or accept it with --transport tcp.\n{line}",
                self.config.logs.display()
            );
        }
        Ok(())
    }

    /// Somebody else has the usual ones.
    fn tell_of_other_ports(&self) {
        let moved = |(listen, url): (&Listen, &str)| {
            matches!(listen, Listen::From(usual) if *usual != bare(url))
                .then(|| format!("{} for {}", bare(url), listen.address()))
        };
        let first = self.first();
        let moved: Vec<String> = [(&self.config.http, &*first.http), (&self.config.grpc, &*first.grpc)]
            .into_iter()
            .filter_map(moved)
            .collect();
        if !moved.is_empty() {
            say!("tandem: note: ports in use; taken instead: {}", moved.join(", "));
        }
    }

    /// A newcomer looks for a hand-off, and finds none. Nodes that lend each other cores share them, too.
    fn tell_of_local_prompts(&self) {
        let pairs = self.nodes().iter().any(|node| node.recipe.name.starts_with("prefill"));
        if self.crowded && pairs && local_prefill(&self.config.router_args) == "auto" {
            say!(
                "tandem: note: the nodes share this machine's cores, so short prompts are computed where they are \
                 decoded (--local-prefill auto); to see a hand-off: `tandem up --router-arg=--local-prefill=never`, \
                 then `tandem trace last`"
            );
        }
    }

    /// Reports deaths, and mends them if that is wanted. Returns only with an error.
    async fn supervise(&mut self) -> anyhow::Result<()> {
        loop {
            let (index, status) = next_death(&mut self.members).await;
            let dead = &self.members[index];
            say!("tandem: {} died ({status})\n{}", dead.recipe.name, dead.log.tail());
            match self.config.on_death {
                OnDeath::Restart => {
                    let mut recipe = dead.recipe.clone();
                    if let Some(router) = self.routers.get(index) {
                        // The nodes and the clients know these addresses, and look at no others.
                        recipe.args.retain(|arg| !arg.starts_with(NEXT_FREE_PORT));
                        set_flag(&mut recipe.args, "--http", bare(&router.http));
                        set_flag(&mut recipe.args, "--grpc", bare(&router.grpc));
                        set_flag(&mut recipe.args, "--nodes", bare(&router.join));
                        set_flag(&mut recipe.args, "--admin", bare(&router.page));
                    }
                    self.members[index] = self.restart(&recipe).await?;
                    state::write(&self.config.state, &self.state())?;
                }
                OnDeath::Report if index == 0 && self.routers.len() == 1 => bail!("the router is gone"),
                OnDeath::Report => {
                    drop(self.members.remove(index));
                    if index < self.routers.len() {
                        drop(self.routers.remove(index));
                        say!("tandem: clients find {} and {}", self.first().http, self.first().grpc);
                    }
                    state::write(&self.config.state, &self.state())?;
                }
            }
        }
    }

    async fn restart(&self, recipe: &Recipe) -> anyhow::Result<Member> {
        let (mut delay, longest) = RESTART_DELAYS;
        loop {
            sleep(delay).await;
            match recipe.launch(self.wrappers, &self.config.logs, self.config.start_timeout).await {
                Ok(member) => {
                    say!("tandem: {} runs again", recipe.name);
                    // The cluster serves whether or not somebody still reads this.
                    let _ = print_node(&member);
                    return Ok(member);
                }
                Err(error) => say!("tandem: {error:#}"),
            }
            delay = (delay * 2).min(longest);
        }
    }

    /// The routers take no more work and finish what runs, then the nodes end; what does not end in time is killed.
    async fn drain(&mut self) {
        let deadline = Instant::now() + self.config.grace + LAST_WORDS;
        let (routers, nodes) = self.members.split_at_mut(self.routers.len());
        for part in [routers, nodes] {
            part.iter().for_each(Member::terminate);
            join_all(part.iter_mut().map(|member| end_by(member, deadline))).await;
        }
    }

    async fn kill(&mut self) {
        join_all(self.members.iter_mut().map(Member::kill)).await;
    }
}

async fn end_by(member: &mut Member, deadline: Instant) {
    // A node whose time was used up by the router still gets a moment to react.
    let deadline = deadline.max(Instant::now() + Duration::from_secs(2));
    if timeout_at(deadline, member.wait()).await.is_err() {
        say!("tandem: {} did not end in time and is killed", member.recipe.name);
        member.kill().await;
    }
}

/// Waits for the first child to end.
async fn next_death(members: &mut [Member]) -> (usize, String) {
    let waits = members.iter_mut().map(|member| Box::pin(member.wait()));
    let (status, index, _) = select_all(waits).await;
    (index, status.map_or_else(|error| error.to_string(), |status| status.to_string()))
}

/// /health must say 200 and /debug/cluster list all nodes, at the port for operators if there is one. Returns that
/// list.
async fn wait_for_health(http: String, nodes: usize) -> serde_json::Value {
    let client = reqwest::Client::new();
    let serves = async || -> Option<serde_json::Value> {
        let health = client.get(format!("{http}/health")).send().await.ok()?;
        let cluster = client.get(format!("{http}/debug/cluster")).send().await.ok()?;
        let mut cluster: serde_json::Value = cluster.json().await.ok()?;
        let registered = cluster["nodes"].take();
        (health.status().is_success() && registered.as_array()?.len() >= nodes).then_some(registered)
    };
    loop {
        if let Some(registered) = pin!(serves()).await {
            return registered;
        }
        sleep(HEALTH_INTERVAL).await;
    }
}

/// Whether two of the nodes that the router lists have the same cores, and together more threads than these.
fn nodes_crowd(nodes: &serde_json::Value) -> bool {
    let processors: Vec<_> = nodes.as_array().into_iter().flatten().map(|node| &node["processor"]).collect();
    let count = |processor: &serde_json::Value, what: &str| processor[what].as_u64().unwrap_or(0);
    let crowded = |(at, a): (usize, &&serde_json::Value)| {
        let same = |b: &&&serde_json::Value| a["id"].is_string() && a["id"] == b["id"];
        processors[at + 1..].iter().any(|b| same(&b) && count(a, "threads") + count(b, "threads") > count(a, "cores"))
    };
    processors.iter().enumerate().any(crowded)
}

/// The router's `--local-prefill` among its flags, in either form.
fn local_prefill(args: &[String]) -> &str {
    values(args, "--local-prefill").last().unwrap_or("auto")
}

/// The other binaries stand beside this one.
fn programs_dir() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let dir = own.parent().context("this program has no directory")?;
    for program in ["tandem-router", "tandem-prefill-node", "tandem-decode-node"] {
        let path = dir.join(program);
        if !path.is_file() {
            bail!("{} is missing: `cargo build --release` builds all programs", path.display());
        }
    }
    Ok(dir.to_owned())
}

fn print_router(router: &Member, Addresses { http, grpc, .. }: &Addresses) -> anyhow::Result<()> {
    let (name, pid) = (&router.recipe.name, router.pid().unwrap_or(0));
    print(&format!("router {name} http={http} grpc={grpc} pid={pid}\n"))
}

fn print_node(node: &Member) -> anyhow::Result<()> {
    if node.recipe.name.starts_with("router") {
        return Ok(());
    }
    let [grpc, admin, transport, device] = ["grpc", "admin", "transport", "device"].map(|key| node.ready.get(key));
    let (grpc, admin, transport, device) = (grpc?, admin?, transport?, device?);
    let cpus = match node.recipe.cpus.as_slice() {
        [] => "any".to_owned(),
        cpus => cores::list(cpus),
    };
    let Recipe { name, .. } = &node.recipe;
    let pid = node.pid().unwrap_or(0);
    print(&format!(
        "node {name} grpc={grpc} admin={admin} transport={transport} device={device} cpus={cpus} pid={pid}\n"
    ))
}

fn bare(url: &str) -> &str {
    url.split_once("://").map_or(url, |(_, address)| address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_crowd_that_have_more_threads_than_the_cores_they_share() {
        let nodes = |threads: [u32; 2], ids: [&str; 2]| {
            let node = |(threads, id)| serde_json::json!({ "processor": { "id": id, "cores": 4, "threads": threads } });
            threads.into_iter().zip(ids).map(node).collect::<serde_json::Value>()
        };
        assert!(nodes_crowd(&nodes([4, 1], ["a", "a"])));
        assert!(!nodes_crowd(&nodes([3, 1], ["a", "a"])) && !nodes_crowd(&nodes([4, 4], ["a", "b"])));
        assert!(!nodes_crowd(&serde_json::json!([{ "processor": null }, { "processor": null }])), "nobody knows");
    }

    #[test]
    fn the_routers_choice_is_found_in_either_form() {
        let of = |args: &str| local_prefill(&args.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).to_owned();
        assert_eq!(of("--threads 1"), "auto");
        assert_eq!(of("--local-prefill never"), "never");
        assert_eq!(of("--local-prefill=never --local-prefill=auto"), "auto", "the last one");
    }

    #[test]
    fn a_restarted_router_keeps_its_addresses() {
        let mut args = flags([("--model", "m"), ("--http", "127.0.0.1:0"), ("--grpc", "127.0.0.1:0")]);
        set_flag(&mut args, "--http", bare("http://127.0.0.1:81"));
        set_flag(&mut args, "--grpc", bare("http://127.0.0.1:82"));
        assert_eq!(args, ["--model", "m", "--http", "127.0.0.1:81", "--grpc", "127.0.0.1:82"]);
        let mut args = vec!["--nodes=127.0.0.1:0".to_owned()];
        set_flag(&mut args, "--nodes", bare("http://127.0.0.1:83"));
        assert_eq!(args, ["--nodes=127.0.0.1:83"]);
    }
}
