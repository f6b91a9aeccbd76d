//! What strikes, whom, and what the client may then see.
use std::time::Duration;

use tandem_cluster_tests::Fleet;
use tandem_cluster_tests::fleet::Role;
use tandem_cluster_tests::link::Quality;

use crate::cell::Client;

/// Longer than the router's lease of one second: who is silent for so long is dead to it.
const SILENCE: Duration = Duration::from_millis(2200);
const SLOW_BYTES_PER_S: u32 = 256 << 10;
/// Draining nodes finish their work, which takes seconds here.
const DRAIN: Duration = Duration::from_secs(40);

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, and SIGCONT after it was given up.
    Freeze,
    /// SIGTERM.
    Terminate,
    /// All its links fall silent, and heal after it was given up.
    Cut,
    /// All its links become slow, and stay so.
    Slow,
}

/// To whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    Prefill,
    Decode,
    Router,
    Client,
}

/// What the client of the struck request sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// All tokens, once, as if nothing had happened.
    Whole,
    /// An error that says what happened: its only way in has died.
    Error,
    /// Nothing: it is the one who left.
    Gone,
}

impl Expected {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Error => "error",
            Self::Gone => "gone",
        }
    }
}

impl Fault {
    pub const ALL: [Self; 5] = [Self::Kill, Self::Freeze, Self::Terminate, Self::Cut, Self::Slow];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::Freeze => "SIGSTOP",
            Self::Terminate => "SIGTERM",
            Self::Cut => "link cut",
            Self::Slow => "slow link",
        }
    }
}

impl Victim {
    pub const ALL: [Self; 4] = [Self::Prefill, Self::Decode, Self::Router, Self::Client];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Router => "router",
            Self::Client => "client",
        }
    }

    /// What of the node is disturbed. Links of UCX are not behind a proxy: there a cut leaves KV alone.
    pub fn touches(self, fault: Fault) -> &'static str {
        match (self, fault) {
            (Self::Prefill | Self::Decode, Fault::Cut | Fault::Slow) => "gRPC; KV over tcp alone",
            (Self::Prefill | Self::Decode, _) => "the process, KV over all transports",
            (Self::Router | Self::Client, Fault::Cut | Fault::Slow) => "gRPC, no KV",
            (Self::Router | Self::Client, _) => "the process, no KV",
        }
    }

    /// DESIGN §6.
    pub fn expects(self, fault: Fault) -> Expected {
        match (self, fault) {
            (Self::Router, Fault::Kill) => Expected::Error,
            (Self::Client, Fault::Kill | Fault::Terminate) => Expected::Gone,
            _ => Expected::Whole,
        }
    }

    /// Lets `fault` strike; returns when it is over or, for those that stay, when it is there.
    pub async fn suffers(self, fault: Fault, fleet: &mut Fleet, client: &Client) -> anyhow::Result<()> {
        match self {
            Self::Prefill => node_suffers(fault, fleet, Role::Prefill).await,
            Self::Decode => node_suffers(fault, fleet, Role::Decode).await,
            Self::Router => router_suffers(fault, fleet).await,
            Self::Client => client_suffers(fault, fleet, client).await,
        }
    }
}

async fn node_suffers(fault: Fault, fleet: &mut Fleet, role: Role) -> anyhow::Result<()> {
    let victim = fleet.busiest(role).await?;
    let victim = &mut fleet.members[victim];
    match fault {
        Fault::Kill => victim.process.kill(),
        Fault::Freeze => {
            victim.process.freeze();
            tokio::time::sleep(SILENCE).await;
            victim.process.wake();
        }
        Fault::Terminate => {
            victim.process.terminate();
            let status = victim.process.ended(DRAIN).await?;
            anyhow::ensure!(status.success(), "the drained node ended with {status}");
        }
        Fault::Cut => {
            victim.links_become(Quality::Cut);
            tokio::time::sleep(SILENCE).await;
            victim.links_become(Quality::Good);
        }
        Fault::Slow => victim.links_become(Quality::Slow(SLOW_BYTES_PER_S)),
    }
    Ok(())
}

async fn router_suffers(fault: Fault, fleet: &mut Fleet) -> anyhow::Result<()> {
    match fault {
        Fault::Kill => fleet.router.kill(),
        Fault::Freeze => {
            fleet.router.freeze();
            tokio::time::sleep(SILENCE).await;
            fleet.router.wake();
        }
        Fault::Terminate => {
            fleet.router.terminate();
            let status = fleet.router.ended(DRAIN).await?;
            anyhow::ensure!(status.success(), "the drained router ended with {status}");
        }
        Fault::Cut => {
            fleet.routers_links_become(Quality::Cut);
            tokio::time::sleep(SILENCE).await;
            fleet.routers_links_become(Quality::Good);
        }
        Fault::Slow => fleet.routers_links_become(Quality::Slow(SLOW_BYTES_PER_S)),
    }
    Ok(())
}

async fn client_suffers(fault: Fault, fleet: &mut Fleet, client: &Client) -> anyhow::Result<()> {
    match fault {
        Fault::Kill => client.signal(nix::sys::signal::SIGKILL),
        Fault::Freeze => {
            client.signal(nix::sys::signal::SIGSTOP);
            tokio::time::sleep(SILENCE).await;
            client.signal(nix::sys::signal::SIGCONT);
        }
        Fault::Terminate => client.signal(nix::sys::signal::SIGTERM),
        Fault::Cut => {
            fleet.entrance.becomes(Quality::Cut);
            tokio::time::sleep(SILENCE).await;
            fleet.entrance.becomes(Quality::Good);
        }
        Fault::Slow => fleet.entrance.becomes(Quality::Slow(SLOW_BYTES_PER_S)),
    }
    Ok(())
}
