//! How the GPUs of this host are linked, and which CPUs lie beside each: out of what `nvidia-smi topo -m` prints. Pure.
use std::collections::BTreeMap;

/// A host's GPUs by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    cpus: BTreeMap<usize, String>,
    links: BTreeMap<(usize, usize), String>,
}

impl Topology {
    /// Reads the table: a head of GPUs, network cards and affinities, then a row for each GPU. Rows of cards, the
    /// legend, and what a later driver may add are skipped.
    ///
    /// # Errors
    /// There is no GPU in it.
    pub fn parse(printed: &str) -> Result<Self, String> {
        let printed = without_escapes(printed);
        let mut head: Vec<String> = Vec::new();
        let mut topology = Self::default();
        for line in printed.lines() {
            let cells: Vec<&str> = line.split('\t').map(str::trim).collect();
            if head.is_empty() {
                if cells.iter().any(|cell| gpu(cell).is_some()) {
                    head = cells.iter().map(|&cell| cell.to_owned()).collect();
                }
                continue;
            }
            let Some(row) = cells.first().and_then(|cell| gpu(cell)) else { continue };
            // The head's first cell stands above the rows' names.
            for (column, cell) in head.iter().zip(&cells).skip(1) {
                match gpu(column) {
                    Some(other) if other != row => drop(topology.links.insert((row, other), (*cell).to_owned())),
                    None if column == "CPU Affinity" && is_cpu_list(cell) => {
                        topology.cpus.insert(row, (*cell).to_owned());
                    }
                    _ => {}
                }
            }
        }
        match topology.links.is_empty() && topology.cpus.is_empty() {
            true => Err("no GPU in what `nvidia-smi topo -m` printed".to_owned()),
            false => Ok(topology),
        }
    }

    /// The CPUs beside a GPU, as compose's `cpuset` takes them.
    pub fn cpus(&self, gpu: usize) -> Option<&str> {
        self.cpus.get(&gpu).map(String::as_str)
    }

    /// The link of two GPUs as `nvidia-smi` names it.
    pub fn link(&self, one: usize, other: usize) -> Option<&str> {
        self.links.get(&(one, other)).map(String::as_str)
    }

    /// All links, each from both ends.
    pub fn links(&self) -> impl Iterator<Item = ((usize, usize), &str)> {
        self.links.iter().map(|(&between, link)| (between, link.as_str()))
    }

    /// How good a link is; more is better. NVLink by its number of links, then by how many bridges PCIe needs.
    pub fn rank(&self, one: usize, other: usize) -> u32 {
        match self.link(one, other) {
            Some("PIX") => 5,
            Some("PXB") => 4,
            Some("PHB") => 3,
            Some("NODE") => 2,
            Some("SYS") => 1,
            Some(link) => {
                link.strip_prefix("NV").and_then(|count| count.parse::<u32>().ok()).map_or(0, |count| 100 + count)
            }
            None => 0,
        }
    }
}

fn gpu(cell: &str) -> Option<usize> {
    cell.strip_prefix("GPU")?.parse().ok()
}

/// "0-15,32-47"; "N/A" is none.
fn is_cpu_list(cell: &str) -> bool {
    !cell.is_empty() && cell.chars().all(|letter| letter.is_ascii_digit() || letter == '-' || letter == ',')
}

/// `nvidia-smi` underlines the head, also where nobody sees it.
fn without_escapes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        if letter == '\u{1b}' {
            letters.by_ref().find(char::is_ascii_alphabetic);
        } else {
            out.push(letter);
        }
    }
    out
}

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Two pairs of GPUs with NVLink within a pair, as on hosts with bridges.
    pub const PAIRS: &str = "\t\u{1b}[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\u{1b}[0m\n\
        GPU0\t X \tNV4\tSYS\tSYS\tPIX\t0-15,32-47\t0\t\tN/A\n\
        GPU1\tNV4\t X \tSYS\tSYS\tPHB\t0-15,32-47\t0\t\tN/A\n\
        GPU2\tSYS\tSYS\t X \tNV4\tSYS\t16-31,48-63\t1\t\tN/A\n\
        GPU3\tSYS\tSYS\tNV4\t X \tSYS\t16-31,48-63\t1\t\tN/A\n\
        NIC0\tPIX\tPHB\tSYS\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n";

    #[test]
    fn links_and_cpus_are_read() {
        let topology = Topology::parse(PAIRS).unwrap();
        assert_eq!(topology.link(0, 1), Some("NV4"));
        assert_eq!(topology.link(2, 1), Some("SYS"));
        assert_eq!(topology.link(0, 0), None);
        assert_eq!(topology.links().count(), 12);
        assert_eq!(topology.cpus(3), Some("16-31,48-63"));
        assert!(topology.rank(0, 1) > topology.rank(0, 2));
    }

    #[test]
    fn one_gpu_without_affinity_is_a_topology_only_with_its_cpus() {
        let one = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\tN/A\n";
        assert_eq!(Topology::parse(one).unwrap().cpus(0), Some("0-7"));
        assert!(Topology::parse("No devices were found\n").is_err());
    }

    proptest! {
        #[test]
        fn whatever_is_printed_is_read_or_refused(text in "\\PC*", cells in "(GPU[0-9]?|\t|\n|NV[0-9]*|\u{1b}|X){0,40}") {
            let _ = Topology::parse(&text);
            let _ = Topology::parse(&cells);
        }
    }
}
