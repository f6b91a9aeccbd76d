//! The summary as one page (pure): no script, nothing fetched, readable in light and in dark. [`tables`] has its
//! tables, [`charts`] what is drawn.
use super::curve::Curve;
use super::markup::escape;
use super::number::{NONE, brief, count, maybe, ms, percent, short};
use super::{Summary, endpoint_letter};

mod charts;
mod tables;

const STYLE: &str = include_str!("html/style.css");
/// Tiles for so many knees; more are in the charts.
const MOST_KNEES: usize = 4;
/// Warnings that are listed; a count says how many there are beyond.
const MOST_WARNINGS: usize = 20;

/// A whole document.
pub fn html(summary: &Summary) -> String {
    let mut rows: Vec<&str> = Vec::new();
    for point in &summary.points {
        if !rows.contains(&point.key.row.as_str()) {
            rows.push(&point.key.row);
        }
    }
    let workloads: String = rows.into_iter().map(|row| charts::workload(summary, row)).collect();
    let body = [
        head(summary),
        tiles(summary),
        warnings(summary),
        section("Results", &tables::points(summary)),
        section("What bounds it", &tables::findings(summary)),
        workloads,
        section("Comparisons", &charts::comparisons(summary)),
        section("Nodes", &tables::nodes(summary)),
        section(&predictions_title(summary), &tables::predictions(summary)),
        section("The run", &tables::run(summary)),
    ];
    let policy = "default-src 'none'; style-src 'unsafe-inline'";
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n<title>tandem bench: {}</title>\n<style>\n{STYLE}</style>\n</head>\n\
         <body>\n<main>\n{}</main>\n</body>\n</html>\n",
        escape(&summary.info.model),
        body.concat()
    )
}

/// With a capital.
fn predictions_title(summary: &Summary) -> String {
    let title = super::model::title(&summary.points);
    title.chars().take(1).flat_map(char::to_uppercase).chain(title.chars().skip(1)).collect()
}

/// Nothing without content.
fn section(title: &str, content: &str) -> String {
    if content.is_empty() { String::new() } else { format!("<h2>{}</h2>\n{content}", escape(title)) }
}

fn head(summary: &Summary) -> String {
    let info = &summary.info;
    let parts = [&info.dtype, &info.machine, &info.commit];
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).map(|part| escape(part)).collect();
    let model = if info.model.is_empty() { "a benchmark" } else { &info.model };
    let goals = summary.objectives.map_or_else(String::new, |goals| {
        format!(
            "<p class=\"soft\">A request is good when TTFT ≤ {} ms and TPOT ≤ {} ms.</p>\n",
            ms(goals.ttft_ms),
            ms(goals.tpot_ms)
        )
    });
    format!("<header><h1>{}</h1>\n<p class=\"soft\">{}</p>\n{goals}</header>\n", escape(model), parts.join(" · "))
}

fn tiles(summary: &Summary) -> String {
    let sum = |number: fn(&super::Figures) -> usize| summary.totals.iter().map(|(_, of)| number(of)).sum::<usize>();
    let (asked, completed, refused) = (sum(|of| of.requests), sum(|of| of.completed), sum(|of| of.refused));
    let lost = asked - completed - refused;
    let answered = format!("of {} requests answered", count(asked as u64));
    let mut tiles = tile(&count(completed as u64), "", &answered);
    tiles.push_str(&tile(&count(refused as u64), "", "refused for load"));
    tiles.push_str(&tile(&count(lost as u64), "", "failed or cut off"));
    for curve in summary.curves.iter().take(MOST_KNEES) {
        tiles.push_str(&knee(summary, curve));
    }
    if let ([(_, of)], true) = (&summary.totals[..], summary.curves.is_empty()) {
        tiles.push_str(&tile(&maybe(of.ttft_ms.median()), " ms", "TTFT, median"));
        tiles.push_str(&tile(&maybe(of.tpot_ms.median()), " ms", "TPOT, median"));
        tiles.push_str(&tile(&short(of.output_throughput()), " /s", "output tokens"));
        tiles.push_str(&tile(&percent(of.good_share()), " %", "good requests"));
    }
    format!("<div class=\"tiles\">{tiles}</div>\n")
}

fn tile(number: &str, unit: &str, name: &str) -> String {
    format!(
        "<div class=\"tile\"><b>{}<small>{}</small></b><span>{}</span></div>",
        escape(number),
        escape(unit),
        escape(name)
    )
}

fn knee(summary: &Summary, curve: &Curve) -> String {
    let several = summary.totals.len() > 1;
    let endpoint = if several { format!(" on {}", endpoint_letter(curve.endpoint)) } else { String::new() };
    let holds = curve.knee.holds;
    let sure = [holds, curve.knee.breaks].map(|rate| rate.map_or_else(String::new, |rate| curve.sure(rate)));
    let sure = match (&holds, &curve.knee.breaks) {
        (Some(_), Some(breaks)) => format!("{}; breaks at {}/s{}", sure[0], brief(*breaks), sure[1]),
        _ => sure.concat(),
    };
    let name = format!("goodput, {}{endpoint}{sure}", curve.row);
    tile(&holds.map_or_else(|| NONE.to_owned(), brief), " /s", &name)
}

fn warnings(summary: &Summary) -> String {
    if summary.warnings.is_empty() {
        return String::new();
    }
    let shown = summary.warnings.iter().take(MOST_WARNINGS).map(|warning| format!("<p>{}</p>", escape(warning)));
    let beyond = summary.warnings.len().saturating_sub(MOST_WARNINGS);
    let more = if beyond > 0 { format!("<p class=\"soft\">… and {beyond} more</p>") } else { String::new() };
    format!("<div class=\"card warn\">{}{more}</div>\n", shown.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, GOALS, sample_run};
    use super::super::markup::unbalanced;
    use super::super::summarize;
    use super::*;
    use crate::record::{Outcome, Run};

    #[test]
    fn a_whole_benchmark() {
        let page = html(&summarize(&sample_run(), GOALS, Some(&fixture::model())));
        assert_eq!(unbalanced(&page), None);
        for part in [
            "TTFT, cumulative",
            "Where TTFT goes",
            "Latency over rate",
            "Goodput over rate",
            "Over the run",
            "B beside A",
            "warm beside cold",
            "SmolLM2-135M-Instruct",
            "--sweep",
            "scheduler saturation",
            "goodput, short chat on A",
            "knee A, B 8/s",
        ] {
            assert!(page.contains(part), "no {part:?}");
        }
        // Nothing from outside, no scripts, and small enough to send around.
        for foreign in ["<script", "<link", "<img", "src=", "url(", "@import", "javascript:"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        assert!(page.len() < 600_000, "{}", page.len());
    }

    #[test]
    fn text_from_outside_stays_text() {
        let evil = "<script>alert(1)</script>\"'&";
        let mut run = sample_run();
        run.info.model = evil.into();
        run.info.machine = evil.into();
        run.info.server_flags = vec![evil.into()];
        for interval in &mut run.intervals {
            interval.row = evil.into();
        }
        run.intervals[0].records[0].outcome = Outcome::Failed { kind: evil.into(), message: evil.into() };
        let page = html(&summarize(&run, GOALS, None));
        assert_eq!(unbalanced(&page), None);
        assert!(!page.contains("<script") && page.contains("&lt;script&gt;alert(1)"));
    }

    #[test]
    fn an_empty_run_is_a_page_too() {
        let page = html(&summarize(&Run::default(), GOALS, None));
        assert_eq!(unbalanced(&page), None);
        assert!(page.contains("of 0 requests answered") && !page.contains("<svg"));
    }
}
