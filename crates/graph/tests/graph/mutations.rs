//! Single mutations of random training steps: the verifier never panics, and rejects those
//! that break the step.

use cinch_graph::op::{Add, GradientNorm, Op};
use cinch_graph::{
    BlockId, DType, Graph, Phase, Recompute, Role, Shape, TensorId, TensorType, verify,
};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::random_model::{ModelSpec, cases, models};

fn ty(dims: &[usize], dtype: DType) -> TensorType {
    TensorType::new(Shape::new(dims), dtype)
}

/// One change to a graph, at places chosen by indices that fit any length.
#[derive(Clone, Debug)]
enum Mutation {
    MissingInput(Index, Index),
    MissingOutput(Index, Index),
    MissingBlock(Index),
    DropInput(Index),
    DropOutput(Index),
    ExtraOutput(Index),
    RemoveNode(Index),
    RepeatNode(Index),
    MoveToFront(Index),
    WriteBatch(Index),
    WriteWeight(Index),
    EarlyUpdate(Index),
    UnwrittenLoss,
    OtherType(Index, DType),
    Resize(Index, Index, usize),
    Rewire(Index, Index, Index),
    OtherOp(Index),
}

fn mutations() -> impl Strategy<Value = Mutation> {
    use Mutation::*;
    let at = any::<Index>;
    let dtypes = prop::sample::select(vec![DType::F64, DType::F32, DType::F16, DType::I32]);
    let sizes = prop::sample::select(vec![0, 1, 2, 7, 1 << 40, usize::MAX]);
    prop_oneof![
        (at(), at()).prop_map(|(n, i)| MissingInput(n, i)),
        (at(), at()).prop_map(|(n, o)| MissingOutput(n, o)),
        at().prop_map(MissingBlock),
        at().prop_map(DropInput),
        at().prop_map(DropOutput),
        at().prop_map(ExtraOutput),
        at().prop_map(RemoveNode),
        at().prop_map(RepeatNode),
        at().prop_map(MoveToFront),
        at().prop_map(WriteBatch),
        at().prop_map(WriteWeight),
        at().prop_map(EarlyUpdate),
        Just(UnwrittenLoss),
        (at(), dtypes).prop_map(|(t, dtype)| OtherType(t, dtype)),
        (at(), at(), sizes).prop_map(|(t, d, size)| Resize(t, d, size)),
        (at(), at(), at()).prop_map(|(n, i, t)| Rewire(n, i, t)),
        at().prop_map(OtherOp),
    ]
}

/// What a mutation did to the graph.
#[derive(Debug, PartialEq)]
enum Effect {
    Broken,
    /// Some graphs survive it.
    Unknown,
    Unchanged,
}

fn broken_if(condition: bool) -> Effect {
    if condition {
        Effect::Broken
    } else {
        Effect::Unknown
    }
}

fn is_written(graph: &Graph, id: TensorId) -> bool {
    graph.nodes.iter().any(|n| n.outputs.contains(&id))
}

fn writes_activation(graph: &Graph, at: usize) -> bool {
    let mut outputs = graph.nodes[at].outputs.iter();
    outputs.any(|&id| graph.tensor(id).role == Role::Activation)
}

fn mutate(graph: &mut Graph, mutation: &Mutation) -> Effect {
    let (nodes, tensors) = (graph.nodes.len(), graph.tensors.len());
    match mutation {
        Mutation::MissingInput(n, i) => {
            let inputs = &mut graph.nodes[n.index(nodes)].inputs;
            let at = i.index(inputs.len());
            inputs[at] = TensorId(tensors as u32);
            Effect::Broken
        }
        Mutation::MissingOutput(n, o) => {
            let outputs = &mut graph.nodes[n.index(nodes)].outputs;
            let at = o.index(outputs.len());
            outputs[at] = TensorId(u32::MAX);
            Effect::Broken
        }
        Mutation::MissingBlock(n) => {
            graph.nodes[n.index(nodes)].block = Some(BlockId(graph.blocks.len() as u32));
            Effect::Broken
        }
        Mutation::DropInput(n) => {
            let node = &mut graph.nodes[n.index(nodes)];
            node.inputs.pop();
            let takes_any = matches!(node.op, Op::GradientNorm(_)) && !node.inputs.is_empty();
            broken_if(!takes_any)
        }
        Mutation::DropOutput(n) => {
            graph.nodes[n.index(nodes)].outputs.pop();
            Effect::Broken
        }
        Mutation::ExtraOutput(n) => {
            let extra = graph.add_tensor("extra", ty(&[1], DType::F32), Role::Activation);
            graph.nodes[n.index(nodes)].outputs.push(extra);
            Effect::Broken
        }
        Mutation::RemoveNode(n) => {
            let node = graph.nodes.remove(n.index(nodes));
            let read = |id: &TensorId| graph.nodes.iter().any(|n| n.inputs.contains(id));
            let made_here = |id: &&TensorId| {
                !is_written(graph, **id) && graph.tensor(**id).role != Role::Parameter
            };
            let mut lost = node.outputs.iter().filter(made_here);
            broken_if(lost.any(|id| read(id) && graph.tensor(*id).role != Role::ComputeCopy))
        }
        Mutation::RepeatNode(n) => {
            let at = n.index(nodes);
            graph.nodes.insert(at, graph.nodes[at].clone());
            broken_if(writes_activation(graph, at))
        }
        Mutation::MoveToFront(n) => {
            let node = graph.nodes.remove(n.index(nodes));
            let reads = node.inputs.iter();
            let mut reads = reads.map(|&id| graph.tensor(id).role);
            let effect = broken_if(reads.any(|role| role == Role::Activation));
            graph.nodes.insert(0, node);
            effect
        }
        Mutation::WriteBatch(n) => {
            let node = n.index(nodes);
            let ty = graph.ty(graph.nodes[node].outputs[0]);
            graph.nodes[node].outputs[0] = graph.add_tensor("another", ty, Role::Batch);
            Effect::Broken
        }
        Mutation::WriteWeight(n) => {
            let node = n.index(nodes);
            let ty = graph.ty(graph.nodes[node].outputs[0]);
            let update = graph.nodes[node].phase == Phase::Update;
            graph.nodes[node].outputs[0] = graph.add_tensor("another", ty, Role::Parameter);
            broken_if(!update)
        }
        Mutation::EarlyUpdate(n) => {
            let node = n.index(nodes);
            let later = nodes - 1 > node && graph.nodes[node + 1].phase != Phase::Update;
            graph.nodes[node].phase = Phase::Update;
            broken_if(later)
        }
        Mutation::UnwrittenLoss => {
            graph.terms[0].value = graph.add_tensor("nothing", ty(&[1], DType::F32), Role::Result);
            Effect::Broken
        }
        Mutation::OtherType(t, dtype) => {
            let id = TensorId(t.index(tensors) as u32);
            if graph.ty(id).dtype == *dtype {
                return Effect::Unchanged;
            }
            graph.tensors[id.index()].ty.dtype = *dtype;
            let role = graph.tensor(id).role;
            broken_if(role == Role::Activation && is_written(graph, id))
        }
        Mutation::Resize(t, d, size) => {
            let id = TensorId(t.index(tensors) as u32);
            let mut dims = graph.ty(id).shape.dims().to_vec();
            let d = d.index(dims.len());
            if dims[d] == *size {
                return Effect::Unchanged;
            }
            dims[d] = *size;
            graph.tensors[id.index()].ty.shape = Shape::new(&dims);
            let role = graph.tensor(id).role;
            broken_if(role == Role::Activation && is_written(graph, id))
        }
        Mutation::Rewire(n, i, t) => {
            let inputs = &mut graph.nodes[n.index(nodes)].inputs;
            let at = i.index(inputs.len());
            inputs[at] = TensorId(t.index(tensors) as u32);
            Effect::Unknown
        }
        Mutation::OtherOp(n) => {
            let node = &mut graph.nodes[n.index(nodes)];
            let op = if node.inputs.len() == 2 {
                Op::from(GradientNorm {
                    max_norm: None,
                    scaled: false,
                    from_squares: false,
                })
            } else {
                Op::from(Add)
            };
            if node.op.name() == op.name() {
                return Effect::Unchanged;
            }
            node.op = op;
            Effect::Unknown
        }
    }
}

fn step_of(model: &ModelSpec) -> Graph {
    let blocks = model.blocks.len() / 2;
    let step = model.training().recompute(Recompute::Blocks(blocks));
    (*step.unwrap()).clone()
}

proptest! {
    #![proptest_config(cases(600))]

    #[test]
    fn no_mutation_panics_and_those_that_break_are_rejected(
        model in models(),
        mutation in mutations(),
    ) {
        let mut graph = step_of(&model);
        let effect = mutate(&mut graph, &mutation);
        let verdict = verify(&graph);
        match effect {
            Effect::Broken => prop_assert!(verdict.is_err()),
            Effect::Unchanged => prop_assert_eq!(verdict.clone(), Ok(())),
            Effect::Unknown => {}
        }
        // What passes can be printed and counted.
        if verdict.is_ok() {
            prop_assert!(!graph.to_string().is_empty());
            for node in &graph.nodes {
                let _ = (graph.flops(node), graph.bytes(node));
            }
        }
    }
}
