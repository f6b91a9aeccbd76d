//! How much memory this process may use: the machine's, or its control group's limit if that is less. `None` where the
//! system does not tell.
use std::fs::read_to_string;

/// Bytes in all.
pub fn total() -> Option<u64> {
    within_limit("MemTotal")
}

/// Bytes that can be used without swapping.
pub fn available() -> Option<u64> {
    within_limit("MemAvailable")
}

fn within_limit(field: &str) -> Option<u64> {
    let machine = read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text, field));
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limit = limits.into_iter().find_map(|path| read_to_string(path).ok()).and_then(|text| text.trim().parse().ok());
    machine.into_iter().chain(limit).min()
}

/// `MemTotal:       24576000 kB`, where kB are 1,024 bytes (proc(5)).
fn meminfo(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_linux_says() {
        let text = "MemTotal:       24576000 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(meminfo(text, "MemTotal"), Some(24_576_000 * 1024));
        assert_eq!(meminfo(text, "MemAvailable"), Some(1 << 20));
        assert_eq!(meminfo("MemFree: 1 kB\n", "MemTotal"), None);
        assert_eq!(meminfo("MemAvailable: much\n", "MemAvailable"), None);
        assert!(total().is_some_and(|bytes| bytes > 1 << 26));
    }
}
