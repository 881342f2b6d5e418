use super::*;
use crate::cuda::command::Lane;
use crate::cuda::op::Memory;

fn matrix(address: u64, row_stride: usize, dtype: DType, transposed: bool) -> MatrixAt {
    MatrixAt {
        address,
        row_stride,
        dtype,
        transposed,
    }
}

/// `C[m, n] = Aᵀ·B` over 16 rows of bf16; C is fp32, with scratch memory behind everything.
fn weight([a, b, c]: [u64; 3], m: usize, n: usize) -> Product {
    Product {
        m,
        n,
        k: 16,
        a: matrix(a, m, DType::Bf16, true),
        b: matrix(b, n, DType::Bf16, false),
        c: matrix(c, n, DType::F32, false),
        scale: 0.5,
        accumulate: false,
        bias: None,
        workspace: 0xf0000,
        workspace_bytes: 256,
    }
}

/// `C[16, n] = A[16, k]·B[k, n]`.
fn plain([a, b, c]: [u64; 3], n: usize, k: usize) -> Product {
    Product {
        m: 16,
        n,
        k,
        a: matrix(a, k, DType::Bf16, false),
        b: matrix(b, n, DType::Bf16, false),
        c: matrix(c, n, DType::Bf16, false),
        ..weight([a, b, c], 16, n)
    }
}

fn lowered(products: &[Product]) -> Vec<Lowered> {
    let node = |product: &Product| Lowered {
        op: "linear_grad_weight",
        node: String::new(),
        commands: vec![Command::Product(*product)],
        memory: Memory::default(),
        tail: None,
    };
    products.iter().map(node).collect()
}

/// How many products each node has to compute after joining.
fn joined(products: &[Product]) -> Vec<usize> {
    let mut lowered = lowered(products);
    join(&mut lowered);
    lowered.iter().map(count).collect()
}

fn count(lowered: &Lowered) -> usize {
    let each = lowered.commands.iter().map(|command| match command {
        Command::Products { products, .. } => products.len(),
        _ => 1,
    });
    each.sum()
}

// As an adapter's backward has them: dy, x, what is between (low), and its gradient.
const DY: u64 = 0x1000;
const X: u64 = 0x2000;
const LOW: u64 = 0x3000;
const LOW_GRADIENT: u64 = 0x4000;
const UP: u64 = 0x5000;
const DOWN: u64 = 0x6000;
const UP_GRADIENT: u64 = 0x7000;
const DOWN_GRADIENT: u64 = 0x8000;
const DX: u64 = 0x9000;

fn adapter() -> [Product; 4] {
    [
        weight([DY, LOW, UP_GRADIENT], 32, 8),
        plain([DY, UP, LOW_GRADIENT], 8, 32),
        plain([LOW_GRADIENT, DOWN, DX], 32, 8),
        weight([LOW_GRADIENT, X, DOWN_GRADIENT], 8, 32),
    ]
}

#[test]
fn both_gradients_of_an_adapter_are_computed_once_the_second_can_be() {
    assert_eq!(joined(&adapter()), [0, 3, 1, 0]);
}

#[test]
fn what_is_overwritten_in_between_is_read_before() {
    // The next result lies where `low` was, so that the first gradient cannot come later.
    let mut products = adapter();
    products[1].c.address = LOW;
    products[2].a.address = LOW;
    products[3].a.address = LOW;
    assert_eq!(joined(&products), [1; 4]);
    // The same by scratch memory.
    let mut products = adapter();
    products[1].workspace = LOW;
    assert_eq!(joined(&products), [1; 4]);
    // What comes after the second gradient does not matter to the first.
    let mut products = adapter();
    products[2].c.address = LOW;
    assert_eq!(joined(&products), [0, 3, 1, 0]);
}

#[test]
fn other_commands_and_wide_gradients_are_left_as_they_are() {
    let mut nodes = lowered(&adapter());
    let clear = |address| Command::Clear { address, bytes: 1 };
    nodes[1].commands.insert(0, clear(0));
    join(&mut nodes);
    assert!(nodes[0].commands.is_empty());
    let mut nodes = lowered(&adapter());
    nodes[1].commands.insert(0, clear(LOW));
    join(&mut nodes);
    assert_eq!(count(&nodes[0]), 1);
    let mut nodes = lowered(&adapter());
    nodes[1].commands.push(Command::Copy {
        from: 0,
        to: LOW,
        bytes: 1,
    });
    nodes[1].memory.writes = vec![(LOW, LOW + 1)];
    join(&mut nodes);
    assert_eq!(count(&nodes[0]), 1);
    let mut nodes = lowered(&adapter());
    nodes[1].commands.push(Command::Await {
        lane: Lane::Fetches,
        number: 0,
    });
    join(&mut nodes);
    assert_eq!(count(&nodes[0]), 1);
    let mut wide = adapter();
    wide[0].m = NARROW + 1;
    wide[0].n = NARROW + 1;
    assert_eq!(joined(&wide), [1; 4]);
}

#[test]
fn only_what_the_kernel_takes_is_launched() {
    let [first, _, _, second] = adapter();
    let both = [first, second];
    assert_eq!(launches(&both, Card::ANY).len(), 0);
    let launched = launches(&both, Card::HOPPER);
    // The sum over 16 rows is too short to be cut.
    let [launch] = &launched[..] else {
        panic!("{launched:?}");
    };
    let (function, blocks, table, arguments) = launch_of(launch);
    assert_eq!((function, blocks), ("gradients", 2));
    let half = 0.5_f32.to_bits();
    assert_eq!(table[..10], [2, 32, 8, 8, 0, 1, 1, half, 0, 1]);
    assert_eq!(table[10..19], [8, 32, 32, 1, 1, 1, half, 0, 1]);
    assert_eq!(table.len(), 1 + 9 * MAX_PRODUCTS);
    assert_eq!(arguments.len(), 3 * MAX_PRODUCTS);
    let mut unaligned = both;
    unaligned[0].a.address += 2;
    assert_eq!(launches(&unaligned, Card::HOPPER).len(), 0);
}

fn launch_of(command: &Command) -> (&'static str, u32, &[u32], &[Argument]) {
    let Command::LaunchTable {
        kernel,
        shape,
        table,
        arguments,
    } = command
    else {
        panic!("{command:?}");
    };
    (kernel.function, shape.grid[0], table, arguments)
}

/// Of a sum over 2048 rows, until the parts fill a card of 132 multiprocessors with two blocks each.
#[test]
fn long_sums_are_cut_where_tiles_are_few() {
    let found = |m: usize, n: usize, k: usize| -> Vec<(&str, u32)> {
        let product = Product {
            k,
            ..weight([DY, X, UP_GRADIENT], m, n)
        };
        let launched = launches(&[product], Card::HOPPER);
        let each = launched.iter().map(launch_of);
        each.map(|(function, blocks, ..)| (function, blocks))
            .collect()
    };
    let two_tiles = [
        ("gradients_8", 16),
        ("gradients_4", 8),
        ("gradients_2", 4),
        ("gradients", 2),
    ];
    assert_eq!(found(256, 128, 2048), two_tiles);
    assert_eq!(found(256, 128, 2047), two_tiles);
    assert_eq!(found(256, 128, 1984), two_tiles[1..]);
    assert_eq!(found(256, 128, 511), two_tiles[2..]);
    assert_eq!(found(256, 128, 448), two_tiles[3..]);
    let full = [("gradients_2", 272), ("gradients", 136)];
    assert_eq!(found(1024, 2112, 2048), full);
    assert_eq!(
        found(1024, 2048, 2048),
        [
            ("gradients_4", 512),
            ("gradients_2", 256),
            ("gradients", 128)
        ]
    );
    assert_eq!(found(8192, 1024, 2048), [("gradients", 512)]);
}
