//! Where transformers has the statements of a gated decoder: the same program in a file for each
//! family.

use crate::eager::Line;

/// The lines of one file, in the order in which they first run.
#[derive(Debug)]
pub struct Lines {
    pub embed: Line,
    pub position_ids: Line,
    pub mask: Line,
    /// Of the mask of a window: the same call in models that make only one.
    pub sliding_mask: Line,
    pub rotary_frequencies: Line,
    pub rotary_positions: Line,
    pub rotary_angles: Line,
    pub rotary_doubled: Line,
    pub rotary_cos: Line,
    pub rotary_sin: Line,
    pub rotary_cast: Line,
    pub norm_raise: Line,
    pub norm_variance: Line,
    pub norm_scale: Line,
    pub norm_weight: Line,
    pub query: Line,
    pub key: Line,
    pub value: Line,
    pub rotate_query: Line,
    pub half_first: Line,
    pub half_second: Line,
    pub half_joined: Line,
    pub rotate_key: Line,
    pub attend: Line,
    pub eager_repeat: Line,
    pub eager_product: Line,
    pub eager_mask: Line,
    pub eager_softmax: Line,
    pub eager_dropout: Line,
    pub eager_mix: Line,
    pub eager_order: Line,
    pub attention_reshape: Line,
    pub output: Line,
    pub attention_residual: Line,
    pub feed: Line,
    pub feed_residual: Line,
    pub logits: Line,
    pub loss: Line,
}

macro_rules! lines {
    ($file:literal: $($statement:ident $number:literal,)*) => {
        $crate::model::decoder_lines::Lines {
            $($statement: $crate::eager::Line::Source { file: $file, number: $number },)*
        }
    };
}
pub(super) use lines;
