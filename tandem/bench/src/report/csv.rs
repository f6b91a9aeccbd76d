//! One line for each interval (pure), for spreadsheets and plotting scripts. RFC 4180; times in milliseconds; an absent
//! number is an empty field.
use super::{Point, Summary, warmth};
use crate::stats::Distribution;
use crate::stats::figures::Figures;

/// The percentiles of each latency.
const PERCENTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)];
/// What each latency is called.
const LATENCIES: [&str; 5] = ["ttft", "tpot", "itl", "e2el", "lag"];
/// What stands before the latencies …
const KEYS: [&str; 18] = [
    "row",
    "endpoint",
    "prefix",
    "rate",
    "concurrency",
    "repeat",
    "seconds",
    "duration",
    "requests",
    "completed",
    "refused",
    "failed",
    "unfinished",
    "good",
    "good_share",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
];
/// … and behind them.
const RATES: [&str; 7] = [
    "request_throughput",
    "request_goodput",
    "prompt_throughput",
    "output_throughput",
    "smoothness",
    "stalls",
    "prediction_error_p50",
];

/// With a head line; lines end with CR LF.
pub fn csv(summary: &Summary) -> String {
    let mut out = line(&head());
    for point in &summary.points {
        for (repeat, figures) in &point.repeats {
            out.push_str(&line(&fields(point, *repeat, figures)));
        }
    }
    out
}

fn head() -> Vec<String> {
    let latencies = LATENCIES.into_iter().flat_map(|latency| {
        let percentiles = PERCENTILES.into_iter().map(move |(name, _)| format!("{name}_{latency}_ms"));
        percentiles.chain(["mean", "max"].map(|name| format!("{name}_{latency}_ms")))
    });
    KEYS.into_iter().map(str::to_owned).chain(latencies).chain(RATES.into_iter().map(str::to_owned)).collect()
}

fn fields(point: &Point, repeat: u32, of: &Figures) -> Vec<String> {
    let (rate, concurrency) = (point.key.load.rate(), point.key.load.concurrency());
    let mut fields = vec![
        point.key.row.clone(),
        point.key.endpoint.to_string(),
        warmth(point.key.warm).to_owned(),
        number(rate),
        concurrency.map(|concurrency| concurrency.to_string()).unwrap_or_default(),
        repeat.to_string(),
        number(Some(of.seconds)),
        number(Some(of.served.seconds)),
    ];
    let counts = [of.requests, of.completed, of.refused, of.failures(), of.unfinished, of.good];
    fields.extend(counts.map(|count| count.to_string()));
    fields.push(number(Some(of.good_share())));
    fields.extend([of.prompt_tokens, of.cached_tokens, of.output_tokens].map(|count| count.to_string()));
    for latency in [&of.ttft_ms, &of.tpot_ms, &of.itl_ms, &of.e2e_ms, &of.lag_ms] {
        fields.extend(latencies(latency));
    }
    let rates = [of.request_throughput(), of.goodput(), of.prompt_throughput(), of.output_throughput()];
    fields.extend(rates.map(|rate| number(Some(rate))));
    fields.extend([number(of.smoothness()), of.stalls.to_string(), number(of.server.prediction_error.median())]);
    fields
}

fn latencies(of: &Distribution) -> impl Iterator<Item = String> {
    let percentiles = PERCENTILES.map(|(_, percentile)| number(of.percentile(percentile)));
    percentiles.into_iter().chain([number(of.mean()), number(of.max())])
}

/// Six decimals at most: nanoseconds of a millisecond.
fn number(value: Option<f64>) -> String {
    let value = value.filter(|value| value.is_finite());
    let digits = value.map(|value| format!("{value:.6}")).unwrap_or_default();
    digits.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn line(fields: &[String]) -> String {
    let quoted: Vec<String> = fields.iter().map(|field| quoted(field)).collect();
    format!("{}\r\n", quoted.join(","))
}

fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, GOALS, sample_run};
    use super::super::summarize;
    use super::*;
    use crate::record::Run;

    #[test]
    fn a_line_by_hand() {
        let records = vec![fixture::record(0.0, &[(0.25, 1), (0.5, 2)]), fixture::record(1.0, &[(1.5, 1), (1.625, 1)])];
        let mut interval = fixture::interval(4.0, records);
        interval.row = "chat, \"short\"".into();
        let text = csv(&summarize(&Run { intervals: vec![interval], ..Run::default() }, GOALS, None));
        let lines: Vec<&str> = text.split("\r\n").collect();
        assert_eq!(lines.len(), 3);
        assert!(
            lines[0].starts_with("row,endpoint,prefix,rate,concurrency,repeat,seconds,duration,requests,completed,")
        );
        // TTFT 250 and 500; TPOT 250 / 2 and 125, which is over the objective; two of five tokens are late.
        let want = "\"chat, \"\"short\"\"\",0,cold,1,,0,4,4,2,2,0,0,0,0,0,200,50,5,375,475,487.5,497.5,375,500,125,125,125,125,125,125,";
        assert!(lines[1].starts_with(want), "{}", lines[1]);
        assert!(lines[1].ends_with(",0.5,0,50,1.25,0.6,0,"), "{}", lines[1]);
    }

    #[test]
    fn every_line_has_all_fields() {
        let summary = summarize(&sample_run(), GOALS, None);
        let text = csv(&summary);
        let fields: Vec<usize> = text.lines().map(|line| line.split(',').count()).collect();
        assert_eq!(fields.len(), 1 + sample_run().intervals.len());
        assert!(fields.iter().all(|count| *count == KEYS.len() + LATENCIES.len() * 6 + RATES.len()), "{fields:?}");
        assert_eq!(number(Some(1e9)), "1000000000");
    }
}
