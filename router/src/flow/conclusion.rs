//! The end of a request: what its nodes have still to report, metrics, the trace, and the last word to the client.
use std::sync::Arc;
use std::time::Duration;

use tandem_proto::{Error, TraceContext, v1};
use tandem_telemetry::clock;

use super::attempt::Attempt;
use super::legs::Rest;
use super::{Answered, By, Run, Shared, send, tpot_objective};
use crate::generation::{GenerationEvent, Usage};
use crate::record::Record;
use crate::record::timeline::Phase;
use crate::traces::{Class, Ended, Own, append_pack, nested};

/// How long nodes that were stopped have for their reports; the client does not wait for these.
pub(super) const STOPPED_SPANS: Duration = Duration::from_secs(1);

impl Run {
    /// The client has every token; what the nodes have still to report is left.
    pub(super) async fn complete(&mut self, mut attempt: Attempt, by: By) -> Option<Rest> {
        self.record.ended = clock::now();
        let timeline = &mut self.record.timeline;
        // Without a verification, in spite of further tokens, when each came from another prefill node.
        if timeline.phase() == Phase::Transfer && self.progress.sent.len() > 1 {
            timeline.end_phase(self.record.ended);
        }
        if timeline.phase() == Phase::Decode {
            timeline.end_phase(self.record.ended);
        }
        let (rest, spans) = match by {
            By::Decode => {
                attempt.last_spans().await;
                (None, std::mem::take(&mut attempt.protocol.spans))
            }
            By::Prefill | By::Router => {
                let (rest, spans) = attempt.stop(matches!(by, By::Prefill)).await;
                (Some(rest), spans)
            }
        };
        append_pack(&mut self.spans, spans);
        rest
    }

    /// Metrics, the trace, and the last word to the client, in this order: who has the answer can look at its trace.
    /// Only what stopped nodes have to report comes beside it or later.
    pub(super) async fn conclude(mut self: Box<Self>, outcome: Result<Answered, Error>) {
        if outcome.is_err() {
            self.record.ended = clock::now();
        }
        self.record.pace = self.arrivals.pace(tpot_objective(&self.shared));
        self.record.notes = self.notes.take();
        // Only these leave the box: a future that has all of it is copied whole on its way to the heap.
        let (shared, record, client, slot, spans) = (self.shared, self.record, self.client, self.slot, self.spans);
        let (limits, arrivals, progress) = (&self.limits, &self.arrivals, &self.progress);
        let cached = record.cached_tokens;
        let usage = Usage { prompt: record.prompt_tokens, completion: record.pace.tokens, cached };
        if usage.completion > 0 {
            shared.metrics.looked_up(usage.prompt, usage.cached);
        }
        if outcome.is_ok() {
            shared.membership.answered(usage.completion);
        }
        if slot.is_some() {
            let tenant = shared.admission.account(&progress.request.tenant);
            shared.metrics.served(tenant, usage.prompt, usage.completion);
        }
        shared.metrics.ended(&record, arrivals, outcome.as_ref().map(|answered| answered.reason));
        let root = record.identities.root;
        let (reason, text, rest) = match outcome {
            Ok(Answered { reason, text, rest }) => (Ok(reason), text, rest),
            Err(error) => (Err(error), String::new(), None),
        };
        record.log(progress.request.tenant.name(), reason.as_ref().copied());
        let last = reason.clone().map(|reason| GenerationEvent::Finish {
            reason,
            text,
            usage,
            timings: Box::new(record.timings()),
            trace_id: root.trace_id_hex(),
        });
        let tenant = Arc::clone(progress.request.tenant.name());
        let kept = keep_trace(&shared, record, tenant, reason, spans);
        // A client that left does not miss it. One that takes nothing does not keep the nodes' end from them.
        let told = async {
            let _ = send(&shared.metrics, limits.client_stall, &client, last).await;
            drop(client);
        };
        let reported = async {
            let late = rest?.spans(STOPPED_SPANS).await;
            shared.traces.complete(root.trace_id, &late);
            Some(late)
        };
        let ((), late) = tokio::join!(biased; told, reported);
        if let Some((own, mut of_nodes)) = kept {
            append_pack(&mut of_nodes, late.unwrap_or_default());
            shared.exporter.export(nested(root.trace_id, &[own], &of_nodes));
        }
        if let Some(mut slot) = slot {
            slot.used(usage.prompt, usage.completion);
        }
    }
}

/// To the ring; what is sampled, and every request that failed or was slow, goes to the collector, too. Gives back the
/// router's spans and the nodes' that are for that.
fn keep_trace(
    shared: &Shared,
    record: Box<Record>,
    tenant: Arc<str>,
    reason: Result<v1::FinishReason, Error>,
    mut of_nodes: Vec<u8>,
) -> Option<(Own, Vec<u8>)> {
    let TraceContext { trace_id, sampled, .. } = record.identities.root;
    let notable = reason.is_err() || record.is_slow();
    let exported = shared.exporter.is_on() && (sampled || notable);
    let class = if notable { Class::Notable } else { Class::Usual };
    let ended = Ended { tenant: Some(tenant), class, exported };
    let instance = Arc::clone(&shared.instance);
    let own: Own = Arc::new(move || record.spans(&instance, reason.as_ref().copied()));
    let kept = if exported { of_nodes.clone() } else { std::mem::take(&mut of_nodes) };
    let early = shared.traces.finish(trace_id, Arc::clone(&own), kept, ended);
    append_pack(&mut of_nodes, early);
    exported.then_some((own, of_nodes))
}
