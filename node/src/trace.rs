//! The spans of one request on one node. Phases are opened and closed in the order of the request's life, inner ones
//! inside outer ones; whatever is open when the request fails or is dropped becomes a span with an error. They go to
//! the router with the last message of the call; of a call that has none, by the membership stream ([`Strays`]). The
//! router knows what became of the request: it keeps the trace or not, and sends it to the collector. Without a router
//! the node sends its spans itself.
use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tandem_proto::{TraceContext, TraceState};
use tandem_telemetry::notes::{Note, Notes};
use tandem_telemetry::{Exporter, Kind, Phase, Value, clock};
use tokio::sync::Notify;

/// Who the spans are from, and where they go. One per node.
#[derive(Clone, Debug)]
pub struct SpanSink {
    /// `service.name`.
    pub service: &'static str,
    /// `service.instance.id`.
    pub instance: String,
    /// Sends to the collector what no router takes.
    pub exporter: Exporter,
    /// What waits for routers.
    pub strays: Strays,
}

impl SpanSink {
    /// Spans that no last message takes along.
    fn stray(&self, packed: Vec<u8>) {
        if let Some(packed) = self.strays.push(packed) {
            self.exporter.export(packed);
        }
    }

    /// No router will come: what waits for one goes to the collector.
    pub fn give_up(&self) {
        while let Some(packed) = self.strays.pop() {
            self.exporter.export(packed);
        }
    }
}

/// Packed spans that wait for routers. Whose they are the node does not know: each router gets them, and takes those of
/// its own traces. Clones are handles on the same ones.
#[derive(Clone, Debug, Default)]
pub struct Strays {
    queues: Arc<Mutex<Vec<Arc<Queue>>>>,
}

/// Calls whose spans may wait for one router. When a router is lost, all that a node runs for it may end at once.
const MOST_STRAYS: usize = 256;
/// Bytes of one message: a quarter of what the router reads.
const MOST_STRAY_BYTES: usize = 64 << 10;

/// What waits for one router.
#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<VecDeque<Arc<Stray>>>,
    came: Notify,
}

#[derive(Debug)]
struct Stray {
    packed: Vec<u8>,
    /// A router has it.
    taken: AtomicBool,
}

impl Strays {
    /// For one more router, whether or not its stream is open.
    pub fn queue(&self) -> StrayQueue {
        let queue = Arc::<Queue>::default();
        self.queues().push(queue.clone());
        StrayQueue { strays: self.clone(), queue }
    }

    /// Keeps them for the routers; gives them back where too many wait for each, or they are too large for a message.
    fn push(&self, packed: Vec<u8>) -> Option<Vec<u8>> {
        if packed.is_empty() || packed.len() > MOST_STRAY_BYTES {
            return Some(packed);
        }
        let stray = Arc::new(Stray { packed, taken: AtomicBool::new(false) });
        for queue in self.queues().iter() {
            let mut waiting = queue.waiting();
            if waiting.len() < MOST_STRAYS {
                waiting.push_back(stray.clone());
                queue.came.notify_one();
            }
        }
        // A router may have taken it already.
        Arc::try_unwrap(stray).ok().filter(|stray| !stray.taken.load(Relaxed)).map(|stray| stray.packed)
    }

    /// One that no router has taken.
    fn pop(&self) -> Option<Vec<u8>> {
        let queues = self.queues();
        let left = || queues.iter().find_map(|queue| queue.waiting().pop_front());
        std::iter::from_fn(left).find(|stray| !stray.taken.swap(true, Relaxed)).map(|stray| stray.packed.clone())
    }

    fn queues(&self) -> MutexGuard<'_, Vec<Arc<Queue>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<Arc<Stray>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One router's; dropped, nothing waits for that router any more.
#[derive(Debug)]
pub struct StrayQueue {
    strays: Strays,
    queue: Arc<Queue>,
}

impl StrayQueue {
    /// One message's worth, once there are some. Cancel-safe.
    pub async fn next(&self) -> Vec<u8> {
        loop {
            let came = self.queue.came.notified();
            let message = self.message();
            if !message.is_empty() {
                return message;
            }
            came.await;
        }
    }

    fn message(&self) -> Vec<u8> {
        let (mut message, mut waiting) = (Vec::new(), self.queue.waiting());
        while let Some(next) = waiting.pop_front_if(|next| message.len() + next.packed.len() <= MOST_STRAY_BYTES) {
            next.taken.store(true, Relaxed);
            message.extend_from_slice(&next.packed);
        }
        message
    }
}

impl Drop for StrayQueue {
    fn drop(&mut self) {
        self.strays.queues().retain(|queue| !Arc::ptr_eq(queue, &self.queue));
    }
}

/// Finished spans on their way into a call's last message. What is not taken goes the other way.
#[derive(Debug)]
pub struct Finished {
    sink: SpanSink,
    packed: Vec<u8>,
}

impl Finished {
    /// None yet.
    pub fn new(sink: SpanSink) -> Self {
        Self { sink, packed: Vec::new() }
    }

    /// Adds some, packed.
    pub fn add(&mut self, packed: &[u8]) {
        self.packed.extend_from_slice(packed);
    }

    /// For the last message, packed.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.packed)
    }
}

impl Drop for Finished {
    fn drop(&mut self) {
        if !self.packed.is_empty() {
            let packed = self.take();
            self.sink.stray(packed);
        }
    }
}

/// The spans of one request.
#[derive(Debug)]
pub struct Trace {
    sink: SpanSink,
    state: TraceState,
    /// Packed.
    done: Vec<u8>,
    open: Vec<Open>,
    /// What is logged of the request.
    notes: Option<Notes>,
}

#[derive(Debug)]
struct Open {
    phase: Phase,
    start: Instant,
}

/// Events of one span at most: a prompt of a million tokens does not make a span of megabytes.
pub const MAX_EVENTS: usize = 128;

impl Trace {
    /// No span yet.
    pub fn new(sink: SpanSink, state: TraceState) -> Self {
        Self { sink, state, done: Vec::new(), open: Vec::new(), notes: None }
    }

    /// What is logged within the request that `parent` calls for becomes events of the outermost phase here.
    pub fn note_lines_of(&mut self, parent: TraceContext) {
        self.notes = Some(Notes::of(parent));
    }

    /// Opens a phase as a child of the span `parent` and returns its identity.
    pub fn open(&mut self, name: &'static str, kind: Kind, parent: TraceContext, start: Instant) -> TraceContext {
        let context = parent.child(&mut rand::rng());
        let phase = Phase::new(name, kind, context, Some(parent.span_id)).in_state(self.state.as_str());
        self.open.push(Open { phase, start });
        context
    }

    /// Adds an attribute to the innermost open phase.
    pub fn attr(&mut self, key: &'static str, value: impl Into<Value>) {
        self.edit(|phase| phase.attr(key, value));
    }

    /// Adds an event to the innermost open phase.
    pub fn event(&mut self, name: &str, at: Instant, attributes: impl IntoIterator<Item = (&'static str, Value)>) {
        self.edit(|phase| match phase.events() < MAX_EVENTS {
            true => phase.event(name, at, attributes),
            false => phase,
        });
    }

    /// The innermost open phase turns out to have another parent and start than was thought when it was opened.
    pub fn reparent(&mut self, parent: TraceContext, start: Instant) {
        self.edit(|phase| phase.child_of(parent));
        if let Some(open) = self.open.last_mut() {
            open.start = start;
        }
    }

    /// Closes the innermost open phase.
    pub fn close(&mut self, end: Instant) {
        if self.open.len() == 1 {
            let notes = self.notes.as_ref().map(Notes::take).unwrap_or_default();
            for Note { message, level, at, fields } in notes {
                self.event(&message, at, fields.into_iter().chain([("level", level.into())]));
            }
        }
        if let Some(open) = self.open.pop() {
            self.done.extend(open.phase.end(self.sink.service, &self.sink.instance, open.start, end));
        }
    }

    /// Forgets the innermost open phase: what it was opened for never took place.
    pub fn discard(&mut self) {
        self.open.pop();
    }

    /// Closes all open phases, each with the error.
    pub fn fail(&mut self, message: &str) {
        let now = clock::now();
        while !self.open.is_empty() {
            self.edit(|phase| phase.error(message));
            self.close(now);
        }
    }

    /// Closes what is open; returns all spans, packed, for the last message of the call.
    pub fn finish(&mut self, end: Instant) -> Vec<u8> {
        while !self.open.is_empty() {
            self.close(end);
        }
        std::mem::take(&mut self.done)
    }

    fn edit(&mut self, change: impl FnOnce(Phase) -> Phase) {
        if let Some(open) = self.open.last_mut() {
            open.phase = change(std::mem::take(&mut open.phase));
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.fail("cancelled");
        if !self.done.is_empty() {
            self.sink.stray(std::mem::take(&mut self.done));
        }
    }
}

#[cfg(test)]
mod tests {
    use tandem_proto::spans::unpack;
    use tandem_telemetry::Collector;

    use super::*;

    fn sink(exporter: Exporter) -> SpanSink {
        SpanSink { service: "tandem-test", instance: "t0".to_owned(), exporter, strays: Strays::default() }
    }

    fn trace() -> (Trace, TraceContext) {
        (Trace::new(sink(Exporter::disabled()), TraceState::default()), TraceContext::root(&mut rand::rng()))
    }

    #[test]
    fn phases_nest_and_tile() {
        let (mut trace, root) = trace();
        let start = Instant::now();
        let outer = trace.open("prefill", Kind::Server, root, start);
        trace.open("prefill.queue", Kind::Internal, outer, start);
        let middle = Instant::now();
        trace.close(middle);
        trace.open("prefill.forward", Kind::Internal, outer, middle);
        let spans: Vec<_> = unpack(&trace.finish(Instant::now())).collect();
        let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(names, ["prefill.queue", "prefill.forward", "prefill"]);
        assert_eq!(spans[0].end_unix_ns, spans[1].start_unix_ns);
        assert_eq!(spans[0].parent_span_id, spans[2].span_id);
        assert_eq!(spans[2].parent_span_id, root.span_id);
    }

    fn begin(trace: &mut Trace) {
        let (parent, now) = (TraceContext::root(&mut rand::rng()), Instant::now());
        let server = trace.open("prefill", Kind::Server, parent, now);
        trace.open("prefill.queue", Kind::Internal, server, now);
        trace.close(now);
    }

    #[tokio::test]
    async fn what_no_last_message_takes_along_waits_for_the_router() {
        let sink = sink(Exporter::disabled());
        let (one, other) = (sink.strays.queue(), sink.strays.queue());
        let mut good = Trace::new(sink.clone(), TraceState::default());
        begin(&mut good);
        let mut finished = Finished::new(sink.clone());
        finished.add(&good.finish(Instant::now()));
        assert_eq!(unpack(&finished.take()).count(), 2);
        drop((good, finished));
        assert_eq!(sink.strays.pop(), None);

        let mut cut = Trace::new(sink.clone(), TraceState::default());
        begin(&mut cut);
        let mut untold = Finished::new(sink.clone());
        untold.add(&cut.finish(Instant::now()));
        begin(&mut cut);
        drop((cut, untold));
        let message = one.next().await;
        assert_eq!(message, other.next().await, "each router gets it");
        let spans: Vec<_> = unpack(&message).collect();
        let errors: Vec<_> = spans.iter().map(|span| (&*span.name, span.error())).collect();
        let expected = [("prefill.queue", ""), ("prefill", "cancelled"), ("prefill.queue", ""), ("prefill", "")];
        assert_eq!(errors, expected, "in one message");
        assert_eq!(sink.strays.pop(), None);
    }

    /// An exporter to nowhere counts what it was given, once it is shut down, as dropped.
    #[tokio::test(flavor = "multi_thread")]
    async fn what_no_router_takes_goes_to_the_collector() {
        let exporter = Exporter::start("tandem-test", "t0", &Collector::at("http://127.0.0.1:1")).unwrap();
        let sink = sink(exporter.clone());
        let (queue, left) = (sink.strays.queue(), sink.strays.queue());
        for _ in 0..MOST_STRAYS + 3 {
            begin(&mut Trace::new(sink.clone(), TraceState::default()));
        }
        let mut large = Trace::new(sink.clone(), TraceState::default());
        begin(&mut large);
        large.attr("prompt", "x".repeat(MOST_STRAY_BYTES));
        drop(large);
        assert_eq!(queue.queue.waiting().len(), MOST_STRAYS);
        drop(left);
        sink.give_up();
        drop(queue);
        begin(&mut Trace::new(sink.clone(), TraceState::default()));
        exporter.shutdown().await;
        assert_eq!(exporter.dropped(), 2 * (MOST_STRAYS as u64 + 5));
    }

    #[test]
    fn failure_marks_everything_open() {
        let (mut trace, root) = trace();
        let outer = trace.open("decode", Kind::Server, root, Instant::now());
        trace.open("decode.queue", Kind::Internal, outer, Instant::now());
        trace.fail("gone");
        let spans: Vec<_> = unpack(&trace.finish(Instant::now())).collect();
        assert!(spans.len() == 2 && spans.iter().all(|span| span.error() == "gone"));
    }
}
