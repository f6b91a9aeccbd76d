//! Who works for whom, as nobody in the system knows it: what the invariants are checked against.
use std::collections::BTreeMap;
use std::time::Duration;

use super::network::{Call, SLOWEST, Stream, Time};

/// The routers' lease; a node's half is the same.
pub const LEASE: Duration = Duration::from_millis(600);

/// A call that a router made.
#[derive(Debug)]
pub struct Booked {
    /// Of which request, by the client's number, and in which attempt.
    pub request: u64,
    pub life: Stream,
    pub decodes: bool,
    /// When its router gave it up, and how.
    pub over: Option<(Time, End)>,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It was done.
    Done,
    /// A cancellation is on its way.
    GivenUp,
    /// The router is dead.
    RouterDied,
}

/// All calls.
#[derive(Debug, Default)]
pub struct Ledger {
    calls: BTreeMap<Call, Booked>,
    /// Lives that a router's verdict for silence has ended, and when.
    fenced: BTreeMap<Stream, Time>,
    /// Lives that their node has ended, and when.
    ended: BTreeMap<Stream, Time>,
    pub violations: Vec<String>,
}

impl Ledger {
    pub fn book(&mut self, call: Call, booked: Booked) {
        self.calls.insert(call, booked);
    }

    pub fn over(&mut self, call: Call, now: Time, end: End) {
        if let Some(booked) = self.calls.get_mut(&call) {
            booked.over.get_or_insert((now, end));
        }
    }

    /// A router died with these requests.
    pub fn all_over(&mut self, requests: &[u64], now: Time) {
        for booked in self.calls.values_mut().filter(|booked| requests.contains(&booked.request)) {
            booked.over.get_or_insert((now, End::RouterDied));
        }
    }

    pub fn fence(&mut self, life: Stream, now: Time) {
        self.fenced.entry(life).or_insert(now);
    }

    /// A node ended this life of its own.
    pub fn ended(&mut self, life: Stream, now: Time) {
        self.ended.entry(life).or_insert(now);
    }

    /// A node works for this call now: takes it in, generates a token, accepts KV for it.
    pub fn works(&mut self, what: &str, call: Call, now: Time) {
        let Some(booked) = self.calls.get(&call) else {
            return self.violations.push(format!("{now:?}: {what} for call {call}, which nobody made"));
        };
        if let Some(ended) = self.ended.get(&booked.life) {
            let (late, life) = (now.saturating_sub(*ended), booked.life);
            self.violations
                .push(format!("{now:?}: {what} for call {call} of life {life}, which it ended {late:?} before"));
        } else if let Some(fenced) = self.fenced.get(&booked.life) {
            let late = now.saturating_sub(*fenced);
            let life = booked.life;
            self.violations.push(format!("{now:?}: {what} for call {call} of life {life}, fenced {late:?} before"));
        } else if let Some((at, end)) = booked.over {
            let (late, allowed) = (now.saturating_sub(at), LEASE + SLOWEST);
            if late > allowed {
                let request = booked.request;
                self.violations.push(format!("{now:?}: {what} for request {request}, {end:?} {late:?} before"));
            }
        }
    }

    /// A router has a decode call for a request, beside which it must have no other.
    pub fn is_alone(&mut self, call: Call, now: Time) {
        let Some(this) = self.calls.get(&call) else { return };
        let twin = |(other, booked): &(&Call, &Booked)| {
            **other != call && booked.request == this.request && booked.decodes && booked.over.is_none()
        };
        if let Some((twin, _)) = self.calls.iter().find(twin) {
            let request = this.request;
            self.violations.push(format!("{now:?}: request {request} is with call {twin} and with {call}"));
        }
    }

    pub fn broken(&mut self, what: String) {
        self.violations.push(what);
    }
}
