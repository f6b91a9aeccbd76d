//! `tandem explain`: why a request went where it went. Reads the candidates from the trace's `route` span, each with
//! the milliseconds that the router predicted, and puts what then happened beside the prediction. Drawing is pure.
//!
//! Next: [`crate::trace`], which fetches.
use std::fmt::Write;

use tandem_client::terminal::print;

use serde_json::Value;

use crate::config;
use crate::span::{Event, Span, Trace};
use crate::trace;

/// Columns of the table: heading and attribute of the candidate.
const TERMS: [(&str, &str); 6] = [
    ("wait p", "wait_prefill_ms"),
    ("prefill", "prefill_ms"),
    ("exposed", "exposed_ms"),
    ("wait d", "wait_decode_ms"),
    ("step", "step_ms"),
    ("interference", "interference_ms"),
];
/// Longer names are cut.
const WIDEST_PLAN: usize = 48;

/// Fetches and explains.
///
/// # Errors
/// No router, no such trace, or no choice in it.
pub async fn run(config: config::Explain) -> anyhow::Result<()> {
    let trace = trace::fetch(&config.router, &config.id).await?;
    print(&render(&trace).map_err(anyhow::Error::msg)?)
}

/// The explanation, with a newline at the end: a section for each request of the trace, the first one first. A client
/// may send several requests under one trace, and several answers to one prompt are as many requests.
///
/// # Errors
/// What is missing in the trace, in words.
fn render(trace: &Trace) -> Result<String, &'static str> {
    let mut routes: Vec<&Span> = trace.spans.iter().filter(|span| span.name == "route").collect();
    routes.sort_by_key(|span| span.start_unix_ns);
    let mut out = trace.head();
    let several = routes.len() > 1;
    for (number, route) in (1..).zip(&routes) {
        let request = Request::of(route, trace);
        if several {
            let id = request.root.and_then(|root| text(root, "tandem.request_id")).unwrap_or_default();
            let _ = writeln!(out, "\nrequest {number} of {}: {id}", routes.len());
        }
        request.explain(&mut out)?;
    }
    match routes.is_empty() {
        true => Err("the trace has no `route` span: the request ended before nodes were chosen"),
        false => Ok(out),
    }
}

/// The spans of one request. Others of the same trace have the same names.
struct Request<'a> {
    route: &'a Span,
    /// `None` where the router's ring had no room for it.
    root: Option<&'a Span>,
    /// Below the root at any depth.
    spans: Vec<&'a Span>,
}

impl<'a> Request<'a> {
    fn of(route: &'a Span, trace: &'a Trace) -> Self {
        let root = trace.spans.iter().find(|span| span.span_id == route.parent_span_id);
        let mut below: Vec<&Span> = Vec::new();
        let mut parents = vec![route.parent_span_id.as_str()];
        let mut left: Vec<&Span> = trace.spans.iter().filter(|span| span.span_id != route.parent_span_id).collect();
        // Each span is taken once, whatever the parents say.
        while let Some(parent) = parents.pop() {
            let (children, others) = left.into_iter().partition(|span| span.parent_span_id == parent);
            left = others;
            let children: Vec<&Span> = children;
            parents.extend(children.iter().map(|span| span.span_id.as_str()));
            below.extend(children);
        }
        below.sort_by_key(|span| span.start_unix_ns);
        Self { route, root, spans: below }
    }

    fn explain(&self, out: &mut String) -> Result<(), &'static str> {
        let candidates: Vec<Candidate> = self.route.events.iter().filter_map(Candidate::read).collect();
        let chosen = candidates.iter().position(|candidate| candidate.chosen);
        let chosen =
            chosen.ok_or("the `route` span names no chosen candidate: is the router older than this program?")?;
        let policy = self.root.and_then(|root| text(root, "tandem.route.policy")).unwrap_or("unknown");
        let _ = writeln!(out, "policy {policy}, candidates in predicted milliseconds\n");
        table(out, &candidates);
        self.pairs_that_are_none(out);
        verdict(out, &candidates, chosen, self.route);
        if let Some(root) = self.root {
            self.attempts(out, &candidates[chosen], root);
            self.compare(out, &candidates[chosen], root);
        }
        Ok(())
    }

    /// Nodes that understand each other's KV, which does not get from the one to the other.
    fn pairs_that_are_none(&self, out: &mut String) {
        for event in self.route.events.iter().filter(|event| event.name == "no_way") {
            let told = |name: &str| event.attributes.get(name).and_then(Value::as_str).unwrap_or("?");
            let name = plan_name(false, told("tandem.prefill.instance"), told("tandem.decode.instance"));
            let _ = writeln!(out, "not a pair: {name}: {}", told("tandem.route.why"));
        }
    }

    /// Where the request went on after failures, in order; nothing where it did not.
    fn attempts(&self, out: &mut String, choice: &Candidate, root: &Span) {
        let replans: Vec<&Event> = root.events.iter().filter(|event| event.name == "replan").collect();
        if replans.is_empty() {
            return;
        }
        let _ = writeln!(out, "\nattempt 1: {}", choice.name);
        for (number, replan) in (2..).zip(replans) {
            let told = |name: &str| replan.attributes.get(name).and_then(Value::as_str).unwrap_or("?");
            let local = told("tandem.route.plan") == "local";
            let name = plan_name(local, told("tandem.prefill.instance"), told("tandem.decode.instance"));
            let search_ms = replan.attributes.get("tandem.replan.search_ms").and_then(Value::as_f64);
            let _ = writeln!(
                out,
                "attempt {number}: {name}, found in {:.2} ms; {} node {} had failed during {}: {}",
                search_ms.unwrap_or(0.0),
                told("tandem.replan.failed_role"),
                told("tandem.replan.failed_instance"),
                told("tandem.replan.phase"),
                told("tandem.replan.cause"),
            );
        }
        // Each of these is a node's own: a prompt that was begun twice has two.
        for forward in self.spans.iter().filter(|span| span.name == "prefill.forward") {
            let before = self.spans.iter().filter(|span| span.parent_span_id == forward.parent_span_id);
            let mut before = before.filter(|span| span.start_unix_ns <= forward.start_unix_ns);
            let wait = before.rfind(|span| span.name == "prefill.queue");
            let (waited, computed) = (wait.map_or(0.0, |wait| wait.length_ms()), forward.length_ms());
            let how = if forward.error.is_empty() { "" } else { ", and failed" };
            let node = &forward.instance;
            let _ = writeln!(out, "  prompt on {node}: waited {waited:.2} ms, computed {computed:.2} ms{how}");
        }
    }

    /// The first span of this name.
    fn length_ms(&self, name: &str) -> Option<f64> {
        self.spans.iter().find(|span| span.name == name).map(|span| span.length_ms())
    }
}

fn text<'a>(span: &'a Span, attribute: &str) -> Option<&'a str> {
    span.attributes.get(attribute)?.as_str()
}

fn plan_name(local: bool, prefill: &str, decode: &str) -> String {
    if local { format!("{decode} alone") } else { format!("{prefill} → {decode}") }
}

/// A plan as the router told of it.
struct Candidate {
    name: String,
    /// The node that is to compute the prompt.
    computes: String,
    chosen: bool,
    local: bool,
    /// How the KV travels; of a local plan it does not.
    way: Option<String>,
    terms: [f64; TERMS.len()],
    ttft_ms: f64,
    total_ms: f64,
    cached_tokens: f64,
    /// What speaks against it beside its cost.
    remarks: Vec<String>,
}

impl Candidate {
    fn read(event: &Event) -> Option<Self> {
        if event.name != "candidate" {
            return None;
        }
        let attribute = |name: &str| event.attributes.get(&format!("tandem.route.{name}"));
        let number = |name: &str| attribute(name).and_then(Value::as_f64);
        let flag = |name: &str| attribute(name).and_then(Value::as_bool).unwrap_or(false);
        let node = |role: &str| event.attributes.get(&format!("tandem.{role}.instance")).and_then(Value::as_str);
        let local = attribute("plan").and_then(Value::as_str) == Some("local");
        let decode = node("decode")?;
        let computes = if local { decode } else { node("prefill")? };
        let words = |name: &str| attribute(name).and_then(Value::as_str).map(str::to_owned);
        let failed_way = words("way_instead_of").map(|way| format!("{way} failed there lately"));
        let remarks = [
            (flag("breaker_shut"), "breaker open"),
            (flag("avoided"), "failed this request before"),
            (number("blocks_short").is_some_and(|blocks| blocks > 0.0), "no room now"),
            (!flag("measured"), "a guess: no step measured yet"),
        ];
        Some(Self {
            name: plan_name(local, computes, decode),
            computes: computes.to_owned(),
            chosen: flag("chosen"),
            local,
            way: words("way"),
            terms: TERMS.map(|(_, name)| number(name).unwrap_or(0.0)),
            ttft_ms: number("ttft_ms")?,
            total_ms: number("total_ms")?,
            cached_tokens: number("cached_tokens").unwrap_or(0.0),
            remarks: remarks
                .into_iter()
                .filter(|(holds, _)| *holds)
                .map(|(_, remark)| remark.to_owned())
                .chain(failed_way)
                .collect(),
        })
    }

    fn term(&self, name: &str) -> f64 {
        TERMS.iter().zip(self.terms).find(|((_, of), _)| *of == name).map_or(0.0, |(_, ms)| ms)
    }
}

fn width_of(heading: &str) -> usize {
    heading.len().max(9)
}

fn table(out: &mut String, candidates: &[Candidate]) {
    let width = candidates.iter().map(|candidate| candidate.name.chars().count()).max().unwrap_or(0);
    let width = width.clamp("plan".len(), WIDEST_PLAN);
    // A router that tells no ways leaves no column of them.
    let ways = candidates.iter().filter_map(|candidate| candidate.way.as_ref()).map(|way| way.chars().count());
    let way_width = ways.max().map_or(0, |widest| widest.clamp("way".len(), WIDEST_PLAN) + 2);
    let _ = write!(out, "  {:width$}{:>way_width$}", "plan", if way_width > 0 { "way" } else { "" });
    TERMS.iter().for_each(|(heading, _)| {
        let _ = write!(out, " {heading:>width$}", width = width_of(heading));
    });
    let _ = writeln!(out, " {:>9} {:>9} {:>10}", "cached", "TTFT", "total");
    for candidate in candidates {
        let mark = if candidate.chosen { '*' } else { ' ' };
        let name: String = candidate.name.chars().take(width).collect();
        let way = match way_width {
            0 => "",
            _ => candidate.way.as_deref().unwrap_or("-"),
        };
        let _ = write!(out, "{mark} {name:width$}{way:>way_width$}");
        candidate.terms.iter().zip(TERMS).for_each(|(ms, (heading, _))| {
            let _ = write!(out, " {ms:>width$.2}", width = width_of(heading));
        });
        let Candidate { cached_tokens, ttft_ms, total_ms, .. } = candidate;
        let _ = write!(out, " {cached_tokens:>9.0} {ttft_ms:>9.2} {total_ms:>10.2}");
        let remarks = candidate.remarks.join(", ");
        let _ = if remarks.is_empty() { writeln!(out) } else { writeln!(out, "  {remarks}") };
    }
}

/// What the others would have cost.
fn verdict(out: &mut String, candidates: &[Candidate], chosen: usize, route: &Span) {
    let weight = route.attributes.get("tandem.route.step_weight").and_then(Value::as_f64);
    if let Some(weight) = weight {
        let _ = writeln!(out, "\ntotal = the waits, prefill, exposed and interference + {weight:.1} × step");
    }
    let choice = &candidates[chosen];
    let others = candidates.iter().enumerate().filter(|(index, _)| *index != chosen).map(|(_, other)| other);
    let Some(best) = others.min_by(|a, b| a.total_ms.total_cmp(&b.total_ms)) else {
        let _ = writeln!(out, "chosen: {}; there was nothing else", choice.name);
        return;
    };
    let more_ms = best.total_ms - choice.total_ms;
    let percent = if choice.total_ms > 0.0 { more_ms.abs() / choice.total_ms * 100.0 } else { 0.0 };
    let than = if more_ms < 0.0 { "less" } else { "more" };
    let _ = writeln!(
        out,
        "chosen: {}; the next best, {}, would have cost {:.2} ms {than} ({percent:.1} %)",
        choice.name,
        best.name,
        more_ms.abs(),
    );
}

impl Request<'_> {
    /// The prediction, which is of the first attempt, beside what happened.
    fn compare(&self, out: &mut String, choice: &Candidate, root: &Span) {
        let number = |name: &str| root.attributes.get(name).and_then(Value::as_f64);
        let Some(ttft_ms) = number("tandem.ttft_ms") else {
            let _ = writeln!(out, "\nno first token: nothing to compare the prediction with");
            return;
        };
        let replanned = number("tandem.replans").is_some_and(|replans| replans > 0.0);
        let actual_ms = ttft_ms - self.length_ms("queue").unwrap_or(0.0);
        let wait = if choice.local { "wait_decode_ms" } else { "wait_prefill_ms" };
        let on_node = |name: &str| {
            let of_it = |span: &Span| span.instance.is_empty() || span.instance == choice.computes;
            self.spans.iter().find(|span| span.name == name && of_it(span)).map(|span| span.length_ms())
        };
        let (waited, computed) = (on_node("prefill.queue"), on_node("prefill.forward"));
        // With several attempts the rest would be the others.
        let rest = waited.zip(computed).filter(|_| !replanned);
        let rest = rest.map(|(waited, computed)| actual_ms - waited - computed);
        let _ = writeln!(out, "\n{:28} {:>12} {:>12}", "", "predicted", "actual");
        let mut row = |name: &str, predicted: Option<f64>, actual: Option<f64>| {
            let cell = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.2} ms"));
            let _ = writeln!(out, "{name:28} {:>12} {:>12}", cell(predicted), cell(actual));
        };
        row("TTFT without the queue", Some(choice.ttft_ms), Some(actual_ms));
        row("  wait on the node", Some(choice.term(wait)), waited);
        row("  prefill", Some(choice.term("prefill_ms")), computed);
        row("  route, calls, sending", None, rest);
        if !choice.local {
            row("exposed transfer", Some(choice.term("exposed_ms")), self.length_ms("transfer"));
        }
        row("time per further token", Some(choice.term("step_ms")), number("tandem.tpot_ms"));
        let off_ms = choice.ttft_ms - actual_ms;
        let percent = if actual_ms > 0.0 { off_ms / actual_ms * 100.0 } else { 0.0 };
        let _ = writeln!(out, "\nthe prediction of TTFT was off by {off_ms:+.2} ms ({percent:+.1} %)");
        if replanned {
            let _ = writeln!(out, "it is of the first attempt; TTFT and the time per token are of all of them");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(prefill: &str, decode: &str, chosen: bool, prefill_ms: f64, total_ms: f64) -> Value {
        let plan = if prefill == decode { "local" } else { "pair" };
        json!({ "name": "candidate", "unix_ns": 1, "attributes": {
            "tandem.route.plan": plan, "tandem.prefill.instance": prefill, "tandem.decode.instance": decode,
            "tandem.route.chosen": chosen, "tandem.route.wait_prefill_ms": 3.0, "tandem.route.prefill_ms": prefill_ms,
            "tandem.route.step_ms": 2.5, "tandem.route.cached_tokens": 64, "tandem.route.ttft_ms": prefill_ms + 3.0,
            "tandem.route.total_ms": total_ms, "tandem.route.measured": true,
            "tandem.route.breaker_shut": prefill == "p1",
        }})
    }

    fn span(name: &str, id: &str, parent: &str, ms: u64) -> Value {
        json!({ "name": name, "span_id": id, "parent_span_id": parent, "start_unix_ns": 0, "end_unix_ns": ms * 1_000_000 })
    }

    fn trace(events: Vec<Value>) -> Trace {
        let mut root = span("chat m", "01", "", 200);
        root["attributes"] = json!({ "tandem.route.policy": "joint", "tandem.ttft_ms": 62.0, "tandem.tpot_ms": 3.0 });
        let mut route = span("route", "02", "01", 1);
        (route["events"], route["attributes"]) = (json!(events), json!({ "tandem.route.step_weight": 10.0 }));
        let spans = vec![
            route,
            span("queue", "03", "01", 2),
            span("prefill.queue", "04", "09", 4),
            span("prefill.forward", "05", "09", 50),
            span("transfer", "06", "01", 1),
            span("prefill", "08", "01", 60),
            // The node's.
            span("prefill", "09", "08", 55),
            root,
        ];
        serde_json::from_value(json!({ "trace_id": "ab", "spans": spans })).unwrap()
    }

    #[test]
    fn the_choice_the_others_and_what_happened() {
        let events = vec![
            event("p0", "d0", true, 45.0, 73.0),
            event("p1", "d0", false, 45.0, 80.3),
            event("d0", "d0", false, 45.0, 140.0),
        ];
        let text = render(&trace(events)).unwrap();
        let line = |start: &str| {
            let found = text.lines().find(|line| line.trim_start().starts_with(start));
            found.unwrap_or_else(|| panic!("{start}\n{text}")).split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert!(text.starts_with("trace ab\npolicy joint"));
        assert_eq!(line("* p0 → d0"), "* p0 → d0 3.00 45.00 0.00 0.00 2.50 0.00 64 48.00 73.00");
        assert!(line("p1 → d0").ends_with("80.30 breaker open"));
        assert!(line("d0 alone").ends_with("140.00"));
        assert!(line("chosen: p0 → d0").ends_with("p1 → d0, would have cost 7.30 ms more (10.0 %)"));
        assert_eq!(line("TTFT without"), "TTFT without the queue 48.00 ms 60.00 ms");
        assert_eq!(line("wait on the node"), "wait on the node 3.00 ms 4.00 ms");
        assert_eq!(line("prefill "), "prefill 45.00 ms 50.00 ms");
        assert_eq!(line("route, calls"), "route, calls, sending - 6.00 ms");
        assert_eq!(line("exposed transfer"), "exposed transfer 0.00 ms 1.00 ms");
        assert_eq!(line("time per further"), "time per further token 2.50 ms 3.00 ms");
        assert!(line("the prediction").ends_with("off by -12.00 ms (-20.0 %)"));
    }

    #[test]
    fn ways_are_told_and_pairs_that_have_none() {
        let mut fast = event("p0", "d0", true, 45.0, 73.0);
        fast["attributes"]["tandem.route.way"] = json!("ucx/shm");
        let mut slow = event("p2", "d0", false, 45.0, 80.3);
        slow["attributes"]["tandem.route.way"] = json!("tcp");
        slow["attributes"]["tandem.route.way_instead_of"] = json!("ucx/shm");
        let apart = json!({ "name": "no_way", "attributes": { "tandem.prefill.instance": "p3",
            "tandem.decode.instance": "d0", "tandem.route.why": "no common way: p3 offers nothing; d0 takes tcp" } });
        let text = render(&trace(vec![fast, slow, event("d0", "d0", false, 45.0, 140.0), apart])).unwrap();
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("plan way wait p"), "{text}");
        assert!(words.contains("* p0 → d0 ucx/shm 3.00") && words.contains("p2 → d0 tcp 3.00"), "{text}");
        assert!(words.contains("80.30 ucx/shm failed there lately") && words.contains("d0 alone - 3.00"), "{text}");
        assert!(text.contains("\nnot a pair: p3 → d0: no common way: p3 offers nothing; d0 takes tcp\n"), "{text}");
    }

    #[test]
    fn requests_of_one_trace_are_told_apart() {
        let mut both = trace(vec![event("p0", "d0", true, 45.0, 73.0)]);
        let mut second = trace(vec![event("p1", "d1", true, 10.0, 38.0)]);
        let root = second.spans.iter_mut().find(|span| span.span_id == "01").unwrap();
        root.attributes.insert("tandem.ttft_ms".into(), json!(21.0));
        root.attributes.insert("tandem.request_id".into(), json!("r-1"));
        for span in &mut second.spans {
            // Other ids, later, and faster.
            span.span_id = format!("b{}", span.span_id);
            span.parent_span_id = format!("b{}", span.parent_span_id);
            (span.start_unix_ns, span.end_unix_ns) = (1_000_000_000, 1_000_000_000 + span.end_unix_ns / 2);
        }
        // Whatever the order in which they are told.
        both.spans.splice(0..0, second.spans);
        let text = render(&both).unwrap();
        let (first, second) = text.split_once("request 2 of 2: r-1").unwrap_or_else(|| panic!("{text}"));
        assert!(first.contains("request 1 of 2") && first.contains("chosen: p0 → d0"), "{text}");
        assert!(second.contains("chosen: p1 → d1") && !second.contains("p0"), "{text}");
        let prefill = |section: &str| {
            let line = section.lines().find(|line| line.starts_with("  prefill ")).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(prefill(first), "prefill 45.00 ms 50.00 ms");
        assert_eq!(prefill(second), "prefill 10.00 ms 25.00 ms");
        assert!(second.contains("TTFT without the queue           13.00 ms     20.00 ms"), "{second}");
    }

    #[test]
    fn attempts_are_told_in_order() {
        let mut trace = trace(vec![event("p0", "d0", true, 45.0, 73.0)]);
        let again: Span =
            serde_json::from_value(json!({ "name": "prefill.forward", "span_id": "0a", "parent_span_id": "08",
            "instance": "p1", "start_unix_ns": 70_000_000, "end_unix_ns": 100_000_000 }))
            .unwrap();
        trace.spans.insert(0, again);
        let root = trace.spans.iter_mut().find(|span| span.span_id == "01").unwrap();
        root.attributes.insert("tandem.replans".into(), json!(1));
        root.events = serde_json::from_value(json!([{ "name": "replan", "attributes": {
            "tandem.replan.failed_instance": "p0", "tandem.replan.failed_role": "prefill", "tandem.replan.cause": "died",
            "tandem.replan.phase": "prefill", "tandem.replan.search_ms": 1.5, "tandem.route.plan": "pair",
            "tandem.prefill.instance": "p1", "tandem.decode.instance": "d0" }}]))
        .unwrap();
        let text = render(&trace).unwrap();
        let first = text.find("attempt 1: p0 → d0\n").unwrap_or_else(|| panic!("{text}"));
        let second =
            text.find("attempt 2: p1 → d0, found in 1.50 ms; prefill node p0 had failed during prefill: died\n");
        assert!(second.is_some_and(|second| second > first), "{text}");
        assert!(text.contains("  prompt on p1: waited 0.00 ms, computed 30.00 ms\n"), "{text}");
        // The prediction was of the first attempt.
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words(&text).contains("prefill 45.00 ms 50.00 ms route, calls, sending - - exposed"), "{text}");
        // Its node died and told nothing: what another one took is not beside it.
        trace.spans.retain(|span| span.span_id != "05");
        let text = render(&trace).unwrap();
        assert!(words(&text).contains("prefill 45.00 ms - route, calls, sending - - exposed"), "{text}");
    }

    #[test]
    fn one_candidate_and_a_cheaper_other_are_said_so() {
        let text = render(&trace(vec![event("p0", "d0", true, 1.0, 10.0)])).unwrap();
        assert!(text.contains("there was nothing else"));
        let near = vec![event("p0", "d0", true, 1.0, 10.0), event("p1", "d0", false, 1.0, 9.8)];
        assert!(render(&trace(near)).unwrap().contains("would have cost 0.20 ms less (2.0 %)"));
    }

    #[test]
    fn what_is_missing_is_named() {
        let none = Trace { trace_id: "ab".into(), ..Trace::default() };
        assert!(render(&none).unwrap_err().contains("no `route` span"));
        let strange = json!({ "name": "candidate", "attributes": { "tandem.route.chosen": true } });
        assert!(render(&trace(vec![strange])).unwrap_err().contains("no chosen candidate"));
        let mut failed = trace(vec![event("p0", "d0", true, 1.0, 10.0)]);
        failed.spans.last_mut().unwrap().attributes.remove("tandem.ttft_ms");
        assert!(render(&failed).unwrap().contains("no first token"));
    }
}
