//! Compiles the emulated driver, and the kernels for the host, with the C++ compiler that the `cc` crate finds.
//!
//! Made in `OUT_DIR/emulator`: `libcuda.so.1` (runtime and driver), `libcuda.so` (an empty library that takes the name
//! which cudarc tries first), `libnvrtc.so.13` and `libcublasLt.so.13` (with such names as well), `libnvidia-ml.so.1`,
//! and the kernels: `libkernels.so` (the product's), `libplanted.so` (wrong ones, for tests), each a second time
//! `-checked`. An object is compiled again when its source, a header or the command has changed. Without a compiler, or
//! on another platform, nothing is made, the reason is printed, and `install()` says it.
#![allow(clippy::disallowed_methods, reason = "cargo tells a build script by its environment")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const SUBJECTS: [&str; 4] = ["runtime", "driver", "tests", "../kernels"];

fn main() {
    for place in SUBJECTS {
        println!("cargo:rerun-if-changed={place}");
    }
    for variable in ["EMU_COVERAGE", "CXX", "CXXFLAGS"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    match build() {
        Ok(folder) => println!("cargo:rustc-env=EMULATOR_FOLDER={}", folder.display()),
        Err(Absent(reason)) => {
            println!("cargo:warning=the emulated CUDA driver is left out: {reason}");
            println!("cargo:rustc-env=EMULATOR_ABSENT={reason}");
        }
    }
}

/// Why there is no emulator: one line.
struct Absent(String);

fn build() -> Result<PathBuf, Absent> {
    let target = std::env::var("TARGET").unwrap_or_default();
    if !target.starts_with("x86_64-") || !target.contains("-linux-gnu") {
        return Err(Absent(format!("it is written for Linux on x86-64 with glibc, and this is {target}")));
    }
    let compiler = cc::Build::new().cpp(true).try_get_compiler().map_err(|error| Absent(error.to_string()))?;
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("emulator");
    let build = Build { compiler: compiler.path().to_owned(), out };
    let version = Command::new(&build.compiler).arg("--version").output();
    if !version.is_ok_and(|output| output.status.success()) {
        return Err(Absent(format!("there is no C++ compiler: {} does not run", build.compiler.display())));
    }
    fs::create_dir_all(&build.out).expect("a folder in OUT_DIR");
    build.driver();
    build.beside_driver("libnvrtc", "nvrtc.cpp");
    build.beside_driver("libcublasLt", "cublaslt.cpp");
    build.management();
    for (name, sources) in [("kernels", "../kernels"), ("planted", "tests")] {
        let sources = files(sources, "cu");
        build.kernels(&format!("lib{name}.so"), &sources, &plain_flags());
        build.kernels(&format!("lib{name}-checked.so"), &sources, &CHECKED_FLAGS);
    }
    Ok(build.out)
}

struct Build {
    compiler: PathBuf,
    out: PathBuf,
}

const LANGUAGE: [&str; 8] = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    // Two kernels that compute the same in different shapes of code are to give the same bits.
    "-ffp-contract=off",
    "-g1",
];

/// A call before each access, and a trap before each that is not aligned as its type demands.
const CHECKED_FLAGS: [&str; 4] =
    ["-O1", "-fsanitize=thread", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"];

/// The kernels as fast as the machine's processor allows; with `EMU_COVERAGE` so that gcov's lines are the source's.
fn plain_flags() -> Vec<&'static str> {
    if std::env::var_os("EMU_COVERAGE").is_some_and(|value| value == "1") {
        return vec!["-O0", "--coverage"];
    }
    match is_x86_64_v3() {
        true => vec!["-O2", "-march=x86-64-v3"],
        false => vec!["-O2"],
    }
}

fn is_x86_64_v3() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("bmi2");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

impl Build {
    fn driver(&self) {
        let mut sources = files("runtime", "cpp");
        sources
            .extend(files("driver", "cpp").into_iter().filter(|path| !is_one_of(path, &["nvrtc", "nvml", "cublaslt"])));
        let objects = self.objects("libcuda", &sources, &["-O2"]);
        self.link("libcuda.so.1", &objects, &["-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread"]);
        // A machine with a card may have a link of this name; look-ups in this library go on to its dependency.
        self.link(
            "libcuda.so",
            &[],
            &["-Wl,-soname,libcuda.so", "-Wl,--no-as-needed", &self.path("libcuda.so.1"), "-Wl,-rpath,$ORIGIN"],
        );
    }

    /// A library of CUDA 13 that asks the driver for what is its own, and the name that cudarc tries first.
    fn beside_driver(&self, name: &str, source: &str) {
        let objects = self.objects(name, &[Path::new("driver").join(source)], &["-O1"]);
        let (driver, versioned, plain) = (self.path("libcuda.so.1"), format!("{name}.so.13"), format!("{name}.so"));
        self.link(&versioned, &objects, &[&format!("-Wl,-soname,{versioned}"), &driver, "-Wl,-rpath,$ORIGIN"]);
        let (soname, library) = (format!("-Wl,-soname,{plain}"), self.path(&versioned));
        self.link(&plain, &[], &[&soname, "-Wl,--no-as-needed", &library, "-Wl,-rpath,$ORIGIN"]);
    }

    fn management(&self) {
        let objects = self.objects("libnvidia-ml", &[PathBuf::from("driver/nvml.cpp")], &["-O1"]);
        self.link("libnvidia-ml.so.1", &objects, &["-Wl,-soname,libnvidia-ml.so.1"]);
    }

    /// Linked without -fsanitize=thread, which would bring libtsan: its callbacks are the runtime's.
    fn kernels(&self, library: &str, sources: &[PathBuf], flags: &[&str]) {
        let mut all = vec!["-DTANDEM_EMULATE", "-fno-gnu-unique", "-I../kernels", "-include", "runtime/kernel.h"];
        all.extend(flags);
        all.extend(["-x", "c++"]);
        let objects = self.objects(library, sources, &all);
        let driver = self.path("libcuda.so.1");
        let mut link = vec![driver.as_str(), "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN"];
        link.extend(flags.iter().filter(|flag| **flag == "--coverage"));
        self.link(library, &objects, &link);
    }

    fn path(&self, name: &str) -> String {
        self.out.join(name).display().to_string()
    }

    fn objects(&self, library: &str, sources: &[PathBuf], flags: &[&str]) -> Vec<String> {
        let mut headers = [files("runtime", "h"), files("driver", "h"), files("../kernels", "cuh")].concat();
        if library.starts_with("libplanted") {
            // They include the product's kernels, of which they are wrong variants.
            headers.extend(files("../kernels", "cu"));
        }
        let compile = |source: &PathBuf| {
            let stem = source.file_stem().expect("a file").to_string_lossy().into_owned();
            let object = self.path(&format!("{library}-{stem}.o"));
            let mut arguments: Vec<String> = LANGUAGE.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
            arguments.extend(["-c".to_owned(), source.display().to_string(), "-o".to_owned(), object.clone()]);
            let inputs = headers.iter().chain([source]);
            self.run_if_stale(&object, inputs, &arguments);
            object
        };
        sources.iter().map(compile).collect()
    }

    fn link(&self, library: &str, objects: &[String], flags: &[&str]) {
        let output = self.path(library);
        let mut arguments = vec!["-shared".to_owned(), "-o".to_owned(), output.clone()];
        arguments.extend(objects.iter().cloned());
        arguments.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let inputs: Vec<PathBuf> = objects.iter().map(PathBuf::from).collect();
        self.run_if_stale(&output, inputs.iter(), &arguments);
    }

    /// Compares times of files, and the command with the one that made the output.
    fn run_if_stale<'a>(&self, output: &str, inputs: impl Iterator<Item = &'a PathBuf>, arguments: &[String]) {
        let record = format!("{output}.command");
        let command = arguments.join("\n");
        let time = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
        let made = time(Path::new(output));
        let is_fresh = made.is_some()
            && fs::read_to_string(&record).is_ok_and(|before| before == command)
            && inputs.into_iter().all(|input| time(input) <= made);
        if !is_fresh {
            self.run(arguments);
            fs::write(record, command).expect("a file in OUT_DIR");
        }
    }

    fn run(&self, arguments: &[String]) {
        let status = Command::new(&self.compiler).args(arguments).status();
        let is_done = status.is_ok_and(|status| status.success());
        assert!(is_done, "{} {} failed", self.compiler.display(), arguments.join(" "));
    }
}

fn is_one_of(path: &Path, stems: &[&str]) -> bool {
    stems.iter().any(|stem| path.file_stem().is_some_and(|own| own == *stem))
}

fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    found.retain(|path| path.extension().is_some_and(|own| own == ending));
    found.sort();
    found
}
