//! What ops declare to cost on a GPU, against their operations and bytes.

use cinch_graph::op::{Declare, Linear, LinearGradInput, LinearGradWeight};
use cinch_graph::{Arithmetic, Cost, DType, KernelCost, TensorType};

use crate::small_model::{position, training};

fn product_flops(kernels: &[KernelCost]) -> u64 {
    let flops = kernels.iter().map(|kernel| match kernel.arithmetic {
        Arithmetic::Product { m, n, k, .. } => 2 * (m * n * k) as u64,
        _ => 0,
    });
    flops.sum()
}

fn cost_of(op: &dyn Declare, inputs: &[TensorType]) -> (Cost, u64, u64) {
    let outputs = op.infer(inputs).unwrap();
    let cost = op.cuda_cost(inputs, &outputs);
    (cost, op.flops(inputs, &outputs), op.bytes(inputs, &outputs))
}

#[test]
fn every_node_launches_something_and_moves_its_bytes() {
    let graph = training();
    for node in &graph.nodes {
        let cost = graph.cuda_cost(node);
        let (bytes, launches) = cost.kernels.iter().fold((0, 0), |(bytes, launches), k| {
            (bytes + k.bytes, launches + k.launches)
        });
        assert!(launches > 0, "{}", node.name);
        if cost.chunks.is_none() {
            assert!(bytes >= graph.bytes(node), "{}", node.name);
        }
    }
}

#[test]
fn the_products_of_a_linear_layer_are_its_operations() {
    let half = |dims: &[usize]| TensorType::new(cinch_graph::Shape::new(dims), DType::Bf16);
    let bias = TensorType::new([24], DType::F32);
    let with_bias = Linear {
        bias: true,
        ..Linear::default()
    };
    let inputs = [half(&[2, 5, 16]), half(&[24, 16]), bias];
    let (cost, flops, bytes) = cost_of(&with_bias, &inputs);
    assert_eq!(product_flops(&cost.kernels), flops);
    // The bias is cast first, which takes a launch.
    assert_eq!(cost.kernels.len(), 2);
    assert_eq!(cost.kernels[1].bytes, bytes);

    let into_columns = LinearGradInput {
        dy_column: 0,
        scale: 1.0,
        dropout: None,
        first_column: 4,
        width: 32,
        accumulate: false,
    };
    let (cost, flops, _) = cost_of(&into_columns, &[half(&[2, 5, 24]), half(&[24, 16])]);
    assert_eq!(product_flops(&cost.kernels), flops);
    let dx = half(&[2, 5, 32]);
    assert_eq!(cost.kernels[0], KernelCost::streamed(1, dx.bytes()));

    let weight = LinearGradWeight {
        dy_column: 0,
        outputs: 24,
        scale: 1.0,
        dropout: None,
        first_column: 0,
        inputs: 16,
        gradient: DType::F32,
        bias: false,
    };
    let (cost, flops, _) = cost_of(&weight, &[half(&[2, 5, 24]), half(&[2, 5, 16])]);
    assert_eq!(product_flops(&cost.kernels), flops);
    let stored = match cost.kernels[0].arithmetic {
        Arithmetic::Product { stored, .. } => stored,
        _ => panic!("{cost:?}"),
    };
    assert_eq!(stored, DType::F32);
}

/// Besides the products there are twelve operations for each logit.
#[test]
fn the_chunks_of_the_loss_add_up_to_its_products() {
    let graph = training();
    let node = &graph.nodes[position(&graph, "loss")];
    let chunks = graph.cuda_cost(node).chunks.expect("the loss is chunked");
    // Six rows in chunks of four, a vocabulary of eleven.
    assert_eq!((chunks.rows, chunks.chunk_rows), (6, 4));
    let products = product_flops(&chunks.kernels) * 6 / 4;
    assert_eq!(products + 12 * 6 * 11, graph.flops(node));
}

#[test]
fn states_are_part_of_what_an_update_moves() {
    let graph = training();
    let node = &graph.nodes[position(&graph, "qkv.weight.update")];
    let [kernel] = &graph.cuda_cost(node).kernels[..] else {
        panic!("one kernel");
    };
    // Two moments of single precision.
    assert_eq!(kernel.state_bytes, 2 * 4 * 12 * 4);
    assert!(kernel.merges && kernel.bytes > 2 * kernel.state_bytes);
}
