//! The node's lives: one for each session with a router. What a router books here belongs to its life, and ends when
//! that does; the lives of other routers go on. One table, one owner: a session opens a life and closes it by dropping
//! its handle; a call joins the life that it names, or is refused. Counts of calls are kept by life, because a router
//! knows of its own ones and of no others. Pure but for who waits: time is an argument.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tandem_proto::{Error, ErrorKind, Life, v1};
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

/// All lives of a node. Clones are handles on the same ones.
#[derive(Clone, Debug, Default)]
pub struct Lives {
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    open: BTreeMap<Life, Open>,
    begun: u64,
    /// Of all calls, those of no life and of lives that are over included.
    all: v1::CallCounts,
}

#[derive(Debug)]
struct Open {
    own: v1::CallCounts,
    /// The router has accepted this node.
    joined: bool,
    /// It takes no call from then on: a session that stood still may not have seen its end yet.
    until: Instant,
    over: CancellationToken,
    /// A call of another life began, read its prompt, or ended.
    others_changed: Arc<Notify>,
}

/// What a prompt of so many tokens counts.
fn one_prompt(tokens: u64) -> v1::CallCounts {
    v1::CallCounts { requests: 0, prompts: 1, prompt_tokens: tokens }
}

/// The calls of all but these.
fn without(all: v1::CallCounts, these: v1::CallCounts) -> v1::CallCounts {
    v1::CallCounts {
        requests: all.requests.saturating_sub(these.requests),
        prompts: all.prompts.saturating_sub(these.prompts),
        prompt_tokens: all.prompt_tokens.saturating_sub(these.prompt_tokens),
    }
}

impl Lives {
    /// Opens a life, until the handle is dropped. Its lease ends at `until`, see [`Session::lasts_until`].
    pub fn open(&self, life: Life, until: Instant) -> Session {
        let (over, others_changed) = (CancellationToken::new(), Arc::<Notify>::default());
        let own = v1::CallCounts::default();
        let open = Open { own, joined: false, until, over, others_changed: others_changed.clone() };
        self.lock().open.insert(life, open);
        Session { lives: self.clone(), life, others_changed }
    }

    /// A call of this life, or of none: that one ends with its connection alone.
    ///
    /// # Errors
    /// `DeclaredDead`: the life is over.
    pub fn join(&self, life: Option<Life>, now: Instant) -> Result<Member, Error> {
        let mut table = self.lock();
        let over = match life {
            None => CancellationToken::new(),
            Some(life) => {
                let open = table.open.get(&life).filter(|open| now < open.until);
                open.ok_or_else(|| ended(life))?.over.clone()
            }
        };
        table.change(life, |counts| counts.requests += 1);
        drop(table);
        Ok(Member { lives: self.clone(), life, over, prompt: Mutex::default() })
    }

    /// Lives that a router has accepted: open ones, and all there were.
    pub fn counts(&self) -> (usize, u64) {
        let table = self.lock();
        (table.open.values().filter(|open| open.joined).count(), table.begun)
    }

    /// Counters and tokens, nothing that a panic could leave half-way.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Changes the counts of a call's life and of all; the sessions of other lives are woken.
    fn change(&mut self, life: Option<Life>, change: impl Fn(&mut v1::CallCounts)) {
        change(&mut self.all);
        for (other, open) in &mut self.open {
            match life == Some(*other) {
                true => change(&mut open.own),
                false => open.others_changed.notify_one(),
            }
        }
    }
}

fn ended(life: Life) -> Error {
    Error::new(ErrorKind::DeclaredDead, format!("the router's session with this node ({life}) is over"))
}

/// An open life. Dropping it ends the life and cancels its calls.
#[derive(Debug)]
pub struct Session {
    lives: Lives,
    life: Life,
    others_changed: Arc<Notify>,
}

impl Session {
    /// Its id.
    pub fn life(&self) -> Life {
        self.life
    }

    /// The router has accepted this node.
    pub fn joined(&self) {
        let mut table = self.lives.lock();
        table.begun += 1;
        table.open.entry(self.life).and_modify(|open| open.joined = true);
    }

    /// Its lease ends then, unless this is called again.
    pub fn lasts_until(&self, until: Instant) {
        self.lives.lock().open.entry(self.life).and_modify(|open| open.until = until);
    }

    /// The calls of this life, and all others.
    pub fn calls(&self) -> (v1::CallCounts, v1::CallCounts) {
        let table = self.lives.lock();
        let own = table.open.get(&self.life).map(|open| open.own).unwrap_or_default();
        (own, without(table.all, own))
    }

    /// Ready when calls of other lives have changed since it was last. Cancel-safe.
    pub async fn others_changed(&self) {
        self.others_changed.notified().await;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let ended = self.lives.lock().open.remove(&self.life);
        if let Some(Open { own, over, .. }) = ended {
            if own.requests > 0 {
                tracing::warn!(life = %self.life, calls = own.requests, "a router's session is over: its calls end");
            }
            over.cancel();
        }
    }
}

/// A call's part in its life; counted until it is dropped.
#[derive(Debug)]
pub struct Member {
    lives: Lives,
    life: Option<Life>,
    over: CancellationToken,
    /// Tokens of the prompt that it has to read.
    prompt: Mutex<Option<u64>>,
}

impl Member {
    /// Whether its life is over.
    pub fn is_over(&self) -> bool {
        self.over.is_cancelled()
    }

    /// Ready when its life is over.
    pub fn over(&self) -> WaitForCancellationFuture<'_> {
        self.over.cancelled()
    }

    /// It has a prompt of so many tokens to read here.
    pub fn reads(&self, tokens: usize) {
        let mut prompt = self.prompt();
        let before = prompt.replace(tokens as u64);
        self.lives.lock().change(self.life, |counts| {
            let rest = before.map_or(*counts, |tokens| without(*counts, one_prompt(tokens)));
            *counts =
                v1::CallCounts { prompts: rest.prompts + 1, prompt_tokens: rest.prompt_tokens + tokens as u64, ..rest };
        });
    }

    /// It has read it.
    pub fn has_read(&self) {
        if let Some(tokens) = self.prompt().take() {
            self.lives.lock().change(self.life, |counts| *counts = without(*counts, one_prompt(tokens)));
        }
    }

    fn prompt(&self) -> MutexGuard<'_, Option<u64>> {
        self.prompt.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.has_read();
        self.lives.lock().change(self.life, |counts| counts.requests = counts.requests.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::FutureExt;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn counts(requests: u32, prompts: u32, prompt_tokens: u64) -> v1::CallCounts {
        v1::CallCounts { requests, prompts, prompt_tokens }
    }

    #[test]
    fn a_life_ends_with_its_session_and_takes_no_other_along() {
        let (lives, now) = (Lives::default(), Instant::now());
        let (one, other) = (lives.open(Life(1), now + HOUR), lives.open(Life(2), now + HOUR));
        [&one, &other].iter().for_each(|session| session.joined());
        let calls = [Some(Life(1)), Some(Life(2)), None].map(|life| lives.join(life, now).unwrap());
        drop(one);
        assert_eq!(calls.each_ref().map(Member::is_over), [true, false, false]);
        assert_eq!(lives.join(Some(Life(1)), now).unwrap_err().kind, ErrorKind::DeclaredDead);
        assert!(lives.join(Some(Life(2)), now).is_ok() && lives.join(None, now).is_ok());
        // The same router again.
        let again = lives.open(Life(3), now + HOUR);
        assert_eq!(lives.counts(), (1, 2), "it has not answered yet");
        again.joined();
        assert!(calls[0].is_over() && !lives.join(Some(Life(3)), now).unwrap().is_over());
        assert_eq!((lives.counts(), again.life()), ((2, 3), Life(3)));
        drop((other, again));
        assert!(calls[1].is_over() && !calls[2].is_over());
        assert_eq!(lives.counts(), (0, 3));
    }

    #[test]
    fn a_lease_that_is_over_takes_no_call_though_nobody_has_seen_its_end() {
        let (lives, now) = (Lives::default(), Instant::now());
        let (session, second) = (lives.open(Life(1), now + HOUR), Duration::from_secs(1));
        session.lasts_until(now + second);
        let call = lives.join(Some(Life(1)), now).unwrap();
        assert_eq!(lives.join(Some(Life(1)), now + second).unwrap_err().kind, ErrorKind::DeclaredDead);
        session.lasts_until(now + 2 * second);
        assert!(lives.join(Some(Life(1)), now + second).is_ok() && !call.is_over());
    }

    #[test]
    fn calls_are_counted_by_life() {
        let (lives, now) = (Lives::default(), Instant::now());
        let (one, other) = (lives.open(Life(1), now + HOUR), lives.open(Life(2), now + HOUR));
        let (first, second) = (lives.join(Some(Life(1)), now).unwrap(), lives.join(Some(Life(2)), now).unwrap());
        let nobodys = lives.join(None, now).unwrap();
        first.reads(100);
        first.reads(40);
        second.reads(7);
        assert_eq!(one.calls(), (counts(1, 1, 40), counts(2, 1, 7)));
        assert_eq!(other.calls(), (counts(1, 1, 7), counts(2, 1, 40)));
        first.has_read();
        first.has_read();
        drop((second, nobodys));
        assert_eq!(one.calls(), (counts(1, 0, 0), counts(0, 0, 0)));
        // What a life that is over still holds counts for the others until it is gone.
        drop(one);
        assert_eq!(other.calls(), (counts(0, 0, 0), counts(1, 0, 0)));
        drop(first);
        assert_eq!(other.calls(), (counts(0, 0, 0), counts(0, 0, 0)));
    }

    #[test]
    fn a_session_is_woken_by_what_it_cannot_know() {
        let (lives, now) = (Lives::default(), Instant::now());
        let (one, other) = (lives.open(Life(1), now + HOUR), lives.open(Life(2), now + HOUR));
        let changed = |session: &Session| session.others_changed().now_or_never().is_some();
        let call = lives.join(Some(Life(1)), now).unwrap();
        assert_eq!((changed(&one), changed(&other)), (false, true));
        assert!(!changed(&other));
        call.reads(9);
        call.has_read();
        drop(call);
        assert_eq!((changed(&one), changed(&other), changed(&other)), (false, true, false));
    }
}
