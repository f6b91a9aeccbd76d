//! One error for what crosses a process border, shaped by what the caller does next, and its one mapping to gRPC.
//! HTTP's mapping stands in the router's `http` module.
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// What the caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is wrong; the same request will always fail.
    InvalidArgument,
    /// No such model or trace.
    NotFound,
    /// Refused before work was spent: try later.
    Overloaded,
    /// A part is away and nothing was sent yet: safe to retry.
    Unavailable,
    /// A part failed after tokens were sent: the answer is incomplete.
    Aborted,
    /// The caller's deadline passed.
    DeadlineExceeded,
    /// The caller went away.
    Cancelled,
    /// The caller's API key is missing or unknown.
    Unauthenticated,
    /// Two nodes that cannot work together.
    Incompatible,
    /// The router has declared this incarnation of a node dead: it goes on as a new one or not at all.
    DeclaredDead,
    /// KV that failed verification: refused, never decoded.
    Corrupt,
    /// A bug of ours.
    Internal,
}

/// All of them, in their order, for metrics.
pub const ERROR_KINDS: [ErrorKind; 12] = [
    ErrorKind::InvalidArgument,
    ErrorKind::NotFound,
    ErrorKind::Overloaded,
    ErrorKind::Unavailable,
    ErrorKind::Aborted,
    ErrorKind::DeadlineExceeded,
    ErrorKind::Cancelled,
    ErrorKind::Unauthenticated,
    ErrorKind::Incompatible,
    ErrorKind::DeclaredDead,
    ErrorKind::Corrupt,
    ErrorKind::Internal,
];

/// An error that a client or another process sees. `message` says what happened, to what, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// What the caller can do about it.
    pub kind: ErrorKind,
    /// For people.
    pub message: String,
    /// The request field that is wrong, where there is one.
    pub param: Option<&'static str>,
    /// Of `Overloaded`: when it is worth another try; [`RETRY_AFTER`] where nobody can tell.
    pub retry_after: Option<Duration>,
}

/// Tells [`ErrorKind::DeclaredDead`] from the other failed preconditions on the wire: the type of a
/// `google.rpc.PreconditionFailure` violation.
const DECLARED_DEAD: &str = "INCARNATION_DECLARED_DEAD";

/// Told to clients that are refused for load when it is not known how long that lasts.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

impl Error {
    /// An error without a field.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, retry_after: None }
    }

    /// A wrong request field.
    pub fn invalid(param: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(param), ..Self::new(ErrorKind::InvalidArgument, message) }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let code = match error.kind {
            ErrorKind::InvalidArgument => Code::InvalidArgument,
            ErrorKind::NotFound => Code::NotFound,
            ErrorKind::Overloaded => {
                let details = ErrorDetails::with_retry_info(Some(error.retry_after.unwrap_or(RETRY_AFTER)));
                return Status::with_error_details(Code::ResourceExhausted, error.message, details);
            }
            ErrorKind::DeclaredDead => {
                let details = ErrorDetails::with_precondition_failure_violation(DECLARED_DEAD, "incarnation", "");
                return Status::with_error_details(Code::FailedPrecondition, error.message, details);
            }
            ErrorKind::Unavailable => Code::Unavailable,
            ErrorKind::Aborted => Code::Aborted,
            ErrorKind::DeadlineExceeded => Code::DeadlineExceeded,
            ErrorKind::Cancelled => Code::Cancelled,
            ErrorKind::Unauthenticated => Code::Unauthenticated,
            ErrorKind::Incompatible => Code::FailedPrecondition,
            ErrorKind::Corrupt => Code::DataLoss,
            ErrorKind::Internal => Code::Internal,
        };
        Status::new(code, error.message)
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        let kind = match status.code() {
            Code::InvalidArgument | Code::OutOfRange => ErrorKind::InvalidArgument,
            Code::NotFound => ErrorKind::NotFound,
            Code::ResourceExhausted => ErrorKind::Overloaded,
            Code::Aborted => ErrorKind::Aborted,
            Code::DeadlineExceeded => ErrorKind::DeadlineExceeded,
            Code::Cancelled => ErrorKind::Cancelled,
            Code::Unauthenticated | Code::PermissionDenied => ErrorKind::Unauthenticated,
            Code::FailedPrecondition if declared_dead(&status) => ErrorKind::DeclaredDead,
            Code::FailedPrecondition => ErrorKind::Incompatible,
            Code::DataLoss => ErrorKind::Corrupt,
            Code::Internal | Code::Unimplemented => ErrorKind::Internal,
            // Transport errors arrive as Unknown or Unavailable: the peer is away.
            _ => ErrorKind::Unavailable,
        };
        let retry_after = status.get_details_retry_info().and_then(|info| info.retry_delay);
        Self { retry_after, ..Self::new(kind, status.message()) }
    }
}

fn declared_dead(status: &Status) -> bool {
    let failure = status.get_details_precondition_failure();
    failure.is_some_and(|failure| failure.violations.iter().any(|violation| violation.r#type == DECLARED_DEAD))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_the_wire() {
        use ErrorKind::*;
        for kind in [
            InvalidArgument,
            NotFound,
            Overloaded,
            Unavailable,
            Aborted,
            DeadlineExceeded,
            Cancelled,
            Unauthenticated,
            Incompatible,
            DeclaredDead,
            Corrupt,
            Internal,
        ] {
            let back = Error::from(Status::from(Error::new(kind, "why")));
            assert_eq!((back.kind, back.message.as_str()), (kind, "why"));
        }
    }

    #[test]
    fn overload_says_when_to_retry() {
        let status = Status::from(Error::new(ErrorKind::Overloaded, "full"));
        let info = status.get_details_retry_info().expect("retry info");
        assert_eq!(info.retry_delay, Some(RETRY_AFTER));
        let told =
            Error { retry_after: Some(Duration::from_millis(2500)), ..Error::new(ErrorKind::Overloaded, "full") };
        assert_eq!(Error::from(Status::from(told.clone())), told);
    }
}
