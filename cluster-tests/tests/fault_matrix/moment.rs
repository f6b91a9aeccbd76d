//! The moments of a request at which a fault strikes: how the fleet is set up to make each last, and how it is known.
use std::time::Duration;

use tandem_cluster_tests::fleet::{Counts, Role};
use tandem_cluster_tests::{Fleet, FleetOptions};
use tokio::time::{Instant, sleep};

/// Reaching a moment takes a second or two on idle cores.
const REACHED: Duration = Duration::from_secs(40);
/// So does a node to take up work that nothing holds up.
const PREPARED: Duration = Duration::from_secs(4);
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Tokens of a decoding answer before the fault.
const SOME_TOKENS: f64 = 4.0;

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// It waits behind another prompt.
    Queued,
    /// Its prompt is computed.
    Computing,
    /// Its KV is on the way.
    Pushing,
    /// Its KV is verified, and it waits for a place in decode's batch.
    Sealed,
    /// It generates.
    Decoding,
}

/// A request: tokens of the prompt and of the answer.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub prompt: u32,
    pub answer: u32,
}

impl Moment {
    pub const ALL: [Self; 5] = [Self::Queued, Self::Computing, Self::Pushing, Self::Sealed, Self::Decoding];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Computing => "computing",
            Self::Pushing => "pushing",
            Self::Sealed => "sealed-not-started",
            Self::Decoding => "decoding",
        }
    }

    /// Nodes on which it lasts.
    pub fn fleet(self, transport: &'static str) -> FleetOptions {
        // Short, so that a peer that stands still for `fault::SILENCE` is given up, and its writes are fenced.
        let kv = "--kv-stall-ms 1000 --kv-grace-ms 500";
        let prefill = format!("--simulated-token-us 500 --max-num-batched-tokens 256 {kv}");
        let decode = format!("--simulated-step-us 10000 {kv}");
        let (prefill_more, decode_more) = match self {
            Self::Queued => ("--max-num-seqs 1", ""),
            Self::Pushing => ("--debug-push-delay-ms 400", ""),
            Self::Sealed => ("", "--max-num-seqs 1"),
            Self::Computing | Self::Decoding => ("", ""),
        };
        // Else it would wait in the router until a node is about to be done.
        let router_more = if self == Self::Queued { "--max-queue 0" } else { "" };
        FleetOptions {
            transport,
            router_args: format!("--lease-ms 1000 {router_more}"),
            prefill_args: format!("{prefill} {prefill_more}"),
            decode_args: format!("{decode} {decode_more}"),
            ..FleetOptions::default()
        }
    }

    /// Others that are there before: one for each node of the role that shall be busy.
    pub fn fillers(self) -> Option<Size> {
        match self {
            Self::Queued => Some(Size { prompt: 3600, answer: 2 }),
            Self::Sealed => Some(Size { prompt: 32, answer: 350 }),
            Self::Computing | Self::Pushing | Self::Decoding => None,
        }
    }

    /// The request that meets the fault.
    pub fn request(self) -> Size {
        match self {
            Self::Sealed => Size { prompt: 64, answer: 40 },
            Self::Decoding => Size { prompt: 200, answer: 100 },
            Self::Queued | Self::Computing | Self::Pushing => Size { prompt: 1200, answer: 40 },
        }
    }

    /// Waits until a filler holds the request up on each node.
    pub async fn prepared(self, fleet: &Fleet) -> anyhow::Result<()> {
        let busy = |role| async move { fleet.sum(role).await.running >= f64::from(fleet.nodes()) };
        match self {
            Self::Queued => until("prefill nodes compute", PREPARED, || busy(Role::Prefill)).await,
            Self::Sealed => until("decode nodes generate", PREPARED, || busy(Role::Decode)).await,
            Self::Computing | Self::Pushing | Self::Decoding => Ok(()),
        }
    }

    /// Waits until the request is there; `before` is what the decode nodes said before it came.
    pub async fn reached(self, fleet: &Fleet, before: Counts) -> anyhow::Result<()> {
        until(self.as_str(), REACHED, || async move {
            let (prefill, decode) = tokio::join!(fleet.sum(Role::Prefill), fleet.sum(Role::Decode));
            match self {
                Self::Queued => prefill.waiting >= 1.0,
                Self::Computing => prefill.running >= 1.0,
                Self::Pushing => prefill.running == 0.0 && prefill.waiting >= 1.0,
                Self::Sealed => decode.verified > before.verified,
                Self::Decoding => decode.generated >= before.generated + SOME_TOKENS,
            }
        })
        .await
    }
}

async fn until<F: Future<Output = bool>>(what: &str, within: Duration, holds: impl Fn() -> F) -> anyhow::Result<()> {
    let start = Instant::now();
    while !holds().await {
        anyhow::ensure!(start.elapsed() < within, "not within {within:?}: {what}");
        sleep(LOOK_EVERY).await;
    }
    Ok(())
}
