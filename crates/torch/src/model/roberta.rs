//! RoBERTa as transformers runs it: BERT's layers and head after embeddings that count positions from the ids.

use cinch_architecture as architecture;

use super::bert::{Encoder, MaskedModel};
use super::bert_embeddings::{self, Embeds, Tables};
use super::bert_lines::Lines;
use super::head_attention;
use super::module::Builder;
use super::replay::{Replay, Setup};
use crate::eager::line::at;
use crate::eager::op::{cast, creation, index, pointwise, scan, view};
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

static EMBEDDING: bert_embeddings::Lines = bert_embeddings::Lines {
    words: line(112),
    token_types: line(113),
    first_sum: line(114),
    positions: line(116),
    second_sum: line(117),
    norm: line(119),
    dropout: line(120),
};

struct Embeddings {
    tables: Tables,
    _position_ids: Tensor,
    token_type_ids: Tensor,
}

impl Embeddings {
    /// The table of positions is made last.
    fn new(builder: &Builder, config: &architecture::Bert) -> Embeddings {
        let (context, length) = (&builder.context, config.positions);
        let words = builder.embedding(config.vocabulary, config.width);
        let token_types = builder.embedding(config.token_types, config.width);
        let norm = builder.layer_norm(config.width);
        let position_ids = creation::arange(context, length, DType::Int64);
        let token_type_ids = creation::filled(context, [1, length], DType::Int64);
        let tables = Tables {
            words,
            positions: builder.embedding(length, config.width),
            token_types,
            norm,
            dropout: config.hidden_dropout,
            lines: &EMBEDDING,
        };
        Embeddings {
            tables,
            _position_ids: position_ids,
            token_type_ids,
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
    fn tables(&self) -> &Tables {
        &self.tables
    }

    fn positions(&self, ids: &Tensor) -> (Tensor, Tensor) {
        let position_ids = count_positions(ids);
        let sizes = [ids.size(0), self.token_type_ids.size(1)];
        let rows = view::expand(&self.token_type_ids, sizes);
        at!(ids.context(), FILE, 106);
        let gathered = index::gather(&rows, &position_ids);
        (position_ids, gathered)
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
