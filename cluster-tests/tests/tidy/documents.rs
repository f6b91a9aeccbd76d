//! Documents: their links within the repository lead somewhere, their lines fit a terminal, and the two that a newcomer
//! reads first are short.
use std::path::Path;

/// Characters of a line, where it is no table, code or link alone.
const COLUMNS: usize = 100;
/// Lines at most.
pub const LENGTHS: [(&str, usize); 2] = [("README.md", 120), ("ARCHITECTURE.md", 200)];
/// Laboratory notebooks: wide until each begins with its result.
const NOTEBOOKS: &str = "docs/benchmarks/";

/// Targets of links in `text`, without those of the web and of the page itself.
pub fn targets(text: &str) -> impl Iterator<Item = &str> {
    let links = prose(text).flat_map(|(_, line)| line.split("](").skip(1));
    links
        .filter_map(|rest| rest.split([')', '#']).next())
        .filter(|target| !target.is_empty() && !target.contains("://"))
}

/// Numbers of lines that are too long.
pub fn wide<'a>(path: &str, text: &'a str) -> impl Iterator<Item = usize> + 'a {
    let exempt = path.starts_with(NOTEBOOKS) || Path::new(path).file_name().is_some_and(|name| name == "CHANGELOG.md");
    let lines = prose(text).filter(|(_, line)| !line.starts_with('|') && line.chars().count() > COLUMNS);
    lines.map(|(number, _)| number).filter(move |_| !exempt)
}

/// Lines with their numbers from 1, without those of code blocks.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

#[test]
fn links_are_found_outside_of_code() {
    let text = "a [b](c.md), [d](e/f.md#g) [h](#i) [j](https://k.l)\n```\n[m](n.md)\n```\n![o](p.png)";
    assert_eq!(targets(text).collect::<Vec<_>>(), ["c.md", "e/f.md", "p.png"]);
}

#[test]
fn lines_of_tables_and_code_may_be_long() {
    let long = "x".repeat(COLUMNS + 1);
    let text = format!("{long}\n| {long}\n```\n{long}\n```\n{}", "é".repeat(COLUMNS));
    assert_eq!(wide("docs/a.md", &text).collect::<Vec<_>>(), [1]);
    assert_eq!(wide("docs/benchmarks/a.md", &text).count(), 0);
}
