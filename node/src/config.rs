//! The flags of a node, resolved once. Nothing else in a node reads flags or the environment.
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use clap::{Args, ValueEnum};
use tandem_config::ConfigArgs;
use tandem_engine::cpu::Lend;
use tandem_engine::ops::simd::{ArithmeticChoice, IsaChoice};
use tandem_engine::{KvDtype, Speculate};
use tandem_etcd::EtcdArgs;
use tandem_proto::device::DeviceChoice;
use tandem_proto::v1::Role;
use tandem_proto::{BLOCK_TOKENS, DEFAULT_BLOCK_TOKENS};
use tandem_telemetry::{Collector, LogFilter, LogFormat};

use crate::credentials::{Credentials, CredentialsArgs};
use crate::kv_memory::KvMemory;
use crate::kv_transport::{KvTransportArgs, KvTransportConfig, address_toward};
use crate::processor;
use crate::router_address::{MAX_ROUTERS, RouterAddress};

/// Flags that both roles have.
#[derive(Args, Debug)]
pub struct NodeArgs {
    /// A router's gRPC address: http://host:port. Or those of several, now and later: dns:///host:port for all
    /// addresses that the name has, etcd://host:port[,host:port…]/prefix for all that register there (the routers'
    /// --register), etcds:// for the same within TLS. Repeatable: the node serves all of them. Give all nodes the same
    /// ones in the same order.
    #[arg(long, required = true, value_name = "URL")]
    pub router: Vec<String>,
    /// How etcd is reached.
    #[command(flatten)]
    pub etcd: EtcdArgs,
    /// What it shows to the others of its cluster.
    #[command(flatten)]
    pub credentials: CredentialsArgs,
    /// Where to serve gRPC; port 0 takes a free one [default: a free port of the address from which the router is
    /// reached]
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// Host, or host:port, under which the router reaches --listen, when that listens on all interfaces or behind
    /// another port.
    #[arg(long, value_name = "HOST[:PORT]")]
    pub advertise_host: Option<String>,
    /// Where to serve /health and /metrics.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    pub admin: SocketAddr,
    /// Model: a GGUF file or a safetensors directory.
    #[arg(long, value_name = "PATH", required_unless_present = "simulated")]
    pub model: Option<PathBuf>,
    /// What to compute on: the CPU, a GPU (cuda:N is the N-th of those that CUDA_VISIBLE_DEVICES leaves, cuda the
    /// first that can be used), or auto, a GPU where there is one. All nodes of a cluster compute on the same kind: the
    /// router refuses others.
    #[arg(long, value_name = "cpu|cuda|cuda:N|auto", default_value_t)]
    pub device: DeviceChoice,
    /// Number format of the KV arena; the same on all nodes.
    #[arg(long, value_enum, default_value_t = KvDtypeArg::Bf16)]
    pub kv_dtype: KvDtypeArg,
    /// Tokens of a KV block: 16, 32, 64 or 128; the same on all nodes. Larger blocks cost less bookkeeping and move
    /// faster, but waste more at the end of a sequence and share less between prompts.
    #[arg(long, value_name = "TOKENS", default_value_t = DEFAULT_BLOCK_TOKENS, value_parser = block_tokens)]
    pub block_size: usize,
    /// Blocks of the KV arena.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub kv_blocks: u32,
    /// Memory of the KV arena, instead of --kv-blocks: bytes such as 2GiB, or a share such as 25% of what the
    /// model leaves: of seven eighths of the memory that the node may use, less weights and workspace.
    #[arg(long, value_name = "SIZE", conflicts_with = "kv_blocks")]
    pub kv_memory: Option<KvMemory>,
    /// Keep computed KV blocks for prompts that begin alike (the default).
    #[arg(long, overrides_with = "no_prefix_caching")]
    pub enable_prefix_caching: bool,
    /// Compute every prompt as if it were the first.
    #[arg(long, overrides_with = "enable_prefix_caching")]
    pub no_prefix_caching: bool,
    /// Guess tokens by prompt lookup and verify them in the same step: the same answer in fewer steps where text
    /// repeats. Large batches are never guessed for.
    #[arg(long, value_enum, default_value_t = SpeculateArg::Ngram)]
    pub speculate: SpeculateArg,
    /// Sequences that run at once.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_num_seqs: u32,
    /// Tokens of one engine step at most.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_num_batched_tokens: u32,
    /// Calls in flight at most, waiting ones included; more are refused as overload.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_calls: u32,
    /// Compute threads; 0: one for each core that this process may use, not two where a core has two hardware threads.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub threads: usize,
    /// Cores to bind the compute threads to, such as 0,1; none binds nothing.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub cpus: Vec<usize>,
    /// Lend this node's cores to other nodes of this machine while there is nothing to do here, and borrow theirs.
    /// FILE is the same for all of them, best in /dev/shm; the first node makes it. For nodes that have cores of their
    /// own.
    #[arg(long, value_name = "FILE")]
    pub lend_cores: Option<PathBuf>,
    /// Instruction set of the compute kernels. In bf16 the sets differ in their bits, and all nodes need the same; in
    /// f32 they do not.
    #[arg(long, value_enum, default_value_t = IsaArg::Auto)]
    pub isa: IsaArg,
    /// In which numbers to compute. With each of them an answer has the same bits in any batch. f32 gives the same bits
    /// on every machine. bf16 is faster, above all with AMX; its bits depend on the kind of machine, and
    /// log-probabilities move by up to 0.1. All nodes need the same arithmetic: the router refuses others. Two kinds of
    /// machines share f32.
    #[arg(long, value_enum, default_value_t = ArithmeticArg::Auto)]
    pub arithmetic: ArithmeticArg,
    /// How KV travels.
    #[command(flatten)]
    pub kv_transport: KvTransportArgs,
    /// Serve at once, without the first steps that bring weights into memory and measure what steps take. The first
    /// requests are slower then, and until they have run the router plans with a guess.
    #[arg(long)]
    pub skip_warm_up: bool,
    /// Treat an engine step that takes longer as a hang: the process exits, so that its supervisor starts it again.
    #[arg(long, value_name = "MS", default_value_t = 60_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_step_ms: u32,
    /// How long running requests may take to end after SIGTERM.
    #[arg(long, value_name = "MS", default_value_t = 30_000)]
    pub drain_ms: u32,
    /// How log lines look: `text` for people, `json` for programs.
    #[arg(long, value_name = "text|json", default_value_t)]
    pub log_format: LogFormat,
    /// Which lines are logged, such as warn or info,tandem_node=debug. The file's is read again at SIGHUP [default:
    /// that of RUST_LOG, or info]
    #[arg(long, value_name = "FILTER")]
    pub log_filter: Option<LogFilter>,
    /// Who gets spans, log lines and metrics.
    #[command(flatten)]
    pub collector: Collector,
    /// Name of this node; made from role and incarnation when absent.
    #[arg(long, value_name = "NAME")]
    pub node_id: Option<String>,
    /// Demonstration: this host's clock is so many milliseconds ahead; negative: behind.
    #[arg(long, value_name = "MS", default_value_t = 0, allow_negative_numbers = true, hide = true)]
    pub debug_clock_offset_ms: i32,
    /// Compute tokens as a hash of the KV, without weights; with --model, in the name of that model.
    #[arg(long)]
    pub simulated: bool,
    /// Microseconds that a simulated step takes.
    #[arg(long, value_name = "US", default_value_t = 0, requires = "simulated")]
    pub simulated_step_us: u64,
    /// Microseconds that each token adds to a simulated step.
    #[arg(long, value_name = "US", default_value_t = 0, requires = "simulated")]
    pub simulated_token_us: u64,
    /// Nanoseconds that each position adds to a simulated step that one of its tokens attends to.
    #[arg(long, value_name = "NS", default_value_t = 0, requires = "simulated")]
    pub simulated_context_ns: u64,
    /// Where all of these are from.
    #[command(flatten)]
    pub sources: ConfigArgs,
}

/// `--kv-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvDtypeArg {
    /// 2 bytes a value.
    Bf16,
    /// 1 byte a value, and a scale for each token and head.
    Int8,
    /// 4 bytes a value.
    F32,
}

/// `--speculate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SpeculateArg {
    /// From earlier occurrences of a sequence's last tokens.
    Ngram,
    /// Not at all: one token a step.
    Off,
}

/// `--isa`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IsaArg {
    /// The best one here.
    Auto,
    /// AMX's bf16 tiles beside AVX-512; does not go with --arithmetic f32 or --kv-dtype f32.
    Amx,
    /// AVX-512, with bf16 dot products where the machine has them; no AMX.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// Plain code.
    Portable,
}

/// `--arithmetic`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ArithmeticArg {
    /// bf16 where the machine, --isa and --kv-dtype allow it, else f32.
    Auto,
    /// f32 throughout.
    F32,
    /// bf16 products and attention; wants AVX-512 BF16, and bf16 or int8 KV.
    Bf16,
}

/// Resolved configuration.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// What this node does.
    pub role: Role,
    /// The routers' membership services; one at least.
    pub routers: Vec<RouterAddress>,
    /// What it shows to the others of its cluster.
    pub credentials: Credentials,
    /// gRPC.
    pub listen: SocketAddr,
    /// Replaces the host, and the port if it has one, of `listen` in what the router is told.
    pub advertise_host: Option<String>,
    /// Admin HTTP.
    pub admin: SocketAddr,
    /// What computes.
    pub model: ModelSource,
    /// On what, as it was asked for.
    pub device: DeviceChoice,
    /// Of the arena.
    pub kv_dtype: KvDtype,
    /// Of a block, in tokens.
    pub block_tokens: usize,
    /// Of the arena.
    pub kv_memory: KvMemory,
    /// Whether computed blocks are kept for prompts that begin alike.
    pub prefix_caching: bool,
    /// Whether tokens are guessed and verified.
    pub speculate: Speculate,
    /// Sequences in the running batch.
    pub max_running: usize,
    /// Tokens of a step.
    pub max_step_tokens: usize,
    /// Whether steps run before there is work.
    pub warm_up: bool,
    /// A step that takes longer hangs.
    pub max_step: Duration,
    /// Calls in flight.
    pub max_calls: usize,
    /// Compute threads.
    pub threads: usize,
    /// Where they are bound.
    pub cpus: Vec<usize>,
    /// Cores to lend to others of this machine.
    pub lending: Option<Lend>,
    /// Compute kernels.
    pub isa: IsaChoice,
    /// In which numbers they compute.
    pub arithmetic: ArithmeticChoice,
    /// How KV travels.
    pub kv_transport: KvTransportConfig,
    /// For running requests after SIGTERM.
    pub drain_timeout: Duration,
    /// Who gets spans, log lines and metrics.
    pub collector: Collector,
    /// Given name.
    pub node_id: Option<String>,
    /// By which a demonstration puts this process's clock wrong, in milliseconds.
    pub clock_offset_ms: i32,
}

/// What computes tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// A GGUF file or a safetensors directory.
    File(PathBuf),
    /// No weights; what a step takes, as `tandem_engine::step_model` has it.
    Simulated {
        /// A file whose vocabulary and digest it takes on.
        in_place_of: Option<PathBuf>,
        /// Of each step.
        step: Duration,
        /// Of each token in it.
        token: Duration,
        /// Of each position that these attend to.
        context: Duration,
    },
}

impl NodeArgs {
    /// Checks what clap cannot, and fills in what depends on the machine.
    ///
    /// # Errors
    /// A router address that is none, a join token or certificate that cannot be used, `--listen` on all interfaces
    /// without `--advertise-host`, or flags of the KV transports that do not go together.
    pub fn resolve(self, role: Role) -> anyhow::Result<NodeConfig> {
        let read = |text: &String| RouterAddress::read(text, &self.etcd);
        let routers: Vec<_> = self.router.iter().map(read).collect::<anyhow::Result<_>>()?;
        if self.etcd != EtcdArgs::default() && !routers.iter().any(|router| matches!(router, RouterAddress::Etcd(_))) {
            bail!("--etcd-… without --router etcd://host:port/prefix");
        }
        if routers.len() > MAX_ROUTERS {
            bail!("--router {} times; a node has {MAX_ROUTERS} routers at most", routers.len());
        }
        let credentials = self.credentials.read(role)?;
        routers.iter().try_for_each(|router| credentials.fit(router))?;
        let first = routers.first().and_then(RouterAddress::host);
        let toward_router = first.map_or(Ipv4Addr::LOCALHOST.into(), |(host, port)| address_toward(host, port));
        let listen = self.listen.unwrap_or(SocketAddr::new(toward_router, 0));
        if listen.ip().is_unspecified() && self.advertise_host.is_none() {
            bail!("--listen {listen} is on all interfaces: say by --advertise-host under which name it is reached");
        }
        let kv_transport = self.kv_transport.resolve(toward_router, std::env::vars())?;
        let model = match self.model {
            Some(path) if !self.simulated => ModelSource::File(path),
            in_place_of => ModelSource::Simulated {
                in_place_of,
                step: Duration::from_micros(self.simulated_step_us),
                token: Duration::from_micros(self.simulated_token_us),
                context: Duration::from_nanos(self.simulated_context_ns),
            },
        };
        if self.device != DeviceChoice::Cpu && matches!(model, ModelSource::Simulated { .. }) {
            bail!("--simulated computes on no device; leave --device {} out", self.device);
        }
        let threads = match self.threads {
            0 => processor::default_threads(),
            threads => threads,
        };
        Ok(NodeConfig {
            role,
            routers,
            node_id: credentials.node_id(self.node_id)?,
            credentials,
            listen,
            advertise_host: self.advertise_host,
            admin: self.admin,
            model,
            device: self.device,
            kv_dtype: match self.kv_dtype {
                KvDtypeArg::Bf16 => KvDtype::Bf16,
                KvDtypeArg::Int8 => KvDtype::Int8,
                KvDtypeArg::F32 => KvDtype::F32,
            },
            block_tokens: self.block_size,
            kv_memory: self.kv_memory.unwrap_or(KvMemory::Blocks(self.kv_blocks as usize)),
            prefix_caching: !self.no_prefix_caching,
            speculate: match self.speculate {
                SpeculateArg::Ngram => Speculate::Ngram,
                SpeculateArg::Off => Speculate::Off,
            },
            max_running: self.max_num_seqs as usize,
            max_step_tokens: self.max_num_batched_tokens as usize,
            warm_up: !self.skip_warm_up,
            max_step: Duration::from_millis(self.max_step_ms.into()),
            max_calls: self.max_calls as usize,
            threads,
            lending: self.lend_cores.map(|file| Lend { file, own: processor::cores(&self.cpus) }),
            cpus: self.cpus,
            isa: match self.isa {
                IsaArg::Auto => IsaChoice::Auto,
                IsaArg::Amx => IsaChoice::Amx,
                IsaArg::Avx512 => IsaChoice::Avx512,
                IsaArg::Avx2 => IsaChoice::Avx2,
                IsaArg::Portable => IsaChoice::Portable,
            },
            arithmetic: match self.arithmetic {
                ArithmeticArg::Auto => ArithmeticChoice::Auto,
                ArithmeticArg::F32 => ArithmeticChoice::F32,
                ArithmeticArg::Bf16 => ArithmeticChoice::Bf16,
            },
            kv_transport,
            drain_timeout: Duration::from_millis(self.drain_ms.into()),
            collector: self.collector,
            clock_offset_ms: self.debug_clock_offset_ms,
        })
    }
}

fn block_tokens(text: &str) -> Result<usize, String> {
    let tokens = text.parse().ok().filter(|tokens| BLOCK_TOKENS.contains(tokens));
    tokens.ok_or_else(|| format!("a block holds {BLOCK_TOKENS:?} tokens"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        node: NodeArgs,
    }

    fn parse(flags: &str) -> anyhow::Result<NodeConfig> {
        let flags = std::iter::once("node").chain(flags.split_whitespace());
        Cli::try_parse_from(flags)?.node.resolve(Role::Decode)
    }

    #[test]
    fn a_simulated_step_has_three_costs() {
        let flags = "--simulated-step-us 3 --simulated-token-us 4 --simulated-context-ns 5";
        let config = parse(&format!("--router http://127.0.0.1:1 --simulated {flags}")).unwrap();
        let [step, token, context] = [3_000, 4_000, 5].map(Duration::from_nanos);
        assert_eq!(config.model, ModelSource::Simulated { in_place_of: None, step, token, context });
    }

    #[test]
    fn defaults_resolve() {
        let config = parse("--router http://127.0.0.1:1 --simulated").unwrap();
        assert_eq!((config.kv_memory, config.kv_dtype), (KvMemory::Blocks(1024), KvDtype::Bf16));
        assert!(config.threads > 0 && config.prefix_caching && config.max_running == 64 && config.warm_up);
        assert_eq!((config.speculate, config.device), (Speculate::Ngram, DeviceChoice::Cpu));
        assert_eq!((config.block_tokens, config.arithmetic), (16, ArithmeticChoice::Auto));
        let flags = "--simulated --kv-dtype int8 --block-size 64 --arithmetic f32 --speculate off --skip-warm-up";
        let config = parse(&format!("--router http://127.0.0.1:1 {flags}")).unwrap();
        assert!(!config.warm_up);
        assert_eq!((config.kv_dtype, config.block_tokens), (KvDtype::Int8, 64));
        assert_eq!((config.arithmetic, config.speculate), (ArithmeticChoice::F32, Speculate::Off));
    }

    #[test]
    fn the_last_word_on_prefix_caching_counts() {
        let caching = |flags: &str| parse(&format!("--router http://h:1 --simulated {flags}")).unwrap().prefix_caching;
        assert!(!caching("--no-prefix-caching") && !caching("--enable-prefix-caching --no-prefix-caching"));
        assert!(caching("--enable-prefix-caching") && caching("--no-prefix-caching --enable-prefix-caching"));
    }

    #[test]
    fn kv_memory_takes_the_place_of_kv_blocks() {
        let memory = |flags: &str| parse(&format!("--router http://h:1 --simulated {flags}")).unwrap().kv_memory;
        assert_eq!(memory("--kv-memory 2GiB"), KvMemory::Bytes(2 << 30));
        assert_eq!(memory("--kv-memory 25%"), KvMemory::Share(0.25));
        assert_eq!(memory("--kv-blocks 7"), KvMemory::Blocks(7));
    }

    #[test]
    fn wrong_flags_are_clear() {
        for (flags, word) in [
            ("--simulated", "--router"),
            ("--router http://h:1", "--model"),
            ("--router h:1 --simulated", "http://host:port"),
            (
                "--router https://h:1 --simulated",
                "without --node-tls-cert, --node-tls-key and --node-tls-ca it is http:",
            ),
            ("--router https://h:1 --simulated --node-tls-cert c.pem --node-tls-key k.pem", "--node-tls-ca"),
            ("--router https://h:1 --simulated --node-tls-any-name", "--node-tls-cert"),
            ("--router http://h:1 --router dns://h:1 --simulated", "dns:///host:port"),
            ("--router dns:///h --simulated", "dns:///host:port"),
            ("--router dns:///h:70000 --simulated", "dns:///host:port"),
            ("--router etcd://h:2379 --simulated", "--router etcd://"),
            ("--router etcd://h/p --simulated --etcd-ca ca.pem", "etcds://"),
            ("--router http://h:1 --simulated --etcd-ca ca.pem", "--router etcd://"),
            ("--router etcd://h/p --simulated --etcd-user u", "--etcd-password"),
            ("--router http://h:1 --simulated --kv-blocks 0", "kv-blocks"),
            ("--router http://h:1 --simulated --kv-dtype int4", "int8"),
            ("--router http://h:1 --simulated --block-size 48", "[16, 32, 64, 128]"),
            ("--router http://h:1 --simulated --block-size x", "[16, 32, 64, 128]"),
            ("--router http://h:1 --simulated --kv-blocks 7 --kv-memory 2GiB", "--kv-memory"),
            ("--router http://h:1 --simulated --kv-memory 2", "such as 2GiB"),
            ("--router http://h:1 --simulated --kv-memory 120%", "between 0 and 100"),
            ("--router http://h:1 --simulated --listen 0.0.0.0:0", "--advertise-host"),
            ("--router http://h:1 --simulated --frobnicate", "--frobnicate"),
            ("--router http://h:1 --simulated --device cuda:1", "no device; leave --device cuda:1 out"),
            ("--router http://h:1 --model m --device gpu", "cuda:N"),
        ] {
            let error = parse(flags).unwrap_err().to_string();
            assert!(error.contains(word), "{flags}: {error}");
        }
    }
}
