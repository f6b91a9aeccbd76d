//! Documents: their links within the repository lead somewhere, headings included, their lines fit a terminal, and the
//! two that a new reader opens first are short.
//!
//! Next: `prose.rs`, how they read; `blocks.rs`, the code in them.
use std::collections::BTreeSet;
use std::path::Path;

use super::prose::outside_code as prose;

/// Characters of a line, where it is no table, code or link alone.
const COLUMNS: usize = 100;
/// Lines at most.
pub const LENGTHS: [(&str, usize); 2] = [("README.md", 120), ("ARCHITECTURE.md", 200)];

/// Targets of links in `text`, without those of the web: a file, empty for the page itself, and a heading in it.
pub fn targets(text: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    let links = prose(text).flat_map(|(_, line)| line.split("](").skip(1));
    let targets = links.filter_map(|rest| rest.split(')').next()).filter(|target| !target.contains("://"));
    targets.map(|target| target.split_once('#').map_or((target, None), |(file, heading)| (file, Some(heading))))
}

/// Names by which links reach the headings of `text`, as GitHub and mdBook make them.
pub fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text)
        .filter_map(|(_, line)| line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#')));
    headings.map(anchor).collect()
}

fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// Numbers of lines that are too long.
pub fn wide<'a>(path: &str, text: &'a str) -> impl Iterator<Item = usize> + 'a {
    let exempt = Path::new(path).file_name().is_some_and(|name| name == "CHANGELOG.md");
    let lines = prose(text).filter(|(_, line)| !line.starts_with('|') && line.chars().count() > COLUMNS);
    lines.map(|(number, _)| number).filter(move |_| !exempt)
}

#[test]
fn links_are_found_outside_of_code() {
    let text = "a [b](c.md), [d](e/f.md#g) [h](#i) [j](https://k.l)\n```\n[m](n.md)\n```\n![o](p.png)";
    let found = [("c.md", None), ("e/f.md", Some("g")), ("", Some("i")), ("p.png", None)];
    assert_eq!(targets(text).collect::<Vec<_>>(), found);
}

#[test]
fn headings_are_reached_by_their_anchors() {
    let text = "# The `a_b` of c's, d\n#no\n```\n# e\n```\n## F–G 8-bit";
    assert_eq!(anchors(text), BTreeSet::from(["the-a_b-of-cs-d".to_owned(), "fg-8-bit".to_owned()]));
}

#[test]
fn lines_of_tables_and_code_may_be_long() {
    let long = "x".repeat(COLUMNS + 1);
    let text = format!("{long}\n| {long}\n```\n{long}\n```\n{}", "é".repeat(COLUMNS));
    assert_eq!(wide("docs/a.md", &text).collect::<Vec<_>>(), [1]);
    assert_eq!(wide("docs/benchmarks/a.md", &text).count(), 1);
    assert_eq!(wide("CHANGELOG.md", &text).count(), 0);
}
