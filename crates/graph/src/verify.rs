//! The verifier: everything that planning and execution rely on, checked node by node.

use crate::error::GraphError;
use crate::graph::{Graph, Node, Phase, Role, TensorId};

/// Rejects a malformed graph with a message that names the node.
pub fn verify(graph: &Graph) -> Result<(), GraphError> {
    let mut written = vec![false; graph.tensors.len()];
    let mut reached = Phase::Forward;
    for (index, node) in graph.nodes.iter().enumerate() {
        let fail = |problem: String| GraphError::Malformed {
            index,
            op: node.op.name(),
            node: node.name.clone(),
            problem,
        };
        check_ids(graph, node).map_err(fail)?;
        if section(node.phase) < section(reached) {
            return Err(fail(format!("{:?} after {reached:?}", node.phase)));
        }
        reached = node.phase;
        for &id in &node.inputs {
            let tensor = graph.tensor(id);
            if tensor.role == Role::Activation && !written[id.index()] {
                return Err(fail(format!(
                    "reads `{}` before it is written",
                    tensor.name
                )));
            }
        }
        check_types(graph, node).map_err(fail)?;
        for &id in &node.outputs {
            check_write(graph, node, id, &mut written).map_err(fail)?;
        }
    }
    check_results(graph, &written)
}

/// Forward, then backward with its recomputation, then update.
fn section(phase: Phase) -> u8 {
    match phase {
        Phase::Forward => 0,
        Phase::Recompute | Phase::Backward => 1,
        Phase::Update => 2,
    }
}

fn check_ids(graph: &Graph, node: &Node) -> Result<(), String> {
    for id in node.inputs.iter().chain(&node.outputs) {
        if id.index() >= graph.tensors.len() {
            return Err(format!("names tensor {}, which does not exist", id.0));
        }
    }
    match node.block {
        Some(block) if block.index() >= graph.blocks.len() => {
            Err(format!("is in block {}, which does not exist", block.0))
        }
        _ => Ok(()),
    }
}

fn check_types(graph: &Graph, node: &Node) -> Result<(), String> {
    let declaration = node.op.declaration();
    let inferred = declaration.infer(&graph.types(&node.inputs))?;
    if inferred.len() != node.outputs.len() {
        return Err(format!(
            "has {} outputs, its op makes {}",
            node.outputs.len(),
            inferred.len()
        ));
    }
    for (&id, expected) in node.outputs.iter().zip(&inferred) {
        let tensor = graph.tensor(id);
        if tensor.ty != *expected {
            return Err(format!(
                "`{}` is {}, its op makes {expected}",
                tensor.name, tensor.ty
            ));
        }
    }
    for &(input, output) in declaration.in_place() {
        let sizes = (node.inputs.get(input), node.outputs.get(output));
        let (Some(&input), Some(&output)) = sizes else {
            return Err("declares an in-place pair that it does not have".to_owned());
        };
        if graph.ty(input).bytes() != graph.ty(output).bytes() {
            return Err(format!(
                "cannot write `{}` over `{}`: their sizes differ",
                graph.tensor(output).name,
                graph.tensor(input).name
            ));
        }
    }
    Ok(())
}

fn check_write(
    graph: &Graph,
    node: &Node,
    id: TensorId,
    written: &mut [bool],
) -> Result<(), String> {
    let tensor = graph.tensor(id);
    let allowed = match tensor.role {
        Role::Activation => !written[id.index()],
        Role::Gradient => node.phase != Phase::Update,
        Role::Result => true,
        Role::Parameter | Role::ComputeCopy | Role::State => node.phase == Phase::Update,
        Role::Batch | Role::Control => false,
    };
    if !allowed {
        return Err(if tensor.role == Role::Activation {
            format!("writes `{}` a second time", tensor.name)
        } else {
            format!("may not write `{}`, a {:?}", tensor.name, tensor.role)
        });
    }
    written[id.index()] = true;
    Ok(())
}

fn check_results(graph: &Graph, written: &[bool]) -> Result<(), GraphError> {
    for id in graph.loss.into_iter().chain(graph.result) {
        if !written.get(id.index()).copied().unwrap_or(false) {
            let name = graph.tensors.get(id.index()).map_or("?", |t| &t.name);
            return Err(GraphError::Tensor {
                tensor: name.to_owned(),
                problem: "is a result of the graph but no node writes it".to_owned(),
            });
        }
    }
    Ok(())
}
