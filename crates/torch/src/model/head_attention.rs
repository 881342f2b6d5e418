//! Attention with as many heads of keys as of queries, as transformers' `attention_interface` runs it: fused, or op by op in the
//! model's own file.

use super::mask::Attention;
use crate::eager::op::attention::{self, Attend};
use crate::eager::op::{cast, dropout, matmul, pointwise, softmax, view};
use crate::eager::{DType, Line, Tensor};

/// Where the file has its statements.
#[derive(Debug)]
pub(super) struct Lines {
    pub attend: Line,
    pub product: Line,
    pub mask: Line,
    pub softmax: Line,
    pub dropout: Line,
    pub mix: Line,
    pub order: Line,
}

/// How a model attends.
pub(super) struct HeadAttention {
    pub kind: Attention,
    /// Whether tokens see those before them alone.
    pub is_causal: bool,
    pub dropout: f64,
    /// Whether eager weights are computed in fp32 and brought back to the queries' type.
    pub raises_softmax: bool,
    pub lines: &'static Lines,
}

impl HeadAttention {
    /// The result as [batch, length, heads, width], and the weights of eager attention, which are returned too.
    pub fn run(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
    ) -> (Tensor, Option<Tensor>) {
        query.context().at(&self.lines.attend);
        match self.kind {
            Attention::Sdpa => {
                let how = Attend {
                    is_causal: self.is_causal,
                    dropout: self.dropout,
                };
                let out = attention::scaled_dot_product(query, key, value, how);
                (view::contiguous(view::transpose(out, 1, 2)), None)
            }
            Attention::Eager => {
                let (out, weights) = self.eager(query, key, value, mask);
                (out, Some(weights))
            }
        }
    }

    fn eager(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
    ) -> (Tensor, Tensor) {
        let (context, lines) = (query.context(), self.lines);
        context.at(&lines.product);
        let mut weights = pointwise::mul_number(matmul::matmul(query, view::transpose(key, 2, 3)));
        if let Some(mask) = mask {
            context.at(&lines.mask);
            weights = pointwise::add(&weights, mask);
        }
        context.at(&lines.softmax);
        weights = match self.raises_softmax {
            true => cast::to(
                softmax::softmax(&weights, Some(DType::Float32)),
                query.dtype(),
            ),
            false => softmax::softmax(&weights, None),
        };
        context.at(&lines.dropout);
        weights = dropout::dropout(&weights, self.dropout);
        context.at(&lines.mix);
        let mut out = matmul::matmul(&weights, value);
        context.at(&lines.order);
        out = view::contiguous(view::transpose(&out, 1, 2));
        (out, weights)
    }
}
