//! Attention of tokens that follow others, whose keys and values are in a cache.

use super::{
    Attention, Declare, aligned, expect, expect_inputs, expect_positions, expect_same, product, sum,
};
use crate::cost::{Cost, KernelCost};
use crate::error::GraphError;
use crate::graph::{Graph, Target, TensorId};
use crate::types::{DType, TensorType};

/// Inputs: qkv, or q, k and v [B, T, …]; with a selection, a bit for each slot
/// [B, T, ⌈slots/32⌉]; positions i32 [B, T], of which the first of each row
/// counts and the others follow it. Outputs: o [B, T, heads·head_dim]; the caches of keys and of
/// values [B, kv_heads, slots, head_dim], into which those of the T tokens are put first.
///
/// The token at position p has slot p mod `slots`. A query sees the keys up to its own position,
/// at most `window` of them, and these must not have been overwritten: so positions stay below
/// `slots`, or there is a window, and `slots` is at least window + T − 1.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedAttention {
    /// Causal, without dropout, padding and documents.
    /// With a selection, without a window: then slots are positions.
    pub attention: Attention,
    pub slots: usize,
}

impl CachedAttention {
    /// The widest head that a GPU's kernel has registers for.
    pub const MOST_COLUMNS: usize = 512;
    /// Warps of a GPU's block: each takes every so many keys of a query.
    pub const CUDA_WARPS: usize = 4;
    /// Blocks that keep a large card busy: four on each multiprocessor.
    const CUDA_BLOCKS: usize = 528;
    /// Keys below which another block for the same query costs more than it brings.
    const CUDA_KEYS: usize = 64;

    /// The caches of keys and values, each.
    pub fn cache(&self, batch: usize, dtype: DType) -> TensorType {
        let Attention {
            kv_heads, head_dim, ..
        } = self.attention;
        TensorType::new([batch, kv_heads, self.slots, head_dim], dtype)
    }

    /// Blocks of a GPU that share the keys of one query.
    pub fn cuda_splits(&self, source: &TensorType) -> usize {
        let queries = source.rows().saturating_mul(self.attention.heads).max(1);
        let keys = self.most_keys();
        Self::CUDA_BLOCKS
            .div_ceil(queries)
            .min(keys.div_ceil(Self::CUDA_KEYS))
            .max(1)
    }

    /// Bytes of what the blocks of a query leave for one another: the sum of values, the largest
    /// score and the sum of exponentials, in single precision.
    pub fn cuda_partial_bytes(&self, source: &TensorType) -> u64 {
        let splits = self.cuda_splits(source);
        if splits == 1 {
            return 0;
        }
        let numbers = [
            source.rows() as u64,
            self.attention.heads as u64,
            splits as u64,
            self.attention.head_dim as u64 + 2,
            DType::F32.size(),
        ];
        aligned(product(numbers))
    }

    /// Which input holds the positions.
    pub fn positions(&self) -> usize {
        self.attention.num_sources() + usize::from(self.attention.selection)
    }

    /// Words of a row of the selection.
    pub fn row_words(&self) -> usize {
        self.slots.div_ceil(32)
    }

    /// Keys that a query sees at most.
    fn most_keys(&self) -> usize {
        self.attention
            .window
            .map_or(self.slots, |window| window.min(self.slots))
    }
}

impl Graph {
    /// As [`Self::attend_cached`], to the keys that `selection` has.
    pub fn attend_cached_selected(
        &mut self,
        name: &str,
        mut op: CachedAttention,
        sources: &[TensorId],
        selection: TensorId,
        positions: TensorId,
    ) -> Result<TensorId, GraphError> {
        op.attention.selection = true;
        let inputs: Vec<TensorId> = sources.iter().copied().chain([selection]).collect();
        self.attend_cached(name, op, &inputs, positions)
    }

    /// Attention over `sources` and what `caches` (keys, values) hold of earlier tokens.
    pub fn attend_cached(
        &mut self,
        name: &str,
        op: CachedAttention,
        sources: &[TensorId],
        positions: TensorId,
    ) -> Result<TensorId, GraphError> {
        Ok(self.attend_cached_with_keys(name, op, sources, positions)?[0])
    }

    /// As [`Self::attend_cached`]: the result, and the cache of keys for who reads it besides.
    pub fn attend_cached_with_keys(
        &mut self,
        name: &str,
        op: CachedAttention,
        sources: &[TensorId],
        positions: TensorId,
    ) -> Result<[TensorId; 2], GraphError> {
        let source = self.ty(sources[0]);
        let batch = source.shape.dims().first().copied().unwrap_or(0);
        let cache = op.cache(batch, source.dtype);
        let caches = ["keys", "values"].map(|which| self.cache(&format!("{name}.{which}"), cache));
        let inputs = sources.iter().copied().chain([positions]).collect();
        let outputs = self.emit_into(name, op, inputs, &caches)?;
        Ok([outputs[0], caches[0]])
    }
}

impl Declare for CachedAttention {
    fn name(&self) -> &'static str {
        "cached_attention"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["", "keys", "values"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let op = &self.attention;
        let sources = op.num_sources();
        expect_inputs(inputs, self.positions() + 1)?;
        let (batch, length) = op.check_sources(&inputs[..sources])?;
        expect(
            op.causal && op.dropout.is_none() && !op.padding && !op.documents,
            || "a cache with dropout, padding or documents, or without a causal order".to_owned(),
        )?;
        expect(op.head_dim <= Self::MOST_COLUMNS, || {
            let most = Self::MOST_COLUMNS;
            format!("heads of {} columns, at most {most}", op.head_dim)
        })?;
        expect(self.slots >= length, || {
            format!("{length} tokens at once do not fit {} slots", self.slots)
        })?;
        if op.selection {
            expect(op.window.is_none(), || {
                "a selection of slots that are used again".to_owned()
            })?;
            let rows = [batch, length, self.row_words()];
            let bits = TensorType::new(rows, DType::I32);
            expect_same("the selection", &inputs[sources], &bits)?;
        }
        expect_positions(&inputs[self.positions()], &inputs[0])?;
        let dtype = inputs[0].dtype;
        let cache = self.cache(batch, dtype);
        Ok(vec![
            TensorType::new([batch, length, op.widths().0], dtype),
            cache,
            cache,
        ])
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        match target {
            Target::Cpu => 0,
            Target::Cuda => self.cuda_partial_bytes(&inputs[0]),
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // Of a full cache: how many tokens it holds, no plan knows.
        product([
            4,
            inputs[0].rows() as u64,
            self.attention.heads as u64,
            self.most_keys() as u64,
            self.attention.head_dim as u64,
        ])
    }

    /// The tokens go into the cache, are attended to, and the shares of blocks are added up.
    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let launches = 2 + u32::from(self.cuda_splits(&inputs[0]) > 1);
        let partial = product([2, self.cuda_partial_bytes(&inputs[0])]);
        let bytes = sum([self.bytes(inputs, outputs), partial]);
        Cost::of([KernelCost::streamed(launches, bytes)])
    }
}
