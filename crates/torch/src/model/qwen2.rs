//! Qwen2 and Qwen2.5 as transformers runs them.

use cinch_architecture as architecture;

use super::decoder::Decoder;
use super::decoder_lines::{Lines, lines};
use super::liger::Liger;
use super::replay::{Replay, Setup};
use crate::eager::training::Program;

impl Replay for architecture::Qwen2 {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        Box::new(Decoder::program(setup, &self.0, &LINES))
    }

    fn can_be_quantised(&self) -> bool {
        true
    }

    fn liger(&self, wanted: Liger) -> Liger {
        wanted
    }
}

static LINES: Lines = lines! { "modeling_qwen2.py":
    embed 356,
    position_ids 363,
    mask 378,
    sliding_mask 382,
    rotary_frequencies 92,
    rotary_positions 93,
    rotary_angles 97,
    rotary_doubled 98,
    rotary_cos 99,
    rotary_sin 100,
    rotary_cast 102,
    norm_raise 249,
    norm_variance 250,
    norm_scale 251,
    norm_weight 252,
    query 206,
    key 207,
    value 208,
    rotate_query 133,
    half_first 107,
    half_second 108,
    half_joined 109,
    rotate_key 134,
    attend 220,
    eager_repeat 147,
    eager_product 163,
    eager_mask 165,
    eager_softmax 167,
    eager_dropout 168,
    eager_mix 169,
    eager_order 170,
    attention_reshape 232,
    output 233,
    attention_residual 291,
    feed 47,
    feed_residual 297,
    logits 465,
    loss 469,
};
