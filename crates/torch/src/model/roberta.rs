//! RoBERTa as transformers runs it: BERT's layers and head after embeddings that count positions from the ids.

use cinch_architecture as architecture;

use super::bert::{Embeds, Encoder, MaskedModel};
use super::bert_lines::Lines;
use super::head_attention;
use super::module::{Builder, Embedding, LayerNorm};
use super::replay::{Replay, Setup};
use crate::eager::line::at;
use crate::eager::op::{cast, creation, dropout, index, pointwise, scan, view};
use crate::eager::training::Program;
use crate::eager::{DType, Line, Tensor};

/// Where transformers has this model: the lines below are this file's.
const FILE: &str = "modeling_roberta.py";

const fn line(number: u32) -> Line {
    Line::Source { file: FILE, number }
}

static LINES: Lines = Lines {
    mask: line(661),
    query: line(222),
    key: line(223),
    value: line(224),
    attention: head_attention::Lines {
        attend: line(239),
        product: line(172),
        mask: line(175),
        softmax: line(177),
        dropout: line(178),
        mix: line(180),
        order: line(181),
    },
    attention_reshape: line(249),
    self_output: [line(337), line(338), line(339)],
    intermediate: line(382),
    activation: line(383),
    output: [line(395), line(396), line(397)],
    transform: line(889),
    transform_activation: line(890),
    transform_norm: line(891),
    scores: line(894),
    loss: line(867),
};

struct Embeddings {
    words: Embedding,
    token_types: Embedding,
    norm: LayerNorm,
    _position_ids: Tensor,
    token_type_ids: Tensor,
    positions: Embedding,
    dropout: f64,
}

impl Embeddings {
    fn new(builder: &Builder, config: &architecture::Bert) -> Embeddings {
        let (context, length) = (&builder.context, config.positions);
        Embeddings {
            words: builder.embedding(config.vocabulary, config.width),
            token_types: builder.embedding(config.token_types, config.width),
            norm: builder.layer_norm(config.width),
            _position_ids: creation::arange(context, length, DType::Int64),
            token_type_ids: creation::filled(context, [1, length], DType::Int64),
            positions: builder.embedding(length, config.width),
            dropout: config.hidden_dropout,
        }
    }
}

/// `create_position_ids_from_input_ids`: padding keeps its place, the others are counted.
fn count_positions(ids: &Tensor) -> Tensor {
    let context = ids.context();
    at!(context, FILE, 153);
    let mask = cast::to(pointwise::apply(ids, "ne", DType::Bool), DType::Int32);
    at!(context, FILE, 154);
    let counted = cast::to(scan::cumsum(&mask, 1), DType::Int32);
    let counted = pointwise::compare(pointwise::add_number(counted), &mask, DType::Int32);
    at!(context, FILE, 155);
    let positions = pointwise::add_number(cast::to(&counted, DType::Int64));
    drop(mask);
    drop(counted);
    positions
}

impl Embeds for Embeddings {
    fn words(&self) -> &Tensor {
        &self.words.table
    }

    fn forward(&self, ids: &Tensor, words_require_grad: bool) -> Tensor {
        let context = ids.context();
        let (batch, length) = (ids.size(0), ids.size(1));
        let position_ids = count_positions(ids);
        let rows = view::expand(&self.token_type_ids, [batch, self.token_type_ids.size(1)]);
        at!(context, FILE, 106);
        let gathered = index::gather(&rows, &position_ids);
        let token_type_ids = view::expand(&gathered, [batch, length]);
        at!(context, FILE, 112);
        let words = self.words.forward(ids);
        if words_require_grad {
            words.set_requires_grad(true);
        }
        at!(context, FILE, 113);
        let token_types = self.token_types.forward(&token_type_ids);
        at!(context, FILE, 114);
        let mut sum = pointwise::add(&words, &token_types);
        at!(context, FILE, 116);
        let positions = self.positions.forward(&position_ids);
        at!(context, FILE, 117);
        sum = pointwise::add(&sum, &positions);
        at!(context, FILE, 119);
        sum = self.norm.forward(&sum);
        at!(context, FILE, 120);
        sum = dropout::dropout(&sum, self.dropout);
        drop(token_type_ids);
        drop(position_ids);
        drop(words);
        drop(gathered);
        drop(token_types);
        drop(positions);
        sum
    }
}

impl Replay for architecture::Roberta {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        let builder = &setup.builder();
        let embeddings = Embeddings::new(builder, &self.0);
        let (kind, checkpoints) = (setup.attention, setup.checkpoints);
        let encoder = Encoder::of(
            builder,
            &self.0,
            kind,
            checkpoints,
            false,
            embeddings,
            &LINES,
        );
        Box::new(MaskedModel::new(
            builder,
            &self.0,
            encoder,
            setup.batch,
            false,
        ))
    }
}
