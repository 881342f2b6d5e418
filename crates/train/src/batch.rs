//! What a step reads: the contents of a graph's batch tensors, whatever they are, for all
//! sequences of an effective batch.

use std::ops::Range;

use cinch_graph::op::IGNORE_INDEX;
use cinch_graph::{Graph, Role};
use cinch_model::input;
use cinch_step::StepPlan;

/// The contents of batch tensors, sequence after sequence, all as wide as the longest has them. A
/// step that has graphs for shorter rows leaves out the ends that hold nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    columns: Vec<Column>,
    /// Tokens of each sequence without the padding at its end.
    row_lens: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq)]
struct Column {
    name: String,
    /// Numbers of one sequence.
    width: usize,
    values: Vec<i32>,
}

impl Batch {
    /// Tokens and targets of sequences that are one piece each. Targets count for nothing until
    /// they are filled.
    pub fn new(sequences: usize, seq_len: usize) -> Self {
        let names = [input::TOKENS, input::TARGETS];
        Self::with(names.map(|name| (name, seq_len)), sequences)
    }

    /// What any of the graphs of a planned step reads, with room for the longest rows.
    pub fn of_step(step: &StepPlan, sequences: usize) -> Self {
        let graphs = step.variants().iter();
        let training = graphs.map(|variant| -> &Graph { &variant.training });
        Self::of_graphs(training, step.config.batch.batch_size, sequences)
    }

    /// What any of some graphs of micro batches of `micro` sequences reads, for that many
    /// sequences.
    pub(crate) fn of_graphs<'a>(
        graphs: impl IntoIterator<Item = &'a Graph>,
        micro: usize,
        sequences: usize,
    ) -> Self {
        let mut columns: Vec<(&str, usize)> = Vec::new();
        for graph in graphs {
            let tensors = graph.tensors.iter();
            for tensor in tensors.filter(|tensor| tensor.role == Role::Batch) {
                let width = tensor.ty.shape.elements() / micro.max(1);
                match columns.iter_mut().find(|(name, _)| *name == tensor.name) {
                    Some((_, widest)) => *widest = width.max(*widest),
                    None => columns.push((&tensor.name, width)),
                }
            }
        }
        Self::with(columns, sequences)
    }

    /// What a graph of micro batches of `micro` sequences reads, for that many sequences.
    pub fn of(graph: &Graph, micro: usize, sequences: usize) -> Self {
        Self::of_graphs([graph], micro, sequences)
    }

    fn with<'a>(columns: impl IntoIterator<Item = (&'a str, usize)>, sequences: usize) -> Self {
        let column = |(name, width): (&str, usize)| Column {
            name: name.to_owned(),
            width,
            values: vec![
                if name == input::TARGETS {
                    IGNORE_INDEX
                } else {
                    0
                };
                sequences * width
            ],
        };
        Self {
            columns: columns.into_iter().map(column).collect(),
            row_lens: vec![usize::MAX; sequences],
        }
    }

    /// Says how many tokens a sequence has before its padding. What is not said is taken to fill
    /// its row.
    pub fn set_row_len(&mut self, sequence: usize, tokens: usize) {
        if let Some(row_len) = self.row_lens.get_mut(sequence) {
            *row_len = tokens;
        }
    }

    /// Tokens of the longest of some sequences.
    pub fn longest(&self, sequences: Range<usize>) -> usize {
        let row_lens = self.row_lens.get(sequences).unwrap_or(&[]);
        row_lens.iter().copied().max().unwrap_or(usize::MAX)
    }

    pub fn num_sequences(&self) -> usize {
        self.row_lens.len()
    }

    /// What some sequences have in the tensor of that name: the first `width` numbers of each,
    /// where they lie or gathered in `room`. None where there are fewer.
    pub(crate) fn part<'b>(
        &'b self,
        name: &str,
        sequences: Range<usize>,
        width: usize,
        room: &'b mut Vec<i32>,
    ) -> Option<&'b [i32]> {
        let column = self.columns.iter().find(|column| column.name == name)?;
        let rows = sequences.start * column.width..sequences.end * column.width;
        let values = column.values.get(rows)?;
        if column.width == width {
            return Some(values);
        }
        room.clear();
        for row in values.chunks_exact(column.width.max(1)) {
            room.extend_from_slice(row.get(..width)?);
        }
        Some(room)
    }

    /// The contents of the tensor of that name; nothing where there is no such tensor.
    pub fn get(&self, name: &str) -> &[i32] {
        let found = self.columns.iter().find(|column| column.name == name);
        found.map_or(&[], |column| &column.values)
    }

    pub fn get_mut(&mut self, name: &str) -> &mut [i32] {
        let found = self.columns.iter_mut().find(|column| column.name == name);
        found.map_or(&mut [], |column| &mut column.values)
    }

    /// What one sequence has in the tensor of that name; nothing where there is no such tensor.
    pub fn row_mut(&mut self, name: &str, sequence: usize) -> &mut [i32] {
        let found = self.columns.iter_mut().find(|column| column.name == name);
        let row = found.and_then(|column| {
            let row = sequence * column.width..(sequence + 1) * column.width;
            column.values.get_mut(row)
        });
        row.unwrap_or(&mut [])
    }

    /// All tensors: their names, the numbers of one sequence, and the contents.
    pub fn columns_mut(&mut self) -> impl Iterator<Item = (&str, usize, &mut [i32])> {
        let columns = self.columns.iter_mut();
        columns.map(|column| (column.name.as_str(), column.width, &mut column.values[..]))
    }

    /// As [`Self::get_mut`], of several at once.
    pub fn get_disjoint_mut<const N: usize>(&mut self, names: [&str; N]) -> [&mut [i32]; N] {
        let mut found = [const { None }; N];
        for column in &mut self.columns {
            if let Some(index) = names.iter().position(|name| *name == column.name) {
                found[index] = Some(&mut column.values[..]);
            }
        }
        found.map(|values| values.unwrap_or(&mut []))
    }

    pub fn tokens(&self) -> &[i32] {
        self.get(input::TOKENS)
    }

    pub fn tokens_mut(&mut self) -> &mut [i32] {
        self.get_mut(input::TOKENS)
    }

    pub fn targets(&self) -> &[i32] {
        self.get(input::TARGETS)
    }

    pub fn targets_mut(&mut self) -> &mut [i32] {
        self.get_mut(input::TARGETS)
    }

    /// The first sequences only.
    pub fn truncate(&mut self, sequences: usize) {
        for column in &mut self.columns {
            column.values.truncate(sequences * column.width);
        }
        self.row_lens.truncate(sequences);
    }

    /// Targets that count.
    pub fn num_targets(&self) -> usize {
        self.num_targets_in(input::TARGETS)
    }

    /// Those of the tensor of that name.
    pub fn num_targets_in(&self, name: &str) -> usize {
        let counted = self.get(name).iter().filter(|&&t| t != IGNORE_INDEX);
        counted.count()
    }
}
