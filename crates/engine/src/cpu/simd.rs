//! One source, several instruction sets: a kernel written in plain Rust is compiled for
//! AVX-512, for AVX2 and for the baseline, and the best one the machine has is called.

use std::sync::OnceLock;

/// The instruction sets a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What the target guarantees (SSE2 on x86-64, NEON on aarch64).
    Baseline,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors.
    Avx512,
}

/// The best level this machine has, detected once.
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(detect)
}

/// A level is there only with every feature that `simd!` enables for it: a virtual machine may
/// hide any of them.
#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Level::Avx512,
        (true, false) => Level::Avx2,
        _ => Level::Baseline,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Baseline
}

/// Defines a function generic over one [`Real`](super::real::Real) type whose body is
/// compiled once per [`Level`] and dispatched at run time.
///
/// Everything the body calls must be `#[inline(always)]`, or it is compiled for the
/// baseline only. Arguments are plain names; closures in the body are fine.
macro_rules! simd {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$F:ident: Real>(
        $($arg:ident: $ty:ty),* $(,)?
    ) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$F: $crate::cpu::real::Real>($($arg: $ty),*) $(-> $ret)? {
            #[allow(clippy::too_many_arguments)]
            #[inline(always)]
            fn body<$F: $crate::cpu::real::Real>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2")]
                fn avx512<$F: $crate::cpu::real::Real>($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "avx2,fma,bmi1,bmi2")]
                fn avx2<$F: $crate::cpu::real::Real>($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                match $crate::cpu::simd::level() {
                    // SAFETY: every feature of the level was detected on this machine.
                    $crate::cpu::simd::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::cpu::simd::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::cpu::simd::Level::Baseline => {}
                }
            }
            body($($arg),*)
        }
    };
}
pub(crate) use simd;

#[cfg(test)]
mod tests {
    /// Calling a function with a feature that the machine lacks is undefined behaviour, so every
    /// one that is enabled has to be among those that `detect` asks for.
    #[test]
    fn every_enabled_feature_is_detected() {
        let mut enabled = 0;
        for source in [
            include_str!("simd.rs"),
            include_str!("kernel/gemm/pack.rs"),
            include_str!("kernel/gemm/tile.rs"),
        ] {
            for list in source.split("#[target_feature(enable = \"").skip(1) {
                let list = list.split('"').next().unwrap();
                for feature in list.split(',').filter(|feature| !feature.is_empty()) {
                    let asked = format!("is_x86_feature_detected!(\"{feature}\")");
                    assert!(include_str!("simd.rs").contains(&asked), "{feature}");
                    enabled += 1;
                }
            }
        }
        assert!(enabled > 0);
    }
}
