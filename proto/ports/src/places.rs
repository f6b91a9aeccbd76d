//! The places of a port: who has one, who is busy, and who goes when they are all taken. A newcomer at a full port gets
//! the place of the connection that has been idle or half-open (no whole request yet, a TLS handshake included)
//! longest. A connection whose request is being answered keeps its place; when all are busy, the newcomer is refused.
//!
//! So a flood of silent sockets evicts itself: a client that asks at once is served, whatever the others do. Knows no
//! socket; a connection looks here whether it is over ([`Place::is_over`]).
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Context;

use futures::task::AtomicWaker;
use hyper::Response;
use tokio::time::Instant;
use tonic::Status;

use crate::Within;
use crate::throttle::Throttle;

/// The places of one port, as seen from outside.
#[derive(Clone)]
pub struct Places {
    table: Arc<Mutex<Table>>,
    within: Within,
    throttle: Option<Arc<Throttle>>,
}

/// How a port is occupied, and until when it may be trusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Connections now.
    pub open: usize,
    /// Idle and half-open ones that made room for others, since the start.
    pub evicted: u64,
    /// Newcomers that were closed because all others were busy, since the start.
    pub refused: u64,
    /// Connections that the port ended because of what they sent, or did not send or read in time, since the start.
    pub failed: u64,
    /// Times that a connection had to wait because of its errors, before it was read, since the start.
    pub throttled: u64,
    /// The Unix second at which its certificate ends, or one of the authorities' behind it; `None`: it has none.
    pub certificate_not_after: Option<u64>,
}

/// Who has a place. `seats` ≤ `limit`; `waiting` names those of them that may be evicted.
#[derive(Default)]
struct Table {
    limit: usize,
    /// Counts arrivals and ends of requests: the order of those who wait.
    turn: u64,
    seats: HashMap<u64, Seat>,
    /// Idle and half-open ones by the turn since which they are, the longest first.
    waiting: BTreeMap<u64, u64>,
    evicted: u64,
    refused: u64,
    failed: u64,
}

struct Seat {
    /// The turn since which it is idle or half-open; `None`: it is busy.
    waits_since: Option<u64>,
    signs: Arc<Signs>,
}

/// What a connection and the table tell each other without the table's lock. The order is this: a call is counted
/// before the table is told of it, and `unflushed` is set before the last call is not counted any more. So whoever sees
/// neither has no request and has sent every byte.
#[derive(Default)]
struct Signs {
    /// Requests under way.
    calls: AtomicU32,
    /// The last answer may not be with the system yet.
    unflushed: AtomicBool,
    /// Requests that were answered with an error, and not paid for.
    errors: AtomicU32,
    /// A request was answered before its body was read to the end: the client may still be sending.
    unread: AtomicBool,
    /// Somebody else has the place.
    evicted: AtomicBool,
    /// The client closed its end, or its host did.
    left: AtomicBool,
    /// Bytes came that no whole request or answer followed yet.
    amid: AtomicBool,
    /// Nothing but a failure makes the port end it: the server that has it does not tell of those.
    only_fails: AtomicBool,
    /// Of the connection's task.
    waker: AtomicWaker,
}

/// The place of one connection. Dropping it makes room for another.
pub(crate) struct Place {
    calls: Calls,
}

/// Notes the requests of one connection.
#[derive(Clone)]
pub(crate) struct Calls {
    id: u64,
    signs: Arc<Signs>,
    places: Places,
}

/// One request under way, until its answer is made.
pub(crate) struct Call(Calls);

impl Places {
    /// For so many connections.
    pub(crate) fn new(limit: usize) -> Self {
        let table = Arc::new(Mutex::new(Table { limit: limit.max(1), ..Table::default() }));
        Self { table, within: Within::Nothing, throttle: None }
    }

    /// The same ones, of a port within this.
    pub(crate) fn within(&self, within: Within) -> Self {
        Self { within, ..self.clone() }
    }

    /// The same ones, whose connections are throttled by their errors.
    pub(crate) fn throttling(self, throttle: Throttle) -> Self {
        Self { throttle: Some(Arc::new(throttle)), ..self }
    }

    /// How they are occupied.
    pub fn occupancy(&self) -> Occupancy {
        let certificate_not_after = self.within.not_after();
        let throttled = self.throttle.as_ref().map_or(0, |throttle| throttle.waits());
        let Table { seats, evicted, refused, failed, .. } = &*self.lock();
        let (evicted, refused, failed) = (*evicted, *refused, *failed);
        Occupancy { open: seats.len(), evicted, refused, failed, throttled, certificate_not_after }
    }

    /// A place for a newcomer, half-open for now; `None`: all others are busy.
    pub(crate) fn enter(&self) -> Option<Place> {
        // Silence from the beginning is a failure.
        let signs = Arc::new(Signs { amid: AtomicBool::new(true), ..Signs::default() });
        let (id, evicted) = self.lock().enter(&signs)?;
        if let Some(evicted) = evicted {
            evicted.wake();
        }
        Some(Place { calls: Calls { id, signs, places: self.clone() } })
    }

    /// Counts a connection that the port ended.
    fn failed(&self) {
        self.lock().failed += 1;
    }

    /// Ends all that are idle or half-open: nobody new comes.
    pub(crate) fn close(&self) {
        let waiting = self.lock().close();
        waiting.iter().for_each(|signs| signs.wake());
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // No holder leaves the table half changed.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// The newcomer's id, and who was evicted for it.
    fn enter(&mut self, signs: &Arc<Signs>) -> Option<(u64, Option<Arc<Signs>>)> {
        let mut evicted = None;
        if self.seats.len() >= self.limit {
            let Some((_, longest)) = self.waiting.pop_first() else {
                self.refused += 1;
                return None;
            };
            evicted = self.seats.remove(&longest).map(Seat::evict);
            self.evicted += 1;
        }
        let id = self.next_turn();
        self.seats.insert(id, Seat { waits_since: Some(id), signs: Arc::clone(signs) });
        self.waiting.insert(id, id);
        Some((id, evicted))
    }

    fn leave(&mut self, id: u64) {
        if let Some(since) = self.seats.remove(&id).and_then(|seat| seat.waits_since) {
            self.waiting.remove(&since);
        }
    }

    /// The head of a request came: of those who wait, it is the newest again.
    fn stirred(&mut self, id: u64) {
        let turn = self.next_turn();
        let Some(since) = self.seats.get_mut(&id).and_then(|seat| seat.waits_since.as_mut()) else { return };
        self.waiting.remove(since);
        self.waiting.insert(turn, id);
        *since = turn;
    }

    /// A whole request is there.
    fn busy(&mut self, id: u64) {
        if let Some(since) = self.seats.get_mut(&id).and_then(|seat| seat.waits_since.take()) {
            self.waiting.remove(&since);
        }
    }

    /// Every answer is out, unless another request has just begun.
    fn idle(&mut self, id: u64) {
        let turn = self.next_turn();
        let idle = |seat: &&mut Seat| seat.waits_since.is_none() && seat.signs.calls.load(Ordering::SeqCst) == 0;
        if let Some(seat) = self.seats.get_mut(&id).filter(idle) {
            seat.waits_since = Some(turn);
            self.waiting.insert(turn, id);
        }
    }

    fn close(&mut self) -> Vec<Arc<Signs>> {
        let waiting = std::mem::take(&mut self.waiting);
        waiting.values().filter_map(|id| self.seats.remove(id)).map(Seat::evict).collect()
    }

    fn next_turn(&mut self) -> u64 {
        self.turn += 1;
        self.turn
    }
}

impl Seat {
    fn evict(self) -> Arc<Signs> {
        self.signs.evicted.store(true, Ordering::SeqCst);
        self.signs
    }
}

impl Signs {
    fn wake(&self) {
        self.waker.wake();
    }
}

impl Place {
    /// For those who see the connection's requests.
    pub fn calls(&self) -> Calls {
        self.calls.clone()
    }

    /// Whether the connection was evicted; its task is woken when it is. A request that had begun by then is still
    /// answered.
    pub fn is_over(&self, cx: &Context<'_>) -> bool {
        let signs = &self.calls.signs;
        // Before the look: what changes behind it wakes the task.
        signs.waker.register(cx.waker());
        let is = |sign: &AtomicBool| sign.load(Ordering::SeqCst);
        is(&signs.evicted) && signs.calls.load(Ordering::SeqCst) == 0 && !is(&signs.unflushed)
    }

    /// Whether the connection caused errors that it has not paid for. While a request of it is being answered it need
    /// not: that may be another client's, behind the same proxy.
    pub fn owes(&self) -> bool {
        let Calls { signs, places, .. } = &self.calls;
        places.throttle.is_some() && signs.errors.load(Ordering::SeqCst) > 0 && signs.calls.load(Ordering::SeqCst) == 0
    }

    /// Pays for them. Until when the connection waits; `None`: it does not.
    pub fn pay(&self) -> Option<Instant> {
        let Calls { signs, places, .. } = &self.calls;
        places.throttle.as_ref()?.until(Instant::now(), signs.errors.swap(0, Ordering::SeqCst))
    }

    /// The client has sent something.
    pub fn stirs(&self) {
        self.calls.signs.amid.store(true, Ordering::SeqCst);
    }

    /// The client, or its host, ended the connection.
    pub fn left(&self) {
        self.calls.signs.left.store(true, Ordering::SeqCst);
    }

    /// If the port ends it, that is a failure.
    pub fn only_fails(&self) {
        self.calls.signs.only_fails.store(true, Ordering::SeqCst);
    }

    /// Whether a body was left unread: the client may still be sending it.
    pub fn is_unread(&self) -> bool {
        self.calls.signs.unread.load(Ordering::SeqCst)
    }

    /// All that the connection had to write is with the system.
    pub fn flushed(&self, cx: &Context<'_>) {
        let Calls { id, signs, places } = &self.calls;
        if !signs.unflushed.load(Ordering::SeqCst) || signs.calls.load(Ordering::SeqCst) > 0 {
            return;
        }
        signs.unflushed.store(false, Ordering::SeqCst);
        signs.amid.store(false, Ordering::SeqCst);
        places.lock().idle(*id);
        if signs.evicted.load(Ordering::SeqCst) {
            // Its last answer is out: the next look ends it.
            cx.waker().wake_by_ref();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.calls.signs.only_fails.load(Ordering::SeqCst) {
            self.calls.failed();
        }
        self.calls.places.lock().leave(self.calls.id);
    }
}

impl Calls {
    /// The head of a request is there.
    pub fn stirred(&self) {
        self.places.lock().stirred(self.id);
    }

    /// The port ended the connection on its own account. Who left, who made room for another, and who was idle between
    /// two requests has done nothing wrong.
    pub fn failed(&self) {
        let is = |sign: &AtomicBool| sign.load(Ordering::SeqCst);
        if is(&self.signs.amid) && !is(&self.signs.left) && !is(&self.signs.evicted) {
            self.places.failed();
        }
    }

    /// Adds a response to what the connection owes, if it is an error.
    pub fn note<B>(&self, response: &Response<B>) {
        if is_error(response) {
            self.signs.errors.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The body of a request was dropped before its end.
    pub fn leave_unread(&self) {
        self.signs.unread.store(true, Ordering::SeqCst);
    }

    /// A whole request is there, or its answer.
    pub fn begin(&self) -> Call {
        self.signs.calls.fetch_add(1, Ordering::SeqCst);
        self.places.lock().busy(self.id);
        Call(self.clone())
    }
}

/// Of HTTP, or of gRPC before its first message: that stands in the headers ("Trailers-Only").
fn is_error<B>(response: &Response<B>) -> bool {
    let (status, of_grpc) = (response.status(), response.headers().get(Status::GRPC_STATUS));
    status.is_client_error() || status.is_server_error() || of_grpc.is_some_and(|status| status != "0")
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.signs.unflushed.store(true, Ordering::SeqCst);
        self.0.signs.calls.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    fn over(place: &Place) -> bool {
        place.is_over(&Context::from_waker(Waker::noop()))
    }

    fn flush(place: &Place) {
        place.flushed(&Context::from_waker(Waker::noop()));
    }

    #[test]
    fn who_waits_longest_goes_first() {
        let places = Places::new(3);
        let [a, b, c] = [(); 3].map(|()| places.enter().unwrap());
        // `a` asks something and is idle afterwards: it waits for less long than the others.
        drop(a.calls().begin());
        flush(&a);
        for (newcomer, gone) in [(&b, "b"), (&c, "c"), (&a, "a")] {
            assert!(!over(newcomer), "{gone} has its place");
            std::mem::forget(places.enter().unwrap());
            assert!(over(newcomer), "{gone} is evicted");
        }
        assert_eq!(
            places.occupancy(),
            Occupancy { open: 3, evicted: 3, refused: 0, failed: 0, ..Occupancy::default() }
        );
    }

    #[test]
    fn a_head_makes_a_connection_the_newest_of_those_who_wait_and_no_busy_one() {
        let places = Places::new(2);
        let (a, b) = (places.enter().unwrap(), places.enter().unwrap());
        a.calls().stirred();
        let _c = places.enter().unwrap();
        assert!(over(&b) && !over(&a));
        let _d = places.enter().unwrap();
        assert!(over(&a));
    }

    #[test]
    fn the_busy_stay_and_newcomers_are_refused() {
        let places = Places::new(2);
        let (a, b) = (places.enter().unwrap(), places.enter().unwrap());
        let (first, second, of_b) = (a.calls().begin(), a.calls().begin(), b.calls().begin());
        assert!(places.enter().is_none());
        drop(first);
        flush(&a);
        assert!(places.enter().is_none(), "a second request is under way");
        drop(second);
        assert!(places.enter().is_none(), "the answer is not out yet");
        flush(&a);
        let c = places.enter().unwrap();
        assert!(over(&a) && !over(&b) && !over(&c));
        assert_eq!(
            places.occupancy(),
            Occupancy { open: 2, evicted: 1, refused: 3, failed: 0, ..Occupancy::default() }
        );
        drop((a, c));
        assert_eq!(places.occupancy().open, 1, "an evicted connection gives back nothing");
        drop((b, of_b));
        assert_eq!(places.occupancy().open, 0);
    }

    #[test]
    fn a_request_that_begins_as_its_place_goes_is_answered() {
        let places = Places::new(1);
        let a = places.enter().unwrap();
        let _newcomer = places.enter().unwrap();
        let call = a.calls().begin();
        assert!(!over(&a));
        drop(call);
        assert!(!over(&a), "its answer is not out yet");
        flush(&a);
        assert!(over(&a));
    }

    #[test]
    fn who_was_ended_for_what_it_sent_is_counted_and_nobody_else() {
        let places = Places::new(4);
        let enter = || places.enter().unwrap();
        let (garbled, left, idle, silent) = (enter(), enter(), enter(), enter());
        left.left();
        left.calls().failed();
        drop(idle.calls().begin());
        flush(&idle);
        idle.calls().failed();
        assert_eq!(places.occupancy().failed, 0);
        idle.stirs();
        for (failed, place) in [(1, &garbled), (2, &silent), (3, &idle)] {
            place.calls().failed();
            assert_eq!(places.occupancy().failed, failed);
        }
        drop(left);
        let (over_http2, made_room) = (enter(), silent);
        over_http2.only_fails();
        made_room.only_fails();
        drop(over_http2);
        assert_eq!(places.occupancy().failed, 4);
        let _newcomers = [enter(), enter()];
        drop(made_room);
        assert!(places.occupancy().evicted > 0);
    }

    #[test]
    fn the_end_of_the_port_is_the_end_of_those_who_wait() {
        let places = Places::new(4);
        let (idle, busy) = (places.enter().unwrap(), places.enter().unwrap());
        let call = busy.calls().begin();
        places.close();
        assert!(over(&idle) && !over(&busy));
        drop(call);
        assert_eq!(
            places.occupancy(),
            Occupancy { open: 1, evicted: 0, refused: 0, failed: 0, ..Occupancy::default() }
        );
    }
}
