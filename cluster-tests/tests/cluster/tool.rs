//! `tandem up`, `generate`, `chat`, `trace`: the commands as a person types them.
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use tandem_cluster_tests::cluster::{model, words};
use tandem_cluster_tests::process::{Process, READY_TIMEOUT, program, run_to_end};
use tandem_proto::v1;
use tokio::sync::Mutex;
use tokio_stream::wrappers::ReceiverStream;

/// These clusters are not the harness's; one at a time all the same.
pub(super) static TURN: Mutex<()> = Mutex::const_new(());
pub(super) const SOON: Duration = Duration::from_secs(60);

fn args(state: &Path, words: &[&str]) -> Vec<String> {
    let state = ["--state".to_owned(), state.display().to_string()];
    state.into_iter().chain(words.iter().map(|&word| word.to_owned())).collect()
}

pub(super) async fn said(state: &Path, words: &[&str]) -> anyhow::Result<(bool, String, String)> {
    let output = run_to_end("tandem", &args(state, words), SOON).await?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((output.status.success(), text(&output.stdout), text(&output.stderr)))
}

pub(super) async fn up(dir: &Path, more: &[&str]) -> anyhow::Result<Process> {
    let ports = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    start(dir, &[&ports[..], more].concat()).await
}

pub(super) async fn up_at_usual_ports(dir: &Path) -> anyhow::Result<Process> {
    start(dir, &["--simulated"]).await
}

async fn start(dir: &Path, more: &[&str]) -> anyhow::Result<Process> {
    let logs = dir.join("logs").display().to_string();
    let words = [&["up", "--log-dir", &logs][..], more].concat();
    Process::start("tandem", "tandem", &args(&dir.join("state.json"), &words), dir).await
}

/// Process ids of the children, from the state file.
fn children(dir: &Path) -> anyhow::Result<Vec<u64>> {
    let state: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("state.json"))?)?;
    let processes = state["processes"].as_array().cloned().unwrap_or_default();
    Ok(processes.iter().filter_map(|process| process[1].as_u64()).collect())
}

/// Ended, whether or not somebody has taken note of it.
fn is_gone(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_none_or(|rest| rest.is_empty() || rest.starts_with(['Z', 'X']))
}

async fn all_gone(pids: &[u64]) -> bool {
    for _ in 0..300 {
        if pids.iter().all(|&pid| is_gone(pid)) {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    false
}

#[tokio::test]
async fn an_aggregated_cluster_is_one_flag_away() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let mut tandem = up(dir.path(), &["--simulated", "--aggregated"]).await?;
    let state = dir.path().join("state.json");
    assert_eq!(children(dir.path())?.len(), 3, "a router and as many nodes as without the flag");
    let (ok, _, figures) = said(&state, &["generate", "--max-tokens", "8", "--ignore-eos", "Hello"]).await?;
    assert!(ok, "{figures}");
    let (ok, drawn, error) = said(&state, &["trace", "last"]).await?;
    assert!(ok && drawn.contains("local: one node computed the prompt and the answer"), "{drawn}{error}");
    assert!(!drawn.contains("transfer") && !drawn.contains("kv."), "{drawn}");
    tandem.terminate();
    assert!(tandem.ended(SOON).await?.success());
    Ok(())
}

#[tokio::test]
async fn simulated_nodes_serve_in_the_name_of_the_model() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let mut tandem = up(dir.path(), &["--simulated"]).await?;
    let (ok, _, figures) = said(&dir.path().join("state.json"), &["generate", "--max-tokens", "8", "Hello"]).await?;
    assert!(ok && figures.contains("TTFT"), "{figures}");
    tandem.terminate();
    assert!(tandem.ended(SOON).await?.success());
    Ok(())
}

#[tokio::test]
async fn up_generate_chat_trace_and_a_clean_end() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let state = dir.path().join("state.json");
    // A short prompt may as well be computed where it is answered.
    let mut tandem = up(dir.path(), &["--router-arg=--local-prefill=never"]).await?;
    assert!(tandem.log().contains("transport=ucx/"), "{}", tandem.log());

    let (ok, out, figures) = said(&state, &["generate", "--max-tokens", "8", "The capital of France is"]).await?;
    assert!(ok && out.contains("Paris") && figures.contains("TTFT"), "{out}{figures}");
    let (ok, out, figures) = said(&state, &["chat", "--max-tokens", "8", "Say hello."]).await?;
    assert!(ok && !out.trim().is_empty(), "{out}{figures}");
    let (ok, out, errors) = said(&state, &["trace", "last"]).await?;
    for part in ["kv.transfer", "TTFT", "prefill", "% of TTFT", "GB/s", "ucx/"] {
        assert!(ok && out.contains(part), "no {part:?} in\n{out}{errors}");
    }
    let (ok, _, errors) = said(&state, &["trace", "00000000000000000000000000000001"]).await?;
    assert!(!ok && errors.contains("404"), "{errors}");

    let pids = children(dir.path())?;
    assert_eq!(pids.len(), 3);
    tandem.terminate();
    let status = tandem.ended(SOON).await?;
    assert!(status.success(), "{status}");
    assert!(all_gone(&pids).await && !state.exists());
    let (ok, _, errors) = said(&state, &["generate", "hello"]).await?;
    assert!(!ok && errors.contains("tandem up"), "{errors}");
    Ok(())
}

#[tokio::test]
async fn a_second_up_with_the_same_state_file_refuses_and_touches_nothing() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let state = dir.path().join("state.json");
    let mut first = up(dir.path(), &["--simulated"]).await?;
    let published = std::fs::read(&state)?;
    let token = token_file(&state)?;
    let secret = std::fs::read_to_string(&token)?;

    let logs = dir.path().join("other").display().to_string();
    let (ok, _, errors) = said(&state, &["up", "--simulated", "--log-dir", &logs]).await?;
    assert!(!ok && errors.contains(&format!("a cluster runs already, pid {}, http://", first.pid())), "{errors}");
    assert!(errors.contains("--state FILE"), "{errors}");
    assert_eq!(std::fs::read(&state)?, published);
    assert_eq!(std::fs::read_to_string(&token)?, secret);
    assert!(!dir.path().join("other").exists(), "it started something");
    let (ok, _, figures) = said(&state, &["generate", "--max-tokens", "4", "Hello"]).await?;
    assert!(ok, "{figures}");

    // What a killed one leaves behind holds nobody up.
    first.kill();
    let mut second = up(dir.path(), &["--simulated"]).await?;
    assert_ne!(std::fs::read(&state)?, published);
    second.terminate();
    assert!(second.ended(SOON).await?.success() && !state.exists());
    assert!(!token.exists(), "the token is left behind");
    Ok(())
}

fn token_file(state: &Path) -> anyhow::Result<PathBuf> {
    let state: serde_json::Value = serde_json::from_slice(&std::fs::read(state)?)?;
    Ok(state["join_token_file"].as_str().unwrap_or_default().into())
}

/// As `tandem … | true`, or `2>` the same: exit status, and what came out of the other one.
async fn without_a_reader(state: &Path, words: &[&str], errors_too: bool) -> anyhow::Result<(Option<i32>, String)> {
    let closed = || std::io::pipe().map(|(_, writer)| writer);
    let mut command = tokio::process::Command::new(program("tandem")?);
    command.args(args(state, words)).stdin(Stdio::null()).stdout(closed()?).stderr(Stdio::piped()).kill_on_drop(true);
    if errors_too {
        command.stderr(closed()?);
    }
    let output = tokio::time::timeout(SOON, command.spawn()?.wait_with_output()).await??;
    Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[tokio::test]
async fn commands_end_quietly_when_nobody_reads_them() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let state = dir.path().join("state.json");
    let _tandem = up(dir.path(), &["--simulated"]).await?;
    let (ok, _, figures) = said(&state, &["generate", "--max-tokens", "4", "Hello"]).await?;
    assert!(ok, "{figures}");
    let json = dir.path().join("bench.json").display().to_string();
    let bench = ["bench", "--input", "16", "--output", "4", "--requests", "2", "--warmup", "0", "--json", &json];
    for words in [&["trace", "last"][..], &["explain", "last"], &["generate", "Hello"], &["chat", "Hello"], &bench] {
        let (code, errors) = without_a_reader(&state, words, false).await?;
        assert_eq!(code, Some(141), "{words:?}: {errors}");
        assert!(!errors.contains("panicked") && !errors.contains("tandem: "), "{words:?}: {errors}");
        assert_eq!(without_a_reader(&state, words, true).await?.0, Some(141), "{words:?}");
    }
    assert!(Path::new(&json).is_file(), "the files of a report do not depend on who reads it");
    Ok(())
}

#[tokio::test]
async fn a_log_that_cannot_be_written_stops_no_process() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let logs = dir.path().join("logs");
    std::fs::create_dir(&logs)?;
    for name in ["router", "prefill-0", "decode-0"] {
        std::os::unix::fs::symlink("/dev/full", logs.join(format!("{name}.log")))?;
    }
    let mut tandem = up(dir.path(), &["--simulated"]).await?;
    let (ok, _, figures) = said(&dir.path().join("state.json"), &["generate", "--max-tokens", "4", "Hello"]).await?;
    assert!(ok, "{figures}");
    tandem.terminate();
    assert!(tandem.ended(SOON).await?.success(), "{}", tandem.log());
    assert!(!tandem.log().contains("died"), "{}", tandem.log());

    // An error at the start that nobody could read in the log.
    let logs = logs.display().to_string();
    let words = ["up", "--simulated", "--log-dir", &logs, "--decode-arg=--no-such-flag"];
    let (ok, _, errors) = said(&dir.path().join("state.json"), &words).await?;
    assert!(!ok && errors.contains("exit status: 2"), "{errors}");
    assert!(errors.contains("decode-0.log could not be written: No space left on device"), "{errors}");
    Ok(())
}

/// A file system of its own.
struct TinyDisk(tempfile::TempDir);

impl TinyDisk {
    /// `None`: mounting is for root.
    fn mount(options: &str) -> anyhow::Result<Option<Self>> {
        let dir = tempfile::tempdir()?;
        let mut mount = std::process::Command::new("mount");
        let mounted = mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(dir.path()).output();
        Ok(mounted.is_ok_and(|output| output.status.success()).then_some(Self(dir)))
    }
}

impl Drop for TinyDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).status();
    }
}

#[tokio::test]
async fn a_full_disk_is_named_at_the_start() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let Some(disk) = TinyDisk::mount("size=64k")? else {
        eprintln!("skipped: no right to mount a tmpfs");
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    // 4 KiB are left.
    std::fs::write(disk.0.path().join("data"), vec![0; 60 << 10])?;
    let logs = disk.0.path().display().to_string();
    let state = dir.path().join("state.json");
    let (ok, _, errors) = said(&state, &["up", "--simulated", "--log-dir", &logs]).await?;
    assert!(!ok && errors.contains(&format!("no log can be written in {logs}")), "{errors}");
    assert!(errors.contains("No space left on device") && errors.contains("--log-dir"), "{errors}");
    Ok(())
}

#[tokio::test]
async fn a_cluster_with_api_keys_is_one_flag_away() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let keys = dir.path().join("keys.json");
    std::fs::write(&keys, r#"{"keys": [{"name": "alice", "key": "sk-alice-0123456789abcdef"}]}"#)?;
    let keys = keys.display().to_string();
    let mut tandem = up(dir.path(), &["--simulated", "--restart", "--api-keys", &keys]).await?;
    let tandem_ready = (tandem.url("http"), tandem.url("grpc"));
    // A router that is started again has its nodes again.
    let router = children(dir.path())?[0];
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(router.try_into()?), nix::sys::signal::Signal::SIGKILL)?;
    let health = format!("{}/health", tandem_ready.0);
    let mut healthy = false;
    for _ in 0..600 {
        healthy = tandem.log().contains("router runs again")
            && reqwest::get(&health).await.is_ok_and(|answer| answer.status().is_success());
        if healthy {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(healthy, "{}", tandem.log());
    let state = dir.path().join("state.json");
    let (ok, _, errors) = said(&state, &["generate", "--max-tokens", "4", "Hello"]).await?;
    assert!(!ok && errors.contains("Unauthenticated"), "{errors}");
    for command in ["generate", "chat"] {
        let words = [command, "--api-key", "sk-alice-0123456789abcdef", "--max-tokens", "4", "Hello"];
        let (ok, _, errors) = said(&state, &words).await?;
        assert!(ok, "{errors}");
        let words = [command, "--api-key", "sk-\n", "Hello"];
        let (ok, _, errors) = said(&state, &words).await?;
        assert!(!ok && errors.contains("--api-key has characters"), "{errors}");
    }
    tandem.terminate();
    assert!(tandem.ended(SOON).await?.success(), "{}", tandem.log());
    Ok(())
}

#[tokio::test]
async fn up_gives_its_cluster_a_secret() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let mut tandem = up(dir.path(), &["--simulated"]).await?;
    let cluster: serde_json::Value =
        reqwest::get(format!("{}/debug/cluster", tandem.url("http"))).await?.json().await?;
    let nodes = cluster["nodes"].as_array().cloned().unwrap_or_default();
    assert_eq!(nodes.len(), 2, "{cluster}");
    for node in nodes {
        let endpoint = node["endpoint"].as_str().unwrap_or_default().to_owned();
        let (_open, silent) = tokio::sync::mpsc::channel::<v1::PrefillCommand>(1);
        let (_open, also_silent) = tokio::sync::mpsc::channel::<v1::DecodeCommand>(1);
        let status = if node["role"] == "prefill" {
            let mut client = v1::prefill_client::PrefillClient::connect(endpoint).await?;
            tokio::time::timeout(SOON, client.prefill(ReceiverStream::new(silent))).await?.err()
        } else {
            let mut client = v1::decode_client::DecodeClient::connect(endpoint).await?;
            tokio::time::timeout(SOON, client.generate(ReceiverStream::new(also_silent))).await?.err()
        };
        assert_eq!(status.map(|status| status.code()), Some(tonic::Code::Unauthenticated), "{node}");
    }
    let mut membership = v1::membership_client::MembershipClient::connect(tandem.url("grpc")).await?;
    let (_open, silent) = tokio::sync::mpsc::channel(1);
    let status = tokio::time::timeout(SOON, membership.join(ReceiverStream::new(silent))).await?.err();
    assert_eq!(status.map(|status| status.code()), Some(tonic::Code::Unauthenticated));
    tandem.terminate();
    assert!(tandem.ended(SOON).await?.success(), "{}", tandem.log());
    Ok(())
}

/// Ctrl-C with answers under way: a stream ends in an error event, a whole answer in a 503.
#[tokio::test]
async fn an_end_by_signal_tells_clients_whose_answers_run() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let slow = ["--simulated", "--grace", "1", "--decode-arg=--simulated-step-us=50000"];
    let mut tandem = up(dir.path(), &slow).await?;
    let ask = |stream: bool| {
        let body = format!(r#"{{"prompt": "a", "max_tokens": 1000, "ignore_eos": true, "stream": {stream}}}"#);
        let request = reqwest::Client::new().post(format!("{}/v1/completions", tandem.url("http")));
        request.header("content-type", "application/json").body(body).send()
    };
    let mut streamed = ask(true).await?;
    let begun = streamed.chunk().await?.expect("a first chunk");
    let whole = tokio::spawn(ask(false));
    let metrics = format!("{}/metrics", tandem.url("http"));
    let both = async {
        loop {
            let text = reqwest::get(&metrics).await?.text().await?;
            let running = text.lines().find(|line| line.starts_with("vllm:num_requests_running{"));
            if running.is_some_and(|line| line.ends_with(" 2")) {
                return anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, both).await??;
    tandem.terminate();
    let mut said = String::from_utf8_lossy(&begun).into_owned();
    while let Some(chunk) = streamed.chunk().await? {
        said.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(said.contains("data: {\"error\"") && said.contains("the router is shutting down"), "{said}");
    assert!(!said.contains("[DONE]"), "{said}");
    let whole = whole.await??;
    assert_eq!(whole.status().as_u16(), 503);
    assert!(whole.text().await?.contains("the router is shutting down"));
    assert!(tandem.ended(SOON).await?.success(), "{}", tandem.log());
    Ok(())
}

#[tokio::test]
async fn a_node_at_the_wrong_port_says_why_it_cannot_join() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let model = ["--model".to_owned(), model()?.display().to_string()];
    let ports = words("--http 127.0.0.1:0 --grpc 127.0.0.1:0 --nodes 127.0.0.1:0");
    let router = Process::start("router", "tandem-router", &[&ports, &model[..]].concat(), dir.path()).await?;
    let reasons = [("grpc", "a router with --nodes"), ("http", "this port speaks HTTP, not gRPC")];
    for (port, reason) in reasons {
        let flags =
            words("--listen 127.0.0.1:0 --admin 127.0.0.1:0 --transport tcp --simulated --kv-blocks 64 --router");
        let flags = [&flags[..], &[router.url(port)], &model].concat();
        let node = Process::start(port, "tandem-decode-node", &flags, dir.path()).await?;
        let said = async || {
            while !node.log().contains("no router, trying again") {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(SOON, said()).await?;
        assert!(node.log().contains(reason), "{}", node.log());
    }
    Ok(())
}

#[tokio::test]
async fn children_die_with_a_killed_tandem() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let mut tandem = up(dir.path(), &["--decode", "2"]).await?;
    let pids = children(dir.path())?;
    assert_eq!(pids.len(), 4);
    tandem.kill();
    assert!(all_gone(&pids).await, "children survive");
    Ok(())
}

#[tokio::test]
async fn a_dead_node_is_restarted_when_that_is_wanted() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let state = dir.path().join("state.json");
    let tandem = up(dir.path(), &["--restart"]).await?;
    let decode = children(dir.path())?[2];
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(decode.try_into()?), nix::sys::signal::Signal::SIGKILL)?;
    let start = Instant::now();
    while start.elapsed() < READY_TIMEOUT {
        if tandem.log().contains("decode-0 runs again")
            && said(&state, &["generate", "--max-tokens", "4", "hi"]).await?.0
        {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("not restarted:\n{}", tandem.log())
}
