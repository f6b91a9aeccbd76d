//! A client of etcd at one of its members, within TLS where the address says so. Everything that it waits for has a
//! bound: a member that hangs counts as down, even while its kernel accepts connections. A lost connection is replaced
//! by one to the next member that answers.
use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use etcd_client::{Channel, Client, ConnectOptions};
use hyper_util::rt::TokioIo;
use rand::Rng;
use rand::seq::SliceRandom;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use tonic::transport::Endpoint;
use tower::service_fn;

use crate::access::{Access, Etcd};
use crate::address::HostPort;

/// For a connection, TLS, the user's token and a first answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// For an answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// A member that vanished without a word is noticed after at most the sum of the two. etcd closes connections that ping
/// more often than each 5 s (`--grpc-keepalive-min-time`).
const KEEP_ALIVE: Duration = Duration::from_secs(8);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(4);

/// The members of a cluster, in an order that each process draws for itself. A member that failed is retried after all
/// others.
pub(crate) struct Members {
    pub(crate) etcd: Etcd,
    order: Vec<HostPort>,
    tried: usize,
}

impl Members {
    pub(crate) fn new(etcd: Etcd, random: &mut impl Rng) -> Self {
        let mut order = etcd.address.members.clone();
        order.shuffle(random);
        Self { etcd, order, tried: 0 }
    }

    /// A client at the next member that answers. What the last call gave is lost, or it would not be called again.
    ///
    /// # Errors
    /// The files cannot be used now, or no member answers: what the last one said.
    pub(crate) async fn connect(&mut self) -> anyhow::Result<Client> {
        let reading = self.etcd.clone();
        // Files may lie on slow disks.
        let access = tokio::task::spawn_blocking(move || reading.access()).await??;
        let mut last = anyhow::anyhow!("no member");
        for _ in 0..self.order.len() {
            let Some(member) = self.next() else { break };
            let dialled = timeout(CONNECT_TIMEOUT, dial(&member, &access, self.etcd.address.prefix())).await;
            match dialled.context("it does not answer").flatten().with_context(|| member.to_string()) {
                Ok(client) => return Ok(client),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn next(&mut self) -> Option<HostPort> {
        let member = self.order.get(self.tried % self.order.len().max(1)).cloned();
        self.tried = self.tried.wrapping_add(1);
        member
    }
}

/// What a call says, in time.
///
/// # Errors
/// It fails, or takes too long.
pub(crate) async fn answer<T>(
    call: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, etcd_client::Error> {
    let late = |_| etcd_client::Error::IoError(io::Error::new(io::ErrorKind::TimedOut, "it does not answer"));
    timeout(CALL_TIMEOUT, call).await.map_err(late)?
}

/// Who accepts a connection may still answer nothing, and only a call tells. This one takes a majority of the members,
/// as those of both owners do, and no leave but the one that these need: to read what is under the prefix.
async fn dial(member: &HostPort, access: &Access, prefix: &str) -> anyhow::Result<Client> {
    let scheme = if access.tls.is_some() { "https" } else { "http" };
    let endpoint = Endpoint::from_shared(format!("{scheme}://{member}"))?;
    let endpoint = endpoint.http2_keep_alive_interval(KEEP_ALIVE).keep_alive_timeout(KEEP_ALIVE_TIMEOUT);
    let channel = match &access.tls {
        None => endpoint.connect().await,
        Some(tls) => {
            let (member, tls) = (member.clone(), Arc::clone(tls));
            endpoint.connect_with_connector(service_fn(move |_| within_tls(member.clone(), Arc::clone(&tls)))).await
        }
    };
    let channel = channel.map_err(|error| anyhow::anyhow!(causes(&error)))?;
    // A watch ends at a member that lost its leader: another one may have it.
    // etcd forgets a token that was not shown for a while: a watch shows it once, and lists much later.
    let options = ConnectOptions::new().with_require_leader(true).with_auto_token_refresh(true);
    let options = match &access.user {
        Some((user, password)) => options.with_user(user, password),
        None => options,
    };
    let mut client = Client::from_channel(Channel::Tonic(channel), Some(options)).await?;
    client.get(prefix, None).await?;
    Ok(client)
}

type TlsStream = TokioIo<tokio_rustls::client::TlsStream<TcpStream>>;

async fn within_tls(member: HostPort, tls: Arc<ClientConfig>) -> io::Result<TlsStream> {
    let stream = TcpStream::connect((member.host(), member.port())).await?;
    stream.set_nodelay(true)?;
    let name = ServerName::try_from(member.host().to_owned()).map_err(io::Error::other)?;
    TlsConnector::from(tls).connect(name, stream).await.map(TokioIo::new)
}

/// An error of tonic's says little, its causes more.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;
    use tokio::net::TcpListener;

    use super::*;
    use crate::access::EtcdArgs;

    #[test]
    fn who_has_failed_is_tried_after_all_others() {
        let etcd = Etcd::new("etcd://a,b,c/p".parse().unwrap(), EtcdArgs::default()).unwrap();
        let orders = (0..20).map(|seed| {
            let mut members = Members::new(etcd.clone(), &mut StdRng::seed_from_u64(seed));
            let tried: Vec<_> = (0..7).map(|_| members.next().unwrap()).collect();
            assert!(tried[..3] == tried[3..6] && tried[0] == tried[6], "{tried:?}");
            tried[0].host().to_owned()
        });
        let first: std::collections::BTreeSet<_> = orders.collect();
        assert_eq!(first.len(), 3, "not all processes dial the same member first");
    }

    #[tokio::test]
    async fn a_member_that_answers_nothing_is_none() {
        // Its kernel takes connections.
        let still = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let member: HostPort = still.local_addr().unwrap().into();
        let access = Access { tls: None, user: None };
        let dialled = timeout(Duration::from_millis(300), dial(&member, &access, "/p/")).await;
        assert!(dialled.is_err(), "a client of a member that has said nothing");
    }
}
