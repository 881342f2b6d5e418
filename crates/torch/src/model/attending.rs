//! The attention of decoders whose query heads share keys, as transformers' `attention_interface` runs it: fused, or op by op in
//! the model's own file.

use super::decoder_lines::Lines;
use super::mask::Attention;
use crate::eager::op::attention::{self, Attend};
use crate::eager::op::{cast, dropout, matmul, pointwise, softmax, view};
use crate::eager::{DType, Line, Tensor};

pub(super) struct Attending {
    pub kind: Attention,
    /// Query heads of a key head.
    pub groups: u64,
    pub dropout: f64,
    /// Where scores are divided, bent and multiplied again (Gemma 2). Fused attention leaves that out.
    pub soft_cap: Option<&'static [Line; 3]>,
    pub lines: &'static Lines,
}

impl Attending {
    /// The result as [batch, length, heads, width], and the weights of eager attention, which are returned too.
    pub fn run(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
    ) -> (Tensor, Option<Tensor>) {
        match self.kind {
            Attention::Sdpa => (self.fused(query, key, value, mask), None),
            Attention::Eager => {
                let (out, weights) = self.eager(query, key, value, mask);
                (out, Some(weights))
            }
        }
    }

    fn fused(&self, query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let Some(mask) = mask else {
            let how = Attend {
                is_causal: true,
                dropout: self.dropout,
            };
            let out = attention::scaled_dot_product(query, key, value, how);
            return view::contiguous(view::transpose(out, 1, 2));
        };
        // Shared keys are given to the kernel as they are, unless a mask rules that out.
        let key = attention::repeat_heads(key, self.groups);
        let value = attention::repeat_heads(value, self.groups);
        let out = attention::masked_scaled_dot_product(query, &key, &value, mask, self.dropout);
        let out = view::contiguous(view::transpose(out, 1, 2));
        drop(key);
        drop(value);
        out
    }

    fn eager(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
    ) -> (Tensor, Tensor) {
        let (context, lines) = (query.context(), self.lines);
        context.at(&lines.eager_repeat);
        let keys = attention::repeat_heads(key, self.groups);
        let values = attention::repeat_heads(value, self.groups);
        context.at(&lines.eager_product);
        let mut weights =
            pointwise::mul_number(matmul::matmul(query, view::transpose(&keys, 2, 3)));
        if let Some([divide, bend, multiply]) = self.soft_cap {
            context.at(divide);
            weights = pointwise::mul_number(&weights);
            context.at(bend);
            weights = pointwise::tanh(&weights);
            context.at(multiply);
            weights = pointwise::mul_number(&weights);
        }
        if let Some(mask) = mask {
            context.at(&lines.eager_mask);
            weights = pointwise::add(&weights, mask);
        }
        context.at(&lines.eager_softmax);
        weights = cast::to(
            softmax::softmax(&weights, Some(DType::Float32)),
            query.dtype(),
        );
        context.at(&lines.eager_dropout);
        weights = dropout::dropout(&weights, self.dropout);
        context.at(&lines.eager_mix);
        let mut out = matmul::matmul(&weights, &values);
        context.at(&lines.eager_order);
        out = view::contiguous(view::transpose(&out, 1, 2));
        drop(keys);
        drop(values);
        (out, weights)
    }
}
