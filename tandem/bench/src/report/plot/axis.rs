//! Scales and ticks (pure).
use crate::report::number::brief;

/// Numbers beyond it are not drawn.
const LARGEST: f64 = 1e15;
/// The smallest that a logarithmic axis shows.
const SMALLEST: f64 = 1e-6;
/// A linear axis has some so many steps.
const STEPS: f64 = 5.0;

/// How values become places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// From zero on.
    #[default]
    Linear,
    /// From where the values begin; smaller ones than a millionth are not drawn.
    Log,
    /// As linear, from where the values begin.
    Time,
}

/// Values from `low` to `high` on the places from `from` to `to`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// Over `values`, up to `end` where that is given. None without a value that can be drawn.
    pub fn over(
        scale: Scale,
        values: impl Iterator<Item = f64>,
        end: Option<f64>,
        (from, to): (f64, f64),
    ) -> Option<Self> {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|value| drawable(scale, *value)) {
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            return None;
        }
        high = end.unwrap_or(high);
        match scale {
            Scale::Linear => (low, high) = (low.min(0.0), high.max(0.0)),
            Scale::Log => (low, high) = (low * 0.9, high * 1.1),
            Scale::Time => {}
        }
        if high <= low {
            high = low + (low.abs() * 1e-3).max(1.0);
        }
        if scale == Scale::Linear && end.is_none() {
            let step = step(high - low);
            high = (high / step - 1e-9).ceil() * step;
        }
        Some(Self { scale, low, high, from, to })
    }

    /// Where `value` is drawn; outside of the axis it is drawn at its end. None: it is not drawn.
    pub fn place(&self, value: f64) -> Option<f64> {
        let (value, low, high) = match self.scale {
            _ if !drawable(self.scale, value) => return None,
            Scale::Log => (value.ln(), self.low.ln(), self.high.ln()),
            Scale::Linear | Scale::Time => (value, self.low, self.high),
        };
        Some(self.from + ((value - low) / (high - low)).clamp(0.0, 1.0) * (self.to - self.from))
    }

    /// Places and labels.
    pub fn ticks(&self) -> Vec<(f64, String)> {
        let values = match self.scale {
            Scale::Log => log_ticks(self.low, self.high),
            Scale::Linear | Scale::Time => linear_ticks(self.low, self.high),
        };
        values.into_iter().filter_map(|value| Some((self.place(value)?, label(value)))).collect()
    }
}

fn drawable(scale: Scale, value: f64) -> bool {
    value.is_finite() && value.abs() <= LARGEST && (scale != Scale::Log || value >= SMALLEST)
}

/// 1, 2 or 5 times a power of ten.
fn step(range: f64) -> f64 {
    let rough = range / STEPS;
    let unit = 10_f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * unit).find(|step| *step >= rough * 0.999).unwrap_or(rough)
}

fn linear_ticks(low: f64, high: f64) -> Vec<f64> {
    let step = step(high - low);
    let first = (low / step - 1e-9).ceil();
    (0..=2 * STEPS as u32)
        .map(|count| (first + f64::from(count)) * step)
        .take_while(|tick| *tick <= high + step * 1e-9)
        .collect()
}

/// Powers of ten, and their 2- and 5-folds where the range is small; of a huge range every so many powers.
fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let decades = high.log10() - low.log10();
    let factors: &[f64] = match decades {
        // Too little for any round number of the others to fall in.
        ..0.7 => &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
        ..2.6 => &[1.0, 2.0, 5.0],
        _ => &[1.0],
    };
    let stride = (decades / 8.0).ceil().max(1.0) as usize;
    let powers = (first..=last).step_by(stride);
    let all = powers.flat_map(|power| factors.iter().map(move |factor| factor * 10_f64.powi(power)));
    all.filter(|tick| (low..=high).contains(tick)).collect()
}

fn label(value: f64) -> String {
    if value.abs() >= 1e6 { format!("{}M", brief(value / 1e6)) } else { brief(value) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn labels(scale: Scale, values: &[f64]) -> Vec<String> {
        let axis = Axis::over(scale, values.iter().copied(), None, (0.0, 100.0)).unwrap();
        axis.ticks().into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn round_numbers() {
        assert_eq!(labels(Scale::Linear, &[3.0, 9.7]), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(labels(Scale::Linear, &[0.93]), ["0", "0.2", "0.4", "0.6", "0.8", "1"]);
        assert_eq!(labels(Scale::Log, &[12.0, 950.0]), ["20", "50", "100", "200", "500", "1,000"]);
        assert_eq!(labels(Scale::Log, &[1.0, 1e6]), ["1", "10", "100", "1,000", "10,000", "100,000", "1M"]);
        assert_eq!(labels(Scale::Linear, &[2e8]), ["0", "50M", "100M", "150M", "200M"]);
        assert_eq!(labels(Scale::Time, &[100.0, 160.0]), ["100", "120", "140", "160"]);
    }

    #[test]
    fn places() {
        let axis = Axis::over(Scale::Log, [10.0, 1000.0].into_iter(), Some(1000.0 / 1.1), (0.0, 200.0)).unwrap();
        assert!((axis.place((9.0_f64 * 1000.0).sqrt()).unwrap() - 100.0).abs() < 1e-9);
        assert_eq!((axis.place(0.0), axis.place(f64::NAN), axis.place(1e9)), (None, None, Some(200.0)));
        assert_eq!(Axis::over(Scale::Log, [0.0, -1.0].into_iter(), None, (0.0, 1.0)), None);
    }

    proptest! {
        #[test]
        fn ticks_are_few_and_inside(
            values in prop::collection::vec(prop_oneof![-1e3..1e3_f64, Just(0.0), Just(1e15), Just(1e-6), Just(f64::NAN)], 1..9),
            scale in prop_oneof![Just(Scale::Linear), Just(Scale::Log), Just(Scale::Time)],
        ) {
            if let Some(axis) = Axis::over(scale, values.into_iter(), None, (0.0, 100.0)) {
                let ticks = axis.ticks();
                prop_assert!(ticks.len() <= 14, "{ticks:?}");
                prop_assert!(ticks.iter().all(|(at, _)| (0.0..=100.0).contains(at)), "{ticks:?}");
                prop_assert!(ticks.windows(2).all(|pair| pair[0].0 < pair[1].0), "{ticks:?}");
            }
        }
    }
}
