//! What the live page shows, and what changed since the last look. Pure: a look at the cluster goes in, the changes
//! come out as JSON, and everything anew for who comes later. Of a node, only the fields that changed are told.
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::rate::Rate;
use super::row::Row;
use super::tail::Tail;
use crate::admission::Counts;
use crate::membership::now::{ClusterNow, NodeNow, State, transport_names};
use crate::select::calibrate::Link;

/// Requests that are kept.
pub const MAX_ROWS: usize = 1_000;
/// Links that are shown: those over which most moves now, then those over which most moved.
pub const MAX_LINKS: usize = 32;

type Fields = Map<String, Value>;

/// The cluster at one moment.
pub struct Look {
    /// Unix nanoseconds of `cluster.at`.
    pub at_ns: u64,
    /// Nodes, links, who left.
    pub cluster: ClusterNow,
    /// Requests that run and wait.
    pub counts: Counts,
    /// A request could start.
    pub is_ready: bool,
    /// The router ends.
    pub is_draining: bool,
    /// Requests that ended since the last look; some may have been seen before.
    pub rows: Vec<Row>,
    /// Requests that ended so far.
    pub finished: u64,
    /// Of those since the last look, the ones that are not in `rows`.
    pub unread: u64,
}

impl Look {
    fn at_ms(&self) -> u64 {
        self.at_ns / 1_000_000
    }

    /// Unix milliseconds of a moment before: always the same for the same moment.
    fn unix_ms(&self, at: Instant) -> u64 {
        let ago_ns = self.cluster.at.saturating_duration_since(at).as_nanos() as u64;
        self.at_ns.saturating_sub(ago_ns) / 1_000_000
    }
}

/// See the head of this file.
#[derive(Debug, Default)]
pub struct View {
    shown: Shown,
    rates: Rates,
    tail: Tail,
    /// The newest is at the back.
    rows: VecDeque<Row>,
    unread: u64,
}

/// What everybody sees now.
#[derive(Debug, Default, PartialEq)]
struct Shown {
    at_ms: u64,
    cluster: Fields,
    /// By name.
    nodes: BTreeMap<String, Fields>,
    links: Value,
    departed: Value,
    tail: Value,
}

#[derive(Debug, Default)]
struct Rates {
    /// Of each session: tokens of prompts, and generated ones.
    nodes: BTreeMap<u64, [Rate; 2]>,
    /// Bytes of each pair.
    links: BTreeMap<(u64, u64), Rate>,
    requests: Rate,
    /// Unix milliseconds of the last look, if there was one.
    seen_ms: Option<u64>,
}

impl View {
    /// Takes a look; says what changed.
    pub fn advance(&mut self, look: Look) -> Value {
        self.rates.see(&look);
        self.unread += look.unread;
        let rows = self.take_rows(&look.rows);
        let shown = self.show(&look);
        let before = std::mem::replace(&mut self.shown, shown);
        let mut update = self.shown.since(&before);
        if !rows.is_empty() {
            update.insert("requests".into(), json!(rows));
        }
        Value::Object(update)
    }

    /// Everything, with so many of the newest requests, the newest first.
    pub fn whole(&self, rows: usize) -> Value {
        let Shown { at_ms, cluster, nodes, links, departed, tail } = &self.shown;
        json!({
            "at_ms": at_ms,
            "cluster": cluster,
            "nodes": nodes.values().collect::<Vec<_>>(),
            "links": links,
            "departed": departed,
            "tail": tail,
            "requests": self.rows.iter().rev().take(rows).collect::<Vec<_>>(),
        })
    }

    /// The requests behind the `skipped` newest ones, in lots of as many.
    pub fn older(&self, skipped: usize) -> Vec<Vec<&Row>> {
        let older: Vec<&Row> = self.rows.iter().rev().skip(skipped).collect();
        older.chunks(skipped.max(1)).map(<[&Row]>::to_vec).collect()
    }

    /// Keeps those that are new; says them, the newest first.
    fn take_rows(&mut self, rows: &[Row]) -> Vec<Row> {
        let mut known: HashSet<&str> = self.rows.iter().map(|row| row.id.as_str()).collect();
        let new: Vec<Row> = rows.iter().filter(|row| known.insert(&row.id)).cloned().collect();
        new.iter().for_each(|row| self.tail.add(row));
        self.rows.extend(new.iter().cloned());
        self.rows.drain(..self.rows.len().saturating_sub(MAX_ROWS));
        new.into_iter().rev().collect()
    }

    fn show(&mut self, look: &Look) -> Shown {
        let nodes = &look.cluster.nodes;
        let departed = look.cluster.departed.iter().map(|gone| {
            let at_ms = look.unix_ms(gone.at);
            json!({"id": gone.id, "role": gone.role.as_str(), "why": gone.why(), "at_ms": at_ms})
        });
        Shown {
            at_ms: look.at_ms(),
            cluster: self.cluster(look),
            nodes: nodes.iter().map(|now| (now.node.info.node_id.clone(), self.rates.node(now))).collect(),
            links: self.rates.links(&look.cluster),
            departed: departed.collect(),
            tail: json!(self.tail.stretches(look.at_ms())),
        }
    }

    fn cluster(&self, look: &Look) -> Fields {
        let sum = |which: usize| self.rates.nodes.values().map(|rates| rates[which].per_second()).sum::<f64>();
        let kv = self.rates.links.values().map(Rate::per_second).sum::<f64>();
        fields([
            ("running", json!(look.counts.inflight)),
            ("queued", json!(look.counts.queued)),
            ("ready", json!(look.is_ready)),
            ("draining", json!(look.is_draining)),
            ("prompt_tokens_per_s", figures(sum(0))),
            ("output_tokens_per_s", figures(sum(1))),
            ("kv_bytes_per_s", figures(kv)),
            ("requests_per_s", figures(self.rates.requests.per_second())),
            ("finished", json!(look.finished)),
            ("unread", json!(self.unread)),
            ("links", json!(look.cluster.links.len())),
        ])
    }
}

impl Shown {
    /// What is different from `before`. Its `at_ms` always is: an update is a sign of life, too.
    fn since(&self, before: &Self) -> Fields {
        let mut update = fields([("at_ms", json!(self.at_ms))]);
        let cluster = changed(&before.cluster, &self.cluster);
        if !cluster.is_empty() {
            update.insert("cluster".into(), Value::Object(cluster));
        }
        let of_node = |(id, now): (&String, &Fields)| {
            let mut node = before.nodes.get(id).map_or_else(|| now.clone(), |before| changed(before, now));
            let is_changed = !node.is_empty();
            node.insert("id".into(), json!(id));
            is_changed.then_some(Value::Object(node))
        };
        let nodes: Vec<Value> = self.nodes.iter().filter_map(of_node).collect();
        let gone: Vec<&String> = before.nodes.keys().filter(|id| !self.nodes.contains_key(*id)).collect();
        let lists = [("links", &self.links, &before.links), ("departed", &self.departed, &before.departed)];
        let lists = lists.into_iter().chain([("tail", &self.tail, &before.tail)]);
        update.extend(lists.filter(|(_, now, before)| now != before).map(|(name, now, _)| (name.into(), now.clone())));
        if !nodes.is_empty() {
            update.insert("nodes".into(), Value::Array(nodes));
        }
        if !gone.is_empty() {
            update.insert("gone".into(), json!(gone));
        }
        update
    }
}

impl Rates {
    fn see(&mut self, look: &Look) {
        let at_ms = look.at_ms();
        self.requests.see(at_ms, look.finished);
        let nodes = look.cluster.nodes.iter().map(|now| {
            let (session, work) = (now.node.session, &now.node.work);
            let mut rates = self.nodes.remove(&session).unwrap_or_default();
            rates[0].see(at_ms, work.prompt_tokens());
            rates[1].see(at_ms, work.output_tokens());
            (session, rates)
        });
        // Of who is gone, nothing is left.
        self.nodes = nodes.collect();
        let links = look.cluster.links.iter().map(|link| {
            let mut rate = self.links.remove(&link.pair).unwrap_or_else(|| {
                // What is new since the last look had moved nothing then.
                let mut new = Rate::default();
                self.seen_ms.iter().for_each(|seen_ms| new.see(*seen_ms, 0));
                new
            });
            rate.see(at_ms, link.bytes);
            (link.pair, rate)
        });
        self.links = links.collect();
        self.seen_ms = Some(at_ms);
    }

    fn node(&self, now: &NodeNow) -> Fields {
        let (info, load) = (&now.node.info, &now.load);
        let per_second =
            |which: usize| self.nodes.get(&now.node.session).map_or(0.0, |rates| rates[which].per_second());
        // Of a node that reports it changes at each look, and says nothing.
        let silent_ms = if now.state == State::Suspect { now.silent.as_millis() as u64 } else { 0 };
        fields([
            ("id", json!(info.node_id)),
            ("role", json!(now.node.role.as_str())),
            ("state", json!(now.state.as_str())),
            ("silent_ms", json!(silent_ms)),
            ("incarnation", json!(now.node.incarnation().to_string())),
            ("endpoint", json!(info.endpoint)),
            ("transport", json!(transport_names(info))),
            ("total_blocks", json!(info.total_blocks)),
            ("free_blocks", json!(load.free_blocks)),
            ("cached_blocks", json!(load.cached_blocks)),
            ("running", json!(load.running)),
            ("waiting", json!(load.waiting)),
            ("queued_tokens", json!(load.queued_tokens)),
            ("backlog_ms", figures(now.backlog_ms)),
            ("prompt_tokens_per_s", figures(per_second(0))),
            ("output_tokens_per_s", figures(per_second(1))),
        ])
    }

    fn links(&self, cluster: &ClusterNow) -> Value {
        let mut links: Vec<(f64, &Link)> =
            cluster.links.iter().map(|link| (self.links.get(&link.pair).map_or(0.0, Rate::per_second), link)).collect();
        links.sort_by(|(a, one), (b, other)| b.total_cmp(a).then(other.bytes.cmp(&one.bytes)));
        let json = |(now, link): &(f64, &Link)| {
            let names = (cluster.name(link.pair.0)?, cluster.name(link.pair.1)?);
            Some(json!({
                "prefill": names.0,
                "decode": names.1,
                "gbps": figures(link.bytes_per_ms / 1e6),
                "bytes_per_s": figures(*now),
                "handoffs": link.handoffs,
                "bytes": link.bytes,
            }))
        };
        links.iter().take(MAX_LINKS).filter_map(json).collect()
    }
}

/// The fields of `now` that are not so in `before`.
fn changed(before: &Fields, now: &Fields) -> Fields {
    let different = now.iter().filter(|(name, value)| before.get(*name) != Some(value));
    different.map(|(name, value)| (name.clone(), value.clone())).collect()
}

fn fields<const N: usize>(of: [(&str, Value); N]) -> Fields {
    of.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Three figures: more would change at each look without saying more.
fn figures(value: f64) -> Value {
    if value == 0.0 || !value.is_finite() {
        return json!(0);
    }
    let places = value.abs().log10().floor() as i32 - 2;
    let power = 10f64.powi(places.abs());
    json!(if places > 0 { (value / power).round() * power } else { (value * power).round() / power })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tandem_proto::v1;

    use super::*;
    use crate::membership::tests::register;
    use crate::membership::{Expected, Membership};

    const START_NS: u64 = 1_790_000_000_000_000_000;

    fn membership() -> Membership {
        Membership::new(Expected { model_digest: 9, eos_token_id: 2 }, Duration::from_secs(3))
    }

    /// A look so many seconds after the start.
    fn look(membership: &Membership, second: u64, rows: Vec<Row>) -> Look {
        let at_ns = START_NS + second * 1_000_000_000;
        let (counts, finished) = (Counts { inflight: 1, queued: 0 }, rows.len() as u64);
        let cluster = membership.now();
        Look { at_ns, cluster, counts, is_ready: true, is_draining: false, rows, finished, unread: 0 }
    }

    fn row(number: u64) -> Row {
        let (id, at_ms) = (format!("{number:016x}"), START_NS / 1_000_000 + number);
        Row { id, at_ms, ttft_ms: Some(number as f64), ..Row::default() }
    }

    fn keys(value: &Value) -> Vec<&str> {
        let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        keys
    }

    #[test]
    fn of_a_node_only_what_changed_is_told() {
        let (membership, mut view) = (membership(), View::default());
        let prefill = membership.register(register("p0", v1::Role::Prefill, 1), Instant::now()).unwrap();
        let decode = membership.register(register("d0", v1::Role::Decode, 2), Instant::now()).unwrap();
        let first = view.advance(look(&membership, 0, Vec::new()));
        assert_eq!(first["nodes"].as_array().unwrap().len(), 2);
        assert_eq!((&first["nodes"][0]["id"], &first["nodes"][0]["free_blocks"]), (&json!("d0"), &json!(64)));

        let quiet = view.advance(look(&membership, 1, Vec::new()));
        assert_eq!(keys(&quiet), ["at_ms"], "{quiet}");

        let load = v1::Load { free_blocks: 60, running: 1, ..v1::Load::default() };
        membership.report(decode.session, &load, Instant::now());
        (0..30).for_each(|_| decode.work.generated());
        prefill.work.computed(40);
        let busy = view.advance(look(&membership, 2, Vec::new()));
        let node = &busy["nodes"][0];
        assert_eq!(keys(node), ["free_blocks", "id", "output_tokens_per_s", "running"], "{node}");
        assert_eq!(node["output_tokens_per_s"], json!(15.0), "over two seconds");
        assert_eq!(busy["nodes"][1], json!({"id": "p0", "prompt_tokens_per_s": 20.0}));
        assert_eq!(busy["cluster"]["output_tokens_per_s"], json!(15.0));

        membership.leave(decode.session, "its stream was cut");
        let gone = view.advance(look(&membership, 3, Vec::new()));
        assert_eq!((&gone["gone"], gone["departed"].as_array().unwrap().len()), (&json!(["d0"]), 1));
        assert_eq!(
            (&gone["departed"][0]["id"], &gone["departed"][0]["why"]),
            (&json!("d0"), &json!("its stream was cut"))
        );
        let whole = view.whole(10);
        assert_eq!((whole["nodes"].as_array().unwrap().len(), &whole["departed"]), (1, &gone["departed"]));
    }

    #[test]
    fn links_say_how_fast_bytes_move_and_how_many_moved() {
        let (membership, mut view) = (membership(), View::default());
        for (id, role, incarnation) in [("p0", v1::Role::Prefill, 1), ("d0", v1::Role::Decode, 2)] {
            membership.register(register(id, role, incarnation), Instant::now()).unwrap();
        }
        view.advance(look(&membership, 0, Vec::new()));
        let route =
            membership.route(&membership.demand(16, 4), &crate::select::Wish::default(), Instant::now()).unwrap();
        for second in 1..=2 {
            route.handed_off(&v1::Verified { bytes: 3_000_000, blocks: 3, copying_ms: 1.5, ..v1::Verified::default() });
            let update = view.advance(look(&membership, second, Vec::new()));
            let link = &update["links"][0];
            assert_eq!((&link["prefill"], &link["decode"], &link["gbps"]), (&json!("p0"), &json!("d0"), &json!(2.0)));
            assert_eq!(link["handoffs"], json!(second));
        }
        assert_eq!(view.whole(0)["links"][0]["bytes_per_s"], json!(3e6));
    }

    #[test]
    fn requests_come_once_and_the_oldest_go() {
        let (membership, mut view) = (membership(), View::default());
        let update = view.advance(look(&membership, 0, (1..=3).map(row).collect()));
        let ids = |rows: &Value| rows.as_array().unwrap().iter().map(|row| row["ttft_ms"].clone()).collect::<Vec<_>>();
        assert_eq!(ids(&update["requests"]), [3.0, 2.0, 1.0], "the newest first");
        assert_eq!((&update["tail"][0]["ttft_ms"], &update["tail"][0]["requests"]), (&json!(3.0), &json!(3)));
        let again = view.advance(look(&membership, 1, (3..=4).map(row).collect()));
        assert_eq!(ids(&again["requests"]), [4.0]);
        view.advance(look(&membership, 2, (5..=1_200).map(row).collect()));
        let (whole, older) = (view.whole(300), view.older(300));
        assert_eq!((ids(&whole["requests"])[0].as_f64(), ids(&whole["requests"]).len()), (Some(1_200.0), 300));
        assert_eq!(older.iter().map(Vec::len).collect::<Vec<_>>(), [300, 300, 100]);
        assert_eq!((older[0][0].ttft_ms, older[2][99].ttft_ms), (Some(900.0), Some(201.0)));
    }

    #[test]
    fn numbers_have_three_figures() {
        for (value, written) in
            [(0.0, "0"), (1234.5, "1230.0"), (0.012_345, "0.0123"), (9.999, "10.0"), (f64::NAN, "0")]
        {
            assert_eq!(figures(value).to_string(), written);
        }
    }
}
