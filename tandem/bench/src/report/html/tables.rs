//! The tables of the page (pure).
use crate::report::markup::escape;
use crate::report::metric::Metric;
use crate::report::model::Predicted;
use crate::report::number::{NONE, count, maybe, ms, percent, short};
use crate::report::{Point, Summary, endpoint_letter, regime, warmth};
use crate::stats::balance::max_by_mean;
use crate::stats::confidence::Basis;

/// Nodes of a point that are listed by name; all are in the JSON.
const MOST_NODES: usize = 32;

/// Cells of a table: the first `left` of a line are text, the others numbers. Cells are markup already.
fn table(heads: &[&str], left: usize, lines: &[Vec<String>]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let class = |column: usize| if column < left { " class=\"text\"" } else { "" };
    let head = heads.iter().enumerate().map(|(column, head)| format!("<th{}>{}</th>", class(column), escape(head)));
    let line = |cells: &Vec<String>| {
        let cells = cells.iter().enumerate().map(|(column, cell)| format!("<td{}>{cell}</td>", class(column)));
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    let (head, body) = (head.collect::<String>(), lines.iter().map(line).collect::<String>());
    format!("<div class=\"card\"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n")
}

/// Of the columns that name a point: those that tell two points apart.
fn heads(summary: &Summary) -> Vec<&'static str> {
    let mut heads = vec!["workload", "load"];
    heads.extend(summary.points.iter().any(|point| point.key.endpoint != 0).then_some("endpoint"));
    heads.extend(summary.points.iter().any(|point| point.key.warm).then_some("prefix"));
    heads
}

fn names(summary: &Summary, point: &Point) -> Vec<String> {
    let name = |head: &str| match head {
        "workload" => escape(&point.key.row),
        "load" => escape(&point.key.load.label()),
        "endpoint" => endpoint_letter(point.key.endpoint).to_string(),
        _ => warmth(point.key.warm).to_owned(),
    };
    heads(summary).into_iter().map(name).collect()
}

/// Medians first, with their intervals below.
pub fn points(summary: &Summary) -> String {
    let numbers = [
        "answered",
        "TTFT p50",
        "p95",
        "p99",
        "TPOT p50",
        "p99",
        "ITL p99",
        "E2E p50",
        "output tok/s",
        "good %",
        "good/s",
        "smooth %",
        "hit %",
    ];
    let line = |point: &Point| {
        let of = &point.figures;
        let plain = |of: &crate::stats::Distribution, p: f64| maybe(of.percentile(p));
        let share = |share: Option<f64>| share.map_or_else(|| NONE.to_owned(), percent);
        let mut cells = names(summary, point);
        cells.push(format!("{}<small>of {}</small>", count(of.completed as u64), count(of.requests as u64)));
        cells.extend([sure(point, Metric::TtftMedian), plain(&of.ttft_ms, 0.95), sure(point, Metric::TtftP99)]);
        cells.extend([sure(point, Metric::TpotMedian), plain(&of.tpot_ms, 0.99)]);
        cells.extend([sure(point, Metric::ItlP99), sure(point, Metric::E2eMedian)]);
        cells.extend([sure(point, Metric::OutputThroughput), percent(of.good_share()), sure(point, Metric::Goodput)]);
        cells.extend([share(of.smoothness()), share(of.hit_rate())]);
        cells
    };
    let lines: Vec<Vec<String>> = summary.points.iter().map(line).collect();
    let basis = summary.points.iter().flat_map(|point| &point.estimates).map(|(_, estimate)| estimate.basis);
    let note = match (lines.is_empty(), basis.clone().any(|basis| basis == Basis::Requests)) {
        (true, _) => "",
        (false, true) => {
            "<p class=\"soft\">Times in ms. Below a number: its 95 % interval, over repeats; with fewer than three repeats over requests, which is optimistic.</p>\n"
        }
        (false, false) => "<p class=\"soft\">Times in ms. Below a number: its 95 % interval over the repeats.</p>\n",
    };
    format!("{}{note}", table(&[&heads(summary)[..], &numbers].concat(), heads(summary).len(), &lines))
}

/// A number with its interval.
fn sure(point: &Point, metric: Metric) -> String {
    let number = maybe(metric.of(&point.figures));
    let estimate = point.estimates.iter().find(|(of, _)| *of == metric);
    let interval = estimate.map(|(_, of)| format!("<small>{} … {}</small>", short(of.low.max(0.0)), short(of.high)));
    number + &interval.unwrap_or_default()
}

/// What bounds the rows, and why at the last of the loads.
pub fn findings(summary: &Summary) -> String {
    let lines = regime::grouped(&summary.points).into_iter().map(|group| {
        let tag = format!("<span class=\"tag\">{}</span>", group.finding.regime.label());
        let mut line = names(summary, group.point);
        line[1] = escape(&group.span());
        line.extend([tag, escape(&group.finding.because)]);
        line
    });
    table(&[&heads(summary)[..], &["regime", "because"]].concat(), usize::MAX, &lines.collect::<Vec<_>>())
}

/// Predicted beside measured.
pub fn predictions(summary: &Summary) -> String {
    let lines = summary.points.iter().filter_map(|point| {
        let of = point.prediction.filter(|of| of.tpot.is_some() || of.prefill.is_some())?;
        let mut cells = names(summary, point);
        cells.extend([short(of.batch), short(of.context_tokens)]);
        cells.extend([of.tpot, of.prefill].into_iter().flat_map(predicted));
        cells.push(of.sources());
        Some(cells)
    });
    let point_heads = heads(summary);
    let heads = [
        "batch",
        "context",
        "TPOT predicted, ms",
        "measured",
        "reached %",
        "prefill predicted, ms",
        "measured",
        "reached %",
        "by",
    ];
    table(&[&point_heads[..], &heads].concat(), point_heads.len(), &lines.collect::<Vec<_>>())
}

fn predicted(of: Option<Predicted>) -> [String; 3] {
    of.map_or_else(
        || [NONE, NONE, NONE].map(str::to_owned),
        |of| [ms(of.predicted_ms), ms(of.measured_ms), percent(of.share_reached)],
    )
}

/// Which node did how much, where there are several; as many lines a point as it has nodes.
pub fn nodes(summary: &Summary) -> String {
    let mut lines = Vec::new();
    for point in &summary.points {
        for (kind, loads) in point.figures.balance.kinds().filter(|(_, loads)| loads.len() > 1) {
            let mut line = names(summary, point);
            line.extend([kind.to_owned(), "max / mean".to_owned()]);
            line.push(short(max_by_mean(loads, |of| of.requests)));
            line.push(short(max_by_mean(loads, |of| of.tokens)));
            lines.push(line);
            for (name, of) in loads.iter().take(MOST_NODES) {
                let mut line = vec![String::new(); heads(summary).len() + 1];
                line.extend([escape(name), count(of.requests), count(of.tokens)]);
                lines.push(line);
            }
        }
    }
    let point_heads = heads(summary);
    let heads = ["of", "node", "requests", "tokens"];
    let note = "<p class=\"soft\">Prompts: where they were computed, with the tokens that were not cached. Answers: where they were decoded, with their tokens.</p>\n";
    let table = table(&[&point_heads[..], &heads].concat(), point_heads.len() + 2, &lines);
    if table.is_empty() { table } else { table + note }
}

/// What ran, where and how.
pub fn run(summary: &Summary) -> String {
    let info = &summary.info;
    let lag = format!("p99 {} ms, at most {} ms", ms(info.own_lag_p99_ms), ms(info.own_lag_max_ms));
    let facts = [
        ("command", info.command.join(" ")),
        ("tandem", info.tandem_version.clone()),
        ("commit", info.commit.clone()),
        ("started", date(info.started_unix_s)),
        ("machine", info.machine.clone()),
        ("endpoints", info.endpoints.join(", ")),
        ("model", info.model.clone()),
        ("dtype", info.dtype.clone()),
        ("server flags", info.server_flags.join(" ")),
        ("seed", info.seed.to_string()),
        ("salt", info.salt.to_string()),
        ("generator's own lag", lag),
        ("failed", failures(summary)),
    ];
    let facts = facts.into_iter().filter(|(_, fact)| !fact.is_empty());
    let lines = facts.map(|(name, fact)| {
        format!("<tr><th class=\"text\">{name}</th><td class=\"text wrap\">{}</td></tr>\n", escape(&fact))
    });
    format!("<div class=\"card\"><table><tbody>\n{}</tbody></table></div>\n", lines.collect::<String>())
}

fn failures(summary: &Summary) -> String {
    let kinds = summary.totals.iter().flat_map(|(_, of)| &of.failed).map(|(kind, times)| format!("{times} × {kind}"));
    kinds.collect::<Vec<String>>().join(", ")
}

/// UTC, by Howard Hinnant's `civil_from_days`; empty for 0.
fn date(unix_s: u64) -> String {
    // The year 9999 ends there; beyond, nobody means a date.
    if unix_s == 0 || unix_s > 253_402_300_799 {
        return String::new();
    }
    let (days, seconds) = (unix_s / 86_400 + 719_468, unix_s % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_by_hand() {
        // As `date -u -d @…` prints them.
        assert_eq!(date(951_827_696), "2000-02-29 12:34:56 UTC");
        assert_eq!(date(1_795_312_800), "2026-11-22 02:00:00 UTC");
        assert_eq!((date(0), date(u64::MAX)), (String::new(), String::new()));
    }
}
