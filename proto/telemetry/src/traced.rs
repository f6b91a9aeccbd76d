//! The layer that knows which request a line belongs to: it reads the ids of `request` spans as they are made, notes
//! lines within them, and hands all lines to the collector's queue.
use tandem_proto::TraceContext;
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::{LookupSpan, SpanRef};

use crate::clock;
use crate::fields::{ACCESS, Fields};
use crate::log_export;
use crate::notes::{self, Note};

/// See the head of this file.
pub(crate) struct Traced;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Traced {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if attributes.metadata().name() != "request" {
            return;
        }
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let text = |name| fields.rest.iter().find(|(key, _)| *key == name).and_then(|(_, value)| value.as_str());
        let (Some(trace_id), Some(span_id)) = (text("trace_id"), text("span_id")) else { return };
        let ids = format!("00-{trace_id}-{span_id}-01").parse::<TraceContext>();
        if let (Ok(ids), Some(span)) = (ids, context.span(id)) {
            span.extensions_mut().insert(ids);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let metadata = event.metadata();
        let ids = context.event_span(event).and_then(|span| ids_of(&span));
        // Nobody reads traces for what debugging says.
        let noted = ids.filter(|_| *metadata.level() <= Level::INFO && metadata.target() != ACCESS);
        let collector = log_export::queue();
        if noted.is_none() && collector.is_none() {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        if let Some(ids) = noted {
            notes::add(ids.span_id, || Note {
                message: fields.message.clone(),
                level: metadata.level().as_str(),
                at: clock::now(),
                fields: fields.attributes().collect(),
            });
        }
        if let Some(collector) = collector {
            collector.take(metadata, fields, ids);
        }
    }
}

/// The ids of the request that this span is within.
pub(crate) fn ids_of<'a, R: LookupSpan<'a>>(span: &SpanRef<'a, R>) -> Option<TraceContext> {
    span.scope().find_map(|span| span.extensions().get::<TraceContext>().copied())
}
