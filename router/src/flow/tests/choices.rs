//! Several answers, their log probabilities and the ranges of sampling, as a gRPC client sees them.
use tokio::net::TcpListener;
use tonic::transport::Channel;
use tonic::transport::server::TcpIncoming;
use v1::generate_response::Event;
use v1::inference_client::InferenceClient;

use super::*;

async fn client(service: &crate::api::Service) -> InferenceClient<Channel> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let routes = crate::grpc::routes(service, tonic_health::server::HealthReporter::new()).unwrap();
    let server = tonic::transport::Server::builder().add_routes(routes);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    InferenceClient::connect(address).await.unwrap()
}

fn ask(sampling: v1::Sampling, n: u32) -> v1::GenerateRequest {
    v1::GenerateRequest {
        input: Some(v1::generate_request::Input::Text("Hello".into())),
        max_tokens: Some(8),
        request_id: "mine".into(),
        sampling: Some(sampling),
        stop_token_ids: vec![7],
        n,
        ..v1::GenerateRequest::default()
    }
}

#[tokio::test]
async fn each_answer_has_its_number_its_seed_and_its_end() {
    let mut cluster = Cluster::start(Limits::default()).await;
    let mut client = client(&cluster.service).await;
    let sampling = v1::Sampling { seed: 41, top_logprobs: 2, min_tokens: 2, ..v1::Sampling::default() };
    let answering = tokio::spawn(async move { client.generate(ask(sampling, 2)).await.unwrap().into_inner() });
    let mut specs = Vec::new();
    let mut calls = Vec::new();
    for _ in 0..2 {
        let (prefill, spec, decode, _) = cluster.legs().await;
        assert_eq!((spec.stop_token_ids.as_slice(), spec.max_tokens), ([7].as_slice(), 8));
        specs.push((spec.request_id, spec.sampling.unwrap()));
        calls.push((prefill, decode));
    }
    specs.sort_by(|a, b| a.0.cmp(&b.0));
    for (choice, (request_id, sampling)) in specs.iter().enumerate() {
        assert_eq!((request_id, sampling.seed), (&format!("mine-{choice}"), 41 + choice as u64));
        assert_eq!((sampling.top_logprobs, sampling.min_tokens), (2, 2));
    }
    // The two get the same script: which prefill call belongs to which decode call does not matter.
    for (_, decode) in &calls {
        decode.send(reserved()).await;
    }
    for (prefill, decode) in &calls {
        let top = |id, logprob| v1::TokenLogprob { token_id: id, logprob, token: Vec::new() };
        let first = v1::FirstToken {
            token_id: id('H'),
            logprob: -0.5,
            top_logprobs: vec![top(id('H'), -0.5), top(0, -1.0)],
            finished: None,
            cached_tokens: 0,
        };
        prefill.send(v1::PrefillEvent { event: Some(v1::prefill_event::Event::FirstToken(first)) }).await;
        decode.send(verified()).await;
        decode.send(token(id('i'))).await;
        decode.send(finished(Length, vec![])).await;
    }
    let mut stream = answering.await.unwrap();
    let (mut texts, mut ends) = ([String::new(), String::new()], [0, 0]);
    while let Some(message) = stream.message().await.unwrap() {
        match message.event.unwrap() {
            Event::Token(token) => {
                texts[token.choice as usize] += &token.text;
                let names: Vec<&[u8]> = token.top_logprobs.iter().map(|top| &*top.token).collect();
                let expected: &[&[u8]] = if token.index == 0 { &[b"H", b"<eos>"] } else { &[] };
                assert_eq!(names, expected);
            }
            Event::Finish(finish) => {
                assert_eq!((finish.prompt_tokens, finish.completion_tokens, &*finish.request_id), (5, 2, "mine"));
                ends[finish.choice as usize] += 1;
            }
        }
    }
    assert_eq!((texts, ends), (["Hi".to_owned(), "Hi".to_owned()], [1, 1]));
}

#[tokio::test]
async fn wrong_values_are_invalid_arguments_that_name_their_field() {
    let service = fakes::router(Limits::default());
    let mut client = client(&service).await;
    let cases = [
        (v1::Sampling { min_p: -0.5, ..Default::default() }, 1, "min_p"),
        (v1::Sampling { repetition_penalty: -1.0, ..Default::default() }, 1, "repetition_penalty"),
        (v1::Sampling { presence_penalty: 2.5, ..Default::default() }, 1, "presence_penalty"),
        (v1::Sampling { frequency_penalty: f32::NAN, ..Default::default() }, 1, "frequency_penalty"),
        (v1::Sampling { logit_bias: [(5000, 1.0)].into(), ..Default::default() }, 1, "logit_bias"),
        (v1::Sampling { min_tokens: 9, ..Default::default() }, 1, "min_tokens"),
        (v1::Sampling { top_logprobs: 21, ..Default::default() }, 1, "top_logprobs"),
        (v1::Sampling::default(), 129, "n must be 1 to 128"),
    ];
    for (sampling, n, said) in cases {
        let status = client.generate(ask(sampling, n)).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{said}");
        assert!(status.message().contains(said), "{}", status.message());
    }
}
