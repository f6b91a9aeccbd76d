//! The choice over small clusters, rank by rank and term by term; and over random ones against all plans.
//! Long because each rank and each term is a test of its own, over the same small cluster.
use proptest::prelude::*;

use super::LocalPrefill::{Always, Auto, Never};
use super::*;

pub(super) const DEMAND: Demand =
    Demand { prompt_tokens: 100, max_tokens: 100, answer_tokens: 100, hashes: Vec::new() };
const COST: StepCost =
    StepCost { base_ms: 2.0, token_ms: 0.5, context_ms: 0.001, decode_token_ms: 0.5, decode_context_ms: 0.001 };

pub(super) fn node(session: u64, role: Role) -> NodeView {
    NodeView {
        session,
        node_id: format!("{}{session}", role.as_str()).into(),
        role,
        domains: [0].into(),
        block_tokens: 16,
        total_blocks: 64,
        free_blocks: 64,
        max_context_tokens: 8192,
        max_running: 8,
        max_step_tokens: 512,
        draining: false,
        shut: false,
        running: 0,
        reported: Work::default(),
        routed: Work::default(),
        held: Work::default(),
        pending_streams: PendingStreams::default(),
        processor: Processor::default(),
        step_cost: COST,
        prefill_factor: 1.0,
        computes_prompts: true,
        backlog_ms: 0.0,
        cached_blocks_of_prompt: 0,
    }
}

fn cluster() -> Vec<NodeView> {
    vec![node(1, Role::Prefill), node(2, Role::Prefill), node(3, Role::Decode), node(4, Role::Decode)]
}

fn with(local: LocalPrefill) -> Settings {
    Settings { local, ..Settings::default() }
}

fn candidates(nodes: &[NodeView], wish: &Wish, local: LocalPrefill) -> Result<Vec<Candidate>, NoPair> {
    select(&Cluster { nodes, links: &Links::default(), ways: &Ways::default() }, &DEMAND, wish, &with(local), 0)
}

fn first(nodes: &[NodeView], wish: &Wish) -> (u64, u64) {
    let best = &candidates(nodes, wish, Never).unwrap()[0];
    (best.prefill.unwrap(), best.decode)
}

fn chosen(nodes: &[NodeView]) -> (u64, u64) {
    first(nodes, &Wish::default())
}

fn plans(nodes: &[NodeView], wish: &Wish, local: LocalPrefill) -> Vec<(Option<u64>, u64)> {
    candidates(nodes, wish, local).unwrap().iter().map(|candidate| (candidate.prefill, candidate.decode)).collect()
}

fn avoid(nodes: Vec<u64>, pairs: Vec<(u64, u64)>) -> Wish {
    Wish { avoid: Avoid { nodes, pairs }, ..Wish::default() }
}

#[test]
fn takes_the_least_loaded_of_each_role() {
    let mut nodes = cluster();
    nodes[0].backlog_ms = 200.0;
    nodes[3].reported = Work { requests: 3, context: 3000, ..Work::default() };
    nodes[3].running = 3;
    assert_eq!(chosen(&nodes), (2, 3));
    assert_eq!(candidates(&nodes, &Wish::default(), Never).unwrap().len(), 4);
}

#[test]
fn work_routed_since_the_report_counts() {
    let mut nodes = cluster();
    nodes[0].backlog_ms = 50.0;
    nodes[2].routed = Work { requests: 2, context: 2_000, ..Work::default() };
    assert_eq!(chosen(&nodes), (2, 4));
}

#[test]
fn prefers_a_decode_node_with_room() {
    let mut nodes = cluster();
    nodes[2].free_blocks = 14;
    nodes[2].routed.blocks = 2;
    nodes[3].reported.requests = 7;
    assert_eq!(chosen(&nodes), (1, 4));
    let short: Vec<u32> =
        candidates(&nodes, &Wish::default(), Never).unwrap().iter().map(|candidate| candidate.blocks_short).collect();
    assert_eq!(short, [0, 0, 1, 1]);
}

#[test]
fn a_cached_prompt_is_worth_a_wait_as_long_as_its_computation() {
    let mut nodes = cluster();
    nodes[1].cached_blocks_of_prompt = 6;
    assert_eq!(chosen(&nodes).0, 2);
    nodes[1].backlog_ms = 40.0;
    assert_eq!(chosen(&nodes).0, 2);
    nodes[1].backlog_ms = 70.0;
    assert_eq!(chosen(&nodes).0, 1, "a hot prefix spreads when it must");
    let told = &candidates(&nodes, &Wish::default(), Never).unwrap();
    let [computes, waits] = [1, 2].map(|p| told.iter().find(|candidate| candidate.prefill == Some(p)).unwrap());
    assert_eq!((computes.cached_tokens, waits.cached_tokens), (0, 96));
    assert_eq!((computes.terms.wait_prefill_ms, waits.terms.wait_prefill_ms), (0.0, 70.0));
}

#[test]
fn a_slow_way_is_not_taken_where_it_shows() {
    let nodes = cluster();
    let mut links = Links::default();
    for (pair, ms) in [((1, 3), 500.0), ((1, 4), 500.0), ((2, 3), 500.0), ((2, 4), 5.0)] {
        links.observe(pair, 0, 70_000, 7, ms);
    }
    let choose = |links: &Links| {
        let cluster = Cluster { nodes: &nodes, links, ways: &Ways::default() };
        select(&cluster, &DEMAND, &Wish::default(), &with(Never), 0)
    };
    let told = choose(&links).unwrap();
    assert_eq!((told[0].prefill, told[0].decode), (Some(2), 4));
    assert_eq!(told[0].terms.exposed_ms, 0.0, "hidden behind the prefill");
    let slow = told.iter().find(|candidate| candidate.decode == 3).unwrap();
    assert!((slow.terms.exposed_ms - (500.0 - slow.terms.prefill_ms)).abs() < 1e-6);
}

#[test]
fn decode_waits_beside_the_prefill() {
    let mut nodes = cluster();
    nodes.truncate(3);
    nodes.remove(0);
    nodes[1].backlog_ms = 100.0;
    let wait = |nodes: &[NodeView]| candidates(nodes, &Wish::default(), Never).unwrap()[0].terms.wait_decode_ms;
    let prefill_ms = candidates(&nodes, &Wish::default(), Never).unwrap()[0].terms.prefill_ms;
    assert!((wait(&nodes) - (100.0 - prefill_ms)).abs() < 1e-9);
    nodes[0].backlog_ms = 60.0;
    assert_eq!(wait(&nodes), 0.0);
}

#[test]
fn objectives_weigh_steps_against_first_tokens() {
    let mut nodes = vec![node(1, Role::Prefill), node(3, Role::Decode), node(4, Role::Decode)];
    nodes[1].step_cost.base_ms = 10.0;
    nodes[2].backlog_ms = 100.0;
    let choose = |ttft_objective_ms, tpot_objective_ms| {
        let settings = Settings { ttft_objective_ms, tpot_objective_ms, ..with(Never) };
        let cluster = Cluster { nodes: &nodes, links: &Links::default(), ways: &Ways::default() };
        select(&cluster, &DEMAND, &Wish::default(), &settings, 0).unwrap()[0].decode
    };
    assert_eq!(choose(1000.0, 1000.0), 3, "its steps are slow, and it takes the request at once");
    assert_eq!(choose(1000.0, 20.0), 4);
}

#[test]
fn equal_plans_spread() {
    let nodes = cluster();
    let choose = |turn| {
        let cluster = Cluster { nodes: &nodes, links: &Links::default(), ways: &Ways::default() };
        let best = &select(&cluster, &DEMAND, &Wish::default(), &with(Never), turn).unwrap()[0];
        (best.prefill.unwrap(), best.decode)
    };
    let mut counts = std::collections::HashMap::new();
    (0..400).for_each(|turn| *counts.entry(choose(turn)).or_insert(0) += 1);
    assert!(counts.len() == 4 && counts.values().all(|count| (50..200).contains(count)), "{counts:?}");
    assert_eq!(choose(7), choose(7));
}

#[test]
fn of_plans_near_the_best_the_emptier_is_likelier() {
    let mut nodes = vec![node(1, Role::Prefill), node(2, Role::Prefill), node(3, Role::Decode)];
    // Two percent worse, and with nothing else to do.
    (nodes[0].reported.requests, nodes[1].backlog_ms) = (4, 1.0);
    for turn in 0..50 {
        let cluster = Cluster { nodes: &nodes, links: &Links::default(), ways: &Ways::default() };
        let told = select(&cluster, &DEMAND, &Wish::default(), &with(Never), turn).unwrap();
        assert_eq!(told[0].prefill, Some(2));
        assert!(told[0].total_ms > told[1].total_ms);
        let strict = Settings { near_optimal: 0.0, ..with(Never) };
        assert_eq!(select(&cluster, &DEMAND, &Wish::default(), &strict, turn).unwrap()[0].prefill, Some(1));
    }
}

#[test]
fn never_pairs_what_does_not_fit_together() {
    let mut nodes = vec![node(1, Role::Prefill), node(3, Role::Decode)];
    nodes[0].domains = [1].into();
    assert_eq!(candidates(&nodes, &Wish::default(), Never), Err(NoPair::Incompatible));
    nodes.push(node(4, Role::Decode));
    nodes[2].domains = [2, 1].into();
    assert_eq!(plans(&nodes, &Wish::default(), Never), [(Some(1), 4)]);
}

#[test]
fn a_shut_node_is_the_last_resort() {
    let mut nodes = cluster();
    nodes[0].shut = true;
    nodes[1].backlog_ms = 1e6;
    assert_eq!(chosen(&nodes).0, 2);
    nodes[1].shut = true;
    assert_eq!(chosen(&nodes).0, 1, "no pair without one: cost decides");
}

#[test]
fn what_failed_the_request_is_avoided_where_it_can_be() {
    let nodes = cluster();
    assert_eq!(first(&nodes, &avoid(vec![1, 3], vec![])), (2, 4));
    assert_eq!(first(&nodes, &avoid(vec![], vec![(1, 3), (1, 4), (2, 3)])), (2, 4));
    let mut shut = cluster();
    shut[3].shut = true;
    assert_eq!(first(&shut, &avoid(vec![3], vec![])).1, 3, "a shut breaker is the worse sign");
    assert!(!candidates(&nodes[1..3], &avoid(vec![3], vec![]), Never).unwrap()[0].is_sound());
}

#[test]
fn the_prompt_stays_where_it_is_unless_that_failed() {
    let mut nodes = cluster();
    nodes[0].backlog_ms = 1e6;
    (nodes[0].draining, nodes[0].shut) = (true, true);
    let keep = |pairs| Wish { keep: Some(1), ..avoid(vec![], pairs) };
    assert_eq!(first(&nodes, &keep(vec![])).0, 1);
    assert_eq!(first(&nodes, &keep(vec![(1, 3)])), (1, 4));
    nodes.pop();
    assert_eq!(first(&nodes, &keep(vec![(1, 3)])), (2, 3));
}

#[test]
fn says_which_role_is_missing() {
    let mut nodes = cluster();
    nodes[2].draining = true;
    nodes[3].draining = true;
    for local in [Never, Always, Auto] {
        assert_eq!(candidates(&nodes, &Wish::default(), local), Err(NoPair::NoNode(Role::Decode)));
    }
    assert_eq!(candidates(&[], &Wish::default(), Never), Err(NoPair::NoNode(Role::Prefill)));
}

#[test]
fn a_request_that_fits_nowhere_is_told_so() {
    let demand = Demand { prompt_tokens: 64 * 16 + 1, max_tokens: 15, ..DEMAND };
    let nodes = cluster();
    let cluster = Cluster { nodes: &nodes, links: &Links::default(), ways: &Ways::default() };
    let refusal = select(&cluster, &demand, &Wish::default(), &with(Never), 0).unwrap_err();
    assert_eq!(refusal, NoPair::TooLarge { blocks: 65, tokens: 1040 });
    assert!(refusal.to_string().contains("65 KV blocks"));
}

#[test]
fn aggregated_takes_the_least_loaded_decode_node() {
    let mut nodes = cluster();
    nodes[2].backlog_ms = 100.0;
    assert_eq!(plans(&nodes, &Wish::default(), Always), [(None, 4), (None, 3)]);
    nodes[3].reported = Work { requests: 7, context: 700, ..Work::default() };
    nodes[3].running = 7;
    assert_eq!(plans(&nodes[2..], &Wish::default(), Always), [(None, 3), (None, 4)], "seven streams would wait");
    assert_eq!(candidates(&nodes[..2], &Wish::default(), Always), Err(NoPair::NoNode(Role::Decode)));
    assert_eq!(plans(&nodes, &avoid(vec![3], vec![]), Always)[0], (None, 4));
}

#[test]
fn local_prefill_where_it_costs_less() {
    let mut nodes = vec![node(1, Role::Prefill), node(3, Role::Decode)];
    let (pair, local) = ((Some(1), 3), (None, 3));
    let best = |nodes: &[NodeView]| plans(nodes, &Wish::default(), Auto)[0];
    nodes[0].backlog_ms = 300.0;
    assert_eq!(best(&nodes), local, "the prefill node is busy, the decode node is not");
    nodes[1].reported = Work { requests: 6, context: 600, ..Work::default() };
    nodes[1].running = 6;
    assert_eq!(
        best(&nodes),
        local,
        "six answers of a hundred tokens each would wait for the prompt, little for each token"
    );
    nodes[1].held = Work { requests: 6, answers: 6 * 10, ..Work::default() };
    assert_eq!(best(&nodes), pair, "now they are short");
    nodes[1].cached_blocks_of_prompt = 6;
    assert_eq!(best(&nodes), local, "four tokens delay nobody much");
    nodes[0].backlog_ms = 0.0;
    assert_eq!(best(&nodes), local, "a short suffix of a cached prompt");
}

#[test]
fn nodes_that_share_their_cores_gain_nothing_by_a_pair() {
    let mut nodes = vec![node(1, Role::Prefill), node(3, Role::Decode)];
    let (pair, local) = ((Some(1), 3), (None, 3));
    let best = |nodes: &[NodeView]| plans(nodes, &Wish::default(), Auto)[0];
    nodes[1].running = 4;
    nodes[1].reported = Work { requests: 4, context: 4 * 100, ..Work::default() };
    nodes[1].held = Work { requests: 4, answers: 4 * 240, ..Work::default() };
    assert_eq!(best(&nodes), pair, "each has its own");
    let shared = Processor::reported(Some(&tandem_proto::v1::Processor { id: 1, cores: 2, threads: 2 }));
    nodes.iter_mut().for_each(|node| node.processor = shared);
    assert_eq!(best(&nodes), local, "the prompt takes twice as long beside them, and delays them as much");
    nodes[1].held.answers = 4 * 12;
    assert_eq!(best(&nodes), pair, "they are soon out of its way");
}

#[test]
fn objectives_that_nobody_can_keep_choose_nodes_all_the_same() {
    let nodes = cluster();
    for (ttft_objective_ms, tpot_objective_ms) in
        [(1000.0, 0.0), (0.0, 100.0), (0.0, 0.0), (f64::MAX, f64::MIN_POSITIVE)]
    {
        let settings = Settings { ttft_objective_ms, tpot_objective_ms, ..with(Auto) };
        let cluster = Cluster { nodes: &nodes, links: &Links::default(), ways: &Ways::default() };
        assert!(select(&cluster, &DEMAND, &Wish::default(), &settings, 0).is_ok());
    }
}

#[test]
fn a_pair_is_taken_where_a_local_plan_is_no_better() {
    let mut nodes = vec![node(1, Role::Prefill), node(3, Role::Decode)];
    nodes[1].cached_blocks_of_prompt = 6;
    nodes[0].cached_blocks_of_prompt = 6;
    let told = candidates(&nodes, &Wish::default(), Auto).unwrap();
    assert!(told[0].total_ms >= told[1].total_ms && (told[0].prefill, told[1].prefill) == (Some(1), None));
}

#[test]
fn prompts_on_a_node_that_computed_none_cost_what_they_cost_elsewhere() {
    let mut nodes = vec![node(1, Role::Prefill), node(3, Role::Decode)];
    // From steps of single tokens a node cannot tell what a token of a prompt costs.
    nodes[1].step_cost = StepCost { base_ms: 2.5, ..StepCost::default() };
    nodes[1].computes_prompts = false;
    nodes[0].backlog_ms = 10.0;
    let local_ms = |nodes: &[NodeView]| {
        let told = candidates(nodes, &Wish::default(), Auto).unwrap();
        told.iter().find(|candidate| candidate.prefill.is_none()).unwrap().terms.prefill_ms
    };
    assert!((50.0..60.0).contains(&local_ms(&nodes)));
    nodes[1].computes_prompts = true;
    assert!(local_ms(&nodes) < 3.0, "its own measurements, once they are about prompts");
}

#[test]
fn a_local_plan_is_taken_where_no_pair_is_sound() {
    let mut nodes = vec![node(1, Role::Prefill), node(3, Role::Decode)];
    // Whatever local prefill costs.
    nodes[1].reported = Work { requests: 7, context: 7_000, ..Work::default() };
    nodes[1].running = 7;
    let (pair, local) = ((Some(1), 3), (None, 3));
    assert_eq!(plans(&nodes, &Wish::default(), Auto), [pair, local]);
    assert_eq!(plans(&nodes, &avoid(vec![1], vec![]), Auto), [local, pair]);
    assert_eq!(plans(&nodes, &avoid(vec![], vec![(1, 3)]), Auto), [local, pair], "a pair's fault is not the node's");
    assert_eq!(plans(&nodes, &avoid(vec![3], vec![]), Auto), [pair, local]);
    nodes[0].shut = true;
    assert_eq!(plans(&nodes, &Wish::default(), Auto), [local, pair]);
    nodes[0].draining = true;
    assert_eq!(plans(&nodes, &Wish::default(), Auto), [local]);
    assert_eq!(plans(&nodes, &Wish { keep: Some(1), ..Wish::default() }, Auto), [pair, local]);
    (nodes[0].draining, nodes[0].domains) = (false, [1].into());
    assert_eq!(plans(&nodes, &Wish::default(), Auto), [local]);
}

#[test]
fn a_cluster_serves_when_the_nodes_of_a_plan_are_there() {
    let mut nodes = cluster();
    assert!([Never, Always, Auto].into_iter().all(|local| is_served(&nodes, local)));
    let alone = &nodes[2..];
    assert_eq!([Never, Always, Auto].map(|local| is_served(alone, local)), [false, true, true]);
    (nodes[2].draining, nodes[3].draining) = (true, true);
    assert_eq!([Never, Always, Auto].map(|local| is_served(&nodes, local)), [false; 3]);
}

#[test]
fn a_local_plan_needs_room_on_one_node_only() {
    let mut nodes = vec![node(1, Role::Prefill), node(3, Role::Decode)];
    nodes[0].total_blocks = 2;
    assert_eq!(plans(&nodes, &Wish::default(), Auto), [(None, 3)]);
    let refused = candidates(&nodes, &Wish::default(), Never);
    assert_eq!(refused, Err(NoPair::TooLarge { blocks: 7, tokens: 200 }));
    nodes[1].total_blocks = 2;
    assert_eq!(candidates(&nodes, &Wish::default(), Auto), refused);
}

#[test]
fn nodes_without_a_model_are_like_the_others_of_their_role() {
    let mut nodes = cluster();
    let before = candidates(&nodes, &Wish::default(), Never).unwrap();
    nodes[0].step_cost = StepCost::default();
    let after = candidates(&nodes, &Wish::default(), Never).unwrap();
    let terms = |told: &[Candidate]| told.iter().map(|candidate| candidate.terms).collect::<Vec<_>>();
    assert_eq!(terms(&before), terms(&after));
    assert!(after.iter().all(|candidate| candidate.measured == (candidate.prefill == Some(2))));
    nodes.iter_mut().for_each(|node| node.step_cost = StepCost::default());
    let blind = candidates(&nodes, &Wish::default(), Never).unwrap();
    assert!(blind.iter().all(|candidate| !candidate.measured && candidate.total_ms > 0.0));
}

#[test]
fn baselines_choose_by_their_own_rule_and_tell_the_same_terms() {
    let mut nodes = cluster();
    (nodes[0].backlog_ms, nodes[0].reported.tokens) = (1e5, 100_000);
    nodes[0].cached_blocks_of_prompt = 6;
    let choose = |policy, turn| {
        let settings = Settings { policy, ..with(Auto) };
        let cluster = Cluster { nodes: &nodes, links: &Links::default(), ways: &Ways::default() };
        select(&cluster, &DEMAND, &Wish::default(), &settings, turn).unwrap()
    };
    let pair = |policy, turn| (choose(policy, turn)[0].prefill, choose(policy, turn)[0].decode);
    assert_ne!(pair(Policy::Joint, 0).0, Some(1));
    assert_eq!([0, 1, 2].map(|turn| pair(Policy::RoundRobin, turn)), [(Some(1), 3), (Some(2), 4), (Some(1), 3)]);
    assert_eq!(pair(Policy::LeastLoaded, 0).0, Some(2));
    assert_eq!(pair(Policy::CacheOnly, 1), (Some(1), 4));
    assert_eq!(choose(Policy::CacheOnly, 0)[0].terms.wait_prefill_ms, 1e5);
}

/// Every plan, scored by the same terms and put in order without any short list.
fn best_of_all(nodes: &[NodeView], links: &Links, demand: &Demand, settings: &Settings) -> Option<f64> {
    let weight = settings.step_weight();
    let (mut best, of) = (None, |role| nodes.iter().filter(move |node| node.role == role));
    let mut offer = |shut: bool, total_ms: f64| {
        if best.is_none_or(|best| (shut, total_ms) < best) {
            best = Some((shut, total_ms));
        }
    };
    for d in of(Role::Decode) {
        let decode = cost::decode(d, &d.step_cost, demand);
        for p in of(Role::Prefill) {
            let Some(way) = Ways::default().between(p, d) else { continue };
            let prefill = cost::prefill(p, &p.step_cost, demand);
            let transfer_ms = links.transfer_ms((p.session, d.session), way, decode.missing_blocks);
            let exposed_ms = (transfer_ms - prefill.prefill_ms).max(0.0);
            let wait_ms = (decode.wait_ms - prefill.first_ms()).max(0.0);
            offer(p.shut || d.shut, prefill.first_ms() + exposed_ms + wait_ms + weight * decode.step_ms);
        }
        if settings.local != Never {
            let local = cost::local(d, d, &d.step_cost, demand);
            let interference_ms = cost::interference_ms(d, demand, local.delay_ms, weight);
            offer(d.shut, decode.wait_ms + local.prefill_ms + interference_ms + weight * decode.step_ms);
        }
    }
    best.map(|(_, total_ms)| total_ms)
}

prop_compose! {
    fn any_node()(
        role in prop_oneof![Just(Role::Prefill), Just(Role::Decode)],
        domains in prop::sample::subsequence(vec![0u32, 1, 2], 0..=3).prop_shuffle(),
        (requests, context, blocks) in (0u32..12, 0u64..4_000, 0u32..64),
        (backlog_ms, speed, cached) in (0.0f64..500.0, 0.5f64..2.0, prop_oneof![3 => Just(0u32), 1 => 0u32..7]),
        shut in prop::bool::weighted(0.1),
    ) -> NodeView {
        let StepCost { base_ms, token_ms, decode_token_ms, .. } = COST;
        NodeView {
            domains: domains.into(),
            backlog_ms,
            shut,
            running: requests,
            free_blocks: 64 - blocks,
            cached_blocks_of_prompt: cached,
            reported: Work { requests, context, ..Work::default() },
            step_cost: StepCost {
                base_ms: base_ms * speed,
                token_ms: token_ms * speed,
                decode_token_ms: decode_token_ms * speed,
                ..COST
            },
            ..node(0, role)
        }
    }
}

fn numbered(mut nodes: Vec<NodeView>) -> Vec<NodeView> {
    nodes.iter_mut().zip(1..).for_each(|(node, session)| node.session = session);
    nodes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Where all ways are equal and no decode node waits, the short list loses nothing.
    #[test]
    fn exact_where_ways_are_equal(
        nodes in prop::collection::vec(any_node(), 1..60), local in prop_oneof![Just(Never), Just(Auto)], turn in any::<u64>(),
    ) {
        let mut nodes = numbered(nodes);
        for node in nodes.iter_mut().filter(|node| node.role == Role::Decode) {
            (node.free_blocks, node.max_running, node.backlog_ms) = (64, 64, 0.0);
        }
        let settings = Settings { near_optimal: 0.0, ..with(local) };
        let links = Links::default();
        let told = select(&Cluster { nodes: &nodes, links: &links, ways: &Ways::default() }, &DEMAND, &Wish::default(), &settings, turn);
        match best_of_all(&nodes, &links, &DEMAND, &settings) {
            Some(best_ms) => {
                let chosen_ms = told.unwrap()[0].total_ms;
                prop_assert!(chosen_ms <= best_ms + 2.0 * SAME_MS, "{chosen_ms} {best_ms}");
            }
            None => prop_assert!(told.is_err()),
        }
    }

    /// With ways of very different speed and decode nodes that wait: at most ten percent worse than the best of all
    /// plans.
    #[test]
    fn never_much_worse_than_all_plans(
        nodes in prop::collection::vec(any_node(), 1..60), ways in prop::collection::vec((1u64..60, 1u64..60, 1.0f64..200.0), 0..80),
        turn in any::<u64>(),
    ) {
        let nodes = numbered(nodes);
        let mut links = Links::default();
        for (p, d, ms) in ways {
            links.observe((p, d), 0, 70_000, 7, ms);
        }
        let settings = Settings { near_optimal: 0.0, ..with(Auto) };
        let told = select(&Cluster { nodes: &nodes, links: &links, ways: &Ways::default() }, &DEMAND, &Wish::default(), &settings, turn);
        if let Some(best_ms) = best_of_all(&nodes, &links, &DEMAND, &settings) {
            let chosen_ms = told.unwrap()[0].total_ms;
            prop_assert!(chosen_ms <= best_ms * 1.10 + SAME_MS, "{chosen_ms} {best_ms}");
        }
    }

    /// Ranks are never lost to the short list: what is neither shut nor avoided is found wherever it is.
    #[test]
    fn a_sound_plan_is_taken_where_there_is_one(
        nodes in prop::collection::vec(any_node(), 1..60), avoided in prop::collection::vec(1u64..60, 0..12),
        pairs in prop::collection::vec((1u64..60, 1u64..60), 0..8), turn in any::<u64>(),
    ) {
        let nodes = numbered(nodes);
        let wish = avoid(avoided, pairs);
        let sound = |node: &NodeView| !node.shut && !wish.avoid.nodes.contains(&node.session);
        let of = |role| nodes.iter().filter(move |node| node.role == role && sound(node));
        let there = of(Role::Prefill).any(|p| of(Role::Decode).any(|d| {
            ways::common(&p.domains, &d.domains).next().is_some() && !wish.avoid.pairs.contains(&(p.session, d.session))
        }));
        let links = Links::default();
        let told = select(&Cluster { nodes: &nodes, links: &links, ways: &Ways::default() }, &DEMAND, &wish, &with(Never), turn);
        prop_assert_eq!(told.is_ok_and(|told| told[0].is_sound()), there);
    }
}
