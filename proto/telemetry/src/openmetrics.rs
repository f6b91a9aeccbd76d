//! Reads metrics as this project's programs write them for scrapers (OpenMetrics text,
//! <https://prometheus.io/docs/specs/om/open_metrics_spec/>). Pure. Lines that are none are passed over.
use std::collections::HashMap;

/// What a family is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// Samples with one name and meaning.
#[derive(Debug, PartialEq)]
pub(crate) struct Family<'a> {
    pub name: &'a str,
    pub kind: Kind,
    pub help: &'a str,
    pub samples: Vec<Sample<'a>>,
}

/// One line.
#[derive(Debug, PartialEq)]
pub(crate) struct Sample<'a> {
    /// With its ending, such as `_bucket`.
    pub name: &'a str,
    pub labels: Vec<(&'a str, String)>,
    pub value: f64,
    pub exemplar: Option<Exemplar<'a>>,
}

/// One of the values that a bucket counts.
#[derive(Debug, PartialEq)]
pub(crate) struct Exemplar<'a> {
    pub labels: Vec<(&'a str, String)>,
    pub value: f64,
}

/// All families of a text, in its order.
pub(crate) fn families(text: &str) -> Vec<Family<'_>> {
    let (mut families, mut helps) = (Vec::<Family<'_>>::new(), HashMap::new());
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').unwrap_or((help, ""));
            helps.insert(name, help);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let kind = match kind {
                "counter" => Kind::Counter,
                "histogram" => Kind::Histogram,
                _ => Kind::Gauge,
            };
            let help = helps.remove(name).unwrap_or_default();
            families.push(Family { name, kind, help, samples: Vec::new() });
        } else if let (Some(family), Some(sample)) = (families.last_mut(), sample(line))
            && sample.name.starts_with(family.name)
        {
            family.samples.push(sample);
        }
    }
    families
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let end = line.find(['{', ' ']).filter(|end| *end > 0 && !line.starts_with('#'))?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = labels(rest)?;
    // Behind the labels, which may hold anything, `#` has one meaning.
    let (value, exemplar) = rest.split_once('#').map_or((rest, None), |(value, exemplar)| (value, Some(exemplar)));
    Some(Sample { name, labels, value: number(value)?, exemplar: exemplar.and_then(self::exemplar) })
}

fn exemplar(text: &str) -> Option<Exemplar<'_>> {
    let (labels, value) = labels(text.trim_start())?;
    Some(Exemplar { labels, value: number(value)? })
}

/// The first number; a time may follow.
fn number(text: &str) -> Option<f64> {
    text.split_whitespace().next()?.parse().ok()
}

/// `{key="value",…}`, if there are any, and what follows.
fn labels(text: &str) -> Option<(Vec<(&str, String)>, &str)> {
    let Some(mut rest) = text.strip_prefix('{') else { return Some((Vec::new(), text)) };
    let mut labels = Vec::new();
    loop {
        rest = rest.strip_prefix(',').unwrap_or(rest);
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (key, quoted) = rest.split_once("=\"")?;
        let (value, behind) = unquoted(quoted)?;
        labels.push((key, value));
        rest = behind;
    }
}

/// What stands before the closing quote, and what behind it.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let (mut value, mut characters) = (String::new(), text.char_indices());
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(match characters.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_programs_write() {
        let text = "# HELP tandem_requests Requests by outcome.\n# TYPE tandem_requests counter\n\
            tandem_requests_total{role=\"router\",outcome=\"a \\\"b\\\" \\\\ # {c}\"} 7\n\
            # HELP tandem_nodes Nodes.\n# TYPE tandem_nodes gauge\ntandem_nodes 2.5 1700000000\n\
            # HELP tandem_x_seconds Times.\n# TYPE tandem_x_seconds histogram\n# UNIT tandem_x_seconds seconds\n\
            tandem_x_seconds_sum{} 0.25\ntandem_x_seconds_count 1\n\
            tandem_x_seconds_bucket{le=\"0.5\"} 1 # {trace_id=\"ab\"} 0.25 1700000000.1\n\
            tandem_x_seconds_bucket{le=\"+Inf\"} 1\n# EOF\n";
        let read = families(text);
        let named: Vec<_> = read.iter().map(|family| (family.name, family.kind, family.help)).collect();
        let expected = [
            ("tandem_requests", Kind::Counter, "Requests by outcome."),
            ("tandem_nodes", Kind::Gauge, "Nodes."),
            ("tandem_x_seconds", Kind::Histogram, "Times."),
        ];
        assert_eq!(named, expected);
        let labels = vec![("role", "router".to_owned()), ("outcome", "a \"b\" \\ # {c}".to_owned())];
        let counter = Sample { name: "tandem_requests_total", labels, value: 7.0, exemplar: None };
        assert_eq!(read[0].samples, [counter]);
        assert_eq!(read[1].samples[0].value, 2.5);
        let exemplar = Exemplar { labels: vec![("trace_id", "ab".to_owned())], value: 0.25 };
        assert_eq!(read[2].samples[2].exemplar.as_ref(), Some(&exemplar));
        assert_eq!(read[2].samples.iter().map(|sample| sample.value).collect::<Vec<_>>(), [0.25, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn passes_over_what_is_none() {
        let text = "# TYPE a gauge\na{b=\"c} 1\na{b} 1\na x\na\n\n{} 1\nb 1\na 1 # {x=\"\na 3 # {\n a 4\na 5\n";
        let values: Vec<_> = families(text)[0].samples.iter().map(|sample| sample.value).collect();
        assert_eq!(values, [1.0, 3.0, 5.0]);
    }

    proptest::proptest! {
        #[test]
        fn never_panics(text in "(# TYPE a counter\n)?(a(_total)?[{}=\",# \\\\a-z0-9.]{0,30}\n){0,4}") {
            let _ = families(&text);
        }
    }
}
