use super::*;
use crate::cuda::command::MatrixAt;
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
    assert!(!are_joined(both(5000, 392), elsewhere));
}

#[test]
fn the_launch_covers_all_rows_and_its_sums_fit() {
    for columns in [128, 256, 384, 512, 768, 1024, 1536] {
        for rows in [1, 31, 1003, 46_080] {
            let both = both(rows, columns);
            assert!(launches(&both, Card::ANY).is_none());
            let commands = launches(&both, Card::HOPPER).unwrap();
            let [
                Command::Launch {
                    shape, arguments, ..
                },
                Command::Launch { arguments: sum, .. },
            ] = &commands[..]
            else {
                panic!("{commands:?}");
            };
            let Argument::U32(rows_of_part) = arguments[9] else {
                panic!("{arguments:?}");
            };
            let (parts, of_part) = (shape.grid[0] as usize, rows_of_part as usize);
            assert!((parts - 1) * of_part < rows && rows <= parts * of_part);
            assert!(of_part.is_multiple_of(ROWS));
            assert_eq!(
                sum[3..5],
                [
                    Argument::U32(parts as u32),
                    Argument::U32(columns as u32 * 8)
                ]
            );
            let bytes = (parts * columns * 8 * size_of::<f32>()) as u64;
            assert!(bytes <= both[0].workspace_bytes);
            // What a block may have of a multiprocessor's shared memory.
            assert!(shape.shared_bytes <= 227 * 1024);
        }
    }
}
