use cinch_graph::DType;

use super::*;

fn matrix(address: u64, row_stride: usize, transposed: bool) -> MatrixAt {
    MatrixAt {
        address,
        row_stride,
        dtype: DType::Bf16,
        transposed,
    }
}

/// `C[300, 16] (+)= A[300, k]·B[k, 16]`.
fn product(k: usize, transposed: bool) -> Product {
    Product {
        m: 300,
        n: 16,
        k,
        a: matrix(0, k, false),
        b: matrix(0x10_0000, if transposed { k } else { 16 }, transposed),
        c: matrix(0x20_0000, 48, false),
        scale: 2.0,
        accumulate: true,
        bias: None,
        workspace: 0,
        workspace_bytes: 0,
    }
}

#[test]
fn long_sums_of_few_tiles_are_cut() {
    assert!(is_split(&product(1024, true)));
    assert!(is_split(&product(1024, false)));
    assert!(!is_split(&product(960, true)));
    let wide = Product {
        n: 8192,
        ..product(1024, true)
    };
    assert!(!is_split(&wide));
}

#[test]
fn only_what_the_kernel_takes_is_launched() {
    assert_eq!(launches(&product(1024, true), Card::ANY).len(), 0);
    let launched = launches(&product(1024, false), Card::HOPPER);
    assert_eq!(launched.len(), PARTS.len());
    let Command::LaunchTable {
        kernel,
        shape,
        table,
        arguments,
    } = &launched[0]
    else {
        panic!("{launched:?}");
    };
    assert_eq!(kernel.function, "narrow_columns_8");
    assert_eq!(shape.grid, [3 * 8, 1, 1]);
    assert_eq!(table[..], [300, 16, 48, 1, 16, 2.0_f32.to_bits(), 1]);
    assert_eq!(arguments.len(), 3);
    let mut unaligned = product(1024, true);
    unaligned.c.row_stride = 50;
    assert_eq!(launches(&unaligned, Card::HOPPER).len(), 0);
}
