//! What the kernel tests share: reproducible numbers, pools of a given number of threads,
//! and gradients by central differences.

/// Numbers spread evenly over [−1, 1), the same for the same seed.
pub fn random(len: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    };
    for _ in 0..16 {
        next();
    }
    (0..len).map(|_| next()).collect()
}

/// Rounded to single precision.
pub fn single(x: &[f64]) -> Vec<f32> {
    x.iter().map(|v| *v as f32).collect()
}

/// `work` inside a pool of `threads` threads.
pub fn with_threads<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .expect("a thread pool starts")
        .install(work)
}

/// `⟨a, b⟩`, the scalar loss most gradient checks use.
pub fn inner_product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Compares `gradient` with central differences of `loss` at `point`, in the scale of the
/// largest component.
pub fn assert_gradient(name: &str, point: &[f64], gradient: &[f64], loss: impl Fn(&[f64]) -> f64) {
    const STEP: f64 = 1e-5;
    assert_eq!(point.len(), gradient.len(), "{name}");
    let scale = gradient.iter().fold(1e-3, |s: f64, g| s.max(g.abs()));
    let mut moved = point.to_vec();
    for i in 0..point.len() {
        moved[i] = point[i] + STEP;
        let above = loss(&moved);
        moved[i] = point[i] - STEP;
        let below = loss(&moved);
        moved[i] = point[i];
        let expected = (above - below) / (2.0 * STEP);
        let error = (gradient[i] - expected).abs() / scale;
        assert!(
            error < 1e-7,
            "{name}[{i}]: {} against {expected}, error {error:e}",
            gradient[i]
        );
    }
}

/// Every element within `tolerance` of the reference, in the scale of its largest element.
pub fn assert_close(name: &str, actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len(), "{name}");
    let scale = expected.iter().fold(1e-3, |s: f64, e| s.max(e.abs()));
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        let error = (a - e).abs() / scale;
        assert!(
            error < tolerance,
            "{name}[{i}]: {a} against {e}, error {error:e}"
        );
    }
}

/// The same in single precision.
pub fn assert_single_close(name: &str, actual: &[f32], expected: &[f64], tolerance: f64) {
    let actual: Vec<f64> = actual.iter().map(|v| f64::from(*v)).collect();
    assert_close(name, &actual, expected, tolerance);
}
