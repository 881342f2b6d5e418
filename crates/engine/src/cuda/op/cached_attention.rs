//! Attention over a cache: the new keys and values go in, then each query's blocks share the keys
//! that it sees, and where there are several, their shares are added up.

#[cfg(test)]
mod tests;

use cinch_graph::op;

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

/// Threads of the launches that have one for each element.
const ELEMENT_THREADS: usize = 256;
const COMBINE_THREADS: u32 = 128;

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "cached_attention",
        function,
    }
}

/// The kernel whose lanes have columns enough for a head.
fn attending(head_dim: usize) -> &'static str {
    match head_dim.div_ceil(32) {
        0..=1 => "cached_attention_1",
        2 => "cached_attention_2",
        3..=4 => "cached_attention_4",
        5..=8 => "cached_attention_8",
        _ => "cached_attention_16",
    }
}

pub fn cached_attention(x: &mut Lowering<'_>, op: &op::CachedAttention) {
    let attention = &op.attention;
    let sources = attention.num_sources();
    let source = x.input_type(0);
    let (batch, seq) = (source.shape.dims()[0], source.shape.dims()[1]);
    let size = |size: usize| Argument::U32(size as u32);
    let part = |(input, column): (usize, usize)| {
        let bytes = column as u64 * source.dtype.size();
        Argument::Address(x.input(input) + bytes)
    };
    let places = attention.places();
    let strides = places.map(|(input, _)| x.input_type(input).width());
    let [q, k, v] = places.map(part);
    let positions = x.input_argument(op.positions());
    let selection = x.optional_input(attention.selection.then_some(sources));
    let [keys, values] = [1, 2].map(|output| x.output_argument(output));
    let (heads, kv_heads) = (attention.heads, attention.kv_heads);
    let head_dim = attention.head_dim;

    let elements = source.rows() * kv_heads * head_dim;
    let arguments = vec![
        k,
        v,
        positions,
        keys,
        values,
        size(strides[1]),
        size(batch),
        size(seq),
        size(kv_heads),
        size(head_dim),
        size(op.slots),
    ];
    let shape = LaunchShape::linear(elements.div_ceil(ELEMENT_THREADS), ELEMENT_THREADS as u32);
    x.launch(kernel("cached_attention_append"), shape, arguments);

    let splits = op.cuda_splits(&source);
    let partial = match splits {
        1 => Argument::Null,
        _ => Argument::Address(x.workspace().0),
    };
    let output = x.output_argument(0);
    let window = attention
        .window
        .map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX));
    let arguments = vec![
        q,
        positions,
        keys,
        values,
        output,
        partial,
        size(strides[0]),
        size(seq),
        size(heads),
        size(kv_heads),
        size(head_dim),
        size(op.slots),
        Argument::U32(window),
        Argument::F32(attention.scale as f32),
        selection,
    ];
    let shape = LaunchShape {
        grid: [(heads * seq) as u32, splits as u32, batch as u32],
        block: [32 * op::CachedAttention::CUDA_WARPS as u32, 1, 1],
        shared_bytes: 0,
    };
    x.launch(kernel(attending(head_dim)), shape, arguments);
    if splits > 1 {
        let arguments = vec![partial, output, size(splits), size(head_dim)];
        let shape = LaunchShape::linear(source.rows() * heads, COMBINE_THREADS);
        x.launch(kernel("cached_attention_combine"), shape, arguments);
    }
}
