//! From what was seen to what it means: what is fine, what could be better, what is lacking, and what to do about it.
//! Pure.
use serde::Serialize;
use tandem_proto::device::DeviceChoice;

use super::facts::{Cuda, Facts, Found, MemoryLock, NodeFacts, Ucx};

/// One thing about a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How it stands.
    pub level: Level,
    /// With what.
    pub about: &'static str,
    /// What was found.
    pub what: String,
    /// What to do, if something is to be done.
    pub cure: Option<String>,
}

/// How something stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// As it should be.
    Fine,
    /// Nodes serve, but slower than they could, or without something.
    Note,
    /// Nodes cannot serve.
    Lacking,
}

/// UCX's ring of shared memory for each pair of nodes, and some room.
const LEAST_SHARED_MEMORY: u64 = 256 << 20;
const GIB: u64 = 1 << 30;

/// What UCX may bring: a name's beginning, what it is good for, and where it comes from.
const TRANSPORTS: [(&str, &str, Source); 8] = [
    ("posix", "shared memory of a host", Source::Anywhere),
    ("sysv", "shared memory of a host", Source::Anywhere),
    ("cma", "copies between processes of a host", Source::Anywhere),
    ("tcp", "sockets", Source::Anywhere),
    ("rc", "RDMA", Source::Rdma),
    ("cuda_copy", "GPU memory over sockets and shared memory", Source::Gpu),
    ("cuda_ipc", "GPU to GPU of a host", Source::Gpu),
    ("gdr_copy", "small pieces of GPU memory", Source::GdrCopy),
];

/// What a transport wants.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Anywhere,
    Rdma,
    Gpu,
    GdrCopy,
}

/// All findings about `facts`, on a machine whose nodes are to compute on `device`.
pub fn judge(facts: &Facts, device: DeviceChoice) -> Vec<Finding> {
    let mut findings = Vec::new();
    match &facts.node {
        Found::There(node) => {
            findings.extend(processor(node));
            findings.extend(cards(facts, &node.cuda, device));
            findings.extend(links(facts));
            findings.extend(ucx(facts, node));
        }
        Found::Missing { missing } => {
            let cure = "`make build` builds all programs; they stand in one folder";
            findings.push(Finding::new(Level::Lacking, "nodes", missing.clone()).cured_by(cure));
        }
    }
    findings.extend(huge_pages(facts));
    findings.extend(locked_memory(facts));
    findings.extend(shared_memory(facts));
    findings.push(model(facts));
    findings
}

impl Finding {
    fn new(level: Level, about: &'static str, what: impl Into<String>) -> Self {
        Self { level, about, what: what.into(), cure: None }
    }

    fn cured_by(mut self, cure: impl Into<String>) -> Self {
        self.cure = Some(cure.into());
        self
    }
}

fn processor(node: &NodeFacts) -> Vec<Finding> {
    let cores = plural(node.threads, "core");
    let cpu = match &node.kernels {
        Found::There(kernels) => {
            let what = format!("{cores}; kernels {}, arithmetic {}", kernels.isa, kernels.arithmetic);
            Finding::new(Level::Fine, "CPU", what)
        }
        Found::Missing { missing } => Finding::new(Level::Lacking, "CPU", format!("{cores}; {missing}")),
    };
    let memory = match (node.memory_bytes, node.memory_available_bytes) {
        (Some(all), Some(free)) => format!("{} in all, {} free", gib(all), gib(free)),
        _ => "the system does not say how much there is: give --kv-memory in bytes".to_owned(),
    };
    vec![cpu, Finding::new(Level::Fine, "memory", memory)]
}

fn cards(facts: &Facts, cuda: &Found<Cuda>, device: DeviceChoice) -> Vec<Finding> {
    let wanted = matches!(device, DeviceChoice::Cuda(_));
    let serious = if wanted { Level::Lacking } else { Level::Note };
    let cuda = match cuda {
        Found::There(cuda) => cuda,
        // A machine without a GPU lacks nothing that it would need for its CPU.
        Found::Missing { missing } if !wanted && facts.nvidia_module.is_none() => {
            return vec![Finding::new(Level::Fine, "GPU", format!("none: {missing}; nodes compute on the CPU"))];
        }
        Found::Missing { missing } => {
            let cure = "install NVIDIA's driver (580 or newer), in a container start it with --gpus all; --device cpu \
                        needs none";
            return vec![Finding::new(serious, "GPU", missing.clone()).cured_by(cure)];
        }
    };
    let module = facts.nvidia_module.as_deref().map(|module| format!(", kernel module {module}")).unwrap_or_default();
    let driver = format!("serves CUDA {}{module}", cuda.driver);
    let mut findings = vec![Finding::new(Level::Fine, "driver", driver)];
    for card in &cuda.cards {
        let what = format!(
            "cuda:{}: {}, {}, compute capability {}, PCI {}",
            card.number,
            card.name,
            gib(card.memory_bytes),
            card.capability,
            card.pci
        );
        findings.push(match &card.unusable {
            None => Finding::new(Level::Fine, "GPU", what),
            Some(why) => {
                let asked = device == DeviceChoice::Cuda(Some(card.number));
                let level = if asked { Level::Lacking } else { Level::Note };
                Finding::new(level, "GPU", format!("{what}: no node can use it: {why}"))
            }
        });
    }
    findings.extend(absent_card(cuda, device));
    if cuda.cards.iter().any(|card| card.unusable.is_none()) {
        findings.push(match &cuda.nvrtc {
            Found::There(version) => Finding::new(Level::Fine, "NVRTC", format!("{version}: compiles the kernels")),
            Found::Missing { missing } => Finding::new(serious, "NVRTC", missing.clone())
                .cured_by("pip install nvidia-cuda-nvrtc==13.0.88, and name its folder in LD_LIBRARY_PATH"),
        });
        findings.push(match &cuda.cublaslt {
            Found::There(version) => Finding::new(Level::Fine, "cuBLASLt", format!("{version}: computes prompts")),
            Found::Missing { missing } => {
                let what = format!("{missing}: prompts take about twice as long, with the same tokens");
                Finding::new(Level::Note, "cuBLASLt", what)
                    .cured_by("pip install nvidia-cublas==13.0.2.14, and name its folder in LD_LIBRARY_PATH")
            }
        });
    }
    findings
}

/// The device that was asked for, if it is not there.
fn absent_card(cuda: &Cuda, device: DeviceChoice) -> Option<Finding> {
    let usable: Vec<_> = cuda.cards.iter().filter(|card| card.unusable.is_none()).collect();
    let listed = cuda.cards.len();
    let what = match device {
        DeviceChoice::Cuda(None) if usable.is_empty() => format!("of {} none can be used", plural(listed, "GPU")),
        DeviceChoice::Cuda(Some(number)) if cuda.cards.iter().all(|card| card.number != number) => {
            format!("there is no cuda:{number}: the driver shows {}", plural(listed, "GPU"))
        }
        _ => return None,
    };
    let cure = "CUDA_VISIBLE_DEVICES says which GPUs a process sees, numbered from 0";
    Some(Finding::new(Level::Lacking, "GPU", what).cured_by(cure))
}

fn links(facts: &Facts) -> Option<Finding> {
    let named = |link: &super::facts::GpuLink| format!("{}-{} {}", link.between.0, link.between.1, link.link);
    let links: Vec<_> = facts.gpu_links.iter().map(named).collect();
    let what = format!("{} (NV: NVLink, PIX to SYS: PCIe, from near to far)", links.join(", "));
    (!links.is_empty()).then(|| Finding::new(Level::Fine, "GPU links", what))
}

fn ucx(facts: &Facts, node: &NodeFacts) -> Vec<Finding> {
    let Ucx { version, transports } = match &node.ucx {
        Found::There(ucx) => ucx,
        Found::Missing { missing } => {
            let note = format!("{missing}; KV travels over plain TCP, several times slower");
            return vec![Finding::new(Level::Note, "UCX", note).cured_by("apt install libucx0")];
        }
    };
    // `rc_verbs` and `rc_mlx5` are both `rc`.
    let has = |name: &str| transports.iter().any(|have| have == name || have.starts_with(&format!("{name}_")));
    let exists = |source: Source| match source {
        Source::Anywhere => true,
        Source::Rdma => !facts.rdma_devices.is_empty(),
        Source::Gpu => node.cuda.there().is_some_and(|cuda| !cuda.cards.is_empty()),
        Source::GdrCopy => facts.gdrcopy,
    };
    let mut findings = vec![Finding::new(Level::Fine, "UCX", format!("{version}: {}", transports.join(", ")))];
    for (name, purpose, source) in TRANSPORTS {
        if has(name) || !exists(source) {
            continue;
        }
        let what = format!("UCX {version} has no {name} here ({purpose})");
        let finding = Finding::new(Level::Note, "UCX", what);
        findings.push(match source {
            Source::Anywhere => finding,
            Source::Rdma => {
                finding.cured_by("a UCX built with verbs, such as Debian's libucx0; --ucx-lib-dir names it")
            }
            Source::Gpu | Source::GdrCopy => {
                // Said by `docs/gpu.md` as well.
                finding.cured_by(
                    "a UCX built with CUDA, such as PyPI's libucx-cu13 (deploy/gpu/ucx.sh), named by --ucx-lib-dir; \
                     without it nodes stage the KV of GPUs in main memory and send it over tcp",
                )
            }
        });
    }
    findings
}

fn huge_pages(facts: &Facts) -> Option<Finding> {
    let mode = facts.transparent_huge_pages.as_deref()?;
    Some(match mode {
        "never" => Finding::new(Level::Note, "huge pages", "never: KV memory has pages of 4 KiB")
            .cured_by("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (root)"),
        _ => Finding::new(Level::Fine, "huge pages", mode),
    })
}

/// Only who registers memory with a card locks it.
fn locked_memory(facts: &Facts) -> Option<Finding> {
    let has_gpu = facts.node.there().and_then(|node| node.cuda.there()).is_some_and(|cuda| !cuda.cards.is_empty());
    let wanted = has_gpu || !facts.rdma_devices.is_empty();
    Some(match facts.memlock {
        MemoryLock::Unknown => return None,
        MemoryLock::Unlimited => Finding::new(Level::Fine, "memlock", "unlimited"),
        MemoryLock::Bytes(bytes) if wanted => {
            let what = format!("{}: RDMA cards and GPUs read and write locked pages", size(bytes));
            Finding::new(Level::Note, "memlock", what)
                .cured_by("ulimit -l unlimited; in a container --ulimit memlock=-1; in systemd LimitMEMLOCK=infinity")
        }
        MemoryLock::Bytes(bytes) => {
            Finding::new(Level::Fine, "memlock", format!("{}, which matters to RDMA cards and GPUs alone", size(bytes)))
        }
    })
}

fn shared_memory(facts: &Facts) -> Option<Finding> {
    let bytes = facts.shared_memory_bytes?;
    Some(match bytes < LEAST_SHARED_MEMORY {
        true => Finding::new(Level::Note, "/dev/shm", format!("{} free, and UCX wants its rings there", size(bytes)))
            .cured_by("in a container --shm-size 2g"),
        false => Finding::new(Level::Fine, "/dev/shm", format!("{} free", size(bytes))),
    })
}

fn model(facts: &Facts) -> Finding {
    let path = facts.model.path.display();
    match facts.model.exists {
        true => Finding::new(Level::Fine, "model", path.to_string()),
        false => Finding::new(Level::Lacking, "model", format!("none at {path}"))
            .cured_by("`make setup` downloads the default one; --model PATH takes a GGUF file or a directory"),
    }
}

fn plural(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / GIB as f64)
}

fn size(bytes: u64) -> String {
    if bytes < GIB { format!("{} MiB", bytes >> 20) } else { gib(bytes) }
}

#[cfg(test)]
mod tests {
    use super::super::facts::{Card, GpuLink, Kernels, Model};
    use super::*;

    fn missing<T>(why: &str) -> Found<T> {
        Found::Missing { missing: why.to_owned() }
    }

    /// Two cores, no GPU, Debian's UCX, nothing wrong.
    fn plain() -> Facts {
        let kernels = Kernels { isa: "avx512".into(), arithmetic: "bf16-dots".into() };
        let transports = ["posix", "sysv", "cma", "tcp"].map(str::to_owned).to_vec();
        let node = NodeFacts {
            threads: 2,
            memory_bytes: Some(16 * GIB),
            memory_available_bytes: Some(12 * GIB),
            kernels: Found::There(kernels),
            ucx: Found::There(Ucx { version: "1.13.1".into(), transports }),
            cuda: missing("no NVIDIA driver"),
        };
        Facts {
            node: Found::There(node),
            nvidia_module: None,
            gpu_links: Vec::new(),
            rdma_devices: Vec::new(),
            gdrcopy: false,
            transparent_huge_pages: Some("madvise".into()),
            memlock: MemoryLock::Bytes(8 << 20),
            shared_memory_bytes: Some(8 * GIB),
            model: Model { path: "/models/m.gguf".into(), exists: true },
        }
    }

    fn card(number: u32, unusable: Option<&str>) -> Card {
        Card {
            number,
            name: "H200".into(),
            capability: "9.0".into(),
            pci: format!("0000:0{number}:00.0"),
            memory_bytes: 141 * GIB,
            unusable: unusable.map(str::to_owned),
        }
    }

    /// Two cards with NVLink, and a UCX with CUDA.
    fn with_cards() -> Facts {
        let mut facts = plain();
        let Found::There(node) = &mut facts.node else { panic!("it is there") };
        let cards = vec![card(0, None), card(1, None)];
        node.cuda = Found::There(Cuda {
            driver: "13.0".into(),
            nvrtc: Found::There("13.0".into()),
            cublaslt: Found::There("13.0.2".into()),
            cards,
        });
        let Found::There(ucx) = &mut node.ucx else { panic!("it is there") };
        ucx.transports.extend(["cuda_copy", "cuda_ipc"].map(str::to_owned));
        facts.nvidia_module = Some("580.82.07".into());
        facts.gpu_links = vec![GpuLink { between: (0, 1), link: "NV18".into() }];
        facts.memlock = MemoryLock::Unlimited;
        facts
    }

    fn cuda_of(facts: &mut Facts) -> &mut Cuda {
        match &mut facts.node {
            Found::There(NodeFacts { cuda: Found::There(cuda), .. }) => cuda,
            _ => panic!("it has cards"),
        }
    }

    fn of(findings: &[Finding], level: Level) -> Vec<String> {
        let of = findings.iter().filter(|finding| finding.level == level);
        of.map(|finding| format!("{}: {} -> {}", finding.about, finding.what, finding.cure.as_deref().unwrap_or("")))
            .collect()
    }

    /// The one finding of that level.
    fn only(facts: &Facts, device: DeviceChoice, level: Level) -> String {
        let findings = judge(facts, device);
        let found = of(&findings, level);
        assert_eq!(found.len(), 1, "{findings:?}");
        found.into_iter().next().unwrap()
    }

    #[test]
    fn a_plain_machine_lacks_nothing_for_its_cpu_and_a_gpu_for_cuda() {
        for device in [DeviceChoice::Cpu, DeviceChoice::Auto] {
            let findings = judge(&plain(), device);
            assert!(
                findings.iter().all(|finding| finding.level == Level::Fine && finding.cure.is_none()),
                "{findings:?}"
            );
        }
        let lacking = only(&plain(), DeviceChoice::Cuda(None), Level::Lacking);
        assert!(lacking.contains("no NVIDIA driver") && lacking.contains("580"), "{lacking}");
    }

    #[test]
    fn a_machine_with_cards_lists_them_with_their_links() {
        for device in [DeviceChoice::Cpu, DeviceChoice::Cuda(None), DeviceChoice::Cuda(Some(1)), DeviceChoice::Auto] {
            let findings = judge(&with_cards(), device);
            assert!(findings.iter().all(|finding| finding.level == Level::Fine), "{findings:?}");
            let fine = of(&findings, Level::Fine).join("\n");
            for word in [
                "CUDA 13.0, kernel module 580.82.07",
                "cuda:1: H200, 141.0 GiB",
                "9.0",
                "0-1 NV18",
                "NVRTC: 13.0",
                "cuBLASLt: 13.0.2",
            ] {
                assert!(fine.contains(word), "{word}: {fine}");
            }
        }
    }

    #[test]
    fn a_card_that_was_asked_for_and_is_not_there_is_lacking() {
        let lacking = only(&with_cards(), DeviceChoice::Cuda(Some(2)), Level::Lacking);
        assert!(
            lacking.contains("no cuda:2: the driver shows 2 GPUs") && lacking.contains("CUDA_VISIBLE"),
            "{lacking}"
        );
        let mut facts = with_cards();
        cuda_of(&mut facts).cards = vec![card(0, Some("compute capability 7.0"))];
        let lacking = only(&facts, DeviceChoice::Cuda(None), Level::Lacking);
        assert!(lacking.contains("of 1 GPU none"), "{lacking}");
        let lacking = only(&facts, DeviceChoice::Cuda(Some(0)), Level::Lacking);
        assert!(lacking.contains("compute capability 7.0"), "{lacking}");
        let note = only(&facts, DeviceChoice::Cpu, Level::Note);
        assert!(note.contains("compute capability 7.0"), "{note}");
    }

    #[test]
    fn a_compiler_that_is_not_there_is_lacking_on_a_gpu_alone() {
        let mut facts = with_cards();
        cuda_of(&mut facts).nvrtc = missing("no libnvrtc.so.13");
        let lacking = only(&facts, DeviceChoice::Cuda(None), Level::Lacking);
        assert!(lacking.contains("no libnvrtc.so.13") && lacking.contains("nvidia-cuda-nvrtc"), "{lacking}");
        assert!(only(&facts, DeviceChoice::Cpu, Level::Note).contains("no libnvrtc.so.13"));
    }

    #[test]
    fn a_library_of_products_that_is_not_there_is_a_note() {
        let mut facts = with_cards();
        cuda_of(&mut facts).cublaslt = missing("no libcublasLt.so.13");
        for device in [DeviceChoice::Cuda(None), DeviceChoice::Cpu] {
            let note = only(&facts, device, Level::Note);
            assert!(note.contains("no libcublasLt.so.13: prompts") && note.contains("nvidia-cublas"), "{note}");
        }
    }

    #[test]
    fn a_driver_that_does_not_start_is_no_quiet_matter() {
        let mut facts = plain();
        facts.nvidia_module = Some("470.1".into());
        assert!(only(&facts, DeviceChoice::Cpu, Level::Note).contains("no NVIDIA driver"));
    }

    #[test]
    fn transports_are_missed_where_the_machine_could_use_them() {
        let mut facts = plain();
        facts.rdma_devices = vec!["mlx5_0".into()];
        let notes = of(&judge(&facts, DeviceChoice::Cpu), Level::Note).join("\n");
        assert!(notes.contains("no rc here (RDMA)") && notes.contains("verbs") && notes.contains("memlock"), "{notes}");
        let Found::There(node) = &mut facts.node else { panic!("it is there") };
        let Found::There(ucx) = &mut node.ucx else { panic!("it is there") };
        ucx.transports.push("rc_mlx5".into());
        assert!(only(&facts, DeviceChoice::Cpu, Level::Note).contains("8 MiB"), "the limit is left");
        let mut facts = with_cards();
        let Found::There(node) = &mut facts.node else { panic!("it is there") };
        let Found::There(ucx) = &mut node.ucx else { panic!("it is there") };
        ucx.transports.retain(|name| !name.starts_with("cuda"));
        let notes = of(&judge(&facts, DeviceChoice::Cpu), Level::Note);
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[1].contains("no cuda_ipc") && notes[1].contains("libucx-cu13"), "{notes:?}");
    }

    #[test]
    fn what_is_slow_is_a_note_with_its_cure() {
        let mut facts = plain();
        facts.transparent_huge_pages = Some("never".into());
        assert!(only(&facts, DeviceChoice::Cpu, Level::Note).contains("madvise >"));
        let mut facts = plain();
        facts.shared_memory_bytes = Some(64 << 20);
        assert!(only(&facts, DeviceChoice::Cpu, Level::Note).contains("64 MiB free"));
        let mut facts = plain();
        let Found::There(node) = &mut facts.node else { panic!("it is there") };
        node.ucx = missing("cannot open libucs.so.0");
        assert!(only(&facts, DeviceChoice::Cpu, Level::Note).contains("apt install libucx0"));
    }

    #[test]
    fn no_model_and_no_nodes_are_lacking() {
        let mut facts = plain();
        facts.model.exists = false;
        assert!(only(&facts, DeviceChoice::Cpu, Level::Lacking).contains("make setup"));
        let mut facts = plain();
        facts.node = missing("tandem-decode-node cannot be started");
        assert!(only(&facts, DeviceChoice::Cpu, Level::Lacking).contains("make build"));
    }

    #[test]
    fn what_a_node_prints_is_read() {
        let printed = r#"{"threads":2,"memory_bytes":1,"memory_available_bytes":null,
            "kernels":{"isa":"amx","arithmetic":"bf16-k32"},"ucx":{"missing":"no libucs"},
            "cuda":{"driver":"13.0","nvrtc":{"missing":"no libnvrtc"},"cublaslt":"13.0.2","cards":[{"number":0,"name":"H200",
            "capability":"9.0","pci":"0000:01:00.0","memory_bytes":5,"unusable":null}]}}"#;
        let node: NodeFacts = serde_json::from_str(printed).unwrap();
        assert_eq!(node.ucx, missing("no libucs"));
        let cuda = node.cuda.there().unwrap();
        assert_eq!((cuda.nvrtc.clone(), cuda.cards.len()), (missing("no libnvrtc"), 1));
    }
}
