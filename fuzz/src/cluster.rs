//! What nodes and peers send: reports to the router's membership, spans, statuses, and the frames of the KV doors.
//! Nodes have the cluster's token, or none is asked for; KV peers have a ticket, or made one up.
use std::cell::RefCell;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use prost::Message;
use tandem_kvtransfer::handshake::{Hello, Secret, Welcome};
use tandem_kvtransfer::wire::{HEADER_BYTES, Header, encode_seal, parse_seal};
use tandem_ports::{LIFE_SECRET_BYTES, life_digest};
use tandem_proto::v1::{self, node_report::Report, transport_info::Reach};
use tandem_proto::{Error, HandoffId, Life, SequenceHash, TraceContext, TraceState, spans, ways};
use tandem_router::capacity::Demand;
use tandem_router::membership::{Expected, MAX_NODES, Membership};
use tandem_router::select::Wish;
use tandem_router::traces::{Class, Ended, Form, Traces};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::Target;

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "node_reports", run: node_reports, seeds: report_seeds },
    Target { name: "spans", run: packed_spans, seeds: span_seeds },
    Target { name: "statuses", run: statuses, seeds: status_seeds },
    Target { name: "kv_frames", run: kv_frames, seeds: frame_seeds },
    Target { name: "transports", run: transports, seeds: transport_seeds },
    Target { name: "trace_headers", run: trace_headers, seeds: trace_header_seeds },
];

/// The model of these nodes.
const OURS: u64 = 7;

static RUNTIME: LazyLock<tokio::runtime::Runtime> =
    LazyLock::new(|| tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("one"));

/// A byte that says what happens besides, a byte that says to which session, and a report with its length before it;
/// and again.
fn node_reports(mut data: &[u8]) {
    let _inside = RUNTIME.enter();
    let membership = Membership::new(Expected { model_digest: OURS, eos_token_id: 2 }, Duration::from_secs(3));
    let mut now = Instant::now();
    let (mut sessions, traces) = (Vec::new(), Traces::default());
    while let Some(([what, which], rest)) = data.split_first_chunk() {
        data = rest;
        let Ok(report) = v1::NodeReport::decode_length_delimited(&mut data) else { break };
        now += Duration::from_millis(u64::from(*what) * 4);
        let session = sessions.get(usize::from(*which) % sessions.len().max(1)).copied().unwrap_or_default();
        match report.report {
            Some(Report::Register(info)) => {
                sessions.extend(membership.register(info, now).ok().map(|node| node.session));
            }
            Some(Report::Load(load)) => membership.report(session, &load, now),
            Some(Report::Draining(_)) => membership.draining(session, now),
            Some(Report::KvEvents(events)) => {
                if let Ok(changes) = events.try_into() {
                    let _ = membership.kv_events(session, &changes, now);
                }
            }
            Some(Report::Spans(packed)) => drop(traces.stray(&packed)),
            Some(Report::ClockProbe(_)) | None => {}
        }
        match what % 8 {
            0 => membership.leave(session, "fuzz"),
            1 => membership.expire(now),
            _ => {}
        }
        let (hashes, tokens) = ([u128::from(*which), 1, 2].map(Into::into), u32::from(*what) << (which % 25));
        let demand = Demand { hashes: hashes.into(), ..membership.demand(tokens, tokens) };
        let routed = membership.route(&demand, &Wish::default(), now);
        let _ = membership.predict(&demand, now);
        let totals = membership.totals();
        let nodes = (totals.prefill_nodes + totals.decode_nodes) as usize;
        assert!(nodes <= MAX_NODES, "{totals:?}");
        assert!(totals.free_blocks <= totals.total_blocks, "{totals:?}");
        drop(routed);
        assert!(membership.json()["nodes"].as_array().is_some_and(|listed| listed.len() == nodes));
    }
    membership.close();
}

fn report_seeds() -> Vec<Vec<u8>> {
    // A node shows it when it takes its own place again.
    const SECRET: [u8; LIFE_SECRET_BYTES] = [7; LIFE_SECRET_BYTES];
    let register = |role: v1::Role, name: &str| {
        Report::Register(v1::Register {
            node_id: name.into(),
            role: role.into(),
            incarnation: 1,
            compatibility_digest: 1,
            protocol: tandem_proto::PROTOCOL_VERSION,
            model_digest: OURS,
            endpoint: "http://127.0.0.1:1".into(),
            transports: vec![network("tcp", "127.0.0.1:9")],
            total_blocks: 64,
            block_tokens: 16,
            max_context_tokens: 2048,
            max_running: 8,
            eos_token_id: 2,
            processor: Some(v1::Processor { id: 1, cores: 2, threads: 2 }),
            arithmetic: "f32".into(),
            kv_order: "bf16-pairs".into(),
            life: 1,
            secret_digest: life_digest(&SECRET).to_vec(),
            ended: vec![v1::LifeSecret { secret: SECRET.to_vec() }],
            ..v1::Register::default()
        })
    };
    let step_cost = v1::StepCost {
        base_ms: 3.0,
        token_ms: 0.5,
        context_ms: 0.01,
        decode_token_ms: Some(1.0),
        decode_context_ms: Some(0.1),
    };
    let load = Report::Load(v1::Load {
        running: 1,
        waiting: 2,
        queued_tokens: 30,
        free_blocks: 60,
        running_tokens: 100,
        step_cost: Some(step_cost),
        ..v1::Load::default()
    });
    let hashes = SequenceHash::all_to_wire(&[1, 2, 3].map(Into::into));
    let events = Report::KvEvents(v1::KvEvents { first: 0, snapshot: true, hashes, removed: vec![2] });
    let all = [
        register(v1::Role::Prefill, "p0"),
        register(v1::Role::Decode, "d0"),
        load.clone(),
        events,
        load,
        Report::Draining(v1::Draining {}),
        register(v1::Role::Decode, "d0"),
    ];
    let step = |(which, report)| {
        let report = v1::NodeReport { report: Some(report) }.encode_length_delimited_to_vec();
        [&[2, which][..], &report].concat()
    };
    let mut seed = Vec::new();
    (0..).zip(all).for_each(|it| seed.extend(step(it)));
    vec![seed]
}

/// Packed spans, as a node tells them at the end of a call, or outside of one.
fn packed_spans(data: &[u8]) {
    for span in spans::raw(data) {
        let (mut packed, mut without) = (Vec::new(), Vec::new());
        span.pass(&mut packed);
        assert_eq!(spans::raw(&packed).count(), 1);
        span.without_place(&mut without);
        span.without_process(&mut without);
        span.without_events(&mut without);
        assert!(without.len() <= 3 * span.bytes().len());
    }
    let known = spans::unpack(data).count();
    assert!(known <= spans::each(data).count());
    thread_local! { static KEPT: RefCell<Traces> = RefCell::new(some_traces()); }
    KEPT.with_borrow(|traces| {
        drop(traces.stray(data));
        traces.complete(TRACE, data);
        for form in [Form::Classic, Form::Otlp, Form::Summary] {
            traces.one(&tandem_proto::trace::hex(&TRACE), form);
        }
        drop(traces.json("last"));
        assert!(traces.services().len() < 1 << 16);
    });
}

const TRACE: [u8; 16] = [5; 16];

/// A ring with one trace in it.
pub fn some_traces() -> Traces {
    let traces = Traces::new(4);
    let (span, own) = (span(), span());
    traces.finish(
        TRACE,
        Arc::new(move || own.clone()),
        &span,
        Ended { tenant: None, class: Class::Usual, exported: true },
    );
    traces
}

fn span() -> Vec<u8> {
    let text = |text: &str| Some(v1::AnyValue { value: Some(v1::any_value::Value::Text(text.into())) });
    let attributes = vec![v1::Attribute { key: "k".into(), value: text("v") }];
    let span = v1::Span {
        trace_id: TRACE.to_vec(),
        span_id: vec![1; 8],
        parent_span_id: vec![2; 8],
        process: Some(v1::Process { service: "a".into(), instance: "b".into() }),
        name: "b".into(),
        kind: v1::SpanKind::Server.into(),
        start_unix_ns: 5_000,
        end_unix_ns: 25_000,
        status: Some(v1::SpanStatus { message: "no".into(), code: 2 }),
        events: vec![v1::SpanEvent { name: "e".into(), attributes: attributes.clone(), ..v1::SpanEvent::default() }],
        attributes,
        ..v1::Span::default()
    };
    let mut packed = Vec::new();
    spans::write::bytes(&mut packed, spans::write::number::SPAN, &span.encode_to_vec());
    packed
}

fn span_seeds() -> Vec<Vec<u8>> {
    vec![span(), span().repeat(2)]
}

/// What a node's refusal says: the code, the length of its message, the message, and packed details.
fn statuses(data: &[u8]) {
    let Some(([code, len], rest)) = data.split_first_chunk() else { return };
    let (message, details) = rest.split_at(usize::from(*len).min(rest.len()));
    let message = String::from_utf8_lossy(message);
    let status = Status::with_details(Code::from(i32::from(*code)), message.clone(), details.to_vec().into());
    let error = Error::from(status);
    assert_eq!(error.message, message);
    let again = Error::from(Status::from(error.clone()));
    assert_eq!((again.kind, again.code), (error.kind, error.code));
}

fn status_seeds() -> Vec<Vec<u8>> {
    let mut details = tonic_types::ErrorDetails::new();
    details.set_retry_info(Some(Duration::from_millis(1500)));
    details.set_error_info("rate_limit_exceeded", "tandem", std::collections::HashMap::new());
    let status = Status::with_error_details(Code::ResourceExhausted, "full", details);
    vec![[&[8, 4][..], b"full", status.details()].concat()]
}

/// A frame's header, and behind it the payload that its kind has.
fn kv_frames(data: &[u8]) {
    let (head, payload) = data.split_at(HEADER_BYTES.min(data.len()));
    if let Some(header) = Header::parse(head) {
        let encoded = header.encode();
        match header {
            // What refuses for an unknown reason still refuses.
            Header::Answer(..) => assert_eq!(Header::parse(&encoded), Some(header), "the same is read again"),
            _ => assert_eq!(encoded[..], *head, "a header has one form"),
        }
        if let Header::Data(range) | Header::Ready(range) | Header::Copied(range) = header {
            let _ = range.units.of(payload.first().copied().unwrap_or(1));
        }
    }
    let handoff = HandoffId::from_wire(payload.get(..16).unwrap_or_default());
    if let Some(seal) = handoff.as_ref().ok().and_then(|handoff| parse_seal(*handoff, payload.get(16..)?)) {
        assert!(parse_seal(handoff.expect("read"), &encode_seal(&seal)) == Some(seal));
    }
    let secret = Secret::of(&ticket()).expect("a whole ticket");
    if let Some(hello) = Hello::parse(payload) {
        assert!(!secret.made(&hello), "a proof out of nothing");
    }
    let _ = Welcome::parse(payload);
    if let Ok(ticket) = v1::Ticket::decode(payload) {
        let _ = Secret::of(&ticket);
    }
    let _ = v1::Seal::decode(payload);
    let _ = Life::from_header(payload);
}

fn ticket() -> v1::Ticket {
    v1::Ticket {
        handoff_id: vec![7; 16],
        key: Some(v1::HandoffKey { secret: vec![9; 32] }),
        address: b"127.0.0.1:9".to_vec(),
        ..v1::Ticket::default()
    }
}

fn frame_seeds() -> Vec<Vec<u8>> {
    let seal = v1::Seal { handoff_id: vec![7; 16], checksums: vec![1, 2, 3], ..v1::Seal::default() };
    let hello = Header::hello().encode();
    vec![
        [&Header::Seal(HandoffId([7; 16])).encode()[..], &[7; 16], &encode_seal(&seal)].concat(),
        [&hello[..], &[7; 100]].concat(),
        [&hello[..], &ticket().encode_to_vec()].concat(),
        [&hello[..], b"00000000000000ff"].concat(),
    ]
}

/// Two lists of transports, each entry with its length before it; the first byte says how many are the sender's.
fn transports(data: &[u8]) {
    let Some((senders, mut data)) = data.split_first() else { return };
    let mut all = Vec::new();
    while all.len() < 64 && !data.is_empty() {
        let Ok(transport) = v1::TransportInfo::decode_length_delimited(&mut data) else { break };
        all.push(transport);
    }
    let (sender, receiver) = all.split_at(usize::from(*senders).min(all.len()));
    let ways = ways::common_ways(sender, receiver);
    assert_eq!(ways.first(), ways::common_way(sender, receiver).as_ref());
    assert!(ways.len() <= sender.len());
    let _ = ways::no_way(("a", sender), ("b", receiver));
}

fn network(name: &str, address: &str) -> v1::TransportInfo {
    let reach = v1::NetworkReach { loopback: true, boot_id: "a".into(), net_namespace: 1, address: address.to_owned() };
    v1::TransportInfo {
        backend: "tcp".into(),
        name: name.into(),
        build_id: "b".into(),
        reach: Some(Reach::Network(reach)),
    }
}

fn transport_seeds() -> Vec<Vec<u8>> {
    let host = v1::HostReach { boot_id: "a".into(), ipc_namespace: 1, pid_namespace: 1, net_namespace: 1, uid: 0 };
    let fabric = v1::FabricReach { subnets: vec!["ib:1".into(), "10.0.0.0/8".into()] };
    let with = |reach| v1::TransportInfo { reach: Some(reach), ..network("ucx/shm(sysv)", "") };
    let each = [network("tcp", "127.0.0.1:9"), with(Reach::Host(host)), with(Reach::Fabric(fabric))];
    let one: Vec<u8> = each.iter().flat_map(|transport| transport.encode_length_delimited_to_vec()).collect();
    vec![[&[3][..], &one, &one].concat()]
}

/// Lines: a `traceparent`, then `tracestate`s.
fn trace_headers(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut lines = text.lines();
    if let Ok(parent) = lines.next().unwrap_or_default().parse::<TraceContext>() {
        assert_eq!(parent.to_string().parse::<TraceContext>().expect("its own form"), parent);
    }
    let state = TraceState::read(lines);
    assert!(state.as_str().len() <= 512);
    assert_eq!(TraceState::read([state.as_str()]), state);
}

fn trace_header_seeds() -> Vec<Vec<u8>> {
    let seed = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\na=1, b@c=2 ,d*-_/=x\ne=!~";
    vec![seed.as_bytes().to_vec()]
}
