//! Gemma 2 as transformers runs it.

use cinch_architecture as architecture;

use super::decoder_lines::lines;
use super::gemma::{Gemma, GemmaLines};
use super::liger::Liger;
use super::replay::{Replay, Setup};
use crate::eager::Line;
use crate::eager::training::Program;

impl Replay for architecture::Gemma2 {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        Box::new(Gemma::program(setup, &self.0, false, &LINES))
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
        file: "modeling_gemma2.py",
        number,
    }
}

static LINES: GemmaLines = GemmaLines {
    common: lines! { "modeling_gemma2.py":
        embed 349,
        position_ids 424,
        mask 439,
        sliding_mask 440,
        rotary_frequencies 126,
        rotary_positions 127,
        rotary_angles 131,
        rotary_doubled 132,
        rotary_cos 133,
        rotary_sin 134,
        rotary_cast 136,
        norm_raise 59,
        norm_variance 56,
        norm_scale 56,
        norm_weight 62,
        query 259,
        key 260,
        value 261,
        rotate_query 167,
        half_first 141,
        half_second 142,
        half_joined 143,
        rotate_key 168,
        attend 273,
        eager_repeat 181,
        eager_product 201,
        eager_mask 208,
        eager_softmax 211,
        eager_dropout 212,
        eager_mix 213,
        eager_order 214,
        attention_reshape 286,
        output 287,
        attention_residual 327,
        feed 81,
        feed_residual 333,
        logits 526,
        loss 534,
    },
    norm_cast: line(63),
    score_cap: [line(204), line(205), line(206)],
    logits_cap: [line(528), line(529), line(530)],
};
