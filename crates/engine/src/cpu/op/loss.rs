//! Cross entropy and logits.

use cinch_graph::op;

use super::failed;
use crate::arena::Element;
use crate::cpu::kernel::cross_entropy;
use crate::cpu::operands::Operands;
use crate::cpu::real::Real;
use crate::error::EngineError;

pub fn loss<F: Real + Element>(x: &Operands<'_>, op: &op::CrossEntropy) -> Result<(), EngineError> {
    let (h, w) = (x.input_type(0), x.input_type(1));
    let shape = cross_entropy::CrossEntropyShape {
        rows: h.rows(),
        width: h.width(),
        vocab: w.rows(),
        chunk_rows: op.chunk_rows,
    };
    let weighting = cross_entropy::Weighting {
        inverse_count: f64::from(x.input::<f32>(3)[0]),
        weight: f64::from(x.input::<f32>(4)[0]),
        label_smoothing: op.label_smoothing,
    };
    let (loss, mode) = x.accumulator::<F>(0);
    let head = cross_entropy::Head {
        weight: x.input(1),
        bias: op.bias_input().map(|bias| x.input(bias)),
    };
    let result = if op.gradient {
        let gradients = cross_entropy::HeadGradients {
            weight: op.weight.then(|| x.accumulator(2)),
            bias: op.bias_output().map(|bias| x.accumulator(bias)),
        };
        cross_entropy::forward_backward(
            shape,
            x.input_unless_in_place(0, 1),
            head,
            x.input(2),
            weighting,
            x.workspace(),
            (&mut loss[0], mode),
            x.output(1),
            gradients,
        )
    } else {
        cross_entropy::forward_only(
            shape,
            x.input(0),
            head,
            x.input(2),
            weighting,
            x.workspace(),
            (&mut loss[0], mode),
        )
    };
    result.map_err(|error| failed(x, error))
}

pub fn logits<F: Real + Element>(x: &Operands<'_>, op: &op::Logits) -> Result<(), EngineError> {
    let (h, vocabulary) = (x.input_type(0), x.output_type(0).width());
    let (seq, width) = (h.shape.dims()[1], h.width());
    let hidden = x.input::<F>(0);
    let head = cross_entropy::Head {
        weight: x.input(1),
        bias: op.bias.then(|| x.input(3)),
    };
    let rows = x.output(0).chunks_exact_mut(vocabulary);
    for (sequence, (row, &position)) in rows.zip(x.input::<i32>(2)).enumerate() {
        let position = usize::try_from(position)
            .ok()
            .filter(|&position| position < seq)
            .ok_or_else(|| failed(x, format!("position {position} of a sequence of {seq}")))?;
        let h = &hidden[(sequence * seq + position) * width..][..width];
        cross_entropy::logits(h, head, row);
    }
    Ok(())
}
