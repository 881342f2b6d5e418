//! Norms and their gradients.

use cinch_graph::op::{self, NormKind};

use crate::arena::Element;
use crate::cpu::kernel::norm;
use crate::cpu::operands::Operands;
use crate::cpu::real::Real;

fn norm_shape(x: &Operands<'_>, kind: NormKind) -> norm::NormShape {
    let ty = x.input_type(0);
    norm::NormShape {
        kind,
        rows: ty.rows(),
        width: ty.width(),
    }
}

pub fn normalize<F: Real + Element>(x: &Operands<'_>, op: &op::Norm) {
    let layout = op.layout();
    let dropout = x.dropout(op.dropout, layout.random);
    // The sum can take over the stream or, without dropout, the branch: addition commutes.
    let over_branch = op.residual && x.is_in_place(1, 0);
    let (stream, branch) = match (op.residual, over_branch) {
        (false, _) => (Some(x.input::<F>(0)), None),
        (true, false) => (x.input_unless_in_place(0, 0), Some((x.input(1), dropout))),
        (true, true) => (None, Some((x.input(0), None))),
    };
    let args = norm::Forward {
        x: stream,
        branch,
        gamma: x.input(layout.gamma),
        beta: layout.beta.map(|i| x.input(i)),
        x_new: op.residual.then(|| x.output(0)),
        y: x.output(layout.y),
        mean: layout.mean.map(|i| x.output(i)),
        rstd: x.output(layout.rstd),
    };
    norm::forward(norm_shape(x, op.kind), op.epsilon, args);
}

pub fn normalize_again<F: Real + Element>(x: &Operands<'_>, op: &op::NormApply) {
    let shape = norm_shape(x, op.kind);
    match op.kind {
        NormKind::Layer => norm::apply::<F>(
            shape,
            x.input(0),
            Some(x.input(1)),
            x.input(2),
            x.input(3),
            Some(x.input(4)),
            x.output(0),
        ),
        NormKind::Rms => {
            norm::apply::<F>(
                shape,
                x.input(0),
                None,
                x.input(1),
                x.input(2),
                None,
                x.output(0),
            );
        }
    }
}

pub fn normalize_backward<F: Real + Element>(x: &Operands<'_>, op: &op::NormBackward) {
    let layout = op.layout();
    let residual = match layout.residual_gradient {
        None => norm::Residual::Absent,
        Some(i) if x.is_in_place(i, 0) => norm::Residual::InPlace,
        Some(i) => norm::Residual::At(x.input::<F>(i)),
    };
    let dropout = x.dropout(op.dropout, layout.random);
    // y over dy, once that has been read.
    let value = layout
        .value
        .map(|i| (x.output::<F>(i), x.is_in_place(0, i)));
    // dbranch over the stream, once that has been read.
    let over_stream = layout
        .dbranch
        .filter(|&i| x.is_in_place(layout.stream, i))
        .map(|i| x.output::<F>(i));
    let beside = layout.dbranch.filter(|_| over_stream.is_none());
    let shape = norm_shape(x, op.kind);
    let stream = match &over_stream {
        Some(stream) => &**stream,
        None => x.input(layout.stream),
    };
    let rstd = x.input(layout.rstd);
    let mean = layout.mean.map(|i| x.input(i));
    let gamma = x.input(layout.gamma);
    let dx = x.output(0);
    let args = norm::Backward {
        dy: match &value {
            Some((y, true)) => Some(&**y),
            _ => x.input_unless_in_place(0, 0),
        },
        residual,
        x_new: stream,
        mean,
        rstd,
        gamma,
        dx: &mut *dx,
        dbranch: beside.map(|i| (x.output(i), dropout)),
        dgamma: layout.dgamma.map(|i| x.accumulator(i)),
        dbeta: layout.dbeta.map(|i| x.accumulator(i)),
    };
    norm::backward(shape, args);
    if let Some((y, _)) = value {
        let beta = layout.beta.map(|i| x.input(i));
        norm::apply(shape, stream, mean, rstd, gamma, beta, y);
    }
    if let Some(dbranch) = over_stream {
        norm::branch(shape, dx, dropout, dbranch);
    }
}
