use std::sync::Arc;

use cinch_architecture::{
    Activation, Architecture, Decoder, Naics, Qwen3, RotaryPositions, RotaryScaling, Windows,
};
use cinch_graph::{DType, Recompute, Target, differentiate};
use cinch_model::{AdapterShape, Build, Purpose, build, linear_modules};
use cinch_plan::{Options, Plan, num_micro_nodes};

use super::*;
use crate::cuda::command::TailKind;
use crate::cuda::op::lower_all;
use crate::cuda::op::tests::OPTIMIZER;
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

/// The nodes of a training step on a Hopper card.
fn step(model: &Architecture, shape: &Build, recompute: Recompute) -> Vec<Lowered> {
    let graph = differentiate(build(model, shape).unwrap(), &OPTIMIZER).unwrap();
    let graph = graph.recompute(recompute).unwrap();
    let plan = Plan::new(&graph, Options::new(Target::Cuda));
    let nodes = 0..num_micro_nodes(&graph);
    lower_all(&graph, &plan, nodes, MicroBatch::of_one(true), Card::HOPPER)
}

/// A decoder's step with adapters on all seven linear layers of a block.
fn adapted_decoder() -> Vec<Lowered> {
    let model = decoder();
    let purpose = Purpose::Train {
        label_smoothing: 0.0,
        loss_chunk: None,
    };
    let mut shape = Build::plain(1, 192, DType::Bf16, purpose);
    shape.adapters = Some(AdapterShape {
        rank: 16,
        scale: 2.0,
        dropout: 0.0,
        modules: Arc::new(linear_modules(&model).into_iter().collect()),
        whole: Arc::default(),
        quantisation: None,
    });
    step(&model, &shape, Recompute::None)
}

/// What follows the products of a node, where something does.
fn letters(node: &Lowered) -> Option<String> {
    let mut commands = node.commands.iter();
    let tails = commands.find_map(|command| match command {
        Command::Products { tails, .. } if !tails.is_empty() => Some(tails),
        _ => None,
    })?;
    let letter = |tail: &Tail| match &tail.kind {
        TailKind::Dropped { .. } => "dropped ",
        TailKind::Activation { from, to, .. } if from == to => "over ",
        TailKind::Activation { .. } => "gelu ",
        TailKind::Derivative { value: None, .. } => "slope ",
        TailKind::Derivative { value: Some(_), .. } => "slope and value ",
        TailKind::Gate { .. } => "gate ",
        TailKind::GateGradients { value: None, .. } => "gates ",
        TailKind::GateGradients { value: Some(_), .. } => "gates and value ",
        TailKind::Narrow { .. } => "narrow ",
        TailKind::Norm(_) => "norm ",
        TailKind::FirstGradient(_) => "gradient ",
    };
    Some(tails.iter().map(letter).collect())
}

/// Of such a step, what is joined: in the forward pass each of the four products of a block with what adapters add to it, in the backward pass
/// the gradients of its input with theirs, and their own weights' gradients.
#[test]
fn all_adapters_of_a_decoder_are_joined() {
    let lowered = adapted_decoder();
    let count = |wanted: Joined| {
        let commands = lowered.iter().flat_map(|node| &node.commands);
        let sizes = commands.filter_map(|command| match command {
            Command::Products {
                joined, products, ..
            } if *joined == wanted => Some(products.len()),
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
    assert_eq!(gradients.iter().sum::<usize>(), 11 * LAYERS);
    assert!(gradients.len() <= 4 * LAYERS, "{gradients:?}");
}

/// A decoder's gate is computed with the second of the products that it reads, and its gradients,
/// with what adapters read again, where that of its result is.
#[test]
fn gates_of_a_decoder_are_joined_to_its_products() {
    let lowered = adapted_decoder();
    let found = lowered.iter().filter_map(letters).collect::<Vec<String>>();
    let forward = ["gate "].repeat(LAYERS);
    let backward = ["gates and value "].repeat(LAYERS);
    assert_eq!(found, [forward, backward].concat());
}

/// Of an embedder's step, what follows the products with a short sum: GELU of the first of two in
/// the feed-forward layers, over its input where nobody reads that again, and what the second one's
/// adapter makes of it; backwards, what adapters whose input is dropped add, and GELU's derivative, and
/// before each of them the gradient of the adapter's first matrix, with what the second one has.
#[test]
fn what_follows_an_encoders_products_is_joined_to_them() {
    expect_joined_encoder(1, 2, 16);
}

/// The same at the size of a training run, where results take the places of scratch memory.
#[test]
fn what_follows_an_encoders_products_is_joined_to_them_at_full_size() {
    expect_joined_encoder(24, 45, 512);
}

/// Where GELU's result is not kept, it comes again with the derivative.
#[test]
fn gelu_again_follows_the_product_before_its_derivative() {
    let mut model = Naics::new(1);
    model.encoder.vocabulary = 60;
    model.encoder.layers = LAYERS as u64;
    let purpose = Purpose::Train {
        label_smoothing: 0.0,
        loss_chunk: None,
    };
    let shape = Build::plain(2, 16, DType::F16, purpose);
    let lowered = step(&Architecture::Naics(model), &shape, Recompute::None);
    let own = lowered.iter().filter(|node| node.node.starts_with("d."));
    let sums = own.filter_map(letters).filter(|tails| tails != "gradient ");
    let found: Vec<String> = sums.collect();
    let mut layers = [
        "dropped slope and value ",
        "dropped ",
        "dropped ",
        "dropped ",
    ]
    .repeat(LAYERS);
    layers.pop();
    assert_eq!(found, layers.repeat(found.len() / layers.len()));
}

fn expect_joined_encoder(negatives: u64, batch: usize, length: usize) {
    let mut model = Naics::new(negatives);
    model.encoder.vocabulary = 60;
    model.encoder.layers = LAYERS as u64;
    let chunks = model.chunks();
    let model = Architecture::Naics(model);
    let purpose = Purpose::Train {
        label_smoothing: 0.0,
        loss_chunk: None,
    };
    let shape = Build::plain(batch, length, DType::F16, purpose);
    let lowered = step(&model, &shape, Recompute::Full);
    let nodes = |channel: &str, pass: &str| -> Vec<String> {
        let name = format!("{pass}encoders.{channel}.");
        let own = lowered.iter().filter(|node| node.node.starts_with(&name));
        own.filter_map(letters).collect()
    };
    for (channel, chunks) in Naics::CHANNEL_NAMES.into_iter().zip(chunks) {
        let chunks = chunks.len();
        // Forwards some norms are written over what the products read.
        let mut forward = nodes(channel, "");
        forward.retain(|letters| letters != "norm ");
        assert_eq!(forward, ["over narrow "].repeat(chunks * LAYERS));
        let again = ["norm ", "gelu narrow ", "norm "].repeat(chunks * LAYERS);
        assert_eq!(nodes(channel, "again."), again);
        // Of the products of the feed-forward layers, of attention's output, and of q, k and v but in
        // the first layer, whose input nobody trains.
        let dropped = ["dropped slope ", "dropped ", "dropped ", "dropped "];
        let mut layers = dropped
            .map(|tails| ["gradient ", tails])
            .concat()
            .repeat(LAYERS);
        layers.pop();
        assert_eq!(nodes(channel, "d."), layers.repeat(chunks));
        // What an adapter's second matrix has is one pass: of q, k and v together, and of each of
        // the three others.
        let name = format!("d.encoders.{channel}.");
        let is_back = |command: &&Command| {
            let joined = match command {
                Command::Products { joined, .. } => Some(*joined),
                _ => None,
            };
            joined == Some(Joined::Back)
        };
        let own = lowered.iter().filter(|node| node.node.starts_with(&name));
        let passes = own.flat_map(|node| &node.commands).filter(is_back);
        assert_eq!(passes.count(), 4 * chunks * LAYERS);
    }
}
