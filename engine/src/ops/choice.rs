//! The kernels of an engine: the configuration asks for an instruction set and an arithmetic, the machine has some, and
//! what the machine has is tested before it is trusted. AMX's tiles are the only ones that are tested at each start:
//! they stand on assembly and on a permission of the kernel, and few machines have them, so that a fault there would be
//! found by a user's wrong answers.
use super::simd::{ArithmeticChoice, Isa, IsaChoice};
use crate::numerics::KvDtype;

/// The best instruction set of `choice` that computes in `arithmetic` over KV of this format. `Auto` takes bf16 where
/// it can. Tiles that fail their test are an error where they were asked for by name, else a warning, and the next best
/// set is taken.
///
/// # Errors
/// For people, naming the flags: the machine does not have it, two flags exclude each other, or the tiles compute
/// wrongly.
pub fn choose(choice: IsaChoice, arithmetic: ArithmeticChoice, kv_dtype: KvDtype) -> Result<Isa, String> {
    choose_with(choice, arithmetic, kv_dtype, tiles_fault)
}

fn choose_with(
    choice: IsaChoice,
    arithmetic: ArithmeticChoice,
    kv_dtype: KvDtype,
    tiles_fault: fn() -> Option<String>,
) -> Result<Isa, String> {
    // There is no attention in bf16 over f32 KV.
    let exact = arithmetic == ArithmeticChoice::F32 || kv_dtype == KvDtype::F32;
    let isa = Isa::choose(choice, exact)
        .filter(|isa| isa.rounds() || arithmetic != ArithmeticChoice::Bf16)
        .ok_or_else(|| obstacle(choice, arithmetic, kv_dtype))?;
    let Some(fault) = isa.has_tiles().then(tiles_fault).flatten() else { return Ok(isa) };
    if choice == IsaChoice::Amx {
        return Err(format!("--isa amx: {fault}; choose --isa avx512"));
    }
    tracing::warn!("AMX is not used on this machine: {fault}");
    choose_with(IsaChoice::Avx512, arithmetic, kv_dtype, || None)
}

/// Why nothing fits, and what to write instead. Flags that exclude each other come first: no machine helps there.
fn obstacle(choice: IsaChoice, arithmetic: ArithmeticChoice, kv_dtype: KvDtype) -> String {
    match (choice, arithmetic, kv_dtype) {
        (IsaChoice::Amx, ArithmeticChoice::F32, _) => {
            "--isa amx computes in bf16, not in f32; choose --isa avx512, or --arithmetic bf16".into()
        }
        (IsaChoice::Amx, _, KvDtype::F32) => {
            "--isa amx wants bf16 or int8 KV; choose --isa avx512, or another --kv-dtype than f32".into()
        }
        (_, ArithmeticChoice::Bf16, KvDtype::F32) => {
            "--arithmetic bf16 wants bf16 or int8 KV; choose --arithmetic f32, or another --kv-dtype than f32".into()
        }
        (IsaChoice::Avx2 | IsaChoice::Portable, ArithmeticChoice::Bf16, _) => {
            format!("--arithmetic bf16 wants AVX-512 BF16, not --isa {choice}; choose --arithmetic f32, or --isa auto")
        }
        (IsaChoice::Auto | IsaChoice::Avx512, ArithmeticChoice::Bf16, _) => {
            "--arithmetic bf16 wants AVX-512 BF16, which this machine has not; choose --arithmetic f32".into()
        }
        _ => format!("--isa {choice}: this machine does not have it; choose --isa auto"),
    }
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
    use super::ArithmeticChoice::{Auto, Bf16, F32};
    use super::*;

    #[test]
    fn tiles_that_compute_wrongly_are_not_used() {
        let wrong = || Some("row 3 is wrong".to_owned());
        let choose = |choice, arithmetic| choose_with(choice, arithmetic, KvDtype::Bf16, wrong);
        assert!(!choose(IsaChoice::Auto, Auto).expect("the next best").has_tiles());
        assert!(!choose(IsaChoice::Auto, F32).expect("everywhere").rounds());
        if Isa::detect().rounds() {
            let next = choose(IsaChoice::Auto, Bf16).expect("AVX-512 BF16");
            assert!(next.rounds() && !next.has_tiles());
        }
        let by_name = choose(IsaChoice::Amx, Auto).expect_err("not there, or wrong");
        match Isa::choose(IsaChoice::Amx, false) {
            Some(_) => assert!(by_name.contains("row 3 is wrong") && by_name.contains("--isa avx512"), "{by_name}"),
            None => assert!(by_name.contains("--isa amx: this machine does not have it"), "{by_name}"),
        }
    }

    #[test]
    fn this_machine_passes_its_own_test() {
        let tiles = Isa::choose(IsaChoice::Amx, false).is_some();
        eprintln!("this machine has {} tiles", if tiles { "real" } else { "no" });
        assert_eq!(choose(IsaChoice::Amx, Auto, KvDtype::Bf16).is_ok(), tiles);
        assert_eq!(choose(IsaChoice::Auto, Auto, KvDtype::Bf16), Ok(Isa::detect()));
    }

    #[test]
    fn auto_is_bf16_where_machine_instruction_set_and_kv_allow_it() {
        let rounds = |choice, arithmetic, kv| choose(choice, arithmetic, kv).map(Isa::rounds);
        let here = Isa::detect().rounds();
        for kv in [KvDtype::Bf16, KvDtype::Int8] {
            assert_eq!(rounds(IsaChoice::Auto, Auto, kv), Ok(here));
            assert_eq!(rounds(IsaChoice::Auto, F32, kv), Ok(false));
            assert_eq!(rounds(IsaChoice::Portable, Auto, kv), Ok(false));
            assert_eq!(rounds(IsaChoice::Auto, Bf16, kv).ok(), here.then_some(true));
        }
        assert_eq!(rounds(IsaChoice::Auto, Auto, KvDtype::F32), Ok(false));
    }

    #[test]
    fn what_cannot_be_names_the_flags_in_the_way() {
        let says = |choice, arithmetic, kv, words: [&str; 2]| {
            let why = choose(choice, arithmetic, kv).expect_err("no machine can");
            assert!(words.iter().all(|word| why.contains(word)), "{why}");
        };
        says(IsaChoice::Amx, F32, KvDtype::Bf16, ["--isa amx", "--arithmetic bf16"]);
        says(IsaChoice::Amx, Auto, KvDtype::F32, ["--isa amx", "--kv-dtype"]);
        says(IsaChoice::Auto, Bf16, KvDtype::F32, ["--arithmetic bf16", "--kv-dtype"]);
        says(IsaChoice::Portable, Bf16, KvDtype::Bf16, ["--arithmetic bf16", "--isa portable"]);
        // Of a machine that may not be this one.
        let why = obstacle(IsaChoice::Auto, Bf16, KvDtype::Int8);
        assert!(why.contains("AVX-512 BF16, which this machine has not; choose --arithmetic f32"), "{why}");
        let why = obstacle(IsaChoice::Avx512, Auto, KvDtype::Bf16);
        assert!(why.contains("--isa avx512: this machine does not have it"), "{why}");
        assert!("exact".parse::<ArithmeticChoice>().expect_err("none").contains("auto, f32 or bf16"));
    }
}
