//! What strikes, whom, and what the client may then see.
use std::collections::BTreeSet;
use std::time::Duration;

use tandem_cluster_tests::Fleet;
use tandem_cluster_tests::fleet::Role;
use tandem_cluster_tests::link::Quality;

use crate::cell::Client;
use crate::garbage;
use crate::severed::{self, Severed};

/// Longer than the router's lease of one second, and than the patience of the KV transports with its grace behind it
/// (`moment.rs`): who is silent for so long is dead to all, and its writes are fenced.
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
    /// Strangers talk nonsense at its doors.
    Garbage,
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
    pub const ALL: [Self; 6] = [Self::Kill, Self::Freeze, Self::Terminate, Self::Cut, Self::Slow, Self::Garbage];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::Freeze => "SIGSTOP",
            Self::Terminate => "SIGTERM",
            Self::Cut => "link cut",
            Self::Slow => "slow link",
            Self::Garbage => "garbage",
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

    /// A client listens nowhere.
    pub fn can_suffer(self, fault: Fault) -> bool {
        (self, fault) != (Self::Client, Fault::Garbage)
    }

    /// What of the node is disturbed. Shared memory has no link: what cuts it is to stop its process.
    pub fn touches(self, fault: Fault) -> &'static str {
        match (self, fault) {
            (Self::Prefill | Self::Decode, Fault::Cut) if severed::is_possible() => "gRPC; KV over tcp and ucx-tcp",
            (Self::Prefill | Self::Decode, Fault::Cut | Fault::Slow) => "gRPC; KV over tcp alone",
            (Self::Prefill | Self::Decode, Fault::Garbage) => "gRPC, admin; KV's door over tcp",
            (Self::Router, Fault::Garbage) => "HTTP, gRPC, no KV",
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
    let severed = if fault == Fault::Cut { Severed::from_others(fleet, victim)? } else { None };
    let over = fleet.transport();
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
            let _severed = severed;
            tokio::time::sleep(SILENCE).await;
            victim.links_become(Quality::Good);
        }
        Fault::Slow => victim.links_become(Quality::Slow(SLOW_BYTES_PER_S)),
        Fault::Garbage => {
            let (ucx, before) = (victim.ucx_ports()?, victim.counts().await?.garbage);
            let but = if over == "ucx-tcp" { ucx } else { BTreeSet::new() };
            garbage::meets(&victim.process, &but).await?;
            let counted = victim.counts().await?.garbage - before;
            anyhow::ensure!(over != "tcp" || counted > 0.0, "its KV transport has counted no garbage");
        }
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
        Fault::Garbage => garbage::meets(&fleet.router, &BTreeSet::new()).await?,
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
        Fault::Garbage => anyhow::bail!("a client listens nowhere"),
    }
    Ok(())
}
