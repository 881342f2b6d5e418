//! Which commands of a step run side by side. A step is a chain of commands, each of which waits for
//! the last block of the one before. Gradients of weights, which nobody reads before the backward is
//! over, run beside the chain and take the multiprocessors that it leaves idle.
//!
//! Nothing moves in memory: what a command reads and writes is known, and whoever would disturb one
//! that is under way waits for it. How soon that is depends on the plan, which keeps the places of
//! such gradients free for some nodes where it has room (`Plan::linger`).

use super::command::{Argument, Command, Joined, Lane, Product};
use super::op::joined::{operands, result, scratch};
use super::op::{Bytes, Lowered, Memory};

/// How many pieces ahead are looked through for what needs one.
const WINDOW: usize = 64;

/// What the chain has to do, by estimate, until somebody waits for what runs beside it: less is not
/// worth the waiting for each other.
const LEAST_SECONDS: f64 = 5e-6;

/// Pieces beside the chain in a recording, the longest: the driver keeps memory for each place where
/// lanes part.
const MOST_BESIDE: usize = 128;

/// Commands of a node that stay together.
struct Piece<'a> {
    node: usize,
    commands: &'a [Command],
    memory: Memory,
    /// By estimate.
    seconds: f64,
    is_gradient: bool,
}

/// The same nodes, with gradients of weights beside the chain where nothing needs them soon.
/// `is_launched` tells of joined gradients whether the kernel of ours computes them, which needs no
/// scratch memory.
pub fn spread(lowered: &[Lowered], is_launched: impl Fn(&Command) -> bool) -> Vec<Lowered> {
    let nodes = lowered.iter().enumerate();
    let pieces: Vec<Piece<'_>> = nodes
        .flat_map(|(node, lowered)| pieces(node, lowered, &is_launched))
        .collect();
    let is_beside = beside(&pieces);
    let without_commands = |node: &Lowered| Lowered {
        commands: Vec::new(),
        ..node.clone()
    };
    let mut spread: Vec<Lowered> = lowered.iter().map(without_commands).collect();
    // What runs beside the chain and was not waited for, in the order of its lane.
    let mut under_way: Vec<usize> = Vec::new();
    for (number, piece) in pieces.iter().enumerate() {
        let commands = &mut spread[piece.node].commands;
        if is_beside[number] {
            commands.push(Command::Beside {
                lane: Lane::Gradients,
                number,
                commands: piece.commands.to_vec(),
            });
            under_way.push(number);
            continue;
        }
        let mut latest_first = under_way.iter().copied().rev();
        let disturbs = |&other: &usize| conflict(&pieces[other].memory, &piece.memory);
        if let Some(number) = latest_first.find(disturbs) {
            commands.push(awaited(number));
            under_way.retain(|&other| other > number);
        }
        commands.extend_from_slice(piece.commands);
    }
    // A recording ends when everything in it does.
    if let (Some(last), Some(&number)) = (spread.last_mut(), under_way.last()) {
        last.commands.push(awaited(number));
    }
    spread
}

/// Which pieces run beside the chain.
fn beside(pieces: &[Piece<'_>]) -> Vec<bool> {
    let worth = |&number: &usize| {
        pieces[number].is_gradient && seconds_beside(pieces, number) >= LEAST_SECONDS
    };
    let mut chosen: Vec<usize> = (0..pieces.len()).filter(worth).collect();
    chosen.sort_by(|&a, &b| pieces[b].seconds.total_cmp(&pieces[a].seconds));
    let mut is_beside = vec![false; pieces.len()];
    for number in chosen.into_iter().take(MOST_BESIDE) {
        is_beside[number] = true;
    }
    is_beside
}

fn awaited(number: usize) -> Command {
    Command::Await {
        lane: Lane::Gradients,
        number,
    }
}

/// What the chain does until something needs the piece.
fn seconds_beside(pieces: &[Piece<'_>], number: usize) -> f64 {
    let later = pieces[number + 1..].iter().take(WINDOW);
    let free = later.take_while(|later| !conflict(&pieces[number].memory, &later.memory));
    let chain = free.filter(|later| !later.is_gradient);
    chain.map(|later| later.seconds).sum()
}

/// A node in pieces: command by command, but what computes one gradient stays together. Joined
/// gradients are by themselves, because they were put behind another node.
fn pieces<'a>(
    node: usize,
    lowered: &'a Lowered,
    is_launched: &impl Fn(&Command) -> bool,
) -> Vec<Piece<'a>> {
    let is_own =
        |command: &Command| lowered.memory.is_gradient && computes(command) && !is_joined(command);
    let together = |a: &Command, b: &Command| is_own(a) && is_own(b);
    let chunks = lowered.commands.chunk_by(together);
    let with_memory = chunks.map(|commands| {
        let mut memory = Memory::default();
        let mut seconds = 0.0;
        for command in commands {
            let own = touched(command, &lowered.memory, is_launched(command));
            seconds += estimated(command, &own);
            memory.extend(own);
        }
        Piece {
            node,
            commands,
            memory,
            seconds,
            is_gradient: commands.iter().all(|one| is_own(one) || is_joined(one)),
        }
    });
    with_memory.collect()
}

fn is_joined(command: &Command) -> bool {
    let joined = Joined::Gradients;
    matches!(command, Command::Products { joined: own, .. } if *own == joined)
}

/// Whether a command runs on the card's multiprocessors and touches nothing but the arena.
fn computes(command: &Command) -> bool {
    let in_arena = |arguments: &[Argument]| {
        let mut arguments = arguments.iter();
        arguments.all(|argument| !matches!(argument, Argument::Host(_)))
    };
    match command {
        Command::Launch { arguments, .. }
        | Command::LaunchGenerated { arguments, .. }
        | Command::LaunchTable { arguments, .. } => in_arena(arguments),
        Command::Product(_)
        | Command::Products { .. }
        | Command::Clear { .. }
        | Command::Copy { .. } => true,
        Command::Fetch(_)
        | Command::Store(_)
        | Command::Exchange(_)
        | Command::Beside { .. }
        | Command::Await { .. } => false,
    }
}

/// What a command reads and writes of the arena: no more than its node, but for products and what
/// is cleared beyond the end of a tensor.
fn touched(command: &Command, node: &Memory, is_launched: bool) -> Memory {
    let mut memory = Memory::default();
    match command {
        Command::Product(product) => {
            memory.extend(touched_by_product(product));
            memory.writes.push(scratch(product));
        }
        Command::Products {
            heads,
            products,
            tails,
            ..
        } => {
            for product in products {
                memory.extend(touched_by_product(product));
            }
            if !is_launched {
                memory.writes.extend(products.iter().map(scratch));
            }
            if !heads.is_empty() || !tails.is_empty() {
                memory.extend(node.clone());
            }
        }
        &Command::Clear { address, bytes } => memory.writes.push((address, address + bytes)),
        // What it waits for has been waited for before anything that comes later.
        Command::Await { .. } => {}
        Command::Beside { .. } | Command::Exchange(_) => {
            memory.extend(node.clone());
            // Ranks may use what they send as scratch memory.
            memory.writes.extend(node.reads.iter().copied());
        }
        Command::Launch { .. }
        | Command::LaunchGenerated { .. }
        | Command::LaunchTable { .. }
        | Command::Copy { .. }
        | Command::Fetch(_)
        | Command::Store(_) => memory.extend(node.clone()),
    }
    memory
}

fn touched_by_product(product: &Product) -> Memory {
    let mut reads = operands(product).to_vec();
    // In single precision at most.
    let row = 4 * product.n as u64;
    for at in product
        .bias
        .iter()
        .flat_map(|bias| [bias.kept, bias.copied])
    {
        reads.push((at, at + row));
    }
    Memory {
        reads,
        writes: vec![result(product)],
        ..Memory::default()
    }
}

/// Whether two of them in the other order, or at once, would not do the same.
fn conflict(a: &Memory, b: &Memory) -> bool {
    let meet = |a: &[Bytes], b: &[Bytes]| {
        let mut pairs = a.iter().flat_map(|a| b.iter().map(move |b| (a, b)));
        pairs.any(|(a, b)| a.0 < b.1 && b.0 < a.1)
    };
    meet(&a.writes, &b.writes) || meet(&a.writes, &b.reads) || meet(&a.reads, &b.writes)
}

/// Roughly how long a command takes on a large card.
fn estimated(command: &Command, memory: &Memory) -> f64 {
    const FLOPS: f64 = 6e14;
    const BYTES: f64 = 3.5e12;
    const LAUNCH: f64 = 2e-6;
    let multiplied =
        |product: &Product| 2.0 * product.m as f64 * product.n as f64 * product.k as f64 / FLOPS;
    let moved = |ranges: &[Bytes]| {
        let bytes = ranges.iter().map(|range| range.1 - range.0);
        bytes.sum::<u64>() as f64 / BYTES
    };
    match command {
        Command::Product(product) => LAUNCH + multiplied(product),
        Command::Products { products, .. } => LAUNCH + products.iter().map(multiplied).sum::<f64>(),
        Command::Clear { bytes, .. } | Command::Copy { bytes, .. } => {
            LAUNCH + *bytes as f64 / BYTES
        }
        Command::Launch { .. } | Command::LaunchGenerated { .. } | Command::LaunchTable { .. } => {
            LAUNCH + moved(&memory.reads) + moved(&memory.writes)
        }
        _ => 0.0,
    }
}
