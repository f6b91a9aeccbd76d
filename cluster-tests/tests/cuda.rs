//! Nodes that compute on GPUs, as real processes. The GPUs are emulated (`engine/cuda/emu`), the programs do not know:
//! they find the emulated driver in `LD_LIBRARY_PATH`, as they find a real one in the system's folders. The model is a
//! tiny one, so that an emulated step takes milliseconds; but for the golden prompts, which are SmolLM2's. Of these a
//! step takes half a second: few short ones run, and more, with the death of either node, where `TANDEM_GPU_GOLDEN`
//! asks for them.
//!
//! Without a C++ compiler there is no emulated driver, and these tests are skipped with a word; with
//! `TANDEM_REQUIRE_EMU=1` they fail.
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use tandem_cluster_tests::client::{ask, metric, rest, token_ids};
use tandem_cluster_tests::cluster::words;
use tandem_cluster_tests::process::{Process, program};
use tandem_cluster_tests::{Cluster, Options};
use tandem_proto::v1;
use tempfile::TempDir;
use tokio::time::timeout;

/// For things that only have to happen.
const LONG: Duration = Duration::from_secs(120);
/// From the end of a request to free blocks everywhere.
const BACK: Duration = Duration::from_secs(10);
/// Golden prompts and tokens of each in every run.
const GOLDEN: (usize, usize) = (2, 4);
/// Gaps between the two best logits in which rounding to bf16 may choose either.
const TIE: f64 = 0.1;
/// The model's vocabulary, without its control tokens.
const TOKENS: std::ops::Range<u32> = 3..320;

/// What is in the environment, flags, and a word of the error.
type Case<'a> = (&'a [(&'a str, &'a str)], &'a str, &'a str);

/// A machine with so many emulated GPUs; what nodes need in their environment.
struct Machine {
    environment: Vec<(String, String)>,
    dir: TempDir,
}

impl Machine {
    fn with(devices: u32) -> anyhow::Result<Option<Self>> {
        let Some(libraries) = tandem_cuda_emu::library_dir() else {
            let required = std::env::var_os("TANDEM_REQUIRE_EMU").is_some_and(|value| value == "1");
            ensure!(!required, "TANDEM_REQUIRE_EMU=1, and no emulated driver was built");
            eprintln!("SKIP: no emulated CUDA driver was built, which needs g++");
            return Ok(None);
        };
        let dir = tempfile::tempdir()?;
        let pairs = [
            ("LD_LIBRARY_PATH", libraries.display().to_string()),
            ("EMU_DEVICES", devices.to_string()),
            // Compiled kernels are kept here, and not in the user's cache.
            ("XDG_CACHE_HOME", dir.path().join("cache").display().to_string()),
        ];
        let environment = pairs.map(|(name, value)| (name.to_owned(), value)).to_vec();
        Ok(Some(Self { environment, dir }))
    }

    /// Another value, or one more.
    fn set(&mut self, name: &str, value: impl Into<String>) {
        self.environment.retain(|(known, _)| known != name);
        self.environment.push((name.to_owned(), value.into()));
    }

    /// A prefill and a decode node with these flags, and the tiny model.
    async fn cluster(&self, prefill: &str, decode: &str) -> anyhow::Result<Cluster> {
        Cluster::start(Options {
            model: Some(tiny_model()?),
            node_args: words("--threads 1 --kv-blocks 128 --max-num-batched-tokens 32 --max-num-seqs 8"),
            ..self.options(prefill, decode)
        })
        .await
    }

    fn options(&self, prefill: &str, decode: &str) -> Options {
        Options {
            transport: "auto",
            node_environment: self.environment.clone(),
            prefill_args: words(prefill),
            decode_args: words(decode),
            ..Options::default()
        }
    }

    /// Runs a program to its end.
    async fn run(&self, name: &str, flags: &[String]) -> anyhow::Result<Output> {
        let mut command = tokio::process::Command::new(program(name)?);
        command.args(flags).envs(self.environment.iter().cloned()).stdin(Stdio::null()).kill_on_drop(true);
        timeout(LONG, command.output())
            .await
            .with_context(|| format!("{name} {flags:?} does not end"))?
            .map_err(Into::into)
    }
}

/// Two layers, 512 positions, in two safetensors files with a tokenizer.
fn tiny_model() -> anyhow::Result<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/families/data/llama");
    Ok(path.canonicalize()?)
}

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| TOKENS.start + at * 7 % (TOKENS.end - TOKENS.start)).collect()
}

fn request(tokens: u32, answer: u32) -> v1::GenerateRequest {
    let mut request = ask(token_ids(prompt(tokens)), answer);
    request.ignore_eos = true;
    request
}

#[tokio::test]
async fn two_gpus_answer_as_one_and_survive_the_death_of_either_node() -> anyhow::Result<()> {
    let Some(machine) = Machine::with(2)? else { return Ok(()) };
    let mut cluster = machine.cluster("--device cuda:0", "--device cuda:1").await?;
    assert_eq!((cluster.prefill.ready("device"), cluster.decode.ready("device")), ("cuda:0", "cuda:1"));
    for node in [&cluster.prefill, &cluster.decode] {
        assert!(node.ready("transport").starts_with("tcp"), "{}", node.ready("transport"));
        assert!(node.log().contains("staged through main memory"), "{}", node.log());
    }

    for length in [2, 40, 200] {
        let answer = cluster.answer(request(length, 12)).await?;
        let timings = answer.finish.timings.unwrap_or_default();
        assert!(timings.kv_bytes > 0 && answer.tokens.len() == 12, "{length}: {timings:?} {:?}", answer.tokens);
        let spec = v1::RequestSpec {
            request_id: "alone".to_owned(),
            prompt: prompt(length),
            max_tokens: 12,
            ignore_eos: true,
            ..Default::default()
        };
        assert_eq!(cluster.local_tokens(spec).await?, answer.tokens, "a prompt of {length} tokens on one GPU alone");
    }

    let expected = cluster.answer(request(40, 64)).await?.tokens;
    assert_eq!(over_death_of_decode(&mut cluster, request(40, 64)).await?, expected);
    // Fifteen steps of a prompt, of some 30 ms each.
    let expected = cluster.answer(request(480, 16)).await?.tokens;
    cluster.restart_prefill().await?;
    assert_eq!(over_death_of_prefill(&mut cluster, request(480, 16)).await?, expected);
    cluster.idle(BACK).await?;
    Ok(())
}

/// The tokens of an answer whose decode node is killed once the client has the first of them.
async fn over_death_of_decode(cluster: &mut Cluster, request: v1::GenerateRequest) -> anyhow::Result<Vec<u32>> {
    let mut stream = cluster.open(request).await?;
    let first = stream.message().await?.context("no first token")?;
    cluster.restart_decode().await?;
    let after = timeout(LONG, rest(stream)).await??;
    let Some(v1::generate_response::Event::Token(first)) = first.event else { panic!("the first message is no token") };
    ensure!(after.finish.timings.unwrap_or_default().replans >= 1, "the answer was complete before");
    Ok([vec![first.token_id], after.tokens].concat())
}

/// The tokens of an answer whose prefill node is killed while it computes the prompt.
async fn over_death_of_prefill(cluster: &mut Cluster, request: v1::GenerateRequest) -> anyhow::Result<Vec<u32>> {
    let stream = cluster.open(request).await?;
    // Asked of the node itself: its reports to the router come too late.
    let begun = async |cluster: &Cluster| {
        let running = metric(&cluster.prefill, "vllm:num_requests_running").await;
        running.is_ok_and(|running| running == 1.0)
    };
    cluster.wait_until(LONG, "the prompt is in a step", begun).await?;
    cluster.restart_prefill().await?;
    let answer = timeout(LONG, rest(stream)).await??;
    ensure!(answer.finish.timings.unwrap_or_default().replans >= 1, "the prompt was computed before");
    Ok(answer.tokens)
}

/// Greedy tokens of SmolLM2 by an independent engine, and how sure it was of each.
#[derive(Debug)]
struct Golden {
    name: String,
    prompt: Vec<u32>,
    /// As far as no choice is a tie for weights and activations in bf16.
    tokens: Vec<u32>,
}

impl Golden {
    /// The `prompts` shortest whose first token is sure, up to `tokens` tokens of each.
    fn shortest(prompts: usize, tokens: usize) -> anyhow::Result<Vec<Self>> {
        let file: Value = serde_json::from_str(include_str!("../../engine/tests/data/smollm2-135m-golden.json"))?;
        let prompt = |one: &Value| -> Option<Self> {
            let numbers = |list: &Value| -> Option<Vec<u32>> {
                list.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
            };
            let answer = &one["out"]["f32"];
            let gaps = answer["gap"].as_array()?.iter().map_while(Value::as_f64);
            let sure = gaps.take_while(|&gap| gap >= TIE).count().min(tokens);
            let mut tokens = numbers(&answer["tokens"])?;
            tokens.truncate(sure);
            Some(Self { name: one["name"].as_str()?.to_owned(), prompt: numbers(&one["ids"])?, tokens })
        };
        let all = file["prompts"].as_array().context("no prompts")?;
        let mut all: Vec<Self> = all.iter().map(prompt).collect::<Option<_>>().context("another form")?;
        all.retain(|golden| !golden.tokens.is_empty());
        all.sort_by_key(|golden| golden.prompt.len());
        all.truncate(prompts);
        Ok(all)
    }

    fn request(&self) -> v1::GenerateRequest {
        let mut request = ask(token_ids(self.prompt.clone()), self.tokens.len() as u32);
        request.ignore_eos = true;
        request
    }
}

#[tokio::test]
async fn golden_prompts_are_answered_over_two_gpus() -> anyhow::Result<()> {
    let Some(machine) = Machine::with(2)? else { return Ok(()) };
    let wanted = std::env::var_os("TANDEM_GPU_GOLDEN");
    let (prompts, tokens) = match wanted.as_ref().map(|text| text.to_string_lossy()) {
        None => GOLDEN,
        Some(text) => {
            let (prompts, tokens) = text.split_once(',').context("TANDEM_GPU_GOLDEN=prompts,tokens")?;
            (prompts.parse()?, tokens.parse()?)
        }
    };
    // Small steps and few blocks: most of a start is its warm-up.
    let mut cluster = Cluster::start(Options {
        node_args: words("--threads 1 --kv-blocks 24 --max-num-batched-tokens 16 --max-num-seqs 1"),
        // An emulated node takes half a minute to start: requests wait for the one in a killed one's place.
        router_args: words("--replan-ms 120000"),
        ..machine.options("--device cuda:0", "--device cuda:1")
    })
    .await?;
    let all = Golden::shortest(prompts, tokens)?;
    ensure!(all.len() == prompts, "there are {} such prompts", all.len());
    for golden in &all {
        let answer = cluster.answer(golden.request()).await?;
        let timings = answer.finish.timings.unwrap_or_default();
        println!("{}: {} tokens, {} bytes of KV", golden.name, answer.tokens.len(), timings.kv_bytes);
        assert_eq!(answer.tokens, golden.tokens, "{}", golden.name);
        assert!(timings.kv_bytes > 0, "{}: computed on one node", golden.name);
    }
    if wanted.is_some() {
        let longest = all.last().context("no prompt")?;
        assert_eq!(over_death_of_decode(&mut cluster, longest.request()).await?, longest.tokens);
        cluster.restart_prefill().await?;
        assert_eq!(over_death_of_prefill(&mut cluster, longest.request()).await?, longest.tokens);
    }
    cluster.idle(BACK).await?;
    Ok(())
}

#[tokio::test]
async fn a_node_on_the_processor_is_not_paired_with_one_on_a_gpu() -> anyhow::Result<()> {
    let Some(machine) = Machine::with(1)? else { return Ok(()) };
    let cluster = machine.cluster("--device cuda", "--device auto").await?;
    let view: Value = cluster.get("/debug/cluster").await?.json().await?;
    let nodes = view["nodes"].as_array().cloned().unwrap_or_default();
    assert!(nodes.len() == 2 && nodes.iter().all(|node| node["arithmetic"] == "mma-k4096"), "{view}");

    let mut flags = words("--listen 127.0.0.1:0 --admin 127.0.0.1:0 --threads 1 --node-id stranger");
    flags.extend(words(&format!("--model {} --router {}", tiny_model()?.display(), cluster.router.url("grpc"))));
    let stranger = Process::start("stranger", "tandem-decode-node", &flags, machine.dir.path()).await?;
    let told = |log: String| log.lines().find(|line| line.contains("no router, trying again")).map(str::to_owned);
    let refused = async |_: &Cluster| told(stranger.log()).is_some();
    cluster.wait_until(LONG, "the node on the processor is refused", refused).await?;
    let said = told(stranger.log()).unwrap_or_default();
    assert!(
        said.contains("computes in arithmetic") && said.contains("`mma-k4096`") && said.contains("--device"),
        "{said}"
    );
    assert_eq!(cluster.answer(request(20, 4)).await?.tokens.len(), 4, "the others go on");
    Ok(())
}

#[tokio::test]
async fn what_is_wrong_with_a_gpu_is_one_sentence() -> anyhow::Result<()> {
    let Some(mut machine) = Machine::with(1)? else { return Ok(()) };
    let model = tiny_model()?.display().to_string();
    let base = format!("--router http://127.0.0.1:1 --threads 1 --model {model} --kv-listen 127.0.0.1:0");
    // The driver alone: who compiles?
    let no_nvrtc = machine.dir.path().join("driver");
    std::fs::create_dir(&no_nvrtc)?;
    let libraries = tandem_cuda_emu::library_dir().context("it was built")?;
    for name in ["libcuda.so.1", "libcuda.so"] {
        std::os::unix::fs::symlink(libraries.join(name), no_nvrtc.join(name))?;
    }
    let no_nvrtc = no_nvrtc.display().to_string();
    let cases: [Case; 8] = [
        (&[("EMU_DEVICES", "0")], "--device cuda", "no GPU"),
        (&[("CUDA_VISIBLE_DEVICES", "")], "--device cuda", "no GPU"),
        (&[], "--device cuda:5", "there is no GPU 5"),
        (&[("EMU_ARCH", "75")], "--device cuda", "compute capability 7.5"),
        (&[("EMU_DRIVER_VERSION", "12020")], "--device cuda", "CUDA 12.2"),
        (&[("LD_LIBRARY_PATH", no_nvrtc.as_str())], "--device cuda", "no NVRTC"),
        (&[], "--device cuda --kv-dtype int8", "no int8 KV, only bf16"),
        (&[], "--device cuda --kv-blocks 100000000", "GiB"),
    ];
    let usual = machine.environment.clone();
    for (environment, flags, word) in cases {
        for (name, value) in environment {
            machine.set(name, *value);
        }
        let output = machine.run("tandem-decode-node", &words(&format!("{base} {flags}"))).await?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(output.status.code(), Some(1), "{environment:?} {flags}: {said}");
        assert!(errors.len() == 1 && errors[0].contains(word), "{environment:?} {flags}: {said}");
        assert!(!said.contains("panicked"), "{said}");
        machine.environment.clone_from(&usual);
    }
    Ok(())
}

#[tokio::test]
async fn the_tool_shares_gpus_out_and_the_doctor_lists_them() -> anyhow::Result<()> {
    let Some(mut machine) = Machine::with(2)? else { return Ok(()) };
    let model = tiny_model()?.display().to_string();
    let state = machine.dir.path().join("state.json").display().to_string();
    let logs = machine.dir.path().join("logs").display().to_string();
    let up = words(&format!(
        "--state {state} up --device auto --model {model} --log-dir {logs} --kv-blocks 64 --router-arg=--local-prefill=never"
    ));
    let environment: Vec<(&str, &str)> = machine.environment.iter().map(|(name, value)| (&**name, &**value)).collect();
    let mut tandem = Process::start_in_environment(&environment, "tandem", "tandem", &up, machine.dir.path()).await?;
    let said = tandem.log();
    assert!(
        said.contains("node prefill-0") && said.contains("device=cuda:0") && said.contains("device=cuda:1"),
        "{said}"
    );
    assert!(!said.contains("WARNING: UCX is not in use"), "KV of a GPU takes tcp: {said}");
    let generate = words(&format!("--state {state} generate --max-tokens 4 --ignore-eos hello"));
    let output = machine.run("tandem", &generate).await?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    tandem.terminate();
    assert!(tandem.ended(LONG).await?.success());

    let doctor = words(&format!("doctor --json --device cuda:1 --model {model}"));
    let output = machine.run("tandem", &doctor).await?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let cards = &report["facts"]["node"]["cuda"]["cards"];
    assert!(cards.as_array().is_some_and(|cards| cards.len() == 2) && cards[1]["capability"] == "9.0", "{report}");
    assert!(output.status.success(), "{report}");
    machine.set("EMU_DEVICES", "1");
    let output = machine.run("tandem", &doctor).await?;
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let findings = report["findings"].as_array().cloned().unwrap_or_default();
    let lacking: Vec<_> = findings.iter().filter(|finding| finding["level"] == "lacking").collect();
    assert!(
        lacking.len() == 1 && lacking[0]["what"].as_str().is_some_and(|what| what.contains("no cuda:1")),
        "{report}"
    );
    Ok(())
}
