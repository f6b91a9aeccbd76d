//! What this process computes on, as the router is told: nodes that share cores, or lend each other theirs, slow each
//! other down, and only they can say that they do.
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;
use tandem_engine::cpu::Lend;
use tandem_proto::v1;
use xxhash_rust::xxh3::Xxh3;

/// Drawn by the kernel at each start of the machine: the same in all containers on it.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Of a process whose `threads` are bound to `cpus`; to none: they run on all that it may use. `None`: the system does
/// not say what machine this is, or which cores there are.
pub fn this(threads: usize, cpus: &[usize], lending: Option<&Lend>) -> Option<v1::Processor> {
    let boot_id = std::fs::read(BOOT_ID).ok()?;
    if let Some(group) = lending.and_then(|lend| lending_group(&boot_id, lend, threads)) {
        return Some(group);
    }
    of(&boot_id, or_allowed(cpus), threads)
}

/// Nodes that lend each other cores by one file share what they all have. `cores` are the node's own: what is left to
/// it while the others compute.
fn lending_group(boot_id: &[u8], lend: &Lend, threads: usize) -> Option<v1::Processor> {
    let file = std::fs::metadata(&lend.file).ok()?;
    processor(boot_id, &[file.dev(), file.ino()], lend.own.len(), threads)
}

/// Compute threads of a process that is not told how many: one for each core that it may use, as far as the system
/// gives it time for so many. Two threads of one core would share its vector units and tile registers, and its caches.
pub fn default_threads() -> usize {
    let time_for = std::thread::available_parallelism().map_or(1, usize::from);
    cores(&[]).len().clamp(1, time_for)
}

/// One hardware thread of each core among `cpus`; of none: among all that this process may use.
pub fn cores(cpus: &[usize]) -> Vec<usize> {
    one_of_each(&or_allowed(cpus), first_sibling)
}

/// The numbers of the cores that `cpus` belong to; of none: those of all that this process may use. A core has the
/// number of its first hardware thread, in each process of the machine.
pub fn core_numbers(cpus: &[usize]) -> BTreeSet<usize> {
    or_allowed(cpus).into_iter().map(|cpu| first_sibling(cpu).unwrap_or(cpu)).collect()
}

fn one_of_each(cpus: &[usize], first_sibling: impl Fn(usize) -> Option<usize>) -> Vec<usize> {
    let mut seen = BTreeSet::new();
    cpus.iter().copied().filter(|&cpu| seen.insert(first_sibling(cpu).unwrap_or(cpu))).collect()
}

/// The lowest number among the hardware threads of a thread's core.
fn first_sibling(cpu: usize) -> Option<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let siblings = std::fs::read_to_string(path).ok()?;
    siblings.split([',', '-', '\n']).next()?.parse().ok()
}

/// `cpus`; where there are none, [`allowed`].
fn or_allowed(cpus: &[usize]) -> Vec<usize> {
    if cpus.is_empty() { allowed() } else { cpus.to_vec() }
}

/// The hardware threads that the calling thread may use.
fn allowed() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else { return Vec::new() };
    (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).collect()
}

fn of(boot_id: &[u8], mut cpus: Vec<usize>, threads: usize) -> Option<v1::Processor> {
    cpus.sort_unstable();
    cpus.dedup();
    let words: Vec<_> = cpus.iter().map(|cpu| *cpu as u64).collect();
    processor(boot_id, &words, cpus.len(), threads)
}

/// `words` name it on its machine.
fn processor(boot_id: &[u8], words: &[u64], cores: usize, threads: usize) -> Option<v1::Processor> {
    let mut hasher = Xxh3::new();
    hasher.update(boot_id);
    words.iter().for_each(|word| hasher.update(&word.to_le_bytes()));
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let processor = v1::Processor { id: hasher.digest().max(1), cores: count(cores), threads: count(threads) };
    (cores > 0).then_some(processor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_cores_of_the_same_machine_are_the_same() {
        let id = |boot_id: &str, cpus: &[usize]| of(boot_id.as_bytes(), cpus.to_vec(), 1).unwrap().id;
        assert_eq!(id("a", &[0, 1]), id("a", &[1, 0, 1]));
        assert_ne!(id("a", &[0]), id("a", &[1]));
        assert_ne!(id("a", &[0]), id("b", &[0]));
        assert_eq!(of(b"a", vec![], 1), None);
    }

    #[test]
    fn two_threads_of_a_core_count_once() {
        let of_four = |cpu: usize| Some(cpu % 4);
        assert_eq!(one_of_each(&[0, 1, 2, 3, 4, 5, 6, 7], of_four), [0, 1, 2, 3]);
        assert_eq!(one_of_each(&[5, 1, 2], of_four), [5, 2]);
        // Where the system does not say, each is one.
        assert_eq!(one_of_each(&[0, 4], |_| None), [0, 4]);
        assert!((1..=allowed().len()).contains(&default_threads()));
    }

    #[test]
    fn nodes_that_lend_each_other_cores_share_them() {
        let file = std::env::temp_dir().join(format!("tandem-processor-{}", std::process::id()));
        std::fs::write(&file, "").unwrap();
        let node = |file: &std::path::Path, cpu: usize| {
            this(1, &[cpu], Some(&Lend { file: file.to_owned(), own: vec![cpu] })).unwrap()
        };
        assert_eq!(node(&file, 0), node(&file, 1));
        assert_eq!((node(&file, 0).cores, node(&file, 0).threads), (1, 1));
        std::fs::remove_file(&file).unwrap();
        assert_ne!(node(&file, 0).id, node(&file, 1).id, "without the file each has its own");
    }

    #[test]
    fn this_process_has_cores() {
        let all = this(3, &[], None).unwrap();
        assert!(all.id != 0 && all.cores > 0 && all.threads == 3);
        assert_eq!(this(1, &[0], None).unwrap().cores, 1);
        assert_eq!(core_numbers(&[0]).len(), 1);
        assert!(core_numbers(&[]).len() <= allowed().len() && !core_numbers(&[]).is_empty());
    }
}
