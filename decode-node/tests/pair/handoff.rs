//! Hand-offs over the network inside the process: what hides behind compute, what does not travel, and what comes after
//! a failure.
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use futures::future::BoxFuture;
use prost::Message;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tandem_kvtransfer::mem::{MemFaults, MemTransport};
use tandem_kvtransfer::{Counters, Outgoing, TransferError, Transport};
use tandem_kvtransfer::{Faults, Grant, Incoming};
use tandem_node::Node;
use tandem_prefill_node::{Push, Settings};
use tandem_proto::spans::unpack;
use tandem_proto::v1::prefill_command::Command;
use tandem_proto::v1::prefill_event::Event;
use tandem_proto::v1::{self, PrefillCommand, PrefillEvent, RequestSpec, Ticket};
use tonic::{Code, Streaming};

use crate::nodes::{Answer, Nodes, Pair, collect, deliver, delivered, first_token, spec, ticket, undelivered};

const BLOCK_BYTES: u64 = 4096;
/// Two chunks of a megabyte, the second one cut into groups of layers.
const LONG: usize = 8000;
const LONG_CHUNKS: &str = "--max-num-batched-tokens 4096";
/// So slow that something happens while a prompt is computed.
const SLOW_CHUNKS: &str = "--max-num-batched-tokens 2048 --simulated-step-us 100000";

fn seeded(seed: u64, prompt_tokens: usize, max_tokens: u32) -> RequestSpec {
    RequestSpec { ignore_eos: true, ..spec(&mut StdRng::seed_from_u64(seed), prompt_tokens, max_tokens) }
}

/// Ready when `happened`; a test that waits in vain fails.
async fn until(happened: impl Fn() -> bool) {
    let wait = async {
        while !happened() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), wait).await.expect("in vain");
}

fn slow_frames(ms: u64) -> MemFaults {
    MemFaults { delay: Duration::from_millis(ms), ..MemFaults::default() }
}

/// Slow, and without an end of its own: however late a test acts, the hand-off is still under way.
fn unsealed(ms: u64) -> MemFaults {
    MemFaults { drop_seal: true, ..slow_frames(ms) }
}

/// (hidden, exposed) bytes that left a node.
fn pushed(node: &Node) -> (u64, u64) {
    (node.handoffs.hidden_bytes.load(Relaxed), node.handoffs.exposed_bytes.load(Relaxed))
}

/// The failure of a hand-off. Its order with the first token depends on the machine: a token that comes before it is
/// left in `first`.
async fn failure(prefill: &mut Streaming<PrefillEvent>, first: &mut Option<v1::FirstToken>) -> v1::Undelivered {
    loop {
        match prefill.message().await.unwrap().and_then(|event| event.event) {
            Some(Event::FirstToken(token)) if first.is_none() => *first = Some(token),
            Some(Event::Undelivered(undelivered)) => return undelivered,
            other => panic!("expected undelivered, got {other:?}"),
        }
    }
}

/// The rest of a request whose ticket was delivered and whose first token was `first`.
async fn rest(
    first: u32,
    prefill: &mut Streaming<PrefillEvent>,
    decode: &mut Streaming<v1::DecodeEvent>,
) -> (Answer, v1::Delivered) {
    let mut answer = Answer { tokens: vec![first], ..Answer::default() };
    let (delivered, ()) = tokio::try_join!(delivered(prefill), collect(decode, &mut answer)).unwrap();
    (answer, delivered)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Comes {
    Before,
    During,
    After,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overlap_gives_the_tokens_of_one_node_whenever_the_ticket_comes() {
    // A busy machine has a step's time to push the first chunk beside the second one.
    let nodes = Nodes::new(&format!("{LONG_CHUNKS} --simulated-step-us 300000"));
    let mut pair = nodes.pair(Settings::default(), MemFaults::default()).await;
    let mut alone = Nodes::new(LONG_CHUNKS).pair(Settings::default(), MemFaults::default()).await;
    let all = (LONG as u64 / 16) * BLOCK_BYTES;
    for (seed, comes) in [(1, Comes::Before), (2, Comes::During), (3, Comes::After)] {
        let spec = seeded(seed, LONG, 4);
        let before = pushed(&pair.prefill);
        let mut decode = pair.open_decode(&spec).await.unwrap();
        let ticket = ticket(&mut decode).await.unwrap();
        let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
        let first = match comes {
            Comes::Before => {
                commands.send(deliver(ticket)).await.unwrap();
                first_token(&mut prefill).await.unwrap()
            }
            Comes::During => {
                until(|| pair.prefill.engine.load().running > 0).await;
                commands.send(deliver(ticket)).await.unwrap();
                first_token(&mut prefill).await.unwrap()
            }
            Comes::After => {
                let first = first_token(&mut prefill).await.unwrap();
                commands.send(deliver(ticket)).await.unwrap();
                first
            }
        };
        let (answer, delivered) = rest(first.token_id, &mut prefill, &mut decode).await;
        assert_eq!(answer.tokens, alone.local(&spec).await.unwrap().tokens, "{comes:?}");
        assert_eq!((delivered.bytes, delivered.blocks), (all, 500), "{comes:?}");
        assert!((delivered.hidden_ms + delivered.exposed_ms - delivered.transfer_ms).abs() < 1e-6, "{delivered:?}");
        let after = pushed(&pair.prefill);
        let (hidden, exposed) = (after.0 - before.0, after.1 - before.1);
        assert_eq!(hidden + exposed, all, "{comes:?}");
        match comes {
            Comes::After => assert_eq!((hidden, delivered.hidden_ms), (0, 0.0)),
            // The first chunk while the second one is computed, if nothing more.
            _ => assert!(hidden >= 256 * BLOCK_BYTES && delivered.hidden_ms > 0.0, "{comes:?} {hidden} {delivered:?}"),
        }
    }
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_of_the_last_chunk_leave_while_others_are_computed() {
    // One chunk only: nothing could leave before the end but layers.
    let nodes = Nodes::new("--max-num-batched-tokens 8192 --simulated-step-us 600000");
    let mut pair = nodes.pair(Settings::default(), MemFaults::default()).await;
    let spec = seeded(4, LONG + 5, 3);
    let answer = pair.run(&spec).await.unwrap();
    assert_eq!(answer.tokens, pair.local(&spec).await.unwrap().tokens);
    let (hidden, exposed) = pushed(&pair.prefill);
    assert_eq!(hidden + exposed, 501 * BLOCK_BYTES);
    assert!(hidden >= 501 * BLOCK_BYTES / 4, "{hidden} of {} hidden", 501 * BLOCK_BYTES);
    let post = answer.span("kv.post");
    let groups = post.events.iter().filter(|event| event.name == "layer_group.posted").count();
    assert!(groups >= 2, "{post:?}");
    for span in [post, answer.span("kv.transfer")] {
        let keys: Vec<_> = span.attributes.iter().map(|attribute| attribute.key.as_str()).collect();
        for key in ["tandem.kv.hidden_ms", "tandem.kv.exposed_ms", "tandem.kv.blocks_reused"] {
            assert!(keys.contains(&key), "{} {keys:?}", span.name);
        }
    }
    assert!(answer.span("kv.transfer").start_unix_ns < answer.span("prefill.forward").end_unix_ns);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_push_leaves_nothing_before_the_end() {
    let whole = Settings { push: Push::Whole, ..Settings::default() };
    let mut pair = Nodes::new(LONG_CHUNKS).pair(whole, MemFaults::default()).await;
    let spec = seeded(5, LONG, 3);
    let answer = pair.run(&spec).await.unwrap();
    assert_eq!(answer.tokens, pair.local(&spec).await.unwrap().tokens);
    assert_eq!(pushed(&pair.prefill), (0, 500 * BLOCK_BYTES));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_turn_of_a_chat_moves_only_what_is_missing() {
    let mut pair = Nodes::new("").pair(Settings::default(), MemFaults::default()).await;
    let first = seeded(6, 100, 41);
    let answer = pair.run(&first).await.unwrap();
    let sent = |pair: &Pair| pair.prefill.transport.counters().sent_bytes.load(Relaxed);
    assert_eq!(sent(&pair), 7 * BLOCK_BYTES);
    // The last token's KV was not computed: 140 tokens, 8 full blocks of prompt and answer.
    let prompt = [&first.prompt[..], &answer.tokens, &[7; 50]].concat();
    assert_eq!(prompt.len(), 191);
    let second = RequestSpec { prompt, ..seeded(7, 1, 5) };
    let before = sent(&pair);
    let turn = pair.run(&second).await.unwrap();
    let kv = turn.verified.clone().unwrap();
    assert_eq!((kv.held_blocks, kv.blocks, kv.bytes), (8, 4, 4 * BLOCK_BYTES));
    assert_eq!(sent(&pair) - before, 4 * BLOCK_BYTES, "12 blocks, 8 of them held");
    assert_eq!(pair.decode.transport.counters().received_bytes.load(Relaxed), 11 * BLOCK_BYTES);
    assert_eq!(pair.decode.handoffs.reused_blocks.load(Relaxed), 8);
    let mut fresh = Nodes::new("").pair(Settings::default(), MemFaults::default()).await;
    assert_eq!(turn.tokens, fresh.local(&second).await.unwrap().tokens, "as without any cache");
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_ticket_takes_the_kv_elsewhere_when_the_first_decode_node_died() {
    for dies_while in [Comes::Before, Comes::During, Comes::After] {
        let nodes = Nodes::new(SLOW_CHUNKS);
        let mut pair = first_damaged(&nodes, unsealed(20)).await;
        let (other, mut to_other, dying) = nodes.decode().await;
        let spec = seeded(8, LONG, 4);
        std::mem::swap(&mut pair.to_decode, &mut to_other);
        let mut lost = pair.open_decode(&spec).await.unwrap();
        let first_ticket = ticket(&mut lost).await.unwrap();
        let lost_id = Ticket::decode(&first_ticket[..]).unwrap().handoff_id;
        let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
        let mut first = None;
        match dies_while {
            Comes::Before => dying.kill(),
            Comes::During => {}
            Comes::After => first = Some(first_token(&mut prefill).await.unwrap()),
        }
        commands.send(deliver(first_ticket)).await.unwrap();
        if dies_while != Comes::Before {
            until(|| other.transport.counters().received_bytes.load(Relaxed) > 0).await;
            dying.kill();
        }
        let told = failure(&mut prefill, &mut first).await;
        assert_eq!((told.code, told.handoff_id), (Code::Unavailable.into(), lost_id), "{dies_while:?}");
        std::mem::swap(&mut pair.to_decode, &mut to_other);
        let mut decode = pair.open_decode(&spec).await.unwrap();
        commands.send(deliver(ticket(&mut decode).await.unwrap())).await.unwrap();
        let first = match first {
            Some(first) => first,
            None => first_token(&mut prefill).await.unwrap(),
        };
        let (answer, _) = rest(first.token_id, &mut prefill, &mut decode).await;
        assert_eq!(answer.tokens, pair.local(&spec).await.unwrap().tokens, "{dies_while:?}");
        let handoffs = &pair.prefill.handoffs;
        assert_eq!(handoffs.redelivered.load(Relaxed), 1);
        assert!(handoffs.undelivered().any(|cause| cause == ("unavailable", 1)));
        drop(lost);
        pair.all_blocks_back().await;
    }
}

/// The first hand-off goes by a transport that damages it, the others by a sound one.
struct DamagesTheFirst {
    damaging: Arc<MemTransport>,
    sound: Arc<MemTransport>,
    used: AtomicBool,
}

impl Transport for DamagesTheFirst {
    fn info(&self) -> v1::TransportInfo {
        self.sound.info()
    }

    fn address(&self) -> Vec<u8> {
        self.sound.address()
    }

    fn counters(&self) -> Arc<Counters> {
        self.sound.counters()
    }

    fn failed(&self) -> Option<String> {
        None
    }

    fn accept(&self, grant: Grant) -> Result<Incoming, TransferError> {
        self.sound.accept(grant)
    }

    fn open<'a>(&'a self, ticket: &'a Ticket) -> BoxFuture<'a, Result<Outgoing, TransferError>> {
        if self.used.swap(true, SeqCst) { self.sound.open(ticket) } else { self.damaging.open(ticket) }
    }
}

/// A pair whose prefill node makes `faults` in its first hand-off only.
async fn first_damaged(nodes: &Nodes, faults: MemFaults) -> Pair {
    nodes
        .pair_over(Settings::default(), |network, arena| {
            let damaging = MemTransport::new(network, arena.clone(), faults);
            let sound = MemTransport::new(network, arena, MemFaults::default());
            Arc::new(DamagesTheFirst { damaging, sound, used: AtomicBool::new(false) })
        })
        .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_damaged_push_a_second_ticket_on_the_same_node_works() {
    let nodes = Nodes::new(LONG_CHUNKS);
    let flip = MemFaults { send: Faults { flip_byte: true, ..Faults::default() }, ..MemFaults::default() };
    let mut pair = first_damaged(&nodes, flip).await;
    let spec = seeded(9, LONG, 4);
    let mut refused = pair.open_decode(&spec).await.unwrap();
    let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
    commands.send(deliver(ticket(&mut refused).await.unwrap())).await.unwrap();
    let first = first_token(&mut prefill).await.unwrap();
    assert_eq!(undelivered(&mut prefill).await.unwrap().code, i32::from(Code::DataLoss));
    assert_eq!(collect(&mut refused, &mut Answer::default()).await.unwrap_err().code(), Code::DataLoss);
    let mut decode = pair.open_decode(&spec).await.unwrap();
    commands.send(deliver(ticket(&mut decode).await.unwrap())).await.unwrap();
    let (answer, delivered) = rest(first.token_id, &mut prefill, &mut decode).await;
    assert_eq!(answer.tokens, pair.local(&spec).await.unwrap().tokens);
    assert_eq!(delivered.blocks, 500, "nothing of the damaged hand-off is held");
    let posts = unpack(&delivered.spans).filter(|span| span.name == "kv.post");
    assert_eq!(posts.map(|span| span.error().is_empty()).collect::<Vec<_>>(), [false, true]);
    assert!(pair.prefill.handoffs.undelivered().any(|cause| cause == ("corrupt", 1)));
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ticket_replaces_the_one_before_it() {
    let nodes = Nodes::new(SLOW_CHUNKS);
    let mut pair = first_damaged(&nodes, unsealed(30)).await;
    let spec = seeded(10, LONG, 4);
    let mut replaced = pair.open_decode(&spec).await.unwrap();
    let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
    commands.send(deliver(ticket(&mut replaced).await.unwrap())).await.unwrap();
    until(|| pair.decode.transport.counters().received_bytes.load(Relaxed) > 0).await;
    let mut decode = pair.open_decode(&spec).await.unwrap();
    commands.send(deliver(ticket(&mut decode).await.unwrap())).await.unwrap();
    let cancelled = collect(&mut replaced, &mut Answer::default()).await.unwrap_err();
    assert_eq!(cancelled.code(), Code::Cancelled, "{cancelled:?}");
    let first = first_token(&mut prefill).await.unwrap();
    let (answer, _) = rest(first.token_id, &mut prefill, &mut decode).await;
    assert_eq!(answer.tokens, pair.local(&spec).await.unwrap().tokens);
    assert_eq!(pair.prefill.handoffs.redelivered.load(Relaxed), 1);
    assert!(pair.prefill.handoffs.undelivered().all(|(_, count)| count == 0), "nothing had failed");
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ticket_that_does_not_fit_is_told_and_the_wait_for_another_one_is_bounded() {
    let settings = Settings { redeliver_wait: Duration::from_millis(100), ..Settings::default() };
    let mut pair = Nodes::new("").pair(settings, MemFaults::default()).await;
    let spec = seeded(11, 100, 4);
    type Change = fn(&mut Ticket);
    let wrong: [(Change, &str); 5] = [
        (|ticket| (ticket.held_blocks, ticket.blocks, ticket.held_hash) = (2, 5, vec![1; 16]), "of another prompt"),
        (|ticket| ticket.held_hash = vec![9; 16], "of another prompt"),
        (|ticket| ticket.held_hash = vec![9; 8], "a sequence hash has 16 bytes, not 8"),
        (|ticket| ticket.blocks = 6, "the prompt has 7"),
        (|ticket| ticket.prefill_incarnation += 1, "another incarnation"),
    ];
    for (calls, (change, why)) in (1..).zip(wrong) {
        let mut decode = pair.open_decode(&spec).await.unwrap();
        let mut ticket = Ticket::decode(&ticket(&mut decode).await.unwrap()[..]).unwrap();
        change(&mut ticket);
        let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
        first_token(&mut prefill).await.unwrap();
        commands.send(deliver(ticket.encode_to_vec())).await.unwrap();
        let told = undelivered(&mut prefill).await.unwrap();
        assert_eq!(told.code, i32::from(Code::FailedPrecondition), "{told:?}");
        assert!(told.message.contains(why), "{told:?}");
        let end = tokio::time::timeout(Duration::from_secs(10), prefill.message()).await.unwrap().unwrap_err();
        assert_eq!(end.code(), Code::FailedPrecondition, "{end:?}");
        assert_eq!(pair.prefill.handoffs.not_redelivered.load(Relaxed), calls);
        drop(decode);
    }
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_dropped_in_a_push_gives_everything_back() {
    let mut pair = first_damaged(&Nodes::new(SLOW_CHUNKS), unsealed(50)).await;
    let spec = seeded(12, LONG, 4);
    let mut decode = pair.open_decode(&spec).await.unwrap();
    let (commands, prefill) = pair.open_prefill(&spec).await.unwrap();
    commands.send(deliver(ticket(&mut decode).await.unwrap())).await.unwrap();
    until(|| pair.decode.transport.counters().received_bytes.load(Relaxed) > 0).await;
    drop((commands, prefill));
    // The receiver hears of it without anybody else's word.
    let cancelled = collect(&mut decode, &mut Answer::default()).await.unwrap_err();
    assert_eq!(cancelled.code(), Code::Cancelled, "{cancelled:?}");
    pair.all_blocks_back().await;
    assert_eq!(pair.run(&spec).await.unwrap().tokens, pair.local(&spec).await.unwrap().tokens);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_lets_a_push_end() {
    let mut pair = Nodes::new(SLOW_CHUNKS).pair(Settings::default(), slow_frames(20)).await;
    let spec = seeded(13, LONG, 4);
    let mut decode = pair.open_decode(&spec).await.unwrap();
    let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
    commands.send(deliver(ticket(&mut decode).await.unwrap())).await.unwrap();
    until(|| pair.decode.transport.counters().received_bytes.load(Relaxed) > 0).await;
    pair.prefill.work.drain();
    pair.decode.work.drain();
    assert_eq!(pair.open_prefill(&spec).await.unwrap_err().code(), Code::Unavailable);
    let first = first_token(&mut prefill).await.unwrap();
    let (answer, _) = rest(first.token_id, &mut prefill, &mut decode).await;
    assert_eq!(answer.tokens.len(), 4);
    for node in [&pair.prefill, &pair.decode] {
        tokio::time::timeout(Duration::from_secs(10), node.work.drained()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kv_that_failed_to_go_gives_way_and_is_computed_again_for_a_second_ticket() {
    // Room for one prompt at a time.
    let mut pair = Nodes::new("--kv-blocks 8").pair(Settings::default(), MemFaults::default()).await;
    let spec = seeded(14, 100, 4);
    let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
    let first = first_token(&mut prefill).await.unwrap();
    commands.send(deliver(Ticket::default().encode_to_vec())).await.unwrap();
    undelivered(&mut prefill).await.unwrap();
    // Another one has a ticket and needs the blocks.
    let other = seeded(15, 100, 4);
    pair.run(&other).await.unwrap();
    let mut decode = pair.open_decode(&spec).await.unwrap();
    commands.send(deliver(ticket(&mut decode).await.unwrap())).await.unwrap();
    let (answer, delivered) = rest(first.token_id, &mut prefill, &mut decode).await;
    assert_eq!(unpack(&delivered.spans).filter(|span| span.name == "prefill.forward").count(), 2);
    assert_eq!(answer.tokens, pair.local(&spec).await.unwrap().tokens);
    pair.all_blocks_back().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kv_that_gave_way_and_is_not_wanted_any_more_ends_well() {
    let mut pair = Nodes::new("--kv-blocks 8").pair(Settings::default(), MemFaults::default()).await;
    let spec = seeded(16, 100, 4);
    let (commands, mut prefill) = pair.open_prefill(&spec).await.unwrap();
    first_token(&mut prefill).await.unwrap();
    pair.run(&seeded(17, 100, 4)).await.unwrap();
    commands.send(PrefillCommand { command: Some(Command::Stop(v1::PrefillStop {})) }).await.unwrap();
    let end = tokio::time::timeout(Duration::from_secs(10), delivered(&mut prefill)).await.unwrap().unwrap();
    assert_eq!(end.blocks, 0);
    assert!(unpack(&end.spans).all(|span| span.error().is_empty()));
    pair.all_blocks_back().await;
}
