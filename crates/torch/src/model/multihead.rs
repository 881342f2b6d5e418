//! `nn.MultiheadAttention` with weights returned, as it runs in training: plain products of batches.

use super::module::{Builder, Linear};
use crate::eager::op::{dropout, matmul, pointwise, reduce, softmax, view};
use crate::eager::{Dims, Tensor};

pub struct MultiheadAttention {
    output: Linear,
    weight: Tensor,
    bias: Tensor,
    heads: u64,
    dropout: f64,
}

impl MultiheadAttention {
    /// In the order in which `to(device)` moves the parameters: the child's first.
    pub fn new(builder: &Builder, width: u64, heads: u64, dropout: f64) -> MultiheadAttention {
        MultiheadAttention {
            output: builder.linear("out_proj", width, width, true),
            weight: builder.parameter([3 * width, width]),
            bias: builder.parameter([3 * width]),
            heads,
            dropout,
        }
    }

    pub fn parameters(&self) -> Vec<Tensor> {
        let own = [self.weight.clone(), self.bias.clone()];
        own.into_iter().chain(self.output.parameters()).collect()
    }

    /// Query, key and value are the same Python object: one projection, copied apart.
    pub fn attend_self(&self, x: &Tensor) -> (Tensor, Tensor) {
        let x = view::transpose(x, 0, 1);
        let mut projected = matmul::linear(&x, &self.weight, Some(&self.bias));
        let (length, batch, width) = (x.size(0), x.size(1), x.size(2));
        let parts = view::view(&projected, [length, batch, 3, width]);
        let parts = view::squeeze(view::transpose(view::unsqueeze(parts, 0), 0, 3), 3);
        projected = view::contiguous(parts);
        let [query, key, value] = [0, 1, 2].map(|_| view::select(&projected, 0));
        drop(projected);
        self.attend(query, key, value)
    }

    /// They are three objects, equal or not: the packed weight is taken apart by views and each is projected.
    pub fn attend_three(&self, query: &Tensor, key: &Tensor, value: &Tensor) -> (Tensor, Tensor) {
        let width = self.weight.size(1);
        let inputs = [query, key, value].map(|x| view::transpose(x, 0, 1));
        let weights = view::split(&self.weight, &[width; 3], 0);
        let biases = view::split(&self.bias, &[width; 3], 0);
        let [query, key, value] =
            [0, 1, 2].map(|i| matmul::linear(&inputs[i], &weights[i], Some(&biases[i])));
        drop((weights, biases));
        let result = self.attend(query, key, value);
        drop(inputs);
        result
    }

    /// Of [length, batch, width] each; the weights that are returned are the mean over heads.
    fn attend(&self, query: Tensor, key: Tensor, value: Tensor) -> (Tensor, Tensor) {
        let (length, batch, width) = (query.size(0), query.size(1), query.size(2));
        let (heads, keys) = (self.heads, key.size(0));
        let split_heads = |states: Tensor| {
            let sizes = Dims::from([states.size(0), batch * heads, width / heads]);
            view::transpose(view::view(states, sizes), 0, 1)
        };
        let query = split_heads(query);
        let key = split_heads(key);
        let value = split_heads(value);
        let scaled = pointwise::mul_number(&query);
        let mut weights = matmul::bmm(&scaled, view::transpose(&key, 1, 2));
        weights = softmax::softmax(&weights, None);
        weights = dropout::dropout(&weights, self.dropout);
        let mut out = matmul::bmm(&weights, &value);
        out = view::view(
            view::contiguous(view::transpose(&out, 0, 1)),
            [length * batch, width],
        );
        out = self.output.forward(&out);
        out = view::view(&out, [length, batch, width]);
        weights = view::view(&weights, [batch, heads, length, keys]);
        weights = reduce::mean(&weights, &[1], false);
        drop((query, key, value));
        drop(scaled);
        (view::transpose(out, 0, 1), weights)
    }
}
