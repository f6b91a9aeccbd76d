//! On what this node computes: what was asked for, against what the driver shows. The driver is not touched unless a
//! GPU was asked for, so that a node on the processor starts as on a machine that has none.
use anyhow::bail;
use tandem_cuda::Device;
use tandem_engine::KvDtype;
use tandem_engine::ops::simd::{ArithmeticChoice, IsaChoice};
use tandem_proto::device::DeviceChoice;

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The processor.
    Cpu,
    /// The GPU of this number.
    Cuda(u32),
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// What of the other flags is about the processor, or about a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Beside {
    /// `--isa`.
    pub isa: IsaChoice,
    /// `--arithmetic`.
    pub arithmetic: ArithmeticChoice,
    /// `--kv-dtype`.
    pub kv_dtype: KvDtype,
}

/// Asks the driver, if need be, and says what was chosen. Blocks for as long as a driver takes to start.
///
/// # Errors
/// A sentence: there is no driver, it is too old, it shows no such GPU or none that can be used, NVRTC is not there, or
/// another flag does not go with a GPU.
pub fn choose(choice: DeviceChoice, beside: Beside) -> anyhow::Result<Target> {
    let target = choose_from(choice, beside, &Seen::look)?;
    if choice == DeviceChoice::Auto && target == Target::Cpu {
        tracing::info!("--device auto: no GPU that this node can use, so it computes on the CPU");
    }
    Ok(target)
}

/// What a look at the driver brought.
struct Seen {
    /// Each with the reason for which no node can use it, if there is one.
    cards: Result<Vec<(u32, Option<String>)>, String>,
    /// Why kernels cannot be compiled, if so.
    no_compiler: Option<String>,
}

impl Seen {
    fn look() -> Self {
        let cards = Device::all().map(|all| {
            let usable = |card: Device| (card.number, card.check_arch().err().map(|error| error.to_string()));
            all.into_iter().map(usable).collect()
        });
        let no_compiler = tandem_cuda::nvrtc_version().err().map(|error| error.to_string());
        Self { cards: cards.map_err(|error| error.to_string()), no_compiler }
    }

    /// The one of this number; of none, the first that can be used.
    fn card(&self, number: Option<u32>) -> Result<u32, String> {
        let cards = self.cards.as_ref().map_err(String::clone)?;
        let fits = |card: &&(u32, Option<String>)| number.is_none_or(|number| card.0 == number);
        let usable = cards.iter().filter(fits).find(|(_, unusable)| unusable.is_none());
        match (usable, cards.iter().find(fits), number) {
            (Some((number, _)), ..) => match &self.no_compiler {
                None => Ok(*number),
                Some(why) => Err(why.clone()),
            },
            (None, Some((_, Some(why))), _) => Err(why.clone()),
            (None, _, Some(number)) => {
                Err(format!("there is no GPU {number}: the NVIDIA driver shows {} (0 is the first)", cards.len()))
            }
            (None, _, None) => Err("the NVIDIA driver shows no GPU (is CUDA_VISIBLE_DEVICES empty?)".to_owned()),
        }
    }
}

fn choose_from(choice: DeviceChoice, beside: Beside, look: &dyn Fn() -> Seen) -> anyhow::Result<Target> {
    let number = match choice {
        DeviceChoice::Cpu => return Ok(Target::Cpu),
        DeviceChoice::Cuda(number) => number,
        DeviceChoice::Auto => None,
    };
    let found = match beside.obstacle() {
        Some(obstacle) => Err(obstacle),
        None => look().card(number),
    };
    match (found, choice) {
        (Ok(number), _) => Ok(Target::Cuda(number)),
        (Err(why), DeviceChoice::Auto) => {
            tracing::debug!("--device auto: {why}");
            Ok(Target::Cpu)
        }
        (Err(why), _) => bail!("--device {choice}: {why}"),
    }
}

impl Beside {
    /// Which of them does not go with a GPU.
    fn obstacle(self) -> Option<String> {
        if self.kv_dtype != KvDtype::Bf16 {
            let name = self.kv_dtype.name();
            return Some(format!(
                "on a GPU there is no {name} KV, only bf16; leave --kv-dtype out or use --device cpu"
            ));
        }
        if self.isa != IsaChoice::Auto || self.arithmetic != ArithmeticChoice::Auto {
            return Some("--isa and --arithmetic choose the kernels of the processor; leave them out".to_owned());
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use DeviceChoice::{Auto, Cpu, Cuda};

    use super::*;

    const USUAL: Beside = Beside { isa: IsaChoice::Auto, arithmetic: ArithmeticChoice::Auto, kv_dtype: KvDtype::Bf16 };

    /// GPU 0 is too old, 1 and 2 are not.
    fn three() -> Seen {
        Seen { cards: Ok(vec![(0, Some("GPU 0 is too old".into())), (1, None), (2, None)]), no_compiler: None }
    }

    fn no_driver() -> Seen {
        Seen { cards: Err("no NVIDIA driver".into()), no_compiler: Some("no NVRTC".into()) }
    }

    fn refused(choice: DeviceChoice, beside: Beside, look: &dyn Fn() -> Seen) -> String {
        choose_from(choice, beside, look).unwrap_err().to_string()
    }

    #[test]
    fn a_node_on_the_processor_does_not_touch_the_driver() {
        let look = || -> Seen { panic!("it looked") };
        assert_eq!(choose_from(Cpu, USUAL, &look).unwrap(), Target::Cpu);
    }

    #[test]
    fn the_first_card_that_can_be_used_is_taken_or_the_one_that_was_named() {
        assert_eq!(choose_from(Cuda(None), USUAL, &three).unwrap(), Target::Cuda(1));
        assert_eq!(choose_from(Cuda(Some(2)), USUAL, &three).unwrap(), Target::Cuda(2));
        assert_eq!(choose_from(Auto, USUAL, &three).unwrap(), Target::Cuda(1));
        assert_eq!(Target::Cuda(1).to_string(), "cuda:1");
    }

    #[test]
    fn what_is_wrong_is_one_sentence() {
        assert_eq!(refused(Cuda(None), USUAL, &no_driver), "--device cuda: no NVIDIA driver");
        assert_eq!(refused(Cuda(Some(0)), USUAL, &three), "--device cuda:0: GPU 0 is too old");
        let absent = refused(Cuda(Some(3)), USUAL, &three);
        assert!(absent.contains("there is no GPU 3: the NVIDIA driver shows 3"), "{absent}");
        let only_old = || Seen { cards: Ok(vec![(0, Some("GPU 0 is too old".into()))]), no_compiler: None };
        assert!(refused(Cuda(None), USUAL, &only_old).contains("GPU 0 is too old"));
        let none = || Seen { cards: Ok(vec![]), no_compiler: None };
        assert!(refused(Cuda(None), USUAL, &none).contains("CUDA_VISIBLE_DEVICES"));
        let no_compiler = || Seen { no_compiler: Some("no NVRTC".into()), ..three() };
        assert_eq!(refused(Cuda(Some(1)), USUAL, &no_compiler), "--device cuda:1: no NVRTC");
    }

    #[test]
    fn auto_computes_on_the_processor_where_a_gpu_cannot_be_used() {
        let no_compiler = || Seen { no_compiler: Some("no NVRTC".into()), ..three() };
        for look in [&no_driver as &dyn Fn() -> Seen, &no_compiler] {
            assert_eq!(choose_from(Auto, USUAL, look).unwrap(), Target::Cpu);
        }
    }

    #[test]
    fn flags_of_the_processors_kernels_do_not_go_with_a_gpu() {
        let int8 = Beside { kv_dtype: KvDtype::Int8, ..USUAL };
        let why = refused(Cuda(None), int8, &three);
        assert!(why.contains("no int8 KV") && why.contains("--kv-dtype") && why.contains("--device cpu"), "{why}");
        let isa = Beside { isa: IsaChoice::Portable, ..USUAL };
        let f32 = Beside { arithmetic: ArithmeticChoice::F32, ..USUAL };
        for beside in [isa, f32] {
            assert!(refused(Cuda(Some(1)), beside, &three).contains("--isa and --arithmetic"));
            assert_eq!(choose_from(Auto, beside, &three).unwrap(), Target::Cpu, "these ask for the processor");
        }
    }
}
