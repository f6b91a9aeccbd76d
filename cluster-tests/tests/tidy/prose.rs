//! How documents read, as far as a program can tell: sentences that are not too long, and words that the field does not
//! use. Pure. Code, tables' lengths and headings are left out.
//!
//! Next: `documents.rs`, which is about their form.

/// Words of a sentence at most; a code span counts as one.
pub const WORDS: usize = 30;

/// Words that are not said of programs, or say nothing, each with better ones.
const BANNED: [(&str, &str); 14] = [
    ("hears", "receives, gets"),
    ("heard", "received, got"),
    ("told", "reported, sent"),
    ("whoever", "name who: the client, the node, a caller"),
    ("somebody", "name who: the client, the node, a person"),
    ("anybody", "every caller, every peer"),
    ("everybody", "every request, every node"),
    ("nobody", "no node, no peer, not … yet"),
    ("goes on", "continues, is retried"),
    ("go on", "continue, is retried"),
    ("newcomer", "a new connection, a reader"),
    ("processor time", "CPU time"),
    ("leg", "call"),
    ("legs", "calls"),
];

/// Written by programs, whose words are judged where they stand.
const GENERATED: [&str; 2] = ["docs/metrics.md", "docs/reference/flags.md"];

/// Whether this document is held to the rules: all but the history and what programs write.
pub fn is_judged(path: &str) -> bool {
    path != "CHANGELOG.md" && !GENERATED.contains(&path)
}

/// Line and length of each sentence that is too long.
pub fn long_sentences(text: &str) -> Vec<(usize, usize)> {
    let mut long = Vec::new();
    for (line, paragraph) in paragraphs(text) {
        for words in sentences(&paragraph) {
            if words > WORDS {
                long.push((line, words));
            }
        }
    }
    long
}

/// Line, word and advice of each banned word, in tables, too.
pub fn banned(text: &str) -> Vec<(usize, &'static str, &'static str)> {
    let lines = outside_code(text);
    let found = lines.flat_map(|(number, line)| {
        let plain = without_code(line).to_lowercase();
        let words = plain.split(|c: char| !c.is_alphanumeric() && c != '-').filter(|word| !word.is_empty());
        let padded = format!(" {} ", words.collect::<Vec<_>>().join(" "));
        let here = BANNED.into_iter().filter(|(word, _)| padded.contains(&format!(" {word} ")));
        here.map(|(word, better)| (number, word, better)).collect::<Vec<_>>()
    });
    found.collect()
}

/// Paragraphs and list items as one line each, with the number of their first line.
fn paragraphs(text: &str) -> Vec<(usize, String)> {
    let (mut found, mut open) = (Vec::new(), None::<(usize, String)>);
    let mut last = 0;
    for (number, line) in outside_code(text) {
        let line = line.trim();
        let item = list_item(line);
        let is_prose = !line.is_empty() && !line.starts_with(['|', '#', '<', '!']);
        // A block of code in between ends a paragraph.
        if !is_prose || item.is_some() || number != last + 1 {
            found.extend(open.take());
        }
        last = number;
        if is_prose {
            let line = item.unwrap_or(line);
            match &mut open {
                Some((_, paragraph)) => *paragraph += &format!(" {line}"),
                None => open = Some((number, line.to_owned())),
            }
        }
    }
    found.extend(open);
    found
}

/// What stands behind `- `, `* ` or `1. `.
fn list_item(line: &str) -> Option<&str> {
    let (marker, rest) = line.split_once(' ')?;
    let is_number = marker.strip_suffix('.').is_some_and(|digits| digits.bytes().all(|digit| digit.is_ascii_digit()));
    (is_number || marker == "-" || marker == "*").then_some(rest)
}

/// Words of each sentence.
fn sentences(paragraph: &str) -> Vec<usize> {
    let plain = without_links(&without_code(paragraph));
    let words: Vec<&str> = plain.split_whitespace().collect();
    let (mut lengths, mut words_so_far) = (Vec::new(), 0);
    for (at, word) in words.iter().enumerate() {
        words_so_far += 1;
        let begins = words.get(at + 1).is_none_or(|next| {
            next.starts_with(|c: char| c.is_uppercase() || c.is_ascii_digit() || "*\"“([".contains(c))
        });
        let bare = word.trim_end_matches([')', '"', '”', '*']);
        if begins && bare.ends_with(['.', '!', '?', ':']) {
            lengths.push(words_so_far);
            words_so_far = 0;
        }
    }
    lengths.push(words_so_far);
    lengths
}

/// Each code span becomes one word.
fn without_code(line: &str) -> String {
    let parts = line.split('`').enumerate();
    parts.map(|(at, part)| if at % 2 == 0 { part } else { "X" }).collect()
}

/// Links become their text.
fn without_links(text: &str) -> String {
    let mut parts = text.split("](");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        plain += part.split_once(')').map_or("", |(_, rest)| rest);
    }
    plain.replace('[', "")
}

/// Lines with their numbers from 1, without code blocks.
pub fn outside_code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

#[test]
fn sentences_are_counted_in_words() {
    let words = |count: usize| vec!["word"; count].join(" ");
    let text = format!("# Title\n\nA {}.\nShort: `a b c` d. 2 more\n- An item {}\n", words(WORDS), words(3));
    assert_eq!(long_sentences(&text), [(3, WORDS + 1)]);
    assert_eq!(long_sentences(&format!("A {}.", words(WORDS - 1))), []);
    let split = format!("{} [{}](a.md \"{}\"). {}", words(10), words(10), words(20), words(29));
    assert_eq!(long_sentences(&split), [(1, 49)], "a lower-case word begins no sentence");
    assert_eq!(long_sentences(&format!("```\n{}\n```\n| {} |", words(99), words(99))), []);
    assert_eq!(long_sentences(&format!("{}\n```sh\nx\n```\n{}", words(20), words(20))), [], "code parts paragraphs");
}

#[test]
fn words_of_the_old_code_are_found() {
    let text = "The node hears.\n`told` and a legend\n```\nnobody\n```\n| it goes\n| so it goes on |";
    let found: Vec<_> = banned(text).into_iter().map(|(line, word, _)| (line, word)).collect();
    assert_eq!(found, [(1, "hears"), (7, "goes on")]);
}
