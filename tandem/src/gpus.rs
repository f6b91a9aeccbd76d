//! Which node of `tandem up` computes on which GPU. Asks a node program what the driver shows, unless every node
//! computes on the processor or each was told its GPU; the rest is pure.
use anyhow::bail;
use tandem_proto::device::DeviceChoice;

use crate::doctor::facts::{Cuda, Found, NodeFacts};

/// What each of `nodes` nodes is told, and what the user is.
#[derive(Debug, PartialEq, Eq)]
pub struct Spread {
    /// Of each node.
    pub devices: Vec<DeviceChoice>,
    /// Something to know about it.
    pub note: Option<String>,
}

/// Whether [`spread`] needs to know what the driver shows.
pub fn wants_facts(choice: DeviceChoice) -> bool {
    matches!(choice, DeviceChoice::Auto | DeviceChoice::Cuda(None))
}

/// Nodes take the GPUs in turn.
///
/// # Errors
/// A GPU was asked for, and none can be used.
pub fn spread(choice: DeviceChoice, nodes: usize, facts: &Found<NodeFacts>) -> anyhow::Result<Spread> {
    if !wants_facts(choice) {
        return Ok(Spread { devices: vec![choice; nodes], note: None });
    }
    match (usable(facts), choice) {
        (Ok(cards), _) => {
            let devices = cards.iter().cycle().take(nodes).map(|&card| DeviceChoice::Cuda(Some(card))).collect();
            let note = (nodes > cards.len()).then(|| {
                let gpus = if cards.len() == 1 { "one GPU".to_owned() } else { format!("{} GPUs", cards.len()) };
                format!("{nodes} nodes share {gpus}: --kv-memory and --kv-blocks are of each node, not of each GPU")
            });
            Ok(Spread { devices, note })
        }
        (Err(why), DeviceChoice::Auto) => {
            let note = Some(format!("the nodes compute on the processor: {why}"));
            Ok(Spread { devices: vec![DeviceChoice::Cpu; nodes], note })
        }
        (Err(why), _) => bail!("--device {choice}: {why} (`tandem doctor --device cuda` says more)"),
    }
}

/// The numbers of the GPUs that nodes can compute on: one at least.
fn usable(facts: &Found<NodeFacts>) -> Result<Vec<u32>, String> {
    let Cuda { nvrtc, cards, .. } = match facts {
        Found::There(NodeFacts { cuda: Found::There(cuda), .. }) => cuda,
        Found::There(NodeFacts { cuda: Found::Missing { missing }, .. }) | Found::Missing { missing } => {
            return Err(missing.clone());
        }
    };
    let numbers: Vec<u32> = cards.iter().filter(|card| card.unusable.is_none()).map(|card| card.number).collect();
    match (numbers.is_empty(), nvrtc) {
        (true, _) => {
            let why = cards.iter().find_map(|card| card.unusable.clone());
            Err(why.unwrap_or_else(|| "the NVIDIA driver shows no GPU".to_owned()))
        }
        (false, Found::Missing { missing }) => Err(missing.clone()),
        (false, Found::There(_)) => Ok(numbers),
    }
}

#[cfg(test)]
mod tests {
    use DeviceChoice::{Auto, Cpu, Cuda as On};

    use super::*;
    use crate::doctor::facts::Card;

    fn missing<T>(why: &str) -> Found<T> {
        Found::Missing { missing: why.to_owned() }
    }

    /// Cards with these numbers; the odd ones cannot be used.
    fn machine(cards: &[u32], nvrtc: Found<String>) -> Found<NodeFacts> {
        let card = |&number: &u32| Card {
            number,
            name: "H200".into(),
            capability: "9.0".into(),
            pci: "0000:01:00.0".into(),
            memory_bytes: 1 << 37,
            unusable: (number % 2 == 1).then(|| format!("GPU {number} is too old")),
        };
        let cublaslt = missing("not asked");
        let cuda = Cuda { driver: "13.0".into(), nvrtc, cublaslt, cards: cards.iter().map(card).collect() };
        Found::There(NodeFacts {
            threads: 2,
            memory_bytes: None,
            memory_available_bytes: None,
            kernels: missing("not asked"),
            ucx: missing("not asked"),
            cuda: Found::There(cuda),
        })
    }

    fn nvrtc() -> Found<String> {
        Found::There("13.0".to_owned())
    }

    fn numbers(devices: &[DeviceChoice]) -> Vec<String> {
        devices.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn nodes_take_the_gpus_in_turn() {
        for choice in [On(None), Auto] {
            let two = spread(choice, 2, &machine(&[0, 1, 2, 3, 4], nvrtc())).unwrap();
            assert_eq!((numbers(&two.devices), two.note), (vec!["cuda:0".to_owned(), "cuda:2".to_owned()], None));
            let three = spread(choice, 3, &machine(&[0, 1, 2], nvrtc())).unwrap();
            assert_eq!(numbers(&three.devices), ["cuda:0", "cuda:2", "cuda:0"]);
            assert!(three.note.unwrap().contains("3 nodes share 2 GPUs"));
            let one = spread(choice, 2, &machine(&[0], nvrtc())).unwrap();
            assert!(one.note.unwrap().contains("one GPU"));
        }
    }

    #[test]
    fn what_was_named_is_not_looked_for() {
        for choice in [Cpu, On(Some(3))] {
            assert!(!wants_facts(choice));
            let spread = spread(choice, 2, &missing("nobody asked")).unwrap();
            assert_eq!(spread, Spread { devices: vec![choice; 2], note: None });
        }
    }

    #[test]
    fn without_a_gpu_auto_says_so_and_cuda_is_an_error() {
        for (facts, why) in [
            (missing("tandem-decode-node cannot be started"), "cannot be started"),
            (machine(&[], nvrtc()), "no GPU"),
            (machine(&[1], nvrtc()), "GPU 1 is too old"),
            (machine(&[0], missing("no NVRTC")), "no NVRTC"),
        ] {
            let on_processor = spread(Auto, 2, &facts).unwrap();
            assert_eq!(on_processor.devices, [Cpu, Cpu]);
            assert!(on_processor.note.unwrap().contains(why));
            let error = spread(On(None), 2, &facts).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("--device cuda") && error.contains("doctor"), "{error}");
        }
    }
}
