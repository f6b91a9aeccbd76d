//! The spans of one request on one node. Phases are opened and closed in the order of the request's life, inner ones
//! inside outer ones; whatever is open when the request fails or is dropped becomes a span with an error. Each span
//! goes to the exporter at its end, and a copy goes back to the router with the last message. Of a trace that its
//! caller does not sample, only a request that failed is exported; if the router keeps another one, it passes the copy
//! on.
use std::time::Instant;

use tandem_proto::{TraceContext, v1};
use tandem_telemetry::{Exporter, Kind, Phase, Value, clock};

/// Who the spans are from, and where they go. One per node.
#[derive(Clone, Debug)]
pub struct SpanSink {
    /// `service.name`.
    pub service: &'static str,
    /// `service.instance.id`.
    pub instance: String,
    /// Sends them to the collector.
    pub exporter: Exporter,
}

/// The spans of one request.
#[derive(Debug)]
pub struct Trace {
    sink: SpanSink,
    done: Vec<v1::Span>,
    /// The first ones of `done`: they are with the exporter.
    exported: usize,
    /// Whether spans are exported as they end.
    kept: bool,
    open: Vec<Open>,
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
    pub fn new(sink: SpanSink) -> Self {
        Self { sink, done: Vec::new(), exported: 0, kept: false, open: Vec::new() }
    }

    /// Opens a phase as a child of the span `parent` and returns its identity.
    pub fn open(&mut self, name: &'static str, kind: Kind, parent: TraceContext, start: Instant) -> TraceContext {
        let context = parent.child(&mut rand::rng());
        self.kept |= context.sampled;
        let phase = Phase::new(name, kind, context, Some(parent.span_id));
        self.open.push(Open { phase, start });
        context
    }

    /// Adds an attribute to the innermost open phase.
    pub fn attr(&mut self, key: &'static str, value: impl Into<Value>) {
        self.edit(|phase| phase.attr(key, value));
    }

    /// Adds an event to the innermost open phase.
    pub fn event(
        &mut self,
        name: &'static str,
        at: Instant,
        attributes: impl IntoIterator<Item = (&'static str, Value)>,
    ) {
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
        if let Some(open) = self.open.pop() {
            self.record(open.phase.end(self.sink.service, self.sink.instance.clone(), open.start, end));
        }
    }

    /// Forgets the innermost open phase: what it was opened for never took place.
    pub fn discard(&mut self) {
        self.open.pop();
    }

    /// Closes all open phases, each with the error. The trace is exported whatever its caller wanted.
    pub fn fail(&mut self, message: &str) {
        self.kept = true;
        self.export();
        let now = clock::now();
        while !self.open.is_empty() {
            self.edit(|phase| phase.error(message));
            self.close(now);
        }
    }

    /// Closes what is open; returns all spans.
    pub fn finish(&mut self, end: Instant) -> Vec<v1::Span> {
        while !self.open.is_empty() {
            self.close(end);
        }
        self.exported = 0;
        std::mem::take(&mut self.done)
    }

    fn edit(&mut self, change: impl FnOnce(Phase) -> Phase) {
        if let Some(open) = self.open.last_mut() {
            open.phase = change(std::mem::take(&mut open.phase));
        }
    }

    fn record(&mut self, span: v1::Span) {
        self.done.push(span);
        if self.kept {
            self.export();
        }
    }

    fn export(&mut self) {
        for span in &self.done[self.exported..] {
            self.sink.exporter.export(span);
        }
        self.exported = self.done.len();
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.fail("cancelled");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace() -> (Trace, TraceContext) {
        let sink = SpanSink { service: "tandem-test", instance: "t0".to_owned(), exporter: Exporter::disabled() };
        (Trace::new(sink), TraceContext::root(&mut rand::rng()))
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
        let spans = trace.finish(Instant::now());
        let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(names, ["prefill.queue", "prefill.forward", "prefill"]);
        assert_eq!(spans[0].end_unix_ns, spans[1].start_unix_ns);
        assert_eq!(spans[0].parent_span_id, spans[2].span_id);
        assert_eq!(spans[2].parent_span_id, root.span_id);
    }

    /// An exporter to nowhere counts what it was given, once it is shut down, as dropped.
    async fn exported(sampled: bool, run: impl FnOnce(&mut Trace, TraceContext)) -> u64 {
        let exporter = Exporter::start("tandem-test", "t0", Some("http://127.0.0.1:1".to_owned())).unwrap();
        let mut trace =
            Trace::new(SpanSink { service: "tandem-test", instance: "t0".into(), exporter: exporter.clone() });
        run(&mut trace, TraceContext { sampled, ..TraceContext::root(&mut rand::rng()) });
        drop(trace);
        exporter.shutdown().await;
        exporter.dropped()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn only_failures_are_exported_of_what_nobody_samples() {
        let phases = |trace: &mut Trace, parent: TraceContext| {
            let now = Instant::now();
            let server = trace.open("prefill", Kind::Server, parent, now);
            trace.open("prefill.queue", Kind::Internal, server, now);
            trace.close(now);
        };
        let good = |trace: &mut Trace, parent: TraceContext| {
            phases(trace, parent);
            assert_eq!(trace.finish(Instant::now()).len(), 2, "the router gets them all the same");
        };
        let bad = |trace: &mut Trace, parent: TraceContext| {
            phases(trace, parent);
            trace.fail("gone");
        };
        assert_eq!(exported(true, good).await, 2);
        assert_eq!(exported(false, good).await, 0);
        assert_eq!(exported(false, bad).await, 2);
        assert_eq!(exported(false, phases).await, 2, "dropped half-way");
    }

    #[test]
    fn failure_marks_everything_open() {
        let (mut trace, root) = trace();
        let outer = trace.open("decode", Kind::Server, root, Instant::now());
        trace.open("decode.queue", Kind::Internal, outer, Instant::now());
        trace.fail("gone");
        let spans = trace.finish(Instant::now());
        assert!(spans.len() == 2 && spans.iter().all(|span| span.error == "gone"));
    }
}
