//! What happened when (pure): TTFT, stalls and failures over the run, thinned so that a page stays small.
use crate::record::{Objectives, Record};
use crate::stats::figures::{Figures, stall_threshold_ms};
use crate::stats::request::{Seen, is_ok};

/// Each list holds at most so many points; of crowded times the largest stays.
const MOST: usize = 400;

/// Seconds since the run began, and milliseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// (intended, TTFT).
    pub ttft: Vec<(f64, f64)>,
    /// (end of the gap, its length), of gaps that count as stalls.
    pub stalls: Vec<(f64, f64)>,
    /// When requests failed or were refused, with 0 for a length.
    pub failures: Vec<(f64, f64)>,
}

impl Timeline {
    /// Of the records behind `figures`.
    pub fn of(records: &[&Record], figures: &Figures, objectives: Objectives) -> Self {
        let threshold = stall_threshold_ms(&figures.itl_ms);
        let mut timeline = Self::default();
        for record in records {
            if !is_ok(record) {
                timeline.failures.push((record.ended, 0.0));
                continue;
            }
            let ttft_ms = Seen::of(record, objectives).ttft_ms;
            timeline.ttft.extend(ttft_ms.map(|ttft_ms| (record.intended, ttft_ms)));
            let gaps = record.chunks.windows(2).map(|pair| (pair[1].0, (pair[1].0 - pair[0].0) * 1e3));
            timeline.stalls.extend(gaps.filter(|(_, gap_ms)| *gap_ms > threshold));
        }
        for points in [&mut timeline.ttft, &mut timeline.stalls, &mut timeline.failures] {
            *points = thin(std::mem::take(points), MOST);
        }
        timeline
    }
}

/// At most `most` points, ascending in time: time is cut into as many equal pieces, and the highest point of each
/// stays.
fn thin(mut points: Vec<(f64, f64)>, most: usize) -> Vec<(f64, f64)> {
    points.retain(|(at, value)| at.is_finite() && value.is_finite());
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (Some(first), Some(last)) = (points.first().copied(), points.last().copied()) else { return points };
    if points.len() <= most {
        return points;
    }
    let width = (last.0 - first.0).max(f64::MIN_POSITIVE) / most as f64;
    let piece = |at: f64| (((at - first.0) / width) as usize).min(most - 1);
    let mut thinned: Vec<(f64, f64)> = Vec::with_capacity(most);
    for point in points {
        match thinned.last_mut() {
            Some(kept) if piece(kept.0) == piece(point.0) => {
                if point.1 > kept.1 {
                    *kept = point;
                }
            }
            _ => thinned.push(point),
        }
    }
    thinned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_of_a_crowd_stays() {
        let crowd: Vec<(f64, f64)> = (0..10_000).map(|i| (f64::from(i) / 100.0, f64::from(i % 100))).collect();
        let thinned = thin(crowd, 100);
        assert_eq!(thinned.len(), 100);
        assert!(thinned.iter().all(|(_, value)| *value == 99.0), "{thinned:?}");
        assert_eq!(thin(vec![(1.0, 5.0), (f64::NAN, 1.0), (0.0, 2.0)], 100), [(0.0, 2.0), (1.0, 5.0)]);
        assert_eq!(thin(vec![(1.0, 5.0); 1000], 100), [(1.0, 5.0)]);
    }
}
