//! From the command line to what can be measured: connections, the servers' own word about themselves, words that they
//! count right, rows that fit their context. Asks; measures nothing.
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tandem_client::wrong_port;

use super::calibrate::{Calibrated, Question};
use super::client::grpc::GrpcClient;
use super::client::http::{self, Dialect, HttpClient};
use super::client::{self, Client};
use super::cost_model::Model;
use super::job::{Api, Asking, Endpoint, Run, What};
use super::machine;
use super::record::RunInfo;
use super::runner::{Form, Target};
use super::seed;
use super::server::{Cluster, Facts, Server};
use super::session::Row;
use super::trace::{self, Selection, Trace};
use super::workload::{Lengths, Mix, Shape, Workload};

/// A server that can be measured.
pub struct Connected {
    /// To be measured.
    pub target: Target,
    /// Its HTTP side, where it has one.
    pub server: Option<Server>,
    /// What it says of itself.
    pub facts: Facts,
    /// Its nodes, where it tells.
    pub cluster: Cluster,
    /// For the user.
    pub notes: Vec<String>,
}

/// Connects to one server and finds out how to ask it.
///
/// # Errors
/// Nobody there, or nobody who answers a request.
pub async fn connect(endpoint: &Endpoint, asking: &Asking, timeout: Duration) -> anyhow::Result<Connected> {
    let url = endpoint.http.as_deref().unwrap_or_default();
    let connections = http::connections(asking.headers.http()?, &asking.tls, url)?;
    let server = endpoint.http.as_ref().map(|url| Server::new(connections.clone(), url));
    let (facts, cluster) = match &server {
        Some(server) => (server.facts(asking.model.as_deref()).await?, server.cluster().await),
        None => (unknown(asking), Cluster::default()),
    };
    let how = client::Asking { model: facts.model.clone(), ignore_eos: asking.ignore_eos, timeout };
    let over_http = |url: &str, api| {
        let http = HttpClient::new(connections.clone(), url, (api, facts.dialect), how.clone(), asking.extra.clone());
        Client::Http(http)
    };
    let client = match &endpoint.api {
        Api::Grpc(url) => {
            let metadata = asking.headers.grpc()?;
            Client::Grpc(GrpcClient::connect(url, &asking.tls, asking.connections, metadata, how).await?)
        }
        Api::Completions(url) => over_http(url, http::Api::Completions),
        Api::Chat(url) => over_http(url, http::Api::Chat),
    };
    let in_chat = matches!(endpoint.api, Api::Chat(_));
    let question = Question { server: server.as_ref(), client: &client, model: &facts.model, in_chat, timeout };
    let Calibrated { vocabulary, note } = match question.vocabulary().await {
        Ok(calibrated) => calibrated,
        Err(error) => {
            let hint = match &endpoint.api {
                Api::Grpc(url) => wrong_port::hint(url, None).await,
                Api::Completions(_) | Api::Chat(_) => None,
            };
            return Err(error).context(hint.unwrap_or_else(|| format!("cannot measure {}", endpoint.name)));
        }
    };
    let can_send_ids = vocabulary.has_ids() && !in_chat;
    let form = match asking.form {
        Some(Form::Ids) if !can_send_ids => {
            bail!("--prompt ids: {} has no tokenizer to ask, or takes no ids", endpoint.name)
        }
        Some(form) => form,
        None if can_send_ids && matches!(endpoint.api, Api::Grpc(_)) => Form::Ids,
        None => Form::Text,
    };
    let notes = note.into_iter().map(|note| format!("{}: {note}", endpoint.name)).collect();
    let target = Target { client, vocabulary: Arc::new(vocabulary), form };
    Ok(Connected { target, server, facts, cluster, notes })
}

/// A gRPC server alone says nothing of itself.
fn unknown(asking: &Asking) -> Facts {
    Facts { model: asking.model.clone().unwrap_or_default(), context_tokens: None, dialect: Dialect::Tandem }
}

/// The rows that the user wants, cut to the context that all servers have.
///
/// # Errors
/// A trace that cannot be used.
pub fn rows(run: &Run, servers: &[Connected], notes: &mut Vec<String>) -> anyhow::Result<Vec<Row>> {
    let context_tokens = servers.iter().filter_map(|server| server.facts.context_tokens).min();
    let mut rows = Vec::new();
    for plan in &run.rows {
        let mut workload = match &plan.what {
            What::Matrix(row) => {
                notes.push(format!("row {}: {}", row.name, row.about));
                row.workload()
            }
            What::Own(name, shape) => Workload { name: name.clone(), mix: Mix::Shapes(vec![(1.0, *shape)]) },
            What::Trace => {
                let trace = trace_of(run, context_tokens, notes)?;
                Workload { name: super::rows::TRACE_ROW.to_owned(), mix: Mix::Trace(Arc::new(trace)) }
            }
        };
        if let Some(most) = context_tokens.filter(|most| workload.longest_tokens() > *most) {
            notes.push(format!("row {}: lengths are cut to the model's context of {most} tokens", workload.name));
            fit(&mut workload, most);
        }
        rows.push(Row { workload: Arc::new(workload), loads: plan.loads.clone() });
    }
    Ok(rows)
}

/// Traces are cut when they are made.
fn fit(workload: &mut Workload, most_tokens: u32) {
    let Mix::Shapes(shapes) = &mut workload.mix else { return };
    for (_, Shape { input, output, .. }) in shapes {
        *output = output.capped((most_tokens / 2).max(output.low.min(most_tokens.saturating_sub(1))).max(1));
        let room = most_tokens.saturating_sub(output.high).max(1);
        *input = Lengths { low: input.low.min(room), high: input.high.min(room) };
    }
}

fn trace_of(run: &Run, context_tokens: Option<u32>, notes: &mut Vec<String>) -> anyhow::Result<Trace> {
    let choice = &run.trace;
    let recorded = match &choice.file {
        Some(path) => trace::read(path)?,
        None => {
            // What is left out at the beginning has to be made too: some 3.4 requests a second.
            let skipped = (choice.from_s * 4.0) as usize;
            trace::synthetic::generate(run.seed, choice.requests.saturating_add(skipped).min(trace::MAX_REQUESTS))
        }
    };
    let selection = Selection {
        scale: choice.scale,
        speed: choice.speed,
        from_s: choice.from_s,
        requests: choice.requests,
        most_tokens: context_tokens.unwrap_or(u32::MAX),
        seed: run.seed,
    };
    let trace = trace::prepare(recorded, &selection)?;
    let from = choice.file.as_ref().map_or("made from the seed".to_owned(), |path| path.display().to_string());
    let tokens: u64 = trace.requests.iter().map(|request| u64::from(request.input_tokens)).sum();
    notes.push(format!(
        "row F ({from}): {} requests in {:.1} s, prompts of {} tokens in the mean, {:.1} % of them in blocks seen before",
        trace.requests.len(),
        trace.seconds(),
        tokens / trace.requests.len().max(1) as u64,
        trace.shared_share() * 100.0,
    ));
    Ok(trace)
}

/// A number that no earlier run had.
pub fn new_salt() -> u64 {
    // The standard library's hasher has random keys, and there is no other randomness that must not follow the seed.
    let random = RandomState::new().build_hasher().finish();
    seed::key(&[random, machine::unix_s(), std::process::id().into()])
}

/// What is known of the run before its first request.
pub fn info(run: &Run, servers: &[Connected]) -> RunInfo {
    let processes = run.endpoints.iter().flat_map(|endpoint| &endpoint.processes);
    let flags: Vec<String> = processes
        .map(|(name, pid)| format!("{name}: {}", machine::command_of(*pid)))
        .chain(servers.iter().flat_map(|server| server.cluster.lines.clone()))
        .collect();
    RunInfo {
        command: machine::command(std::env::args()),
        tandem_version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: machine::COMMIT.to_owned(),
        started_unix_s: machine::unix_s(),
        machine: machine::machine(),
        endpoints: run.endpoints.iter().map(|endpoint| endpoint.name.clone()).collect(),
        model: servers.first().map(|server| server.facts.model.clone()).unwrap_or_default(),
        dtype: kv_dtype(&flags),
        seed: run.seed,
        server_flags: flags,
        own_lag_p99_ms: 0.0,
        own_lag_max_ms: 0.0,
        nodes: servers.iter().map(|server| server.cluster.nodes.clone()).collect(),
        models: servers.iter().map(|server| server.cluster.model.clone()).collect(),
        ..RunInfo::default()
    }
}

/// What nodes of this machine were started with; nothing is known of others.
fn kv_dtype(flags: &[String]) -> String {
    let mut words = flags.iter().flat_map(|line| line.split_whitespace()).skip_while(|word| *word != "--kv-dtype");
    words.nth(1).map(|dtype| format!("KV {dtype}")).unwrap_or_default()
}

/// What the nodes say of themselves now, after all requests: at the beginning many have not measured a step yet. A
/// server that does not answer any more leaves what it said before.
pub async fn learn(servers: &[Connected], info: &mut RunInfo) {
    for (place, connected) in servers.iter().enumerate() {
        let Some(server) = &connected.server else { continue };
        let Cluster { nodes, model, .. } = server.cluster().await;
        if let (false, Some(known)) = (nodes.is_empty(), info.nodes.get_mut(place)) {
            *known = nodes;
        }
        if let (true, Some(known)) = (model != Model::default(), info.models.get_mut(place)) {
            *known = model;
        }
    }
}

/// The user's facts of the hardware, for predictions.
///
/// # Errors
/// A file that is no such JSON.
pub fn hardware(path: Option<&Path>) -> anyhow::Result<Option<Model>> {
    let Some(path) = path else { return Ok(None) };
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let facts: serde_json::Value =
        serde_json::from_slice(&text).with_context(|| format!("{} is no JSON", path.display()))?;
    let facts = serde_json::from_value(facts).with_context(|| format!("{} has wrong facts", path.display()))?;
    Ok(Some(facts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_to_the_context() {
        for (input, output, most) in [("1000..2000", "100", 512), ("10", "2000", 512), ("5", "5", 2), ("5", "5", 1)] {
            let shape = Shape { input: input.parse().unwrap(), output: output.parse().unwrap(), prefix: None };
            let mut workload = Workload { name: "own".into(), mix: Mix::Shapes(vec![(1.0, shape)]) };
            fit(&mut workload, most);
            assert!(workload.longest_tokens() <= most.max(2), "{input} {output} {most}: {workload:?}");
            let Mix::Shapes(shapes) = &workload.mix else { panic!() };
            let shape = shapes[0].1;
            assert!(shape.input.low >= 1 && shape.input.low <= shape.input.high && shape.output.low >= 1);
        }
    }

    #[test]
    fn salts_differ() {
        assert_ne!(new_salt(), new_salt());
    }

    #[test]
    fn the_dtype_is_the_nodes_flag() {
        assert_eq!(kv_dtype(&["x: node --kv-dtype int8 --y".into()]), "KV int8");
        assert_eq!(kv_dtype(&["x: node --kv-dtype".into()]), "");
    }

    #[test]
    fn facts_of_hardware_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hardware.json");
        std::fs::write(&path, r#"{"memory_gb_per_s": 20.0}"#).unwrap();
        let model = hardware(Some(&path)).unwrap().unwrap();
        assert_eq!((model.memory_gb_per_s, model.decode_nodes), (Some(20.0), 0));
        assert!(hardware(None).unwrap().is_none());
        std::fs::write(&path, "[]").unwrap();
        assert!(hardware(Some(&path)).is_err());
    }
}
