//! What a node's lowering sees and emits.

use cinch_graph::{DType, Dropout, Graph, Node, Role, TensorId, TensorType};
use cinch_plan::{Placement, Plan, Residence};

use super::command::{
    Argument, Command, Exchange, Generated, HostCopy, Kernel, LaunchShape, Product,
};

/// Multiprocessors, for launches whose size is the card's rather than the problem's. A fixed
/// number would do; this one fills the largest cards.
pub const MULTIPROCESSORS: usize = 132;

/// What lowering needs to know of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// Whether it runs what is written for sm_90a.
    pub is_hopper: bool,
    pub multiprocessors: usize,
    /// Which of the ranks of a run it is of.
    pub rank: usize,
}

impl Card {
    /// One that takes only what runs on every card.
    pub const ANY: Self = Self {
        is_hopper: false,
        multiprocessors: MULTIPROCESSORS,
        rank: 0,
    };
    /// The largest Hopper card.
    pub const HOPPER: Self = Self {
        is_hopper: true,
        multiprocessors: MULTIPROCESSORS,
        rank: 0,
    };
}

/// One node being lowered.
pub struct Lowering<'a> {
    pub graph: &'a Graph,
    pub plan: &'a Plan,
    pub node: &'a Node,
    pub index: usize,
    /// Whether accumulators start over.
    pub first_micro: bool,
    pub card: Card,
    commands: Vec<Command>,
}

impl<'a> Lowering<'a> {
    pub fn new(
        graph: &'a Graph,
        plan: &'a Plan,
        index: usize,
        first_micro: bool,
        card: Card,
    ) -> Self {
        Self {
            graph,
            plan,
            node: &graph.nodes[index],
            index,
            first_micro,
            card,
            commands: Vec::new(),
        }
    }

    pub fn finish(self) -> Vec<Command> {
        self.commands
    }

    pub fn place(&self, id: TensorId) -> Placement {
        self.plan.placement(id).unwrap_or(Placement::EMPTY)
    }

    pub fn input_type(&self, input: usize) -> TensorType {
        self.graph.ty(self.node.inputs[input])
    }

    pub fn output_type(&self, output: usize) -> TensorType {
        self.graph.ty(self.node.outputs[output])
    }

    /// The address of an input.
    pub fn input(&self, input: usize) -> u64 {
        self.place(self.node.inputs[input]).offset
    }

    pub fn output(&self, output: usize) -> u64 {
        self.place(self.node.outputs[output]).offset
    }

    /// The input as a kernel argument.
    pub fn input_argument(&self, input: usize) -> Argument {
        Argument::Address(self.input(input))
    }

    /// The output as a kernel argument, in whichever memory it is.
    pub fn output_argument(&self, output: usize) -> Argument {
        let place = self.place(self.node.outputs[output]);
        match place.residence {
            Residence::Arena => Argument::Address(place.offset),
            Residence::Host => Argument::Host(place.offset),
        }
    }

    /// An optional input.
    pub fn optional_input(&self, input: Option<usize>) -> Argument {
        input.map_or(Argument::Null, |i| self.input_argument(i))
    }

    pub fn optional_output(&self, output: Option<usize>) -> Argument {
        output.map_or(Argument::Null, |o| self.output_argument(o))
    }

    /// Whether the output has taken over the input's memory.
    pub fn is_in_place(&self, input: usize, output: usize) -> bool {
        self.input(input) == self.output(output)
    }

    /// Whether a later node reads the output, or it outlives the step.
    pub fn is_read(&self, output: usize) -> bool {
        let id = self.node.outputs[output];
        let later = self.graph.nodes.iter().skip(self.index + 1);
        self.graph.tensor(id).role != Role::Activation
            || later
                .flat_map(|node| &node.inputs)
                .any(|&input| input == id)
    }

    /// Whether nobody reads the input after this node, and it does not outlive the step.
    pub fn is_last_use(&self, input: usize) -> bool {
        let id = self.node.inputs[input];
        let later = self.graph.nodes.iter().skip(self.index + 1);
        let mut read = later.flat_map(|node| &node.inputs);
        self.graph.tensor(id).role == Role::Activation && read.all(|&other| other != id)
    }

    /// Whether an accumulator is added to (1) or starts over (0), as a kernel argument.
    pub fn adds(&self, output: usize) -> bool {
        let tensor = self.graph.tensor(self.node.outputs[output]);
        let starts = self.first_micro && self.plan.is_first_write(self.index, output);
        tensor.role.is_accumulator() && !starts
    }

    /// The workspace: address and bytes.
    pub fn workspace(&self) -> (u64, u64) {
        let place = self.plan.workspace(self.index);
        place.map_or((0, 0), |place| (place.offset, place.bytes))
    }

    /// The element type of activations.
    pub fn compute(&self) -> DType {
        self.graph.compute
    }

    /// The three arguments that kernels with dropout take: the random state's address (or null),
    /// the stream, and the threshold below which a random word drops its element.
    pub fn dropout_arguments(
        &self,
        dropout: Option<Dropout>,
        input: Option<usize>,
    ) -> [Argument; 3] {
        match (dropout, input) {
            (Some(dropout), Some(input)) => [
                self.input_argument(input),
                Argument::Stream(dropout.stream),
                Argument::U32(Dropout::threshold(dropout.rate)),
            ],
            _ => [Argument::Null, Argument::Stream(0), Argument::U32(0)],
        }
    }

    pub fn launch(&mut self, kernel: Kernel, shape: LaunchShape, arguments: Vec<Argument>) {
        self.commands.push(Command::Launch {
            kernel,
            shape,
            arguments,
        });
    }

    pub fn launch_generated(
        &mut self,
        kernel: Generated,
        shape: LaunchShape,
        arguments: Vec<Argument>,
    ) {
        self.commands.push(Command::LaunchGenerated {
            kernel,
            shape,
            arguments,
        });
    }

    pub fn launch_table(
        &mut self,
        kernel: Kernel,
        shape: LaunchShape,
        table: Box<[u32]>,
        arguments: Vec<Argument>,
    ) {
        self.commands.push(Command::LaunchTable {
            kernel,
            shape,
            table,
            arguments,
        });
    }

    pub fn product(&mut self, product: Product) {
        self.commands.push(Command::Product(product));
    }

    pub fn command(&mut self, command: Command) {
        self.commands.push(command);
    }

    pub fn clear(&mut self, address: u64, bytes: u64) {
        self.commands.push(Command::Clear { address, bytes });
    }

    /// Clears what later nodes read beyond the ends of the outputs.
    pub fn clear_beyond(&mut self) {
        for &id in &self.node.outputs {
            if let Some(beyond) = self.plan.beyond(id) {
                self.clear(beyond.offset, beyond.bytes);
            }
        }
    }

    /// Copies all inputs, which are in host memory, to the outputs.
    pub fn fetch(&mut self) {
        let copies = self.copies([Residence::Host, Residence::Arena]);
        self.commands.push(Command::Fetch(copies));
    }

    /// Copies all inputs to the outputs, which are in host memory.
    pub fn store(&mut self) {
        let copies = self.copies([Residence::Arena, Residence::Host]);
        self.commands.push(Command::Store(copies));
    }

    /// Of each input to its output, from one memory to the other.
    fn copies(&self, residences: [Residence; 2]) -> Vec<HostCopy> {
        let pairs = self.node.inputs.iter().zip(&self.node.outputs);
        let copies = pairs.map(|(&from, &to)| {
            let (from, to) = (self.place(from), self.place(to));
            debug_assert_eq!([from.residence, to.residence], residences);
            debug_assert_eq!(from.bytes, to.bytes);
            HostCopy {
                from: from.offset,
                to: to.offset,
                bytes: to.bytes,
            }
        });
        copies.collect()
    }

    pub fn exchange(&mut self, exchanges: Vec<Exchange>) {
        self.commands.push(Command::Exchange(exchanges));
    }

    pub fn copy(&mut self, from: u64, to: u64, bytes: u64) {
        if from != to {
            self.commands.push(Command::Copy { from, to, bytes });
        }
    }
}
