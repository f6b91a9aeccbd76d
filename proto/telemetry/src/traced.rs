//! Which request a line belongs to: the one whose task logs it. The layer here notes such lines, and hands all lines to
//! the collector's queue.
use tandem_proto::TraceContext;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use crate::clock;
use crate::fields::{ACCESS, Fields};
use crate::log_export;
use crate::notes::{self, Note};

// Not a span of `tracing`: each poll of a task would enter it and leave it, in every layer. That took a twentieth of
// what a request costs the router.
tokio::task_local! {
    static REQUEST: TraceContext;
}

/// Does `work` as part of the request whose span is `context`: what is logged meanwhile is that request's. Tasks that
/// `work` spawns are others.
pub fn within_request<F: Future>(context: TraceContext, work: F) -> impl Future<Output = F::Output> {
    REQUEST.scope(context, work)
}

/// As [`within_request`], without waiting.
pub fn in_request<T>(context: TraceContext, work: impl FnOnce() -> T) -> T {
    REQUEST.sync_scope(context, work)
}

/// The span of the request that is worked on here.
pub(crate) fn request() -> Option<TraceContext> {
    REQUEST.try_with(|context| *context).ok()
}

/// See the head of this file.
pub(crate) struct Traced;

impl<S: Subscriber> Layer<S> for Traced {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let (metadata, request) = (event.metadata(), request());
        // Nobody reads traces for what debugging says.
        let noted = request.filter(|_| *metadata.level() <= Level::INFO && metadata.target() != ACCESS);
        let collector = log_export::queue();
        if noted.is_none() && collector.is_none() {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        if let Some(context) = noted {
            notes::add(context.span_id, || Note {
                message: fields.message.clone(),
                level: metadata.level().as_str(),
                at: clock::now(),
                fields: fields.attributes().collect(),
            });
        }
        if let Some(collector) = collector {
            collector.take(metadata, fields, request);
        }
    }
}
