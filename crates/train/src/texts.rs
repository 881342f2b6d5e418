//! Anchors, positives and negatives of a taxonomy, as the batches of an embedder.

use std::sync::Arc;

use cinch_architecture::Naics;
use cinch_data::taxonomy::{Pairs, Taxonomy};
use cinch_model::input;

use crate::batch::Batch;

/// The pairs of one purpose in one stage, and what their texts become in a batch.
pub(crate) struct TextRows {
    pub taxonomy: Arc<Taxonomy>,
    pub pairs: Pairs,
    /// With the negatives of the stage.
    pub shape: Naics,
    pub seq_len: usize,
}

impl TextRows {
    /// Writes the pairs of these numbers, each with its negatives, to a batch. Negatives in the
    /// anchor's cluster, where there are clusters, are not compared with it.
    pub fn fill(
        &self,
        numbers: impl Iterator<Item = u64>,
        seed: Option<u64>,
        clusters: Option<&[u32]>,
        batch: &mut Batch,
    ) {
        for (sequence, number) in (0..batch.num_sequences()).zip(numbers) {
            let texts = self.pairs.draw(&self.taxonomy, number, seed);
            let cluster = |text: usize| clusters.and_then(|clusters| clusters.get(text));
            let anchor = texts.first().and_then(|&anchor| cluster(anchor));
            let compared = batch.row_mut(input::COMPARED, sequence);
            compared.fill(0);
            for (index, (place, &text)) in compared.iter_mut().zip(texts.iter().skip(1)).enumerate()
            {
                let is_alike = anchor.is_some() && cluster(text) == anchor;
                *place = i32::from(index == 0 || !is_alike);
            }
            self.write(&texts, sequence, batch);
        }
    }

    /// Writes the texts of an anchor, each channel in its own chunks.
    fn write(&self, texts: &[usize], sequence: usize, batch: &mut Batch) {
        let lengths = self.shape.channel_lengths(self.seq_len as u64);
        let entries = self.taxonomy.entries();
        for (index, chunks) in self.shape.chunks().iter().enumerate() {
            let (channel, length) = (Naics::CHANNEL_NAMES[index], lengths[index] as usize);
            let mut texts = texts.iter();
            for (chunk, &size) in chunks.iter().enumerate() {
                let name = input::chunk_of(channel, chunk);
                for (place, &text) in texts.by_ref().take(size as usize).enumerate() {
                    let ids = &entries[text].channels[index];
                    write_text(&name, ids, length, (sequence, place), batch);
                }
            }
        }
    }
}

/// Puts the tokens of a text in its place among those of a sequence.
pub(crate) fn write_text(
    name: &str,
    ids: &[i32],
    length: usize,
    (sequence, place): (usize, usize),
    batch: &mut Batch,
) {
    let tokens = batch.row_mut(&input::tokens_of(name), sequence);
    if let Some(row) = tokens.get_mut(place * length..(place + 1) * length) {
        row.fill(0);
        row[..ids.len()].copy_from_slice(ids);
    }
    if let Some(count) = batch
        .row_mut(&input::lengths_of(name), sequence)
        .get_mut(place)
    {
        *count = ids.len() as i32;
    }
}
