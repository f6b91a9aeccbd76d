//! Whether the nodes have room: of those that somebody would be sent to, and of one group that pairs.
use super::*;

fn has_room(membership: &Membership, prompt_tokens: u32, max_tokens: u32, now: Instant) -> bool {
    membership.has_room(&membership.demand(prompt_tokens, max_tokens), &Ahead::default(), 0, now)
}

fn avoiding(nodes: &[&Arc<Node>]) -> Wish {
    let nodes = nodes.iter().map(|node| node.session).collect();
    Wish { avoid: Avoid { nodes, pairs: vec![] }, ..Wish::default() }
}

#[test]
fn nodes_that_nobody_is_sent_to_have_no_room() {
    let (membership, start) = (membership(), Instant::now());
    let [prefill, good, other] = [("p", v1::Role::Prefill), ("d0", v1::Role::Decode), ("d1", v1::Role::Decode)]
        .map(|(id, role)| membership.register(register(id, role, 1), start).unwrap());
    let report = |node: &Node, free_blocks, now| {
        membership.report(node.session, &v1::Load { free_blocks, ..v1::Load::default() }, now);
    };
    let full = membership.route(&ask(500, 500), &avoiding(&[&other]), start).unwrap();
    full.prefilled();
    assert!(has_room(&membership, 100, 400, start));
    for _ in 0..3 {
        membership.route(&ask(100, 10), &avoiding(&[&good]), start).unwrap().failed(Role::Decode, start);
    }
    assert!(!has_room(&membership, 100, 400, start), "its breaker is open, and the other one is full");
    let later = start + Duration::from_secs(2);
    [(&prefill, 64), (&good, 1)].into_iter().for_each(|(node, free)| report(node, free, later));
    assert!(!has_room(&membership, 100, 400, later), "it may be tried, and is silent");
    report(&other, 64, later);
    assert!(has_room(&membership, 100, 400, later));
    let silent = later + LEASE;
    report(&prefill, 64, silent);
    membership.leave(good.session, "it left");
    assert!(has_room(&membership, 100, 400, silent), "there is no other one");
}

#[test]
fn room_is_that_of_one_group() {
    let (membership, now) = (membership(), Instant::now());
    let of_kind = |id: &str, role, compatibility_digest| {
        membership.register(v1::Register { compatibility_digest, ..register(id, role, 1) }, now).unwrap()
    };
    let first = [of_kind("p5", v1::Role::Prefill, 5), of_kind("d5", v1::Role::Decode, 5)];
    let full = membership.route(&ask(1000, 1), &Wish::default(), now).unwrap();
    full.prefilled();
    assert!(!has_room(&membership, 300, 10, now), "decode is full");
    let second = [of_kind("p6", v1::Role::Prefill, 6), of_kind("d6", v1::Role::Decode, 6)];
    assert!(has_room(&membership, 300, 10, now));
    let busy = membership.route(&ask(600, 1), &avoiding(&[&first[0], &first[1]]), now).unwrap();
    assert_eq!(busy.sessions(), (Some(second[0].session), second[1].session));
    assert!(!has_room(&membership, 300, 10, now), "prefill is busy in one group, decode is full in the other");
    busy.prefilled();
    assert!(has_room(&membership, 300, 10, now));
}

#[test]
fn decode_nodes_that_compute_prompts_have_room_when_they_have_few() {
    let now = Instant::now();
    for local in [LocalPrefill::Always, LocalPrefill::Auto] {
        let membership = membership().with_local_prefill(local);
        membership.register(register("d", v1::Role::Decode, 1), now).unwrap();
        let busy = membership.route(&ask(600, 1), &Wish::default(), now).unwrap();
        assert!(!has_room(&membership, 10, 10, now), "600 tokens are before it");
        busy.computed(now);
        assert!(has_room(&membership, 10, 10, now), "its answer is no prompt");
        drop(busy);
        let given_up = membership.route(&ask(600, 1), &Wish::default(), now).unwrap();
        drop(given_up);
        assert!(has_room(&membership, 10, 10, now));
    }
}

#[test]
fn a_prompt_has_room_on_a_decode_node_if_it_would_go_there() {
    let now = Instant::now();
    for (local, finds) in [(LocalPrefill::Never, false), (LocalPrefill::Auto, true)] {
        let membership = membership().with_local_prefill(local);
        let [p, d] = [("p", v1::Role::Prefill), ("d", v1::Role::Decode)]
            .map(|(id, role)| membership.register(register(id, role, 1), now).unwrap().session);
        let cost = v1::StepCost { base_ms: 1.0, token_ms: 1.0, ..v1::StepCost::default() };
        let load = v1::Load { free_blocks: 64, step_cost: Some(cost), ..v1::Load::default() };
        [p, d].into_iter().for_each(|session| membership.report(session, &load, now));
        let busy = membership.route(&ask(600, 10), &Wish::default(), now).unwrap();
        assert_eq!(busy.sessions(), (Some(p), d));
        assert_eq!(has_room(&membership, 100, 10, now), finds, "the decode node does nothing yet");
        let running = v1::Load { running: 8, running_tokens: 800, ..load };
        membership.report(d, &running, now);
        assert!(
            !has_room(&membership, 400, 10, now),
            "eight short answers would wait for it: it goes to the prefill node"
        );
        busy.prefilled();
        assert!(has_room(&membership, 400, 10, now));
    }
}
