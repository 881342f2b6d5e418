//! Graphs of expressions: every way to read a tensor, every function, every reduction.

use cinch_graph::expression::Expr;
use cinch_graph::op::{Joined, Over, ReduceKind};
use cinch_graph::{Count, DType, Graph, GraphError, Init, TensorId};

use super::{BATCH, SEQ, finish, linear, start};

const WIDTH: usize = 12;

/// Whole tensors, parameters among them, rows, columns, groups, positions, sequences and single
/// numbers, with dropout, in place and not.
pub fn broadcasts(compute: DType) -> Result<Graph, GraphError> {
    let mut g = Graph::new(compute);
    let x = start(&mut g, WIDTH)?;
    g.enter_block("gates");
    let gate = linear(&mut g, "gate", x, WIDTH)?;
    let up = linear(&mut g, "up", x, WIDTH)?;
    let dropout = g.dropout(0.2);
    let gated = g.map("gated", &[gate, up], |v| {
        (v[0].silu() * &v[1]).dropout(dropout)
    })?;
    let scale = g.small_weight("scale", [WIDTH], Init::Ones);
    let shift = g.small_weight("shift", [WIDTH], Init::Zeros);
    let single = g.small_weight("single", [1], Init::Ones);
    let x = g.map("scaled", &[gated, scale, shift, single, x], |v| {
        &v[0] * &v[1] + &v[2] + &v[3] * &v[4]
    })?;
    g.leave_block();
    g.enter_block("mixing");
    let groups = linear(&mut g, "groups", x, 3)?;
    let base = g.small_weight("base", [3], Init::Ones);
    let share = g.map("share", &[groups, base], |v| v[0].sigmoid() * &v[1])?;
    let z = linear(&mut g, "z", x, WIDTH)?;
    let x = g.map("mixed", &[x, z, share], |v| &v[0] + (&v[1] - &v[0]) * &v[2])?;
    g.leave_block();
    let tokens = g.find("tokens").expect("every graph begins with tokens");
    let places = g.small_weight("places", [SEQ, WIDTH], Init::Zeros);
    let whole = g.weight("whole", [BATCH, SEQ, WIDTH], Init::Normal { std: 0.02 });
    let x = g.map("placed", &[x, places, whole, tokens], |v| {
        &v[0] + &v[1] * 0.5 + &v[2] * &v[0] + &v[3] * 0.01
    })?;
    let kind = (ReduceKind::Sum, Over::Sequence, compute);
    let pooled = g.reduce("pooled", kind, &[x], |v| v[0].square() / SEQ as f64)?;
    let pooled = g.view("pooled.rows", pooled, [BATCH, 1, WIDTH])?;
    let x = g.map("with_pooled", &[x, pooled], |v| {
        v[0].where_less(&v[1], &v[0] * 2.0, &v[0] - &v[1]) + v[0].column() * 0.01
    })?;
    let x = linear(&mut g, "last", x, WIDTH)?;
    finish(&mut g, x)?;
    Ok(g)
}

/// Functions of one number, a few to an expression: each is a kernel to compile.
type Functions = fn(&Expr) -> Expr;

const FUNCTIONS: [(&str, Functions); 4] = [
    ("exponentials", |x| {
        x.exp() * 0.2 + x.sigmoid() - x.tanh() * 0.3 + x.softplus() + (x.square() + 0.3).ln()
    }),
    ("roots", |x| {
        (x.square() + 0.2).sqrt() - (x.square() + 0.4).rsqrt() + x / (x.square() + 1.0)
    }),
    ("activations", |x| {
        x.silu() + x.gelu() * 0.7 - x.gelu_tanh() * 0.3 + x.relu() - x.abs() * 0.4
            + x.clamp(-0.3, 0.4)
            + x.min(0.2)
            - x.max(-0.1) * 0.3
            + x.where_less(0.1, x.exp(), x.square())
    }),
    ("hyperbolas", |x| {
        x.cosh() - x.sinh() * 0.4 + (x.square() + 1.3).acosh()
    }),
];

/// Every function; what is detached is in the tests of expressions, because differences do not
/// tell it apart.
pub fn functions(compute: DType) -> Result<Graph, GraphError> {
    let mut g = Graph::new(compute);
    let x = start(&mut g, 7)?;
    let mut sum = linear(&mut g, "first", x, 7)?;
    g.enter_block("functions");
    for (name, function) in FUNCTIONS {
        let scale = g.small_weight(&format!("{name}.scale"), [7], Init::Ones);
        sum = g.map(name, &[x, scale, sum], |v| {
            function(&(&v[0] * &v[1])) * 0.3 + &v[2]
        })?;
    }
    g.leave_block();
    let x = linear(&mut g, "last", sum, 7)?;
    finish(&mut g, x)?;
    Ok(g)
}

/// Row norms, Lorentz coordinates, a softmax and its entropy by hand, tensors joined and cut
/// apart, and a second term of the loss.
pub fn reductions(compute: DType) -> Result<Graph, GraphError> {
    let mut g = Graph::new(compute);
    let x = start(&mut g, WIDTH)?;
    g.enter_block("reductions");
    let v = linear(&mut g, "v", x, WIDTH)?;
    let squares = g.sum("squares", Over::Columns, &[v], |v| v[0].square())?;
    let norm = g.map("norm", &[squares], |v| v[0].max(1e-16).sqrt())?;
    let rows = [BATCH, SEQ, 1];
    let first = g.map("first", &[norm], |v| v[0].cosh())?;
    let first = g.view("first.column", first, rows)?;
    let first = cast(&mut g, "first.cast", first, compute)?;
    let rest = g.map("rest", &[v, norm], |v| v[1].sinh() / &v[1] * &v[0])?;
    let lorentz = g.concat("lorentz", Joined::Columns, &[first, rest])?;
    let parts = g.split("parts", Joined::Columns, lorentz, &[5, 2, 6])?;
    let scores = linear(&mut g, "scores", parts[0], 8)?;
    let largest = g.max("largest", Over::Columns, &[scores], |v| v[0].clone())?;
    let total = g.sum("total", Over::Columns, &[scores, largest], |v| {
        (&v[0] - v[1].detach()).exp()
    })?;
    let entropy = g.sum("entropy", Over::Columns, &[scores, largest, total], |v| {
        let share = (&v[0] - v[1].detach()).exp() / &v[2];
        -(&share * share.ln())
    })?;
    let means = g.mean("means", Over::Groups(2), &[scores], |v| v[0].tanh())?;
    let table = g.mean("table.mean", Over::Rows, &[scores], |v| v[0].square())?;
    let all = g.sum("all", Over::All, &[means], |v| v[0].square() * 0.05)?;
    let half = g.map("half", &[scores, entropy, means, table, all], |v| {
        &v[0] * &v[1] + &v[2] * &v[3] + &v[4]
    })?;
    g.leave_block();
    let joined = g.concat("joined", Joined::Columns, &[half, parts[2]])?;
    let stacked = g.concat("stacked", Joined::Rows, &[joined, joined])?;
    let halves = g.split("halves", Joined::Rows, stacked, &[BATCH, BATCH])?;
    let x = linear(&mut g, "last", halves[1], WIDTH)?;
    finish(&mut g, x)?;
    g.loss_term("penalty", Count::Rows(BATCH * SEQ), &[entropy], |v| {
        v[0].square()
    })?;
    g.weigh_term("penalty", 0.1);
    Ok(g)
}

/// The same numbers in another type.
fn cast(g: &mut Graph, name: &str, x: TensorId, dtype: DType) -> Result<TensorId, GraphError> {
    let shape = g.ty(x).shape;
    let domain = cinch_graph::op::Domain { shape, dtype };
    g.map_over(name, domain, &[x], |v| v[0].clone())
}
