//! Many requests whose nodes fail at once: how many are tried again at a time, where there is room, and in which order.
use std::collections::VecDeque;

use super::super::attempt_protocol::tests::reserved_by;
use super::super::retry_budget::FLOOR;
use super::replans::{ids, metric, until};
use super::*;
use crate::api::Service;

/// One token of prompt, as many of them as one likes fit a node.
fn small(request_id: String) -> GenerationRequest {
    GenerationRequest { request_id, prompt_ids: vec![id('a')].into(), max_tokens: 2, ..request() }
}

fn retrying(service: &Service) -> u64 {
    metric(service, &["tandem_retrying_requests"])
}

fn waiting(service: &Service) -> u64 {
    metric(service, &["tandem_waiting_for_node_requests"])
}

/// Requests whose first attempts have all failed.
struct Failed {
    /// Prefill calls of those that are tried again.
    again: VecDeque<(PrefillCall, v1::RequestSpec)>,
    /// Their decode calls, in no order.
    decodes: Vec<DecodeCall>,
    /// Of all of them, by request.
    streams: HashMap<String, GenerationStream>,
}

impl Failed {
    /// So many requests more than may be retries at once.
    async fn beyond_the_budget(cluster: &mut Cluster, more: usize) -> Self {
        let (mut streams, mut first) = (HashMap::new(), Vec::new());
        for index in 0..FLOOR + more {
            let request_id = format!("r{index}");
            streams.insert(request_id.clone(), cluster.service.generate(small(request_id)).unwrap());
            first.push(cluster.legs().await);
        }
        assert_eq!((retrying(&cluster.service), metric(&cluster.service, &["tandem_retry_budget_requests"])), (0, 32));
        for (prefill, _, decode, _) in first {
            prefill.fail(Status::internal("out of luck")).await;
            decode.cancelled().await;
        }
        let mut failed = Self { again: VecDeque::new(), decodes: Vec::new(), streams };
        for _ in 0..FLOOR {
            failed.one_more(cluster).await;
        }
        let service = cluster.service.clone();
        until("the others wait for their turn", || waiting(&service) == more as u64).await;
        assert_eq!(retrying(&cluster.service), FLOOR as u64);
        assert!(cluster.prefill.is_left_alone() && cluster.decode.is_left_alone());
        failed
    }

    /// The next one is tried again.
    async fn one_more(&mut self, cluster: &mut Cluster) {
        let (prefill, spec, decode, _) = cluster.legs().await;
        self.again.push_back((prefill, spec));
        self.decodes.push(decode);
    }
}

/// Takes nodes' room out of the matter.
fn no_queue() -> Limits {
    Limits { max_queue: 0, ..Limits::default() }
}

#[tokio::test]
async fn when_all_fail_at_once_they_are_tried_again_in_turn_and_none_is_lost() {
    let mut cluster = Cluster::start(no_queue()).await;
    let mut failed = Failed::beyond_the_budget(&mut cluster, 8).await;
    let mut answered = 0;
    while let Some((prefill, _)) = failed.again.pop_front() {
        // A token ends the retry, the answer goes on.
        prefill.send(first_token(id('b'), Some(Stop))).await;
        answered += 1;
        if answered <= 8 {
            failed.one_more(&mut cluster).await;
        }
    }
    for (request_id, stream) in failed.streams {
        let (_, tokens, end) = read(stream).await;
        assert_eq!(tokens, ids("b"), "{request_id}");
        let Ok(GenerationEvent::Finish { timings, .. }) = end else { panic!("{request_id}: {end:?}") };
        assert_eq!(timings.replans, 1);
    }
    assert_eq!((retrying(&cluster.service), waiting(&cluster.service)), (0, 0));
    assert_eq!(metric(&cluster.service, &["tandem_replan_exhausted_total"]), 0);
}

#[tokio::test]
async fn a_retry_that_fails_too_does_not_keep_others_from_their_turn() {
    let mut cluster = Cluster::start(no_queue()).await;
    let mut failed = Failed::beyond_the_budget(&mut cluster, 2).await;
    let (prefill, spec) = failed.again.pop_front().expect("a retry");
    prefill.fail(Status::internal("out of luck again")).await;
    let stream = failed.streams.remove(&spec.request_id).expect("its stream");
    let error = read(stream).await.2.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    let words = "prefill node p0 failed during prefill: out of luck again (gave up: too much fails, 20 % of the running \
                 requests are retries already)";
    assert_eq!(error.message, words);
    assert_eq!(metric(&cluster.service, &["tandem_replan_exhausted_total", "bound=\"budget\""]), 1);
    // Its turn is another one's.
    failed.one_more(&mut cluster).await;
    let (_, other) = failed.again.back().expect("the next one");
    assert_ne!(other.request_id, spec.request_id);
    let service = cluster.service.clone();
    until("one waits still", || waiting(&service) == 1).await;
}

#[tokio::test]
async fn who_waits_for_its_turn_for_too_long_is_told_why() {
    let limits = Limits { replan: Duration::from_secs(5), ..no_queue() };
    let mut cluster = Cluster::start(limits).await;
    let mut failed = Failed::beyond_the_budget(&mut cluster, 1).await;
    let tried = failed.again.iter().map(|(_, spec)| failed.streams.remove(&spec.request_id).expect("its stream"));
    let _run_on: Vec<GenerationStream> = tried.collect();
    let (_, stream) = failed.streams.drain().next().expect("one that waits");
    let error = read(stream).await.2.unwrap_err();
    assert!(error.message.contains("out of luck (gave up: too much fails"), "{}", error.message);
    assert_eq!(metric(&cluster.service, &["tandem_replan_exhausted_total", "bound=\"budget\""]), 1);
}

/// What other routers have on a decode node, for which `max_running` is 8.
fn taken_by_others(requests: u32) -> v1::Load {
    let others = Some(v1::CallCounts { requests, prompts: 0, prompt_tokens: 0 });
    v1::Load { free_blocks: 64, others, ..v1::Load::default() }
}

#[tokio::test]
async fn who_lost_its_node_waits_for_room_and_is_the_first_to_get_it() {
    let mut cluster = Cluster::start(Limits { node_queue: 0, ..Limits::default() }).await;
    let service = cluster.service.clone();
    let stream = cluster.service.generate(request()).unwrap();
    let (mut prefill, _, decode, _) = cluster.legs().await;
    let mut d1 = fakes::join_decode(&service, "d1").await;
    let report = |requests| service.membership().report(d1.node.session, &taken_by_others(requests), clock::now());
    report(8);
    service.membership().leave(cluster.decode.node.session, "killed");
    decode.cancelled().await;
    until("it waits", || waiting(&service) == 1).await;
    let _later = service.generate(GenerationRequest { request_id: "later".into(), ..request() }).unwrap();
    assert_eq!(service.counts().queued, 1);
    // Room for one.
    report(7);
    let (decode, start) = d1.call().await;
    assert_eq!(start.spec.unwrap().request_id, "r1", "who has not started comes behind it");
    assert_eq!((waiting(&service), service.counts().queued), (0, 1));
    decode.send(reserved_by("d1")).await;
    assert_eq!(told(&mut prefill).await, deliver("d1"));
    prefill.send(first_token(id('b'), Some(Stop))).await;
    assert_eq!(read(stream).await.1, ids("b"));
    let (_, start) = d1.call().await;
    assert_eq!(start.spec.unwrap().request_id, "later");
}

#[tokio::test]
async fn without_room_anywhere_it_waits_on_a_node_in_the_end() {
    let limits = Limits { node_queue: 0, replan: Duration::from_secs(1), ..Limits::default() };
    let mut cluster = Cluster::start(limits).await;
    let service = cluster.service.clone();
    let stream = cluster.service.generate(request()).unwrap();
    let (prefill, _, decode, _) = cluster.legs().await;
    let mut d1 = fakes::join_decode(&service, "d1").await;
    service.membership().report(d1.node.session, &taken_by_others(8), clock::now());
    service.membership().leave(cluster.decode.node.session, "killed");
    decode.cancelled().await;
    // Not lost: that node will have room at some time.
    let (_decode, _) = d1.call().await;
    prefill.send(first_token(id('b'), Some(Stop))).await;
    assert_eq!(read(stream).await.1, ids("b"));
}
