//! Numbers as a reader wants them: three digits that matter, no more.

/// What stands where there is no number.
pub const NONE: &str = "–";

/// Three significant digits up to 999, whole numbers with thousands apart beyond.
pub fn short(value: f64) -> String {
    // Not "-0.00".
    let value = value + 0.0;
    let size = value.abs();
    if !value.is_finite() {
        NONE.to_owned()
    } else if size >= 999.5 {
        thousands(value)
    } else if size >= 99.95 {
        format!("{value:.0}")
    } else if size >= 9.995 {
        format!("{value:.1}")
    } else if size >= 0.0995 || size == 0.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.4}")
    }
}

/// As [`short`], without zeros at its end: for what was chosen, not measured.
pub fn brief(value: f64) -> String {
    let text = short(value);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Milliseconds, as [`short`].
pub fn ms(value: f64) -> String {
    short(value)
}

/// As [`short`], or a dash.
pub fn maybe(value: Option<f64>) -> String {
    value.map_or_else(|| NONE.to_owned(), short)
}

/// A share as a percentage without its sign.
pub fn percent(share: f64) -> String {
    if share.is_finite() { format!("{:.1}", share * 100.0) } else { NONE.to_owned() }
}

/// An exact count.
pub fn count(value: u64) -> String {
    group(&value.to_string())
}

fn thousands(value: f64) -> String {
    let sign = if value < 0.0 { "-" } else { "" };
    format!("{sign}{}", group(&format!("{:.0}", value.abs())))
}

fn group(digits: &str) -> String {
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits() {
        let cases =
            [(0.0, "0.00"), (0.012345, "0.0123"), (1.005, "1.00"), (9.996, "10.0"), (12.345, "12.3"), (99.96, "100")];
        let more =
            [(123.6, "124"), (999.6, "1,000"), (1_234_567.0, "1,234,567"), (-4321.0, "-4,321"), (f64::NAN, NONE)];
        for (value, text) in cases.into_iter().chain(more) {
            assert_eq!(short(value), text);
        }
        let briefly = [-0.0, 8.0, 0.5, 200.0].map(brief);
        assert_eq!((short(-0.0).as_str(), briefly), ("0.00", ["0", "8", "0.5", "200"].map(str::to_owned)));
        assert_eq!(
            (percent(0.9876), maybe(None), count(12_345_678)),
            ("98.8".into(), NONE.into(), "12,345,678".into())
        );
    }
}
