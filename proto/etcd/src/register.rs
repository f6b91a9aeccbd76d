//! One key under a prefix of etcd, for as long as its owner wants it there. It hangs on a lease: if the owner dies,
//! etcd removes the key [`TTL`] later. One task renews the lease and looks whether the key is still there. An etcd that
//! was away, restarted or emptied has it back soon; a process that stood still comes back by itself.
use std::time::{Duration, Instant};

use anyhow::Context;
use etcd_client::{Client, Error, GetOptions, PutOptions};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::access::Etcd;
use crate::address::HostPort;
use crate::connection::{answer, connect};
use crate::retry::Backoff;

/// From the owner's last sign of life to the end of its key.
pub const TTL: Duration = Duration::from_secs(10);
/// Between two renewals: two may be lost.
const BEAT: Duration = Duration::from_secs(3);
/// For the removal of the key. If etcd does not take it in time, the lease ends by itself.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// An address that stands in etcd, or will.
#[derive(Debug)]
pub struct Registered {
    leave: CancellationToken,
    task: JoinHandle<()>,
}

impl Registered {
    /// Puts `address` there, under a key of the same name, now or when etcd is there.
    pub fn start(etcd: Etcd, address: &HostPort) -> Self {
        let leave = CancellationToken::new();
        let key = format!("{}{address}", etcd.address.prefix());
        let owner = Owner { etcd, key, value: address.to_string(), lease: None, backoff: Backoff::default() };
        Self { task: tokio::spawn(owner.run(leave.clone())), leave }
    }

    /// Takes it away. Ends within a second or so, whether etcd is there or not.
    pub async fn leave(self) {
        self.leave.cancel();
        // A panic is in the log.
        let _ = self.task.await;
    }
}

/// Of the key.
struct Owner {
    etcd: Etcd,
    key: String,
    value: String,
    /// The key hangs on it.
    lease: Option<i64>,
    backoff: Backoff,
}

impl Owner {
    async fn run(mut self, leave: CancellationToken) {
        loop {
            let lost = tokio::select! {
                biased;
                () = leave.cancelled() => break,
                lost = self.session() => lost,
            };
            let Err(error) = lost;
            let (pause, news) = self.backoff.lost(Instant::now(), &mut rand::rng());
            let (etcd, error) = (&self.etcd.address, format!("{error:#}"));
            if news {
                tracing::warn!(%etcd, error, "etcd is lost, trying again: this process serves on");
            } else {
                tracing::debug!(%etcd, error, "etcd is still lost");
            }
            tokio::select! {
                biased;
                () = leave.cancelled() => break,
                () = sleep(pause) => {}
            }
        }
        let Some(lease) = self.lease else { return };
        match timeout(LEAVE_TIMEOUT, self.revoke(lease)).await.context("it does not answer").flatten() {
            Ok(()) => tracing::info!(key = self.key, "left etcd"),
            Err(error) => {
                let error = format!("{error:#}");
                tracing::warn!(key = self.key, error, "cannot leave etcd: the key ends with its lease");
            }
        }
    }

    async fn session(&mut self) -> anyhow::Result<std::convert::Infallible> {
        let mut client = connect(&self.etcd).await?;
        let mut first = true;
        loop {
            let lease = self.renewed(&mut client).await?;
            let put = self.put_if_missing(&mut client, lease).await?;
            let (etcd, key) = (&self.etcd.address, &self.key);
            if put {
                tracing::info!(%etcd, key, "registered in etcd");
            } else if first {
                tracing::info!(%etcd, key, "still registered in etcd");
            }
            if std::mem::take(&mut first) {
                self.backoff.whole(Instant::now());
            }
            sleep(BEAT).await;
        }
    }

    /// The lease, renewed, or another one if it is over.
    async fn renewed(&mut self, client: &mut Client) -> anyhow::Result<i64> {
        if let Some(lease) = self.lease {
            match answer(client.lease_keep_alive(lease)).await {
                Ok(_) => return Ok(lease),
                // What etcd says of a lease that it does not know.
                Err(Error::LeaseKeepAliveError(_)) => self.lease = None,
                Err(error) => return Err(error.into()),
            }
        }
        let granted = answer(client.lease_grant(TTL.as_secs().cast_signed(), None)).await?;
        Ok(*self.lease.insert(granted.id()))
    }

    /// Whether the key was not there, or hung on another lease, as after a restart of this process.
    async fn put_if_missing(&mut self, client: &mut Client, lease: i64) -> anyhow::Result<bool> {
        let found = answer(client.get(self.key.as_str(), Some(GetOptions::new().with_limit(1)))).await?;
        let own = |pair: &etcd_client::KeyValue| pair.lease() == lease && pair.value() == self.value.as_bytes();
        if found.kvs().first().is_some_and(own) {
            return Ok(false);
        }
        let options = PutOptions::new().with_lease(lease);
        match answer(client.put(self.key.as_str(), self.value.as_str(), Some(options))).await {
            Ok(_) => Ok(true),
            Err(error) => {
                if matches!(&error, Error::GRpcStatus(status) if status.code() == Code::NotFound) {
                    self.lease = None;
                }
                Err(error.into())
            }
        }
    }

    async fn revoke(&self, lease: i64) -> anyhow::Result<()> {
        connect(&self.etcd).await?.lease_revoke(lease).await?;
        Ok(())
    }
}
