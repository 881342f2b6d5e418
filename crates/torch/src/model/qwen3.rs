//! Qwen3 as transformers runs it.

use cinch_architecture as architecture;

use super::decoder::Decoder;
use super::decoder_lines::{Lines, lines};
use super::liger::Liger;
use super::replay::{Replay, Setup};
use crate::eager::training::Program;

impl Replay for architecture::Qwen3 {
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

static LINES: Lines = lines! { "modeling_qwen3.py":
    embed 381,
    position_ids 388,
    mask 403,
    sliding_mask 407,
    rotary_frequencies 127,
    rotary_positions 128,
    rotary_angles 132,
    rotary_doubled 133,
    rotary_cos 134,
    rotary_sin 135,
    rotary_cast 137,
    norm_raise 61,
    norm_variance 62,
    norm_scale 63,
    norm_weight 64,
    query 252,
    key 253,
    value 254,
    rotate_query 168,
    half_first 142,
    half_second 143,
    half_joined 144,
    rotate_key 169,
    attend 266,
    eager_repeat 182,
    eager_product 198,
    eager_mask 200,
    eager_softmax 202,
    eager_dropout 203,
    eager_mix 204,
    eager_order 205,
    attention_reshape 278,
    output 279,
    attention_residual 316,
    feed 82,
    feed_residual 322,
    logits 495,
    loss 499,
};
