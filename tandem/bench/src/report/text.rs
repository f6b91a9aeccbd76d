//! The summary for a terminal (pure): medians first, short. Nothing in it moves a cursor: control characters of names
//! are shown as dots.
use super::number::{NONE, brief, count, maybe, ms, percent, short};
use super::{Point, Summary, endpoint_letter, model, regime, warmth};
use crate::stats::balance::max_by_mean;
use crate::stats::figures::Figures;

/// Wide enough for names, narrow enough for a terminal.
const MOST_NAME: usize = 28;
/// Nodes that are listed by name; all are in the JSON.
const MOST_NODES: usize = 4;
/// So many warnings and failures are listed; a count says how many there are beyond.
const MOST_LINES: usize = 12;

/// Ends with a newline.
pub fn text(summary: &Summary) -> String {
    let mut out = head(summary);
    let sections = [
        latencies(summary),
        rates(summary),
        attribution(summary),
        nodes(summary),
        predictions(summary),
        findings(summary),
        knees(summary),
        comparisons(summary),
        failures(summary),
        warnings(summary),
    ];
    for section in sections.into_iter().flatten() {
        out.push('\n');
        out.push_str(&section);
    }
    out
}

fn head(summary: &Summary) -> String {
    let requests: usize = summary.totals.iter().map(|(_, of)| of.requests).sum();
    let seconds: f64 = summary.totals.iter().map(|(_, of)| of.seconds).sum();
    let info = &summary.info;
    let model = [&info.model, &info.dtype].into_iter().filter(|part| !part.is_empty()).map(|part| plain(part));
    let model = model.collect::<Vec<String>>().join(" ");
    let mut out = format!("{} requests in {} s", count(requests as u64), short(seconds));
    if !model.is_empty() {
        out = format!("{model}: {out}");
    }
    if let Some(goals) = summary.objectives {
        out.push_str(&format!("; good is TTFT ≤ {} ms and TPOT ≤ {} ms", ms(goals.ttft_ms), ms(goals.tpot_ms)));
    }
    out.push('\n');
    if info.endpoints.len() > 1 {
        for (place, endpoint) in info.endpoints.iter().enumerate() {
            out.push_str(&format!(
                "{} = {}\n",
                endpoint_letter(u8::try_from(place).unwrap_or(u8::MAX)),
                plain(endpoint)
            ));
        }
    }
    out
}

/// What stands at the head of a point's lines.
fn names(summary: &Summary, point: &Point) -> Vec<String> {
    let mut names = vec![plain(&point.key.row), point.key.load.label()];
    if has_endpoints(summary) {
        names.push(endpoint_letter(point.key.endpoint).to_string());
    }
    if summary.points.iter().any(|point| point.key.warm) {
        names.push(warmth(point.key.warm).to_owned());
    }
    names
}

fn has_endpoints(summary: &Summary) -> bool {
    summary.points.iter().any(|point| point.key.endpoint != 0)
}

/// A table over the points, each with `cells`; None when there are no points.
fn table(
    summary: &Summary,
    title: &str,
    heads: &[&str],
    cells: impl Fn(&Point) -> Option<Vec<String>>,
) -> Option<String> {
    let rows: Vec<(usize, Vec<String>)> = summary
        .points
        .iter()
        .filter_map(|point| {
            let names = names(summary, point);
            Some((names.len(), [names, cells(point)?].concat()))
        })
        .collect();
    let left = rows.first()?.0;
    let mut lines = vec![[vec![title.to_owned()], vec![String::new(); left - 1]].concat()];
    lines[0].extend(heads.iter().map(|head| (*head).to_owned()));
    lines.extend(rows.into_iter().map(|(_, cells)| cells));
    Some(aligned(&lines, left))
}

/// Columns as wide as they need to be; the first `left` of them to the left, the others to the right.
fn aligned(lines: &[Vec<String>], left: usize) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut out = String::new();
    for line in lines {
        let cells = line.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            if column < left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        out.push_str(cells.collect::<Vec<String>>().join("  ").trim_end());
        out.push('\n');
    }
    out
}

fn latencies(summary: &Summary) -> Option<String> {
    let heads =
        ["TTFT p50", "p95", "p99", "TPOT p50", "p95", "p99", "ITL p50", "p95", "p99", "max", "E2E p50", "p95", "p99"];
    table(summary, "latency, ms", &heads, |point| {
        let of = &point.figures;
        let numbers = [
            (&of.ttft_ms, 0.5),
            (&of.ttft_ms, 0.95),
            (&of.ttft_ms, 0.99),
            (&of.tpot_ms, 0.5),
            (&of.tpot_ms, 0.95),
            (&of.tpot_ms, 0.99),
            (&of.itl_ms, 0.5),
            (&of.itl_ms, 0.95),
            (&of.itl_ms, 0.99),
            (&of.itl_ms, 1.0),
            (&of.e2e_ms, 0.5),
            (&of.e2e_ms, 0.95),
            (&of.e2e_ms, 0.99),
        ];
        Some(numbers.map(|(of, percentile)| maybe(of.percentile(percentile))).to_vec())
    })
}

fn rates(summary: &Summary) -> Option<String> {
    let heads = [
        "asked",
        "ok",
        "refused",
        "failed",
        "prompt tok/s",
        "output tok/s",
        "good %",
        "good/s",
        "smooth %",
        "stalls",
        "hit %",
        "pred. err. %",
    ];
    table(summary, "rates", &heads, |point| {
        let of = &point.figures;
        let share = |share: Option<f64>| share.map_or_else(|| NONE.to_owned(), percent);
        Some(vec![
            of.requests.to_string(),
            of.completed.to_string(),
            of.refused.to_string(),
            (of.failures() + of.unfinished).to_string(),
            short(of.prompt_throughput()),
            short(of.output_throughput()),
            percent(of.good_share()),
            short(of.goodput()),
            share(of.smoothness()),
            of.stalls.to_string(),
            share(of.hit_rate()),
            share(of.server.prediction_error.median()),
        ])
    })
}

fn attribution(summary: &Summary) -> Option<String> {
    let points = summary.points.iter().filter(|point| !point.attribution.is_empty());
    let mut lines: Vec<Vec<String>> = Vec::new();
    for point in points {
        // The 95th percentile is in the other reports.
        for of in point.attribution.iter().filter(|of| of.percentile != 0.95) {
            if lines.is_empty() {
                let mut head = names(summary, point);
                head.fill(String::new());
                head[0] = "where TTFT goes, ms".to_owned();
                head.extend(["", "TTFT"].map(str::to_owned));
                head.extend(of.parts().map(|(name, _)| name.to_owned()));
                lines.push(head);
            }
            let mut line = names(summary, point);
            line.push(format!("p{:.0}", of.percentile * 100.0));
            line.push(ms(of.ttft_ms));
            line.extend(of.parts().map(|(_, part_ms)| ms(part_ms)));
            lines.push(line);
        }
    }
    let left = names(summary, summary.points.first()?).len() + 1;
    (!lines.is_empty()).then(|| aligned(&lines, left))
}

/// Which node did how much, where there are several.
fn nodes(summary: &Summary) -> Option<String> {
    let mut lines: Vec<Vec<String>> = Vec::new();
    for point in &summary.points {
        for (kind, loads) in point.figures.balance.kinds().filter(|(_, loads)| loads.len() > 1) {
            let mut line = names(summary, point);
            if lines.is_empty() {
                let mut head = vec![String::new(); line.len()];
                head[0] = "nodes".to_owned();
                head.extend(["", "requests/tokens of each", "nodes", "max/mean", "tokens max/mean"].map(str::to_owned));
                lines.push(head);
            }
            let each = loads.iter().take(MOST_NODES);
            let each = each.map(|(name, of)| format!("{} {}/{}", plain(name), of.requests, of.tokens));
            let more = if loads.len() > MOST_NODES { ", …" } else { "" };
            let each = format!("{}{more}", each.collect::<Vec<String>>().join(", "));
            line.extend([kind.to_owned(), each, loads.len().to_string()]);
            line.push(short(max_by_mean(loads, |of| of.requests)));
            line.push(short(max_by_mean(loads, |of| of.tokens)));
            lines.push(line);
        }
    }
    let left = names(summary, summary.points.first()?).len() + 2;
    (!lines.is_empty()).then(|| aligned(&lines, left))
}

fn predictions(summary: &Summary) -> Option<String> {
    let heads =
        ["batch", "context", "TPOT pred.", "measured", "reached %", "prefill pred.", "measured", "reached %", "by"];
    let title = format!("{}, ms", model::title(&summary.points));
    table(summary, &title, &heads, |point| {
        let of = point.prediction.filter(|of| of.tpot.is_some() || of.prefill.is_some())?;
        let mut cells = vec![short(of.batch), short(of.context_tokens)];
        for of in [of.tpot, of.prefill] {
            cells.push(maybe(of.map(|of| of.predicted_ms)));
            cells.push(maybe(of.map(|of| of.measured_ms)));
            cells.push(of.map_or_else(|| NONE.to_owned(), |of| percent(of.share_reached)));
        }
        cells.push(of.sources());
        Some(cells)
    })
}

/// One line for each regime of a row on an endpoint: at which loads, and why at the last of them.
fn findings(summary: &Summary) -> Option<String> {
    let lines = regime::grouped(&summary.points).into_iter().map(|group| {
        let mut line = names(summary, group.point);
        line[1] = group.span();
        line.extend([group.finding.regime.label().to_owned(), group.finding.because.clone()]);
        line
    });
    let lines: Vec<Vec<String>> = [vec!["what bounds it".to_owned()]].into_iter().chain(lines).collect();
    (lines.len() > 1).then(|| aligned(&lines, usize::MAX))
}

fn knees(summary: &Summary) -> Option<String> {
    let mut out = String::new();
    for curve in &summary.curves {
        let endpoint =
            if has_endpoints(summary) { format!(" {}", endpoint_letter(curve.endpoint)) } else { String::new() };
        let at = |rate: f64| format!("{}/s{}", brief(rate), curve.sure(rate));
        let knee = match (curve.knee.holds, curve.knee.breaks) {
            (Some(holds), Some(breaks)) => format!("holds at {}, breaks at {}", at(holds), at(breaks)),
            (Some(holds), None) => format!("holds at {}, the highest rate measured", at(holds)),
            (None, Some(breaks)) => format!("breaks at {}, the lowest rate measured", at(breaks)),
            (None, None) => continue,
        };
        out.push_str(&format!("goodput of {}{endpoint} {}: {knee}\n", plain(&curve.row), warmth(curve.warm)));
    }
    (!out.is_empty()).then_some(out)
}

fn comparisons(summary: &Summary) -> Option<String> {
    let mut lines: Vec<Vec<String>> = Vec::new();
    for comparison in &summary.comparisons {
        let (base, other) = comparison.kind.names();
        let title = format!("{other} beside {base}: {} {}", plain(&comparison.row), comparison.load.label());
        lines.push([&title, base, other, "ratio", "95 % interval", ""].map(str::to_owned).to_vec());
        for line in &comparison.lines {
            let interval =
                line.interval.map_or_else(|| NONE.to_owned(), |of| format!("{} … {}", short(of.low), short(of.high)));
            let verdict = match line.other_is_better() {
                Some(true) => "better",
                Some(false) => "worse",
                None => "no difference seen",
            };
            let name = format!("  {}, {}", line.metric.label(), line.metric.unit());
            lines.push(vec![
                name,
                short(line.base),
                short(line.other),
                short(line.ratio),
                interval,
                verdict.to_owned(),
            ]);
        }
    }
    (!lines.is_empty()).then(|| aligned(&lines, 1))
}

fn failures(summary: &Summary) -> Option<String> {
    let mut lines = Vec::new();
    for point in &summary.points {
        let failed = |of: &Figures| {
            of.failed.iter().map(|(kind, times)| format!("{times} × {}", plain(kind))).collect::<Vec<_>>()
        };
        let kinds = failed(&point.figures);
        if !kinds.is_empty() {
            lines.push(format!("{}: {}", plain(&point.name()), kinds.join(", ")));
        }
    }
    listed("failed", &lines)
}

fn warnings(summary: &Summary) -> Option<String> {
    listed("take care", &summary.warnings.iter().map(|warning| plain_long(warning)).collect::<Vec<String>>())
}

fn listed(title: &str, lines: &[String]) -> Option<String> {
    let mut out = format!("{title}\n");
    for line in lines.iter().take(MOST_LINES) {
        out.push_str(&format!("  {line}\n"));
    }
    if lines.len() > MOST_LINES {
        out.push_str(&format!("  … and {} more\n", lines.len() - MOST_LINES));
    }
    (!lines.is_empty()).then_some(out)
}

/// A name from outside, short and without control characters.
fn plain(text: &str) -> String {
    let text = plain_long(text);
    if text.chars().count() <= MOST_NAME { text } else { text.chars().take(MOST_NAME - 1).chain(['…']).collect() }
}

fn plain_long(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { '·' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, GOALS, sample_run};
    use super::super::summarize;
    use super::*;
    use crate::cost_model::Model;
    use crate::record::{ClusterNode, Nodes, Outcome, Record, Run};

    #[test]
    fn a_small_run_by_hand() {
        let records = vec![
            fixture::record(0.0, &[(0.25, 1), (0.28, 1), (0.31, 1)]),
            fixture::record(1.0, &[(1.5, 1), (1.54, 1), (1.56, 1)]),
            fixture::with_outcome(2.0, Outcome::Failed { kind: "reset\x1b[2J".into(), message: String::new() }),
        ];
        let run = Run { intervals: vec![fixture::interval(4.0, records)], ..Run::default() };
        let got = text(&summarize(&run, GOALS, None));
        let want = "\
3 requests in 4.00 s; good is TTFT ≤ 400 ms and TPOT ≤ 40.0 ms

latency, ms       TTFT p50  p95  p99  TPOT p50   p95   p99  ITL p50   p95   p99   max  E2E p50  p95  p99
row          1/s       375  488  498      30.0  30.0  30.0     30.0  38.5  39.7  40.0      435  548  558

rates       asked  ok  refused  failed  prompt tok/s  output tok/s  good %  good/s  smooth %  stalls  hit %  pred. err. %
row    1/s      3   2        0       1          50.0          1.50    33.3    0.25     100.0       0   25.0             –

failed
  row 1/s A cold: 1 × reset·[2J

take care
  row 1/s A cold: p99 of 2 requests is the worst of them
";
        assert_eq!(got, want);
    }

    #[test]
    fn a_benchmark_fits_a_terminal() {
        let got = text(&summarize(&sample_run(), GOALS, Some(&fixture::model())));
        for part in [
            "SmolLM2-135M-Instruct bf16:",
            "A = http://127.0.0.1:8000\nB = http://127.0.0.1:8001\n",
            "where TTFT goes, ms",
            "network, client",
            "goodput of short chat A cold: holds at 8/s (",
            "), breaks at 16/s (",
            "B beside A: short chat 2/s",
            "warm beside cold: shared prefix 1/s",
            "scheduler saturation",
            "cold cache",
        ] {
            assert!(got.contains(part), "no {part:?} in\n{got}");
        }
        assert!(got.lines().all(|line| line.chars().count() <= 160), "{got}");
    }

    #[test]
    fn forecasts_say_what_they_rest_on() {
        let cost = fixture::model().decode_cost;
        let own = Model { prefill_cost: cost, decode_cost: cost, decode_nodes: 1, ..Model::default() };
        let mut run = sample_run();
        run.info.models = vec![own.clone(), own];
        let got = text(&summarize(&run, GOALS, None));
        assert!(got.contains("the nodes' own cost model, ms") && got.contains("  own step cost\n"), "{got}");
        assert!(!got.contains("the hardware allows") && !got.contains("-bound"), "{got}");
        let got = text(&summarize(&run, GOALS, Some(&fixture::model())));
        assert!(got.contains("the hardware allows, ms") && got.contains("  bandwidth, prefill rate\n"), "{got}");
    }

    #[test]
    fn an_uneven_use_of_nodes_is_seen() {
        let on = |decode: &str| Record {
            nodes: Nodes::named("p0", decode).unwrap_or_default(),
            ..fixture::record(0.0, &[(0.1, 1), (0.2, 1)])
        };
        let mut run = Run {
            intervals: vec![fixture::interval(4.0, vec![on("d0"), on("d0"), on("d0"), on("d1")])],
            ..Run::default()
        };
        let got = text(&summarize(&run, GOALS, None));
        assert!(got.contains("answers  d0 3/6, d1 1/2               2      1.50             1.50\n"), "{got}");
        assert!(!got.contains("prompts"), "one node alone is even: {got}");
        let idle = ClusterNode { id: "p1".into(), role: "prefill".into() };
        run.info.nodes = vec![vec![idle]];
        let got = text(&summarize(&run, GOALS, None));
        assert!(got.contains("prompts  p0 4/300, p1 0/0             2      2.00             2.00\n"), "{got}");
    }

    #[test]
    fn nothing_measured_is_said_in_a_line() {
        assert_eq!(
            text(&summarize(&Run::default(), GOALS, None)),
            "0 requests in 0.00 s; good is TTFT ≤ 400 ms and TPOT ≤ 40.0 ms\n"
        );
    }
}
