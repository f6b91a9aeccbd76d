//! Import circles between the modules of a crate, from the sources alone: which module names which, and where these
//! names lead back to their beginning. And imports of a higher layer, where a crate's modules stand in layers.
//!
//! **What is a module**: a file below `src/`, with everything inside it. `src/a.rs`, `src/a/mod.rs`: `a`; `src/a/b.rs`:
//! `a::b`; `lib.rs` and `main.rs`: the root. Files and blocks that only tests compile do not count.
//!
//! **What is an import**: a path that begins with `crate`, `super`, `self` or a module of the file's own folder, in a
//! `use` or in the code. It leads to the longest module that it names.
//!
//! **What is a circle**: it is looked for in each folder, among the modules of that folder, each taken with all that is
//! below it. So a module and its own children never make one: a parent's file is the face of its folder, and children
//! use its types. But `a::x` that uses `b::y`, and `b::z` that uses `a::w`, make one of `a` and `b`.
//!
//! **What it does not see**: names that a macro puts together, glob imports through a re-export, and what a re-export
//! in a parent leads to (`use super::Thing`, where `Thing` is a sibling's, is a use of the parent).
use std::collections::{BTreeMap, BTreeSet};

/// Modules of one folder that all reach each other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Circle {
    /// Paths from the crate's root, sorted.
    pub modules: BTreeSet<String>,
    /// Who names whom, and where: `a -> b (src/a.rs: crate::b::Thing)`.
    pub edges: Vec<String>,
}

/// All circles of a crate. A file is its path below `src/` and its text.
pub fn circles(files: &[(String, String)]) -> Vec<Circle> {
    let sources: BTreeMap<Vec<String>, (&str, String)> = modules(files);
    let known: BTreeSet<&[String]> = sources.keys().flat_map(|path| (0..=path.len()).map(|end| &path[..end])).collect();
    let mut graphs: BTreeMap<&[String], BTreeMap<(String, String), String>> = BTreeMap::new();
    for (own, (file, code)) in &sources {
        for written in paths(code) {
            let Some(target) = resolve(own, &written, &known) else { continue };
            let shared = own.iter().zip(&target).take_while(|(a, b)| a == b).count();
            // One is above the other, or they are the same.
            if shared == own.len() || shared == target.len() {
                continue;
            }
            let edge = (own[..=shared].join("::"), target[..=shared].join("::"));
            let place = format!("{file}: {}", written.join("::"));
            graphs.entry(&own[..shared]).or_default().entry(edge).or_insert(place);
        }
    }
    graphs.values().flat_map(in_graph).collect()
}

/// Imports that lead from a layer to a higher one, and modules that are in no layer. `layers`: the modules of the
/// crate's root, the highest layer first. The root itself may import everything.
pub fn upwards(files: &[(String, String)], layers: &[(&str, &[&str])]) -> Vec<String> {
    let sources = modules(files);
    let known: BTreeSet<&[String]> = sources.keys().flat_map(|path| (0..=path.len()).map(|end| &path[..end])).collect();
    let layer = |module: &str| layers.iter().position(|(_, modules)| modules.contains(&module));
    let mut wrong = BTreeSet::new();
    for (own, (file, code)) in &sources {
        let Some(module) = own.first() else { continue };
        let Some(of) = layer(module) else {
            wrong.insert(format!("{module} is in no layer"));
            continue;
        };
        for written in paths(code) {
            let target = resolve(own, &written, &known).and_then(|target| target.into_iter().next());
            if let Some((to, target)) = target.and_then(|target| Some((layer(&target)?, target)))
                && to < of
            {
                let (low, high, path) = (layers[of].0, layers[to].0, written.join("::"));
                wrong.insert(format!("{module} ({low}) -> {target} ({high}) ({file}: {path})"));
            }
        }
    }
    wrong.into_iter().collect()
}

/// Each module's file and code, without what only tests compile.
fn modules(files: &[(String, String)]) -> BTreeMap<Vec<String>, (&str, String)> {
    let mut sources = BTreeMap::new();
    let mut tests: BTreeSet<Vec<String>> = BTreeSet::new();
    for (file, text) in files {
        let mut path: Vec<String> = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
        if path.last().is_some_and(|last| last == "mod") || ["lib", "main"].contains(&path.join("/").as_str()) {
            path.pop();
        }
        let (code, of_tests) = without_tests(&code_of(text));
        tests.extend(of_tests.into_iter().map(|name| [path.clone(), vec![name]].concat()));
        // `lib.rs` and `main.rs` are both the root.
        sources.entry(path).or_insert((file.as_str(), String::new())).1.push_str(&code);
    }
    sources.retain(|path, _| !tests.iter().any(|test| path.starts_with(test)));
    sources
}

/// Without comments, strings and characters.
fn code_of(text: &str) -> String {
    let (mut code, mut rest) = (String::new(), text);
    while let Some(c) = rest.chars().next() {
        let skipped = match c {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |end| end + 2),
            '"' => quoted(rest),
            'r' if is_raw(rest) && !ends_in_word(&code) => raw(rest),
            '\'' => character(rest),
            _ => 0,
        };
        if skipped == 0 {
            code.push(c);
            rest = &rest[c.len_utf8()..];
        } else {
            code.push(' ');
            rest = &rest[skipped..];
        }
    }
    code
}

fn ends_in_word(code: &str) -> bool {
    code.ends_with(is_word)
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Length of a string that begins here.
fn quoted(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

fn is_raw(text: &str) -> bool {
    text[1..].trim_start_matches('#').starts_with('"')
}

fn raw(text: &str) -> usize {
    let marks = text[1..].len() - text[1..].trim_start_matches('#').len();
    let body = 2 + marks;
    let end = format!("\"{}", "#".repeat(marks));
    text[body..].find(&end).map_or(text.len(), |at| body + at + end.len())
}

/// Length of a character that begins here; 0 for a lifetime.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), Some((at, escaped))) => {
            let behind = at + escaped.len_utf8();
            text[behind..].find('\'').map_or(0, |end| behind + end + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 0,
    }
}

/// The code without blocks below `#[cfg(test)]`, and the names of modules that are declared so.
fn without_tests(code: &str) -> (String, Vec<String>) {
    let (mut kept, mut rest, mut names) = (String::new(), code, Vec::new());
    while let Some(at) = rest.find("#[cfg(test)]") {
        kept.push_str(&rest[..at]);
        let item = &rest[at + "#[cfg(test)]".len()..];
        let (opens, ends) = (item.find('{').unwrap_or(item.len()), item.find(';').unwrap_or(item.len()));
        let is_import = item.trim_start().starts_with("use ");
        if opens < ends && !is_import {
            rest = &item[closing(item, opens)..];
        } else {
            let mut words = item[..ends].split(|c: char| !is_word(c)).filter(|word| !word.is_empty());
            if words.any(|word| word == "mod") {
                names.extend(words.next().map(str::to_owned));
            }
            rest = &item[(ends + 1).min(item.len())..];
        }
    }
    kept.push_str(rest);
    (kept, names)
}

/// Behind the brace that closes the one at `opens`.
fn closing(code: &str, opens: usize) -> usize {
    let mut depth = 0;
    for (at, c) in code[opens..].char_indices() {
        depth += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        if depth == 0 {
            return opens + at + 1;
        }
    }
    code.len()
}

/// All paths that are written in the code, those of `use` trees one by one.
fn paths(code: &str) -> Vec<Vec<String>> {
    let tokens = tokens(code);
    let (mut found, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        let begins = is_name(tokens[at]) && (at == 0 || !["::", "."].contains(&tokens[at - 1]));
        let leads_on = tokens.get(at + 1) == Some(&"::");
        if begins && leads_on {
            at = tree(&tokens, at, &[], &mut found);
        } else {
            at += 1;
        }
    }
    found
}

fn is_name(token: &str) -> bool {
    token.starts_with(is_word)
}

/// Reads a path, or a tree of them, from `at` on; returns where it ends.
fn tree(tokens: &[&str], mut at: usize, above: &[String], found: &mut Vec<Vec<String>>) -> usize {
    let mut path = above.to_vec();
    loop {
        match tokens.get(at) {
            Some(&"{") => {
                at += 1;
                while at < tokens.len() && tokens[at] != "}" {
                    let next = tree(tokens, at, &path, found);
                    // Whatever else stands there, such as a comma.
                    at = next.max(at + usize::from(next == at));
                }
                return at + 1;
            }
            Some(name) if is_name(name) => path.push((*name).to_owned()),
            _ => {
                found.push(path);
                return at;
            }
        }
        at += 1;
        if tokens.get(at) != Some(&"::") {
            found.push(path);
            return at;
        }
        at += 1;
    }
}

fn tokens(code: &str) -> Vec<&str> {
    let (mut tokens, mut rest) = (Vec::new(), code.trim_start());
    while let Some(first) = rest.chars().next() {
        let length = match first {
            c if is_word(c) => rest.find(|c: char| !is_word(c)).unwrap_or(rest.len()),
            _ if rest.starts_with("::") => 2,
            c => c.len_utf8(),
        };
        tokens.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    tokens
}

/// The module that a path names, from the crate's root; nothing where it leads out of the crate.
fn resolve(own: &[String], written: &[String], known: &BTreeSet<&[String]>) -> Option<Vec<String>> {
    let mut target = match written.first()?.as_str() {
        "crate" => Vec::new(),
        "self" => own.to_vec(),
        "super" => own[..own.len().checked_sub(1)?].to_vec(),
        // A module of the own folder.
        child => {
            let path = [own, &[child.to_owned()]].concat();
            known.contains(path.as_slice()).then_some(path)?
        }
    };
    for name in &written[1..] {
        if name == "super" {
            target.pop()?;
            continue;
        }
        target.push(name.clone());
        if !known.contains(target.as_slice()) {
            target.pop();
            break;
        }
    }
    Some(target)
}

/// Where everybody reaches everybody.
fn in_graph(graph: &BTreeMap<(String, String), String>) -> Vec<Circle> {
    let reached = |from: &str| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(module) = open.pop() {
            let next = graph.keys().filter(|(user, _)| *user == module).map(|(_, used)| used.clone());
            open.extend(next.filter(|used| seen.insert(used.clone())));
        }
        seen
    };
    let all: BTreeSet<&String> = graph.keys().flat_map(|(user, used)| [user, used]).collect();
    let reach: BTreeMap<&String, BTreeSet<String>> = all.iter().map(|module| (*module, reached(module))).collect();
    let groups: BTreeSet<BTreeSet<String>> = all
        .iter()
        .filter(|module| reach[**module].contains(**module))
        .map(|module| reach[*module].iter().filter(|other| reach[*other].contains(*module)).cloned().collect())
        .collect();
    let of = |modules: BTreeSet<String>| {
        let inside = graph.iter().filter(|((user, used), _)| modules.contains(user) && modules.contains(used));
        let edges = inside.map(|((user, used), place)| format!("{user} -> {used} ({place})")).collect();
        Circle { modules, edges }
    };
    groups.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<(String, String)> = files.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        let circles = circles(&files);
        circles.into_iter().map(|circle| circle.modules.into_iter().collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn siblings_that_name_each_other_are_a_circle() {
        let lib = ("lib.rs", "mod a; mod b; mod c;");
        let [to_b, to_a] = [("a.rs", "use crate::b::Thing;"), ("b.rs", "use super::a;")];
        assert_eq!(found(&[lib, to_b, to_a, ("c.rs", "use crate::a;")]), ["a b"]);
        assert_eq!(found(&[lib, to_b, ("b.rs", "use crate::c;"), ("c.rs", "fn f() { crate::a::g() }")]), ["a b c"]);
        assert!(found(&[lib, to_b, ("b.rs", "use crate::c;"), ("c.rs", "")]).is_empty());
    }

    #[test]
    fn a_module_counts_with_all_that_is_below_it() {
        let lib = ("lib.rs", "mod a; mod b;");
        let files = [lib, ("a.rs", ""), ("a/x.rs", "use crate::b::y;"), ("b/mod.rs", ""), ("b/y.rs", "")];
        assert!(found(&files).is_empty());
        let back = ("b/z.rs", "use crate::{a::{w, x::Deep as _}, other};");
        assert_eq!(found(&[&files[..], &[back]].concat()), ["a b"]);
    }

    #[test]
    fn parents_and_children_make_no_circle() {
        let files = [("lib.rs", "mod a; use a::T; struct S;"), ("a.rs", "mod x; pub use x::T; pub struct P;")];
        assert!(
            found(&[files[0], files[1], ("a/x.rs", "use super::P; use crate::S; use super::super::S as R;")])
                .is_empty()
        );
        let sibling = ("a/y.rs", "use super::x::T; use super::P;");
        let child = ("a/x.rs", "fn f() -> super::y::U { self::g() }");
        assert_eq!(found(&[files[0], files[1], child, sibling]), ["a::x a::y"]);
    }

    #[test]
    fn comments_strings_tests_and_other_crates_are_no_imports() {
        let b = ("b.rs", "use crate::a::T;");
        let harmless = [
            "// use crate::b;\n/* crate::b::f() */ fn f() { \"crate::b::f()\"; r#\"\"crate::b\"#; '\"'; '\\''; }",
            "fn f<'a>(x: &'a str) {} #[cfg(test)] mod tests { use crate::b; fn g() {} }",
            "#[cfg(test)] use crate::b::{T, U};",
            "use other::b; use std::b; fn f() { x.b::<T>(); y::b::g() }",
            "#[cfg(test)] mod tests;",
        ];
        for text in harmless {
            let files = [("lib.rs", ""), ("a.rs", text), b, ("a/tests.rs", "use crate::b;")];
            // The last one is a module only if the text declares it.
            let there = if text.ends_with("mod tests;") { 4 } else { 3 };
            assert!(found(&files[..there]).is_empty(), "{text}");
        }
        let behind = "#[cfg(test)] mod tests { fn g() { if true {} } } fn f() { crate::b::g() }";
        assert_eq!(found(&[("lib.rs", ""), ("a.rs", behind), b]), ["a b"]);
    }

    #[test]
    fn imports_of_a_higher_layer_are_found() {
        let layers: [(&str, &[&str]); 2] = [("high", &["a", "b"]), ("low", &["c"])];
        let upwards = |files: &[(&str, &str)]| {
            let files: Vec<_> = files.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
            super::upwards(&files, &layers)
        };
        let below = [("lib.rs", "mod a; use c::T;"), ("a.rs", "use crate::{b::T, c::U};"), ("b.rs", ""), ("c.rs", "")];
        assert!(upwards(&below).is_empty());
        let tests = ("c.rs", "#[cfg(test)] mod tests { use crate::a::T; }");
        assert!(upwards(&[below[1], below[2], tests]).is_empty());
        let deep = ("c/x.rs", "fn f() { crate::a::g() }");
        assert_eq!(upwards(&[below[1], below[2], below[3], deep]), ["c (low) -> a (high) (c/x.rs: crate::a::g)"]);
        assert_eq!(upwards(&[("d.rs", "")]), ["d is in no layer"]);
    }

    #[test]
    fn a_circle_says_where_it_is() {
        let files = [("lib.rs", ""), ("a.rs", "use crate::b::Thing;"), ("b.rs", "use crate::a::f;")];
        let files = files.map(|(file, text)| (file.to_owned(), text.to_owned()));
        let edges = circles(&files).remove(0).edges;
        assert_eq!(edges, ["a -> b (a.rs: crate::b::Thing)", "b -> a (b.rs: crate::a::f)"]);
    }
}
