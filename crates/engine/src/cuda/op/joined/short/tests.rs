use cinch_graph::DType;

use super::*;

fn matrix(address: u64, row_stride: usize, transposed: bool) -> MatrixAt {
    MatrixAt {
        address,
        row_stride,
        dtype: DType::F16,
        transposed,
    }
}

/// `C[100, 768] (+)= A[100, k]·B[k, n]` in columns of C from `column` on, B by rows.
fn product(k: usize, (column, n): (usize, usize), accumulate: bool) -> Product {
    Product {
        m: 100,
        n,
        k,
        a: matrix(0, k, false),
        b: matrix(0x10000, k, true),
        c: matrix(0x20000 + 2 * column as u64, 768, false),
        scale: if accumulate { 2.0 } else { 1.0 },
        accumulate,
        bias: None,
        workspace: 0,
        workspace_bytes: 0,
    }
}

fn gelu(to: u64) -> Tail {
    Tail {
        kind: TailKind::Activation {
            function: ActivationKind::Gelu,
            from: 0x20000,
            to,
            elements: 100 * 768,
        },
        command: Command::Clear {
            address: 0,
            bytes: 0,
        },
    }
}

const DROPOUT: DropoutAt = DropoutAt {
    random: 0x40000,
    stream: 7,
    threshold: 9,
};

fn dropped(product: Product) -> Tail {
    Tail {
        kind: TailKind::Dropped {
            product,
            dropout: DROPOUT,
        },
        ..gelu(0)
    }
}

fn narrow(from: u64, columns: usize) -> Tail {
    Tail {
        kind: TailKind::Narrow {
            from,
            rows: 100,
            inner: 768,
            weight: 0x70000,
            columns,
            to: 0x90000,
            dropout: DROPOUT,
            parts: (0x80000, 0x80000 + 100 * 4 * 32),
        },
        ..gelu(0)
    }
}

#[test]
fn sums_that_are_short_are_taken() {
    let main = product(384, (0, 768), false);
    let adapter = product(8, (0, 768), true);
    assert!(takes(&[main], &[]));
    assert!(takes(&[main, adapter], &[gelu(0x60000)]));
    // One for each pair of tiles, and two for one of them.
    let left = product(8, (0, 384), true);
    let right = product(16, (384, 384), true);
    assert!(takes(&[main, left, right], &[]));
    let across = product(8, (192, 384), true);
    assert!(!takes(&[main, left, across], &[]));
    // Too long, too wide, unaligned, of another order.
    assert!(!takes(&[product(392, (0, 768), false)], &[]));
    assert!(!takes(&[main, product(24, (0, 768), true)], &[]));
    assert!(!takes(&[main, adapter], &[gelu(0x60008)]));
    let mut mixed = adapter;
    mixed.b.transposed = false;
    assert!(!takes(&[main, mixed], &[]));
    // A mask is of all that adds.
    assert!(takes(&[main], &[dropped(adapter)]));
    assert!(!takes(&[main, adapter], &[dropped(adapter)]));
}

#[test]
fn a_narrow_product_is_taken_after_its_function() {
    let main = product(384, (0, 768), false);
    let adapter = product(8, (0, 768), true);
    let takes_narrow = |main: Product, tails: &[Tail]| takes(&[main, adapter], tails);
    assert!(takes_narrow(main, &[gelu(0x60000), narrow(0x60000, 8)]));
    assert!(takes_narrow(main, &[gelu(0x20000), narrow(0x20000, 8)]));
    // Of another's result, of another width, without room for its parts.
    assert!(!takes_narrow(main, &[gelu(0x60000), narrow(0x20000, 8)]));
    assert!(!takes_narrow(main, &[narrow(0x20000, 8)]));
    assert!(!takes_narrow(main, &[gelu(0x60000), narrow(0x60000, 16)]));
    let mut small = narrow(0x60000, 8);
    if let TailKind::Narrow { parts, .. } = &mut small.kind {
        parts.1 -= 1;
    }
    assert!(!takes_narrow(main, &[gelu(0x60000), small]));
    // One kind of mask at a time.
    let tails = [dropped(adapter), gelu(0x60000), narrow(0x60000, 8)];
    assert!(!takes(&[main], &tails));
}

fn launched(products: &[Product], tails: &[Tail]) -> Vec<Command> {
    launches(products, tails, Card::HOPPER).unwrap()
}

/// The addresses of the matrices that are written and read at the end of a tile, and the rest.
fn ends(arguments: &[Argument]) -> (Vec<u64>, &[Argument]) {
    let address = |argument: &Argument| match argument {
        Argument::MatrixMap(map) => {
            assert_eq!((map.rows, map.columns, map.row_stride), (100, 768, 768));
            assert_eq!((map.box_rows, map.box_columns), (16, 64));
            map.address
        }
        other => panic!("{other:?}"),
    };
    let addresses = arguments[8..11].iter().map(address).collect();
    (addresses, &arguments[11..])
}

#[test]
fn a_launch_has_what_the_kernel_reads() {
    let main = product(200, (0, 768), false);
    let adapter = product(16, (0, 768), true);
    assert_eq!(launches(&[main], &[], Card::ANY), None);
    let launched = |tails: &[Tail]| match &launched(&[main], tails)[..] {
        [
            Command::LaunchTable {
                kernel,
                shape,
                table,
                arguments,
            },
        ] => (kernel.function, *shape, table.clone(), arguments.clone()),
        other => panic!("{other:?}"),
    };
    let (function, shape, table, arguments) = launched(&[dropped(adapter), gelu(0x60000)]);
    assert_eq!(function, "short_rows_gelu");
    // Two tiles of rows for each of two pairs of tiles of columns.
    assert_eq!(shape.grid, [8, 1, 1]);
    assert_eq!(table[..8], [100, 768, 768, 2, 2, 4, 1, 1]);
    assert_eq!(table[8..11], [0, 768, 2.0_f32.to_bits()]);
    assert_eq!(table[11..], [0, 0, 0, 0, 0, 0, 7, 9]);
    let (addresses, rest) = ends(&arguments);
    assert_eq!(addresses, [0x20000, 0x60000, 0x20000]);
    let random = Argument::Address(0x40000);
    let null = Argument::Null;
    assert_eq!(rest, [null, random, null, null]);
    // C is not written where GELU takes its place.
    let (_, _, table, arguments) = launched(&[gelu(0x20000)]);
    assert_eq!(table[6], 0);
    assert_eq!(ends(&arguments).0, [0x20000; 3]);
}

#[test]
fn derivatives_are_written_wherever_they_belong() {
    let mut main = product(384, (0, 768), false);
    main.b = matrix(0x10000, 768, false);
    let derivative = |to: u64, value: Option<u64>| Tail {
        kind: TailKind::Derivative {
            function: ActivationKind::Gelu,
            gradient: 0x20000,
            x: 0x60000,
            to,
            value,
            elements: 100 * 768,
        },
        ..gelu(0)
    };
    for (to, value, function, y) in [
        (0x20000, None, "short_columns_gelu_backward", 0x20000),
        (
            0xa0000,
            Some(0x20000),
            "short_columns_gelu_backward_value",
            0x20000,
        ),
    ] {
        let commands = launched(&[main], &[derivative(to, value)]);
        let [
            Command::LaunchTable {
                kernel, arguments, ..
            },
        ] = &commands[..]
        else {
            panic!("{commands:?}");
        };
        assert_eq!(kernel.function, function);
        assert_eq!(ends(arguments).0, [to, y, 0x60000]);
    }
    assert!(!takes(&[main], &[derivative(0x20000, Some(0xa0008))]));
}

#[test]
fn parts_of_a_narrow_product_are_added_up() {
    let main = product(384, (0, 768), false);
    let adapter = product(8, (0, 768), true);
    let commands = launched(&[main, adapter], &[gelu(0x60000), narrow(0x60000, 8)]);
    let [
        Command::LaunchTable {
            kernel,
            table,
            arguments,
            ..
        },
        Command::Launch {
            kernel: sum,
            shape,
            arguments: sum_arguments,
        },
    ] = &commands[..]
    else {
        panic!("{commands:?}");
    };
    assert_eq!(kernel.function, "short_rows_gelu_narrow");
    assert_eq!(table[table.len() - 2..], [7, 9]);
    let [random, weight, parts] = [0x40000, 0x70000, 0x80000].map(Argument::Address);
    assert_eq!(ends(arguments).1, [Argument::Null, random, weight, parts]);
    assert_eq!(sum.function, "short_narrow_sum");
    assert_eq!(shape.grid, [1, 1, 1]);
    // Four tiles of columns.
    assert_eq!(
        sum_arguments[..4],
        [
            parts,
            Argument::Address(0x90000),
            Argument::U32(100),
            Argument::U32(4)
        ]
    );
    assert_eq!(
        sum_arguments[4..],
        [random, Argument::Stream(7), Argument::U32(9)]
    );
}
