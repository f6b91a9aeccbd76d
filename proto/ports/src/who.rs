//! Who is at the other end of a connection: noted at the end of the handshake, and among the extensions of every call
//! and request from then on.
use axum::http::Extensions;
use tokio_rustls::rustls::pki_types::CertificateDer;

use crate::client_name::Client;
use crate::node_tls::Caller;

/// Who is at the other end, as far as a certificate says so.
#[derive(Clone)]
pub(crate) enum Who {
    /// There are no certificates.
    Anybody,
    /// A process of the cluster.
    Process(Caller),
    Client(Client),
}

impl Who {
    /// The handshake is over, and these were good.
    pub fn is_of(&self, certs: Option<&[CertificateDer<'_>]>) {
        match self {
            Self::Anybody => {}
            Self::Process(caller) => caller.is_of(certs),
            Self::Client(client) => client.is_of(certs),
        }
    }

    /// Enters it among those of a request, where a guard looks for it.
    pub fn enter(&self, extensions: &mut Extensions) {
        match self {
            Self::Anybody => {}
            Self::Process(caller) => drop(extensions.insert(caller.clone())),
            Self::Client(client) => drop(client.name().map(|name| extensions.insert(name.clone()))),
        }
    }
}
