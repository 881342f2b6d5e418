//! Anchors, positives and negatives of a taxonomy, as the batches of an embedder.

use std::sync::Arc;

use cinch_architecture::Naics;
use cinch_data::taxonomy::{Pairs, Taxonomy};
use cinch_model::input;

use crate::batch::Batch;

/// The pairs of one purpose, and what their texts become in a batch.
pub(crate) struct TextRows {
    pub taxonomy: Arc<Taxonomy>,
    pub pairs: Pairs,
    pub shape: Naics,
    pub seq_len: usize,
}

impl TextRows {
    /// Writes the pairs from `first` on, each with its negatives, to a batch.
    pub fn fill(&self, first: u64, seed: Option<u64>, batch: &mut Batch) {
        // What is compared may be less, but nothing is left out here.
        batch.get_mut(input::COMPARED).fill(1);
        let sequences = batch.num_sequences();
        let lengths = self.shape.channel_lengths(self.seq_len as u64);
        for sequence in 0..sequences {
            let texts = self
                .pairs
                .draw(&self.taxonomy, first + sequence as u64, seed);
            let mut texts = texts.into_iter();
            for (chunk, size) in self.shape.chunks().into_iter().enumerate() {
                let row = sequence * size as usize;
                for (place, text) in texts.by_ref().take(size as usize).enumerate() {
                    self.write(text, (chunk, row + place), lengths, batch);
                }
            }
        }
    }

    fn write(
        &self,
        text: usize,
        (chunk, row): (usize, usize),
        lengths: [u64; Naics::CHANNEL_NAMES.len()],
        batch: &mut Batch,
    ) {
        let entry = &self.taxonomy.entries()[text];
        let channels = Naics::CHANNEL_NAMES.iter().zip(&entry.channels);
        for ((channel, ids), length) in channels.zip(lengths) {
            let (name, length) = (input::chunk_of(channel, chunk), length as usize);
            let tokens = batch.get_mut(&input::tokens_of(&name));
            if let Some(row) = tokens.get_mut(row * length..(row + 1) * length) {
                row.fill(0);
                row[..ids.len()].copy_from_slice(ids);
            }
            if let Some(count) = batch.get_mut(&input::lengths_of(&name)).get_mut(row) {
                *count = ids.len() as i32;
            }
        }
    }
}
