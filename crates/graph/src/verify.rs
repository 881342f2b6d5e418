//! The verifier: everything that planning and execution rely on, checked node by node.

use std::collections::HashSet;

use crate::error::GraphError;
use crate::graph::{Graph, Node, Phase, Role, TensorId};
use crate::loss::Count;
use crate::op::Op;
use crate::parameter::Storage;

/// Rejects a malformed graph with a message that names the node or the tensor.
pub fn verify(graph: &Graph) -> Result<(), GraphError> {
    check_names(graph)?;
    check_parameters(graph)?;
    let mut written = vec![false; graph.tensors.len()];
    let mut spent = vec![false; graph.tensors.len()];
    let mut reached = Phase::Forward;
    for (index, node) in graph.nodes.iter().enumerate() {
        let fail = |problem: String| GraphError::Malformed {
            index,
            op: node.op.name(),
            node: node.name.clone(),
            problem,
        };
        check_ids(graph, node).map_err(fail)?;
        if node.phase == Phase::Forward && reached != Phase::Forward {
            return Err(fail(format!("{:?} after {reached:?}", node.phase)));
        }
        reached = node.phase;
        if node.phase != Phase::Update {
            check_not_spent(graph, node, &spent).map_err(fail)?;
        }
        for &id in &node.inputs {
            let tensor = graph.tensor(id);
            let is_away = matches!(tensor.role, Role::Offloaded | Role::HostActivation);
            if is_away && !matches!(node.op, Op::Fetch(_)) {
                let problem = format!("reads `{}`, which lies in host memory", tensor.name);
                return Err(fail(problem));
            }
            if is_made_by_nodes(tensor.role) && !written[id.index()] {
                return Err(fail(format!(
                    "reads `{}` before it is written",
                    tensor.name
                )));
            }
        }
        check_types(graph, node).map_err(fail)?;
        // A node without inputs works on its outputs, which must be there.
        let works_on = |id: &&TensorId| node.inputs.is_empty() && !written[id.index()];
        if let Some(id) = node.outputs.iter().find(works_on) {
            let name = &graph.tensor(*id).name;
            return Err(fail(format!("changes `{name}` before it is written")));
        }
        for &id in &node.outputs {
            check_write(graph, node, id, &mut written).map_err(fail)?;
        }
        if node.phase == Phase::Update {
            spend(graph, node, &mut spent);
        }
    }
    check_results(graph, &written)?;
    graph.check_sizes()
}

/// Whether nobody but the graph's own nodes fills tensors of this role.
fn is_made_by_nodes(role: Role) -> bool {
    matches!(
        role,
        Role::Activation | Role::HostActivation | Role::Gradient | Role::Result
    )
}

/// What keeps its place is found by its name: inputs, checkpoints, a second graph's plan.
fn check_names(graph: &Graph) -> Result<(), GraphError> {
    let mut names = HashSet::with_capacity(graph.tensors.len());
    let persistent = graph.tensors.iter().filter(|t| t.role.is_persistent());
    for tensor in persistent {
        if !names.insert(&tensor.name) {
            return Err(GraphError::Tensor {
                tensor: tensor.name.clone(),
                problem: "is the name of two tensors".to_owned(),
            });
        }
    }
    Ok(())
}

/// What the graph names by role is there and has that role.
fn check_parameters(graph: &Graph) -> Result<(), GraphError> {
    let check = |id: TensorId, what: &str, roles: &[Role]| match graph.tensors.get(id.index()) {
        None => Err(GraphError::Tensor {
            tensor: what.to_owned(),
            problem: format!("is tensor {}, which does not exist", id.0),
        }),
        Some(tensor) if !roles.contains(&tensor.role) => Err(GraphError::Tensor {
            tensor: tensor.name.clone(),
            problem: format!("is {what}, but its role is {:?}", tensor.role),
        }),
        Some(_) => Ok(()),
    };
    for parameter in &graph.parameters {
        let kept = [Role::Parameter, Role::Offloaded];
        check(parameter.master, "a parameter", &kept)?;
        if let Storage::Quantised(_) = parameter.storage {
            for &id in &parameter.code_scales {
                check(id, "a quantised parameter's scales", &kept)?;
            }
        } else {
            let compute = [Role::Parameter, Role::Offloaded, Role::ComputeCopy];
            check(parameter.compute, "a parameter's compute copy", &compute)?;
        }
        if let Some(id) = parameter.gradient {
            check(id, "a gradient", &[Role::Gradient])?;
        }
        for id in parameter.states() {
            check(id, "a state", &[Role::State])?;
        }
    }
    for random in &graph.random {
        check(random.id, "the random state", &[Role::Control])?;
    }
    for term in &graph.terms {
        check(term.value, "a term of the loss", &[Role::Result])?;
        let inputs = term.inputs;
        check(
            inputs.inverse_count,
            "a term's inverse count",
            &[Role::Control],
        )?;
        check(inputs.weight, "a term's weight", &[Role::Control])?;
        if let Count::Targets(id) = term.count {
            check(id, "what a term counts", &[Role::Batch])?;
        }
    }
    if let Some(id) = graph.loss_scale {
        check(id, "the loss scale", &[Role::LossScale])?;
    }
    Ok(())
}

/// What an update leaves to nobody but other updates: weights that are new now, and gradients
/// that have been used.
fn spend(graph: &Graph, node: &Node, spent: &mut [bool]) {
    for &id in node.inputs.iter().chain(&node.outputs) {
        spent[id.index()] |= matches!(
            graph.tensor(id).role,
            Role::Parameter | Role::ComputeCopy | Role::LossScale | Role::Gradient
        );
    }
}

/// Updates may stand among backward nodes, but none of these may come too late for its weight
/// or its gradient.
fn check_not_spent(graph: &Graph, node: &Node, spent: &[bool]) -> Result<(), String> {
    let late = |id: &&TensorId| spent[id.index()];
    let name = |id: &TensorId| &graph.tensor(*id).name;
    if let Some(id) = node.inputs.iter().find(late) {
        return Err(format!("reads `{}` after its update", name(id)));
    }
    if let Some(id) = node.outputs.iter().find(late) {
        return Err(format!("writes `{}` after its update", name(id)));
    }
    Ok(())
}

fn check_ids(graph: &Graph, node: &Node) -> Result<(), String> {
    for id in node.inputs.iter().chain(&node.outputs) {
        if id.index() >= graph.tensors.len() {
            return Err(format!("names tensor {}, which does not exist", id.0));
        }
    }
    // Executors view outputs as exclusive slices.
    for (position, id) in node.outputs.iter().enumerate() {
        let name = &graph.tensor(*id).name;
        if node.outputs[..position].contains(id) {
            return Err(format!("writes `{name}` twice"));
        }
        if node.inputs.contains(id) {
            return Err(format!("reads `{name}` and writes it"));
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
    let is_written_once = matches!(tensor.role, Role::Activation | Role::HostActivation);
    if is_written_once && written[id.index()] {
        return Err(format!("writes `{}` a second time", tensor.name));
    }
    let allowed = match tensor.role {
        // What the optimizer makes outlives the step.
        Role::Activation => node.phase != Phase::Update,
        Role::Gradient => node.phase != Phase::Update,
        Role::Result => true,
        Role::Cache => node.phase == Phase::Forward,
        Role::HostActivation => matches!(node.op, Op::Store(_)),
        Role::Parameter | Role::ComputeCopy | Role::State | Role::LossScale => {
            node.phase == Phase::Update
        }
        Role::Batch | Role::Control | Role::Offloaded => false,
    };
    if !allowed {
        return Err(format!(
            "may not write `{}`, a {:?}, in the {:?}",
            tensor.name, tensor.role, node.phase
        ));
    }
    written[id.index()] = true;
    Ok(())
}

fn check_results(graph: &Graph, written: &[bool]) -> Result<(), GraphError> {
    for id in graph
        .terms
        .iter()
        .map(|term| term.value)
        .chain(graph.result)
    {
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
