//! What turns texts into vectors: an encoder alone, over texts of several lengths, and from the
//! vectors of an embedder's channels to points.

use cinch_architecture::{Architecture, Bert, Naics};
use cinch_graph::{DType, Graph};
use cinch_model::{Build, Embedded, Pooling, Purpose, build, sentence_encoder};

use crate::on_both;

fn encoder() -> Bert {
    Bert {
        vocabulary: 40,
        positions: 64,
        width: 48,
        inner: 72,
        layers: 1,
        heads: 3,
        norm_epsilon: 1e-3,
        ..Bert::default()
    }
}

fn sentences(pooling: Pooling, texts: usize, length: usize, compute: DType) -> Graph {
    sentence_encoder(&encoder(), pooling, [texts, length], compute).unwrap()
}

fn points(texts: usize, compute: DType) -> Graph {
    let model = Naics {
        encoder: encoder(),
        experts: 3,
        expert_width: 40,
        ..Naics::default()
    };
    let purpose = Purpose::Embed {
        what: Embedded::PointsOfPooled,
        frozen: true,
    };
    let form = Build::plain(texts, 1, compute, purpose);
    build(&Architecture::Naics(model), &form).unwrap()
}

on_both! {
    emulated:
    averages_of_sentences: |compute| sentences(Pooling::Mean, 5, 17, compute);
    first_tokens_of_sentences: |compute| sentences(Pooling::First, 3, 24, compute);
    points_of_pooled_channels: |compute| points(6, compute);
}
