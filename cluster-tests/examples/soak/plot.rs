//! Descriptors and memory of every process over time, as figures and as a picture.
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::fs;
use std::time::Duration;

use tandem_cluster_tests::{Fleet, Process};

use crate::load::Tally;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 180.0;
const MARGIN: f64 = 50.0;
/// The router is the one that is never started anew. What it holds at the end of the run it may exceed the state after
/// a tenth of the run (pools are warm then) by this much.
const RSS_GROWTH: f64 = 1.25;
const FD_GROWTH: f64 = 12.0;

#[derive(Clone, Copy)]
struct Sample {
    at: Duration,
    rss_mb: f64,
    fds: f64,
}

/// By process.
#[derive(Default)]
pub struct Samples {
    of: BTreeMap<String, Vec<Sample>>,
    tally: Vec<(Duration, Tally)>,
}

impl Samples {
    pub fn take(&mut self, at: Duration, fleet: &Fleet, tally: Tally) {
        self.tally.push((at, tally));
        for process in [&fleet.router].into_iter().chain(fleet.members.iter().map(|member| &member.process)) {
            // A process that has just died has nothing to show.
            if let Some((rss_mb, fds)) = look(process) {
                self.of.entry(process.name.clone()).or_default().push(Sample { at, rss_mb, fds });
            }
        }
    }

    /// Whether the router holds no more than it did when it was warm.
    pub fn are_flat(&self) -> bool {
        self.ends("router")
            .is_some_and(|(warm, end)| end.rss_mb <= warm.rss_mb * RSS_GROWTH && end.fds <= warm.fds + FD_GROWTH)
    }

    fn ends(&self, process: &str) -> Option<(Sample, Sample)> {
        let samples = self.of.get(process)?;
        Some((*samples.get(samples.len() / 10)?, *samples.last()?))
    }

    pub fn svg(&self) -> String {
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" font-family=\"sans-serif\" font-size=\"11\">\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>",
            WIDTH + 2.0 * MARGIN,
            2.0 * (HEIGHT + MARGIN) + MARGIN
        );
        self.panel(&mut out, 0.0, "resident memory, MB", |sample| sample.rss_mb);
        self.panel(&mut out, HEIGHT + MARGIN, "open descriptors", |sample| sample.fds);
        out.push_str("</svg>\n");
        out
    }

    fn panel(&self, out: &mut String, top: f64, title: &str, of: impl Fn(&Sample) -> f64) {
        let all = || self.of.values().flatten();
        let greatest = all().map(&of).fold(1.0, f64::max);
        let last = all().map(|sample| sample.at.as_secs_f64()).fold(1.0, f64::max);
        let (base, right) = (top + MARGIN + HEIGHT, MARGIN + WIDTH);
        let _ = write!(
            out,
            "<text x=\"{MARGIN}\" y=\"{}\">{title} (0 to {greatest:.0}), over {last:.0} s</text>\
             <path d=\"M{MARGIN} {} V{base} H{right}\" fill=\"none\" stroke=\"#888\"/>",
            top + MARGIN - 8.0,
            top + MARGIN
        );
        for (index, (name, samples)) in self.of.iter().enumerate() {
            let color = ["#4363d8", "#3cb44b", "#f58231", "#911eb4", "#e6194b"][index % 5];
            let point = |sample: &Sample| {
                let x = MARGIN + WIDTH * sample.at.as_secs_f64() / last;
                format!("{x:.1},{:.1}", base - HEIGHT * of(sample) / greatest)
            };
            let points: Vec<String> = samples.iter().map(point).collect();
            let _ = write!(
                out,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\"/>\
                 <text x=\"{}\" y=\"{}\" fill=\"{color}\">{name}</text>",
                points.join(" "),
                right - 250.0 + 90.0 * (index % 3) as f64,
                top + MARGIN - 20.0 + 12.0 * (index / 3) as f64
            );
        }
    }
}

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for name in self.of.keys() {
            if let Some((warm, end)) = self.ends(name) {
                let (from, to) = (warm.at.as_secs(), end.at.as_secs());
                writeln!(
                    f,
                    "{name}: {:.1} MB and {} descriptors at {from} s, {:.1} MB and {} at {to} s",
                    warm.rss_mb, warm.fds, end.rss_mb, end.fds
                )?;
            }
        }
        Ok(())
    }
}

fn look(process: &Process) -> Option<(f64, f64)> {
    let fds = fs::read_dir(format!("/proc/{}/fd", process.pid())).ok()?.count();
    Some((process.resident_mb()?, fds as f64))
}
