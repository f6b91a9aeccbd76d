//! Counts the registrations that were refused, by the kind of the refusal: an operator looks there for nodes of another
//! model, for a namesake, and for strangers who have the token.
use std::sync::{Arc, Mutex, PoisonError};

use tandem_ports::JoinGuard;
use tandem_proto::{ERROR_KINDS, ErrorKind};

use super::Membership;

/// What registrations are refused for: these are shown before there was one.
const USUAL: [ErrorKind; 5] = [
    ErrorKind::InvalidArgument,
    ErrorKind::Incompatible,
    ErrorKind::Unavailable,
    ErrorKind::DeclaredDead,
    ErrorKind::Overloaded,
];

/// Clones count together.
#[derive(Clone, Debug, Default)]
pub struct Refusals(Arc<Mutex<[u64; ERROR_KINDS.len()]>>);

impl Refusals {
    /// One more.
    pub(super) fn count(&self, kind: ErrorKind) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, count) in ERROR_KINDS.iter().zip(counts.iter_mut()).filter(|(known, _)| **known == kind) {
            *count += 1;
        }
    }

    /// Those that there were, since the start.
    pub fn counts(&self) -> Vec<(ErrorKind, u64)> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ERROR_KINDS.into_iter().zip(*counts).filter(|(kind, count)| *count > 0 || USUAL.contains(kind)).collect()
    }
}

impl Membership {
    /// What stands before the port on which nodes join.
    pub fn strangers(&self) -> &JoinGuard {
        &self.strangers
    }

    /// Registrations that were refused.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }
}
