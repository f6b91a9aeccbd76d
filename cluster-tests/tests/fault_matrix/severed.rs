//! UCX's own sockets behind no proxy, cut by the kernel: packets from and to them are dropped (nftables), in a network
//! namespace of this program, so that no rule of it meets anybody else. Takes root and `nft`; where they are missing a
//! cut leaves KV over UCX's sockets alone, and the table says so.
use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, ensure};
use nix::sched::{CloneFlags, unshare};
use tandem_cluster_tests::Fleet;

/// Whether packets can be dropped here.
static POSSIBLE: OnceLock<bool> = OnceLock::new();

/// Moves this program, and all that it starts from now on, into a network of its own. Before there is another thread:
/// a namespace is a thread's.
pub fn enter_own_network() {
    let entered = unshare(CloneFlags::CLONE_NEWNET).is_ok();
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().is_ok_and(|status| status.success());
    // Alone in a network without addresses nothing could be tested.
    assert!(up || !entered, "a network namespace, and no `ip` (iproute2) to bring its loopback device up");
    let possible = entered && nft("add table inet tandem\n").is_ok();
    if !possible {
        println!("no root or no nft: cuts leave KV over UCX's sockets alone");
    }
    POSSIBLE.get_or_init(|| possible);
}

/// Whether a cut reaches KV over UCX's sockets.
pub fn is_possible() -> bool {
    POSSIBLE.get().copied().unwrap_or(false)
}

/// A node whose UCX sockets are cut, until this is dropped.
pub struct Severed {
    table: String,
}

impl Severed {
    /// Cuts those of a member, over which other members reach it or it reaches them. `None`: it has none, or that is
    /// not possible here.
    pub fn from_others(fleet: &Fleet, member: usize) -> anyhow::Result<Option<Self>> {
        if fleet.transport() != "ucx-tcp" || !is_possible() {
            return Ok(None);
        }
        let mut ports = fleet.members[member].ucx_ports()?;
        ensure!(!ports.is_empty(), "UCX listens nowhere");
        let mut others = BTreeSet::new();
        for other in fleet.members.iter().filter(|other| other.process.pid() != fleet.members[member].process.pid()) {
            // One that has ended has no sockets.
            others.extend(other.ucx_ports().unwrap_or_default());
        }
        let own = fleet.members[member].process.sockets()?;
        ports.extend(own.iter().filter(|socket| others.contains(&socket.remote)).map(|socket| socket.port));
        let ports = ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
        let severed = Self { table: format!("cut_{}", fleet.members[member].process.pid()) };
        nft(&format!(
            "table inet {} {{ chain arriving {{ type filter hook input priority 0; policy accept; \
             tcp sport {{ {ports} }} drop; tcp dport {{ {ports} }} drop; }}; }}\n",
            severed.table
        ))?;
        Ok(Some(severed))
    }
}

impl Drop for Severed {
    fn drop(&mut self) {
        if let Err(error) = nft(&format!("delete table inet {}\n", self.table)) {
            println!("a cut does not heal: {error:#}");
        }
    }
}

/// One transaction.
fn nft(rules: &str) -> anyhow::Result<()> {
    let mut nft = Command::new("nft");
    let nft = nft.args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut nft = nft.spawn().context("nft is missing (Debian: apt install nftables)")?;
    nft.stdin.take().context("a pipe")?.write_all(rules.as_bytes())?;
    let output = nft.wait_with_output()?;
    ensure!(output.status.success(), "nft: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
