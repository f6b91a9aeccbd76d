//! Draws a trace as text (pure): a tree of bars, TTFT in its parts, the KV transfer in one line.
use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::Value;

use crate::span::Span;

/// The phases that tile TTFT, in order.
const TTFT_PHASES: [&str; 3] = ["queue", "route", "prefill"];
/// Deeper spans than this are drawn at this depth: a cycle or a hostile trace must not end the drawing.
const MAX_DEPTH: usize = 16;
/// The narrowest drawing that makes sense.
const MIN_WIDTH: usize = 60;

/// The waterfall of `spans`, `width` columns wide, with a newline at the end.
pub fn render(spans: &[Span], width: usize) -> String {
    let rows = tree(spans);
    let (Some(root), Some(start), Some(end)) = (
        rows.first().map(|row| row.span),
        spans.iter().map(|span| span.start_unix_ns).min(),
        // A clock that went back must not end the drawing.
        spans.iter().map(|span| span.end_unix_ns.max(span.start_unix_ns)).max(),
    ) else {
        return "no spans\n".to_owned();
    };
    let mut services: Vec<&str> = spans.iter().map(|span| span.service.as_str()).collect();
    services.sort_unstable();
    services.dedup();
    let mut out = format!("{} spans of {} in {:.1} ms\n\n", spans.len(), services.join(", "), ms(end - start));
    bars(&mut out, &rows, (start, end), width.max(MIN_WIDTH));
    breakdown(&mut out, root, spans);
    plan(&mut out, root);
    transfer(&mut out, root, spans);
    pace(&mut out, root);
    out
}

/// A span at its depth.
struct Row<'a> {
    span: &'a Span,
    depth: usize,
}

/// Parents before children, siblings by start; spans whose parent is not here count as roots.
fn tree(spans: &[Span]) -> Vec<Row<'_>> {
    let mut children: BTreeMap<&str, Vec<&Span>> = BTreeMap::new();
    let known = |id: &str| spans.iter().any(|span| span.span_id == id);
    for span in spans {
        let parent = if known(&span.parent_span_id) { span.parent_span_id.as_str() } else { "" };
        children.entry(parent).or_default().push(span);
    }
    for siblings in children.values_mut() {
        siblings.sort_by_key(|span| (std::cmp::Reverse(span.start_unix_ns), span.end_unix_ns));
    }
    let mut rows = Vec::with_capacity(spans.len());
    let mut stack: Vec<Row> = Vec::new();
    let roots = children.remove("").unwrap_or_default();
    stack.extend(roots.into_iter().map(|span| Row { span, depth: 0 }));
    while let Some(row) = stack.pop() {
        // `remove`: every span is drawn once, whatever the parents say.
        let below = children.remove(row.span.span_id.as_str()).unwrap_or_default();
        let depth = (row.depth + 1).min(MAX_DEPTH);
        stack.extend(below.into_iter().map(|span| Row { span, depth }));
        rows.push(row);
    }
    rows
}

fn bars(out: &mut String, rows: &[Row], (start, end): (u64, u64), width: usize) {
    let label = |row: &Row| format!("{}{}", "  ".repeat(row.depth), row.span.name);
    let names = rows.iter().map(|row| label(row).chars().count()).max().unwrap_or(0).clamp(4, 36);
    let services = rows.iter().map(|row| row.span.service.chars().count()).max().unwrap_or(0).clamp(7, 16);
    // Two columns of figures, four blanks and two bars of frame.
    let bar_width = width.saturating_sub(names + services + 2 * 9 + 6).max(10);
    let _ =
        writeln!(out, "{:names$} {:services$} {:>9} {:>9} |{:bar_width$}|", "span", "service", "start ms", "ms", "",);
    for row in rows {
        let Span { service, start_unix_ns, end_unix_ns, error, .. } = row.span;
        let bar = bar((start, end), (*start_unix_ns, *end_unix_ns), bar_width);
        let (offset, length) = (ms(start_unix_ns - start), ms(end_unix_ns.saturating_sub(*start_unix_ns)));
        let (name, service) = (cut(&label(row), names), cut(service, services));
        let error = if error.is_empty() { String::new() } else { format!(" ! {error}") };
        let _ = writeln!(out, "{name:names$} {service:services$} {offset:>9.2} {length:>9.2} |{bar}|{error}");
    }
}

/// A span as a bar of `width` columns; at least one column, never beyond the frame.
fn bar((start, end): (u64, u64), (from, to): (u64, u64), width: usize) -> String {
    let total = (end - start).max(1) as f64;
    let column = |at: u64| ((at.saturating_sub(start)) as f64 / total * width as f64).round() as usize;
    let first = column(from).min(width - 1);
    let length = column(to).min(width).saturating_sub(first).max(1);
    let glyph = if to.saturating_sub(from) as f64 / total * (width as f64) < 0.5 { "▏" } else { "█" };
    format!("{}{}{}", " ".repeat(first), glyph.repeat(length), " ".repeat(width - first - length))
}

/// queue + route + prefill beside the TTFT that the client saw.
fn breakdown(out: &mut String, root: &Span, spans: &[Span]) {
    let Some(ttft) = number(root, &["tandem.ttft_ms"]) else {
        return;
    };
    let _ = writeln!(out, "\nTTFT {ttft:.2} ms");
    let percent = |part: f64| if ttft > 0.0 { part / ttft * 100.0 } else { 0.0 };
    let mut sum = 0.0;
    for phase in TTFT_PHASES {
        let children = spans.iter().filter(|span| span.name == phase && span.parent_span_id == root.span_id);
        let part: f64 = children.map(|span| ms(span.end_unix_ns.saturating_sub(span.start_unix_ns))).sum();
        sum += part;
        let _ = writeln!(out, "  {phase:<10} {part:>9.2} ms {:>6.1} %", percent(part));
    }
    let _ = writeln!(out, "  {:<10} {sum:>9.2} ms {:>6.1} % of TTFT", "sum", percent(sum));
}

/// Says why there is no transfer.
fn plan(out: &mut String, root: &Span) {
    let attribute = |key: &str| root.attributes.get(key).and_then(Value::as_str);
    if attribute("tandem.route.plan") == Some("local") {
        let node = attribute("tandem.decode.instance").unwrap_or("");
        let _ = writeln!(out, "\nlocal: one node computed the prompt and the answer: {node}");
    }
}

fn transfer(out: &mut String, root: &Span, spans: &[Span]) {
    let transfer = spans.iter().find(|span| span.name == "kv.transfer");
    let find = |key: &str| {
        let names = [format!("tandem.kv.{key}"), format!("kv.{key}"), key.to_owned()];
        [Some(root), transfer]
            .into_iter()
            .flatten()
            .find_map(|span| names.iter().find_map(|name| span.attributes.get(name)))
    };
    let figure = |key: &str| find(key).and_then(as_number);
    let Some(bytes) = figure("bytes") else {
        return;
    };
    let blocks = figure("blocks").unwrap_or(0.0);
    let name = find("transport").and_then(Value::as_str).unwrap_or("an unnamed transport");
    let _ = write!(out, "\ntransfer   {:.2} MB ({bytes:.0} bytes) in {blocks:.0} blocks over {name}", bytes / 1e6);
    if let Some(gbps) = figure("gbps") {
        let _ = write!(out, ", {gbps:.2} GB/s");
    }
    if let (Some(hidden), Some(exposed)) = (figure("hidden_ms"), figure("exposed_ms")) {
        let _ = write!(out, "\n           {hidden:.2} ms hidden behind compute, {exposed:.2} ms exposed");
    }
    out.push('\n');
    if let Some(gap) = number(root, &["tandem.handoff_gap_ms"]) {
        let _ = writeln!(out, "hand-off   {gap:.2} ms between the first and the second token");
    }
}

fn pace(out: &mut String, root: &Span) {
    let Some(tpot) = number(root, &["tandem.tpot_ms"]) else {
        return;
    };
    let _ = write!(out, "pace       TPOT {tpot:.2} ms");
    for (key, label) in [("p50", "ITL p50"), ("p99", "p99"), ("max", "max")] {
        if let Some(value) = number(root, &[&format!("tandem.itl.{key}_ms"), &format!("tandem.itl_{key}_ms")]) {
            let _ = write!(out, ", {label} {value:.2} ms");
        }
    }
    out.push('\n');
}

fn number(span: &Span, names: &[&str]) -> Option<f64> {
    names.iter().find_map(|name| span.attributes.get(*name)).and_then(as_number)
}

fn as_number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.parse().ok())
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn span(name: &str, id: &str, parent: &str, (start, end): (u64, u64)) -> Span {
        Span {
            name: name.into(),
            service: "tandem-router".into(),
            span_id: id.into(),
            parent_span_id: parent.into(),
            start_unix_ns: 1_790_000_000_000_000_000 + start * MS,
            end_unix_ns: 1_790_000_000_000_000_000 + end * MS,
            ..Span::default()
        }
    }

    fn request() -> Vec<Span> {
        let mut root = span("chat m", "r", "remote", (0, 100));
        for (key, value) in [
            ("tandem.ttft_ms", 50.0),
            ("tandem.tpot_ms", 5.0),
            ("tandem.handoff_gap_ms", 7.5),
            ("tandem.itl.p50_ms", 4.5),
            ("tandem.kv.exposed_ms", 2.0),
            ("tandem.kv.hidden_ms", 1.0),
            ("tandem.kv.gbps", 3.25),
        ] {
            root.attributes.insert(key.into(), value.into());
        }
        let mut transfer = span("kv.transfer", "t", "q", (48, 52));
        transfer.service = "tandem-decode".into();
        transfer.attributes.insert("bytes".into(), 1_500_000.into());
        transfer.attributes.insert("blocks".into(), 4.into());
        transfer.attributes.insert("transport".into(), "ucx/posix".into());
        vec![
            transfer,
            span("prefill", "p", "r", (5, 50)),
            span("queue", "a", "r", (0, 2)),
            span("route", "b", "r", (2, 5)),
            span("prefill", "q", "p", (6, 49)),
            root,
        ]
    }

    #[test]
    fn the_tree_is_in_order_and_indented() {
        let text = render(&request(), 110);
        let lines: Vec<&str> = text.lines().skip(3).take(6).collect();
        let names: Vec<&str> = lines.iter().map(|line| line[..17].trim_end()).collect();
        assert_eq!(
            names,
            ["chat m", "  queue", "  route", "  prefill", "    prefill", "      kv.transfer"],
            "\n{text}"
        );
        assert!(lines.iter().all(|line| line.chars().count() == 110), "\n{text}");
    }

    #[test]
    fn ttft_adds_up_and_the_transfer_is_described() {
        let text = render(&request(), 110);
        for part in [
            "6 spans of tandem-decode, tandem-router in 100.0 ms",
            "TTFT 50.00 ms",
            "prefill        45.00 ms   90.0 %",
            "sum            50.00 ms  100.0 % of TTFT",
            "1.50 MB (1500000 bytes) in 4 blocks over ucx/posix, 3.25 GB/s",
            "1.00 ms hidden behind compute, 2.00 ms exposed",
            "7.50 ms between the first and the second token",
            "TPOT 5.00 ms, ITL p50 4.50 ms",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
    }

    #[test]
    fn a_local_request_has_no_transfer() {
        let mut root = span("chat m", "r", "", (0, 100));
        root.attributes.insert("tandem.ttft_ms".into(), 50.0.into());
        root.attributes.insert("tandem.route.plan".into(), "local".into());
        root.attributes.insert("tandem.decode.instance".into(), "decode-1".into());
        let phases = [("queue", "a", (0, 2)), ("route", "b", (2, 5)), ("prefill", "p", (5, 50))];
        let mut spans: Vec<Span> = phases.into_iter().map(|(name, id, at)| span(name, id, "r", at)).collect();
        spans.extend([span("prefill", "q", "p", (6, 50)), span("decode", "d", "r", (50, 100)), root]);
        let text = render(&spans, 110);
        assert!(text.contains("local: one node computed the prompt and the answer: decode-1\n"), "{text}");
        assert!(text.contains("sum            50.00 ms  100.0 % of TTFT") && !text.contains("transfer"), "{text}");
    }

    #[test]
    fn bars_stand_where_their_spans_do() {
        assert_eq!(bar((0, 100), (0, 100), 10), "██████████");
        assert_eq!(bar((0, 100), (50, 70), 10), "     ██   ");
        assert_eq!(bar((0, 100), (100, 100), 10), "         ▏");
        assert_eq!(bar((5, 5), (5, 5), 3), "▏  ");
    }

    #[test]
    fn odd_traces_are_drawn_too() {
        assert_eq!(render(&[], 80), "no spans\n");
        // Two spans that are each other's parents have no root: nothing to draw, nothing that hangs.
        let cycle = [span("a", "1", "2", (0, 1)), span("b", "2", "1", (0, 1))];
        assert_eq!(render(&cycle, 80), "no spans\n");
        let mut backwards = span("c", "3", "", (9, 1));
        backwards.error = "cut off".into();
        assert!(render(&[backwards, span("d", "4", "3", (0, 2))], 1).contains("! cut off"));
    }
}
