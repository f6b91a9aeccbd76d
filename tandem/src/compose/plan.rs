//! Which GPU becomes a prefill and which a decode node. Pure.
use super::topology::Topology;

/// A node's place on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// `prefill` or `decode`.
    pub role: &'static str,
    /// Number among the nodes of its role.
    pub index: usize,
    /// Its GPU, if it has one.
    pub gpu: Option<usize>,
    /// Its CPUs, as compose's `cpuset` takes them; `None`: all.
    pub cpus: Option<String>,
}

impl Node {
    /// As the cluster knows it.
    pub fn name(&self) -> String {
        format!("{}-{}", self.role, self.index)
    }
}

/// Gives each node a GPU. KV travels from every prefill to every decode node, so that division is best whose links
/// across are best in sum; of equal ones, that whose prefill nodes come first in `gpus`. Without a topology: in order.
pub fn on_gpus(gpus: &[usize], prefill: usize, topology: Option<&Topology>) -> Vec<Node> {
    let chosen = match topology {
        Some(topology) => best_division(gpus, prefill, topology),
        None => (1 << prefill) - 1,
    };
    let is_prefill = |place: usize| chosen & (1 << place) != 0;
    let node = |role, index, gpu: usize| Node {
        role,
        index,
        gpu: Some(gpu),
        cpus: topology.and_then(|topology| topology.cpus(gpu)).map(str::to_owned),
    };
    let of = |role, wanted: bool| {
        let places = (0..gpus.len()).filter(move |&place| is_prefill(place) == wanted);
        places.enumerate().map(move |(index, place)| node(role, index, gpus[place]))
    };
    of("prefill", true).chain(of("decode", false)).collect()
}

/// Nodes that compute on CPUs, each with its part of them where there are enough.
pub fn on_cpus(parts: Option<Vec<String>>, prefill: usize, decode: usize) -> Vec<Node> {
    let mut parts = parts.unwrap_or_default().into_iter();
    let roles = (0..prefill).map(|index| ("prefill", index)).chain((0..decode).map(|index| ("decode", index)));
    roles.map(|(role, index)| Node { role, index, gpu: None, cpus: parts.next() }).collect()
}

/// Bit `i`: `gpus[i]` becomes a prefill node. At most 16 GPUs: a few thousand divisions.
fn best_division(gpus: &[usize], prefill: usize, topology: &Topology) -> u32 {
    let worth = |chosen: u32| -> u32 {
        let side = |wanted: bool| {
            gpus.iter()
                .enumerate()
                .filter(move |(place, _)| (chosen & (1_u32 << *place) != 0) == wanted)
                .map(|(_, &gpu)| gpu)
        };
        side(true).flat_map(|one| side(false).map(move |other| topology.rank(one, other))).sum()
    };
    let divisions = (0..1_u32 << gpus.len()).filter(|chosen| chosen.count_ones() as usize == prefill);
    // The smallest of equal ones has the first GPUs.
    divisions.max_by_key(|&chosen| (worth(chosen), std::cmp::Reverse(chosen))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::topology::tests::PAIRS;
    use super::*;

    fn gpus_of(nodes: &[Node], role: &str) -> Vec<usize> {
        nodes.iter().filter(|node| node.role == role).filter_map(|node| node.gpu).collect()
    }

    #[test]
    fn each_pair_with_nvlink_gets_one_of_both_roles() {
        let topology = Topology::parse(PAIRS).unwrap();
        let nodes = on_gpus(&[0, 1, 2, 3], 2, Some(&topology));
        assert_eq!((gpus_of(&nodes, "prefill"), gpus_of(&nodes, "decode")), (vec![0, 2], vec![1, 3]));
        assert_eq!(nodes[1].cpus.as_deref(), Some("16-31,48-63"));
        assert_eq!(nodes[1].name(), "prefill-1");
    }

    #[test]
    fn without_a_topology_the_first_gpus_prefill() {
        let nodes = on_gpus(&[4, 5, 7], 1, None);
        assert_eq!((gpus_of(&nodes, "prefill"), gpus_of(&nodes, "decode")), (vec![4], vec![5, 7]));
        assert_eq!(nodes[0].cpus, None);
    }

    #[test]
    fn equal_links_leave_the_order_as_given() {
        let nodes = on_gpus(&[2, 0, 1], 1, Some(&Topology::default()));
        assert_eq!(gpus_of(&nodes, "prefill"), [2]);
    }

    #[test]
    fn cpus_are_parts_or_all() {
        let parts = Some(vec!["0".to_owned(), "1".to_owned()]);
        assert_eq!(on_cpus(parts, 1, 1)[1].cpus.as_deref(), Some("1"));
        assert_eq!(on_cpus(None, 1, 2)[2].name(), "decode-1");
    }
}
