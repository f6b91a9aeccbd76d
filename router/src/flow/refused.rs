//! A request that never ran: its trace is one span, with the reason, and so is its line in the log.
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_proto::{Error, TraceContext};
use tandem_telemetry::{ACCESS, Budget, Kind, Phase, clock, in_request};

use super::Shared;
use crate::caller::Parent;
use crate::record::SERVICE;
use crate::traces::{Class, Ended};

/// Lines a second: an overloaded router refuses thousands of requests, each for the same reason.
const LINES: u32 = 20;
static LINES_LEFT: Budget = Budget::new(LINES);

/// What an edge knows of it.
#[derive(Clone, Debug)]
pub struct Refused<'a> {
    /// `gen_ai.operation.name`.
    pub api: &'static str,
    /// Of the client.
    pub request_id: &'a str,
    /// Whose it is, where that is known.
    pub tenant: Option<&'a str>,
    /// Its own span.
    pub root: TraceContext,
    /// The client's.
    pub parent: Option<&'a Parent>,
    /// When the edge had its head.
    pub received: Instant,
}

/// Leaves the trace and the line.
pub fn tell(shared: &Shared, refused: &Refused<'_>, error: &Error) {
    let Refused { api, request_id, tenant, root, parent, received } = *refused;
    let model = &shared.model.model_name;
    let mut span = Phase::new(format!("{api} {model}"), Kind::Server, root, parent.map(|parent| parent.span.span_id))
        .in_state(parent.map_or("", |parent| parent.state.as_str()))
        .attr("tandem.request_id", request_id)
        .attr("tandem.refused", true)
        .attr("gen_ai.operation.name", api)
        .attr("gen_ai.provider.name", "tandem")
        .attr("gen_ai.request.model", model.as_str())
        .attr("error.type", format!("{:?}", error.kind))
        .error(&error.message);
    if let Some(tenant) = tenant {
        span = span.attr("tandem.tenant", tenant);
    }
    if let Some(param) = error.param {
        span = span.attr("tandem.param", param);
    }
    let now = clock::now();
    let packed = span.end(SERVICE, &shared.instance, received, now.max(received + Duration::from_nanos(1)));
    // The client hears by its status that nothing went wrong here: nobody looks for its trace but by its id.
    let exported = shared.exporter.is_on() && root.sampled;
    if exported {
        shared.exporter.export(packed.clone());
    }
    let ended = Ended { tenant: tenant.map(Arc::from), class: Class::Refused, exported };
    shared.traces.finish(root.trace_id, Arc::new(move || packed.clone()), Vec::new(), ended);
    if let Some(untold) = LINES_LEFT.take(now) {
        let (tenant, kind, error) = (tenant.unwrap_or("-"), error.kind, &error.message);
        in_request(root, || {
            tracing::info!(
                target: ACCESS, request = request_id, tenant, api, status = ?kind, error, untold, "request refused"
            );
        });
    }
}
