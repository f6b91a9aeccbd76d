//! Mooncake's traces (Qin et al., FAST '25): JSON lines `{"timestamp", "input_length", "output_length", "hash_ids"}`.
//! Pure; milliseconds, tokens, and one id for each begun block of 512 prompt tokens.
use serde::Deserialize;

use super::{BLOCK_TOKENS, Recorded};

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

/// One line.
///
/// # Errors
/// What is wrong with it, for people.
pub fn parse(line: &str) -> Result<Recorded, String> {
    let line: Line = serde_json::from_str(line).map_err(|error| error.to_string())?;
    if !line.timestamp.is_finite() || line.timestamp < 0.0 {
        return Err(format!("timestamp {} is no time", line.timestamp));
    }
    let blocks = line.input_length.div_ceil(BLOCK_TOKENS) as usize;
    if !line.hash_ids.is_empty() && line.hash_ids.len() != blocks {
        let found = line.hash_ids.len();
        return Err(format!("{found} hash_ids for {blocks} blocks of {} tokens", line.input_length));
    }
    Ok(Recorded {
        at_s: line.timestamp / 1e3,
        input_tokens: line.input_length,
        output_tokens: line.output_length,
        blocks: line.hash_ids,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_lines_say_why() {
        let with = |fields: &str| parse(&format!("{{{fields}}}"));
        assert!(with(r#""timestamp":1,"input_length":513,"output_length":2,"hash_ids":[1,2],"more":1"#).is_ok());
        assert!(with(r#""timestamp":1,"input_length":513,"output_length":2"#).is_ok());
        for (fields, part) in [
            (r#""timestamp":1,"input_length":513,"output_length":2,"hash_ids":[1]"#, "1 hash_ids for 2 blocks"),
            (r#""timestamp":1,"output_length":2"#, "input_length"),
            (r#""timestamp":-1,"input_length":1,"output_length":2"#, "timestamp"),
            (r#""timestamp":1,"input_length":-1,"output_length":2"#, "invalid"),
            ("", "timestamp"),
        ] {
            let error = with(fields).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
