//! What each tensor of a graph holds, as a name of the computation that made it: two tensors
//! with one name are equal, however often and wherever they were computed.

use std::collections::HashMap;

use cinch_graph::op::{
    ActivationBackward, GatedBackward, NormBackward, NormKind, Op, Scan, ValueAgain,
};
use cinch_graph::{Graph, Node, Phase, TensorId};

/// A computation: an op and the values that it read.
type Computation = (String, Vec<usize>);

#[derive(Default)]
pub struct Values {
    /// The value of each tensor of the graph at hand.
    of: HashMap<TensorId, usize>,
    numbers: HashMap<(usize, usize), usize>,
    computations: HashMap<Computation, usize>,
    norms: HashMap<usize, NormValue>,
}

/// A norm's y, by the value of its rstd: what [`Op::NormApply`] computes again.
struct NormValue {
    source: usize,
    mean: Option<usize>,
    parameters: Vec<usize>,
    y: usize,
}

impl Values {
    /// The name of each node of the backward and the update, with the values that it reads, by
    /// name. Graphs of one model agree on their inputs' ids, so one numbering serves them all.
    pub fn backward_reads(&mut self, graph: &Graph) -> Vec<(String, Vec<usize>)> {
        self.of.clear();
        let mut reads = Vec::new();
        for node in &apart(graph) {
            if matches!(node.phase, Phase::Backward | Phase::Update) {
                reads.push((node.name.clone(), self.read(node)));
            }
            self.run(graph, node);
        }
        reads.sort();
        reads
    }

    /// For each of the chosen nodes, in the order of their names: which computations have written
    /// its first input, by their values, in the order of writing.
    pub fn written_by(
        &mut self,
        graph: &Graph,
        chosen: impl Fn(&Node) -> bool,
    ) -> Vec<(String, Vec<usize>)> {
        self.of.clear();
        let mut written: HashMap<TensorId, Vec<usize>> = HashMap::new();
        let mut found = Vec::new();
        for node in &apart(graph) {
            if chosen(node) {
                let made = written.get(&node.inputs[0]).cloned().unwrap_or_default();
                found.push((node.name.clone(), made));
            }
            let computation = (kernel(&node.op), self.read(node));
            self.run(graph, node);
            let Some(&computation) = self.computations.get(&computation) else {
                continue;
            };
            for (output, &id) in node.outputs.iter().enumerate() {
                let value = self.number(computation, output);
                written.entry(id).or_default().push(value);
            }
        }
        found.sort();
        found
    }

    fn read(&mut self, node: &Node) -> Vec<usize> {
        node.inputs.iter().map(|&id| self.value(id)).collect()
    }

    fn value(&mut self, id: TensorId) -> usize {
        match self.of.get(&id) {
            Some(&value) => value,
            // Inputs are named by themselves, under a computation that no node has.
            None => self.number(usize::MAX, id.index()),
        }
    }

    fn number(&mut self, computation: usize, output: usize) -> usize {
        let next = self.numbers.len();
        *self.numbers.entry((computation, output)).or_insert(next)
    }

    fn run(&mut self, graph: &Graph, node: &Node) {
        let inputs = self.read(node);
        if matches!(node.op, Op::Store(_) | Op::Fetch(_)) {
            // The same numbers in another memory.
            self.of.extend(node.outputs.iter().copied().zip(inputs));
            return;
        }
        if let Op::NormApply(op) = &node.op {
            let layer = op.kind == NormKind::Layer;
            let rstd = inputs[1 + usize::from(layer)];
            let norm = &self.norms[&rstd];
            assert_eq!(inputs[0], norm.source, "{}", node.name);
            assert_eq!(layer.then(|| inputs[1]), norm.mean, "{}", node.name);
            assert_eq!(inputs[2 + usize::from(layer)..], norm.parameters);
            self.of.insert(node.outputs[0], norm.y);
            return;
        }
        let next = self.computations.len();
        let computation = (kernel(&node.op), inputs.clone());
        let computation = *self.computations.entry(computation).or_insert(next);
        for (output, &id) in node.outputs.iter().enumerate() {
            // Several nodes add to an accumulator: it has no value of one computation.
            if !graph.tensor(id).role.is_persistent() {
                let value = self.number(computation, output);
                self.of.insert(id, value);
            }
        }
        if let Op::Norm(op) = &node.op {
            let layout = op.layout();
            let source = if op.residual {
                self.value(node.outputs[0])
            } else {
                inputs[0]
            };
            let gamma = [inputs[layout.gamma]];
            let value = NormValue {
                source,
                mean: layout.mean.map(|i| self.value(node.outputs[i])),
                parameters: gamma
                    .into_iter()
                    .chain(layout.beta.map(|i| inputs[i]))
                    .collect(),
                y: self.value(node.outputs[layout.y]),
            };
            let rstd = self.value(node.outputs[layout.rstd]);
            self.norms.insert(rstd, value);
        }
    }
}

/// The nodes, with those that write a forward's value besides as two: what gives the value, and
/// what does the rest.
fn apart(graph: &Graph) -> Vec<Node> {
    let mut nodes = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let Some((op, again)) = without_value(&node.op) else {
            nodes.push(node.clone());
            continue;
        };
        let mut plain = node.clone();
        let value = plain.outputs.remove(again.output);
        let lacking = again.inputs.iter().filter(|input| input.is_none()).count();
        let mut more = plain
            .inputs
            .split_off(plain.inputs.len() - lacking)
            .into_iter();
        let inputs = again.inputs.iter().map(|input| match input {
            Some(input) => plain.inputs[*input],
            None => more.next().unwrap(),
        });
        nodes.push(Node {
            op: again.recipe,
            inputs: inputs.collect(),
            outputs: vec![value],
            phase: Phase::Recompute,
            ..node.clone()
        });
        nodes.push(Node { op, ..plain });
    }
    nodes
}

/// The op without its forward's value, and how it would write that again.
fn without_value(op: &Op) -> Option<(Op, ValueAgain)> {
    let op: Op = match op.clone() {
        Op::ActivationBackward(op) if op.value => ActivationBackward { value: false, ..op }.into(),
        Op::GatedBackward(op) if op.value => GatedBackward { value: false, ..op }.into(),
        Op::NormBackward(op) if op.value => NormBackward { value: false, ..op }.into(),
        _ => return None,
    };
    let again = op.declaration().value_again()?;
    Some((op, again))
}

/// The op with its settings; a scan computes the same whether or not it keeps its states.
fn kernel(op: &Op) -> String {
    match op {
        Op::Scan(scan) => {
            let keeping = Scan {
                keep_states: true,
                ..scan.clone()
            };
            format!("{keeping:?}")
        }
        op => format!("{op:?}"),
    }
}
