//! What every architecture says of itself.

use crate::Architecture;
use crate::adapter::Adapters;
use crate::family::Family;

/// A model's shape, as far as planner, replay and settings ask for it.
pub trait Describe {
    /// What does not depend on the sizes.
    const FAMILY: &'static Family;

    fn vocabulary(&self) -> u64;

    /// Layers that repeat; of several encoders, those of one.
    fn layers(&self) -> u64;

    fn set_layers(&mut self, layers: u64);

    /// What is recomputed by itself: layers, unless a model is cut otherwise.
    fn blocks(&self) -> u64 {
        self.layers()
    }

    /// Whether its blocks are like layers one after the other, so that a few of them say all about
    /// many.
    fn is_chain(&self) -> bool {
        self.blocks() == self.layers()
    }

    /// Like parts of a sample that follow each other, each with its blocks, so that a few of them
    /// say all about many: whole chunks of an anchor's texts. One where there is nothing like it.
    fn repeats(&self) -> u64 {
        1
    }

    fn set_repeats(&mut self, _repeats: u64) {}

    /// The longest sequence, where learned positions limit it.
    fn positions(&self) -> Option<u64> {
        None
    }

    /// Whether all its sequences have its number of positions: patches of an image, rather than a text.
    fn has_one_length(&self) -> bool {
        false
    }

    /// Sequences that a sample of the batch becomes in the model: one, or an anchor with others.
    fn sequences_per_sample(&self) -> u64 {
        1
    }

    /// Whether it is trained on masked tokens, rather than on the next one.
    fn is_masked(&self) -> bool {
        false
    }

    /// Whether its files have one tensor for embeddings and head, where they could have two.
    fn is_tied(&self) -> bool {
        false
    }

    /// Whether its loss is over a vocabulary.
    fn has_logits(&self) -> bool {
        true
    }

    /// Has the stages of a curriculum follow each other, each with its negatives. Models that know
    /// none stay as they are.
    fn set_stages(&mut self, _negatives: Vec<u64>) {}

    /// Encoders of the same layers that stand beside each other.
    fn towers(&self) -> u64 {
        1
    }

    /// States of a scan that runs timestep by timestep in Python: channels × states, of each
    /// token. None where there is no such loop.
    fn scanned_states(&self) -> Option<u64> {
        None
    }

    /// Why another micro batch gives another result, even with the same sequences in a step.
    fn depends_on_micro_batch(&self) -> Option<&'static str> {
        None
    }

    /// What of a step is a mean of those of its micro batches, and so is not quite the same with
    /// another cut, where there is such a part.
    fn mean_of_micro_batches(&self) -> Option<&'static str> {
        None
    }

    /// The weights and biases, each counted once.
    fn parameters(&self) -> u64;

    /// Which layers adapters can be put on.
    fn adapters(&self) -> Option<&'static Adapters> {
        Self::FAMILY.adapters
    }

    /// Whether the weights are those of another model, but for the number of positions.
    fn has_the_weights_of(&self, _other: &Architecture) -> bool {
        false
    }

    /// What of the shape cinch's own engine does not build, as a sentence; `None` where it builds
    /// all of it.
    fn beyond_the_engine(&self) -> Option<String> {
        None
    }

    /// What of the shape the replay of PyTorch does not know, as a sentence.
    fn beyond_the_replay(&self) -> Option<String> {
        None
    }
}
