//! Differentiation: which gradients exist, who writes them, where they are summed, and what
//! they cost.

use cinch_graph::op::{ActivationKind, AttentionInputs, NormKind, Op};
use cinch_graph::{
    DType, Graph, GraphError, Init, Node, Phase, Role, Storage, TensorId, TensorType,
    TrainingGraph, differentiate, verify,
};
use proptest::prelude::*;

use crate::random_model::{ModelSpec, cases, models, optimizer};
use crate::small_model;

const INIT: Init = Init::Zeros;

fn writers(graph: &Graph, id: TensorId) -> impl Iterator<Item = &Node> {
    graph.nodes.iter().filter(move |n| n.outputs.contains(&id))
}

fn forward_nodes(graph: &Graph) -> impl Iterator<Item = &Node> {
    graph.nodes.iter().filter(|n| n.phase == Phase::Forward)
}

/// Tensors that a trainable parameter reaches.
fn wanted(graph: &Graph) -> Vec<bool> {
    let mut wanted = vec![false; graph.tensors.len()];
    for parameter in &graph.parameters {
        wanted[parameter.compute.index()] = parameter.is_trained();
    }
    for node in forward_nodes(graph) {
        let any = node.inputs.iter().any(|id| wanted[id.index()]);
        for id in &node.outputs {
            wanted[id.index()] |= any;
        }
    }
    wanted
}

/// Additions of gradients that the chain rule asks for: one less than the readings of each
/// tensor through which a gradient passes.
fn expected_sums(graph: &Graph) -> usize {
    let wanted = wanted(graph);
    let mut readings = vec![0_usize; graph.tensors.len()];
    for node in forward_nodes(graph) {
        for &id in &node.inputs {
            readings[id.index()] += 1;
        }
        // A fused residual norm reads its own sum.
        if let Op::Norm(norm) = &node.op
            && norm.residual
        {
            readings[node.outputs[0].index()] += 1;
        }
    }
    let ids = (0..graph.tensors.len()).filter(|&id| {
        let forward = graph.tensors[id].role == Role::Activation;
        forward && wanted[id]
    });
    ids.map(|id| readings[id].saturating_sub(1)).sum()
}

/// Additions that the backward makes, in whatever form.
fn sums(graph: &Graph) -> usize {
    let adds = |node: &&Node| match &node.op {
        Op::Add(_) => true,
        Op::LinearGradInput(op) => op.accumulate,
        Op::ConvolutionBackward(op) => op.accumulate,
        Op::NormBackward(op) => op.residual_gradient,
        _ => false,
    };
    graph.nodes.iter().filter(adds).count()
}

fn flops(graph: &Graph, names: &[&str]) -> u64 {
    let nodes = graph.nodes.iter();
    nodes
        .filter(|n| names.contains(&n.op.name()))
        .map(|n| graph.flops(n))
        .sum()
}

fn unfrozen(model: &ModelSpec) -> TrainingGraph {
    let model = ModelSpec {
        frozen: 0,
        ..model.clone()
    };
    model.training()
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn training_steps_are_well_formed(model in models()) {
        prop_assert_eq!(verify(&model.forward()), Ok(()));
        prop_assert_eq!(verify(&model.training()), Ok(()));
    }

    #[test]
    fn each_reading_of_a_trained_parameter_adds_to_its_gradient(model in models()) {
        let step = model.training();
        for parameter in step.parameters.iter().filter(|p| p.is_trained()) {
            let name = &step.tensor(parameter.master).name;
            let gradient = parameter.gradient.expect(name);
            let readings = forward_nodes(&step)
                .filter(|n| n.inputs.contains(&parameter.compute))
                .count();
            prop_assert!(readings > 0);
            prop_assert_eq!(writers(&step, gradient).count(), readings, "{}", name);
            prop_assert_eq!(step.ty(gradient), step.ty(parameter.master));
        }
    }

    #[test]
    fn frozen_parameters_cost_nothing(model in models()) {
        let step = model.training();
        for parameter in step.parameters.iter().filter(|p| !p.is_trained()) {
            let name = &step.tensor(parameter.master).name;
            prop_assert_eq!(parameter.gradient, None);
            prop_assert_eq!(parameter.moments, None);
            for suffix in ["gradient", "m", "v"] {
                let theirs = format!("{name}.{suffix}");
                prop_assert!(step.tensors.iter().all(|t| t.name != theirs));
            }
            prop_assert_eq!(writers(&step, parameter.master).count(), 0);
        }
        // A node that computes only parameters' gradients is there only if one is trained.
        let trained = |id: &TensorId| {
            step.parameters.iter().any(|p| p.is_trained() && p.compute == *id)
        };
        for node in forward_nodes(&step) {
            let suffix = match &node.op {
                Op::Linear(_) => "weight",
                Op::Embedding(_) => "table",
                _ => continue,
            };
            let backward = format!("d.{}.{suffix}", node.name);
            let exists = step.nodes.iter().any(|n| n.name == backward);
            prop_assert_eq!(exists, node.inputs.iter().any(trained), "{}", backward);
        }
        for node in &step.nodes {
            let gradients = node.outputs.iter().filter(|&&id| {
                step.tensor(id).role == Role::Gradient
            });
            let declared = match &node.op {
                Op::NormBackward(op) => op.parameters,
                Op::ConvolutionBackward(op) => op.parameters,
                Op::CrossEntropy(op) => op.weight,
                _ => continue,
            };
            prop_assert_eq!(gradients.count() > 0, declared, "{}", &node.name);
        }
    }

    #[test]
    fn gradients_that_meet_are_summed(model in models()) {
        let step = model.training();
        prop_assert_eq!(sums(&step), expected_sums(&step));
    }

    #[test]
    fn a_linear_backward_costs_twice_its_forward(model in models()) {
        let step = unfrozen(&model);
        let forward = flops(&step, &["linear"]);
        let backward = flops(&step, &["linear_grad_input", "linear_grad_weight"]);
        prop_assert_eq!(backward, 2 * forward);
    }

    #[test]
    fn an_attention_backward_costs_five_halves_of_its_forward(model in models()) {
        let step = unfrozen(&model);
        let forward = flops(&step, &["attention"]);
        prop_assert_eq!(2 * flops(&step, &["attention_backward"]), 5 * forward);
    }
}

/// [2, 3, 4] → loss, with a trained head.
struct Toy {
    graph: Graph,
    x: TensorId,
}

impl Toy {
    fn new() -> Self {
        let mut graph = Graph::new(DType::F32);
        let tokens = graph.batch("tokens", [2, 3], DType::I32);
        let table = graph.weight("table", [7, 4], INIT);
        let x = graph
            .embedding("embedding", tokens, table, None, None)
            .unwrap();
        Self { graph, x }
    }

    fn linear(&mut self, name: &str, x: TensorId) -> TensorId {
        let weight = self.graph.weight(&format!("{name}.weight"), [4, 4], INIT);
        let bias = self
            .graph
            .small_weight(&format!("{name}.bias"), [4], Init::Zeros);
        self.graph.linear(name, x, weight, Some(bias)).unwrap()
    }

    fn finish(mut self, h: TensorId) -> Graph {
        let head = self.graph.weight("head", [7, 4], INIT);
        let targets = self.graph.batch("targets", [2, 3], DType::I32);
        self.graph
            .cross_entropy("loss", h, head, targets, 0.0, None)
            .unwrap();
        self.graph
    }

    fn freeze(graph: &mut Graph, name: &str) {
        let master = small_model::tensor(graph, name);
        let parameters = &mut graph.parameters;
        let found = parameters.iter_mut().find(|p| p.master == master);
        found.unwrap().storage = Storage::Frozen;
    }
}

fn step(graph: Graph) -> TrainingGraph {
    let step = differentiate(graph, &optimizer()).unwrap();
    verify(&step).unwrap();
    step
}

fn node<'g>(graph: &'g Graph, name: &str) -> &'g Node {
    &graph.nodes[small_model::position(graph, name)]
}

#[test]
fn three_projections_of_one_tensor_add_to_one_gradient() {
    let mut toy = Toy::new();
    let x = toy.x;
    let sources = ["q", "k", "v"].map(|name| toy.linear(name, x));
    let op = cinch_graph::op::Attention {
        inputs: AttentionInputs::Separate,
        heads: 2,
        kv_heads: 2,
        head_dim: 2,
        causal: true,
        scale: 1.0,
        dropout: None,
        padding: false,
        window: None,
        documents: false,
        selection: false,
    };
    let h = toy.graph.emit("attend", op, sources.to_vec()).unwrap()[0];
    let step = step(toy.finish(h));
    // From the last reading to the first, each takes what the one before made.
    let parts = ["d.v.input", "d.k.input", "d.q.input"].map(|name| node(&step, name));
    assert_eq!(parts[0].inputs.len(), 2);
    assert_eq!(parts[1].inputs[2], parts[0].outputs[0]);
    assert_eq!(parts[2].inputs[2], parts[1].outputs[0]);
    let table = node(&step, "d.embedding.table");
    assert_eq!(table.inputs[0], parts[2].outputs[0]);
}

#[test]
fn a_tensor_that_is_its_own_query_key_and_value_has_two_sums() {
    let toy = Toy::new();
    let x = toy.x;
    let mut toy = toy;
    let op = cinch_graph::op::Attention {
        inputs: AttentionInputs::Separate,
        heads: 2,
        kv_heads: 2,
        head_dim: 2,
        causal: true,
        scale: 1.0,
        dropout: None,
        padding: false,
        window: None,
        documents: false,
        selection: false,
    };
    let h = toy.graph.emit("attend", op, vec![x; 3]).unwrap()[0];
    let step = step(toy.finish(h));
    let [dq, dk, dv] = node(&step, "d.attend.input").outputs[..] else {
        panic!("three gradients");
    };
    let added: Vec<&Node> = step.nodes.iter().filter(|n| n.op.name() == "add").collect();
    assert_eq!(added.len(), 2);
    assert_eq!(added[0].inputs, [dq, dk]);
    assert_eq!(added[1].inputs, [added[0].outputs[0], dv]);
    assert_eq!(
        node(&step, "d.embedding.table").inputs[0],
        added[1].outputs[0]
    );
}

/// A fused op makes both gradients of a pair of parameters; each must land in its own place,
/// whichever of them is frozen.
#[test]
fn either_half_of_a_pair_of_parameters_can_be_frozen() {
    let pairs = [
        ("d.qkv.weight", "qkv.weight", "qkv.bias"),
        ("d.second.input", "second.gamma", "second.beta"),
        ("d.conv.input", "conv.weight", "conv.bias"),
        ("d.scan.input", "A_log", "D"),
    ];
    for (backward, first, second) in pairs {
        for (frozen, trained) in [(first, second), (second, first)] {
            let mut graph = small_model::forward();
            Toy::freeze(&mut graph, frozen);
            let step = step(graph);
            let trained = small_model::tensor(&step, &format!("{trained}.gradient"));
            let node = node(&step, backward);
            assert!(node.outputs.contains(&trained), "{backward}: {frozen}");
            let gradients = node.outputs.iter();
            let gradients = gradients.filter(|&&id| step.tensor(id).role == Role::Gradient);
            assert_eq!(gradients.count(), 1, "{backward}: {frozen} is frozen");
        }
    }
}

#[test]
fn below_the_first_trained_parameter_there_is_no_backward() {
    let mut toy = Toy::new();
    let x = toy.x;
    let hidden = toy.linear("below", x);
    let h = toy.linear("above", hidden);
    let mut graph = toy.finish(h);
    for name in ["table", "below.weight", "below.bias", "above.weight"] {
        Toy::freeze(&mut graph, name);
    }
    let step = step(graph);
    let backward: Vec<&str> = step
        .nodes
        .iter()
        .filter(|n| n.phase == Phase::Backward)
        .map(|n| n.name.as_str())
        .collect();
    assert_eq!(backward, ["d.above.weight"]);
}

#[test]
fn parameters_that_the_loss_does_not_see_are_left_alone() {
    let mut toy = Toy::new();
    let x = toy.x;
    toy.linear("dead", x);
    toy.graph.small_weight("unread", [4], Init::Ones);
    let h = toy.linear("live", x);
    let step = step(toy.finish(h));
    for parameter in &step.parameters {
        let name = &step.tensor(parameter.master).name;
        let live = !name.starts_with("dead") && name != "unread";
        assert_eq!(parameter.gradient.is_some(), live, "{name}");
        assert_eq!(writers(&step, parameter.master).count() > 0, live, "{name}");
    }
}

#[test]
fn what_cannot_be_differentiated_is_named() {
    let optimizer = optimizer();
    let mut graph = small_model::forward();
    graph.terms.clear();
    assert_eq!(differentiate(graph, &optimizer), Err(GraphError::NoLoss));

    // Logits are for sampling.
    let mut toy = Toy::new();
    let head = toy.graph.weight("out", [4, 4], INIT);
    let position = toy.graph.batch("position", [2], DType::I32);
    let logits = toy.graph.logits("sample", toy.x, head, position).unwrap();
    let targets = toy.graph.batch("next", [2], DType::I32);
    toy.graph
        .cross_entropy("loss", logits, head, targets, 0.0, None)
        .unwrap();
    let error = differentiate(toy.graph, &optimizer).unwrap_err();
    let expected = GraphError::NotDifferentiable {
        op: "logits",
        node: "sample".to_owned(),
    };
    assert_eq!(error, expected);

    let mut graph = small_model::forward();
    for parameter in &mut graph.parameters {
        parameter.storage = Storage::Frozen;
    }
    let message = differentiate(graph, &optimizer).unwrap_err().to_string();
    assert!(message.contains("no trainable parameter"), "{message}");
}

/// Three ways in which a gradient would silently get lost.
#[test]
fn no_gradient_gets_lost() {
    let optimizer = optimizer();
    let refused = |graph: Graph, fragments: &[&str]| {
        let message = differentiate(graph, &optimizer).unwrap_err().to_string();
        for fragment in fragments {
            assert!(message.contains(fragment), "{message:?} lacks {fragment:?}");
        }
    };
    // A weight that is computed.
    let mut toy = Toy::new();
    let base = toy.graph.weight("base", [4, 4], INIT);
    let kind = ActivationKind::Silu;
    let weight = toy.graph.activation("made", base, kind).unwrap();
    let h = toy.graph.linear("project", toy.x, weight, None).unwrap();
    refused(toy.finish(h), &["`project`", "`made`", "not a parameter"]);

    // A parameter that is read as data.
    let mut toy = Toy::new();
    let ty = TensorType::new([2, 3, 4], DType::F32);
    let prompt = toy.graph.weight("prompt", ty.shape, INIT);
    let h = toy.linear("project", prompt);
    refused(toy.finish(h), &["`project`", "`prompt`"]);

    // A residual sum whose norm is not used.
    let mut toy = Toy::new();
    let x = toy.x;
    let branch = toy.linear("branch", x);
    let gamma = toy.graph.small_weight("gamma", [4], Init::Ones);
    let norm = (NormKind::Rms, 1e-5);
    let out = toy
        .graph
        .residual_norm("add", (x, branch), None, norm, gamma, None)
        .unwrap();
    refused(toy.finish(out.stream), &["`add`", "not its norm"]);
}

/// Half precision has a loss scale: the loss reads it, the norm updates it. Others have none.
#[test]
fn only_half_precision_scales_its_loss() {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let mut g = Graph::new(dtype);
        let tokens = g.batch("tokens", [2, 3], DType::I32);
        let table = g.weight("table", [11, 4], INIT);
        let x = g.embedding("embedding", tokens, table, None, None).unwrap();
        let targets = g.batch("targets", [2, 3], DType::I32);
        g.cross_entropy("loss", x, table, targets, 0.0, None)
            .unwrap();
        let inference = g.clone();
        let graph = differentiate(g, &optimizer()).unwrap();
        verify(&graph).unwrap();
        assert_eq!(graph.loss_scale.is_some(), dtype == DType::F16);
        assert_eq!(graph.find("loss_scale"), graph.loss_scale);
        assert_eq!(inference.loss_scale, None);
        let readers = graph.nodes.iter().filter(|node| {
            let scale = graph.loss_scale;
            node.inputs.iter().any(|&id| Some(id) == scale)
        });
        let readers: Vec<&str> = readers.map(|node| node.op.name()).collect();
        let Some(scale) = graph.loss_scale else {
            assert!(readers.is_empty());
            continue;
        };
        assert_eq!(readers, ["cross_entropy"]);
        assert_eq!(graph.tensor(scale).role, Role::LossScale);
        let writers: Vec<&Node> = writers(&graph, scale).collect();
        assert_eq!(writers.len(), 1);
        assert!(matches!(&writers[0].op, Op::GradientNorm(op) if op.scaled));
        assert_eq!(writers[0].outputs, [graph.gradient_norm, scale]);
    }
}
