//! What stands under a prefix of etcd, now and later. One task reads all of it, and again when the watch from that
//! revision on says that something has changed: a watch says when to look, a list says what is there. A compaction, a
//! restart or an etcd that was emptied are then nothing special.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use etcd_client::{Client, GetOptions, WatchOptions};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

use crate::access::Etcd;
use crate::connection::{Members, answer};
use crate::retry::Backoff;

/// Keys that are read. What stands behind them in their order is left out, which is logged.
pub const MAX_KEYS: usize = 64;
/// Bytes of a value that is read.
const MAX_VALUE: usize = 512;
/// Between two readings: many changes at once are read once.
const SETTLES: Duration = Duration::from_millis(100);

/// What stands there: values by their keys, the latter without the prefix.
pub type Entries = BTreeMap<String, String>;

/// The entries, for whoever waits for them. The task ends when this is dropped.
#[derive(Debug)]
pub struct Watched {
    entries: watch::Receiver<Option<Arc<Entries>>>,
    _task: AbortOnDropHandle<()>,
}

impl Watched {
    /// Begins at once. While etcd cannot be reached, there is nothing new.
    pub fn start(etcd: Etcd) -> Self {
        let (tell, entries) = watch::channel(None);
        let members = Members::new(etcd, &mut rand::rng());
        let task = tokio::spawn(Watcher { members, tell, backoff: Backoff::default(), odd: Vec::new() }.run());
        Self { entries, _task: AbortOnDropHandle::new(task) }
    }

    /// Waits until something has changed since the call before, at the first one until the prefix was read. A call that
    /// is dropped has taken nothing.
    pub async fn changed(&mut self) -> Arc<Entries> {
        if self.entries.changed().await.is_err() {
            // The task panicked, which is in the log: what is known stays.
            std::future::pending::<()>().await;
        }
        self.entries.borrow_and_update().clone().unwrap_or_default()
    }
}

struct Watcher {
    members: Members,
    /// `None`: the prefix was never read.
    tell: watch::Sender<Option<Arc<Entries>>>,
    backoff: Backoff,
    /// What was wrong in the last list: it is logged once.
    odd: Vec<String>,
}

impl Watcher {
    async fn run(mut self) {
        loop {
            let Err(error) = self.session().await;
            self.backoff.pause(&self.members.etcd.address, error, "what is known stays").await;
        }
    }

    async fn session(&mut self) -> anyhow::Result<std::convert::Infallible> {
        let mut client = self.members.connect().await?;
        let prefix = self.members.etcd.address.prefix().to_owned();
        let revision = self.list(&mut client).await?;
        let from_there = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        let mut changes = answer(client.watch(prefix.as_str(), Some(from_there))).await?;
        tracing::info!(etcd = %self.members.etcd.address, revision, "watching etcd");
        self.backoff.whole(Instant::now());
        loop {
            // Keep-alive pings end a connection to nobody.
            let response = changes.message().await?.context("it ended the watch")?;
            if response.canceled() {
                bail!("it ended the watch: {}", reason(response.compact_revision(), response.cancel_reason()));
            }
            if !response.events().is_empty() {
                sleep(SETTLES).await;
                self.list(&mut client).await?;
            }
        }
    }

    /// Says what is there, and returns the revision that this is of.
    async fn list(&mut self, client: &mut Client) -> anyhow::Result<i64> {
        let etcd = &self.members.etcd.address;
        let prefix = etcd.prefix();
        let options = GetOptions::new().with_prefix().with_limit(MAX_KEYS as i64);
        let response = answer(client.get(prefix, Some(options))).await?;
        let pairs = response.kvs().iter().map(|pair| (pair.key(), pair.value()));
        let (entries, mut odd) = read(prefix, pairs);
        if response.more() {
            odd.push(format!("more than {MAX_KEYS} keys: the last ones are left out"));
        }
        for what in odd.iter().filter(|what| !self.odd.contains(what)) {
            tracing::warn!(%etcd, "{what}");
        }
        self.odd = odd;
        self.tell.send_if_modified(|known| {
            let differs = known.as_deref() != Some(&entries);
            *known = Some(Arc::new(entries));
            differs
        });
        Ok(response.header().context("an answer without a revision")?.revision())
    }
}

fn reason(compacted: i64, reason: &str) -> String {
    if compacted > 0 { format!("compacted up to revision {compacted}") } else { reason.to_owned() }
}

/// What of these counts, and what is odd about the others. Pure.
fn read<'a>(prefix: &str, pairs: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> (Entries, Vec<String>) {
    let (mut entries, mut odd) = (Entries::new(), Vec::new());
    for (key, value) in pairs {
        let key = String::from_utf8_lossy(key);
        let key = key.strip_prefix(prefix).unwrap_or(&key);
        match std::str::from_utf8(value) {
            Ok(value) if value.len() <= MAX_VALUE => drop(entries.insert(key.to_owned(), value.to_owned())),
            Ok(value) => odd.push(format!("{} has a value of {} bytes: it is skipped", short(key), value.len())),
            Err(_) => odd.push(format!("{} has a value that is no text: it is skipped", short(key))),
        }
    }
    (entries, odd)
}

/// A key as it stands in the log.
fn short(key: &str) -> String {
    format!("{:?}", key.chars().take(100).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_a_bounded_length_count() {
        let long = [b'a'; MAX_VALUE + 1];
        let pairs: [(&[u8], &[u8]); 4] =
            [(b"/p/a", b"10.0.0.1:1"), (b"/p/b", &long), (b"/p/c", b"\xff"), (b"/p/d", &long[1..])];
        let (entries, odd) = read("/p/", pairs.into_iter());
        assert_eq!(entries.keys().collect::<Vec<_>>(), ["a", "d"]);
        assert_eq!(entries["a"], "10.0.0.1:1");
        assert_eq!(
            odd,
            ["\"b\" has a value of 513 bytes: it is skipped", "\"c\" has a value that is no text: it is skipped"]
        );
        assert!(short(&"x".repeat(5000)).len() < 110);
    }
}
