//! One key under a prefix of etcd, for as long as its owner wants it there. It hangs on a lease: if the owner dies,
//! etcd removes the key [`TTL`] later. One task renews the lease and looks whether the key is still there. An etcd that
//! was away, restarted or emptied has it back soon; a process that stood still comes back by itself.
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use etcd_client::{Client, Error, GetOptions, PutOptions};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::Code;

use crate::access::Etcd;
use crate::address::{EtcdAddress, HostPort};
use crate::connection::{Members, answer};
use crate::retry::Backoff;

/// From the owner's last sign of life to the end of its key.
pub const TTL: Duration = Duration::from_secs(10);
/// Between two renewals: two may be lost.
const BEAT: Duration = Duration::from_secs(3);
/// For the removal of the key, half of it for the session's member. If etcd does not take it in time, the lease ends by
/// itself.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Whether a key is registered now. The router's metrics read it.
#[derive(Clone, Debug)]
pub struct Standing {
    etcd: Arc<str>,
    end: Arc<Mutex<Option<Instant>>>,
}

impl Standing {
    /// Of a key that will be there.
    pub fn new(etcd: &EtcdAddress) -> Self {
        Self { etcd: etcd.to_string().into(), end: Arc::default() }
    }

    /// Where.
    pub fn etcd(&self) -> &Arc<str> {
        &self.etcd
    }

    /// At `now`, as of its last renewal: what etcd has lost since then is missed at the next.
    pub fn is_there(&self, now: Instant) -> bool {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|end| now < end)
    }

    fn until(&self, end: Option<Instant>) {
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = end;
    }
}

/// An address that stands in etcd, or will. If this is dropped, nobody renews the key any more.
#[derive(Debug)]
pub struct Registered {
    leave: CancellationToken,
    task: AbortOnDropHandle<()>,
}

impl Registered {
    /// Puts `address` there, under a key of the same name, now or when etcd is there; `standing` shows it.
    pub fn start(etcd: Etcd, address: &HostPort, standing: Standing) -> Self {
        let leave = CancellationToken::new();
        let key = format!("{}{address}", etcd.address.prefix());
        let owner = Owner {
            members: Members::new(etcd, &mut rand::rng()),
            client: None,
            key,
            value: address.to_string(),
            lease: None,
            standing,
            backoff: Backoff::default(),
        };
        Self { task: AbortOnDropHandle::new(tokio::spawn(owner.run(leave.clone()))), leave }
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
    members: Members,
    /// Of the session, while that is whole.
    client: Option<Client>,
    key: String,
    value: String,
    /// The key hangs on it.
    lease: Option<i64>,
    standing: Standing,
    backoff: Backoff,
}

impl Owner {
    async fn run(mut self, leave: CancellationToken) {
        tokio::select! {
            biased;
            () = leave.cancelled() => {}
            () = self.stay() => {}
        }
        self.standing.until(None);
        let Some(lease) = self.lease else { return };
        match timeout(LEAVE_TIMEOUT, self.revoke(lease)).await.context("it does not answer").flatten() {
            Ok(()) => tracing::info!(key = self.key, "left etcd"),
            Err(error) => {
                let error = format!("{error:#}");
                tracing::warn!(key = self.key, error, "cannot leave etcd: the key ends with its lease");
            }
        }
    }

    async fn stay(&mut self) {
        loop {
            let Err(error) = self.session().await;
            self.client = None;
            self.backoff.pause(&self.members.etcd.address, error, "this process serves on").await;
        }
    }

    async fn session(&mut self) -> anyhow::Result<std::convert::Infallible> {
        let mut client = self.members.connect().await?;
        self.client = Some(client.clone());
        let mut first = true;
        loop {
            let begun = Instant::now();
            let lease = self.renewed(&mut client).await?;
            let put = self.put_if_missing(&mut client, lease).await?;
            self.standing.until(Some(begun + TTL));
            let (etcd, key) = (&self.members.etcd.address, &self.key);
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

    /// By the member that answered last, and if it does not now, by another one.
    async fn revoke(&mut self, lease: i64) -> anyhow::Result<()> {
        if let Some(client) = &mut self.client
            && let Ok(Ok(_)) = timeout(LEAVE_TIMEOUT / 2, client.lease_revoke(lease)).await
        {
            return Ok(());
        }
        self.members.connect().await?.lease_revoke(lease).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_there_until_its_lease_is_over() {
        let (standing, now) = (Standing::new(&"etcd://h/p".parse().unwrap()), Instant::now());
        assert!(!standing.is_there(now));
        standing.until(Some(now + TTL));
        assert!(standing.is_there(now) && standing.clone().is_there(now + TTL / 2) && !standing.is_there(now + TTL));
        standing.until(None);
        assert!(!standing.is_there(now));
    }
}
