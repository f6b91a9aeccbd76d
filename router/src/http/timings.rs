//! Tandem's own extension of an answer, for tools that measure: the milliseconds of every phase and the trace id, under
//! `tandem`, when `stream_options.include_timings` asks for them. The names are those of `tandem.v1.Timings`.
use serde_json::{Value, json};
use tandem_proto::v1;

/// What an answer's last event says of its time. It becomes JSON only for those who asked.
pub(super) struct Timed {
    pub timings: Box<v1::Timings>,
    pub trace_id: String,
}

/// The value of `tandem`: an object, or, of several answers, a list of objects by `index`.
pub(super) fn tandem<'a>(answers: impl Iterator<Item = &'a Timed>) -> Value {
    let mut told: Vec<Value> = answers.map(of_answer).collect();
    if told.len() == 1 { told.remove(0) } else { Value::Array(told) }
}

fn of_answer(Timed { timings, trace_id }: &Timed) -> Value {
    json!({
        "trace_id": trace_id,
        "queue_ms": timings.queue_ms,
        "route_ms": timings.route_ms,
        "prefill_ms": timings.prefill_ms,
        "ttft_ms": timings.ttft_ms,
        "transfer_exposed_ms": timings.transfer_exposed_ms,
        "transfer_total_ms": timings.transfer_total_ms,
        "decode_ms": timings.decode_ms,
        "e2e_ms": timings.e2e_ms,
        "tpot_ms": timings.tpot_ms,
        "handoff_gap_ms": timings.handoff_gap_ms,
        "kv_bytes": timings.kv_bytes,
        "kv_blocks": timings.kv_blocks,
        "kv_transport": timings.kv_transport,
        "kv_gbps": timings.kv_gbps,
        "prefill_instance": timings.prefill_instance,
        "decode_instance": timings.decode_instance,
        "replans": timings.replans,
        "longest_gap_ms": timings.longest_gap_ms,
        "predicted_ttft_ms": timings.predicted_ttft_ms,
        "drafted_tokens": timings.drafted_tokens,
        "accepted_tokens": timings.accepted_tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field that is added to the message must be told here, too.
    #[test]
    fn every_field_of_the_message_is_told() {
        let pool = prost_fields("Timings");
        let told = of_answer(&Timed { timings: Box::default(), trace_id: "t".into() });
        let told = told.as_object().unwrap();
        assert!(pool.len() >= 21, "{pool:?}");
        assert!(pool.iter().all(|field| told.contains_key(field)), "{pool:?} {told:?}");
        assert_eq!(told.len(), pool.len() + 1, "and the trace id");
    }

    /// What `tandem bench` reads in its own test, and any other tool may rely on: flat, beside the trace's id.
    #[test]
    fn the_form_is_the_one_that_tools_read() {
        let timings = v1::Timings {
            queue_ms: 1.5,
            route_ms: 0.25,
            prefill_ms: 40.0,
            ttft_ms: 42.5,
            transfer_exposed_ms: 2.0,
            transfer_total_ms: 9.0,
            decode_ms: 300.0,
            e2e_ms: 342.5,
            tpot_ms: 12.5,
            handoff_gap_ms: 15.0,
            kv_bytes: 4_194_304,
            kv_blocks: 16,
            kv_transport: "tcp".into(),
            kv_gbps: 2.5,
            prefill_instance: "prefill-0".into(),
            decode_instance: "decode-1".into(),
            replans: 1,
            longest_gap_ms: 20.0,
            predicted_ttft_ms: 38.0,
            drafted_tokens: 12,
            accepted_tokens: 9,
        };
        let read: Value = serde_json::from_str(include_str!("timings.json")).unwrap();
        let told = Timed { timings: Box::new(timings), trace_id: "4bf92f3577b34da6a3ce929d0e0e4736".into() };
        assert_eq!(tandem([&told].into_iter()), read);
        assert_eq!(tandem([&told, &told].into_iter()), json!([read, read]), "of several answers, a list");
    }

    fn prost_fields(message: &str) -> Vec<String> {
        use prost::Message;
        let set = prost_types::FileDescriptorSet::decode(v1::FILE_DESCRIPTOR_SET).unwrap();
        let messages = set.file.into_iter().flat_map(|file| file.message_type);
        let message = messages.filter(|found| found.name() == message).flat_map(|found| found.field);
        message.map(|field| field.name().to_owned()).collect()
    }
}
