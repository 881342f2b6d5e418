//! What opens BERT and its relatives: words, token types and positions, added and normed. They differ in how positions are
//! counted, and in the order in which their tables are made.

use cinch_architecture as architecture;

use super::module::{Builder, Embedding, LayerNorm};
use crate::eager::line::at;
use crate::eager::op::{creation, dropout, index, pointwise, view};
use crate::eager::{DType, Line, Tensor};

/// Where the file has its statements.
#[derive(Debug)]
pub(super) struct Lines {
    pub words: Line,
    pub token_types: Line,
    pub first_sum: Line,
    pub positions: Line,
    pub second_sum: Line,
    pub norm: Line,
    pub dropout: Line,
}

/// The tables, and the norm of their sum.
pub(super) struct Tables {
    pub words: Embedding,
    pub positions: Embedding,
    pub token_types: Embedding,
    pub norm: LayerNorm,
    pub dropout: f64,
    pub lines: &'static Lines,
}

/// What opens an encoder.
pub(super) trait Embeds {
    fn tables(&self) -> &Tables;

    /// Position ids, and the token types that are chosen by them.
    fn positions(&self, ids: &Tensor) -> (Tensor, Tensor);

    fn words(&self) -> &Tensor {
        &self.tables().words.table
    }

    /// `words_require_grad`: the hook of `enable_input_require_grads` makes the words' embeddings ask for a gradient.
    fn forward(&self, ids: &Tensor, words_require_grad: bool) -> Tensor {
        let (context, tables) = (ids.context(), self.tables());
        let lines = tables.lines;
        let (position_ids, gathered) = self.positions(ids);
        let token_type_ids = view::expand(&gathered, [ids.size(0), ids.size(1)]);
        context.at(&lines.words);
        let words = tables.words.forward(ids);
        if words_require_grad {
            words.set_requires_grad(true);
        }
        context.at(&lines.token_types);
        let token_types = tables.token_types.forward(&token_type_ids);
        context.at(&lines.first_sum);
        let mut sum = pointwise::add(&words, &token_types);
        context.at(&lines.positions);
        let positions = tables.positions.forward(&position_ids);
        context.at(&lines.second_sum);
        sum = pointwise::add(&sum, &positions);
        context.at(&lines.norm);
        sum = tables.norm.forward(&sum);
        context.at(&lines.dropout);
        sum = dropout::dropout(&sum, tables.dropout);
        drop(token_type_ids);
        drop(position_ids);
        drop(words);
        drop(gathered);
        drop(token_types);
        drop(positions);
        sum
    }
}

/// BERT's file: the lines below are its.
const FILE: &str = "modeling_bert.py";

const fn line(number: u32) -> Line {
    Line::Source { file: FILE, number }
}

static LINES: Lines = Lines {
    words: line(99),
    token_types: line(100),
    first_sum: line(101),
    positions: line(103),
    second_sum: line(104),
    norm: line(106),
    dropout: line(107),
};

/// BERT's own: positions from the first on.
pub struct Embeddings {
    tables: Tables,
    position_ids: Tensor,
    token_type_ids: Tensor,
}

impl Embeddings {
    pub(super) fn new(builder: &Builder, config: &architecture::Bert) -> Embeddings {
        let (context, length) = (&builder.context, config.positions);
        let tables = Tables {
            words: builder.embedding(config.vocabulary, config.width),
            positions: builder.embedding(length, config.width),
            token_types: builder.embedding(config.token_types, config.width),
            norm: builder.layer_norm(config.width),
            dropout: config.hidden_dropout,
            lines: &LINES,
        };
        let position_ids = creation::arange(context, length, DType::Int64);
        Embeddings {
            tables,
            position_ids: view::unsqueeze(position_ids, 0),
            token_type_ids: creation::filled(context, [1, length], DType::Int64),
        }
    }
}

impl Embeds for Embeddings {
    fn tables(&self) -> &Tables {
        &self.tables
    }

    fn positions(&self, ids: &Tensor) -> (Tensor, Tensor) {
        let context = ids.context();
        at!(context, FILE, 84);
        let position_ids = view::slice(&self.position_ids, 1, ids.size(1));
        at!(context, FILE, 93);
        let gathered = index::gather(&self.token_type_ids, &position_ids);
        (position_ids, gathered)
    }
}
