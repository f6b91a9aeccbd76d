//! Memory for an arena: how much of it the machine must have left, and the refusal where it has not.
use std::sync::Arc;

use tandem_memory::HostMemory;

use crate::error::EngineError;
use crate::footprint::usable;
use crate::memory::MemoryFiles;

/// Zeroed KV memory, which other processes of this host may read (`HostMemory::shareable`), of `total_blocks` blocks
/// of `block_bytes` bytes, on pages that whoever uses it should touch first ([`HostMemory::touch`]).
///
/// # Errors
/// `InvalidArgument` when `block_bytes` is no multiple of 8, or the machine has not so much memory.
pub fn allocate_arena(total_blocks: usize, block_bytes: usize) -> Result<Arc<HostMemory>, EngineError> {
    let blocks = format!("{total_blocks} blocks of {block_bytes} bytes");
    if block_bytes == 0 || !block_bytes.is_multiple_of(8) {
        return Err(EngineError::InvalidArgument(format!("no KV arena of {blocks}")));
    }
    let bytes = total_blocks as u128 * block_bytes as u128;
    check_fits(bytes, MemoryFiles::default().available()).map_err(|why| too_large(&blocks, &why))?;
    let bytes = usize::try_from(bytes).map_err(|error| too_large(&blocks, &error.to_string()))?;
    HostMemory::shareable(bytes).map_err(|error| too_large(&blocks, &error.to_string()))
}

fn too_large(blocks: &str, why: &str) -> EngineError {
    EngineError::InvalidArgument(format!("a KV arena of {blocks} does not fit: {why}; choose fewer (--kv-blocks)"))
}

/// All pages of the arena are touched at start.
fn check_fits(bytes: u128, available: Option<u64>) -> Result<(), String> {
    // Where the system does not tell, only the allocation itself can.
    let Some(available) = available else { return Ok(()) };
    let room = u128::from(usable(available));
    let gib = |bytes: u128| bytes as f64 / f64::from(1 << 30);
    if bytes <= room {
        return Ok(());
    }
    Err(format!(
        "{:.1} GiB, and {:.1} of {:.1} GiB available can be used",
        gib(bytes),
        gib(room),
        gib(available.into())
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_that_does_not_fit_is_an_error_and_not_the_end() {
        for (blocks, block_bytes) in [(4_000_000_000, 737_280), (usize::MAX, 64), (1, usize::MAX - 7)] {
            let error = allocate_arena(blocks, block_bytes).expect_err("no machine has it").to_string();
            assert!(error.contains("--kv-blocks") && error.contains(&blocks.to_string()), "{error}");
        }
        assert!(matches!(allocate_arena(1, 12), Err(EngineError::InvalidArgument(_))));
        assert_eq!(allocate_arena(3, 64).expect("small").words().len(), 24);
    }

    #[test]
    fn what_is_available_is_not_all_for_the_arena() {
        assert!(check_fits(7 << 20, Some(8 << 20)).is_ok());
        assert!(check_fits((7 << 20) + 1, Some(8 << 20)).is_err());
        assert!(check_fits(u128::MAX, None).is_ok());
    }
}
