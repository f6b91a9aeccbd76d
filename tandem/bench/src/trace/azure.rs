//! Azure's LLM inference traces (Patel et al., ISCA '24): CSV with `TIMESTAMP, ContextTokens, GeneratedTokens`. Pure.
//! Times are UTC, `YYYY-MM-DD HH:MM:SS` with any number of decimals; nothing is said of shared prefixes.
use super::Recorded;

const TIME: &str = "TIMESTAMP";
const INPUT: &str = "ContextTokens";
const OUTPUT: &str = "GeneratedTokens";

/// Where the three columns stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    time: usize,
    input: usize,
    output: usize,
}

impl Columns {
    /// From the first line; `None` when one is missing.
    pub fn from_head(head: &str) -> Option<Self> {
        let place = |name: &str| head.split(',').position(|column| column.trim().eq_ignore_ascii_case(name));
        Some(Self { time: place(TIME)?, input: place(INPUT)?, output: place(OUTPUT)? })
    }

    /// One line.
    ///
    /// # Errors
    /// What is wrong with it, for people.
    pub fn parse(&self, line: &str) -> Result<Recorded, String> {
        let field = |index: usize, name: &str| {
            line.split(',').nth(index).map(str::trim).ok_or_else(|| format!("the column {name} is missing"))
        };
        let tokens = |index, name| {
            let text = field(index, name)?;
            text.parse::<u32>().map_err(|_| format!("{name} is `{text}`, not a number of tokens"))
        };
        let time = field(self.time, TIME)?;
        Ok(Recorded {
            at_s: unix_seconds(time).ok_or_else(|| format!("{TIME} is `{time}`, not YYYY-MM-DD HH:MM:SS"))?,
            input_tokens: tokens(self.input, INPUT)?,
            output_tokens: tokens(self.output, OUTPUT)?,
            blocks: Vec::new(),
        })
    }
}

fn unix_seconds(text: &str) -> Option<f64> {
    let text = text.trim_end_matches('Z').trim_end_matches("+00:00");
    let (date, time) = text.split_once([' ', 'T'])?;
    let [year, month, day] = numbers(date, '-')?;
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] = numbers(clock, ':')?;
    let in_range = (1..=12).contains(&month) && (1..=31).contains(&day) && hour < 24 && minute < 60 && second <= 60;
    if !in_range || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let fraction: f64 = format!("0.{fraction}").parse().ok()?;
    let seconds = days_from_civil(year, month, day) * 86_400 + hour * 3_600 + minute * 60 + second;
    Some(seconds as f64 + fraction)
}

fn numbers(text: &str, separator: char) -> Option<[i64; 3]> {
    let parts: Option<Vec<i64>> = text.split(separator).map(|part| part.parse::<u32>().ok().map(i64::from)).collect();
    parts?.try_into().ok()
}

/// Days since 1970-01-01 in the Gregorian calendar
/// (<https://howardhinnant.github.io/date_algorithms.html#days_from_civil>).
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_unix_times() {
        assert_eq!(unix_seconds("1970-01-01 00:00:00"), Some(0.0));
        assert_eq!(unix_seconds("2023-11-16 18:15:46.6805900"), Some(1_700_158_546.680_59));
        assert_eq!(unix_seconds("2024-05-10T00:00:00.009930+00:00"), Some(1_715_299_200.009_93));
        assert_eq!(unix_seconds("2024-03-01 00:00:00"), Some(1_709_251_200.0));
        for wrong in ["", "now", "2024-13-01 00:00:00", "2024-01-01", "2024-01-01 25:00:00", "2024-01-01 00:00:00.x"] {
            assert_eq!(unix_seconds(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn columns_may_stand_anywhere() {
        assert_eq!(Columns::from_head("TIMESTAMP,ContextTokens"), None);
        let columns = Columns::from_head("x, GeneratedTokens ,ContextTokens,TIMESTAMP").unwrap();
        let request = columns.parse("1, 2,3,1970-01-01 00:01:00").unwrap();
        assert_eq!((request.at_s, request.input_tokens, request.output_tokens), (60.0, 3, 2));
        assert!(columns.parse("1,2").unwrap_err().contains("TIMESTAMP"));
        assert!(columns.parse("1,-2,3,1970-01-01 00:01:00").unwrap_err().contains("GeneratedTokens"));
    }
}
