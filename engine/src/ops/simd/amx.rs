//! Whether AMX is there: in the processor, saved by the system, permitted to this process. `tiles/amx.rs` has the
//! registers themselves.
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::OnceLock;

/// Whether this machine has bf16 tiles and this process may use them. The first call asks the kernel for them, on
/// behalf of all threads.
///
/// The caller has seen AVX-512, and with it that the system saves extended state.
pub(in crate::ops) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| in_the_processor() && saved_by_the_system() && permitted())
}

fn in_the_processor() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
}

fn saved_by_the_system() -> bool {
    /// XTILECFG and XTILEDATA of XCR0.
    const TILES: u64 = 3 << 17;
    #[target_feature(enable = "xsave")]
    fn xcr0() -> u64 {
        // SAFETY: register 0 exists wherever the instruction does.
        unsafe { _xgetbv(0) }
    }
    // SAFETY: detected.
    is_x86_feature_detected!("xsave") && unsafe { xcr0() } & TILES == TILES
}

/// Linux saves 8 KiB of tiles only for processes that asked (Documentation/arch/x86/xstate.rst).
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XTILEDATA: libc::c_long = 18;
    // SAFETY: takes two numbers, and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 }
}
