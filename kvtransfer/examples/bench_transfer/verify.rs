//! How fast one core checks what has landed: XXH3-64 through the arena's atomic words, of memory that the caches hold
//! (just landed, the common case when hashing follows the copy) and of memory that they do not.
use std::sync::Arc;
use std::time::Instant;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use tandem_kvtransfer::{Arena, Manifest};
use tandem_memory::HostMemory;

/// Fits the second-level cache beside what else is there.
const WARM_BYTES: usize = 512 << 10;
/// As layers of a small model.
const UNITS: u8 = 16;

/// GB/s (10⁹ bytes).
pub struct Rates {
    /// Blocks of a few that are hashed again and again.
    pub warm: f64,
    /// Blocks from all over the arena, each once.
    pub cold: f64,
    /// As `cold`, a unit of every block after the other, as groups of layers land.
    pub cold_units: f64,
}

/// Of blocks of `block_bytes`, `bytes` of them.
pub fn measure(memory: &Arc<HostMemory>, block_bytes: usize, bytes: usize) -> Rates {
    let arena = Arena::new(memory.clone(), block_bytes, UNITS.into());
    let count = (bytes / block_bytes).max(1);
    let mut all: Vec<u32> = (0..arena.blocks()).collect();
    all.shuffle(&mut SmallRng::seed_from_u64(block_bytes as u64));
    let few = &all[..(WARM_BYTES / block_bytes).clamp(1, all.len())];
    let warm: Vec<u32> = few.iter().copied().cycle().take(count).collect();
    hash(&arena, few, 1);
    let warm = hash(&arena, &warm, 1);
    let cold = hash(&arena, &all[..count.min(all.len())], 1);
    let cold_units = hash(&arena, &all[all.len().saturating_sub(count)..], UNITS);
    Rates { warm, cold, cold_units }
}

/// Unit by unit of all blocks.
fn hash(arena: &Arc<Arena>, blocks: &[u32], units: u8) -> f64 {
    let mut manifest = Manifest::new(arena.clone(), blocks.to_vec(), units);
    let start = Instant::now();
    for unit in 0..units {
        manifest.cover(0..blocks.len() as u32, unit..unit + 1);
    }
    let checksums = std::hint::black_box(manifest.finish());
    (checksums.len() * arena.block_bytes()) as f64 / start.elapsed().as_secs_f64() / 1e9
}
