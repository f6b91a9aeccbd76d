//! Which charts the page has, and of what (pure). [`super::super::plot`] draws them.
use crate::report::compare::Comparison;
use crate::report::curve::{Curve, Step};
use crate::report::number::{brief, ms};
use crate::report::plot::axis::Scale;
use crate::report::plot::bars::{Bar, Part, stacked};
use crate::report::plot::ratios::{Ratio, ratios};
use crate::report::plot::{AxisSpec, COLORS, Chart, Direction, Mark, Series, Shape, figure};
use crate::report::{Load, Point, Summary, endpoint_letter, warmth};
use crate::stats::Distribution;
use crate::stats::figures::Figures;

/// Points of a cumulative distribution.
const CURVE_POINTS: usize = 160;
/// Stacked bars in one figure.
const MOST_BARS: usize = 24;
/// Comparisons that are drawn; all are in the JSON.
const MOST_COMPARISONS: usize = 24;
/// Colours of own lag, queue, route, prefill, rest.
const PHASE_COLORS: [usize; 5] = [4, 1, 3, 0, 2];

/// One of a point's latencies, milliseconds.
type Latency = fn(&Figures) -> &Distribution;
/// One latency of a rate, milliseconds; None where nothing was answered.
type StepLatency = fn(&Step) -> Option<f64>;
/// One list of a point's timeline.
type Happened = fn(&Point) -> &[(f64, f64)];

/// All charts of one row, under its name.
pub fn workload(summary: &Summary, row: &str) -> String {
    let points: Vec<&Point> = summary.points.iter().filter(|point| point.key.row == row).collect();
    let mut charts = cumulative(summary, &points);
    for (place, curve) in summary.curves.iter().filter(|curve| curve.row == row).enumerate() {
        // Both endpoints of a row share their charts: the first curve of each warmth draws them all.
        let earlier = summary.curves.iter().filter(|other| other.row == row).take(place);
        if earlier.into_iter().all(|other| other.warm != curve.warm) {
            let same: Vec<&Curve> =
                summary.curves.iter().filter(|other| other.row == row && other.warm == curve.warm).collect();
            charts.push_str(&latency_curve(summary, &same));
            charts.push_str(&goodput_curve(&same));
        }
    }
    charts.push_str(&attribution(&points));
    charts.push_str(&timeline(&points));
    super::section(row, &if charts.is_empty() { charts } else { format!("<div class=\"charts\">{charts}</div>\n") })
}

/// What a point's series is called and how it looks: a colour for each load and warmth, dashes for the second endpoint.
fn looks<'a>(points: &[&'a Point]) -> Vec<(&'a Point, String, usize, Shape)> {
    let several = points.iter().any(|point| point.key.endpoint != 0);
    let warm = points.iter().any(|point| point.key.warm);
    let mut kinds: Vec<(Load, bool)> = Vec::new();
    for point in points {
        if !kinds.contains(&(point.key.load, point.key.warm)) {
            kinds.push((point.key.load, point.key.warm));
        }
    }
    let shown = spaced(kinds.len(), COLORS);
    let look = |point: &&'a Point| {
        let kind = kinds.iter().position(|kind| *kind == (point.key.load, point.key.warm))?;
        let color = shown.iter().position(|shown| *shown == kind)?;
        let mut name = point.key.load.label();
        if several {
            name.push_str(&format!(" {}", endpoint_letter(point.key.endpoint)));
        }
        if warm {
            name.push_str(&format!(" {}", warmth(point.key.warm)));
        }
        Some((*point, name, color, if point.key.endpoint == 0 { Shape::Line } else { Shape::DashedLine }))
    };
    points.iter().filter_map(look).collect()
}

/// At most `most` of `count` places, first and last among them.
fn spaced(count: usize, most: usize) -> Vec<usize> {
    if count <= most {
        return (0..count).collect();
    }
    (0..most).map(|step| step * (count - 1) / (most - 1)).collect()
}

fn cumulative(summary: &Summary, points: &[&Point]) -> String {
    let goals = summary.objectives;
    let kinds: [(&str, &str, Latency, Option<f64>); 4] = [
        ("TTFT, cumulative", "TTFT, ms", |of| &of.ttft_ms, goals.map(|goals| goals.ttft_ms)),
        ("TPOT, cumulative", "TPOT, ms", |of| &of.tpot_ms, goals.map(|goals| goals.tpot_ms)),
        ("Gaps between chunks (ITL), cumulative", "gap, ms", |of| &of.itl_ms, None),
        ("End to end, cumulative", "ms", |of| &of.e2e_ms, None),
    ];
    let looks = looks(points);
    let chart = |(title, label, of, goal): (&str, &'static str, Latency, Option<f64>)| {
        let series = looks.iter().map(|(point, name, color, shape)| {
            let points = of(&point.figures).cumulative(CURVE_POINTS).into_iter().map(|(x, share)| (x, share * 100.0));
            Series { name: name.clone(), color: *color, shape: *shape, points: points.collect() }
        });
        let mark = |at: f64| Mark { at, direction: Direction::Up, label: format!("objective {} ms", ms(at)) };
        figure(&Chart {
            title: title.to_owned(),
            x: AxisSpec { label, scale: Scale::Log, to: None },
            y: AxisSpec { label: "% of all", scale: Scale::Linear, to: Some(100.0) },
            series: series.collect(),
            marks: goal.map(mark).into_iter().collect(),
            is_wide: false,
        })
    };
    kinds.map(chart).concat()
}

fn attribution(points: &[&Point]) -> String {
    let looks = looks(points);
    let bars = looks.iter().flat_map(|(point, name, ..)| {
        point.attribution.iter().map(move |of| Bar {
            name: format!("{name} p{:.0}", of.percentile * 100.0),
            parts: of.parts().map(|(_, part_ms)| part_ms).to_vec(),
        })
    });
    let bars: Vec<Bar> = bars.collect();
    let shown: Vec<Bar> = spaced(bars.len() / 3, MOST_BARS / 3)
        .into_iter()
        .flat_map(|three| bars[3 * three..3 * three + 3].to_vec())
        .collect();
    let Some(first) = points.iter().find_map(|point| point.attribution.first()) else { return String::new() };
    let parts = first.parts().into_iter().zip(PHASE_COLORS).map(|((name, _), color)| Part { name, color });
    stacked("Where TTFT goes, around its percentiles", "ms", &parts.collect::<Vec<_>>(), &shown)
}

/// The name of a curve beside others of its row.
fn curve_name(curves: &[&Curve], curve: &Curve, what: &str) -> String {
    if curves.len() > 1 { format!("{what} {}", endpoint_letter(curve.endpoint)) } else { what.to_owned() }
}

fn curve_title(title: &str, curves: &[&Curve]) -> String {
    if curves.iter().any(|curve| curve.warm) { format!("{title}, warm") } else { title.to_owned() }
}

fn latency_curve(summary: &Summary, curves: &[&Curve]) -> String {
    let kinds: [(&str, StepLatency); 4] = [
        ("TTFT p50", |step| step.ttft_p50_ms),
        ("TTFT p99", |step| step.ttft_p99_ms),
        ("TPOT p50", |step| step.tpot_p50_ms),
        ("TPOT p99", |step| step.tpot_p99_ms),
    ];
    let series = curves.iter().enumerate().flat_map(|(place, curve)| {
        kinds.into_iter().enumerate().map(move |(color, (what, of))| Series {
            name: curve_name(curves, curve, what),
            color: color + 4 * (place % 2),
            shape: Shape::DottedLine,
            points: curve.steps.iter().filter_map(|step| Some((step.rate, of(step)?))).collect(),
        })
    });
    let across =
        |(at, name): (f64, &str)| Mark { at, direction: Direction::Across, label: format!("{name} objective") };
    let goals = summary.objectives.map(|goals| [(goals.ttft_ms, "TTFT"), (goals.tpot_ms, "TPOT")].map(across));
    figure(&Chart {
        title: curve_title("Latency over rate", curves),
        x: AxisSpec { label: "offered requests/s", ..AxisSpec::default() },
        y: AxisSpec { label: "ms", scale: Scale::Log, to: None },
        series: series.collect(),
        marks: goals.into_iter().flatten().chain(knees(curves)).collect(),
        is_wide: false,
    })
}

fn goodput_curve(curves: &[&Curve]) -> String {
    let mut series = Vec::new();
    for (place, curve) in curves.iter().enumerate() {
        let of = |step: fn(&Step) -> f64| curve.steps.iter().map(|at| (at.rate, step(at))).collect();
        let (good, answered) = (curve_name(curves, curve, "good"), curve_name(curves, curve, "answered"));
        series.push(Series {
            name: good,
            color: 2 + 5 * (place % 2),
            shape: Shape::DottedLine,
            points: of(|step| step.goodput),
        });
        series.push(Series {
            name: answered,
            color: 6 - place % 2,
            shape: Shape::DashedLine,
            points: of(|step| step.throughput),
        });
    }
    let last = curves.iter().filter_map(|curve| curve.steps.last()).map(|step| step.rate).fold(0.0, f64::max);
    series.push(Series {
        name: "offered".into(),
        color: 4,
        shape: Shape::Line,
        points: vec![(0.0, 0.0), (last, last)],
    });
    figure(&Chart {
        title: curve_title("Goodput over rate", curves),
        x: AxisSpec { label: "offered requests/s", ..AxisSpec::default() },
        y: AxisSpec { label: "requests/s", ..AxisSpec::default() },
        series,
        marks: knees(curves),
        is_wide: false,
    })
}

/// One mark for each rate at which a knee is; endpoints whose knees are the same share it.
fn knees(curves: &[&Curve]) -> Vec<Mark> {
    let mut knees: Vec<(f64, String)> = Vec::new();
    for curve in curves {
        let Some(at) = curve.knee.holds else { continue };
        match knees.iter_mut().find(|(other, _)| *other == at) {
            Some((_, name)) => name.push_str(&format!(", {}", endpoint_letter(curve.endpoint))),
            None => knees.push((at, curve_name(curves, curve, "knee"))),
        }
    }
    let mark = |(at, name)| Mark { at, direction: Direction::Up, label: format!("{name} {}/s", brief(at)) };
    knees.into_iter().map(mark).collect()
}

fn timeline(points: &[&Point]) -> String {
    let several = points.iter().any(|point| point.key.endpoint != 0);
    let mut endpoints: Vec<u8> = points.iter().map(|point| point.key.endpoint).collect();
    endpoints.sort_unstable();
    endpoints.dedup();
    let mut series = Vec::new();
    for endpoint in endpoints {
        let name = |what: &str| if several { format!("{what} {}", endpoint_letter(endpoint)) } else { what.to_owned() };
        let of = |list: Happened| -> Vec<(f64, f64)> {
            points
                .iter()
                .filter(|point| point.key.endpoint == endpoint)
                .flat_map(|point| list(point).to_vec())
                .collect()
        };
        let color = usize::from(endpoint);
        let shapes: [(&str, usize, Shape, Happened); 3] = [
            ("TTFT", color, Shape::Dots, |point| &point.timeline.ttft),
            ("stall", color + 2, Shape::Crosses, |point| &point.timeline.stalls),
            ("failed or refused", 7, Shape::Ticks, |point| &point.timeline.failures),
        ];
        series.extend(shapes.map(|(what, color, shape, list)| Series {
            name: name(what),
            color,
            shape,
            points: of(list),
        }));
    }
    figure(&Chart {
        title: "Over the run: TTFT, stalls, failures".to_owned(),
        x: AxisSpec { label: "seconds since the run began", scale: Scale::Time, to: None },
        y: AxisSpec { label: "ms", scale: Scale::Log, to: None },
        series,
        marks: Vec::new(),
        is_wide: true,
    })
}

/// Bars of ratios, one figure a comparison.
pub fn comparisons(summary: &Summary) -> String {
    let figures: String = summary.comparisons.iter().take(MOST_COMPARISONS).map(comparison).collect();
    if figures.is_empty() { figures } else { format!("<div class=\"charts\">{figures}</div>\n") }
}

fn comparison(of: &Comparison) -> String {
    let (base, other) = of.kind.names();
    let lines = of.lines.iter().map(|line| Ratio {
        name: format!("{}, {}", line.metric.label(), line.metric.unit()),
        value: line.ratio,
        interval: line.interval.map(|interval| (interval.low, interval.high)),
        is_better: line.other_is_better(),
    });
    let title = format!("{other} beside {base}: {} {}", of.row, of.load.label());
    ratios(&title, &lines.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_are_among_the_shown() {
        assert_eq!(spaced(3, 8), [0, 1, 2]);
        assert_eq!(spaced(15, 8), [0, 2, 4, 6, 8, 10, 12, 14]);
        assert_eq!(spaced(0, 8), [] as [usize; 0]);
    }
}
