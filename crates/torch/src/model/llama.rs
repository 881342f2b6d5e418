//! LLaMA, TinyLlama and other models of that shape as transformers runs them.

use cinch_architecture as architecture;

use super::decoder::Decoder;
use super::decoder_lines::{Lines, lines};
use super::liger::Liger;
use super::replay::{Replay, Setup};
use crate::eager::training::Program;

impl Replay for architecture::Llama {
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

static LINES: Lines = lines! { "modeling_llama.py":
    embed 381,
    position_ids 388,
    mask 391,
    sliding_mask 391,
    rotary_frequencies 115,
    rotary_positions 117,
    rotary_angles 122,
    rotary_doubled 123,
    rotary_cos 124,
    rotary_sin 125,
    rotary_cast 127,
    norm_raise 64,
    norm_variance 65,
    norm_scale 66,
    norm_weight 67,
    query 254,
    key 255,
    value 256,
    rotate_query 158,
    half_first 132,
    half_second 133,
    half_joined 134,
    rotate_key 159,
    attend 268,
    eager_repeat 188,
    eager_product 204,
    eager_mask 206,
    eager_softmax 208,
    eager_dropout 209,
    eager_mix 210,
    eager_order 211,
    attention_reshape 279,
    output 280,
    attention_residual 317,
    feed 175,
    feed_residual 323,
    logits 480,
    loss 484,
};
