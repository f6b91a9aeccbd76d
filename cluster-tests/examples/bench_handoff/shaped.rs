//! A link of 1 Gbit/s: two ends of a veth pair, one in a network namespace of its own, with a token bucket on either
//! end.
use std::process::Command;

use anyhow::{Context, ensure};

const NAMESPACE: &str = "tandem-bench";
const NEAR: &str = "tandem-b0";
const FAR: &str = "tandem-b1";
const NEAR_ADDRESS: &str = "10.213.77.1";
const FAR_ADDRESS: &str = "10.213.77.2";
const RATE: &str = "rate 1gbit burst 256kb latency 50ms";

/// The link; removed on drop.
pub struct Shaped(());

impl Shaped {
    /// Sets it up.
    ///
    /// # Errors
    /// No root, or no `ip` and `tc` (Debian: iproute2).
    pub fn set_up() -> anyhow::Result<Self> {
        // What a killed run has left.
        drop(Self(()));
        run(&format!("ip netns add {NAMESPACE}"))?;
        let link = Self(());
        run(&format!("ip link add {NEAR} type veth peer name {FAR}"))?;
        run(&format!("ip link set {FAR} netns {NAMESPACE}"))?;
        run(&format!("ip addr add {NEAR_ADDRESS}/24 dev {NEAR}"))?;
        run(&format!("ip link set {NEAR} up"))?;
        for inside in [
            format!("ip addr add {FAR_ADDRESS}/24 dev {FAR}"),
            format!("ip link set {FAR} up"),
            "ip link set lo up".to_owned(),
            format!("tc qdisc add dev {FAR} root tbf {RATE}"),
        ] {
            run(&format!("ip netns exec {NAMESPACE} {inside}"))?;
        }
        run(&format!("tc qdisc add dev {NEAR} root tbf {RATE}"))?;
        Ok(link)
    }

    /// Near end and far end.
    pub fn addresses(&self) -> (&'static str, &'static str) {
        (NEAR_ADDRESS, FAR_ADDRESS)
    }

    /// Of the far end.
    pub fn namespace(&self) -> &'static str {
        NAMESPACE
    }
}

impl Drop for Shaped {
    fn drop(&mut self) {
        // The pair goes with its namespace, unless it was not moved there yet.
        let _ = Command::new("ip").args(["netns", "del", NAMESPACE]).output();
        let _ = Command::new("ip").args(["link", "del", NEAR]).output();
    }
}

fn run(command: &str) -> anyhow::Result<()> {
    let mut words = command.split_whitespace();
    let output = Command::new(words.next().unwrap_or_default())
        .args(words)
        .output()
        .with_context(|| format!("{command}: iproute2 is missing"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command}: {} (a shaped link takes root)", errors.trim());
    Ok(())
}
