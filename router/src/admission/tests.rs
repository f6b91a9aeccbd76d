//! The handle: slots and wakes come and go with their owners.
use super::limiter::Rates;
use super::tenant::Terms;
use crate::capacity::Predicted;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;

use super::*;

/// Nodes that have room or not, and count who asks.
#[derive(Debug, Default)]
struct Nodes {
    full: AtomicBool,
    looks: AtomicUsize,
    freed: Notify,
}

impl Nodes {
    fn free(&self) {
        self.full.store(false, Ordering::Relaxed);
        self.freed.notify_one();
    }

    fn looks(&self) -> usize {
        self.looks.load(Ordering::Relaxed)
    }
}

impl Capacity for Arc<Nodes> {
    fn has_room(&self, _: &Demand, _: &Ahead, _: u32, _: Instant) -> bool {
        self.looks.fetch_add(1, Ordering::Relaxed);
        !self.full.load(Ordering::Relaxed)
    }

    fn freed(&self) -> &Notify {
        &self.freed
    }
}

fn admission(max_inflight: u32, max_queue: usize) -> Admission {
    let limits = Limits { max_inflight, max_queue, ..Limits::default() };
    Admission::new(&limits, Arc::<Nodes>::default(), false)
}

/// Before nodes without room.
fn before_full_nodes() -> (Admission, Arc<Nodes>) {
    let nodes = Arc::new(Nodes { full: true.into(), ..Nodes::default() });
    (Admission::new(&Limits::default(), Arc::clone(&nodes), false), nodes)
}

#[tokio::test]
async fn limits_change_while_requests_run_and_wait() {
    let admission = admission(1, 1);
    let tenant = Tenant::default();
    let enter = |count| admission.enter_all(&tenant, (0..count).map(|_| ask()).collect(), clock::now());
    let running = enter(1).unwrap().pop().unwrap().admitted().await.unwrap();
    let waiting = enter(1).unwrap().pop().unwrap();
    assert_eq!(enter(1).unwrap_err().reason, Reason::QueueFull);
    let limits = |max_inflight, max_queue| Limits { max_inflight, max_queue, ..Limits::default() };
    admission.set_limits(&limits(2, 2));
    // A slot is free now, and no other request has to end.
    let _second = waiting.admitted().await.unwrap();
    let both = enter(2).unwrap();
    admission.set_limits(&limits(1, 1));
    assert_eq!(admission.counts(), Counts { inflight: 2, queued: 2 }, "who runs or waits stays");
    assert_eq!(enter(1).unwrap_err().reason, Reason::QueueFull);
    drop(running);
    assert_eq!(admission.counts(), Counts { inflight: 1, queued: 2 }, "one runs, as many as may");
    drop(both);
    let later = Instant::now() + Duration::from_secs(1);
    let slow = Ask { predicted: Some(Predicted { wait: Duration::ZERO, prefill: Duration::from_secs(9) }), ..ask() };
    admission.set_limits(&Limits { max_ttft: Some(Duration::from_secs(1)), ..limits(1, 1) });
    let refused = admission.enter_all(&tenant, vec![slow.clone()], later).unwrap_err();
    assert_eq!(refused.reason, Reason::Objective);
    admission.set_limits(&limits(1, 1));
    assert!(admission.enter_all(&tenant, vec![slow], later).is_ok());
}

#[tokio::test]
async fn a_key_s_requests_run_and_wait_no_more_at_a_time_than_may() {
    let (admission, nodes) = before_full_nodes();
    let rates = Rates { requests_per_minute: Some(2), tokens_per_minute: None };
    let terms = Terms { rates, max_concurrent_requests: Some(2), ..Terms::default() };
    let now = clock::now();
    let tenant = Tenant::new("a", terms, Some(now));
    let enter = |count| admission.enter_all(&tenant, (0..count).map(|_| ask()).collect(), now);
    let mut two = enter(2).unwrap();
    assert_eq!(admission.may_enter(&tenant, now).unwrap_err().reason, Reason::Concurrency);
    let refused = enter(1).unwrap_err();
    assert_eq!((refused.reason, refused.error.kind), (Reason::Concurrency, ErrorKind::Overloaded));
    assert!(enter(3).unwrap_err().error.message.contains("3 of them"), "another try would be of no use");
    // One leaves the queue, one runs and ends.
    drop(two.pop());
    assert!(admission.may_enter(&tenant, now).is_ok());
    nodes.free();
    let running = two.pop().unwrap().admitted().await.unwrap();
    assert_eq!(enter(2).unwrap_err().reason, Reason::Concurrency);
    drop(running);
    // What ran took one of the minute's two. Who is refused by a rate, or by the queue, holds no place.
    assert_eq!(enter(2).unwrap_err().reason, Reason::RateLimit);
    drop(enter(1).unwrap());
    admission.set_limits(&Limits { max_inflight: 0, max_queue: 0, ..Limits::default() });
    assert_eq!(enter(1).unwrap_err().reason, Reason::QueueFull);
    assert_eq!(tenant.begin(2), Ok(()));
}

#[tokio::test]
async fn a_queue_comes_and_goes_while_requests_run() {
    let nodes = Arc::new(Nodes { full: true.into(), ..Nodes::default() });
    let limits = |max_queue| Limits { max_inflight: 2, max_queue, ..Limits::default() };
    let admission = Admission::new(&limits(0), Arc::clone(&nodes), false);
    let tenant = Tenant::default();
    let enter = || admission.enter_all(&tenant, vec![ask()], clock::now()).map(|mut entered| entered.pop().unwrap());
    let without = enter().unwrap().admitted().await.unwrap();
    assert_eq!(nodes.looks(), 0, "without a queue the nodes' room does not matter");
    assert_eq!((admission.most_requests(), admission.has_objective()), (2, false));
    admission.set_limits(&Limits { max_ttft: Some(Duration::from_secs(1)), ..limits(3) });
    assert_eq!((admission.most_requests(), admission.has_objective()), (5, true));
    let waiting = [enter().unwrap(), enter().unwrap()];
    assert_eq!(admission.counts(), Counts { inflight: 1, queued: 2 }, "the nodes have no room");
    admission.set_limits(&limits(0));
    let [next, last] = waiting;
    let next = next.admitted().await.unwrap();
    assert_eq!(admission.counts(), Counts { inflight: 2, queued: 1 });
    assert_eq!(enter().unwrap_err().reason, Reason::QueueFull);
    drop((without, next));
    drop(last.admitted().await.unwrap());
    assert_eq!(admission.counts(), Counts::default());
}

fn demand(answer_tokens: u32) -> Demand {
    Demand { prompt_tokens: 10, max_tokens: 20, answer_tokens, hashes: Vec::new() }
}

fn ask() -> Ask {
    let tenant = Tenant::default();
    Ask {
        tenant: Arc::clone(tenant.name()),
        weight: 1,
        priority: 0,
        demand: demand(20),
        deadline: clock::now() + Duration::from_secs(60),
        predicted: None,
    }
}

impl Admission {
    /// One request by itself.
    fn enter(&self, tenant: &Tenant, ask: Ask, now: Instant) -> Result<Entered, Refusal> {
        self.enter_all(tenant, vec![ask], now).map(|mut entries| entries.remove(0))
    }
}

fn enter(admission: &Admission) -> Result<Entered, Refusal> {
    admission.enter(&Tenant::default(), ask(), clock::now())
}

fn limited(requests_per_minute: Option<u32>, tokens_per_minute: Option<u32>, now: Instant) -> Tenant {
    let rates = Rates { requests_per_minute, tokens_per_minute };
    Tenant::new("a", Terms { rates, ..Terms::default() }, Some(now))
}

#[tokio::test]
async fn a_full_queue_refuses_and_a_left_slot_admits() {
    let admission = admission(1, 1);
    let running = enter(&admission).unwrap().admitted().await.unwrap();
    let waiting = enter(&admission).unwrap();
    let refusal = enter(&admission).unwrap_err();
    assert_eq!((refusal.reason, refusal.error.kind), (Reason::QueueFull, ErrorKind::Overloaded));
    assert_eq!(admission.counts(), Counts { inflight: 1, queued: 1 });
    drop(running);
    let slot = waiting.admitted().await.unwrap();
    assert_eq!(admission.counts(), Counts { inflight: 1, queued: 0 });
    drop(slot);
    admission.drain(Duration::from_secs(1)).await;
    let refusal = enter(&admission).unwrap_err();
    assert_eq!((refusal.reason, refusal.error.kind), (Reason::Draining, ErrorKind::Unavailable));
}

#[tokio::test]
async fn who_gives_up_leaves_its_place_even_when_its_turn_has_come() {
    let admission = admission(1, 2);
    let running = enter(&admission).unwrap();
    drop(enter(&admission).unwrap().admitted());
    assert_eq!(admission.counts().queued, 0);
    let (first, second) = (enter(&admission).unwrap(), enter(&admission).unwrap());
    drop(running);
    while admission.counts() != (Counts { inflight: 1, queued: 1 }) {
        tokio::task::yield_now().await;
    }
    drop(first);
    drop(second.admitted().await.unwrap());
    assert_eq!(admission.counts(), Counts::default());
    assert!(admission.inner.lock().wake.is_empty(), "nobody is left to be woken");
}

#[tokio::test]
async fn a_drain_waits_for_those_who_run_and_wait() {
    let admission = admission(1, 1);
    let (running, waiting) = (enter(&admission).unwrap(), enter(&admission).unwrap());
    let drain = tokio::spawn({
        let admission = admission.clone();
        async move { admission.drain(Duration::from_secs(60)).await }
    });
    while !admission.is_closed() {
        tokio::task::yield_now().await;
    }
    drop(running);
    assert!(!drain.is_finished());
    drop(waiting.admitted().await.unwrap());
    drain.await.unwrap();
}

/// Nodes that are asked for room just when the router begins to end.
#[derive(Debug, Default)]
struct AtTheEnd {
    admission: OnceLock<Admission>,
    freed: Notify,
}

impl Capacity for Arc<AtTheEnd> {
    fn has_room(&self, _: &Demand, _: &Ahead, _: u32, _: Instant) -> bool {
        self.admission.get().unwrap().inner.closed.store(true, Ordering::Relaxed);
        true
    }

    fn freed(&self) -> &Notify {
        &self.freed
    }
}

#[tokio::test]
async fn who_comes_in_while_a_drain_begins_leaves_again() {
    let nodes = Arc::<AtTheEnd>::default();
    let admission = Admission::new(&Limits::default(), Arc::clone(&nodes), false);
    nodes.admission.set(admission.clone()).unwrap();
    assert_eq!(enter(&admission).unwrap_err().reason, Reason::Draining);
    assert_eq!(admission.counts(), Counts::default(), "a drain that looked before waits for nobody");
}

#[tokio::test]
async fn a_deadline_ends_the_wait() {
    let admission = admission(1, 2);
    let running = enter(&admission).unwrap();
    let now = clock::now();
    let deadline = now + Duration::from_millis(10);
    let nobody = Tenant::default();
    let hasty = admission.enter(&nobody, Ask { deadline, ..ask() }, now).unwrap();
    let patient = admission.enter(&nobody, ask(), deadline).unwrap();
    assert_eq!(hasty.admitted().await.unwrap_err().kind, ErrorKind::DeadlineExceeded);
    drop(running);
    patient.admitted().await.unwrap();
}

#[tokio::test]
async fn rates_count_what_was_used() {
    let admission = admission(1, 1);
    let now = clock::now();
    let tenant = limited(None, Some(100), now);
    let enter = |answer_tokens| admission.enter(&tenant, Ask { demand: demand(answer_tokens), ..ask() }, now);
    let mut slot = enter(80).unwrap().admitted().await.unwrap();
    let refusal = enter(80).unwrap_err();
    assert_eq!(refusal.reason, Reason::RateLimit);
    assert_eq!(refusal.error.retry_after, Some(Duration::from_secs(48)), "80 of 90 tokens are missing");
    slot.used(10, 20);
    drop(slot);
    let running = enter(60).unwrap();
    assert_eq!(enter(60).unwrap_err().reason, Reason::RateLimit, "60 came back, no more");
    drop(running);
}

#[tokio::test]
async fn an_answer_that_is_longer_than_usual_counts_whole() {
    let (admission, now) = (admission(1, 1), clock::now());
    let tenant = limited(None, Some(100), now);
    let enter = |answer_tokens| admission.enter(&tenant, Ask { demand: demand(answer_tokens), ..ask() }, now);
    let mut slot = enter(20).unwrap().admitted().await.unwrap();
    slot.used(10, 150);
    drop(slot);
    // 160 of 100 are gone, and 30 are asked for.
    let retry_after = enter(20).unwrap_err().error.retry_after.expect("a time");
    assert!(retry_after > Duration::from_secs(40) && retry_after <= Duration::from_secs(54), "{retry_after:?}");
    assert!(tenant.allowances(now).iter().all(|tokens| tokens.remaining == 0));
}

#[tokio::test]
async fn what_a_full_queue_refused_costs_no_rate() {
    let admission = admission(1, 0);
    let _running = enter(&admission).unwrap();
    let tenant = limited(Some(1), None, clock::now());
    for _ in 0..5 {
        assert_eq!(admission.enter(&tenant, ask(), clock::now()).unwrap_err().reason, Reason::QueueFull);
    }
}

#[tokio::test]
async fn requests_of_one_call_take_their_rate_together_and_give_back_what_did_not_start() {
    let (admission, now) = (admission(1, 4), clock::now());
    let tenant = limited(Some(3), None, now);
    let call = |requests| admission.enter_all(&tenant, vec![ask(); requests], now);
    let mut entries = call(2).unwrap();
    assert_eq!(call(2).unwrap_err().reason, Reason::RateLimit);
    assert_eq!(admission.counts(), Counts { inflight: 1, queued: 1 }, "nothing of the second call is there");
    drop(entries.pop());
    let more = call(2).expect("the refusal cost nothing, and who left the queue gave its request back");
    drop(entries.remove(0).admitted().await.unwrap());
    assert_eq!(call(1).unwrap_err().reason, Reason::RateLimit, "what had started counts");
    drop(more);
    assert_eq!((call(3).unwrap_err().reason, call(2).is_ok()), (Reason::RateLimit, true));
    assert!(admission.inner.lock().wake.is_empty());
}

#[tokio::test]
async fn a_crowd_of_changes_is_one_look_and_its_last_one_is_seen() {
    let (admission, nodes) = before_full_nodes();
    let waiting = enter(&admission).unwrap();
    let start = Instant::now();
    for _ in 0..1000 {
        nodes.freed.notify_one();
        tokio::task::yield_now().await;
    }
    let most = 3 + start.elapsed().as_millis() as usize;
    assert!(nodes.looks() <= most, "{nodes:?}");
    nodes.free();
    tokio::time::timeout(Duration::from_secs(20), waiting.admitted()).await.expect("it was looked again").unwrap();
}

#[tokio::test(start_paused = true)]
async fn who_waits_starts_when_there_is_room_and_nobody_looks_on_behalf_of_others() {
    let (admission, nodes) = before_full_nodes();
    let waiting = enter(&admission).unwrap();
    let other = enter(&admission).unwrap();
    // Longer than any pause between two looks, and between the looks that are made in any case.
    tokio::time::sleep(LOOK * 5 + BETWEEN + BETWEEN / 2).await;
    let looks = nodes.looks();
    drop(other);
    nodes.free();
    assert_eq!(nodes.looks(), looks, "a drop and a report only notify");
    let start = tokio::time::Instant::now();
    waiting.admitted().await.unwrap();
    assert!(start.elapsed() <= BETWEEN, "{:?}", start.elapsed());
    tokio::time::sleep(LOOK * 5).await;
    assert_eq!(nodes.looks(), looks + 1, "the task ends with the queue empty");
}
