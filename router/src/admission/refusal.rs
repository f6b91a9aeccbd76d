//! Why a request may not start, and what its client is told of it. That it may not is decided elsewhere: by
//! [`super::queue`], by the limits of its [`super::tenant`], or because the router ends.
use std::time::Duration;

use tandem_proto::{Error, ErrorCode, ErrorKind};

use super::Counts;
use super::limiter::Exceeded;
use super::tenant::Crowded;

/// What clients are told by a router that ends, whatever their requests were at.
pub const ENDING: &str = "the router is shutting down";

/// Why a request was refused before it started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// As many wait as may.
    QueueFull,
    /// As many of this tenant wait as may.
    TenantShare,
    /// A rate of the API key is used up.
    RateLimit,
    /// As many of the API key's requests run and wait as may.
    Concurrency,
    /// The first token would come after the request's deadline.
    Deadline,
    /// The first token would come later than `--max-ttft-ms`.
    Objective,
    /// The router is ending.
    Draining,
    /// There are no nodes to run it.
    NoPair,
}

/// All of them, for metrics.
pub const REASONS: [Reason; 8] = [
    Reason::QueueFull,
    Reason::TenantShare,
    Reason::RateLimit,
    Reason::Concurrency,
    Reason::Deadline,
    Reason::Objective,
    Reason::Draining,
    Reason::NoPair,
];

impl Reason {
    /// Label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::TenantShare => "tenant_share",
            Self::RateLimit => "rate_limit",
            Self::Concurrency => "concurrency",
            Self::Deadline => "deadline",
            Self::Objective => "objective",
            Self::Draining => "draining",
            Self::NoPair => "no_pair",
        }
    }
}

/// Why a request did not get in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// In one word.
    pub reason: Reason,
    /// When it is worth another try, if that can be told.
    pub retry_after: Option<Duration>,
    /// When its first token would have come, where it is too late.
    pub first_token: Option<Duration>,
}

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// For metrics.
    pub reason: Reason,
    /// For the client.
    pub error: Error,
}

impl Refusal {
    /// By the queue, with such counts and so many places in it.
    pub fn of(refused: Refused, counts: Counts, tenant: &str, places: usize) -> Self {
        let Counts { inflight, queued } = counts;
        let first_ms = refused.first_token.map_or(0, |first| first.as_millis());
        let message = match refused.reason {
            Reason::TenantShare => {
                format!("{queued} of {places} requests wait, and as many of tenant {tenant:?} as may: try later")
            }
            Reason::Deadline => {
                format!(
                    "{queued} requests wait: its first token would come in {first_ms} ms, too late for its deadline"
                )
            }
            Reason::Objective => {
                format!(
                    "{queued} requests wait: its first token would come in {first_ms} ms, which is too late: try later"
                )
            }
            _ => format!("{inflight} requests are running and {queued} waiting: try later"),
        };
        let error = Error { retry_after: refused.retry_after, ..Error::new(ErrorKind::Overloaded, message) };
        Self { reason: refused.reason, error }
    }

    /// A rate of the tenant's is used up.
    pub fn too_fast(tenant: &str, exceeded: Exceeded) -> Self {
        let Exceeded { what, per_minute, retry_after } = exceeded;
        let message = format!(
            "tenant {tenant:?} may have {per_minute} {what} a minute: try again in {} ms",
            retry_after.as_millis()
        );
        let error = Error { retry_after: Some(retry_after), ..Error::new(ErrorKind::Overloaded, message) };
        Self { reason: Reason::RateLimit, error: error.with_code(ErrorCode::RateLimitExceeded) }
    }

    /// As many of the tenant's requests run and wait as may.
    pub fn crowded(tenant: &str, Crowded { most, asked }: Crowded) -> Self {
        let may = format!("tenant {tenant:?} may have {most} requests at a time");
        let error = if asked > most {
            Error::invalid("n", format!("{may}, and this call is {asked} of them"))
        } else {
            let message = format!("{may}: try again when one has ended");
            Error::new(ErrorKind::Overloaded, message).with_code(ErrorCode::RateLimitExceeded)
        };
        Self { reason: Reason::Concurrency, error }
    }

    /// The router ends.
    pub fn draining() -> Self {
        Self { reason: Reason::Draining, error: Error::new(ErrorKind::Unavailable, ENDING) }
    }
}
