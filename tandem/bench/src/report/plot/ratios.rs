//! Ratios of two (pure): a bar from 1 to each ratio on a logarithmic scale, with its 95 % interval as a whisker.
use std::fmt::Write;

use super::axis::{Axis, Scale};
use super::{WIDTH, wrapped};
use crate::report::markup::escape;
use crate::report::number::short;

const LEFT: f64 = 150.0;
const RIGHT: f64 = 130.0;
const TOP: f64 = 6.0;
const BAR: f64 = 13.0;
const ROW: f64 = 25.0;
const BOTTOM: f64 = 40.0;

/// One ratio.
#[derive(Clone, Debug)]
pub struct Ratio {
    pub name: String,
    pub value: f64,
    pub interval: Option<(f64, f64)>,
    /// None: not to be told from noise.
    pub is_better: Option<bool>,
}

/// A `<figure>`; empty without a ratio that can be drawn.
pub fn ratios(title: &str, ratios: &[Ratio]) -> String {
    let height = TOP + ROW * ratios.len() as f64 + BOTTOM;
    let ends = ratios.iter().flat_map(|ratio| {
        let (low, high) = ratio.interval.unwrap_or((ratio.value, ratio.value));
        [ratio.value, low, high]
    });
    // Around 1 as far to either side, at least from 0.8 to 1.25.
    let reach = ends.filter(|end| end.is_finite() && *end > 0.0).map(|end| end.ln().abs()).fold(0.223, f64::max).exp();
    let axis = Axis::over(Scale::Log, [1.0 / reach, reach].into_iter(), None, (LEFT, WIDTH - RIGHT));
    let Some((axis, one)) = axis.and_then(|axis| Some((axis, axis.place(1.0)?))).filter(|_| !ratios.is_empty()) else {
        return String::new();
    };
    let (mut svg, bottom) = (String::new(), height - BOTTOM);
    for (at, label) in axis.ticks() {
        let _ = write!(svg, "<path class=\"grid\" d=\"M{at:.1} {TOP}V{bottom}\"/>");
        let _ = write!(svg, "<text class=\"tick mid\" x=\"{at:.1}\" y=\"{}\">{label}</text>", bottom + 16.0);
    }
    for (place, ratio) in ratios.iter().enumerate() {
        row(&mut svg, &axis, (one, TOP + ROW * place as f64), ratio);
    }
    let _ = write!(svg, "<path class=\"frame\" d=\"M{one:.1} {TOP}V{bottom}\"/>");
    let middle = f64::midpoint(LEFT, WIDTH - RIGHT);
    let _ = write!(
        svg,
        "<text class=\"name mid\" x=\"{middle}\" y=\"{}\">ratio, with its 95 % interval</text>",
        height - 5.0
    );
    wrapped(title, "", (WIDTH, height), &svg)
}

fn row(svg: &mut String, axis: &Axis, (one, y): (f64, f64), ratio: &Ratio) {
    let Some(at) = axis.place(ratio.value) else { return };
    let class = match ratio.is_better {
        Some(true) => "better",
        Some(false) => "worse",
        None => "same",
    };
    let (top, text, middle) = (y + 4.0, y + 15.0, y + 4.0 + BAR / 2.0);
    let _ = write!(svg, "<text class=\"tick end\" x=\"{}\" y=\"{text:.1}\">{}</text>", LEFT - 8.0, escape(&ratio.name));
    let (x, width) = (one.min(at), (one - at).abs());
    let _ = write!(svg, "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{BAR}\"/>");
    if let Some((low, high)) = ratio.interval
        && let Some((low, high)) = axis.place(low).zip(axis.place(high))
    {
        let d =
            format!("M{low:.1} {middle:.1}H{high:.1}M{low:.1} {:.1}v6M{high:.1} {:.1}v6", middle - 3.0, middle - 3.0);
        let _ = write!(svg, "<path class=\"whisker\" d=\"{d}\"/>");
    }
    let verdict = ratio.is_better.map_or("no difference seen", |better| if better { "better" } else { "worse" });
    let label = format!("× {} {verdict}", short(ratio.value));
    let _ = write!(svg, "<text class=\"tick\" x=\"{}\" y=\"{text:.1}\">{label}</text>", WIDTH - RIGHT + 8.0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::markup::unbalanced;

    #[test]
    fn bars_begin_at_one() {
        let ratio = |value, interval, is_better| Ratio { name: "TTFT & more".into(), value, interval, is_better };
        let drawn = ratios("t", &[ratio(2.0, Some((1.5, 2.5)), Some(false)), ratio(0.5, None, None)]);
        assert!(
            drawn.contains("class=\"worse\"")
                && drawn.contains("class=\"same\"")
                && drawn.contains("× 0.50 no difference seen"),
            "{drawn}"
        );
        assert_eq!((drawn.matches("class=\"whisker\"").count(), unbalanced(&drawn)), (1, None));
        assert_eq!(ratios("t", &[]), "");
    }
}
