//! Flags from a file and the environment, with the real programs: who wins, what `--check` says, what SIGHUP changes,
//! and one file for `tandem up` and all its processes.
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use tandem_cluster_tests::cluster::{free_port, model, words};
use tandem_cluster_tests::process::{Process, run_to_end};
use tokio::time::{Instant, sleep};

use crate::reach::certificates;
use crate::tool::{SOON, TURN, said, up};

/// For a file in this directory, with MODEL and the like replaced.
fn file(dir: &Path, text: &str) -> anyhow::Result<String> {
    let path = dir.join("tandem.toml");
    let text = text.replace("MODEL", &model()?.display().to_string()).replace("DIR", &dir.display().to_string());
    std::fs::write(&path, text)?;
    Ok(path.display().to_string())
}

async fn check(program: &str, config: &str, flags: &str) -> anyhow::Result<Output> {
    run_to_end(program, &[words("--check --config"), vec![config.to_owned()], words(flags)].concat(), SOON).await
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

async fn until(what: &str, holds: impl AsyncFn() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let deadline = Instant::now() + SOON;
    while !holds().await? {
        anyhow::ensure!(Instant::now() < deadline, "not in time: {what}");
        sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

async fn json(url: &str) -> anyhow::Result<serde_json::Value> {
    Ok(reqwest::get(url).await?.json().await?)
}

const CLUSTER: &str = "
model = 'MODEL'
log-format = 'json'
[router]
http = '127.0.0.1:0'
grpc = '127.0.0.1:0'
served-model-name = 'of-the-file'
max-queue = 7
max-inflight = 9
[node]
listen = '127.0.0.1:0'
admin = '127.0.0.1:0'
transport = ['tcp']
kv-blocks = 64
simulated = true
[prefill]
node-id = 'prefill-of-the-file'
[decode]
node-id = 'decode-of-the-file'
kv-blocks = 96
";

#[tokio::test]
async fn one_file_serves_a_cluster_and_flags_and_variables_win_over_it() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let config = file(dir.path(), CLUSTER)?;
    let environment = [("TANDEM_ROUTER_SERVED_MODEL_NAME", "of-the-environment"), ("TANDEM_ROUTER_CONFIG", &config)];
    let threads = words("--threads 1");
    let router = Process::start_in_environment(&environment, "router", "tandem-router", &threads, dir.path()).await?;
    let flags = [words("--config"), vec![config.clone(), "--router".to_owned(), router.url("grpc")]].concat();
    let _prefill = Process::start("prefill", "tandem-prefill-node", &flags, dir.path()).await?;
    let named = [flags, words("--node-id decode-of-the-line")].concat();
    let _decode = Process::start("decode", "tandem-decode-node", &named, dir.path()).await?;

    let http = router.url("http");
    until("both nodes have joined", async || {
        let cluster = json(&format!("{http}/debug/cluster")).await?;
        Ok(cluster["nodes"].as_array().is_some_and(|nodes| nodes.len() == 2))
    })
    .await?;
    let cluster = json(&format!("{http}/debug/cluster")).await?.to_string();
    assert!(cluster.contains("prefill-of-the-file") && cluster.contains("decode-of-the-line"), "{cluster}");
    assert!(cluster.contains("64") && cluster.contains("96"), "blocks of both: {cluster}");
    let models = json(&format!("{http}/v1/models")).await?;
    assert_eq!(models["data"][0]["id"], "of-the-environment");
    assert!(router.log().lines().any(|line| line.starts_with("{\"")), "log lines are JSON: {}", router.log());
    Ok(())
}

#[tokio::test]
async fn a_check_says_where_each_value_is_from_and_starts_nothing() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let config = file(dir.path(), &CLUSTER.replace("[router]\nhttp = '127.0.0.1:0'", "[router]\nhttp = 'ADDRESS'"))?;
    // A port in use is no matter of a check.
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    std::fs::write(&config, std::fs::read_to_string(&config)?.replace("ADDRESS", &address))?;

    let output = check("tandem-router", &config, "--max-queue 8").await?;
    let report = text(&output.stdout);
    assert!(output.status.success() && !report.contains("ready"), "{}{report}", text(&output.stderr));
    for line in [
        format!("http = \"{address}\"  # {config}:5"),
        "max-queue = 8  # command line".to_owned(),
        format!("max-inflight = 9  # {config}:9"),
        "# lease-ms = 3000  # default".to_owned(),
        "# api-keys: not set".to_owned(),
    ] {
        assert!(report.lines().any(|of| of == line), "no {line:?} in\n{report}");
    }
    for program in ["tandem-prefill-node", "tandem-decode-node"] {
        let output = check(program, &config, "--router http://127.0.0.1:1").await?;
        let report = text(&output.stdout);
        assert!(output.status.success(), "{program}: {}{report}", text(&output.stderr));
        assert!(report.contains("transport = [\"tcp\"]  # ") && report.contains("-of-the-file\"  # "), "{report}");
    }
    // With weights, without reading them.
    let real = std::fs::read_to_string(&config)?.replace("simulated = true", "");
    std::fs::write(&config, real)?;
    let output = check("tandem-decode-node", &config, "--router http://127.0.0.1:1").await?;
    assert!(output.status.success(), "{}", text(&output.stderr));
    Ok(())
}

#[tokio::test]
async fn a_wrong_file_is_refused_by_name_and_line() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("keys.json"), "{}")?;
    std::fs::write(dir.path().join("short"), "short")?;
    std::fs::write(dir.path().join("text.gguf"), "this is not a model")?;
    let nodes = "nodes = '127.0.0.1:0'\n";
    for (program, line, code, said) in [
        ("tandem-router", "max_queue = 1".to_owned(), 2, "tandem.toml:3: `max_queue` is no flag of tandem-router"),
        ("tandem-router", "max-queue = 'many'".to_owned(), 2, "tandem.toml:3: `max-queue` wants a number"),
        ("tandem-router", "lease-ms = 1".to_owned(), 2, "tandem.toml:3: this is where --lease-ms is from"),
        ("tandem-router", "kv-blocks = 1".to_owned(), 2, "tandem.toml:3: `kv-blocks` is no flag of tandem-router"),
        ("tandem-router", "http = ".to_owned(), 2, "tandem.toml:3: "),
        ("tandem-router", format!("{nodes}api-keys = 'DIR/keys.json'"), 1, "keys.json: missing field"),
        ("tandem-router", "join-token-file = 'DIR/short'".to_owned(), 1, "/short: a join token is"),
        ("tandem-router", format!("{nodes}tls-cert = 'DIR/c'\ntls-key = 'DIR/k'"), 1, "/c: No such file"),
        ("tandem-router", "otlp-endpoint = 'http://a b'".to_owned(), 1, "\"http://a b\" is not usable"),
        ("tandem-decode-node", "kv-blocks = 0".to_owned(), 2, "tandem.toml:3: this is where --kv-blocks is from"),
        ("tandem-decode-node", "router = ['h:1']".to_owned(), 1, "http://host:port"),
        ("tandem-prefill-node", "handoff-lease-ms = 1".to_owned(), 2, "tandem.toml:3: `handoff-lease-ms` is no flag"),
    ] {
        let table = if program == "tandem-router" { "router" } else { "node" };
        let config = file(dir.path(), &format!("model = 'MODEL'\n[{table}]\n{line}\n"))?;
        let router = if line.contains("router = ") || table == "router" { "" } else { "--router http://127.0.0.1:1" };
        let output = check(program, &config, router).await?;
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
        assert!(errors.contains(said), "{line}: {errors}");
        let start = run_to_end(program, &[words("--config"), vec![config], words(router)].concat(), SOON).await?;
        assert!(code == 1 || text(&start.stderr) == errors, "a start says the same: {}", text(&start.stderr));
    }
    for program in ["tandem-router", "tandem-decode-node"] {
        let config = file(dir.path(), "model = 'DIR/text.gguf'\n[node]\nrouter = ['http://127.0.0.1:1']\n")?;
        let output = check(program, &config, "").await?;
        assert!(output.status.code() == Some(1) && text(&output.stderr).contains("text.gguf"), "{output:?}");
        let output = check(program, "/nowhere/tandem.toml", "").await?;
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("--config /nowhere/tandem.toml: No such file"), "{output:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_hangup_brings_new_keys_and_certificates_and_names_what_takes_a_restart() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let (dir, next) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let (now, then) = (certificates(dir.path())?, certificates(next.path())?);
    let keys = dir.path().join("keys.json");
    let write_key = |key: &str| std::fs::write(&keys, format!(r#"{{"keys": [{{"name": "alice", "key": "{key}"}}]}}"#));
    write_key("sk-alice-0123456789abcdef-1")?;
    let text = "model = 'MODEL'\n[router]\nhttp = '127.0.0.1:0'\ngrpc = '127.0.0.1:0'\nnodes = '127.0.0.1:0'\n\
                api-keys = 'DIR/keys.json'\ntls-cert = 'DIR/server.pem'\ntls-key = 'DIR/server.key'\n";
    let config = file(dir.path(), &format!("{text}max-queue = 7\n"))?;
    let flags = [words("--config"), vec![config]].concat();
    let mut router = Process::start("router", "tandem-router", &flags, dir.path()).await?;
    let state = dir.path().join("no-state.json");
    // Nobody serves, but who may ask is known first.
    let answer = async |key: &str, ca: &str| {
        let url = router.url("http");
        let words = ["generate", "--url", &url, "--api-key", key, "--tls-ca", ca, "--timeout", "1", "hi"];
        said(&state, &words).await.map(|(_, _, errors)| errors)
    };
    let (stranger, untrusted) = ("Unauthenticated", "no router answers");
    let refused = |errors: &str| errors.contains(stranger) || errors.contains(untrusted);
    assert!(
        !refused(&answer("sk-alice-0123456789abcdef-1", &now.ca).await?),
        "{}",
        answer("sk-alice-0123456789abcdef-1", &now.ca).await?
    );
    assert!(answer("sk-alice-0123456789abcdef-2", &now.ca).await?.contains(stranger));
    assert!(answer("sk-alice-0123456789abcdef-1", &then.ca).await?.contains(untrusted));

    write_key("sk-alice-0123456789abcdef-2")?;
    std::fs::copy(&then.server.0, &now.server.0)?;
    std::fs::copy(&then.server.1, &now.server.1)?;
    file(dir.path(), &format!("{text}max-queue = 8\nlease-ms = 1000\n"))?;
    router.hang_up();
    let (restart, at_once) = ("this takes a restart", "this holds from now on");
    let changed = |flag: &str, how: &str| {
        let named = format!("flag=\"{flag}\"");
        router.log().lines().any(|line| line.contains(how) && line.contains(&named))
    };
    let read_again = async || Ok(changed("max-queue", at_once) && changed("lease-ms", restart));
    until("the file is read again", read_again).await?;
    assert_eq!(router.log().matches(restart).count(), 1, "{}", router.log());
    assert!(
        !refused(&answer("sk-alice-0123456789abcdef-2", &then.ca).await?),
        "{}",
        answer("sk-alice-0123456789abcdef-2", &then.ca).await?
    );
    assert!(answer("sk-alice-0123456789abcdef-1", &then.ca).await?.contains(stranger));

    // What is wrong changes nothing.
    write_key("short")?;
    std::fs::write(&now.server.0, "no certificate")?;
    file(dir.path(), "[router\n")?;
    router.hang_up();
    let said = [
        "the configuration file would not start a router",
        "tandem.toml:1",
        "the old API keys stay",
        "the old certificates stay",
    ];
    until("the files are refused", async || Ok(said.iter().all(|words| router.log().contains(words)))).await?;
    assert!(
        !refused(&answer("sk-alice-0123456789abcdef-2", &then.ca).await?),
        "{}",
        answer("sk-alice-0123456789abcdef-2", &then.ca).await?
    );
    assert!(router.is_alive());
    Ok(())
}

#[tokio::test]
async fn tandem_up_gives_one_file_to_all_its_processes() -> anyhow::Result<()> {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir()?;
    let text = "[up]\nprefill = 1\ndecode = 2\nsimulated = true\nno-pin = true\nmodel = 'MODEL'\n\
                [router]\nserved-model-name = 'of-the-file'\n[node]\nkv-blocks = 64\n[decode]\nkv-blocks = 96\n";
    let config = file(dir.path(), text)?;
    let state = dir.path().join("state.json");
    let (ok, report, errors) = said(&state, &["up", "--config", &config, "--check"]).await?;
    assert!(ok && !state.exists(), "{report}{errors}");
    for line in [
        "[up]",
        "[router]",
        "[prefill]",
        "[decode]",
        &format!("decode = 2  # {config}:3"),
        &format!("served-model-name = \"of-the-file\"  # {config}:8"),
        &format!("kv-blocks = 64  # {config}:10"),
        &format!("kv-blocks = 96  # {config}:12"),
    ] {
        assert!(report.lines().any(|of| of == line), "no {line:?} in\n{report}");
    }

    let tandem = up(dir.path(), &["--config", &config]).await?;
    let cluster = json(&format!("{}/debug/cluster", tandem.url("http"))).await?;
    let blocks = |node: &serde_json::Value| node["total_blocks"].as_u64().unwrap_or_default();
    let mut blocks: Vec<u64> = cluster["nodes"].as_array().into_iter().flatten().map(blocks).collect();
    blocks.sort_unstable();
    assert_eq!(blocks, [64, 96, 96], "{cluster}");
    let models = json(&format!("{}/v1/models", tandem.url("http"))).await?;
    assert_eq!(models["data"][0]["id"], "of-the-file");
    drop(tandem);

    // What would have no effect is not taken in silence.
    let port = free_port()?;
    let config = file(dir.path(), &format!("{text}[prefill]\nnode-id = 'mine'\n"))?;
    let (ok, _, errors) = said(&state, &["up", "--config", &config]).await?;
    assert!(!ok && errors.contains("tandem.toml:14: `tandem up` gives --node-id to tandem-prefill-node"), "{errors}");
    let config = file(dir.path(), &text.replace("[node]", &format!("http = '127.0.0.1:{port}'\n[node]")))?;
    let (ok, _, errors) = said(&state, &["up", "--config", &config]).await?;
    assert!(!ok && errors.contains("tandem.toml:9: `tandem up` gives --http to tandem-router"), "{errors}");
    // And what a child refuses is the check's answer.
    let config = file(dir.path(), &text.replace("kv-blocks = 96", "kv-blocks = 0"))?;
    let (ok, _, errors) = said(&state, &["up", "--config", &config, "--check"]).await?;
    assert!(!ok && errors.contains("tandem.toml:12") && errors.contains("would not start"), "{errors}");
    Ok(())
}
