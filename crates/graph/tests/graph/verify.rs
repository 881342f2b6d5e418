//! The verifier: each kind of malformation, by hand.

use cinch_graph::op::Op;
use cinch_graph::{
    BlockId, Count, DType, Graph, Phase, RandomState, Role, Shape, TensorId, TensorType, verify,
};

use crate::small_model::{forward, node, position, tensor, training};

/// Breaks the small model's training step; the message must hold every fragment.
#[track_caller]
fn rejected(fragments: &[&str], damage: impl FnOnce(&mut Graph)) {
    let mut graph = training();
    damage(&mut graph);
    let message = verify(&graph).expect_err("accepted").to_string();
    for fragment in fragments {
        assert!(message.contains(fragment), "{message:?} lacks {fragment:?}");
    }
}

fn ty(dims: &[usize], dtype: DType) -> TensorType {
    TensorType::new(Shape::new(dims), dtype)
}

fn random(id: TensorId) -> RandomState {
    RandomState { id, rows: None }
}

#[test]
fn tensors_exist() {
    let missing = TensorId(10_000);
    rejected(&["`qkv`", "tensor 10000", "does not exist"], |g| {
        node(g, "qkv").inputs[0] = missing;
    });
    rejected(&["`qkv`", "tensor 10000", "does not exist"], |g| {
        node(g, "qkv").outputs[0] = missing;
    });
    rejected(&["a parameter", "does not exist"], |g| {
        g.parameters[0].master = missing;
    });
    rejected(&["compute copy", "does not exist"], |g| {
        g.parameters[0].compute = missing;
    });
    rejected(&["a gradient", "does not exist"], |g| {
        g.parameters[0].gradient = Some(missing);
    });
    rejected(&["a state", "does not exist"], |g| {
        let m = g.parameters[0].moments.unwrap()[0];
        g.parameters[0].moments = Some([m, missing]);
    });
    rejected(&["random", "does not exist"], |g| {
        g.random = vec![random(missing)];
    });
    rejected(&["a term's inverse count", "does not exist"], |g| {
        g.terms[0].inputs.inverse_count = missing;
    });
    rejected(&["a term of the loss", "does not exist"], |g| {
        g.terms[0].value = missing;
    });
    rejected(&["what a term counts", "does not exist"], |g| {
        g.terms[0].count = Count::Targets(missing);
    });
    rejected(&["no node writes it"], |g| g.result = Some(missing));
}

#[test]
fn parameters_have_their_roles() {
    rejected(&["`tokens`", "is a parameter", "Batch"], |g| {
        g.parameters[0].master = TensorId(0);
    });
    rejected(&["`tokens`", "is a gradient", "Batch"], |g| {
        g.parameters[0].gradient = Some(TensorId(0));
    });
    rejected(&["`tokens`", "random state", "Batch"], |g| {
        g.random = vec![random(TensorId(0))];
    });
}

#[test]
fn blocks_exist() {
    rejected(&["`scan`", "block 7", "does not exist"], |g| {
        node(g, "scan").block = Some(BlockId(7));
    });
}

#[test]
fn names_of_what_keeps_its_place_are_unique() {
    rejected(&["`table`", "two tensors"], |g| {
        let positions = tensor(g, "positions");
        g.tensors[positions.index()].name = "table".to_owned();
    });
}

#[test]
fn nothing_is_read_before_it_is_written() {
    rejected(&["`gelu`", "reads `attend` before it is written"], |g| {
        let (a, b) = (position(g, "attend"), position(g, "gelu"));
        g.nodes.swap(a, b);
    });
    rejected(&["`dt`", "reads `p` before it is written"], |g| {
        let p = position(g, "p");
        g.nodes.remove(p);
    });
    // Gradients too: nobody but the backward fills them.
    rejected(&["`gradient_norm`", "qkv.weight.gradient"], |g| {
        let at = position(g, "d.qkv.weight");
        g.nodes.remove(at);
    });
    rejected(&["`table.update`", "reads `gradient_norm` before"], |g| {
        let at = position(g, "gradient_norm");
        g.nodes.remove(at);
    });
}

#[test]
fn activations_are_written_once() {
    rejected(&["`in`", "writes `in` a second time"], |g| {
        let at = position(g, "in");
        g.nodes.insert(at, g.nodes[at].clone());
    });
    rejected(
        &["`d.last.input`", "writes `last.gamma.gradient` twice"],
        |g| {
            let gamma = tensor(g, "last.gamma.gradient");
            let backward = node(g, "d.last.input");
            let last = backward.outputs.len() - 1;
            backward.outputs[last] = gamma;
        },
    );
    rejected(&["`gelu`", "reads `gelu` and writes it"], |g| {
        let gelu = tensor(g, "gelu");
        node(g, "gelu").inputs[0] = gelu;
    });
}

#[test]
fn only_the_update_writes_weights_and_states() {
    for name in ["positions", "table.m"] {
        rejected(&["`d.embedding.table`", "may not write", name], |g| {
            let target = tensor(g, name);
            let rows = g.ty(target).shape.dims()[0];
            let backward = node(g, "d.embedding.table");
            let output = usize::from(rows == 5);
            backward.outputs[output] = target;
        });
    }
    rejected(&["`table.update`", "may not write `table.gradient`"], |g| {
        let gradient = tensor(g, "table.gradient");
        let update = node(g, "table.update");
        update.inputs[0] = update.outputs[1];
        update.outputs[1] = gradient;
    });
}

#[test]
fn nobody_writes_inputs() {
    for (name, role) in [("features", Role::Batch), ("scale", Role::Control)] {
        rejected(&["`gelu`", "may not write", name], |g| {
            let input = g.add_tensor(name, ty(&[2, 3, 4], DType::F32), role);
            node(g, "gelu").outputs[0] = input;
        });
    }
}

#[test]
fn outputs_are_what_the_op_makes() {
    rejected(&["`gelu`", "f32[2,3,5]", "f32[2,3,4]"], |g| {
        let gelu = tensor(g, "gelu");
        g.tensors[gelu.index()].ty = ty(&[2, 3, 5], DType::F32);
    });
    rejected(&["`gelu`", "bf16[2,3,4]", "f32[2,3,4]"], |g| {
        let gelu = tensor(g, "gelu");
        g.tensors[gelu.index()].ty = ty(&[2, 3, 4], DType::Bf16);
    });
    rejected(&["`attend`", "has 1 outputs, its op makes 2"], |g| {
        node(g, "attend").outputs.pop();
    });
    rejected(&["`gelu`", "has 2 outputs, its op makes 1"], |g| {
        let extra = g.add_tensor("extra", ty(&[1], DType::F32), Role::Activation);
        node(g, "gelu").outputs.push(extra);
    });
    rejected(&["`table.update`", "has 2 outputs, its op makes 3"], |g| {
        node(g, "table.update").outputs.pop();
    });
}

#[test]
fn inputs_are_what_the_op_takes() {
    rejected(&["`gelu`", "takes 1 inputs, got 0"], |g| {
        node(g, "gelu").inputs.clear();
    });
    rejected(&["`qkv`", "the bias is [4], expected [12]"], |g| {
        let gamma = tensor(g, "first.gamma");
        node(g, "qkv").inputs[2] = gamma;
    });
    rejected(&["`embedding`", "the tokens is f32, expected i32"], |g| {
        let table = tensor(g, "table");
        node(g, "embedding").inputs[0] = table;
    });
}

#[test]
fn phases_are_in_order() {
    rejected(&["`d.scan.input`", "Forward after Backward"], |g| {
        node(g, "d.scan.input").phase = Phase::Forward;
    });
    rejected(&["`gelu`", "Forward after Backward"], |g| {
        node(g, "attend").phase = Phase::Backward;
    });
    rejected(
        &["`table.update`", "reads `table.gradient` after its update"],
        |g| {
            node(g, "table.update").phase = Phase::Backward;
        },
    );
}

/// An update may stand among backward nodes, but not before one that needs the old weight or
/// adds to the gradient.
#[test]
fn nothing_comes_too_late_for_an_update() {
    let early = |g: &mut Graph, update: &str, before: &str| {
        let at = position(g, update);
        let mut node = g.nodes.remove(at);
        // Without the norm, which comes at the end.
        if let Op::AdamW(op) = &mut node.op {
            op.factor = false;
            node.inputs.truncate(2);
        }
        let at = position(g, before);
        g.nodes.insert(at, node);
    };
    rejected(
        &["`d.qkv.input`", "reads `qkv.weight` after its update"],
        |g| {
            early(g, "qkv.weight.update", "d.qkv.input");
        },
    );
    rejected(
        &["`d.embedding.table`", "writes `table.gradient` after"],
        |g| {
            early(g, "table.update", "d.embedding.table");
        },
    );
    let mut graph = training();
    early(&mut graph, "qkv.weight.update", "d.first.input");
    verify(&graph).unwrap();
}

#[test]
fn results_are_written() {
    let mut graph = forward();
    graph.nodes.pop();
    let message = verify(&graph).unwrap_err().to_string();
    assert!(message.contains("`loss`"), "{message}");
    assert!(message.contains("no node writes it"), "{message}");

    let mut graph = forward();
    graph.result = Some(graph.add_tensor("logits", ty(&[2, 11], DType::F32), Role::Activation));
    let message = verify(&graph).unwrap_err().to_string();
    assert!(message.contains("`logits`"), "{message}");
}
