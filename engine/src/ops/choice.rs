//! The kernels of an engine: the configuration asks for some, the machine has some, and what the machine has is tested
//! before it is trusted. AMX's tiles are the only ones that are tested at each start: they stand on assembly and on a
//! permission of the kernel, and few machines have them, so that a fault there would be found by a user's wrong
//! answers.
use super::simd::{Isa, IsaChoice};

/// The instruction set of `choice`, the best one of those; with `exact` of those that do not round. Tiles that fail
/// their test are an error where they were asked for by name, else a warning, and the next best set is taken.
///
/// # Errors
/// For people: the machine does not have it, it rounds, or it computes wrongly.
pub fn choose(choice: IsaChoice, exact: bool) -> Result<Isa, String> {
    choose_with(choice, exact, tiles_fault)
}

fn choose_with(choice: IsaChoice, exact: bool, tiles_fault: fn() -> Option<String>) -> Result<Isa, String> {
    let isa = Isa::choose(choice, exact).ok_or_else(|| match Isa::choose(choice, false) {
        Some(isa) => format!("{} wants bf16 or int8 KV and no batch invariance", isa.name()),
        None => format!("this machine has no {choice:?}"),
    })?;
    let Some(fault) = isa.has_tiles().then(tiles_fault).flatten() else { return Ok(isa) };
    if choice == IsaChoice::Amx {
        return Err(format!("--isa amx: {fault}; choose --isa avx512"));
    }
    tracing::warn!("AMX is not used on this machine: {fault}");
    choose_with(IsaChoice::Avx512, exact, || None)
}

#[cfg(target_arch = "x86_64")]
fn tiles_fault() -> Option<String> {
    // SAFETY: asked only where an `Isa` with tiles was found; so the machine has AVX-512 BF16, AMX and the permission.
    unsafe { super::tiles::fault::<super::tiles::amx::Amx>() }
}

#[cfg(not(target_arch = "x86_64"))]
fn tiles_fault() -> Option<String> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_that_compute_wrongly_are_not_used() {
        let wrong = || Some("row 3 is wrong".to_owned());
        assert!(!choose_with(IsaChoice::Auto, false, wrong).expect("the next best").has_tiles());
        assert!(!choose_with(IsaChoice::Auto, true, wrong).expect("exact").rounds());
        let by_name = choose_with(IsaChoice::Amx, false, wrong).expect_err("not there, or wrong");
        match Isa::choose(IsaChoice::Amx, false) {
            Some(_) => assert!(by_name.contains("row 3 is wrong") && by_name.contains("--isa avx512"), "{by_name}"),
            None => assert!(by_name.contains("no Amx"), "{by_name}"),
        }
    }

    #[test]
    fn this_machine_passes_its_own_test() {
        let tiles = Isa::choose(IsaChoice::Amx, false).is_some();
        eprintln!("this machine has {} tiles", if tiles { "real" } else { "no" });
        assert_eq!(choose(IsaChoice::Amx, false).is_ok(), tiles);
        assert_eq!(choose(IsaChoice::Auto, false), Ok(Isa::detect()));
        assert!(choose(IsaChoice::Amx, true).is_err(), "tiles are not exact");
    }
}
