//! The shape of the sources, as a program can check it: file heads, rooms of unsafe code, the crate graph, import
//! circles within a crate (`tidy/imports.rs`), whose clock is asked (`tidy/clocks.rs`), names, sizes, the width of
//! comments. And documents: their form (`tidy/documents.rs`), how they read (`tidy/prose.rs`), and the code in them
//! (`tidy/blocks.rs`).
//!
//! File heads, sizes and comments are looked at in C, C++ and CUDA as well. It reads text, and compiles nothing. What
//! it cannot see: unsafe code that a macro makes, imports that a macro or a re-export hides (see `imports.rs`), and the
//! width of a comment that stands behind code on its line.
#[path = "tidy/blocks.rs"]
mod blocks;
#[path = "tidy/clocks.rs"]
mod clocks;
#[path = "tidy/documents.rs"]
mod documents;
#[path = "tidy/imports.rs"]
mod imports;
#[path = "tidy/prose.rs"]
mod prose;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The only places of unsafe code; the last is an allocator that counts.
const ROOMS: [&str; 13] = [
    "kvtransfer/ucx-sys/",
    "kvtransfer/src/ucx",
    "kvtransfer/memory/src/host.rs",
    "kvtransfer/memory/src/peer.rs",
    "kvtransfer/memory/src/xxh3",
    "kvtransfer/tests/ucx_memory.rs",
    "engine/src/ops",
    "engine/src/models/mmap.rs",
    "engine/cuda/src/",
    "engine/cuda/emu/",
    "engine/cuda/tests/",
    "engine/tests/allocations.rs",
    "router/src/allocator.rs",
];

/// Who may use whom; a crate that is not here may use all.
const GRAPH: [(&str, &[&str]); 20] = [
    ("tandem-config", &[]),
    ("tandem-proto", &[]),
    ("tandem-gguf", &[]),
    ("tandem-telemetry", &["tandem-proto"]),
    ("tandem-ports", &[]),
    ("tandem-etcd", &["tandem-ports"]),
    ("tandem-memory", &[]),
    ("tandem-engine", &["tandem-gguf", "tandem-proto", "tandem-memory"]),
    ("tandem-cuda", &["tandem-gguf", "tandem-proto", "tandem-engine", "tandem-memory"]),
    ("tandem-cuda-emu", &[]),
    ("tandem-ucx-sys", &[]),
    ("tandem-kvtransfer", &["tandem-proto", "tandem-memory", "tandem-ucx-sys"]),
    (
        "tandem-node",
        &[
            "tandem-config",
            "tandem-proto",
            "tandem-telemetry",
            "tandem-ports",
            "tandem-etcd",
            "tandem-memory",
            "tandem-engine",
            "tandem-cuda",
            "tandem-kvtransfer",
        ],
    ),
    ("tandem-prefill-node", NODE),
    ("tandem-decode-node", NODE),
    (
        "tandem-router",
        &["tandem-config", "tandem-etcd", "tandem-gguf", "tandem-proto", "tandem-telemetry", "tandem-ports"],
    ),
    ("tandem-client", &[]),
    ("tandem-bench", &["tandem-client", "tandem-proto"]),
    ("tandem", &["tandem-bench", "tandem-client", "tandem-config", "tandem-proto"]),
    (
        "tandem-fuzz",
        &[
            "tandem-config",
            "tandem-etcd",
            "tandem-gguf",
            "tandem-kvtransfer",
            "tandem-ports",
            "tandem-proto",
            "tandem-router",
            "tandem-telemetry",
        ],
    ),
];
const NODE: &[&str] =
    &["tandem-config", "tandem-proto", "tandem-telemetry", "tandem-engine", "tandem-kvtransfer", "tandem-node"];

/// The router's modules by layer, the highest first: they import what is in their own layer and below.
const ROUTER: [(&str, &[&str]); 6] = [
    ("program", &["allocator", "config", "check", "registration", "reload"]),
    ("edge", &["http", "grpc", "page", "api", "intake"]),
    ("flow", &["flow", "admission", "generation", "caller", "failure"]),
    ("observe", &["metrics", "record", "traces"]),
    ("cluster", &["membership", "select", "index", "capacity"]),
    ("model", &["text", "template", "tokenizer", "model_file", "limits"]),
];

/// Columns of a line that is a comment.
const COMMENT_COLUMNS: usize = 120;

/// Names that say nothing about what is inside.
const EMPTY_NAMES: [&str; 8] = ["utils", "util", "common", "helpers", "helper", "misc", "shared", "stuff"];

/// A file that is longer holds two subjects.
const MOST_LINES: usize = 700;

/// A file that is longer, unit tests at its end left out, says in its head why.
const MANY_LINES: usize = 500;
const REASON: &str = "Long because ";

#[test]
fn every_file_says_what_it_owns() {
    let silent = sources().into_iter().filter(|(_, text)| !text.starts_with("//! "));
    nothing(silent.map(|(path, _)| path), "does not start with `//!`");
    let silent = native_sources().into_iter().filter(|(_, text)| !text.starts_with("// "));
    nothing(silent.map(|(path, _)| path), "does not start with a comment");
}

#[test]
fn unsafe_code_stays_in_its_rooms() {
    let strangers = sources()
        .into_iter()
        .filter(|(path, text)| !ROOMS.iter().any(|room| path.starts_with(room)) && text.lines().any(has_unsafe_code));
    nothing(strangers.map(|(path, _)| path), "has unsafe code outside its rooms");
}

#[test]
fn crates_use_only_whom_they_may() {
    let mut wrong = Vec::new();
    let known: BTreeSet<String> = members().iter().map(|dir| manifest(dir).0).collect();
    for dir in members() {
        let (name, uses) = manifest(&dir);
        let Some((_, allowed)) = GRAPH.iter().find(|(user, _)| *user == name) else {
            if name != "tandem-cluster-tests" {
                wrong.push(format!("{name} is not in the graph of this test"));
            }
            continue;
        };
        let ours = uses.iter().filter(|used| known.contains(*used) && !allowed.contains(&used.as_str()));
        wrong.extend(ours.map(|used| format!("{name} uses {used}")));
    }
    nothing(wrong.into_iter(), "");
}

#[test]
fn names_say_something() {
    let empty = files().into_iter().filter(|path| {
        let stem = |part: &str| part.split('.').next().unwrap_or_default().to_owned();
        path.split('/').any(|part| EMPTY_NAMES.contains(&stem(part).as_str()))
    });
    nothing(empty, "has an empty name");
}

#[test]
fn files_hold_one_subject() {
    let all = sources().into_iter().chain(native_sources());
    let long = all.filter(|(_, text)| text.lines().count() > MOST_LINES);
    nothing(long.map(|(path, text)| format!("{path}: {} lines", text.lines().count())), "");
}

#[test]
fn long_files_say_why() {
    let all = sources().into_iter().chain(native_sources());
    let silent = all.filter(|(_, text)| lines_without_tests(text) > MANY_LINES && !says_why(text));
    nothing(silent.map(|(path, text)| format!("{path}: {} lines", lines_without_tests(&text))), "and no reason");
}

#[test]
fn the_check_for_long_files_leaves_unit_tests_out() {
    let tests = "#[cfg(test)]\nmod tests {\n    fn a() {}\n}\n";
    assert_eq!(lines_without_tests(&format!("//! A.\nfn a() {{}}\n{tests}")), 2);
    assert_eq!(lines_without_tests("//! A.\n#[cfg(test)]\nmod tests;\nfn a() {}\n"), 4, "they are elsewhere");
    assert!(says_why("//! A.\n//!\n//! Long because it is b.\n") && says_why("// Long because it is b.\n"));
    assert!(!says_why("//! A.\nfn a() {}\n// Long because it is b.\n"), "not in its head");
}

#[test]
fn modules_import_each_other_in_no_circle() {
    let circles = members().into_iter().flat_map(|dir| {
        let inside = format!("{dir}/src/");
        let files =
            sources().into_iter().filter_map(|(path, text)| Some((path.strip_prefix(&inside)?.to_owned(), text)));
        let circles = imports::circles(&files.collect::<Vec<_>>()).into_iter().map(|circle| {
            let names = Vec::from_iter(circle.modules).join(", ");
            format!("{dir}: {names} import each other in a circle:\n    {}", circle.edges.join("\n    "))
        });
        circles.collect::<Vec<_>>()
    });
    nothing(circles, "");
}

#[test]
fn modules_of_the_router_import_downwards() {
    let files =
        sources().into_iter().filter_map(|(path, text)| Some((path.strip_prefix("router/src/")?.to_owned(), text)));
    nothing(imports::upwards(&files.collect::<Vec<_>>(), &ROUTER).into_iter(), "");
}

#[test]
fn what_is_simulated_asks_tokios_clock() {
    let mut simulated = sources();
    simulated.retain(|(path, _)| clocks::is_simulated(path));
    assert!(simulated.len() > 100, "{} sources", simulated.len());
    let wrong = simulated.into_iter().filter(|(_, text)| {
        let code = text.lines().take(lines_without_tests(text)).collect::<Vec<_>>().join("\n");
        clocks::asks_the_systems(&code)
    });
    nothing(wrong.map(|(path, _)| path), "asks the system's clock, and not a simulation's: `clock::now` asks both");
}

#[test]
fn comments_fit_the_page() {
    let wide = sources().into_iter().chain(native_sources()).flat_map(|(path, text)| {
        let numbered = (1..).zip(text.lines());
        let wide = numbered.filter(|(_, line)| is_wide_comment(line)).map(|(number, _)| format!("{path}:{number}"));
        wide.collect::<Vec<_>>()
    });
    nothing(wide, &format!("is a comment of more than {COMMENT_COLUMNS} columns"));
}

#[test]
fn the_check_for_wide_comments_counts_columns() {
    let comment = |text: &str| format!("    //! {}", text.repeat(COMMENT_COLUMNS - 8));
    assert!(!is_wide_comment(&comment("a")) && !is_wide_comment(&comment("≤")));
    assert!(is_wide_comment(&format!("{}.", comment("a"))));
    assert!(!is_wide_comment(&format!("    let text = \"{}\";", "//".repeat(COMMENT_COLUMNS))), "code is rustfmt's");
}

#[test]
fn architecture_names_every_crate() {
    let architecture = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let unnamed = members().into_iter().filter(|dir| {
        let last = dir.rsplit('/').next().unwrap_or(dir);
        !architecture.contains(&format!("`{last}")) && !architecture.contains(&format!("{last}/"))
    });
    nothing(unnamed, "is not named in ARCHITECTURE.md");
}

/// The fuzzers are a workspace of their own, which `make test` does not build.
#[test]
fn the_fuzzers_lock_file_has_the_crates_as_they_are() {
    let (mut locked, mut differ) = (locked_by("fuzz/Cargo.lock"), Vec::new());
    for (name, wanted) in members().iter().map(|dir| manifest(dir)) {
        let Some(locked) = locked.remove(&name) else { continue };
        differ.extend((locked != wanted.into_iter().collect()).then_some(name));
    }
    assert!(locked.is_empty(), "{locked:?} are no crates of ours");
    nothing(differ.into_iter(), "is another in fuzz/Cargo.lock: run cargo metadata there");
}

#[test]
fn links_of_documents_lead_somewhere() {
    let dead = documents().flat_map(|(path, text)| {
        let folder = root().join(&path).parent().expect("a folder").to_path_buf();
        let leads = |(file, heading): &(&str, Option<&str>)| {
            let target = if file.is_empty() { root().join(&path) } else { folder.join(file) };
            let in_it = |heading: &str| {
                let text = fs::read_to_string(&target).unwrap_or_default();
                file.rsplit('.').next() != Some("md") && !file.is_empty() || documents::anchors(&text).contains(heading)
            };
            target.exists() && heading.is_none_or(in_it)
        };
        let dead: Vec<_> = documents::targets(&text).filter(|target| !leads(target)).collect();
        dead.into_iter()
            .map(|(file, heading)| format!("{path}: {file}#{}", heading.unwrap_or_default()))
            .collect::<Vec<_>>()
    });
    nothing(dead, "is a link to nothing");
}

#[test]
fn documents_fit_the_page() {
    let wide = documents().flat_map(|(path, text)| {
        let numbers: Vec<_> = documents::wide(&path, &text).collect();
        numbers.into_iter().map(|number| format!("{path}:{number}")).collect::<Vec<_>>()
    });
    nothing(wide, "has more than 100 columns");
    let long = documents::LENGTHS.into_iter().filter_map(|(path, most)| {
        let lines = fs::read_to_string(root().join(path)).expect(path).lines().count();
        (lines > most).then(|| format!("{path} ({lines} lines)"))
    });
    nothing(long, "is too long for a newcomer");
}

#[test]
fn documents_read_well() {
    let judged = documents().filter(|(path, _)| prose::is_judged(path));
    let faults = judged.flat_map(|(path, text)| {
        let long = prose::long_sentences(&text).into_iter();
        let long =
            long.map(|(line, words)| format!("{path}:{line}: {words} words in a sentence, {} at most", prose::WORDS));
        let banned = prose::banned(&text).into_iter();
        let banned = banned.map(|(line, word, better)| format!("{path}:{line}: `{word}`: rather {better}"));
        long.chain(banned).collect::<Vec<_>>()
    });
    nothing(faults, "");
}

#[test]
fn code_in_documents_parses() {
    let faults = documents().flat_map(|(path, text)| {
        let faults = blocks::blocks(&text).into_iter().filter_map(|block| Some((block.line, blocks::fault(&block)?)));
        faults.map(|(line, fault)| format!("{path}:{line}: {fault}")).collect::<Vec<_>>()
    });
    nothing(faults, "");
}

/// What `make test-docs` would run, and what it leaves out: each note above a block is one that it knows.
#[test]
fn commands_of_documents_are_planned() {
    let mut list = Command::new("python3");
    let output = list.args(["-B", "cluster-tests/docs/commands.py", "--list"]).current_dir(root()).output();
    let output = output.expect("Python");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let plan = String::from_utf8_lossy(&output.stdout);
    assert!(plan.contains("README.md") && plan.contains("docs/operate.md"), "{plan}");
}

fn documents() -> impl Iterator<Item = (String, String)> {
    read_all(&["md"]).into_iter()
}

/// `CARGO_TARGET_DIR` puts programs elsewhere.
#[test]
fn scripts_ask_where_programs_are_built() {
    let scripts = files().into_iter().filter(|path| {
        [".sh", ".py", ".js", "Makefile"].iter().any(|ending| path.ends_with(ending))
            || (path.ends_with(".rs") && !path.ends_with("tests/tidy.rs"))
    });
    let guesses = scripts.flat_map(|path| {
        let text = fs::read_to_string(root().join(&path)).expect("a readable script");
        let guesses = text.lines().map(|line| line.split(['#', ';']).next().unwrap_or_default()).filter(|line| {
            let is_code = !line.trim_start().starts_with("//");
            let mut built = ["release", "tests", "dist", "debug", "guided"].iter();
            // A variable may have the name.
            let path = line.replace("$target/", "");
            is_code && built.any(|profile| path.contains(&format!("target/{profile}")))
        });
        guesses.map(|line| format!("{path}: `{}`", line.trim())).collect::<Vec<_>>()
    });
    nothing(guesses, "does not go through deploy/target_dir.sh or deploy/bench/target_dir.py");
}

#[test]
fn the_target_directory_is_cargos() {
    let root = root();
    let dir = |program: &str, words: &[&str], variable: Option<&str>| {
        let mut command = Command::new(program);
        command.args(words).current_dir("/").env_remove("CARGO_TARGET_DIR");
        command.envs(variable.map(|value| ("CARGO_TARGET_DIR", value)));
        let output = command.output().expect("a shell and Python");
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
        PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
    };
    let script = root.join("deploy/target_dir.sh").display().to_string();
    let bench = root.join("deploy/bench");
    let python = format!("import sys; sys.path.insert(0, {bench:?}); import target_dir; print(target_dir.TARGET_DIR)");
    let ways: [(&str, Vec<&str>); 2] = [("bash", vec![&script]), ("python3", vec!["-B", "-c", &python])];
    for (program, words) in ways {
        assert_eq!(dir(program, &words, None), root.join("target"), "{program}");
        assert_eq!(dir(program, &words, Some("")), root.join("target"), "{program}");
        assert_eq!(dir(program, &words, Some("builds/one two")), root.join("builds/one two"), "{program}");
        assert_eq!(dir(program, &words, Some("/built")), Path::new("/built"), "{program}");
    }
}

#[test]
fn the_check_for_unsafe_code_sees_code_only() {
    let word = concat!("un", "safe");
    assert!(has_unsafe_code(&format!("    {word} {{ read(p) }}")));
    assert!(has_unsafe_code(&format!("{word} impl Send for P {{}} // SAFETY: owned")));
    assert!(!has_unsafe_code(&format!("#![forbid({word}_code)]")));
    assert!(!has_unsafe_code(&format!("x(); // {word}: never")));
    assert!(!has_unsafe_code(&format!("say(\"{word} \")")));
}

/// Fails with all findings at once.
fn nothing(findings: impl Iterator<Item = String>, what: &str) {
    let findings: Vec<String> = findings.map(|finding| format!("{finding} {what}")).collect();
    assert!(findings.is_empty(), "\n{}", findings.join("\n"));
}

/// Lines up to the unit tests in the file itself.
fn lines_without_tests(text: &str) -> usize {
    let code = text.find("\n#[cfg(test)]\nmod tests {\n").map_or(text, |tests| &text[..=tests]);
    code.lines().count()
}

fn says_why(text: &str) -> bool {
    let mut head = text.lines().take_while(|line| line.starts_with("//"));
    head.any(|line| line.trim_start_matches(['/', '!']).trim_start().starts_with(REASON))
}

fn is_wide_comment(line: &str) -> bool {
    line.trim_start().starts_with("//") && line.chars().count() > COMMENT_COLUMNS
}

/// Outside comments and strings, as far as a line tells.
fn has_unsafe_code(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let outside_strings: String = code.split('"').step_by(2).collect::<Vec<_>>().join(" ");
    let words = outside_strings.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.into_iter().any(|word| word == concat!("un", "safe"))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

/// All files of the repository, as paths from its root; what is built, cached or hidden is left out.
fn files() -> Vec<String> {
    let (mut files, mut dirs) = (Vec::new(), vec![root()]);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).expect("a readable directory") {
            let entry = entry.expect("a readable entry");
            let (name, path) = (entry.file_name().to_string_lossy().into_owned(), entry.path());
            let is_dir = entry.file_type().expect("a file type").is_dir();
            // `shared` at the root is a loan of some workplaces, not a part of the repository.
            let of_the_root = dir == root() && ["target", "shared", "venv"].contains(&&*name);
            // Cargo marks its directory, whatever its name.
            let foreign =
                name.starts_with('.') || name == "node_modules" || of_the_root || path.join("CACHEDIR.TAG").exists();
            if is_dir && !foreign {
                dirs.push(path);
            } else if !is_dir {
                let relative = path.strip_prefix(root()).expect("below the root");
                files.push(relative.to_string_lossy().into_owned());
            }
        }
    }
    files.sort();
    files
}

fn sources() -> Vec<(String, String)> {
    read_all(&["rs"])
}

/// C, C++ and CUDA: kernels, the emulated driver, programs of benchmarks.
fn native_sources() -> Vec<(String, String)> {
    read_all(&["c", "h", "cpp", "cu", "cuh"])
}

/// Paths and texts of all files with such a name.
fn read_all(endings: &[&str]) -> Vec<(String, String)> {
    let is_one = |path: &String| path.rsplit_once('.').is_some_and(|(_, ending)| endings.contains(&ending));
    let files = files().into_iter().filter(is_one);
    files
        .map(|path| {
            let text = fs::read_to_string(root().join(&path)).expect("a readable source");
            (path, text)
        })
        .collect()
}

/// What each of our crates depends on by a lock file, which leaves out what tests depend on where they are not built.
fn locked_by(lock: &str) -> BTreeMap<String, BTreeSet<String>> {
    let text = fs::read_to_string(root().join(lock)).expect("a lock file");
    let package = |package: &str| {
        let name = package.lines().find_map(|line| line.strip_prefix("name = "))?.trim_matches('"').to_owned();
        // A version stands there where there are several.
        let dependency = |line: &str| Some(line.strip_prefix(" \"")?.split(['"', ' ']).next()?.to_owned());
        name.starts_with("tandem").then(|| (name, package.lines().filter_map(dependency).collect()))
    };
    text.split("[[package]]").filter_map(package).collect()
}

/// Directories of all crates.
fn members() -> Vec<String> {
    let manifests = files().into_iter().filter_map(|path| path.strip_suffix("/Cargo.toml").map(str::to_owned));
    manifests.collect()
}

/// Name and dependencies of a crate, tests' ones left out. Reads the plain form that all our manifests have.
fn manifest(dir: &str) -> (String, Vec<String>) {
    let text = fs::read_to_string(root().join(dir).join("Cargo.toml")).expect("a manifest");
    let (mut section, mut name, mut uses) = (String::new(), String::new(), Vec::new());
    for line in text.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_end_matches(']').to_owned();
        } else if let Some((key, value)) = line.split_once('=') {
            let key = key.trim().trim_end_matches(".workspace");
            if section == "package" && key == "name" {
                name = value.trim().trim_matches('"').to_owned();
            } else if section.ends_with("dependencies") && !section.ends_with("dev-dependencies") {
                uses.push(if key == "ucx-sys" { "tandem-ucx-sys".to_owned() } else { key.to_owned() });
            }
        }
    }
    (name, uses)
}
