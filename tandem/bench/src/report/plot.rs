//! Charts as SVG (pure): lines, steps and dots over two axes; [`bars`] and [`ratios`] beside them; [`axis`] knows
//! scales and ticks.
//!
//! Colours are classes (`c0` … `c7`), which the page's style fills in for light and for dark. Numbers beyond 10¹⁵ and
//! what is not finite are not drawn.
use std::fmt::Write;

use super::markup::escape;
use super::number::short;
use axis::{Axis, Scale};

pub mod axis;
pub mod bars;
pub mod ratios;

/// How many colours there are; more series than that reuse them.
pub const COLORS: usize = 8;

const WIDTH: f64 = 560.0;
/// Of a chart that has the page's whole width: its letters stay as large as in the others.
const WIDE: f64 = 1140.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 44.0;

/// Two axes and what is between them.
#[derive(Clone, Debug, Default)]
pub struct Chart {
    pub title: String,
    pub x: AxisSpec,
    pub y: AxisSpec,
    pub series: Vec<Series>,
    pub marks: Vec<Mark>,
    /// Over the whole page.
    pub is_wide: bool,
}

/// An axis before its data are known.
#[derive(Clone, Debug, Default)]
pub struct AxisSpec {
    /// With the unit.
    pub label: &'static str,
    pub scale: Scale,
    /// Ends here whatever the data say.
    pub to: Option<f64>,
}

/// Points under one name.
#[derive(Clone, Debug)]
pub struct Series {
    pub name: String,
    pub color: usize,
    pub shape: Shape,
    pub points: Vec<(f64, f64)>,
}

/// How points are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Line,
    DashedLine,
    /// A line with a dot on each point, which tells its numbers.
    DottedLine,
    Dots,
    Crosses,
    /// Short strokes on the x axis, wherever the points are.
    Ticks,
}

/// A straight line through the chart.
#[derive(Clone, Debug)]
pub struct Mark {
    pub at: f64,
    pub direction: Direction,
    pub label: String,
}

/// Of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// At a value of y.
    Across,
    /// At a value of x.
    Up,
}

/// A `<figure>` with title, legend and drawing; empty when there is nothing to draw.
pub fn figure(chart: &Chart) -> String {
    let Some(frame) = Frame::of(chart) else { return String::new() };
    let mut svg = String::new();
    frame.grid(&mut svg, chart);
    for mark in &chart.marks {
        frame.mark(&mut svg, mark);
    }
    for series in &chart.series {
        frame.series(&mut svg, series);
    }
    let keys = chart.series.iter().filter(|series| !series.points.is_empty());
    let keys: Vec<(String, &str, &str)> =
        keys.map(|series| (class(series), series.name.as_str(), glyph(series.shape))).collect();
    wrapped(&chart.title, &legend(&keys), (frame.width, HEIGHT), &svg)
}

/// Title, legend and drawing.
fn wrapped(title: &str, legend: &str, (width, height): (f64, f64), svg: &str) -> String {
    let title = escape(title);
    let class = if width > WIDTH { " class=\"wide\"" } else { "" };
    format!(
        "<figure{class}><figcaption>{title}</figcaption>{legend}<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\">{svg}</svg></figure>\n"
    )
}

/// Names with their colours (a class) and glyphs; nothing for fewer than two.
fn legend(keys: &[(String, &str, &str)]) -> String {
    if keys.len() < 2 {
        return String::new();
    }
    let key = |(class, name, glyph): &(String, &str, &str)| {
        format!("<span class=\"key {class}\"><i>{glyph}</i>{}</span>", escape(name))
    };
    format!("<div class=\"legend\">{}</div>", keys.iter().map(key).collect::<String>())
}

fn glyph(shape: Shape) -> &'static str {
    match shape {
        Shape::Line => "━",
        Shape::DashedLine => "┅",
        Shape::DottedLine | Shape::Dots => "●",
        Shape::Crosses => "✕",
        Shape::Ticks => "❘",
    }
}

fn class(series: &Series) -> String {
    format!("c{}", series.color % COLORS)
}

/// The axes of a chart whose data are known.
struct Frame {
    width: f64,
    x: Axis,
    y: Axis,
}

impl Frame {
    fn of(chart: &Chart) -> Option<Self> {
        let all = || chart.series.iter().flat_map(|series| &series.points);
        let marked = |direction| chart.marks.iter().filter(move |mark| mark.direction == direction).map(|mark| mark.at);
        let x = all().map(|point| point.0).chain(marked(Direction::Up));
        let y = all().map(|point| point.1).chain(marked(Direction::Across));
        let width = if chart.is_wide { WIDE } else { WIDTH };
        let x = Axis::over(chart.x.scale, x, chart.x.to, (LEFT, width - RIGHT))?;
        let y = Axis::over(chart.y.scale, y, chart.y.to, (HEIGHT - BOTTOM, TOP))?;
        all().next().is_some().then_some(Self { width, x, y })
    }

    fn grid(&self, svg: &mut String, chart: &Chart) {
        let (bottom, right) = (HEIGHT - BOTTOM, self.width - RIGHT);
        for (at, label) in self.y.ticks() {
            let _ = write!(svg, "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{right}\"/>");
            let _ = write!(svg, "<text class=\"tick end\" x=\"{}\" y=\"{:.1}\">{label}</text>", LEFT - 7.0, at + 4.0);
        }
        for (at, label) in self.x.ticks() {
            let _ = write!(svg, "<path class=\"grid\" d=\"M{at:.1} {TOP}V{bottom}\"/>");
            let _ = write!(svg, "<text class=\"tick mid\" x=\"{at:.1}\" y=\"{}\">{label}</text>", bottom + 16.0);
        }
        let _ = write!(svg, "<path class=\"frame\" d=\"M{LEFT} {TOP}V{bottom}H{right}\"/>");
        let middle = f64::midpoint(LEFT, right);
        let _ = write!(
            svg,
            "<text class=\"name mid\" x=\"{middle}\" y=\"{}\">{}</text>",
            HEIGHT - 7.0,
            escape(chart.x.label)
        );
        let middle = f64::midpoint(TOP, bottom);
        let label = escape(chart.y.label);
        let _ = write!(svg, "<text class=\"name mid\" transform=\"translate(13 {middle}) rotate(-90)\">{label}</text>");
    }

    fn mark(&self, svg: &mut String, mark: &Mark) {
        let label = escape(&mark.label);
        match mark.direction {
            Direction::Across => {
                let Some(at) = self.y.place(mark.at) else { return };
                let _ = write!(svg, "<path class=\"mark\" d=\"M{LEFT} {at:.1}H{}\"/>", self.width - RIGHT);
                let _ = write!(
                    svg,
                    "<text class=\"note end\" x=\"{}\" y=\"{:.1}\">{label}</text>",
                    self.width - RIGHT - 4.0,
                    at - 4.0
                );
            }
            Direction::Up => {
                let Some(at) = self.x.place(mark.at) else { return };
                let _ = write!(svg, "<path class=\"mark\" d=\"M{at:.1} {TOP}V{}\"/>", HEIGHT - BOTTOM);
                // On the side where there is room.
                let (side, x) = if at > self.width / 2.0 { ("end", at - 4.0) } else { ("start", at + 4.0) };
                let _ = write!(
                    svg,
                    "<text class=\"note {side}\" x=\"{x:.1}\" y=\"{}\">{label}</text>",
                    HEIGHT - BOTTOM - 8.0
                );
            }
        }
    }

    fn series(&self, svg: &mut String, series: &Series) {
        let placed: Vec<((f64, f64), f64, f64)> = series
            .points
            .iter()
            .filter_map(|point| Some((*point, self.x.place(point.0)?, self.y.place(point.1)?)))
            .collect();
        let class = class(series);
        match series.shape {
            Shape::Line => path(svg, &format!("line {class}"), &placed),
            Shape::DashedLine => path(svg, &format!("line dash {class}"), &placed),
            Shape::DottedLine => {
                path(svg, &format!("line {class}"), &placed);
                for ((x, y), at, height) in placed {
                    let (name, x, y) = (escape(&series.name), short(x), short(y));
                    let _ = write!(
                        svg,
                        "<circle class=\"dot {class}\" cx=\"{at:.1}\" cy=\"{height:.1}\" r=\"3.2\"><title>{name}: {y} at {x}</title></circle>"
                    );
                }
            }
            Shape::Dots => strokes(svg, &format!("points {class}"), &placed, |x, y| format!("M{x:.1} {y:.1}h0")),
            Shape::Crosses => strokes(svg, &format!("cross {class}"), &placed, |x, y| {
                format!("M{:.1} {:.1}l6 6m0 -6l-6 6", x - 3.0, y - 3.0)
            }),
            Shape::Ticks => {
                let bottom = HEIGHT - BOTTOM;
                let xs = series.points.iter().filter_map(|point| self.x.place(point.0)).map(|x| ((x, 0.0), x, bottom));
                strokes(svg, &format!("cross {class}"), &xs.collect::<Vec<_>>(), |x, y| format!("M{x:.1} {y:.1}v-9"));
            }
        }
    }
}

type Placed = ((f64, f64), f64, f64);

fn path(svg: &mut String, class: &str, points: &[Placed]) {
    strokes(svg, class, points, |x, y| format!("L{x:.1} {y:.1}"));
}

/// One path out of a stroke for each point; a line begins with a move.
fn strokes(svg: &mut String, class: &str, points: &[Placed], stroke: impl Fn(f64, f64) -> String) {
    let mut path: String = points.iter().map(|(_, x, y)| stroke(*x, *y)).collect();
    if path.starts_with('L') {
        path.replace_range(..1, "M");
    }
    if !path.is_empty() {
        let _ = write!(svg, "<path class=\"{class}\" d=\"{path}\"/>");
    }
}

#[cfg(test)]
mod tests {
    use super::super::markup::unbalanced;
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> Chart {
        let series = Series { name: "a <b>".into(), color: 9, shape: Shape::DottedLine, points };
        let mark = Mark { at: 5.0, direction: Direction::Across, label: "goal & more".into() };
        Chart { title: "\"t\"".into(), series: vec![series], marks: vec![mark], ..Chart::default() }
    }

    #[test]
    fn points_stand_where_they_belong() {
        let drawn = figure(&chart(vec![(0.0, 0.0), (10.0, 10.0)]));
        // The corners of the frame: linear axes begin at zero and end at the largest value's tick.
        for corner in
            ["cx=\"58.0\" cy=\"256.0\"", "cx=\"544.0\" cy=\"14.0\"", "d=\"M58.0 256.0L544.0 14.0\"", "M58 135.0H544"]
        {
            assert!(drawn.contains(corner), "no {corner} in {drawn}");
        }
        assert!(drawn.contains("class=\"line c1\"") && drawn.contains("a &lt;b&gt;: 10.0 at 10.0"), "{drawn}");
        assert_eq!(unbalanced(&drawn), None);
    }

    #[test]
    fn nothing_to_draw_is_nothing_drawn() {
        assert_eq!(figure(&chart(vec![])), "");
        assert_eq!(figure(&Chart::default()), "");
        let odd = figure(&chart(vec![(f64::NAN, 1.0), (f64::INFINITY, 1e300), (3.0, 3.0)]));
        assert_eq!((odd.matches("<circle").count(), unbalanced(&odd)), (1, None));
    }

    #[test]
    fn every_shape_is_drawn() {
        for shape in [Shape::Line, Shape::DashedLine, Shape::Dots, Shape::Crosses, Shape::Ticks] {
            let mut chart = chart(vec![(1.0, 2.0), (2.0, 4.0)]);
            chart.series[0].shape = shape;
            let drawn = figure(&chart);
            assert!(drawn.contains(" c1\" d=\"M") && unbalanced(&drawn).is_none(), "{shape:?}: {drawn}");
        }
    }
}
