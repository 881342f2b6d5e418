//! Gemma 3 as transformers runs it.

use cinch_architecture as architecture;

use super::decoder_lines::lines;
use super::gemma::{Gemma, GemmaLines};
use super::liger::Liger;
use super::replay::{Replay, Setup};
use crate::eager::Line;
use crate::eager::training::Program;

impl Replay for architecture::Gemma3 {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        Box::new(Gemma::program(setup, &self.0, true, &LINES))
    }

    fn can_be_quantised(&self) -> bool {
        true
    }

    fn liger(&self, wanted: Liger) -> Liger {
        wanted
    }
}

const fn line(number: u32) -> Line {
    Line::Source {
        file: "modeling_gemma3.py",
        number,
    }
}

static LINES: GemmaLines = GemmaLines {
    common: lines! { "modeling_gemma3.py":
        embed 117,
        position_ids 532,
        mask 553,
        sliding_mask 554,
        rotary_frequencies 213,
        rotary_positions 215,
        rotary_angles 220,
        rotary_doubled 221,
        rotary_cos 222,
        rotary_sin 223,
        rotary_cast 225,
        norm_raise 146,
        norm_variance 143,
        norm_scale 143,
        norm_weight 149,
        query 352,
        key 353,
        value 354,
        rotate_query 256,
        half_first 230,
        half_second 231,
        half_joined 232,
        rotate_key 257,
        attend 369,
        eager_repeat 270,
        eager_product 290,
        eager_mask 297,
        eager_softmax 300,
        eager_dropout 301,
        eager_mix 302,
        eager_order 303,
        attention_reshape 381,
        output 382,
        attention_residual 421,
        feed 132,
        feed_residual 427,
        logits 643,
        loss 651,
    },
    norm_cast: line(150),
    score_cap: [line(293), line(294), line(295)],
    logits_cap: [line(645), line(646), line(647)],
};
