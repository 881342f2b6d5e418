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

/// `C[1300, 384] (+)= A[1300, k]·B[k, 384]`.
fn product(k: usize, by_rows: bool, accumulate: bool) -> Product {
    Product {
        m: 1300,
        n: 384,
        k,
        a: matrix(0, k, false),
        b: matrix(0x100_000, if by_rows { k } else { 384 }, by_rows),
        c: matrix(0x200_000, 384, false),
        scale: if accumulate { 2.0 } else { 1.0 },
        accumulate,
        bias: None,
        workspace: 0,
        workspace_bytes: 0,
    }
}

fn tail(kind: TailKind) -> Tail {
    Tail {
        kind,
        command: Command::Clear {
            address: 0,
            bytes: 0,
        },
    }
}

fn dropped(product: Product) -> Tail {
    let dropout = DropoutAt {
        random: 0x300_000,
        stream: 7,
        threshold: 9,
    };
    tail(TailKind::Dropped { product, dropout })
}

#[test]
fn sums_of_whole_rows_are_taken() {
    let main = product(1000, true, false);
    let adapter = product(24, true, true);
    assert!(takes(&[main], &[]));
    assert!(takes(&[main, adapter], &[]));
    assert!(takes(&[main], &[dropped(adapter)]));
    // One may be dropped, and one may add.
    assert!(!takes(&[main, adapter], &[dropped(adapter)]));
    assert!(!takes(&[main, adapter, adapter], &[]));
    // In another order, of too high a rank, to some columns, of too many or too few columns.
    assert!(!takes(&[main, product(24, false, true)], &[]));
    assert!(!takes(&[main, product(72, true, true)], &[]));
    assert!(!takes(&[main, Product { n: 192, ..adapter }], &[]));
    for (columns, is_taken) in [(392, false), (384, true), (200, true), (192, false)] {
        let main = Product { n: columns, ..main };
        assert_eq!(takes(&[main], &[]), is_taken, "{columns}");
    }
}

const NORM: NormAt = NormAt {
    branch: 0x200_000,
    x: 0x400_000,
    gamma: 0x500_000,
    beta: 0x500_600,
    dropout: Some(DropoutAt {
        random: 0x300_000,
        stream: 7,
        threshold: 9,
    }),
    epsilon: 1e-5,
    to: 0x600_000,
    sum: None,
    mean: None,
    rstd: Some(0x700_000),
    rows: 1300,
    width: 384,
};

#[test]
fn norms_of_whole_rows_are_taken() {
    let main = product(1000, true, false);
    let adapter = product(24, true, true);
    let norm = [tail(TailKind::Norm(NORM))];
    assert!(takes(&[main], &norm));
    assert!(takes(&[main, adapter], &norm));
    // Of a gradient, of rows that are not all there is, in a place that the copy engine does not take.
    assert!(!takes(&[product(1000, false, false)], &norm));
    assert!(!takes(&[product(1000, true, true)], &norm));
    assert!(!takes(&[Product { n: 376, ..main }], &norm));
    let unaligned = NormAt {
        sum: Some(0x400_008),
        ..NORM
    };
    assert!(!takes(&[main], &[tail(TailKind::Norm(unaligned))]));
}

/// What is added is not written; its sum only where somebody reads it.
#[test]
fn a_launch_before_a_norm_has_what_that_reads() {
    let main = product(1000, true, false);
    let sum = Some(0x200_000);
    for (norm, writes_sum) in [(NORM, 0), (NormAt { sum, ..NORM }, 1)] {
        let launches = launches(&[main], &[tail(TailKind::Norm(norm))], card(132));
        assert_eq!(launches.len(), 2);
        for launch in &launches {
            let Command::LaunchTable {
                kernel,
                table,
                arguments,
                ..
            } = launch
            else {
                panic!("{launch:?}");
            };
            assert!(kernel.function.starts_with("whole_rows_norm_"));
            assert_eq!(table[6..], [7, 9, 0, writes_sum, 1e-5_f32.to_bits()]);
            let places = arguments[4..7].iter().map(|argument| match argument {
                Argument::MatrixMap(map) => (map.address, map.box_rows),
                other => panic!("{other:?}"),
            });
            let expected = [(0x200_000, 16), (0x400_000, 128), (0x600_000, 16)];
            assert_eq!(places.collect::<Vec<_>>(), expected);
            let [random, gamma, beta, rstd] =
                [0x300_000, 0x500_000, 0x500_600, 0x700_000].map(Argument::Address);
            assert_eq!(arguments[8..], [random, gamma, beta, Argument::Null, rstd]);
        }
    }
}

fn card(multiprocessors: usize) -> Card {
    Card {
        multiprocessors,
        ..Card::HOPPER
    }
}

/// No more clusters than have something to do in the last round.
#[test]
fn clusters_share_rows_evenly() {
    let main = product(1000, true, false);
    let grids = |multiprocessors: usize| {
        let launches = launches(&[main], &[], card(multiprocessors)).into_iter();
        let grid = |launch| match launch {
            Command::LaunchTable { kernel, shape, .. } => (kernel.function, shape.grid[0]),
            other => panic!("{other:?}"),
        };
        launches.map(grid).collect::<Vec<_>>()
    };
    assert!(launches(&[main], &[], Card::ANY).is_empty());
    // Three tiles of four times 128 rows, or six of two times as many.
    assert_eq!(grids(132), [("whole_rows_4", 12), ("whole_rows_2", 12)]);
    assert_eq!(grids(10), [("whole_rows_4", 8), ("whole_rows_2", 6)]);
    assert_eq!(grids(2), [("whole_rows_2", 2)]);
}

#[test]
fn a_launch_has_what_the_kernel_reads() {
    let main = product(1000, false, true);
    let adapter = product(24, false, true);
    let launches = launches(&[main], &[dropped(adapter)], card(132));
    for (launch, blocks) in launches.iter().zip([4, 2]) {
        let Command::LaunchTable {
            kernel,
            table,
            arguments,
            ..
        } = launch
        else {
            panic!("{launch:?}");
        };
        assert!(kernel.function.starts_with("whole_columns_"));
        let row_tiles = 1300_u32.div_ceil(128 * blocks);
        assert_eq!(table[..5], [1300, 384, row_tiles, 16, 2]);
        assert_eq!(table[5..9], [2.0_f32.to_bits(), 7, 9, 1]);
        let boxes = arguments.iter().filter_map(|argument| match argument {
            Argument::MatrixMap(map) => Some((map.address, map.box_rows)),
            _ => None,
        });
        let of_b = (0x100_000, 64 / blocks as usize);
        let c = 0x200_000;
        let expected = [(0, 128), of_b, (0, 128), of_b, (c, 16), (c, 128), (c, 16)];
        assert_eq!(boxes.collect::<Vec<_>>(), expected);
        let random = Argument::Address(0x300_000);
        assert_eq!(arguments[7..9], [Argument::Null, random]);
    }
}
