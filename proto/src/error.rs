//! One error for what crosses a process border, shaped by what the caller does next, and its one mapping to gRPC.
//! HTTP's mapping stands in the router's `http` module.
use std::collections::HashMap;
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

/// What programs tell apart within a kind, by the names that OpenAI's API has for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// Prompt and answer have more tokens than the model's context: a shorter request may pass.
    ContextLengthExceeded,
    /// The key's own rate, not the cluster's load.
    RateLimitExceeded,
}

impl ErrorCode {
    const ALL: [Self; 2] = [Self::ContextLengthExceeded, Self::RateLimitExceeded];

    /// As HTTP's `error.code` and gRPC's `google.rpc.ErrorInfo.reason` have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::RateLimitExceeded => "rate_limit_exceeded",
        }
    }
}

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
    /// For programs, where the kind does not say enough.
    pub code: Option<ErrorCode>,
    /// When it is worth another try. Of `Overloaded`, [`RETRY_AFTER`] where nobody can tell; of `Unavailable`, where it
    /// is known.
    pub retry_after: Option<Duration>,
}

/// Tells [`ErrorKind::DeclaredDead`] from the other failed preconditions on the wire: the type of a
/// `google.rpc.PreconditionFailure` violation.
const DECLARED_DEAD: &str = "INCARNATION_DECLARED_DEAD";

/// Whose [`ErrorCode`] an `ErrorInfo` holds.
const DOMAIN: &str = "tandem";

/// Told to clients that are refused for load when it is not known how long that lasts.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

impl Error {
    /// An error without a field.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// A wrong request field.
    pub fn invalid(param: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(param), ..Self::new(ErrorKind::InvalidArgument, message) }
    }

    /// The same error, with a code for programs.
    pub fn with_code(self, code: ErrorCode) -> Self {
        Self { code: Some(code), ..self }
    }

    /// What goes beside the message on gRPC.
    fn details(&self) -> ErrorDetails {
        let mut details = ErrorDetails::new();
        match self.kind {
            ErrorKind::Overloaded => {
                details.set_retry_info(Some(self.retry_after.unwrap_or(RETRY_AFTER)));
            }
            ErrorKind::Unavailable => {
                details.set_retry_info(self.retry_after);
            }
            ErrorKind::DeclaredDead => {
                details.add_precondition_failure_violation(DECLARED_DEAD, "incarnation", "");
            }
            _ => {}
        }
        if let Some(code) = self.code {
            details.set_error_info(code.name(), DOMAIN, HashMap::new());
        }
        details
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let code = match error.kind {
            ErrorKind::InvalidArgument => Code::InvalidArgument,
            ErrorKind::NotFound => Code::NotFound,
            ErrorKind::Overloaded => Code::ResourceExhausted,
            ErrorKind::Unavailable => Code::Unavailable,
            ErrorKind::Aborted => Code::Aborted,
            ErrorKind::DeadlineExceeded => Code::DeadlineExceeded,
            ErrorKind::Cancelled => Code::Cancelled,
            ErrorKind::Unauthenticated => Code::Unauthenticated,
            ErrorKind::DeclaredDead | ErrorKind::Incompatible => Code::FailedPrecondition,
            ErrorKind::Corrupt => Code::DataLoss,
            ErrorKind::Internal => Code::Internal,
        };
        let detailed = match error.kind {
            ErrorKind::Overloaded | ErrorKind::DeclaredDead => true,
            ErrorKind::Unavailable if error.retry_after.is_some() => true,
            _ => error.code.is_some(),
        };
        match detailed {
            true => Status::with_error_details(code, error.message.clone(), error.details()),
            false => Status::new(code, error.message),
        }
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
        Self { retry_after, code: code(&status), ..Self::new(kind, status.message()) }
    }
}

fn code(status: &Status) -> Option<ErrorCode> {
    let info = status.get_details_error_info().filter(|info| info.domain == DOMAIN)?;
    ErrorCode::ALL.into_iter().find(|code| code.name() == info.reason)
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
        for kind in [ErrorKind::Overloaded, ErrorKind::Unavailable] {
            let told = Error { retry_after: Some(Duration::from_millis(2500)), ..Error::new(kind, "full") };
            assert_eq!(Error::from(Status::from(told.clone())), told);
        }
        let away = Status::from(Error::new(ErrorKind::Unavailable, "away"));
        assert!(away.details().is_empty(), "nobody can tell");
    }

    #[test]
    fn codes_survive_the_wire_beside_the_time_to_retry() {
        for code in ErrorCode::ALL {
            let kind = match code {
                ErrorCode::ContextLengthExceeded => ErrorKind::InvalidArgument,
                ErrorCode::RateLimitExceeded => ErrorKind::Overloaded,
            };
            let error = Error::new(kind, "why").with_code(code);
            let status = Status::from(error.clone());
            assert_eq!(status.get_details_retry_info().is_some(), kind == ErrorKind::Overloaded);
            let back = Error::from(status);
            assert_eq!((back.kind, back.code), (kind, Some(code)));
        }
        assert_eq!(Error::from(Status::from(Error::new(ErrorKind::Overloaded, "full"))).code, None);
    }
}
