//! The text of a graph.

use cinch_graph::op::NormKind;
use cinch_graph::{DType, Graph, Init, Recompute, Storage, differentiate};

use crate::random_model::optimizer;

/// One block: `x + W·norm(x)`, and a tied head.
fn tiny() -> Graph {
    let init = Init::Normal { std: 0.02 };
    let norm = (NormKind::Rms, 1e-5);
    let mut g = Graph::new(DType::Bf16);
    let tokens = g.batch("tokens", [2, 3], DType::I32);
    let table = g.weight("table", [7, 4], init);
    let x = g.embedding("embedding", tokens, table, None, None).unwrap();
    let gamma = g.small_weight("first.gamma", [4], Init::Ones);
    let normed = g.norm("first", x, norm, gamma, None).unwrap();
    g.enter_block("block");
    let weight = g.weight("project.weight", [4, 4], init);
    let branch = g.linear("project", normed, weight, None).unwrap();
    let gamma = g.small_weight("last.gamma", [4], Init::Ones);
    let out = g
        .residual_norm("last", (x, branch), None, norm, gamma, None)
        .unwrap();
    g.leave_block();
    let targets = g.batch("targets", [2, 3], DType::I32);
    g.cross_entropy("loss", out.normed, table, targets, 0.0, None)
        .unwrap();
    g
}

#[test]
fn the_forward_reads_from_parameters_to_loss() {
    assert_eq!(tiny().to_string(), FORWARD);
}

#[test]
fn a_training_step_marks_its_phases() {
    let mut graph = tiny();
    graph.parameters[1].storage = Storage::Frozen;
    let step = differentiate(graph, &optimizer()).unwrap();
    let step = step.recompute(Recompute::Full).unwrap();
    assert_eq!(step.to_string(), TRAINING);
}

const FORWARD: &str = "\
%2 = parameter bf16[7,4] `table.bf16`
%4 = parameter f32[4] `first.gamma`
%8 = parameter bf16[4,4] `project.weight.bf16`
%10 = parameter f32[4] `last.gamma`

  %3 = embedding(%0, %2) bf16[2,3,4]  `embedding`
  %5, %6 = rms_norm(%3, %4) bf16[2,3,4] f32[2,3]  `first`

block
  %9 = linear(%5, %8) bf16[2,3,4]  `project`
  %11, %12, %13 = rms_norm(%3, %9, %10) bf16[2,3,4] bf16[2,3,4] f32[2,3]  `last`

  %17 = cross_entropy(%12, %2, %14, %15, %16) += f32[1]  `loss`
";

const TRAINING: &str = "\
%2 = parameter bf16[7,4] `table.bf16`
%4 = parameter f32[4] `first.gamma`  frozen
%8 = parameter bf16[4,4] `project.weight.bf16`
%10 = parameter f32[4] `last.gamma`

  %3 = embedding(%0, %2) bf16[2,3,4]  `embedding`
  %5, %6 = rms_norm(%3, %4) bf16[2,3,4] f32[2,3]  `first`

block
  %9 = linear(%5, %8) bf16[2,3,4]  `project`
  %11, %12, %13 = rms_norm(%3, %9, %10) bf16[2,3,4] bf16[2,3,4] f32[2,3]  `last`

  %17, %28, %18 = cross_entropy(%12, %2, %14, %15, %16) += f32[1] bf16[2,3,4] += f32[7,4]  `loss`

block
← %30, %20 = norm_backward(%28, %11, %13, %10) bf16[2,3,4] += f32[4]  `d.last.input`
↻ %38 = norm_apply(%3, %6, %4) bf16[2,3,4]  `again.first`
← %19 = linear_grad_weight(%30, %38) += f32[4,4]  `d.project.weight`
← %33 = linear_grad_input(%30, %8) bf16[2,3,4]  `d.project.input`

← %34 = norm_backward(%33, %30, %3, %6, %4) bf16[2,3,4]  `d.first.input`
← %18 = embedding_backward(%34, %0) += f32[7,4]  `d.embedding.table`

update
↑ %36 = gradient_norm(%18, %19, %20) f32[2]  `gradient_norm`
↑ %1, %21, %24, %2 = adamw(%18, %37, %36) f32[7,4] f32[7,4] f32[7,4] bf16[7,4]  `table.update`
↑ %7, %22, %25, %8 = adamw(%19, %37, %36) f32[4,4] f32[4,4] f32[4,4] bf16[4,4]  `project.weight.update`
↑ %10, %23, %26 = adamw(%20, %37, %36) f32[4] f32[4] f32[4]  `last.gamma.update`
";
