//! Who may open a hand-off: whoever proves to have the key in its ticket.
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use tandem_proto::HandoffId;

use super::Registry;
use crate::error::Refusal;
use crate::handshake::{self, Nonces, Proof, Secret};

/// Keys remembered, those of hand-offs that are over included: their senders are still told so.
const KNOWN_KEYS: usize = 16 * 1024;

/// The last [`KNOWN_KEYS`] keys.
#[derive(Default)]
pub(super) struct Secrets {
    order: VecDeque<HandoffId>,
    by_handoff: HashMap<HandoffId, Arc<Secret>>,
}

impl Secrets {
    /// Of a hand-off that is granted now.
    pub fn insert(&mut self, handoff: HandoffId, secret: Secret) {
        self.by_handoff.insert(handoff, Arc::new(secret));
        self.order.push_back(handoff);
        if self.order.len() > KNOWN_KEYS
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_handoff.remove(&oldest);
        }
    }
}

/// That a peer has the key of a hand-off. Opens it ([`Registry::open`]).
pub struct Authenticated {
    pub(super) handoff: HandoffId,
    secret: Arc<Secret>,
}

impl Authenticated {
    /// What answers the peer, and protects what it sends.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }
}

impl Registry {
    /// Whether a hello was made with its hand-off's key. Nothing has happened yet, whatever it said; a refusal is
    /// counted.
    ///
    /// # Errors
    /// `Unknown` or `Unauthenticated`: answer it where that costs nothing.
    pub fn authenticate(&self, hello: &handshake::Hello<'_>) -> Result<Authenticated, Refusal> {
        self.authenticated(hello.handoff, |secret| secret.made(hello))
    }

    /// The same for a hand-off that joins a connection, which another one opened with these nonces.
    ///
    /// # Errors
    /// As [`Registry::authenticate`].
    pub fn authenticate_join(&self, handoff: HandoffId, proof: &Proof, on: Nonces) -> Result<Authenticated, Refusal> {
        self.authenticated(handoff, |secret| secret.joins(proof, on))
    }

    fn authenticated(
        &self,
        handoff: HandoffId,
        has_key: impl FnOnce(&Secret) -> bool,
    ) -> Result<Authenticated, Refusal> {
        let secret = self.lock().secrets.by_handoff.get(&handoff).cloned();
        let refused = match secret {
            None => Refusal::Unknown,
            Some(secret) if has_key(&secret) => return Ok(Authenticated { handoff, secret }),
            Some(_) => Refusal::Unauthenticated,
        };
        self.counters.count_refusal(refused);
        Err(refused)
    }
}
