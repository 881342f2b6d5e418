use super::*;
use crate::cuda::command::{DropoutAt, MatrixAt};
use crate::cuda::op::Memory;

fn matrix(address: u64, row_stride: usize, dtype: DType, transposed: bool) -> MatrixAt {
    MatrixAt {
        address,
        row_stride,
        dtype,
        transposed,
    }
}

const WIDE: u64 = 0;
const WORKSPACE: u64 = 0x4000_0000;

/// Of a matrix [columns, 8] that adds to columns of rows of 1536: the gradient of what it read, and
/// its own.
fn both(rows: usize, columns: usize) -> [Product; 2] {
    let inner = Product {
        m: rows,
        n: 8,
        k: columns,
        a: matrix(WIDE, 1536, DType::F16, false),
        b: matrix(0x1000_0000, 8, DType::F16, false),
        c: matrix(0x1100_0000, 24, DType::F16, false),
        scale: 2.0,
        accumulate: true,
        bias: None,
        workspace: WORKSPACE,
        workspace_bytes: 32 << 20,
    };
    let gradient = Product {
        m: columns,
        n: 8,
        k: rows,
        a: matrix(WIDE, 1536, DType::F16, true),
        b: matrix(0x1200_0000, 24, DType::F16, false),
        c: matrix(0x1300_0000, 8, DType::F32, false),
        accumulate: false,
        ..inner
    };
    [inner, gradient]
}

fn node(commands: Vec<Command>) -> Lowered {
    Lowered {
        op: "linear",
        node: String::new(),
        commands,
        memory: Memory::default(),
        tail: None,
    }
}

/// Whether both are joined where something stands between them.
fn are_joined([inner, gradient]: [Product; 2], between: Command) -> bool {
    let clear = Command::Clear {
        address: inner.c.address,
        bytes: 16,
    };
    let mut nodes = [
        node(vec![clear.clone(), Command::Product(inner)]),
        node(vec![between]),
        node(vec![Command::Product(gradient)]),
    ];
    join(&mut nodes);
    match &nodes[0].commands[..] {
        [
            first,
            Command::Products {
                joined, products, ..
            },
        ] => {
            assert_eq!((first, *joined), (&clear, Joined::Back));
            assert_eq!(products[1].workspace, inner.workspace);
            assert!(nodes[2].commands.is_empty());
            true
        }
        _ => false,
    }
}

#[test]
fn both_products_of_an_adapters_second_matrix_are_one_pass() {
    let elsewhere = Command::Clear {
        address: 0x3000_0000,
        bytes: 16,
    };
    let [inner, gradient] = both(5000, 384);
    assert!(are_joined([inner, gradient], elsewhere.clone()));
    // What is read, or written, in between keeps the gradient where it is.
    for address in [WIDE, gradient.b.address, gradient.c.address] {
        let touched = Command::Clear { address, bytes: 16 };
        assert!(!are_joined([inner, gradient], touched));
    }
    let other_wide = matrix(WIDE + 768, 1536, DType::F16, true);
    for other in [
        Product {
            a: other_wide,
            ..gradient
        },
        Product { n: 16, ..gradient },
        Product { m: 768, ..gradient },
    ] {
        assert!(!are_joined([inner, other], elsewhere.clone()));
    }
    assert!(!are_joined(both(5000, 392), elsewhere.clone()));
    // The kernel writes two neighbours of C as one word.
    for c in [
        matrix(inner.c.address + 2, inner.c.row_stride, DType::F16, false),
        matrix(inner.c.address, inner.c.row_stride + 1, DType::F16, false),
    ] {
        assert!(!are_joined(
            [Product { c, ..inner }, gradient],
            elsewhere.clone()
        ));
    }
}

#[test]
fn the_launch_covers_all_rows_and_its_sums_fit() {
    for columns in [128, 256, 384, 512, 768, 1024, 1536] {
        for rows in [1, 31, 1003, 46_080] {
            let both = both(rows, columns);
            assert!(ways(&both, &[], Card::ANY).is_empty());
            let ways = ways(&both, &[], Card::HOPPER);
            assert!(!ways.is_empty());
            for commands in ways {
                let [
                    Command::Launch {
                        shape, arguments, ..
                    },
                    Command::Launch { arguments: sum, .. },
                ] = &commands[..]
                else {
                    panic!("{commands:?}");
                };
                let Argument::U32(rows_of_part) = arguments[11] else {
                    panic!("{arguments:?}");
                };
                let (parts, of_part) = (shape.grid[0] as usize, rows_of_part as usize);
                assert!((parts - 1) * of_part < rows && rows <= parts * of_part);
                assert!(of_part.is_multiple_of(16));
                let sizes = [
                    Argument::U32(parts as u32),
                    Argument::U32(columns as u32 * 8),
                ];
                assert!(sum.windows(2).any(|pair| pair == sizes));
                let bytes = (parts * columns * 8 * size_of::<f32>()) as u64;
                assert!(bytes <= both[0].workspace_bytes);
                // What a block may have of a multiprocessor's shared memory.
                assert!(shape.shared_bytes <= 227 * 1024);
            }
        }
    }
}

/// Three pairs beside each other, the last first, whose result is cleared before.
fn neighbours() -> Vec<Lowered> {
    let [inner, gradient] = both(5000, 384);
    let nodes = [2, 1, 0].map(|index| {
        let right = |matrix: MatrixAt, elements: usize| MatrixAt {
            address: matrix.address + (index * elements) as u64 * matrix.dtype.size(),
            ..matrix
        };
        let inner = Product {
            a: right(inner.a, 384),
            b: right(inner.b, 384 * 8),
            c: right(inner.c, 8),
            accumulate: index < 2,
            ..inner
        };
        let gradient = Product {
            a: right(gradient.a, 384),
            b: right(gradient.b, 8),
            c: right(gradient.c, 384 * 8),
            ..gradient
        };
        let clear = Command::Clear {
            address: 0x1100_0000,
            bytes: 5000 * 24 * 2,
        };
        let products = Command::Products {
            joined: Joined::Back,
            heads: Vec::new(),
            products: vec![inner, gradient],
            tails: Vec::new(),
        };
        let first = (index == 2).then_some(clear);
        node(first.into_iter().chain([products]).collect())
    });
    nodes.into()
}

/// Pairs of the first command after joining, and the heads that it has.
fn joined(mut nodes: Vec<Lowered>) -> (usize, usize) {
    join(&mut nodes);
    let Some(Command::Products {
        heads, products, ..
    }) = nodes[0].commands.last()
    else {
        panic!("{:?}", nodes[0].commands);
    };
    let pairs = products.len() / 2;
    assert_eq!(nodes[0].commands.len(), 2 - heads.len());
    assert!(nodes[1..pairs].iter().all(|node| node.commands.is_empty()));
    (pairs, heads.len())
}

/// The products of a node's last command.
fn products_of(node: &mut Lowered) -> &mut Vec<Product> {
    match node.commands.last_mut() {
        Some(Command::Products { products, .. }) => products,
        other => panic!("{other:?}"),
    }
}

#[test]
fn adapters_beside_each_other_are_one_launch() {
    assert_eq!(joined(neighbours()), (3, 1));
    // One that is elsewhere, of another scale, or with something before it stays by itself, and all
    // do where one adds to what is not cleared.
    let mut elsewhere = neighbours();
    products_of(&mut elsewhere[1])[0].a.address += 16;
    assert_eq!(joined(elsewhere), (1, 0));
    let mut scaled = neighbours();
    products_of(&mut scaled[1])[1].scale = 3.0;
    assert_eq!(joined(scaled), (1, 0));
    let mut between = neighbours();
    let clear = Command::Clear {
        address: 0x3000_0000,
        bytes: 16,
    };
    between[1].commands.insert(0, clear);
    assert_eq!(joined(between), (1, 0));
    let mut part = neighbours();
    part[2].commands.clear();
    assert_eq!(joined(part), (1, 0));
    // A gradient that is written where another's operand lies.
    let mut over = neighbours();
    let place = products_of(&mut over[0])[0].b.address;
    products_of(&mut over[1])[1].c.address = place;
    assert_eq!(joined(over), (1, 0));
    // Those that all add need no clear.
    let mut adding = neighbours();
    products_of(&mut adding[0])[0].accumulate = true;
    assert_eq!(joined(adding), (3, 0));
}

#[test]
fn a_launch_of_several_has_all_their_addresses() {
    let mut nodes = neighbours();
    join(&mut nodes);
    let products = products_of(&mut nodes[0]).clone();
    for commands in ways(&products, &[], Card::HOPPER) {
        let [
            Command::Launch {
                shape, arguments, ..
            },
            Command::Launch {
                shape: sum_shape,
                arguments: sum,
                ..
            },
        ] = &commands[..]
        else {
            panic!("{commands:?}");
        };
        let address = |place: fn(&[Product]) -> u64| -> Vec<Argument> {
            let pairs = products.chunks_exact(2);
            pairs.map(|pair| Argument::Address(place(pair))).collect()
        };
        assert_eq!(arguments[2..5], address(|pair| pair[0].b.address));
        assert_eq!(sum[1..4], address(|pair| pair[1].c.address));
        assert_eq!((shape.grid[1], sum_shape.grid[1]), (3, 3));
        let bytes = u64::from(shape.grid[0]) * 3 * 384 * 8 * 4;
        assert!(bytes <= products[0].workspace_bytes);
        // What was cleared is written, not added to.
        assert_eq!(arguments[12], Argument::U32(0));
    }
}

const DT: u64 = 0x1100_0000;
const X: u64 = 0x2000_0000;
const TO: u64 = 0x2800_0000;
const RANDOM: u64 = 0x2900_0000;

/// The node of the gradient of the matrix that made what the second matrices read.
fn of_first(rows: usize, outputs: usize, inputs: usize) -> Lowered {
    let first = FirstGradient {
        narrow: matrix(DT, 24, DType::F16, false),
        wide: matrix(X, inputs, DType::F16, false),
        rows,
        outputs,
        inputs,
        scale: 1.0,
        dropout: DropoutAt {
            random: RANDOM,
            stream: 1,
            threshold: 1,
        },
        to: Argument::Address(TO),
        adds: true,
        rows_of_part: 64 * rows.div_ceil(64),
    };
    let x_bytes = (rows * inputs * 2) as u64;
    let elsewhere = 0x7000_0000;
    Lowered {
        tail: Some(TailKind::FirstGradient(first)),
        memory: Memory {
            reads: vec![
                (DT, DT + rows as u64 * 48),
                (X, X + x_bytes),
                (RANDOM, RANDOM + 16),
            ],
            writes: vec![(TO, TO + 0x10_0000), (elsewhere, elsewhere + (32 << 20))],
        },
        ..node(adapter::gradient_launches(&first, elsewhere).into())
    }
}

/// The pass after joining, where it has the gradient of the first matrix.
fn with_gradient(mut nodes: Vec<Lowered>) -> Option<(Vec<Product>, Vec<Tail>)> {
    join(&mut nodes);
    let Some(Command::Products {
        products, tails, ..
    }) = nodes[0].commands.last()
    else {
        panic!("{:?}", nodes[0].commands);
    };
    let is_moved = nodes.last()?.commands.is_empty();
    assert_eq!(is_moved, tails.len() == 1);
    is_moved.then(|| (products.clone(), tails.clone()))
}

/// Between the pass and the gradient, what clears some bytes.
fn three_and_first(cleared: u64) -> Vec<Lowered> {
    let between = Command::Clear {
        address: cleared,
        bytes: 16,
    };
    let mut nodes = neighbours();
    nodes.extend([node(vec![between]), of_first(5000, 24, 384)]);
    nodes
}

#[test]
fn the_gradient_of_the_first_matrix_is_part_of_the_pass() {
    let (_, tails) = with_gradient(three_and_first(0x6000_0000)).unwrap();
    // By itself it follows, with its parts where those of the pass are.
    let Command::Ways(ways) = &tails[0].command else {
        panic!("{:?}", tails[0].command);
    };
    let [Command::Launch { arguments, .. }, _] = &ways[0][..] else {
        panic!("{ways:?}");
    };
    assert_eq!(arguments[2], Argument::Address(WORKSPACE));
    // What it reads or writes is touched in between.
    for touched in [DT, X, TO, RANDOM] {
        assert!(with_gradient(three_and_first(touched)).is_none());
    }
    // It reads something else, or has sides that no kernel takes.
    for other in [of_first(5000, 24, 416), of_first(5000, 16, 384)] {
        let mut nodes = neighbours();
        nodes.push(other);
        assert!(with_gradient(nodes).is_none());
    }
    let mut nodes = three_and_first(0x6000_0000);
    if let Some(TailKind::FirstGradient(first)) = &mut nodes[4].tail {
        first.narrow.address += 16;
    }
    assert!(with_gradient(nodes).is_none());
    // What the second matrices read has a gradient already.
    let mut adding = three_and_first(0x6000_0000);
    products_of(&mut adding[0])[0].accumulate = true;
    assert!(with_gradient(adding).is_none());
    // The scratch memory of the pass lies over what it reads.
    let mut over = three_and_first(0x6000_0000);
    if let Some(TailKind::FirstGradient(first)) = &mut over[4].tail {
        first.wide.address = WORKSPACE;
    }
    assert!(with_gradient(over).is_none());
}

#[test]
fn launches_of_both_matrices_cover_all_rows_and_have_all_addresses() {
    let (products, tails) = with_gradient(three_and_first(0x6000_0000)).unwrap();
    let all = ways(&products, &tails, Card::HOPPER);
    assert!(ways(&products, &tails, Card::ANY).is_empty());
    // Each way has all: one pass and its sum, or the gradient after those of the second matrices.
    let [both, apart] = [2, 3].map(|count| all.iter().filter(|way| way.len() == count).count());
    assert_eq!((both, apart), (2, 2));
    for commands in all.iter().filter(|way| way.len() == 2) {
        let [
            Command::Launch {
                shape, arguments, ..
            },
            Command::Launch { arguments: sum, .. },
        ] = &commands[..]
        else {
            panic!("{commands:?}");
        };
        let (parts, Argument::U32(of_part)) = (shape.grid[0], arguments[13]) else {
            panic!("{arguments:?}");
        };
        assert!((parts - 1) * of_part < 5000 && 5000 <= parts * of_part);
        assert!(of_part.is_multiple_of(16) && shape.shared_bytes <= 227 * 1024);
        assert_eq!(arguments[5], Argument::Address(X));
        assert_eq!(arguments[6], Argument::Address(products[0].c.address));
        let width = 3 * 8 * (384 + 384);
        assert!(u64::from(parts * width * 4) <= products[0].workspace_bytes);
        let to: Vec<Argument> = products
            .chunks_exact(2)
            .map(|pair| Argument::Address(pair[1].c.address))
            .collect();
        assert_eq!(sum[1..4], to);
        assert_eq!(sum[4], Argument::Address(TO));
        let sizes = [parts, width, 384 * 8, 3 * 384 * 8, 0, 1];
        assert_eq!(sum[5..], sizes.map(Argument::U32));
    }
}
