//! Packing: a strip of A (some rows) or of B (some columns) is copied into a panel that the
//! register tile reads from front to back, `panel[p·width + lane]` with p along k.

#[cfg(target_arch = "x86_64")]
use std::any::TypeId;

use crate::cpu::real::Real;
use crate::cpu::simd::Level;

/// Where a strip lies: element (lane, p) is at `start + lane·lane_stride + p·depth_stride`.
#[derive(Clone, Copy)]
pub(super) struct Strided<'a, F> {
    pub data: &'a [F],
    pub start: usize,
    pub lane_stride: usize,
    pub depth_stride: usize,
}

/// Fills the panel of `depth` × `width` elements from `lanes` ≤ `width` lanes; what the missing
/// lanes hold afterwards is not specified (the tile computes with them and drops the result).
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(unused_variables, reason = "other machines have one level")
)]
pub(super) fn panel<F: Real>(
    level: Level,
    source: Strided<'_, F>,
    lanes: usize,
    depth: usize,
    width: usize,
    panel: &mut [F],
) {
    if depth == 0 {
        return;
    }
    let last = source.start + (lanes - 1) * source.lane_stride + (depth - 1) * source.depth_stride;
    assert!(lanes <= width && last < source.data.len() && panel.len() >= depth * width);
    if source.depth_stride == 1 {
        #[cfg(target_arch = "x86_64")]
        if level == Level::Avx512 && TypeId::of::<F>() == TypeId::of::<f32>() {
            let pointer = source.data.as_ptr().cast::<f32>();
            // SAFETY: F is f32 and the machine has AVX-512; the assertion above bounds both
            // the reads and the writes.
            unsafe {
                let first = pointer.add(source.start);
                let panel = panel.as_mut_ptr().cast::<f32>();
                transpose::panel(first, source.lane_stride, lanes, depth, width, panel);
            }
            return;
        }
        transpose_blocked(source, lanes, depth, width, panel);
    } else if source.lane_stride == 1 {
        for (p, out) in panel.chunks_exact_mut(width).take(depth).enumerate() {
            let row = &source.data[source.start + p * source.depth_stride..][..lanes];
            copy_lanes(out, row);
        }
    } else {
        for (p, out) in panel.chunks_exact_mut(width).take(depth).enumerate() {
            for (lane, out) in out[..lanes].iter_mut().enumerate() {
                let place = source.start + lane * source.lane_stride + p * source.depth_stride;
                *out = source.data[place];
            }
        }
    }
}

/// Copies one line of a panel; the usual widths get a copy of known length, which is a few
/// vector moves instead of a call.
#[inline(always)]
fn copy_lanes<F: Copy>(out: &mut [F], row: &[F]) {
    match row.len() {
        12 => out[..12].copy_from_slice(&row[..12]),
        16 => out[..16].copy_from_slice(&row[..16]),
        32 => out[..32].copy_from_slice(&row[..32]),
        lanes => out[..lanes].copy_from_slice(row),
    }
}

/// Lanes contiguous along k, in blocks of 16 along k so that each line of the source is read
/// once while it is in the cache.
fn transpose_blocked<F: Real>(
    source: Strided<'_, F>,
    lanes: usize,
    depth: usize,
    width: usize,
    panel: &mut [F],
) {
    const BLOCK: usize = 16;
    for p0 in (0..depth).step_by(BLOCK) {
        let block = BLOCK.min(depth - p0);
        for lane in 0..lanes {
            let row = &source.data[source.start + lane * source.lane_stride + p0..][..block];
            for (p, &x) in row.iter().enumerate() {
                panel[(p0 + p) * width + lane] = x;
            }
        }
    }
}

/// The same with 16×16 blocks transposed in registers.
#[cfg(target_arch = "x86_64")]
mod transpose {
    use std::arch::x86_64::*;

    /// # Safety
    /// `depth` elements can be read at each of the `lanes` places `lane_stride` apart from
    /// `source`, `depth·width` written at `panel`.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn panel(
        source: *const f32,
        lane_stride: usize,
        lanes: usize,
        depth: usize,
        width: usize,
        panel: *mut f32,
    ) {
        for lane in (0..lanes).step_by(16) {
            let count = (lanes - lane).min(16);
            // Lines of a panel narrower than 16 are stored in order with the lanes they own.
            let store = mask((width - lane).min(16));
            for p in (0..depth).step_by(16) {
                let steps = (depth - p).min(16);
                // SAFETY: lanes `lane..lane + count` and elements `p..p + steps` exist.
                unsafe {
                    let rows = load(
                        source.add(lane * lane_stride + p),
                        lane_stride,
                        count,
                        steps,
                    );
                    let columns = transpose(rows);
                    let out = panel.add(p * width + lane);
                    for (step, &column) in columns.iter().enumerate() {
                        if step < steps {
                            _mm512_mask_storeu_ps(out.add(step * width), store, column);
                        }
                    }
                }
            }
        }
    }

    fn mask(lanes: usize) -> __mmask16 {
        if lanes >= 16 { !0 } else { (1 << lanes) - 1 }
    }

    /// # Safety
    /// `steps` ≤ 16 elements can be read at each of the first `count` places.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(source: *const f32, stride: usize, count: usize, steps: usize) -> [__m512; 16] {
        let mut rows = [_mm512_setzero_ps(); 16];
        let steps = mask(steps);
        for (lane, row) in rows.iter_mut().enumerate() {
            if lane < count {
                // SAFETY: by the contract.
                *row = unsafe { _mm512_maskz_loadu_ps(steps, source.add(lane * stride)) };
            }
        }
        rows
    }

    /// Four rounds of exchanging halves: pairs, quads, then the 128-bit lanes twice.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn transpose(rows: [__m512; 16]) -> [__m512; 16] {
        let zero = _mm512_setzero_ps();
        let mut pairs = [zero; 16];
        for i in 0..8 {
            pairs[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
            pairs[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
        }
        // quads[4·g + c] holds, in its 128-bit lane l, column 4·l + c of rows 4·g..4·g + 4.
        let mut quads = [zero; 16];
        for g in 0..4 {
            let [a, b, c, d] = [
                pairs[4 * g],
                pairs[4 * g + 1],
                pairs[4 * g + 2],
                pairs[4 * g + 3],
            ];
            quads[4 * g] = low_halves(a, c);
            quads[4 * g + 1] = high_halves(a, c);
            quads[4 * g + 2] = low_halves(b, d);
            quads[4 * g + 3] = high_halves(b, d);
        }
        let mut columns = [zero; 16];
        for c in 0..4 {
            let low_01 = _mm512_shuffle_f32x4::<0x44>(quads[c], quads[4 + c]);
            let high_01 = _mm512_shuffle_f32x4::<0xee>(quads[c], quads[4 + c]);
            let low_23 = _mm512_shuffle_f32x4::<0x44>(quads[8 + c], quads[12 + c]);
            let high_23 = _mm512_shuffle_f32x4::<0xee>(quads[8 + c], quads[12 + c]);
            columns[c] = _mm512_shuffle_f32x4::<0x88>(low_01, low_23);
            columns[4 + c] = _mm512_shuffle_f32x4::<0xdd>(low_01, low_23);
            columns[8 + c] = _mm512_shuffle_f32x4::<0x88>(high_01, high_23);
            columns[12 + c] = _mm512_shuffle_f32x4::<0xdd>(high_01, high_23);
        }
        columns
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn low_halves(a: __m512, b: __m512) -> __m512 {
        _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn high_halves(a: __m512, b: __m512) -> __m512 {
        _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))
    }
}
