//! The numbers that graphs are filled with, the same in every run and for every executor.

use cinch_graph::{DType, Graph, Parameter, TensorId};

/// Numbers spread evenly over [−1, 1), rounded to single precision so that both precisions
/// start from the same.
pub fn random(len: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    };
    (0..len).map(|_| f64::from(next() as f32)).collect()
}

/// The first positions of documents: in each sequence some that grow from one on, one more from
/// sequence to sequence. The first entry is one that counts as 0.
pub fn fill_starts(starts: &mut [i32], seq: usize) {
    for (b, starts) in starts.chunks_mut(seq.max(1)).enumerate() {
        let (mut first, mut length) = (0, 1 + b);
        for (t, start) in starts.iter_mut().enumerate() {
            if t == first + length {
                first = t;
                length = length * 5 / 2 + 1;
            }
            *start = if t == 0 { -7 } else { first as i32 };
        }
    }
}

/// The lengths of a batch's sequences: in part, whole, none at all, and one position.
pub fn fill_lengths(lengths: &mut [i32], seq: usize) {
    let seq = seq as i32;
    for (length, kind) in lengths
        .iter_mut()
        .zip([seq * 2 / 3, seq, 0, 1].iter().cycle())
    {
        *length = *kind;
    }
}

/// Positions that start again after every five.
pub fn fill_positions(positions: &mut [i32]) {
    for (position, index) in positions.iter_mut().zip(0..) {
        *position = index % 5;
    }
}

/// Gives `write` the codes of a quantised parameter, all of them different, and its scales.
pub fn fill_codes(graph: &Graph, parameter: &Parameter, write: &mut dyn FnMut(TensorId, &[u8])) {
    let tensors = [parameter.master].into_iter();
    for id in tensors.chain(parameter.code_scales.iter().copied()) {
        let ty = graph.ty(id);
        let elements = 0..ty.shape.elements();
        let bytes: Vec<u8> = match ty.dtype {
            DType::U8 => elements.map(|i| (i * 37 % 251) as u8).collect(),
            _ => elements
                .flat_map(|i| (0.3 + 0.05 * (i % 7) as f32).to_ne_bytes())
                .collect(),
        };
        write(id, &bytes);
    }
}
