//! What `--check` reads: every file that the flags name, and of the model its header. Starts nothing, opens no port,
//! and asks no GPU and no UCX what they have: `tandem doctor` does.
use tandem_engine::SimulatedConfig;
use tandem_engine::cpu::ModelLoader;
use tandem_engine::memory::MemoryFiles;
use tandem_proto::device::DeviceChoice;
use tandem_proto::v1::Role;

use crate::config::{ModelSource, NodeArgs};
use crate::node::{model_of, open};

/// Whether a node could start with this.
///
/// # Errors
/// The first thing that it could not use, and why.
pub fn check(args: NodeArgs, role: Role) -> anyhow::Result<()> {
    let config = args.resolve(role)?;
    config.collector.check()?;
    let machine = MemoryFiles::default();
    match &config.model {
        ModelSource::File(path) if config.device == DeviceChoice::Cpu => {
            open(&config, path, &machine)?;
        }
        // Whether it fits is a question to the card.
        ModelSource::File(path) => {
            ModelLoader::open(&model_of(&config, path))?;
        }
        ModelSource::Simulated { in_place_of: Some(path), .. } => {
            SimulatedConfig::in_place_of(path)?;
        }
        ModelSource::Simulated { in_place_of: None, .. } => {}
    }
    Ok(())
}
