use cinch_graph::DType;

use super::*;
use crate::cuda::op::Memory;

fn matrix(address: u64, row_stride: usize, transposed: bool) -> MatrixAt {
    MatrixAt {
        address,
        row_stride,
        dtype: DType::Bf16,
        transposed,
    }
}

/// `C[16, n] (+)= A[16, k]·B[k, n]`, C being columns of a tensor of 64 columns.
fn product([a, b, c]: [u64; 3], n: usize, k: usize, accumulate: bool) -> Product {
    Product {
        m: 16,
        n,
        k,
        a: matrix(a, k, false),
        b: matrix(b, k, true),
        c: matrix(c, 64, false),
        scale: if accumulate { 2.0 } else { 1.0 },
        accumulate,
        bias: None,
        workspace: 0,
        workspace_bytes: 0,
    }
}

fn lowered(products: &[Product]) -> Vec<Lowered> {
    let node = |product: &Product| Lowered {
        op: "linear",
        node: String::new(),
        commands: vec![Command::Product(*product)],
        memory: Memory::default(),
        tail: None,
    };
    products.iter().map(node).collect()
}

/// How many terms each node's sum has after joining; 1 is a product, 0 nothing.
fn joined(products: &[Product]) -> Vec<usize> {
    let mut lowered = lowered(products);
    join(&mut lowered);
    let terms = |lowered: &Lowered| match lowered.commands.last() {
        Some(Command::Products { products, .. }) => products.len(),
        Some(_) => 1,
        None => 0,
    };
    lowered.iter().map(terms).collect()
}

const MAIN: Product = Product {
    m: 16,
    n: 64,
    k: 32,
    a: MatrixAt {
        address: 0,
        row_stride: 32,
        dtype: DType::Bf16,
        transposed: false,
    },
    b: MatrixAt {
        address: 0x1000,
        row_stride: 32,
        dtype: DType::Bf16,
        transposed: true,
    },
    c: MatrixAt {
        address: 0x4000,
        row_stride: 64,
        dtype: DType::Bf16,
        transposed: false,
    },
    scale: 1.0,
    accumulate: false,
    bias: None,
    workspace: 0,
    workspace_bytes: 0,
};

#[test]
fn what_adds_to_columns_of_a_result_joins_it() {
    let left = product([0x8000, 0x9000, 0x4000], 32, 8, true);
    let right = product([0x8000, 0x9800, 0x4000 + 64], 32, 8, true);
    assert_eq!(joined(&[MAIN, left, right]), [3, 0, 0]);
    // Beyond the row, into another row stride, or not adding.
    let beyond = product([0x8000, 0x9800, 0x4000 + 66], 32, 8, true);
    assert_eq!(joined(&[MAIN, beyond]), [1, 1]);
    let mut other = left;
    other.c.row_stride = 128;
    assert_eq!(joined(&[MAIN, other]), [1, 1]);
    let over = product([0x8000, 0x9000, 0x4000], 32, 8, false);
    assert_eq!(joined(&[MAIN, over]), [1, 1]);
}

#[test]
fn products_between_are_passed_unless_they_touch_something() {
    let add = product([0x8000, 0x9000, 0x4000], 32, 8, true);
    // The gradient of an adapter's weight, elsewhere.
    let elsewhere = product([0x8000, 0, 0xa000], 32, 8, false);
    assert_eq!(joined(&[MAIN, elsewhere, add]), [2, 1, 0]);
    let writes_what_is_read = product([0, 0x1000, 0x8000], 32, 8, false);
    assert_eq!(joined(&[MAIN, writes_what_is_read, add]), [1, 1, 1]);
    let reads_the_result = product([0x4000, 0x1000, 0xa000], 32, 8, false);
    assert_eq!(joined(&[MAIN, reads_the_result, add]), [1, 1, 1]);
    let clear = |address| Command::Clear { address, bytes: 1 };
    for (address, terms) in [(0xf000, 2), (0x8000, 1), (0x4000, 1)] {
        let mut lowered = lowered(&[MAIN, add]);
        lowered[0].commands.insert(0, clear(0));
        lowered.insert(
            1,
            Lowered {
                commands: vec![clear(address)],
                ..lowered[1].clone()
            },
        );
        join(&mut lowered);
        let count = match lowered[0].commands.last() {
            Some(Command::Products { products, .. }) => products.len(),
            _ => 1,
        };
        assert_eq!(count, terms, "{address:#x}");
    }
}

#[test]
fn only_what_the_kernel_takes_is_launched() {
    let add = product([0x8000, 0x9000, 0x4000 + 64], 32, 8, true);
    let sum = [MAIN, add];
    assert_eq!(launches(&sum, Card::ANY).len(), 0);
    let launched = launches(&sum, Card::HOPPER);
    assert_eq!(launched.len(), TRIED);
    let Command::LaunchTable {
        kernel,
        table,
        arguments,
        ..
    } = &launched[0]
    else {
        panic!("{launched:?}");
    };
    assert_eq!(kernel.function, "products_rows_128_176");
    assert_eq!(table[..7], [16, 64, 64, 1, 1, 1, 2]);
    // Columns 32 to 64, one step, times two; then all of it.
    assert_eq!(table[7..11], [32, 32, 1, 2.0_f32.to_bits()]);
    assert_eq!(table[11..15], [0, 64, 1, 1.0_f32.to_bits()]);
    assert_eq!(arguments.len(), 2 * MAX_TERMS + 2);
    let mut unaligned = sum;
    unaligned[1].a.address += 2;
    assert_eq!(launches(&unaligned, Card::HOPPER).len(), 0);
    let mut mixed = sum;
    mixed[1].b.transposed = false;
    assert_eq!(launches(&mixed, Card::HOPPER).len(), 0);
    let mut single = sum;
    single[0].c.dtype = DType::F32;
    assert_eq!(launches(&single, Card::HOPPER).len(), 0);
}

/// A product that is dropped in part is the first term of a sum that is too long for other kernels.
#[test]
fn what_is_dropped_in_part_comes_first() {
    // A layer's weight, as it lies.
    let by_columns = |product: Product| Product {
        b: matrix(product.b.address, product.n, false),
        ..product
    };
    let main = by_columns(Product {
        k: 1536,
        ..product([0, 0x1000, 0x4000], 64, 32, false)
    });
    let add = by_columns(product([0x8000, 0x9000, 0x4000 + 64], 32, 8, true));
    let by_rows = product([0xa000, 0xb000, 0x4000], 64, 8, true);
    let dropped = by_columns(by_rows);
    let tail = |product: Product| Tail {
        kind: TailKind::Dropped {
            product,
            dropout: DropoutAt {
                random: 0xc000,
                stream: 7,
                threshold: 9,
            },
        },
        command: Command::Clear {
            address: 0,
            bytes: 0,
        },
    };
    assert!(takes_dropped(&[main, add], &[tail(dropped)]));
    assert!(!takes_dropped(&[main, add], &[]));
    assert!(!takes_dropped(&[main], &[tail(dropped), tail(dropped)]));
    assert!(!takes_dropped(&[main], &[tail(by_rows)]));
    let main_by_rows = product([0, 0x1000, 0x4000], 64, 32, false);
    assert!(!takes_dropped(&[main_by_rows], &[tail(by_rows)]));
    assert!(!takes_dropped(&[main, add, add, add], &[tail(dropped)]));
    assert!(dropped_launches(&[main], &tail(dropped), Card::ANY).is_empty());
    let launched = dropped_launches(&[main, add], &tail(dropped), Card::HOPPER);
    assert_eq!(launched.len(), DROPPED_TILES.len());
    for launch in &launched {
        let Command::LaunchTable {
            kernel,
            table,
            arguments,
            ..
        } = launch
        else {
            panic!("{launched:?}");
        };
        assert!(kernel.function.starts_with("dropped_columns_"));
        // Eight columns of the inner dimension are one step; then what adds, then the long one.
        assert_eq!(table[6], 3);
        assert_eq!(table[7..11], [0, 64, 1, 2.0_f32.to_bits()]);
        assert_eq!(table[11..13], [32, 32]);
        assert_eq!(table[15..18], [0, 64, 24]);
        assert_eq!(table[7 + 4 * MAX_TERMS..], [7, 9, 0]);
        assert!(matches!(arguments.last(), Some(Argument::Address(0xc000))));
    }
    // With it, a sum may add to what is there.
    let adds = Product {
        accumulate: true,
        ..main
    };
    assert!(takes_dropped(&[adds], &[tail(dropped)]));
    assert!(!fits(&[adds]));
    let launched = dropped_launches(&[adds], &tail(dropped), Card::HOPPER);
    for launch in &launched {
        assert!(matches!(launch, Command::LaunchTable { table, .. } if table.last() == Some(&1)));
    }
    assert_eq!(joined(&[adds, add]), [1, 1]);
}

/// The tiles that leave the fewest multiprocessors idle are tried first.
#[test]
fn tiles_fill_a_card_in_whole_rounds() {
    let card = Card {
        multiprocessors: 132,
        ..Card::HOPPER
    };
    for (m, n, transposed, best, blocks) in [
        // Six by 22 tiles, one for each multiprocessor.
        (1536, 3584, true, "products_rows_256_168", 132),
        (1536, 3584, false, "products_columns_256_168", 132),
        // Twelve by 21, two for each but six.
        (1536, 4608, true, "products_rows_128_224", 132),
        // One pair, of which the second has nothing.
        (128, 64, false, "products_columns_128_176", 2),
    ] {
        let mut sum = MAIN;
        (sum.m, sum.n, sum.c.row_stride) = (m, n, n);
        sum.b.transposed = transposed;
        let launched = launches(&[sum], card);
        let Some(Command::LaunchTable { kernel, shape, .. }) = launched.first() else {
            panic!("{launched:?}");
        };
        assert_eq!((kernel.function, shape.grid[0]), (best, blocks));
    }
}

/// Where two blocks have the same rows, each brings half of A's tile, and all of its own of B's.
#[test]
fn what_blocks_share_is_brought_in_halves() {
    let boxes = |tile: Tile| {
        let operands = operands(&[MAIN], tile);
        let rows = operands.iter().map(|operand| match operand {
            Argument::MatrixMap(map) => map.box_rows,
            other => panic!("{other:?}"),
        });
        let rows: Vec<usize> = rows.collect();
        [rows[0], rows[MAX_TERMS]]
    };
    assert_eq!(boxes(Tile::new(128, 224, Shared::Columns)), [128, 112]);
    assert_eq!(boxes(Tile::new(256, 168, Shared::Rows)), [128, 168]);
}
