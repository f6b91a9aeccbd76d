//! Stacked bars (pure): one for each name, lying, as wide as the page, all on one linear scale from zero.
use std::fmt::Write;

use super::axis::{Axis, Scale};
use super::{WIDE, legend, wrapped};
use crate::report::markup::escape;
use crate::report::number::short;

const LEFT: f64 = 150.0;
/// Room for the total behind the longest bar.
const RIGHT: f64 = 64.0;
const TOP: f64 = 6.0;
const BAR: f64 = 17.0;
const ROW: f64 = 23.0;
const BOTTOM: f64 = 40.0;

/// A name and its parts, in the order of the legend.
#[derive(Clone, Debug)]
pub struct Bar {
    pub name: String,
    pub parts: Vec<f64>,
}

/// What all bars are made of.
#[derive(Clone, Debug)]
pub struct Part {
    pub name: &'static str,
    /// A colour.
    pub color: usize,
}

/// A `<figure>`; empty without a bar that is longer than nothing.
pub fn stacked(title: &str, unit: &'static str, parts: &[Part], bars: &[Bar]) -> String {
    let total = |bar: &Bar| bar.parts.iter().filter(|part| part.is_finite()).sum::<f64>();
    let height = TOP + ROW * bars.len() as f64 + BOTTOM;
    let axis = Axis::over(Scale::Linear, bars.iter().map(total), None, (LEFT, WIDE - RIGHT));
    let Some(axis) = axis.filter(|_| bars.iter().any(|bar| total(bar) > 0.0)) else { return String::new() };
    let mut svg = String::new();
    let bottom = height - BOTTOM;
    for (at, label) in axis.ticks() {
        let _ = write!(svg, "<path class=\"grid\" d=\"M{at:.1} {TOP}V{bottom}\"/>");
        let _ = write!(svg, "<text class=\"tick mid\" x=\"{at:.1}\" y=\"{}\">{label}</text>", bottom + 16.0);
    }
    let middle = f64::midpoint(LEFT, WIDE - RIGHT);
    let _ = write!(svg, "<text class=\"name mid\" x=\"{middle}\" y=\"{}\">{}</text>", height - 5.0, escape(unit));
    for (place, bar) in bars.iter().enumerate() {
        let y = TOP + ROW * place as f64;
        let name = escape(&bar.name);
        let _ = write!(svg, "<text class=\"tick end\" x=\"{}\" y=\"{:.1}\">{name}</text>", LEFT - 8.0, y + BAR - 4.0);
        let (end, total) = (pieces(&mut svg, &axis, (parts, bar), y), short(total(bar)));
        let _ = write!(svg, "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\">{total}</text>", end + 6.0, y + BAR - 4.0);
    }
    let keys: Vec<(String, &str, &str)> =
        parts.iter().map(|part| (format!("c{}", part.color), part.name, "■")).collect();
    wrapped(title, &legend(&keys), (WIDE, height), &svg)
}

/// The parts of one bar; returns where it ends.
fn pieces(svg: &mut String, axis: &Axis, (parts, bar): (&[Part], &Bar), y: f64) -> f64 {
    let (mut sum, mut from) = (0.0, LEFT);
    for (part, value) in parts.iter().zip(&bar.parts).filter(|(_, value)| value.is_finite() && **value > 0.0) {
        sum += value;
        let Some(to) = axis.place(sum) else { break };
        let (width, color, name, value) = (to - from, part.color, escape(part.name), short(*value));
        let _ = write!(
            svg,
            "<rect class=\"bar c{color}\" x=\"{from:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{BAR}\"><title>{name}: {value}</title></rect>"
        );
        from = to;
    }
    from
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::markup::unbalanced;

    #[test]
    fn parts_stand_behind_each_other() {
        let parts = [Part { name: "queue", color: 1 }, Part { name: "prefill", color: 0 }];
        let bars = [
            Bar { name: "p50 <x>".into(), parts: vec![25.0, 75.0] },
            Bar { name: "p99".into(), parts: vec![f64::NAN, 50.0] },
        ];
        let drawn = stacked("t", "ms", &parts, &bars);
        // 926 of width for 100 ms.
        for piece in [
            "x=\"150.0\" y=\"6.0\" width=\"231.5\"",
            "x=\"381.5\" y=\"6.0\" width=\"694.5\"",
            "x=\"150.0\" y=\"29.0\" width=\"463.0\"",
            "p50 &lt;x&gt;",
        ] {
            assert!(drawn.contains(piece), "no {piece} in {drawn}");
        }
        assert_eq!(unbalanced(&drawn), None);
        assert_eq!(stacked("t", "ms", &parts, &[]), "");
        assert_eq!(stacked("t", "ms", &parts, &[Bar { name: String::new(), parts: vec![0.0, 0.0] }]), "");
    }
}
