//! Rotary positions of LLaMA and its relatives: their frequencies, the cosines and sines of a step, and the turn of queries and
//! keys.

use super::decoder_lines::Lines;
use crate::eager::op::{cast, creation, matmul, pointwise, view};
use crate::eager::{Context, DType, Line, Tensor, autocast};

/// `apply_rotary_pos_emb`.
pub(super) fn rotate(
    query: &Tensor,
    key: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    lines: &'static Lines,
) -> (Tensor, Tensor) {
    let context = query.context();
    let cos = view::unsqueeze(cos, 1);
    let sin = view::unsqueeze(sin, 1);
    let turn = |states: &Tensor, line: &'static Line| {
        context.at(line);
        let straight = pointwise::mul(states, &cos);
        let half = rotate_half(states, lines);
        context.at(line);
        pointwise::add(straight, pointwise::mul(half, &sin))
    };
    (
        turn(query, &lines.rotate_query),
        turn(key, &lines.rotate_key),
    )
}

/// The two halves of the last dimension exchanged, one negated.
pub(super) fn rotate_half(states: &Tensor, lines: &'static Lines) -> Tensor {
    let context = states.context();
    let (last, half) = (states.dim() - 1, states.sizes().last() / 2);
    context.at(&lines.half_first);
    let first = view::slice(states, last, half);
    context.at(&lines.half_second);
    let second = view::slice(states, last, half);
    context.at(&lines.half_joined);
    view::cat(vec![pointwise::neg(&second), first], last)
}

/// Rotary frequencies, made in fp32 and cast with the model. They exist twice.
pub(super) struct Rotary {
    frequencies: Tensor,
    _original: Tensor,
}

impl Rotary {
    pub fn new(context: &Context, width: u64) -> Rotary {
        let exponents = pointwise::mul_number(creation::arange(context, width / 2, DType::Float32));
        let frequencies = pointwise::reciprocal(pointwise::number_pow(exponents));
        let original = view::clone(&frequencies);
        Rotary {
            frequencies,
            _original: original,
        }
    }

    /// Of a model that was read from a file: both in fp32, copied from the host.
    pub fn loaded(context: &Context, width: u64) -> Rotary {
        let [frequencies, original] =
            [0; 2].map(|_| context.empty("inv_freq", [width / 2], DType::Float32));
        Rotary {
            frequencies,
            _original: original,
        }
    }

    /// `model.to(dtype)`.
    pub fn cast(self, dtype: DType) -> Rotary {
        let frequencies = cast::to(self.frequencies, dtype);
        let original = cast::to(self._original, dtype);
        Rotary {
            frequencies,
            _original: original,
        }
    }

    /// Cosines and sines for every position, in the type of the hidden states.
    pub fn forward(
        &self,
        dtype: DType,
        position_ids: &Tensor,
        lines: &'static Lines,
    ) -> (Tensor, Tensor) {
        let context = position_ids.context().clone();
        context.no_grad(|| {
            let frequencies = view::unsqueeze(view::unsqueeze(&self.frequencies, 0), 2);
            context.at(&lines.rotary_frequencies);
            let frequencies = cast::to(frequencies, DType::Float32);
            context.at(&lines.rotary_positions);
            let positions = cast::to(view::unsqueeze(position_ids, 1), DType::Float32);
            let (angles, both, cos, sin) = autocast::with(&context, None, || {
                context.at(&lines.rotary_angles);
                let angles = view::transpose(matmul::matmul(&frequencies, &positions), 1, 2);
                context.at(&lines.rotary_doubled);
                let both = view::cat(vec![angles.clone(), angles.clone()], 2);
                context.at(&lines.rotary_cos);
                let cos = pointwise::mul_number(pointwise::apply(&both, "cos", DType::Float32));
                context.at(&lines.rotary_sin);
                let sin = pointwise::mul_number(pointwise::apply(&both, "sin", DType::Float32));
                (angles, both, cos, sin)
            });
            context.at(&lines.rotary_cast);
            let result = (cast::to(&cos, dtype), cast::to(&sin, dtype));
            drop(frequencies);
            drop(positions);
            drop(angles);
            drop(both);
            drop(cos);
            drop(sin);
            result
        })
    }
}
