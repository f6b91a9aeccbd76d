//! What a prompt is predicted to wait and to take, and what first tokens teach of that.
use super::*;

#[test]
fn a_queue_is_predicted_from_the_report_and_worked_off_by_time() {
    let start = Instant::now();
    let (membership, prefill, _) = measured_pair(start);
    let terms = |now| membership.route(&ask(100, 10), &Wish::default(), now).unwrap().candidates[0].terms;
    let idle = terms(start);
    assert!(idle.wait_prefill_ms == 0.0 && (idle.prefill_ms - 110.0).abs() < 1e-6, "{idle:?}");
    membership.report(prefill.session, &v1::Load { waiting: 1, ..measured(200) }, start);
    assert!((terms(start).wait_prefill_ms - 210.0).abs() < 1e-6);
    assert!((terms(at(start, 150)).wait_prefill_ms - 60.0).abs() < 1e-6);
    // What is routed counts at once, and only as long as its request is there.
    let first = membership.route(&ask(100, 10), &Wish::default(), at(start, 150)).unwrap();
    assert!((terms(at(start, 150)).wait_prefill_ms - 170.0).abs() < 1e-6);
    drop(first);
    assert!(terms(at(start, 400)).wait_prefill_ms < 1e-6);
}

#[test]
fn first_tokens_teach_how_long_prompts_really_take() {
    let start = Instant::now();
    let (membership, ..) = measured_pair(start);
    let mut now = start;
    for _ in 0..40 {
        let route = membership.route(&ask(100, 10), &Wish::default(), now).unwrap();
        now += Duration::from_millis(165);
        route.computed(now);
        // Only the first call counts.
        route.computed(now + LEASE);
    }
    let predicted_ms = membership.route(&ask(100, 10), &Wish::default(), now).unwrap().candidates[0].ttft_ms();
    assert!((predicted_ms / 165.0 - 1.0).abs() < 0.05, "{predicted_ms}");
    assert!((membership.json()["nodes"][1]["prefill_factor"].as_f64().unwrap() - 1.5).abs() < 0.1);
}

#[test]
fn a_late_prompt_makes_those_behind_it_late() {
    let start = Instant::now();
    let (membership, ..) = measured_pair(start);
    let routes: Vec<_> = (0..2).map(|_| membership.route(&ask(100, 10), &Wish::default(), start).unwrap()).collect();
    assert!((routes[1].candidates[0].ttft_ms() - 220.0).abs() < 1e-6);
    let now = at(start, 140);
    routes[0].computed(now);
    // Thirty milliseconds late: the next one begins now. Its wait is known, and the node a little slower.
    let third = membership.route(&ask(100, 10), &Wish::default(), now).unwrap();
    let wait_ms = third.candidates[0].terms.wait_prefill_ms;
    assert!((wait_ms - 110.0).abs() < 1e-6, "{wait_ms}");
}

#[test]
fn who_waits_for_its_kv_is_less_in_the_way_of_a_local_prompt_until_it_begins() {
    let start = Instant::now();
    let (membership, ..) = measured_pair(start);
    let auto = membership.clone().with_local_prefill(LocalPrefill::Auto);
    let interference_ms = |now| {
        let told = auto.route(&ask(100, 10), &Wish::default(), now).unwrap();
        told.candidates.iter().find(|plan| plan.plan() == Plan::Local).unwrap().terms.interference_ms
    };
    assert_eq!(interference_ms(start), 0.0);
    // Computed on the prefill node for 110 ms, about as long as the local one: it waits for half of that in the mean.
    let first = membership.route(&ask(100, 10), &Wish::default(), start).unwrap();
    let begins_later = interference_ms(start);
    first.computed(start);
    let runs = interference_ms(start);
    assert!((0.5..0.51).contains(&(begins_later / runs)), "{begins_later} beside {runs}");
    let second = membership.route(&ask(100, 10), &Wish::default(), start).unwrap();
    assert!(interference_ms(start) < 2.0 * runs);
    drop(second);
    assert_eq!(interference_ms(start), runs, "given up");
}

#[test]
fn a_decode_node_beside_a_prefill_node_learns_how_long_its_prompts_take() {
    let (membership, mut now) = (membership().with_local_prefill(LocalPrefill::Auto), Instant::now());
    let processor = Some(v1::Processor { id: 1, cores: 2, threads: 2 });
    let [p, d] = [("p", v1::Role::Prefill), ("d", v1::Role::Decode)].map(|(id, role)| {
        membership.register(v1::Register { processor, ..register(id, role, 1) }, now).unwrap().session
    });
    let cost = v1::StepCost { base_ms: 1.0, token_ms: 1.0, ..v1::StepCost::default() };
    let load = v1::Load { free_blocks: 64, step_cost: Some(cost), ..v1::Load::default() };
    for _ in 0..200 {
        [p, d].into_iter().for_each(|session| membership.report(session, &load, now));
        let route = membership.route(&ask(100, 10), &Wish::default(), now).unwrap();
        assert_eq!(route.sessions(), (None, d));
        now += Duration::from_secs_f64(route.candidates[0].ttft_ms() * 1.3 / 1e3);
        route.computed(now);
    }
    let nodes = membership.json();
    let factor =
        nodes["nodes"].as_array().unwrap().iter().find(|node| node["id"] == "d").unwrap()["prefill_factor"].as_f64();
    assert!(
        (1.1..1.35).contains(&factor.unwrap()),
        "its predictions are like the prefill node's, whatever it learns: {factor:?}"
    );
}

#[test]
fn a_first_token_is_predicted_without_a_booking() {
    let start = Instant::now();
    let (membership, prefill, _) = measured_pair(start);
    let near = |predicted: Option<Predicted>, wait_ms: f64, prefill_ms: f64| {
        let Predicted { wait, prefill } = predicted.expect("a prediction");
        let off = |time: Duration, ms: f64| (time.as_secs_f64() * 1e3 - ms).abs();
        assert!(off(wait, wait_ms) < 0.01 && off(prefill, prefill_ms) < 0.01, "{wait:?} {prefill:?}");
    };
    for _ in 0..2 {
        near(membership.predict(&ask(100, 10), start), 0.0, 110.0);
    }
    membership.report(prefill.session, &v1::Load { waiting: 1, ..measured(200) }, start);
    near(membership.predict(&ask(100, 10), at(start, 150)), 60.0, 110.0);
    assert_eq!(membership.predict(&ask(100, 2000), start), None, "nobody could take it");
    let unmeasured = self::membership();
    unmeasured.register(register("p", v1::Role::Prefill, 1), start).unwrap();
    unmeasured.register(register("d", v1::Role::Decode, 1), start).unwrap();
    assert_eq!(unmeasured.predict(&ask(100, 10), start), None);
}
