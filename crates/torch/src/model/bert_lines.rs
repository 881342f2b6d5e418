//! Where transformers has the statements of BERT's layers and head: the same program in a file for each relative.

use super::head_attention;
use crate::eager::Line;

/// The lines of one file, in the order in which they first run.
#[derive(Debug)]
pub(super) struct Lines {
    pub mask: Line,
    pub query: Line,
    pub key: Line,
    pub value: Line,
    pub attention: head_attention::Lines,
    pub attention_reshape: Line,
    /// Projection, dropout and norm that close a part of a layer: `BertSelfOutput` and `BertOutput`.
    pub self_output: [Line; 3],
    pub intermediate: Line,
    pub activation: Line,
    pub output: [Line; 3],
    pub transform: Line,
    pub transform_activation: Line,
    pub transform_norm: Line,
    pub scores: Line,
    pub loss: Line,
}
