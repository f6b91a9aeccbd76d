//! How much memory this process may use: the machine's, or what the limits of its control groups leave if that is less
//! (version 1 or 2). `None` where the system does not tell. What to do with it is decided in `footprint.rs`.
use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// Where the system says it; other files in tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryFiles {
    /// `/proc/meminfo`.
    pub meminfo: PathBuf,
    /// `/proc/self/cgroup`: the groups that the process is in.
    pub groups: PathBuf,
    /// `/sys/fs/cgroup`.
    pub cgroup_root: PathBuf,
}

impl Default for MemoryFiles {
    fn default() -> Self {
        Self {
            meminfo: "/proc/meminfo".into(),
            groups: "/proc/self/cgroup".into(),
            cgroup_root: "/sys/fs/cgroup".into(),
        }
    }
}

impl MemoryFiles {
    /// Bytes in all.
    pub fn total(&self) -> Option<u64> {
        self.meminfo("MemTotal").into_iter().chain(self.limits().map(|group| group.limit)).min()
    }

    /// Bytes that can be used without swapping: a group's limit less what its processes use already.
    pub fn available(&self) -> Option<u64> {
        self.meminfo("MemAvailable").into_iter().chain(self.limits().map(|group| group.available())).min()
    }

    fn meminfo(&self, field: &str) -> Option<u64> {
        meminfo(&read_to_string(&self.meminfo).ok()?, field)
    }

    /// Of the groups of the process and all those that these are in: each may have a limit.
    fn limits(&self) -> impl Iterator<Item = GroupMemory> {
        let groups = read_to_string(&self.groups).unwrap_or_default();
        // A process that sees only a part of the tree has its own group at the root of it, whatever its path is
        // outside.
        let mut folders = vec![(self.cgroup_root.clone(), VERSION_2), (self.cgroup_root.join("memory"), VERSION_1)];
        for (path, version) in groups.lines().filter_map(memory_group) {
            let root = if version.subfolder { self.cgroup_root.join("memory") } else { self.cgroup_root.clone() };
            let inside = Path::new(path.trim_start_matches('/'));
            let own = inside.ancestors().filter(|path| !path.as_os_str().is_empty());
            folders.extend(own.map(|path| (root.join(path), version)));
        }
        folders.into_iter().filter_map(|(folder, version)| GroupMemory::read(&folder, version))
    }
}

/// Names of a version of control groups.
#[derive(Clone, Copy)]
struct Version {
    /// Whether memory has a tree of its own.
    subfolder: bool,
    limit: &'static str,
    used: &'static str,
    /// In `memory.stat`: pages of files, read once and read again.
    reclaimable: [&'static str; 2],
}

const VERSION_1: Version = Version {
    subfolder: true,
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: ["total_inactive_file", "total_active_file"],
};
const VERSION_2: Version = Version {
    subfolder: false,
    limit: "memory.max",
    used: "memory.current",
    reclaimable: ["inactive_file", "active_file"],
};

/// The path in a line of `/proc/self/cgroup` (cgroups(7)): `4:memory:/path` or, in version 2, `0::/path`.
fn memory_group(line: &str) -> Option<(&str, Version)> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    match controllers {
        "" => Some((path, VERSION_2)),
        _ => controllers.split(',').any(|name| name == "memory").then_some((path, VERSION_1)),
    }
}

/// A group that has a limit.
struct GroupMemory {
    limit: u64,
    used: u64,
}

impl GroupMemory {
    fn read(folder: &Path, version: Version) -> Option<Self> {
        let number = |name: &str| read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
        // "max" is no limit.
        let limit = number(version.limit)?;
        let stat = read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let field = |name: &str| {
            let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok();
            stat.lines().find_map(value).unwrap_or(0)
        };
        // Pages of files that were read are given back when the group needs memory: a mapped model is not used twice.
        let reclaimable: u64 = version.reclaimable.into_iter().map(field).sum();
        Some(Self { limit, used: number(version.used).unwrap_or(0).saturating_sub(reclaimable) })
    }

    fn available(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

/// `MemTotal:       24576000 kB`, where kB are 1,024 bytes (proc(5)).
fn meminfo(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn reads_what_linux_says() {
        let text = "MemTotal:       24576000 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(meminfo(text, "MemTotal"), Some(24_576_000 * 1024));
        assert_eq!(meminfo(text, "MemAvailable"), Some(1 << 20));
        assert_eq!(meminfo("MemFree: 1 kB\n", "MemTotal"), None);
        assert_eq!(meminfo("MemAvailable: much\n", "MemAvailable"), None);
        let machine = MemoryFiles::default();
        assert!(machine.total().is_some_and(|bytes| bytes > 1 << 26));
        assert!(machine.available() <= machine.total());
    }

    /// A machine of 1000 MiB with 800 available, and these files of control groups.
    fn machine(folder: &Path, groups: &str, files: &[(&str, String)]) -> MemoryFiles {
        let machine = MemoryFiles {
            meminfo: folder.join("meminfo"),
            groups: folder.join("cgroup"),
            cgroup_root: folder.join("root"),
        };
        fs::create_dir_all(&machine.cgroup_root).unwrap();
        fs::write(&machine.meminfo, format!("MemTotal: {} kB\nMemAvailable: {} kB\n", 1000 << 10, 800 << 10)).unwrap();
        fs::write(&machine.groups, groups).unwrap();
        for (path, text) in files {
            let path = machine.cgroup_root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        machine
    }

    #[test]
    fn a_groups_limit_less_what_it_uses_counts_in_both_versions() {
        let mib = |mib: u64| format!("{}\n", mib * MIB);
        let second = [
            ("a/b/memory.max", "max\n".to_owned()),
            ("a/memory.max", mib(600)),
            ("a/memory.current", mib(250)),
            ("a/memory.stat", format!("anon 1\ninactive_file {}\nactive_file {}\n", 100 * MIB, 50 * MIB)),
        ];
        let first = [
            ("memory/a/memory.limit_in_bytes", mib(600)),
            ("memory/a/memory.usage_in_bytes", mib(250)),
            (
                "memory/a/memory.stat",
                format!("total_inactive_file {}\ntotal_active_file {}\ninactive_file 3\n", 100 * MIB, 50 * MIB),
            ),
            ("memory/memory.limit_in_bytes", "9223372036854771712\n".to_owned()),
        ];
        for (groups, files) in [("0::/a/b\n", &second), ("5:cpu:/x\n4:memory,hugetlb:/a\n0::/\n", &first)] {
            let folder = tempfile::tempdir().unwrap();
            let machine = machine(folder.path(), groups, files);
            assert_eq!((machine.total(), machine.available()), (Some(600 * MIB), Some(500 * MIB)), "{groups}");
        }
    }

    #[test]
    fn without_limits_it_is_the_machine_and_without_files_nobody_knows() {
        let folder = tempfile::tempdir().unwrap();
        let alone = machine(folder.path(), "0::/\n", &[]);
        assert_eq!((alone.total(), alone.available()), (Some(1000 * MIB), Some(800 * MIB)));
        // In a container, whose own group is the root that it sees.
        let contained = machine(folder.path(), "0::/elsewhere/x\n", &[("memory.max", (64 * MIB).to_string())]);
        assert_eq!(contained.available(), Some(64 * MIB));
        let nowhere = folder.path().join("nowhere");
        let unknown = MemoryFiles { meminfo: nowhere.clone(), groups: nowhere.clone(), cgroup_root: nowhere };
        assert_eq!((unknown.total(), unknown.available()), (None, None));
    }
}
