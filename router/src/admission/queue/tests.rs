//! The queue's promises: nothing lost, nothing starved, shares kept, limits kept; under any order of events.
//! Long because each promise is a test of its own, and all of them ask in the same few words.
use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn bounds(max_inflight: usize, max_queue: usize) -> Bounds {
    Bounds { max_inflight, max_queue, pools: Pools::default(), max_ttft: None, tenants: false }
}

/// For tenants that are known by their keys.
fn shared(max_inflight: usize, max_queue: usize) -> Bounds {
    Bounds { tenants: true, ..bounds(max_inflight, max_queue) }
}

fn demand(prompt_tokens: u32, max_tokens: u32, answer_tokens: u32) -> Demand {
    Demand { prompt_tokens, max_tokens, answer_tokens, hashes: Vec::new() }
}

fn ask(tenant: &str, now: Instant) -> Ask {
    Ask {
        tenant: tenant.into(),
        weight: 1,
        priority: 0,
        demand: demand(10, 10, 10),
        deadline: now + Duration::from_secs(3600),
        predicted: None,
    }
}

impl Queue {
    fn ends(&mut self, ticket: Ticket, now: Instant, room: HasRoom<'_>) -> Turn {
        self.leave(ticket, now);
        self.tick(now, room)
    }

    fn is_routed(&mut self, ticket: Ticket, now: Instant, room: HasRoom<'_>) -> Turn {
        self.routed(ticket);
        self.tick(now, room)
    }

    /// One request by itself.
    fn enter(&mut self, ask: Ask, now: Instant, room: HasRoom<'_>) -> (Result<Ticket, Refused>, Turn) {
        let (entered, turn) = self.enter_all(vec![ask], now, room);
        (entered.map(|tickets| tickets[0]), turn)
    }
}

/// Idle nodes need so long.
fn prefill(millis: u64) -> Option<Predicted> {
    Some(Predicted { wait: Duration::ZERO, prefill: ms(millis) })
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn always(_: &Demand, _: &Ahead) -> bool {
    true
}

/// A ticket that waits or has started.
fn entered(queue: &mut Queue, ask: Ask, now: Instant) -> Ticket {
    queue.enter(ask, now, &mut always).0.unwrap()
}

fn reason(queue: &mut Queue, ask: Ask, now: Instant) -> Reason {
    queue.enter(ask, now, &mut always).0.unwrap_err().reason
}

#[test]
fn slots_then_places_then_refusals() {
    let now = Instant::now();
    let mut queue = Queue::new(bounds(1, 1));
    let (first, turn) = queue.enter(ask("a", now), now, &mut always);
    let first = first.unwrap();
    assert_eq!(turn.start, [first]);
    let second = entered(&mut queue, ask("a", now), now);
    assert_eq!((queue.inflight(), queue.waiting()), (1, 1));
    assert_eq!(reason(&mut queue, ask("a", now), now), Reason::QueueFull);
    assert_eq!(queue.ends(first, now, &mut always).start, [second]);
    assert_eq!(queue.ends(first, now, &mut always), Turn::default(), "a ticket leaves once");
    assert_eq!((queue.inflight(), queue.waiting()), (1, 0));
}

#[test]
fn a_deadline_that_passes_ends_the_wait() {
    let now = Instant::now();
    let mut queue = Queue::new(bounds(1, 4));
    let running = entered(&mut queue, ask("a", now), now);
    let hasty = entered(&mut queue, Ask { deadline: now + ms(5), ..ask("a", now) }, now);
    assert_eq!(queue.tick(now + ms(4), &mut always), Turn::default());
    assert_eq!(queue.tick(now + ms(5), &mut always).expired, [hasty]);
    assert_eq!(queue.ends(running, now, &mut always), Turn::default());
    assert_eq!((queue.inflight(), queue.waiting()), (0, 0));
}

#[test]
fn a_greedy_tenant_is_refused_while_others_enter() {
    let now = Instant::now();
    let mut queue = Queue::new(shared(1, 100));
    entered(&mut queue, ask("greedy", now), now);
    let waiting = (0..).take_while(|_| queue.enter(ask("greedy", now), now, &mut always).0.is_ok()).count();
    assert_eq!(waiting, 80);
    assert_eq!(reason(&mut queue, ask("greedy", now), now), Reason::TenantShare);
    for _ in 0..10 {
        entered(&mut queue, ask("other", now), now);
    }
    for tenant in 0..9 {
        entered(&mut queue, ask(&format!("new {tenant}"), now), now);
    }
    assert_eq!(reason(&mut queue, ask("greedy", now), now), Reason::TenantShare);
    assert_eq!(queue.depths()["other"], 10);
}

#[test]
fn a_single_tenant_has_the_whole_queue() {
    let now = Instant::now();
    let mut queue = Queue::new(bounds(1, 100));
    let waiting = (0..).take_while(|_| queue.enter(ask("default", now), now, &mut always).0.is_ok()).count();
    assert_eq!(waiting, 101);
    assert_eq!(reason(&mut queue, ask("default", now), now), Reason::QueueFull);
}

#[test]
fn names_that_clients_give_themselves_are_labels_and_no_shares() {
    let now = Instant::now();
    let mut queue = Queue::new(bounds(1, 100));
    entered(&mut queue, ask("default", now), now);
    let urgent = Ask { priority: 10, ..ask("default", now) };
    let waiting: Vec<Ticket> =
        ["default", "a stranger", "another"].map(|name| entered(&mut queue, ask(name, now), now)).into();
    assert!(!queue.bounds.tenants, "nodes still hear of priorities");
    let urgent = entered(&mut queue, urgent, now);
    let mut running = 1;
    let mut order = Vec::new();
    while let [next] = queue.ends(running, now, &mut always).start[..] {
        order.push(next);
        running = next;
    }
    assert_eq!(order, [vec![urgent], waiting].concat(), "one line, by priority and arrival");
    entered(&mut queue, ask("default", now), now);
    let invented = (0..).take_while(|n| queue.enter(ask(&format!("t{n}"), now), now, &mut always).0.is_ok()).count();
    assert_eq!(invented, 100, "and one queue");
    assert!(queue.depths().len() <= MAX_TENANTS + 1 && queue.depths()["t7"] == 1, "each name is told");
}

#[test]
fn tenants_beyond_the_limit_share_a_lane() {
    let now = Instant::now();
    let mut queue = Queue::new(shared(1, 10_000));
    for tenant in 0..MAX_TENANTS + 50 {
        entered(&mut queue, ask(&format!("t{tenant}"), now), now);
    }
    let depths = queue.depths();
    assert!(depths.len() <= MAX_TENANTS + 1, "{}", depths.len());
    assert!(depths[OTHERS] >= 49);
}

#[test]
fn who_finds_no_room_is_passed_a_bounded_number_of_times() {
    let now = Instant::now();
    let mut queue = Queue::new(shared(1000, 1000));
    let mut fits_small = |demand: &Demand, _: &Ahead| demand.prompt_tokens < 100;
    let large = Ask { demand: demand(1000, 10, 10), ..ask("large", now) };
    let large = queue.enter(large, now, &mut fits_small).0.unwrap();
    let mut passed = 0;
    for _ in 0..2 * MAX_PASSES {
        let (ticket, turn) = queue.enter(ask("small", now), now, &mut fits_small);
        passed += u32::from(turn.start.contains(&ticket.unwrap()));
    }
    assert_eq!(passed, MAX_PASSES);
    let turn = queue.tick(now, &mut always);
    assert_eq!(turn.start[0], large, "once there is room it is first");
    assert_eq!(turn.start.len() as u32, 1 + MAX_PASSES);
}

#[test]
fn what_has_started_and_is_not_routed_is_told() {
    let now = Instant::now();
    let mut queue = Queue::new(bounds(10, 10));
    let mut one_at_a_time = |_: &Demand, ahead: &Ahead| ahead.requests == 0;
    let first = queue.enter(ask("a", now), now, &mut one_at_a_time).0.unwrap();
    let (second, turn) = queue.enter(ask("a", now), now, &mut one_at_a_time);
    assert_eq!(turn.start, [] as [Ticket; 0]);
    assert_eq!(queue.is_routed(first, now, &mut one_at_a_time).start, [second.unwrap()]);
    assert_eq!(queue.ahead, Ahead::of(&ask("a", now).demand));
}

#[test]
fn who_lost_its_nodes_comes_before_those_who_have_not_started() {
    let now = Instant::now();
    let mut queue = Queue::new(bounds(10, 10));
    let mut one_at_a_time = |_: &Demand, ahead: &Ahead| ahead.requests == 0;
    let first = queue.enter(ask("a", now), now, &mut one_at_a_time).0.unwrap();
    queue.is_routed(first, now, &mut one_at_a_time);
    for _ in 0..2 {
        queue.displaced(first, &demand(30, 10, 5));
        assert_eq!(queue.ahead, Ahead { requests: 1, prompt_tokens: 30, total_tokens: 35 }, "it counts once");
    }
    let (second, turn) = queue.enter(ask("a", now), now, &mut one_at_a_time);
    assert_eq!(turn.start, [] as [Ticket; 0]);
    assert_eq!(queue.is_routed(first, now, &mut one_at_a_time).start, [second.unwrap()]);
    // Who leaves meanwhile, and who only waits, is before nobody.
    queue.displaced(first, &demand(30, 10, 5));
    let (third, _) = queue.enter(ask("a", now), now, &mut one_at_a_time);
    queue.displaced(third.unwrap(), &demand(30, 10, 5));
    queue.ends(first, now, &mut one_at_a_time);
    assert_eq!(queue.ahead, Ahead::of(&ask("a", now).demand), "of the second one");
}

#[test]
fn late_answers_are_refused_early_with_the_time_after_which_they_would_not_be() {
    let start = Instant::now();
    let mut queue = Queue::new(Bounds { max_ttft: Some(ms(1500)), ..shared(1, 1000) });
    let mut running = entered(&mut queue, ask("a", start), start);
    let mut now = start;
    // 20 tokens every 100 ms.
    entered(&mut queue, ask("a", now), now);
    for _ in 0..200 {
        now += ms(100);
        entered(&mut queue, ask("a", now), now);
        running = queue.ends(running, now, &mut always).start[0];
    }
    let mut waiting = queue.waiting();
    let refused = loop {
        match queue.enter(ask("a", now), now, &mut always).0 {
            Ok(_) => waiting += 1,
            Err(refused) => break refused,
        }
    };
    assert_eq!((refused.reason, waiting), (Reason::Objective, 16), "16 before it are 1.6 s");
    let retry_after = refused.retry_after.unwrap();
    assert!(retry_after > ms(50) && retry_after < ms(200), "{refused:?}");
    let hasty = Ask { deadline: now + ms(500), ..ask("a", now) };
    assert_eq!(reason(&mut queue, hasty, now), Reason::Deadline);
    let slow = Ask { predicted: prefill(1400), priority: 10, ..ask("b", now) };
    assert!(queue.enter(slow.clone(), now, &mut always).0.is_ok(), "another tenant does not wait for all of them");
    assert_eq!(reason(&mut queue, Ask { predicted: prefill(1600), ..slow }, now), Reason::Objective);
}

#[test]
fn what_the_nodes_need_counts_for_those_who_start_at_once_too() {
    let now = Instant::now();
    let mut queue = Queue::new(Bounds { max_ttft: Some(ms(1500)), ..bounds(10, 10) });
    let of = |wait: u64, prefill: u64| Ask {
        predicted: Some(Predicted { wait: ms(wait), prefill: ms(prefill) }),
        ..ask("a", now)
    };
    let refused = queue.enter(of(1000, 600), now, &mut always).0.unwrap_err();
    assert_eq!((refused.reason, refused.retry_after), (Reason::Objective, Some(ms(100))));
    assert_eq!((refused.first_token, queue.inflight()), (Some(ms(1600)), 0));
    let refused = queue.enter(of(0, 1600), now, &mut always).0.unwrap_err();
    assert_eq!(refused.retry_after, None, "idle nodes would be as late");
    let hasty = Ask { deadline: now + ms(700), ..of(400, 400) };
    assert_eq!(reason(&mut queue, hasty, now), Reason::Deadline);
    let (ticket, turn) = queue.enter(of(900, 600), now, &mut always);
    assert_eq!(turn.start, [ticket.unwrap()]);
    // Nobody knows how fast the queue moves: what the nodes need is known all the same.
    let mut queue = Queue::new(Bounds { max_ttft: Some(ms(1500)), ..bounds(1, 10) });
    entered(&mut queue, ask("a", now), now);
    entered(&mut queue, of(900, 600), now);
    assert_eq!(reason(&mut queue, of(901, 600), now), Reason::Objective);
    entered(&mut queue, ask("a", now), now);
}

#[test]
fn requests_of_one_call_get_in_together_or_not_at_all() {
    let now = Instant::now();
    let mut queue = Queue::new(bounds(2, 1));
    let call = |requests| vec![ask("a", now); requests];
    let (refused, turn) = queue.enter_all(call(4), now, &mut always);
    assert_eq!((refused.unwrap_err().reason, turn), (Reason::QueueFull, Turn::default()));
    assert_eq!((queue.inflight(), queue.waiting(), queue.ahead), (0, 0, Ahead::default()));
    let (tickets, turn) = queue.enter_all(call(3), now, &mut always);
    assert_eq!(turn.start, tickets.unwrap()[..2]);
    assert_eq!((queue.inflight(), queue.waiting()), (2, 1));
}

#[test]
fn documents_leave_slots_for_chats() {
    let now = Instant::now();
    let pools = "chat=0-100:3,document=101-:1".parse().unwrap();
    let mut queue = Queue::new(Bounds { pools, ..bounds(8, 100) });
    let document = || Ask { demand: demand(5000, 10, 10), ..ask("a", now) };
    let documents: Vec<Ticket> = (0..10).map(|_| entered(&mut queue, document(), now)).collect();
    assert_eq!((queue.inflight(), queue.waiting()), (2, 8));
    for _ in 0..6 {
        entered(&mut queue, ask("a", now), now);
    }
    assert_eq!((queue.inflight(), queue.waiting()), (8, 8));
    let chat = entered(&mut queue, ask("a", now), now);
    assert_eq!(queue.ends(documents[0], now, &mut always).start, [documents[2]]);
    assert_eq!(queue.waiting(), 8);
    assert!(matches!(queue.places[&chat], Place::Waiting { .. }));
}

#[test]
fn documents_that_find_no_room_leave_it_to_chats() {
    let now = Instant::now();
    let pools = "chat=0-100,document=101-".parse().unwrap();
    let mut queue = Queue::new(Bounds { pools, tenants: true, ..bounds(10_000, 10_000) });
    let mut fits_small = |demand: &Demand, _: &Ahead| demand.prompt_tokens < 1000;
    let document = |tenant: &str, prompt| Ask { demand: demand(prompt, 10, 10), ..ask(tenant, now) };
    let mut start = |queue: &mut Queue, ask: Ask| {
        let (ticket, turn) = queue.enter(ask, now, &mut fits_small);
        let ticket = ticket.unwrap();
        (ticket, turn.start.contains(&ticket))
    };
    let (first, _) = start(&mut queue, document("0", 5000));
    // Its pool waits for it, and the other one does not.
    let passed = (0..2 * MAX_PASSES).filter(|_| start(&mut queue, document("small", 200)).1).count() as u32;
    assert_eq!((passed, start(&mut queue, ask("chat", now)).1), (MAX_PASSES, true));
    // Nor does it for more documents than are tried.
    for tenant in 1..=MAX_TRIED {
        start(&mut queue, document(&tenant.to_string(), 5000));
    }
    let chats = (0..2 * MAX_PASSES_OF_OTHERS).take_while(|_| start(&mut queue, ask("chat", now)).1).count() as u32;
    assert!(
        (MAX_PASSES_OF_OTHERS..MAX_PASSES_OF_OTHERS + MAX_PASSES).contains(&chats),
        "{chats}: nobody waits for ever"
    );
    assert_eq!(queue.tick(now, &mut always).start[0], first);
}

#[derive(Clone, Debug)]
enum Event {
    Enter {
        tenant: u8,
        priority: i32,
        prompt: u32,
        patience_ms: u64,
    },
    /// The n-th of those who are there leaves, running or waiting.
    Leave(usize),
    Routed(usize),
    Pass(u64),
    Room(u32),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0u8..5, -10i32..=10, 1u32..3000, 1u64..500)
            .prop_map(|(tenant, priority, prompt, patience_ms)| Event::Enter { tenant, priority, prompt, patience_ms }),
        2 => any::<usize>().prop_map(Event::Leave),
        1 => any::<usize>().prop_map(Event::Routed),
        1 => (0u64..100).prop_map(Event::Pass),
        1 => (0u32..6000).prop_map(Event::Room),
    ]
}

/// Tenants that always have requests waiting, each with answers of its own lengths, which nobody knows before. Each
/// running answer grows by a token at a time.
struct Generating<'a> {
    queue: Queue,
    now: Instant,
    weights: &'a [u32],
    /// How long an answer of a tenant becomes.
    length: Box<dyn FnMut(usize) -> u32 + 'a>,
    waiting: HashMap<Ticket, usize>,
    /// Whose, generated, until then.
    running: BTreeMap<Ticket, (usize, u32, u32)>,
    /// What each was served: prompts, and what was generated.
    had: Vec<u64>,
}

const PROMPT: u32 = 50;

impl<'a> Generating<'a> {
    fn new(slots: usize, weights: &'a [u32], length: impl FnMut(usize) -> u32 + 'a) -> Self {
        let (queue, now) = (Queue::new(shared(slots, 10_000)), Instant::now());
        let (waiting, running, had) = (HashMap::new(), BTreeMap::new(), vec![0; weights.len()]);
        Self { queue, now, weights, length: Box::new(length), waiting, running, had }
    }

    fn ask(&mut self, tenant: usize) {
        let ask = ask(&tenant.to_string(), self.now);
        let ask = Ask { weight: self.weights[tenant], demand: demand(PROMPT, 4000, 100), ..ask };
        let (ticket, turn) = self.queue.enter(ask, self.now, &mut always);
        self.waiting.insert(ticket.unwrap(), tenant);
        self.start(turn);
    }

    fn start(&mut self, turn: Turn) {
        for ticket in turn.start {
            let tenant = self.waiting.remove(&ticket).unwrap();
            self.queue.routed(ticket);
            self.had[tenant] += u64::from(PROMPT);
            let length = (self.length)(tenant);
            self.running.insert(ticket, (tenant, 0, length));
        }
    }

    /// Every running answer has another token; those that are complete, or cancelled, leave.
    fn step(&mut self) {
        let running: Vec<Ticket> = self.running.keys().copied().collect();
        for ticket in running {
            let (tenant, generated, length) = self.running.get_mut(&ticket).unwrap();
            *generated += 1;
            self.had[*tenant] += ANSWER_WEIGHT;
            let (tenant, generated, ends) = (*tenant, *generated, *generated >= *length);
            if ends || generated.is_multiple_of(32) {
                self.queue.generated(ticket, generated);
            }
            if ends {
                self.running.remove(&ticket);
                let turn = self.queue.ends(ticket, self.now, &mut always);
                self.start(turn);
                self.ask(tenant);
            }
        }
    }

    fn per_weight(&self, tenant: usize) -> f64 {
        self.had[tenant] as f64 / f64::from(self.weights[tenant])
    }
}

#[test]
fn a_tenant_with_long_answers_gets_no_more_than_one_with_short_ones() {
    let lengths = [800, 5];
    let mut tenants = Generating::new(16, &[1, 1], |tenant| lengths[tenant]);
    for _ in 0..40 {
        (0..2).for_each(|tenant| tenants.ask(tenant));
    }
    (0..20_000).for_each(|_| tenants.step());
    let (long, short) = (tenants.had[0] as f64, tenants.had[1] as f64);
    assert!((long / short - 1.0).abs() < 0.1, "{long} {short}");
}

#[test]
fn what_never_came_to_a_node_costs_nothing() {
    let now = Instant::now();
    let mut queue = Queue::new(shared(1, 100));
    let first = entered(&mut queue, ask("a", now), now);
    queue.routed(first);
    let of = |name: &str| Ask { demand: demand(1000, 1000, 1000), ..ask(name, now) };
    let cancelled = entered(&mut queue, of("b"), now);
    let (a, b) = (entered(&mut queue, of("a"), now), entered(&mut queue, of("b"), now));
    assert_eq!(queue.ends(first, now, &mut always).start, [cancelled]);
    // Its client left before it had nodes: the next one is as if it had never been there.
    assert_eq!(queue.ends(cancelled, now, &mut always).start, [b]);
    queue.routed(b);
    queue.generated(b, 10);
    let more = entered(&mut queue, of("b"), now);
    assert_eq!(queue.ends(b, now, &mut always).start, [a], "its prompt counts");
    assert_eq!(queue.ends(a, now, &mut always).start, [more]);
    queue.generated(more, 5000);
    queue.ends(more, now, &mut always);
    queue.generated(more, 9000);
    assert_eq!((queue.inflight(), queue.waiting()), (0, 0), "who has left is charged no more");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// VTC's promise: tenants that always have something waiting get prompts and generated tokens by their weights,
    /// whatever their answers are and whatever was expected, up to what may run at a time.
    #[test]
    fn tenants_share_what_is_generated(
        weights in prop::collection::vec(1u32..5, 2..4),
        longest in prop::collection::vec(1u32..400, 4),
        draws in prop::collection::vec(0u32..=100, 97),
        slots in 1usize..12,
    ) {
        let mut drawn = draws.iter().cycle();
        let length = |tenant: usize| 1 + longest[tenant] * drawn.next().unwrap() / 100;
        let mut tenants = Generating::new(slots, &weights, length);
        for tenant in (0..weights.len()).cycle().take(weights.len() * (slots + 2)) {
            tenants.ask(tenant);
        }
        let largest = |tenant: usize| u64::from(PROMPT) + ANSWER_WEIGHT * u64::from(longest[tenant] + 1);
        let bound = (0..weights.len()).map(largest).max().unwrap() as f64 * (slots + 1) as f64 + CREDIT as f64;
        for _ in 0..40 {
            (0..100).for_each(|_| tenants.step());
            for (a, b) in (0..weights.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
                let apart = (tenants.per_weight(a) - tenants.per_weight(b)).abs();
                prop_assert!(apart <= 2.0 * bound, "{apart} {bound} {:?}", tenants.had);
            }
        }
    }
}

proptest! {
    /// Slots, places and tickets add up after any events, and nobody waits who could start.
    #[test]
    fn nothing_is_lost(
        max_inflight in 1usize..6, max_queue in 0usize..12, several in any::<bool>(),
        events in prop::collection::vec(event(), 1..300),
    ) {
        let pools = if several { "a=0-1000:2,b=1001-".parse().unwrap() } else { Pools::default() };
        let mut queue = Queue::new(Bounds { pools, ..bounds(max_inflight, max_queue) });
        let (mut now, mut largest) = (Instant::now(), 6000u32);
        let (mut waiting, mut running) = (BTreeSet::new(), BTreeSet::new());
        for event in events {
            let mut room = |demand: &Demand, _: &Ahead| demand.prompt_tokens <= largest;
            let there: Vec<Ticket> = waiting.union(&running).copied().collect();
            let pick = |index: usize| there.get(index % there.len().max(1)).copied();
            let turn = match event {
                Event::Enter { tenant, priority, prompt, patience_ms } => {
                    let deadline = now + ms(patience_ms);
                    let ask = Ask { priority, demand: demand(prompt, 10, 10), deadline, ..ask(&tenant.to_string(), now) };
                    let (ticket, turn) = queue.enter(ask, now, &mut room);
                    waiting.extend(ticket);
                    turn
                }
                Event::Leave(index) => match pick(index) {
                    Some(ticket) => {
                        waiting.remove(&ticket);
                        running.remove(&ticket);
                        queue.ends(ticket, now, &mut room)
                    }
                    None => Turn::default(),
                },
                Event::Routed(index) => pick(index).map_or(Turn::default(), |ticket| queue.is_routed(ticket, now, &mut room)),
                Event::Pass(millis) => {
                    now += ms(millis);
                    queue.tick(now, &mut room)
                }
                Event::Room(size) => {
                    largest = size;
                    queue.tick(now, &mut |demand, _| demand.prompt_tokens <= size)
                }
            };
            for ticket in turn.start {
                prop_assert!(waiting.remove(&ticket), "{ticket} started without waiting");
                prop_assert!(running.insert(ticket));
            }
            for ticket in turn.expired {
                prop_assert!(waiting.remove(&ticket), "{ticket} expired without waiting");
            }
            prop_assert_eq!((queue.inflight(), queue.waiting()), (running.len(), waiting.len()));
            prop_assert!(running.len() <= max_inflight && waiting.len() <= max_queue);
            prop_assert_eq!(queue.deadlines.len(), waiting.len());
            prop_assert_eq!(queue.pools.iter().map(|pool| pool.inflight).sum::<usize>(), running.len());
            prop_assert!(queue.pools.iter().all(|pool| pool.inflight <= pool.slots));
            let heads = queue.heads();
            let stuck = heads.first().is_some_and(|(pool, lane, key)| {
                queue.pools[*pool].lanes[lane].waiting[key].ask.demand.prompt_tokens <= largest
            });
            prop_assert!(running.len() == max_inflight || !stuck, "the next one has slot and room and waits");
        }
        for ticket in running.into_iter().chain(waiting) {
            queue.ends(ticket, now, &mut |_, _| false);
        }
        prop_assert_eq!((queue.inflight(), queue.waiting(), queue.ahead), (0, 0, Ahead::default()));
        prop_assert!(queue.places.is_empty() && queue.deadlines.is_empty());
    }

    /// A request is overtaken by no more of its tenant's later ones than its priority allows, and never by equals.
    #[test]
    fn nobody_starves_within_a_tenant(
        priorities in prop::collection::vec(prop_oneof![Just(-10i32), Just(10), -2i32..2], 2..300),
        served_each in 1usize..3,
    ) {
        let now = Instant::now();
        let mut queue = Queue::new(shared(1, 1000));
        let mut running = entered(&mut queue, ask("a", now), now);
        let (mut order, mut all) = (Vec::new(), Vec::new());
        let mut arrivals = priorities.chunks(served_each + 1);
        loop {
            let more = arrivals.next();
            for priority in more.into_iter().flatten() {
                all.push((entered(&mut queue, Ask { priority: *priority, ..ask("a", now) }, now), *priority));
            }
            for _ in 0..served_each {
                let started = queue.ends(running, now, &mut always).start;
                if let Some(next) = started.first() {
                    order.push(*next);
                    running = *next;
                }
            }
            if more.is_none() && queue.waiting() == 0 {
                break;
            }
        }
        prop_assert_eq!(order.len(), all.len());
        let rank = |ticket: Ticket| order.iter().position(|other| *other == ticket).unwrap();
        for (index, (ticket, priority)) in all.iter().enumerate() {
            for (later, (other, urgent)) in all.iter().enumerate().skip(index + 1) {
                let allowed = i64::from(urgent - priority) * PLACES_A_LEVEL;
                if rank(*other) < rank(*ticket) {
                    prop_assert!(((later - index) as i64) < allowed, "{later} of {urgent} before {index} of {priority}");
                }
            }
        }
    }

    /// Tenants that always have something waiting get tokens by their weights, whatever the sizes of their requests
    /// are.
    #[test]
    fn tenants_share_by_weight(
        weights in prop::collection::vec(1u32..10, 2..5),
        sizes in prop::collection::vec(1u32..4000, 2..5),
    ) {
        let now = Instant::now();
        let mut queue = Queue::new(shared(1, 10_000));
        let tenants = weights.len().min(sizes.len());
        let of = |tenant: usize| Ask {
            weight: weights[tenant],
            demand: demand(sizes[tenant], 10, 1),
            ..ask(&tenant.to_string(), now)
        };
        let cost = |tenant: usize| u64::from(sizes[tenant]) + ANSWER_WEIGHT;
        let mut whose = HashMap::new();
        let add = |queue: &mut Queue, whose: &mut HashMap<Ticket, usize>, tenant: usize| {
            whose.insert(entered(queue, of(tenant), now), tenant);
        };
        let mut running = entered(&mut queue, Ask { demand: demand(10, 10, 1), ..ask("first", now) }, now);
        for _ in 0..3 {
            (0..tenants).for_each(|tenant| add(&mut queue, &mut whose, tenant));
        }
        let mut had = vec![0u64; tenants];
        for _ in 0..400 {
            queue.routed(running);
            queue.generated(running, 1);
            running = queue.ends(running, now, &mut always).start[0];
            let tenant = whose[&running];
            had[tenant] += cost(tenant);
            add(&mut queue, &mut whose, tenant);
        }
        for (a, b) in (0..tenants).flat_map(|a| (0..a).map(move |b| (a, b))) {
            let per_weight = |tenant: usize, tokens: u64| tokens as f64 / f64::from(weights[tenant]);
            let apart = (per_weight(a, had[a]) - per_weight(b, had[b])).abs();
            let bound = per_weight(a, cost(a)) + per_weight(b, cost(b)) + 1e-3;
            prop_assert!(apart <= bound, "{apart} {bound} {had:?}");
        }
    }
}
