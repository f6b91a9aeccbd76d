//! Calls to the clients' gRPC port: without a key, with messages that are none or too large, with bombs.
use anyhow::{Context, bail, ensure};
use futures::FutureExt;
use prost::Message;
use tandem_cluster_tests::client::{ask, text, token_ids};
use tandem_proto::v1;
use tandem_proto::v1::inference_client::InferenceClient;
use tandem_proto::v1::membership_client::MembershipClient;
use tonic::codec::CompressionEncoding;
use tonic::{Code, Request, Status};

use crate::Attack;
use crate::sockets::{self, h2};
use crate::target::{COUNTED, Seen, Target, VICTIM};

/// All of them.
pub fn attacks() -> Vec<Attack> {
    let attack = |name, seen, run| Attack { name, door: "client gRPC", seen, run };
    let unknown = Seen::Router("outcome=\"unauthenticated\"");
    let invalid = Seen::Router("outcome=\"invalid_argument\"");
    let overloaded = Seen::Router("outcome=\"overloaded\"");
    vec![
        attack("a call without a key", unknown, |target| no_key(target).boxed_local()),
        attack("a call with absurd fields", invalid, |target| absurd(target).boxed_local()),
        attack("a message of 64 MB", invalid, |target| oversize(target).boxed_local()),
        attack("a length of 4 GB, and nothing", invalid, |target| announced(target).boxed_local()),
        attack("a second message", invalid, |target| second(target).boxed_local()),
        attack("gzip bomb", overloaded, |target| bomb(target, Packing::Gzip).boxed_local()),
        attack("zstd bomb", overloaded, |target| bomb(target, Packing::Zstd).boxed_local()),
        attack("a reader that reads nothing", Seen::Router("tandem_client_stalls_total"), |target| {
            unread(target).boxed_local()
        }),
        attack("Join on the clients' port", Seen::Router("outcome=\"not_found\""), |target| join(target).boxed_local()),
    ]
}

fn how(status: &Status) -> String {
    let message: String = status.message().chars().take(60).collect();
    format!("{:?} {message}", status.code())
}

async fn client(target: &Target) -> anyhow::Result<InferenceClient<tonic::transport::Channel>> {
    Ok(InferenceClient::connect(target.cluster.router.url("grpc")).await?.max_encoding_message_size(1 << 30))
}

fn keyed(message: v1::GenerateRequest) -> anyhow::Result<Request<v1::GenerateRequest>> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {VICTIM}").parse()?);
    Ok(request)
}

async fn refused(target: &Target, request: Request<v1::GenerateRequest>, codes: &[Code]) -> anyhow::Result<String> {
    let Err(status) = client(target).await?.generate(request).await else { bail!("it was answered") };
    ensure!(codes.contains(&status.code()), "{status:?}");
    Ok(how(&status))
}

async fn no_key(target: &Target) -> anyhow::Result<String> {
    let mut wrong = Request::new(ask(text("Hello"), 2));
    wrong.metadata_mut().insert("authorization", "Bearer sk-guessed-0123456789".parse()?);
    refused(target, wrong, &[Code::Unauthenticated]).await?;
    refused(target, Request::new(ask(text("Hello"), 2)), &[Code::Unauthenticated]).await
}

async fn absurd(target: &Target) -> anyhow::Result<String> {
    let hello = || ask(text("Hello"), 2);
    let sampling = |temperature| Some(v1::Sampling { temperature, ..v1::Sampling::default() });
    let mut told = String::new();
    for wrong in [
        ask(token_ids(vec![u32::MAX]), 4),
        ask(token_ids(vec![7; 1_000_000]), 4),
        v1::GenerateRequest { n: u32::MAX, ..hello() },
        v1::GenerateRequest { sampling: sampling(f32::NAN), ..hello() },
        v1::GenerateRequest { sampling: sampling(f32::INFINITY), ..hello() },
        v1::GenerateRequest { stop: vec!["a".into(); 10_000], ..hello() },
        v1::GenerateRequest { stop_token_ids: vec![u32::MAX; 10_000], ..hello() },
        v1::GenerateRequest { priority: i32::MIN, ..hello() },
        v1::GenerateRequest { request_id: "a\nb".into(), ..hello() },
        v1::GenerateRequest::default(),
    ] {
        told = refused(target, keyed(wrong)?, &[Code::InvalidArgument]).await?;
    }
    Ok(told)
}

async fn oversize(target: &Target) -> anyhow::Result<String> {
    refused(target, keyed(ask(text(&"a".repeat(64 << 20)), 2))?, &[Code::OutOfRange, Code::ResourceExhausted]).await
}

/// A call by hand: head, then these bytes of its body.
async fn by_hand(target: &Target, body: &[u8], flags: u8) -> anyhow::Result<sockets::Answer> {
    let key = format!("Bearer {VICTIM}");
    let head = h2::headers(&[
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/tandem.v1.Inference/Generate"),
        (":authority", "a"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("authorization", &key),
    ]);
    let bytes =
        [h2::opening(&[]), h2::frame(h2::HEADERS, h2::END_HEADERS, 1, &head), h2::frame(h2::DATA, flags, 1, body)]
            .concat();
    sockets::say(target.router("grpc")?, &bytes).await
}

/// The status is compressed by HPACK; that the stream was answered, and ended, is what counts.
async fn announced(target: &Target) -> anyhow::Result<String> {
    let answer = by_hand(target, &[0, 0xff, 0xff, 0xff, 0xff], 0).await?;
    ensure!(answer.bytes.len() > 60, "no answer: {:?}", answer.bytes);
    Ok("refused by its length".to_owned())
}

async fn second(target: &Target) -> anyhow::Result<String> {
    let answer = by_hand(target, &[0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0], 0).await?;
    ensure!(answer.bytes.len() > 60, "no answer: {:?}", answer.bytes);
    Ok("a call of Generate has one message".to_owned())
}

#[derive(Clone, Copy)]
enum Packing {
    Gzip,
    Zstd,
}

/// 64 MB of one letter, in some kilobytes.
async fn bomb(target: &Target, packing: Packing) -> anyhow::Result<String> {
    let encoding = match packing {
        Packing::Gzip => CompressionEncoding::Gzip,
        Packing::Zstd => CompressionEncoding::Zstd,
    };
    let message = ask(text(&"a".repeat(64 << 20)), 2);
    let mut told = String::new();
    for _ in 0..target.count(4, 64) {
        let mut client = client(target).await?.send_compressed(encoding);
        let Err(status) = client.generate(keyed(message.clone())?).await else { bail!("it was answered") };
        ensure!([Code::OutOfRange, Code::ResourceExhausted].contains(&status.code()), "{status:?}");
        told = how(&status);
    }
    Ok(told)
}

/// Streams whose window is shut: the router waits as long as `--client-stall-ms` says, and holds little meanwhile. They
/// are fewer than the decode node has seats: with all of them taken a client waits, whatever others do with answers.
async fn unread(target: &Target) -> anyhow::Result<String> {
    let message = v1::GenerateRequest { ignore_eos: true, ..ask(text("Hello"), 1500) };
    let message = message.encode_to_vec();
    let body = [&[0][..], &u32::try_from(message.len())?.to_be_bytes(), &message].concat();
    let key = format!("Bearer {VICTIM}");
    let head = h2::headers(&[
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/tandem.v1.Inference/Generate"),
        (":authority", "a"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("authorization", &key),
    ]);
    // INITIAL_WINDOW_SIZE of nothing.
    let bytes = [
        h2::opening(&[(4, 0)]),
        h2::frame(h2::HEADERS, h2::END_HEADERS, 1, &head),
        h2::frame(h2::DATA, h2::END_STREAM, 1, &body),
    ]
    .concat();
    let seen = Seen::Router("tandem_client_stalls_total");
    let replans = Seen::Router("tandem_replans_total");
    let before = [target.seen(seen).await?, target.seen(replans).await?];
    let held = sockets::hold(target.router("grpc")?, target.count(8, 24), &bytes).await?;
    target.until_seen(seen, before[0], COUNTED).await?;
    ensure!(target.seen(replans).await? == before[1], "answers were planned again");
    drop(held);
    Ok("ended after --client-stall-ms".to_owned())
}

async fn join(target: &Target) -> anyhow::Result<String> {
    let mut client = MembershipClient::connect(target.cluster.router.url("grpc")).await?;
    let mut request = Request::new(tokio_stream::iter([v1::NodeReport::default()]));
    request.metadata_mut().insert("x-tandem-join", target.token()?.to_str()?.parse()?);
    let status = client.join(request).await.err().context("it was taken")?;
    ensure!(status.code() == Code::Unimplemented, "{status:?}");
    Ok(how(&status))
}
