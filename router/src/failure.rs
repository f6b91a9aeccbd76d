//! How an attempt of a request fails: which node said so, what it was, whom it speaks against; and which bound ends the
//! attempts. Pure. What follows from a failure is [`crate::flow::replan`]'s matter; [`crate::metrics`] counts it.
use tandem_proto::{Error, ErrorKind};

use crate::select::Role;

/// What the failure of a node was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Membership gave it up.
    Died,
    /// It ended its call with an error, or said what it may not say.
    Failed,
    /// It said nothing for too long.
    Silent,
    /// It has no room for another request.
    Overloaded,
    /// KV did not come from one node to the other; which of them or what between them failed is not known.
    Undelivered,
    /// KV came and was refused. Whose fault it is is not known either.
    Refused,
    /// The prefill call ended with an earlier hand-off: it has no KV for another one.
    Spent,
    /// The request itself: it is wrong, or its time is over.
    Request,
}

/// All of them that another attempt may follow, for metrics.
pub const CAUSES: [Cause; 7] =
    [Cause::Died, Cause::Failed, Cause::Silent, Cause::Overloaded, Cause::Undelivered, Cause::Refused, Cause::Spent];

impl Cause {
    /// Label of metrics and spans.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Died => "died",
            Self::Failed => "failed",
            Self::Silent => "silent",
            Self::Overloaded => "overloaded",
            Self::Undelivered => "undelivered",
            Self::Refused => "refused",
            Self::Spent => "spent",
            Self::Request => "request",
        }
    }
}

/// A failure of one attempt.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Which of the two nodes said so, or fell silent.
    pub role: Role,
    /// What it was.
    pub cause: Cause,
    /// For people.
    pub error: Error,
}

impl Failure {
    /// A leg ended with `error`.
    pub fn of_leg(role: Role, mut error: Error) -> Self {
        let cause = match (error.kind, role) {
            (ErrorKind::InvalidArgument | ErrorKind::NotFound, _) => Cause::Request,
            (ErrorKind::Overloaded, _) => Cause::Overloaded,
            (ErrorKind::Corrupt | ErrorKind::Incompatible, _) => Cause::Refused,
            // The node ended its session with this router before the router did.
            (ErrorKind::DeclaredDead, _) => Cause::Died,
            // The client's own cancellation never comes from a node: the sender let go of the hand-off.
            (ErrorKind::Cancelled, Role::Decode) => Cause::Undelivered,
            _ => Cause::Failed,
        };
        // Between the router and the node: no client is asked for the cluster's token.
        if error.kind == ErrorKind::Unauthenticated {
            error.kind = ErrorKind::Unavailable;
        }
        Self { role, cause, error }
    }

    /// The same, with the router's own clock as the judge of time: whether the request is `late`. A node that says so
    /// before is wrong, and another one goes on.
    pub fn judged(self, late: bool) -> Self {
        let Self { role, cause, error } = self;
        match error.kind {
            ErrorKind::DeadlineExceeded if late => Self { role, cause: Cause::Request, error },
            ErrorKind::DeadlineExceeded => Self { role, cause, error: Error { kind: ErrorKind::Unavailable, ..error } },
            _ => Self { role, cause, error },
        }
    }

    /// The one node of a local plan ended its call with `error`: there is no other whose fault it could be.
    pub fn of_local(error: Error) -> Self {
        let failure = Self::of_leg(Role::Decode, error);
        match failure.cause {
            Cause::Undelivered | Cause::Refused => Self { cause: Cause::Failed, ..failure },
            _ => failure,
        }
    }

    /// The prefill node could not hand over, and keeps the KV.
    pub fn undelivered(error: Error) -> Self {
        let refused = matches!(error.kind, ErrorKind::Corrupt | ErrorKind::Incompatible);
        Self { role: Role::Decode, cause: if refused { Cause::Refused } else { Cause::Undelivered }, error }
    }

    /// Whether the node refused the call because it has ended its session with this router.
    pub fn session_is_over(&self) -> bool {
        self.error.kind == ErrorKind::DeclaredDead
    }

    /// Whether KV did not come from one node to the other, or was refused there.
    pub fn of_handoff(&self) -> bool {
        matches!(self.cause, Cause::Undelivered | Cause::Refused)
    }

    /// The nodes that it speaks against. A dead node has no breaker any more, a full one is no broken one, and a
    /// client's error is nobody's. What may be the fault of either counts against both: the one that is well has
    /// successes too.
    pub fn blamed(&self) -> &[Role] {
        match (self.cause, self.role) {
            (Cause::Failed | Cause::Silent, Role::Prefill) => &[Role::Prefill],
            (Cause::Failed | Cause::Silent, Role::Decode) => &[Role::Decode],
            (Cause::Undelivered | Cause::Refused, _) => &[Role::Prefill, Role::Decode],
            (Cause::Died | Cause::Overloaded | Cause::Spent | Cause::Request, _) => &[],
        }
    }
}

/// The bound that struck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bound {
    /// `--max-attempts`.
    Attempts,
    /// `--replan-ms`.
    Time,
    /// `--retry-budget-percent`.
    Budget,
}

/// All of them, for metrics.
pub const BOUNDS: [Bound; 3] = [Bound::Attempts, Bound::Time, Bound::Budget];

impl Bound {
    /// Label of metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Attempts => "attempts",
            Self::Time => "time",
            Self::Budget => "budget",
        }
    }
}
