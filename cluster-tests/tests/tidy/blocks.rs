//! Code blocks of documents parse: shell by `bash -n`, JSON and TOML by Python. Blocks without a language are pictures
//! and output; every other language is refused, so that no block goes unread.
use std::io::Write;
use std::process::{Command, Stdio};

/// A fenced block.
#[derive(Debug, PartialEq)]
pub struct Block {
    /// Of its fence, from 1.
    pub line: usize,
    /// Behind the fence; empty: none.
    pub language: String,
    /// Without the fence's indentation.
    pub text: String,
}

/// All blocks of a document, in order. One without an end goes to the document's.
pub fn blocks(text: &str) -> Vec<Block> {
    let (mut found, mut open) = (Vec::new(), None::<(Block, usize)>);
    for (number, line) in (1..).zip(text.lines()) {
        let bare = line.trim_start();
        let fence = bare.strip_prefix("```");
        match (&mut open, fence) {
            (None, Some(language)) => {
                let block = Block { line: number, language: language.trim().to_owned(), text: String::new() };
                open = Some((block, line.len() - bare.len()));
            }
            (Some(_), Some(_)) => found.extend(open.take().map(|(block, _)| block)),
            (Some((block, indent)), None) => {
                // Blank lines may lack it.
                block.text += line.get(*indent..).unwrap_or_default();
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    found.extend(open.map(|(block, _)| block));
    found
}

/// What its parser says against it, if anything.
pub fn fault(block: &Block) -> Option<String> {
    let python =
        |module: &str| vec!["-c".to_owned(), format!("import sys, {module}; {module}.loads(sys.stdin.read())")];
    let (program, words) = match block.language.as_str() {
        "" | "text" => return None,
        "sh" => ("bash", vec!["-n".to_owned()]),
        "json" => ("python3", python("json")),
        "toml" => ("python3", python("tomllib")),
        other => return Some(format!("`{other}` has no parser here: sh, json, toml or text")),
    };
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("bash and Python");
    child.stdin.take().expect("piped").write_all(block.text.as_bytes()).expect("a parser that reads");
    let output = child.wait_with_output().expect("a parser that ends");
    let said = String::from_utf8_lossy(&output.stderr);
    (!output.status.success()).then(|| said.lines().last().unwrap_or("it does not parse").to_owned())
}

#[test]
fn blocks_are_found_and_parsed() {
    let text =
        "a\n```sh\nls |\n```\n- b\n\n  ```json\n  {\"a\": 1}\n\n  ```\n```\nfree\n```\n```rust\n```\n```toml\na = 1";
    let found = blocks(text);
    let heads: Vec<_> = found.iter().map(|block| (block.line, block.language.as_str())).collect();
    assert_eq!(heads, [(2, "sh"), (7, "json"), (11, ""), (14, "rust"), (16, "toml")]);
    assert_eq!(found[1].text, "{\"a\": 1}\n\n");
    let faults: Vec<bool> = found.iter().map(|block| fault(block).is_some()).collect();
    assert_eq!(faults, [true, false, false, true, false]);
}
