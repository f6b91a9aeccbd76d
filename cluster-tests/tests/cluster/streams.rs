//! Many streams at once lose a node in the middle of their answers, and nobody can tell from the text.
use std::time::Duration;

use anyhow::ensure;
use tandem_cluster_tests::client::{ask, text};
use tandem_cluster_tests::fleet::Role;
use tandem_cluster_tests::{Fleet, FleetOptions};
use tandem_proto::v1::generate_response::Event;
use tandem_proto::v1::inference_client::InferenceClient;
use tokio::time::{Instant, sleep, timeout};

const STREAMS: usize = 32;
const TOKENS: u32 = 48;
/// Of all streams together, before the fault.
const UNDER_WAY: f64 = (STREAMS * 8) as f64;
/// Both cores may be busy with other things.
const LONG: Duration = Duration::from_secs(180);
const BACK: Duration = Duration::from_secs(10);
/// The router's lease is a second.
const SILENCE: Duration = Duration::from_millis(2500);

/// What a client has of its stream.
#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    text: String,
}

#[tokio::test]
async fn thirty_two_streams_survive_every_loss_of_a_node() -> anyhow::Result<()> {
    let node = "--threads 1 --kv-blocks 512".to_owned();
    let mut fleet = Fleet::start(FleetOptions {
        simulated: false,
        router_args: "--lease-ms 1000".to_owned(),
        prefill_args: node.clone(),
        decode_args: node,
        ..FleetOptions::default()
    })
    .await?;
    let (undisturbed, usual) = all_streams(&fleet).await?.ended().await?;
    println!("undisturbed: longest pause {usual:.2?}");
    for (role, freeze) in [(Role::Decode, false), (Role::Prefill, false), (Role::Decode, true), (Role::Prefill, true)] {
        fleet.repair().await?;
        let before = fleet.sum(Role::Decode).await.generated;
        let streams = all_streams(&fleet).await?;
        // A prefill node is lost while it works, a decode node while all its streams run.
        let moment = if role == Role::Prefill { 1.0 } else { UNDER_WAY };
        while fleet.sum(Role::Decode).await.generated < before + moment {
            sleep(Duration::from_millis(5)).await;
        }
        let victim = fleet.busiest(role).await?;
        let victim = &mut fleet.members[victim].process;
        if freeze {
            victim.freeze();
            sleep(SILENCE).await;
            victim.wake();
        } else {
            victim.kill();
        }
        let (answers, pause) = streams.ended().await?;
        let same = answers.iter().zip(&undisturbed).filter(|(answer, undisturbed)| answer == undisturbed).count();
        let (fault, back) = (if freeze { "SIGSTOP" } else { "kill -9" }, fleet.settled(BACK).await?);
        println!(
            "{fault} of a {} node: {same} of {STREAMS} as undisturbed, longest pause {pause:.2?}, blocks back after {back:.2?}",
            role.as_str()
        );
        ensure!(same == STREAMS, "{answers:?}\nbut undisturbed\n{undisturbed:?}");
    }
    Ok(())
}

/// Streams that have been opened.
struct Streams(Vec<tokio::task::JoinHandle<anyhow::Result<(Answer, Duration)>>>);

async fn all_streams(fleet: &Fleet) -> anyhow::Result<Streams> {
    let client = InferenceClient::connect(fleet.entrance_url()).await?;
    let stream = |index: usize| {
        let mut client = client.clone();
        let mut request = ask(text(&format!("Here are {} facts about the number {index}:", index + 2)), TOKENS);
        request.ignore_eos = true;
        tokio::spawn(async move {
            let mut stream = client.generate(request).await?.into_inner();
            let mut answer = Answer { tokens: Vec::new(), text: String::new() };
            let (mut pause, mut last) = (Duration::ZERO, None);
            while let Some(message) = stream.message().await? {
                match message.event {
                    Some(Event::Token(token)) => {
                        let now = Instant::now();
                        pause = pause.max(now - last.replace(now).unwrap_or(now));
                        answer.tokens.push(token.token_id);
                        answer.text += &token.text;
                    }
                    Some(Event::Finish(finish)) => {
                        answer.text += &finish.text;
                        return Ok((answer, pause));
                    }
                    None => {}
                }
            }
            anyhow::bail!("a stream ended without its last message")
        })
    };
    Ok(Streams((0..STREAMS).map(stream).collect()))
}

impl Streams {
    /// All answers, and the longest time between two tokens of one.
    async fn ended(self) -> anyhow::Result<(Vec<Answer>, Duration)> {
        let (mut answers, mut longest) = (Vec::new(), Duration::ZERO);
        for stream in self.0 {
            let (answer, pause) = timeout(LONG, stream).await???;
            answers.push(answer);
            longest = longest.max(pause);
        }
        Ok((answers, longest))
    }
}
