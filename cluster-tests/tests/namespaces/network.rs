//! A small network: a hub with the router's address, and hosts around it. Each is a network namespace; each host has an
//! IPC namespace of its own, too, which its nodes share.
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Context, ensure};

const HOSTS: usize = 3;

/// Where a program runs.
#[derive(Clone, Copy, Debug)]
pub enum Inside {
    /// With the router.
    Hub,
    /// On this host.
    Host(usize),
}

/// The namespaces; they go with it.
pub struct Network {
    /// Each keeps the IPC namespace of a host.
    keepers: Vec<Child>,
    prefix: String,
    subnet: u8,
}

/// Tests of one process have different networks.
static NEXT: AtomicU8 = AtomicU8::new(0);

impl Network {
    /// `None` where it is not permitted, which is said.
    ///
    /// # Errors
    /// It is required (`TANDEM_REQUIRE_NAMESPACES=1`) and not permitted, or half-way through something fails.
    pub fn set_up() -> anyhow::Result<Option<Self>> {
        let subnet = NEXT.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("tdm{}-{subnet}", std::process::id());
        let network = Self { keepers: Vec::new(), prefix, subnet };
        let hub = network.name(Inside::Hub);
        match is_permitted(&[&format!("ip netns add {hub}"), "unshare --ipc true"])? {
            true => network.connect().map(Some),
            false => Ok(None),
        }
    }

    fn connect(mut self) -> anyhow::Result<Self> {
        let hub = self.name(Inside::Hub);
        let at = |netns: &str, rest: &str| run(&format!("ip -n {netns} {rest}"));
        for rest in ["link set lo up", "link add name bridge type bridge", "link set bridge up"] {
            at(&hub, rest)?;
        }
        at(&hub, &format!("addr add {}/24 dev bridge", self.hub()))?;
        for host in 0..HOSTS {
            let name = self.name(Inside::Host(host));
            run(&format!("ip netns add {name}"))?;
            at(&hub, &format!("link add port{host} type veth peer name eth0 netns {name}"))?;
            at(&hub, &format!("link set port{host} master bridge"))?;
            at(&hub, &format!("link set port{host} up"))?;
            at(&name, &format!("addr add 10.231.{}.{}/24 dev eth0", self.subnet, host + 2))?;
            at(&name, "link set eth0 up")?;
            at(&name, "link set lo up")?;
            self.keepers.push(keeper()?);
        }
        Ok(self)
    }

    /// The router's address.
    pub fn hub(&self) -> String {
        format!("10.231.{}.1", self.subnet)
    }

    /// What starts a program there: it takes the program and its arguments behind these words.
    pub fn by(&self, inside: Inside) -> Vec<String> {
        let in_network = format!("ip netns exec {}", self.name(inside));
        let in_host = match inside {
            Inside::Hub => String::new(),
            Inside::Host(host) => format!("nsenter --ipc=/proc/{}/ns/ipc", self.keepers[host].id()),
        };
        in_network.split_whitespace().chain(in_host.split_whitespace()).map(str::to_owned).collect()
    }

    /// Runs a program beside the router; whether it succeeded, and both outputs.
    pub fn run(&self, program: &str, args: &[&str]) -> anyhow::Result<(bool, String, String)> {
        let mut words = self.by(Inside::Hub);
        words.push(program.to_owned());
        let output = Command::new(&words[0]).args(&words[1..]).args(args).output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((output.status.success(), text(&output.stdout), text(&output.stderr)))
    }

    fn name(&self, inside: Inside) -> String {
        match inside {
            Inside::Hub => format!("{}-hub", self.prefix),
            Inside::Host(host) => format!("{}-{host}", self.prefix),
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for keeper in &mut self.keepers {
            let _ = keeper.kill();
            let _ = keeper.wait();
        }
        // Their links go with them.
        for inside in (0..HOSTS).map(Inside::Host).chain([Inside::Hub]) {
            let _ = Command::new("ip").args(["netns", "del", &self.name(inside)]).output();
        }
    }
}

/// A process that is alone in an IPC namespace, and ends with this one.
fn keeper() -> anyhow::Result<Child> {
    let mut keeper = Command::new("setpriv");
    // A line from within says that the namespace is there.
    keeper.args(["--pdeathsig", "KILL", "unshare", "--ipc", "sh", "-c", "echo there; exec sleep infinity"]);
    let keeper = keeper.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut keeper = keeper.context("setpriv and unshare are missing (util-linux)")?;
    let mut there = String::new();
    let output = keeper.stdout.take().context("a pipe")?;
    BufReader::new(output).read_line(&mut there)?;
    ensure!(there == "there\n", "unshare --ipc did not come to its own namespace");
    Ok(keeper)
}

/// Whether these commands succeed; that one does not is said.
///
/// # Errors
/// They are required (`TANDEM_REQUIRE_NAMESPACES=1`), and one fails.
pub fn is_permitted(commands: &[&str]) -> anyhow::Result<bool> {
    let Err(error) = commands.iter().try_for_each(|command| run(command)) else { return Ok(true) };
    let required = std::env::var_os("TANDEM_REQUIRE_NAMESPACES").is_some_and(|value| value == "1");
    ensure!(!required, "TANDEM_REQUIRE_NAMESPACES=1: {error:#}");
    eprintln!("SKIPPED: namespaces are not permitted here: {error:#}");
    Ok(false)
}

fn run(command: &str) -> anyhow::Result<()> {
    let mut words = command.split_whitespace();
    let output = Command::new(words.next().unwrap_or_default()).args(words).output();
    let output = output.with_context(|| format!("{command}: the program is missing"))?;
    ensure!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
