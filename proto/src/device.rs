//! On what a node computes, as people write it: the nodes' `--device`, and that of the tool that starts them. Pure.
use std::fmt;
use std::str::FromStr;

/// `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// On the processor.
    #[default]
    Cpu,
    /// On the GPU of this number, as CUDA counts those that `CUDA_VISIBLE_DEVICES` leaves; `None`: the first one, or
    /// the one that `tandem up` picks.
    Cuda(Option<u32>),
    /// On a GPU where there is one that can be used, else on the processor.
    Auto,
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let how = || format!("{text:?} is no device: cpu, cuda, cuda:N (the N-th GPU, from 0) or auto");
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            "auto" => Ok(Self::Auto),
            _ => {
                let number = text.strip_prefix("cuda:").ok_or_else(how)?;
                number.parse().map(|number| Self::Cuda(Some(number))).map_err(|_| how())
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(number)) => write!(f, "cuda:{number}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for device in ["cpu", "cuda", "cuda:0", "cuda:13", "auto"] {
            assert_eq!(device.parse::<DeviceChoice>().expect(device).to_string(), device);
        }
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:99999999999", "CPU"] {
            let why = wrong.parse::<DeviceChoice>().expect_err(wrong);
            assert!(why.contains("cuda:N") && why.contains(wrong), "{why}");
        }
        assert_eq!(DeviceChoice::default(), DeviceChoice::Cpu);
    }
}
