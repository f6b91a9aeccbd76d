//! The matrix of workloads that this project measures itself by: rows A to F, data only.
//!
//! Lengths fit the small models that run on two CPUs; `--input` and `--output` make other ones.
use super::workload::{Lengths, Mix, Prefix, Shape, Workload};

/// A row of the matrix and the load that it runs under unless told otherwise.
pub struct Row {
    /// One letter.
    pub name: &'static str,
    /// For `--help` and reports.
    pub about: &'static str,
    /// Requests at once.
    pub concurrency: u32,
    shapes: &'static [(f64, Shape)],
}

/// A to E; F is a trace and has its own clock.
pub const ROWS: [Row; 5] = [
    Row { name: "A", about: "short chat", concurrency: 4, shapes: &[(1.0, SHORT_CHAT)] },
    Row { name: "B", about: "long prefill", concurrency: 2, shapes: &[(1.0, LONG_PREFILL)] },
    Row { name: "C", about: "long decode", concurrency: 4, shapes: &[(1.0, LONG_DECODE)] },
    Row {
        name: "D",
        about: "mixed saturation",
        concurrency: 32,
        shapes: &[(0.7, SHORT_CHAT), (0.2, LONG_PREFILL), (0.1, LONG_DECODE)],
    },
    Row { name: "E", about: "shared prefix, cold and warm", concurrency: 4, shapes: &[(1.0, SHARED_PREFIX)] },
];

/// The row that replays a trace.
pub const TRACE_ROW: &str = "F";

const SHORT_CHAT: Shape =
    Shape { input: Lengths { low: 32, high: 192 }, output: Lengths { low: 32, high: 96 }, prefix: None };
const LONG_PREFILL: Shape =
    Shape { input: Lengths { low: 768, high: 1280 }, output: Lengths { low: 8, high: 16 }, prefix: None };
const LONG_DECODE: Shape =
    Shape { input: Lengths { low: 16, high: 64 }, output: Lengths { low: 192, high: 320 }, prefix: None };
const SHARED_PREFIX: Shape = Shape {
    input: Lengths { low: 640, high: 960 },
    output: Lengths { low: 16, high: 48 },
    prefix: Some(Prefix { share: 0.8, groups: 4 }),
};

impl Row {
    /// The row of this letter, in either case.
    pub fn named(name: &str) -> Option<&'static Self> {
        ROWS.iter().find(|row| row.name.eq_ignore_ascii_case(name))
    }

    /// What it asks.
    pub fn workload(&self) -> Workload {
        Workload { name: self.name.to_owned(), mix: Mix::Shapes(self.shapes.to_vec()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_and_can_be_asked() {
        assert!(Row::named("G").is_none());
        let row = Row::named("e").unwrap();
        assert!(row.workload().shares_prefixes());
        for row in &ROWS {
            // What the default model of `make setup` has as its context.
            assert!(row.workload().longest_tokens() <= 2048, "{}", row.name);
            assert!(!row.workload().shares_prefixes() || row.name == "E");
        }
    }
}
