//! Calls in flight: how many there may be, how they ended, how many tokens they had, and when the last one is over.
//! Each belongs to a life of the node ([`Lives`]) and is cancelled when that one is over. A call is in flight once it
//! has said what it is for; a drain ends those that have not, and waits for the others.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tandem_proto::{Error, ErrorKind, Life, START_TIMEOUT};
use tandem_telemetry::clock;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::lives::{Lives, Member};
use crate::tasks::Tasks;

/// The node's calls. Clones are handles on the same ones.
#[derive(Clone, Debug)]
pub struct Work {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    permits: Arc<Semaphore>,
    /// Places of calls that have said nothing: as many, and what routers may have open ahead.
    openings: Arc<Semaphore>,
    limit: usize,
    tracker: TaskTracker,
    tasks: Tasks,
    draining: CancellationToken,
    lives: Lives,
    outcomes: [AtomicU64; OUTCOMES.len()],
    prompt_tokens: AtomicU64,
    generated_tokens: AtomicU64,
}

/// Calls that have said nothing, beyond those that may be in flight: each router has some open before it needs them,
/// and opens a new one before it has closed one that got too old.
const AHEAD: usize = 64;

/// Labels of `tandem_requests_total{outcome}`.
pub const OUTCOMES: [&str; 12] = [
    "ok",
    "invalid_argument",
    "not_found",
    "overloaded",
    "unavailable",
    "aborted",
    "deadline_exceeded",
    "cancelled",
    "incompatible",
    "corrupt",
    "internal",
    "declared_dead",
];

const CANCELLED: usize = 7;
const DECLARED_DEAD: usize = 11;

impl Work {
    /// At most `limit` calls at once.
    pub fn new(limit: usize) -> Self {
        Self::on(Tasks::default(), limit)
    }

    /// At most `limit` calls at once, which run on `tasks`.
    pub fn on(tasks: Tasks, limit: usize) -> Self {
        let places = |count: usize| Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)));
        let inner = Inner {
            permits: places(limit),
            openings: places(limit.saturating_add(AHEAD)),
            limit,
            tracker: TaskTracker::new(),
            tasks,
            draining: CancellationToken::new(),
            lives: Lives::default(),
            outcomes: Default::default(),
            prompt_tokens: AtomicU64::new(0),
            generated_tokens: AtomicU64::new(0),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Takes in a call of this life that has said nothing.
    ///
    /// # Errors
    /// `Unavailable` while draining, `Overloaded` where too many of them wait.
    pub fn open(&self, life: Option<Life>) -> Result<Opened, Error> {
        let full = || "too many calls to this node have not said what they are for".to_owned();
        Ok(Opened { _permit: self.place(&self.inner.openings, full)?, life, work: self.clone() })
    }

    /// Admits a call.
    ///
    /// # Errors
    /// `Unavailable` while draining, `Overloaded` at the limit, `DeclaredDead` when its life is over.
    pub fn begin(&self, life: Option<Life>) -> Result<Call, Error> {
        let full = || format!("this node has its {} calls already", self.inner.limit);
        let permit = self.place(&self.inner.permits, full)?;
        let member = Arc::new(self.inner.lives.join(life, clock::now())?);
        Ok(Call { _permit: permit, _token: self.inner.tracker.token(), work: self.clone(), member, outcome: CANCELLED })
    }

    fn place(&self, places: &Arc<Semaphore>, full: impl FnOnce() -> String) -> Result<OwnedSemaphorePermit, Error> {
        if self.is_draining() {
            return Err(draining());
        }
        places.clone().try_acquire_owned().map_err(|_| Error::new(ErrorKind::Overloaded, full()))
    }

    /// The lives that calls belong to.
    pub fn lives(&self) -> &Lives {
        &self.inner.lives
    }

    /// Where calls run.
    pub fn tasks(&self) -> &Tasks {
        &self.inner.tasks
    }

    /// Calls in flight.
    pub fn in_flight(&self) -> usize {
        self.inner.tracker.len()
    }

    /// Refuses new calls from now on.
    pub fn drain(&self) {
        self.inner.draining.cancel();
        self.inner.tracker.close();
    }

    /// Whether [`Work::drain`] was called.
    pub fn is_draining(&self) -> bool {
        self.inner.draining.is_cancelled()
    }

    /// Ready once [`Work::drain`] is called.
    pub async fn draining(&self) {
        self.inner.draining.cancelled().await;
    }

    /// Ready once a drain has begun and no call is left.
    pub async fn drained(&self) {
        self.inner.tracker.wait().await;
    }

    /// Counts a prompt whose KV is here, and tokens of answers.
    pub fn count_tokens(&self, prompt: usize, generated: u64) {
        self.inner.prompt_tokens.fetch_add(prompt as u64, Ordering::Relaxed);
        self.inner.generated_tokens.fetch_add(generated, Ordering::Relaxed);
    }

    /// Tokens of prompts and of answers so far.
    pub fn tokens(&self) -> (u64, u64) {
        (self.inner.prompt_tokens.load(Ordering::Relaxed), self.inner.generated_tokens.load(Ordering::Relaxed))
    }

    /// How many calls ended how, by label.
    pub fn outcomes(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let counts = self.inner.outcomes.iter().map(|count| count.load(Ordering::Relaxed));
        OUTCOMES.into_iter().zip(counts)
    }
}

/// A call that has said nothing.
#[derive(Debug)]
pub struct Opened {
    work: Work,
    life: Option<Life>,
    _permit: OwnedSemaphorePermit,
}

impl Opened {
    /// Waits for what it is for, its first message, and admits it.
    ///
    /// # Errors
    /// `start`'s own, `Unavailable` when it takes longer than [`START_TIMEOUT`], and those of [`Work::begin`].
    pub async fn begin<S>(self, start: impl Future<Output = Result<S, Error>>) -> Result<(Call, S), Error> {
        let Self { work, life, .. } = &self;
        let silent = |_| Error::new(ErrorKind::Unavailable, format!("the call said nothing for {START_TIMEOUT:?}"));
        let start = tokio::select! {
            biased;
            start = timeout(START_TIMEOUT, start) => start.map_err(silent)??,
            () = work.draining() => return Err(draining()),
        };
        Ok((work.begin(*life)?, start))
    }
}

fn draining() -> Error {
    Error::new(ErrorKind::Unavailable, "this node is draining: it takes no new requests")
}

/// One call in flight; counted when dropped, as cancelled unless it ended before.
#[derive(Debug)]
pub struct Call {
    work: Work,
    member: Arc<Member>,
    outcome: usize,
    _permit: OwnedSemaphorePermit,
    _token: TaskTrackerToken,
}

impl Call {
    /// Where this one runs.
    pub fn tasks(&self) -> Tasks {
        self.work.tasks().clone()
    }

    /// Its part in the life of the node that it belongs to.
    pub fn member(&self) -> &Arc<Member> {
        &self.member
    }

    /// The call ended by itself.
    pub fn end(mut self, result: &Result<(), Error>) {
        self.outcome = match result {
            Ok(()) => 0,
            Err(error) => outcome(error.kind),
        };
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.work.inner.outcomes[self.outcome].fetch_add(1, Ordering::Relaxed);
    }
}

/// Index in [`OUTCOMES`].
pub(crate) fn outcome(kind: ErrorKind) -> usize {
    match kind {
        ErrorKind::InvalidArgument => 1,
        ErrorKind::NotFound => 2,
        ErrorKind::Overloaded => 3,
        ErrorKind::Unavailable => 4,
        ErrorKind::Aborted => 5,
        ErrorKind::DeadlineExceeded => 6,
        ErrorKind::Cancelled => CANCELLED,
        ErrorKind::Incompatible => 8,
        ErrorKind::Corrupt => 9,
        // Nobody has keys here: the router asks clients for them.
        ErrorKind::Internal | ErrorKind::Unauthenticated => 10,
        ErrorKind::DeclaredDead => DECLARED_DEAD,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admits_up_to_the_limit_and_counts_ends() {
        let work = Work::new(2);
        let (first, second) = (work.begin(None).unwrap(), work.begin(None).unwrap());
        assert_eq!(work.begin(None).unwrap_err().kind, ErrorKind::Overloaded);
        first.end(&Ok(()));
        second.end(&Err(Error::new(ErrorKind::Corrupt, "x")));
        drop(work.begin(None).unwrap());
        let counted: Vec<_> = work.outcomes().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted, [("ok", 1), ("cancelled", 1), ("corrupt", 1)]);
        assert_eq!(work.in_flight(), 0);
    }

    #[tokio::test]
    async fn drains_when_the_last_call_ends() {
        let work = Work::new(2);
        let call = work.begin(None).unwrap();
        work.drain();
        assert_eq!(work.begin(None).unwrap_err().kind, ErrorKind::Unavailable);
        let waiting = tokio::spawn({
            let work = work.clone();
            async move { work.drained().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(call);
        waiting.await.unwrap();
    }
}
