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

fn dropped(product: Product) -> Tail {
    Tail {
        kind: TailKind::Dropped {
            product,
            dropout: DropoutAt {
                random: 0x40000,
                stream: 7,
                threshold: 9,
            },
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
    let right = product(64, (384, 384), true);
    assert!(takes(&[main, left, right], &[]));
    let across = product(8, (192, 384), true);
    assert!(!takes(&[main, left, across], &[]));
    // Too long, too wide, unaligned, of another order.
    assert!(!takes(&[product(392, (0, 768), false)], &[]));
    assert!(!takes(&[main, product(72, (0, 768), true)], &[]));
    assert!(!takes(&[main, adapter], &[gelu(0x60008)]));
    let mut mixed = adapter;
    mixed.b.transposed = false;
    assert!(!takes(&[main, mixed], &[]));
    // A mask is of all that adds.
    assert!(takes(&[main], &[dropped(adapter)]));
    assert!(!takes(&[main, adapter], &[dropped(adapter)]));
}

#[test]
fn a_launch_has_what_the_kernel_reads() {
    let main = product(200, (0, 768), false);
    let adapter = product(24, (0, 768), true);
    assert_eq!(launch(&[main], &[], Card::ANY), None);
    let launched = |tails: &[Tail]| match launch(&[main], tails, Card::HOPPER) {
        Some(Command::LaunchTable {
            kernel,
            shape,
            table,
            arguments,
        }) => (kernel.function, shape, table, arguments),
        other => panic!("{other:?}"),
    };
    let (function, shape, table, arguments) = launched(&[dropped(adapter), gelu(0x60000)]);
    assert_eq!(function, "short_rows_gelu");
    // Two tiles of rows for each of two pairs of tiles of columns.
    assert_eq!(shape.grid, [8, 1, 1]);
    assert_eq!(table[..7], [100, 768, 768, 2, 2, 4, 1]);
    assert_eq!(table[7..11], [0, 768, 2, 2.0_f32.to_bits()]);
    assert_eq!(table[11..], [0, 0, 0, 0, 0, 0, 0, 0, 7, 9]);
    let addresses = [0x20000, 0x60000].map(Argument::Address);
    assert_eq!(arguments[8..10], addresses);
    assert_eq!(
        arguments[10..],
        [Argument::Null, Argument::Null, Argument::Address(0x40000)]
    );
    // C is not written where GELU takes its place.
    let (_, _, _, arguments) = launched(&[gelu(0x20000)]);
    assert_eq!(
        arguments[8..10],
        [Argument::Null, Argument::Address(0x20000)]
    );
}
