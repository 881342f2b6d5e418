use std::sync::Arc;

use cinch_architecture::{
    Activation, Architecture, Decoder, Qwen3, RotaryPositions, RotaryScaling, Windows,
};
use cinch_graph::op::{GradientFormat, MomentFormat};
use cinch_graph::{DType, Optimizer, Recompute, Target, differentiate};
use cinch_model::{AdapterShape, Build, Purpose, build, linear_modules};
use cinch_plan::{Options, Plan, num_micro_nodes};

use super::*;
use crate::cuda::op::lower_all;
use crate::engine::MicroBatch;

const LAYERS: usize = 3;

fn decoder() -> Architecture {
    Architecture::Qwen3(Qwen3(Decoder {
        vocabulary: 500,
        width: 256,
        inner: 512,
        layers: LAYERS as u64,
        heads: 4,
        key_heads: 2,
        head_width: 64,
        attention_bias: true,
        output_bias: false,
        feed_bias: false,
        head_norms: false,
        attention_dropout: 0.0,
        activation: Activation::Silu,
        tied: false,
        windows: Windows::Shared { window: None },
        rotary: RotaryPositions {
            base: 10_000.0,
            scaling: RotaryScaling::None,
        },
        norm_epsilon: 1e-6,
        initial_std: 0.02,
    }))
}

/// Of a step with adapters on all seven linear layers of a block, what is joined: in the forward
/// pass each of the four products of a block with what adapters add to it, in the backward pass
/// the gradients of its input with theirs, and their own weights' gradients.
#[test]
fn all_adapters_of_a_decoder_are_joined() {
    let model = decoder();
    let purpose = Purpose::Train {
        label_smoothing: 0.0,
        loss_chunk: None,
    };
    let mut plain = Build::plain(1, 192, DType::Bf16, purpose);
    plain.adapters = Some(AdapterShape {
        rank: 16,
        scale: 2.0,
        dropout: 0.0,
        modules: Arc::new(linear_modules(&model).into_iter().collect()),
        quantisation: None,
    });
    let optimizer = Optimizer {
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        max_norm: Some(1.0),
        moments: MomentFormat::Full,
        gradients: GradientFormat::Full,
    };
    let graph = differentiate(build(&model, &plain).unwrap(), &optimizer).unwrap();
    let graph = graph.recompute(Recompute::None).unwrap();
    let plan = Plan::new(&graph, Options::new(Target::Cuda));
    let nodes = 0..num_micro_nodes(&graph);
    let lowered = lower_all(&graph, &plan, nodes, MicroBatch::of_one(true), Card::HOPPER);
    let count = |wanted: Joined| {
        let commands = lowered.iter().flat_map(|node| &node.commands);
        let sizes = commands.filter_map(|command| match command {
            Command::Products { joined, products } if *joined == wanted => Some(products.len()),
            _ => None,
        });
        sizes.collect::<Vec<usize>>()
    };
    // q, k and v; o; gate; up; down: then the same backwards, gate and up together.
    let forward = [4, 2, 2, 2, 2].repeat(LAYERS);
    let mut backward = [2, 3, 2, 2].repeat(LAYERS);
    // Nothing before the first layer is trained.
    backward.pop();
    assert_eq!(count(Joined::Sum), [forward, backward].concat());
    // Two matrices of each of the seven; q, k and v have one in common, and so have gate and up.
    // Few of them are left alone: a block takes four launches, where its memory leaves room.
    let gradients = count(Joined::Gradients);
    let alone = 11 * LAYERS - gradients.iter().sum::<usize>();
    assert!(
        gradients.len() + alone <= 4 * LAYERS,
        "{gradients:?}, {alone} alone"
    );
}
