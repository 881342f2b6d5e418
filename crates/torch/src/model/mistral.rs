//! Mistral as transformers runs it.

use cinch_architecture as architecture;

use super::decoder::Decoder;
use super::decoder_lines::{Lines, lines};
use super::liger::Liger;
use super::replay::{Replay, Setup};
use crate::eager::training::Program;

impl Replay for architecture::Mistral {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        Box::new(Decoder::program(setup, &self.0, &LINES))
    }

    fn can_be_quantised(&self) -> bool {
        true
    }

    /// Its file has no cross entropy of its own that could be replaced.
    fn liger(&self, wanted: Liger) -> Liger {
        Liger {
            cross_entropy: false,
            ..wanted
        }
    }
}

static LINES: Lines = lines! { "modeling_mistral.py":
    embed 354,
    position_ids 361,
    mask 365,
    sliding_mask 365,
    rotary_frequencies 304,
    rotary_positions 306,
    rotary_angles 311,
    rotary_doubled 312,
    rotary_cos 313,
    rotary_sin 314,
    rotary_cast 316,
    norm_raise 193,
    norm_variance 194,
    norm_scale 195,
    norm_weight 196,
    query 150,
    key 151,
    value 152,
    rotate_query 79,
    half_first 53,
    half_second 54,
    half_joined 55,
    rotate_key 80,
    attend 164,
    eager_repeat 93,
    eager_product 109,
    eager_mask 111,
    eager_softmax 113,
    eager_dropout 114,
    eager_mix 115,
    eager_order 116,
    attention_reshape 176,
    output 177,
    attention_residual 233,
    feed 47,
    feed_residual 239,
    logits 453,
    loss 457,
};
