//! A client of etcd at one of its members, within TLS where the address says so. Everything that it waits for has a
//! bound: a member that stands still is as bad as none. Whoever loses a connection makes another one, with whichever
//! member answers then.
use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use etcd_client::{Channel, Client, ConnectOptions};
use hyper_util::rt::TokioIo;
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

/// For a connection, TLS and the user's token.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// For an answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// A member that vanished without a word is noticed after at most the sum of the two. etcd closes connections that ping
/// more often than each 5 s (`--grpc-keepalive-min-time`).
const KEEP_ALIVE: Duration = Duration::from_secs(8);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(4);

/// A client at the first member that answers, in an order that is another one each time.
///
/// # Errors
/// The files cannot be used now, or no member answers: what the last one said.
pub(crate) async fn connect(etcd: &Etcd) -> anyhow::Result<Client> {
    let reading = etcd.clone();
    // Files may lie on slow disks.
    let access = tokio::task::spawn_blocking(move || reading.access()).await??;
    let mut members = etcd.address.members.clone();
    members.shuffle(&mut rand::rng());
    let mut last = anyhow::anyhow!("no member");
    for member in members {
        let dialled = timeout(CONNECT_TIMEOUT, dial(&member, &access)).await;
        match dialled.context("it does not answer").flatten().with_context(|| member.to_string()) {
            Ok(client) => return Ok(client),
            Err(error) => last = error,
        }
    }
    Err(last)
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

async fn dial(member: &HostPort, access: &Access) -> anyhow::Result<Client> {
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
    let options = ConnectOptions::new().with_require_leader(true);
    let options = match &access.user {
        Some((user, password)) => options.with_user(user, password),
        None => options,
    };
    Ok(Client::from_channel(Channel::Tonic(channel), Some(options)).await?)
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
