//! A card's commands on the host: kernels as PTX, one instruction after the other, with every access
//! checked; the library's products as sums. Nothing is known of speed, so that each of several ways
//! is taken.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use cinch_engine::MicroBatch;
use cinch_engine::cuda::command::{
    Argument, Command, LaunchShape, MatrixAt, MatrixMapAt, Product, TensorMapAt,
};
use cinch_engine::cuda::compile::{generated_ptx, is_available, ptx};
use cinch_engine::cuda::lowering::Card;
use cinch_engine::cuda::op::{joined, lower_all};
use cinch_graph::{DType, Graph, Target, aligned};
use cinch_plan::{Placement, Plan};
use cinch_ptx::{Launch, Memory, Module, Region, TensorMap};

use crate::device::Device;
use crate::real::{decode, encode};

/// Where the arena is to kernels.
const BASE: u64 = 0x7000_0000_0000;

/// Whether there is anything to make PTX with.
pub fn is_possible() -> bool {
    is_available()
}

#[derive(Clone)]
struct Part {
    commands: Vec<Command>,
    regions: Vec<Region>,
    dtype: DType,
    /// The first node.
    node: usize,
}

pub struct OnHost {
    arena: Vec<u8>,
    parts: Vec<Part>,
    card: Card,
    /// Which of several ways is taken, where there are so many.
    way: usize,
    /// How many there were at the most, by the first node of what ran.
    pub ways: HashMap<usize, usize>,
    /// That node, of what runs now.
    node: usize,
    /// What went wrong without an end.
    pub conflicts: Vec<String>,
}

/// What a source is found by: its name or, where it was made for an op, its text.
type Source = (String, DType, &'static str);

/// A source's kernels, which are made once.
fn module(source: Source, make: impl FnOnce(&'static str, &Path) -> Vec<u8>) -> Arc<Module> {
    static MODULES: Mutex<Option<HashMap<Source, Arc<Module>>>> = Mutex::new(None);
    let modules = || MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = modules().get_or_insert_default().get(&source).cloned();
    known.unwrap_or_else(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let text = make(source.2, folder);
        let text = String::from_utf8(text).unwrap();
        let module = Arc::new(cinch_ptx::parse(&text).unwrap());
        modules()
            .get_or_insert_default()
            .insert(source, module.clone());
        module
    })
}

impl OnHost {
    pub fn new(arena_bytes: u64, card: Card, way: usize) -> Self {
        Self {
            // As the executor allocates it.
            arena: vec![0; arena_bytes as usize],
            parts: Vec::new(),
            card,
            way,
            ways: HashMap::new(),
            node: 0,
            conflicts: Vec::new(),
        }
    }

    /// Whether something has another way besides so many.
    pub fn has_more_ways(&self, known: usize) -> bool {
        self.ways.values().any(|&ways| ways > known)
    }

    fn note_ways(&mut self, count: usize) {
        let most = self.ways.entry(self.node).or_default();
        *most = count.max(*most);
    }

    fn architecture(&self) -> &'static str {
        if self.card.is_hopper {
            "sm_90"
        } else {
            "sm_80"
        }
    }

    fn bytes(&mut self, address: u64, bytes: u64) -> &mut [u8] {
        &mut self.arena[address as usize..(address + bytes) as usize]
    }

    fn issue(&mut self, command: &Command, dtype: DType, regions: &[Region]) {
        match command {
            Command::Launch {
                kernel,
                shape,
                arguments,
            } => {
                let module = self.kernels(kernel.file, dtype);
                self.launch(&module, kernel.function, shape, None, arguments, regions);
            }
            Command::LaunchTable {
                kernel,
                shape,
                table,
                arguments,
            } => {
                let module = self.kernels(kernel.file, dtype);
                let table = Some(&**table);
                self.launch(&module, kernel.function, shape, table, arguments, regions);
            }
            Command::LaunchGenerated {
                kernel,
                shape,
                arguments,
            } => {
                let source = (kernel.source.to_string(), dtype, self.architecture());
                let module = module(source, |architecture, folder| {
                    generated_ptx(&kernel.source, dtype, architecture, folder).unwrap()
                });
                self.launch(&module, kernel.function, shape, None, arguments, regions);
            }
            Command::Product(product) => self.multiply(product),
            Command::Products {
                joined,
                heads,
                products,
                tails,
            } => {
                let ways = joined::ways(*joined, products, tails, self.card);
                self.note_ways(1 + ways.len());
                if let Some(way) = self.way.checked_sub(1).and_then(|way| ways.get(way)) {
                    self.issue_all(way, dtype, regions);
                } else {
                    self.issue_all(heads, dtype, regions);
                    products.iter().for_each(|product| self.multiply(product));
                    for tail in tails {
                        self.issue(&tail.command, dtype, regions);
                    }
                }
            }
            Command::Ways(ways) => {
                self.note_ways(ways.len());
                let way = ways.get(self.way).or_else(|| ways.last()).unwrap();
                self.issue_all(way, dtype, regions);
            }
            &Command::Clear { address, bytes } => self.bytes(address, bytes).fill(0),
            &Command::Copy { from, to, bytes } => {
                let (from, to) = (from as usize, to as usize);
                self.arena.copy_within(from..from + bytes as usize, to);
            }
            Command::Beside { commands, .. } => self.issue_all(commands, dtype, regions),
            Command::Await { .. } => {}
            Command::Fetch(_) | Command::Store(_) | Command::Exchange(_) => {
                panic!("neither host memory nor other ranks are there")
            }
        }
    }

    /// Whether some way has a kernel.
    fn launches(&self, command: &Command) -> bool {
        let any = |commands: &[Command]| commands.iter().any(|command| self.launches(command));
        match command {
            Command::Launch { .. }
            | Command::LaunchTable { .. }
            | Command::LaunchGenerated { .. } => true,
            Command::Products {
                joined,
                heads,
                products,
                tails,
            } => {
                any(heads)
                    || tails.iter().any(|tail| self.launches(&tail.command))
                    || !joined::ways(*joined, products, tails, self.card).is_empty()
            }
            Command::Ways(ways) => ways.iter().any(|way| any(way)),
            Command::Beside { commands, .. } => any(commands),
            _ => false,
        }
    }

    fn issue_all(&mut self, commands: &[Command], dtype: DType, regions: &[Region]) {
        for command in commands {
            self.issue(command, dtype, regions);
        }
    }

    fn kernels(&self, file: &'static str, dtype: DType) -> Arc<Module> {
        let source = (file.to_owned(), dtype, self.architecture());
        module(source, |architecture, folder| {
            ptx(file, dtype, architecture, folder).unwrap()
        })
    }

    fn launch(
        &mut self,
        module: &Module,
        function: &str,
        shape: &LaunchShape,
        table: Option<&[u32]>,
        arguments: &[Argument],
        regions: &[Region],
    ) {
        let words = |table: &[u32]| table.iter().flat_map(|word| word.to_le_bytes()).collect();
        let table = table.map(|table| cinch_ptx::Argument::Bytes(words(table)));
        let given: Vec<_> = table
            .into_iter()
            .chain(arguments.iter().map(argument))
            .collect();
        let launch = Launch {
            module,
            kernel: function,
            grid: shape.grid,
            block: shape.block,
            shared_bytes: shape.shared_bytes,
            arguments: &given,
        };
        let mut memory = Memory::new(&mut self.arena, BASE, regions.to_vec());
        let conflicts = cinch_ptx::run(&launch, &mut memory)
            .unwrap_or_else(|error| panic!("{function} with {arguments:?}: {error}"));
        self.conflicts.extend(conflicts);
    }

    /// As the library computes it.
    fn multiply(&mut self, product: &Product) {
        let Product { m, n, k, .. } = *product;
        let a = self.matrix(&product.a, m, k);
        let b = self.matrix(&product.b, k, n);
        let c = &product.c;
        assert!(!c.transposed);
        let size = c.dtype.size();
        let bias = product.bias.map(|bias| {
            let bytes = self.bytes(bias.copied, n as u64 * size);
            decode(bytes, c.dtype)
        });
        for (row, a) in a.chunks_exact(k.max(1)).enumerate().take(m) {
            let mut sums = vec![0.0_f32; n];
            for (a, b) in a.iter().zip(b.chunks_exact(n)) {
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum += a * b;
                }
            }
            let address = c.address + (row * c.row_stride) as u64 * size;
            let place = self.bytes(address, n as u64 * size);
            let before = decode(place, c.dtype);
            for (column, sum) in sums.iter_mut().enumerate() {
                *sum *= product.scale;
                *sum += bias.as_ref().map_or(0.0, |bias| bias[column]);
                if product.accumulate {
                    *sum += before[column];
                }
            }
            place.copy_from_slice(&encode(&sums, c.dtype));
        }
    }

    /// By rows.
    fn matrix(&mut self, at: &MatrixAt, rows: usize, columns: usize) -> Vec<f32> {
        let (outer, inner) = match at.transposed {
            true => (columns, rows),
            false => (rows, columns),
        };
        let size = at.dtype.size();
        let lines: Vec<Vec<f32>> = (0..outer)
            .map(|line| {
                let address = at.address + (line * at.row_stride) as u64 * size;
                decode(self.bytes(address, inner as u64 * size), at.dtype)
            })
            .collect();
        if !at.transposed {
            return lines.concat();
        }
        let column = |row: usize| lines.iter().map(move |line| line[row]);
        (0..rows).flat_map(column).collect()
    }
}

/// What some nodes may read and write. Up to the next tensor's place, and as far as an op says that
/// it reads, there are zeros, which may be read.
fn regions(graph: &Graph, plan: &Plan, nodes: Range<usize>) -> Vec<Region> {
    let mut regions = Vec::new();
    let mut add = |offset: u64, bytes: u64, is_written: bool| {
        regions.push(Region {
            bytes: BASE + offset..BASE + offset + bytes,
            is_written,
        });
    };
    for index in nodes {
        let node = &graph.nodes[index];
        for &id in &node.outputs {
            let place = plan.placement(id).unwrap();
            let beyond = plan
                .beyond(id)
                .map_or(place.bytes, |beyond| beyond.end() - place.offset);
            add(place.offset, beyond.max(place.bytes), true);
            add(place.offset, aligned(place.bytes), false);
        }
        for (input, &id) in node.inputs.iter().enumerate() {
            let place = plan.placement(id).unwrap();
            let reach = node
                .op
                .declaration()
                .reach(input, &graph.ty(id), Target::Cuda);
            add(place.offset, aligned(place.bytes).max(reach), false);
        }
        if let Some(place) = plan.workspace(index) {
            add(place.offset, place.bytes, true);
        }
    }
    regions
}

fn argument(argument: &Argument) -> cinch_ptx::Argument {
    let bytes = |bytes: &[u8]| cinch_ptx::Argument::Bytes(bytes.to_vec());
    match argument {
        Argument::Address(offset) => bytes(&(BASE + offset).to_le_bytes()),
        Argument::Null => bytes(&0_u64.to_le_bytes()),
        Argument::I32(value) => bytes(&value.to_le_bytes()),
        Argument::U32(value) | Argument::Stream(value) => bytes(&value.to_le_bytes()),
        Argument::U64(value) => bytes(&value.to_le_bytes()),
        Argument::F32(value) => bytes(&value.to_le_bytes()),
        Argument::TensorMap(at) => cinch_ptx::Argument::Map(tensor_map(at)),
        Argument::MatrixMap(at) => cinch_ptx::Argument::Map(matrix_map(at)),
        Argument::Host(_) => panic!("there is no host memory"),
    }
}

const HALF: usize = 2;

fn tensor_map(at: &TensorMapAt) -> TensorMap {
    let row = at.row_stride * HALF;
    TensorMap {
        address: BASE + at.address,
        sizes: vec![at.columns, at.heads, at.rows, at.batch],
        strides: vec![at.columns * HALF, row, row * at.rows],
        sides: vec![at.columns.min(64), 1, 64, 1],
    }
}

fn matrix_map(at: &MatrixMapAt) -> TensorMap {
    TensorMap {
        address: BASE + at.address,
        sizes: vec![at.columns, at.rows],
        strides: vec![at.row_stride * HALF],
        sides: vec![at.box_columns, at.box_rows],
    }
}

impl Device for OnHost {
    fn prepare(
        &mut self,
        graph: &Graph,
        plan: &Plan,
        nodes: Range<usize>,
        is_first: bool,
    ) -> usize {
        let first = nodes.start;
        let micro = MicroBatch::of_one(is_first);
        let lowered = lower_all(graph, plan, nodes.clone(), micro, self.card);
        let regions = regions(graph, plan, nodes.clone());
        let commands: Vec<Command> = lowered.into_iter().flat_map(|node| node.commands).collect();
        // Large, and here the library's products need none of it.
        let workspaces: Vec<u64> = match commands.iter().any(|command| self.launches(command)) {
            true => Vec::new(),
            false => nodes
                .filter_map(|index| plan.workspace(index))
                .map(|place| BASE + place.offset)
                .collect(),
        };
        // No number, so that whoever uses what was never written shows it.
        for region in regions.iter().filter(|region| region.is_written) {
            let Range { start, end } = region.bytes;
            if !workspaces.contains(&start) {
                self.bytes(start - BASE, end - start).fill(0xff);
            }
        }
        self.parts.push(Part {
            commands,
            regions,
            dtype: graph.compute,
            node: first,
        });
        self.parts.len() - 1
    }

    fn run(&mut self, _: &Graph, _: &Plan, part: usize) {
        let Part {
            commands,
            regions,
            dtype,
            node,
        } = self.parts[part].clone();
        self.node = node;
        self.issue_all(&commands, dtype, &regions);
    }

    fn write(&mut self, place: Placement, bytes: &[u8]) {
        let to = self.bytes(place.offset, bytes.len() as u64);
        to.copy_from_slice(bytes);
    }

    fn read(&mut self, place: Placement) -> Vec<u8> {
        self.bytes(place.offset, place.bytes).to_vec()
    }
}
