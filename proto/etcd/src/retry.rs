//! Attempts after attempts: how long between them, and what of it is worth a line in the log.
use std::time::{Duration, Instant};

use rand::Rng;
use tokio::time::sleep;

use crate::address::EtcdAddress;

const FIRST: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(5);

/// Between attempts. Pure but for [`Self::pause`]: time is an argument, and the random part is, too.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
    whole_since: Option<Instant>,
    /// It was said.
    outage: bool,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next: FIRST, whole_since: None, outage: false }
    }
}

impl Backoff {
    /// What was with `etcd` is lost now: logs it, and `so`, what this means for the owner; then waits.
    pub(crate) async fn pause(&mut self, etcd: &EtcdAddress, error: anyhow::Error, so: &str) {
        let (pause, news) = self.lost(Instant::now(), &mut rand::rng());
        let error = format!("{error:#}");
        if news {
            tracing::warn!(%etcd, error, "etcd is lost, trying again: {so}");
        } else {
            tracing::debug!(%etcd, error, "etcd is still lost");
        }
        sleep(pause).await;
    }

    /// An attempt went well at `now`.
    pub(crate) fn whole(&mut self, now: Instant) {
        self.whole_since = Some(now);
    }

    /// It did not, or what it had is lost at `now`. Returns how long to wait, and whether this is news: processes that
    /// lost etcd at one time come back at different ones, and what does not last is not an end of the outage.
    pub(crate) fn lost(&mut self, now: Instant, random: &mut impl Rng) -> (Duration, bool) {
        let lasted = self.whole_since.take().map(|since| now.saturating_duration_since(since));
        if lasted.is_some_and(|lasted| lasted >= LONGEST) {
            (self.next, self.outage) = (FIRST, false);
        }
        let news = !std::mem::replace(&mut self.outage, true);
        let pause = random.random_range(self.next / 2..=self.next);
        self.next = (self.next * 2).min(LONGEST);
        (pause, news)
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_an_outage_is_news_once() {
        let (mut backoff, mut random, now) = (Backoff::default(), StdRng::seed_from_u64(1), Instant::now());
        let mut lost = |backoff: &mut Backoff, seconds| backoff.lost(now + Duration::from_secs(seconds), &mut random);
        let (pause, news) = lost(&mut backoff, 0);
        assert!(news && pause >= FIRST / 2 && pause <= FIRST);
        for second in 1..20 {
            let (pause, news) = lost(&mut backoff, second);
            assert!(!news && pause <= LONGEST);
        }
        assert!(lost(&mut backoff, 20).0 >= LONGEST / 2);
        // Whole for a moment, and lost again: as a watch that is refused each time it was begun.
        backoff.whole(now + Duration::from_secs(30));
        let (pause, news) = lost(&mut backoff, 31);
        assert!(!news && pause >= LONGEST / 2);
        backoff.whole(now + Duration::from_secs(40));
        let (pause, news) = lost(&mut backoff, 50);
        assert!(news && pause <= FIRST);
        let mut young = Backoff::default();
        young.whole(now);
        assert!(lost(&mut young, 1).1, "the first one, however soon");
    }
}
