//! The summary as JSON (pure). At the top stand the keys of vLLM's `benchmark_serving`, so that what reads its files
//! reads ours: they are all points of endpoint 0 together, and exact when there is one point. Each point has the same
//! keys, and ours, under `tandem.points`.
//!
//! What was not measured is null.
use serde_json::{Map, Value, json as value};

use super::compare::Comparison;
use super::curve::{Curve, Step};
use super::{Load, Point, Summary, warmth};
use crate::stats::Distribution;
use crate::stats::balance::{NodeLoads, max_by_mean};
use crate::stats::figures::{Figures, Server};

/// Raised when the meaning of a key changes.
const FORMAT: u32 = 1;
/// Beside mean, median and standard deviation.
const PERCENTILES: [(&str, f64); 3] = [("p90", 0.9), ("p95", 0.95), ("p99", 0.99)];

/// One object.
pub fn json(summary: &Summary) -> Value {
    let nothing = Figures::default();
    let first = summary.totals.first().map_or(&nothing, |(_, of)| of);
    let mut top = figures(first);
    top.insert("model_id".into(), value!(summary.info.model));
    top.insert("num_prompts".into(), value!(first.requests));
    let load = single_load(summary);
    top.insert("request_rate".into(), value!(load.and_then(Load::rate)));
    top.insert("max_concurrency".into(), value!(load.and_then(Load::concurrency)));
    top.insert("tandem".into(), ours(summary));
    Value::Object(top)
}

fn ours(summary: &Summary) -> Value {
    value!({
        "format": FORMAT,
        "run": summary.info,
        "objectives": summary.objectives,
        "model": summary.model,
        "definitions": {
            "ttft": "intended send time to the first chunk with tokens",
            "e2el": "intended send time to the last chunk with tokens",
            "tpot": "(e2el - ttft) / (output tokens - 1)",
            "itl": "gaps between chunks with tokens",
            "throughputs": "over duration: the offered window, or to the last answer where that is later; a closed loop counts what came inside its window",
            "request_goodput": "good requests over offered_seconds",
            "percentiles": "all samples, linear between ranks (type 7)",
            "top_level": "all points of the first endpoint together",
        },
        "points": summary.points.iter().map(point).collect::<Vec<Value>>(),
        "curves": summary.curves.iter().map(curve).collect::<Vec<Value>>(),
        "comparisons": summary.comparisons.iter().map(comparison).collect::<Vec<Value>>(),
        "warnings": summary.warnings,
    })
}

/// vLLM's key names, in its units.
fn figures(of: &Figures) -> Map<String, Value> {
    let mut out = Map::new();
    let mut put = |key: &str, value: Value| out.insert(key.to_owned(), value);
    put("duration", value!(of.served.seconds));
    put("completed", value!(of.completed));
    put("failed", value!(of.requests - of.completed));
    put("total_input_tokens", value!(of.prompt_tokens));
    put("total_output_tokens", value!(of.output_tokens));
    put("request_throughput", value!(of.request_throughput()));
    put("request_goodput", value!(of.goodput()));
    put("output_throughput", value!(of.output_throughput()));
    put("total_token_throughput", value!(of.prompt_throughput() + of.output_throughput()));
    for (name, of) in [("ttft", &of.ttft_ms), ("tpot", &of.tpot_ms), ("itl", &of.itl_ms), ("e2el", &of.e2e_ms)] {
        put(&format!("mean_{name}_ms"), value!(of.mean()));
        put(&format!("median_{name}_ms"), value!(of.median()));
        put(&format!("std_{name}_ms"), value!(of.deviation()));
        put(&format!("max_{name}_ms"), value!(of.max()));
        for (percentile, share) in PERCENTILES {
            put(&format!("{percentile}_{name}_ms"), value!(of.percentile(share)));
        }
    }
    out
}

/// The load, when all points have the same.
fn single_load(summary: &Summary) -> Option<Load> {
    let mut loads = summary.points.iter().map(|point| point.key.load);
    let first = loads.next()?;
    loads.all(|other| other == first).then_some(first)
}

fn point(point: &Point) -> Value {
    let of = &point.figures;
    let mut out = figures(of);
    let own = value!({
        "row": point.key.row,
        "endpoint": point.key.endpoint,
        "prefix": warmth(point.key.warm),
        "request_rate": point.key.load.rate(),
        "max_concurrency": point.key.load.concurrency(),
        "offered_seconds": of.seconds,
        "repeats": point.repeats.len(),
        "requests": of.requests,
        "refused": of.refused,
        "unfinished": of.unfinished,
        "failures": of.failed,
        "good": of.good,
        "good_share": of.good_share(),
        "prompt_throughput": of.prompt_throughput(),
        "hit_rate": of.hit_rate(),
        "smoothness": of.smoothness(),
        "stalls": of.stalls,
        "longest_gap_ms": of.itl_ms.max(),
        "p99_own_lag_ms": of.lag_ms.percentile(0.99),
        "max_own_lag_ms": of.lag_ms.max(),
        "refusal_ms": spread(&of.refusal_ms),
        "server": server(&of.server),
        "nodes": { "prompts": nodes(&of.balance.prompts), "answers": nodes(&of.balance.answers) },
        "confidence": point.estimates.iter().map(|(metric, estimate)| (metric.key().to_owned(), value!(estimate))).collect::<Map<_, _>>(),
        "ttft_attribution": point.attribution,
        "prediction": point.prediction,
        "findings": point.findings,
    });
    if let Value::Object(own) = own {
        out.extend(own);
    }
    Value::Object(out)
}

fn server(of: &Server) -> Value {
    if of.ttft_ms.count() == 0 {
        return Value::Null;
    }
    value!({
        "requests": of.ttft_ms.count(),
        "local": of.local,
        "queue_ms": spread(&of.queue_ms),
        "route_ms": spread(&of.route_ms),
        "prefill_ms": spread(&of.prefill_ms),
        "ttft_ms": spread(&of.ttft_ms),
        "transfer_exposed_ms": spread(&of.exposed_ms),
        "transfer_total_ms": spread(&of.transfer_ms),
        "handoff_gap_ms": spread(&of.handoff_gap_ms),
        "kv_gbps": spread(&of.kv_gbps),
        "ttft_prediction_error": { "median": of.prediction_error.median(), "p90": of.prediction_error.percentile(0.9), "bias": of.prediction_bias.median() },
    })
}

fn nodes(loads: &NodeLoads) -> Value {
    if loads.is_empty() {
        return Value::Null;
    }
    value!({
        "each": loads,
        "requests_max_by_mean": max_by_mean(loads, |of| of.requests),
        "tokens_max_by_mean": max_by_mean(loads, |of| of.tokens),
    })
}

fn spread(of: &Distribution) -> Value {
    value!({ "count": of.count(), "mean": of.mean(), "median": of.median(), "p99": of.percentile(0.99), "max": of.max() })
}

fn curve(curve: &Curve) -> Value {
    let step = |step: &Step| {
        value!({
            "request_rate": step.rate,
            "good_share": step.good_share,
            "good_share_interval": step.good_interval,
            "request_goodput": step.goodput,
            "request_throughput": step.throughput,
            "median_ttft_ms": step.ttft_p50_ms,
            "p99_ttft_ms": step.ttft_p99_ms,
            "median_tpot_ms": step.tpot_p50_ms,
            "p99_tpot_ms": step.tpot_p99_ms,
        })
    };
    value!({
        "row": curve.row,
        "endpoint": curve.endpoint,
        "prefix": warmth(curve.warm),
        "goodput_knee": curve.knee,
        "steps": curve.steps.iter().map(step).collect::<Vec<Value>>(),
    })
}

fn comparison(comparison: &Comparison) -> Value {
    let lines = comparison.lines.iter().map(|line| {
        let of = value!({
            "base": line.base,
            "other": line.other,
            "ratio": line.ratio,
            "interval": line.interval,
            "significant": line.is_significant(),
            "other_is_better": line.other_is_better(),
        });
        (line.metric.key().to_owned(), of)
    });
    let (base, other) = comparison.kind.names();
    value!({
        "kind": comparison.kind,
        "base": base,
        "other": other,
        "row": comparison.row,
        "load": comparison.load.label(),
        "endpoint": comparison.endpoint,
        "prefix": warmth(comparison.warm),
        "metrics": lines.collect::<Map<_, _>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, GOALS, sample_run};
    use super::super::summarize;
    use super::*;
    use crate::record::{Interval, Nodes, Record, Run};

    #[test]
    fn the_keys_of_vllm_are_there() {
        let records = vec![fixture::record(0.0, &[(0.25, 1), (0.5, 2)]), fixture::record(1.0, &[(1.5, 1), (1.625, 1)])];
        let run = Run { intervals: vec![fixture::interval(4.0, records)], ..Run::default() };
        let of = json(&summarize(&run, GOALS, None));
        let want = [
            ("duration", 4.0),
            ("completed", 2.0),
            ("total_input_tokens", 200.0),
            ("total_output_tokens", 5.0),
            ("request_throughput", 0.5),
            ("request_goodput", 0.0),
            ("output_throughput", 1.25),
            ("total_token_throughput", 51.25),
            ("mean_ttft_ms", 375.0),
            ("median_ttft_ms", 375.0),
            ("std_ttft_ms", 125.0),
            ("p99_ttft_ms", 497.5),
            ("mean_tpot_ms", 125.0),
            ("median_tpot_ms", 125.0),
            ("std_tpot_ms", 0.0),
            ("p99_tpot_ms", 125.0),
            ("mean_itl_ms", 187.5),
            ("median_itl_ms", 187.5),
            ("std_itl_ms", 62.5),
            ("p99_itl_ms", 248.75),
            ("mean_e2el_ms", 562.5),
            ("median_e2el_ms", 562.5),
            ("std_e2el_ms", 62.5),
            ("p99_e2el_ms", 623.75),
            ("request_rate", 1.0),
            ("num_prompts", 2.0),
        ];
        for (key, number) in want {
            let got = of[key].as_f64().unwrap_or(f64::NAN);
            assert!((got - number).abs() < 1e-6, "{key}: {got}, not {number}");
        }
        assert_eq!(of["tandem"]["points"][0]["completed"], of["completed"]);
    }

    #[test]
    fn ours_stand_apart() {
        let of = json(&summarize(&sample_run(), GOALS, Some(&fixture::model())));
        let ours = &of["tandem"];
        assert_eq!(
            (ours["run"]["commit"].as_str(), ours["objectives"]["ttft_ms"].as_f64()),
            (Some("b1eec6e"), Some(400.0))
        );
        assert_eq!(ours["curves"][0]["goodput_knee"]["holds"], 8.0);
        assert_eq!(ours["comparisons"][0]["metrics"]["median_tpot_ms"]["significant"], true);
        assert_eq!(ours["points"][0]["confidence"]["median_ttft_ms"]["basis"], "repeats");
        assert!(ours["points"][0]["prediction"]["tpot"]["share_reached"].as_f64().is_some_and(|share| share > 0.0));
        assert_eq!(of["request_rate"], Value::Null, "there were several");
        let interval = &ours["curves"][0]["steps"][0]["good_share_interval"];
        assert!(interval["low"].as_f64() < interval["high"].as_f64(), "{interval}");
        assert_eq!(ours["points"][0]["nodes"]["answers"], Value::Null, "nobody named them");
    }

    #[test]
    fn a_closed_loop_has_a_concurrency_and_its_nodes_are_counted() {
        let on = |decode: &str| Record {
            nodes: Nodes::named("p0", decode).unwrap_or_default(),
            ..fixture::record(0.0, &[(0.1, 1)])
        };
        let closed =
            Interval { rate: None, concurrency: Some(3), ..fixture::interval(1.0, vec![on("d0"), on("d0"), on("d1")]) };
        let of = json(&summarize(&Run { intervals: vec![closed], ..Run::default() }, GOALS, None));
        assert_eq!((&of["max_concurrency"], &of["request_rate"]), (&value!(3), &Value::Null));
        let nodes = &of["tandem"]["points"][0]["nodes"];
        assert_eq!(nodes["prompts"]["each"]["p0"], value!({ "requests": 3, "tokens": 225 }));
        let ratio = nodes["answers"]["requests_max_by_mean"].as_f64().unwrap_or_default();
        assert!((ratio - 4.0 / 3.0).abs() < 1e-9, "{nodes}");
    }

    #[test]
    fn an_empty_run_is_null_where_nothing_was_measured() {
        let of = json(&summarize(&Run::default(), GOALS, None));
        assert_eq!((of["completed"].as_u64(), of["request_throughput"].as_f64()), (Some(0), Some(0.0)));
        assert_eq!((&of["median_ttft_ms"], &of["tandem"]["points"]), (&Value::Null, &value!([])));
    }
}
