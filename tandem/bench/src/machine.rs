//! What a report says of where it was made: the machine, the program, its command line without secrets.
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

/// The commit that this program was built from; empty outside a repository.
pub const COMMIT: &str = env!("TANDEM_COMMIT");
/// Flags whose value is nobody's business.
const SECRETS: [&str; 2] = ["--api-key", "--header"];
const HIDDEN: &str = "…";

/// Processor, its cores that this process may use, memory, kernel.
pub fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let (cpuinfo, meminfo) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
    let cores = available_cpus();
    let kernel = read("/proc/sys/kernel/osrelease");
    let name = field(&cpuinfo, "model name").unwrap_or(std::env::consts::ARCH);
    let kib: f64 = field(&meminfo, "MemTotal").and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or(0.0);
    format!("{name}, {cores} CPUs, {:.0} GiB, Linux {}", kib / 1024.0 / 1024.0, kernel.trim())
}

/// CPUs that this process may use.
fn available_cpus() -> usize {
    let set = sched_getaffinity(Pid::from_raw(0));
    set.map_or(0, |set| (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).count())
}

/// The value behind `name` in the form of files in /proc.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let value = lines.into_iter().find(|(key, _)| key.trim() == name)?.1.trim();
    Some(value)
}

/// The command line as it may be published.
pub fn command(arguments: impl Iterator<Item = String>) -> Vec<String> {
    let mut hide_next = false;
    let shown = arguments.map(|argument| {
        if std::mem::take(&mut hide_next) {
            return HIDDEN.to_owned();
        }
        hide_next = SECRETS.contains(&argument.as_str());
        match argument.split_once('=') {
            Some((flag, _)) if SECRETS.contains(&flag) => format!("{flag}={HIDDEN}"),
            _ => argument,
        }
    });
    shown.collect()
}

/// The command line of a process of this machine; empty where it cannot be read.
pub fn command_of(pid: u32) -> String {
    let bytes = fs::read(Path::new("/proc").join(pid.to_string()).join("cmdline")).unwrap_or_default();
    let arguments = bytes.split(|byte| *byte == 0).filter(|argument| !argument.is_empty());
    let shown = command(arguments.map(|argument| String::from_utf8_lossy(argument).into_owned()));
    shown.join(" ")
}

/// Seconds since 1970.
pub fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_stay_here() {
        let line = ["tandem", "bench", "--api-key", "sk-1", "--header=authorization: x", "--row", "A"];
        let shown = command(line.into_iter().map(str::to_owned));
        assert_eq!(shown, ["tandem", "bench", "--api-key", "…", "--header=…", "--row", "A"]);
    }

    #[test]
    fn this_machine_and_process_have_a_description() {
        assert!(machine().contains("CPUs"), "{}", machine());
        assert!(!command_of(std::process::id()).is_empty());
        assert_eq!(command_of(u32::MAX), "");
        assert_eq!(field("a\t: 1\nmodel name : x y \n", "model name"), Some("x y"));
    }
}
