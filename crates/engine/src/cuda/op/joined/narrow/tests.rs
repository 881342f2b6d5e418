use cinch_graph::DType;

use super::*;
use crate::cuda::command::BiasAt;
use crate::cuda::command::MatrixAt;
use crate::cuda::op::Memory;

fn matrix(address: u64, row_stride: usize, transposed: bool) -> MatrixAt {
    MatrixAt {
        address,
        row_stride,
        dtype: DType::F16,
        transposed,
    }
}

/// `C[rows, 16] = A[rows, 384]·B[384, 16]`.
fn product(rows: usize, transposed: bool) -> Product {
    Product {
        m: rows,
        n: 16,
        k: 384,
        a: matrix(0, 384, false),
        b: matrix(0x10_0000, if transposed { 384 } else { 16 }, transposed),
        c: matrix(0x20_0000, 48, false),
        scale: 2.0,
        accumulate: false,
        bias: None,
        workspace: 0,
        workspace_bytes: 0,
    }
}

fn is_marked(product: Product) -> bool {
    let mut nodes = [Lowered {
        op: "linear",
        node: String::new(),
        commands: vec![Command::Product(product)],
        memory: Memory::default(),
        tail: None,
    }];
    mark(&mut nodes);
    matches!(
        nodes[0].commands[..],
        [Command::Products {
            joined: Joined::Narrow,
            ..
        }]
    )
}

#[test]
fn what_is_narrow_is_one_pass() {
    for transposed in [true, false] {
        assert!(is_marked(product(5000, transposed)));
    }
    let narrow = product(5000, true);
    for other in [
        Product { n: 40, ..narrow },
        Product { n: 12, ..narrow },
        Product { k: 400, ..narrow },
        Product {
            accumulate: true,
            ..narrow
        },
        Product {
            bias: Some(BiasAt { kept: 0, copied: 0 }),
            ..narrow
        },
    ] {
        assert!(!is_marked(other), "{other:?}");
    }
}

#[test]
fn many_rows_have_blocks_of_fewer_threads() {
    for (rows, transposed, function, blocks, threads) in [
        (5000, true, "narrow_rows_2", 157, 128),
        (300, false, "narrow_columns_2", 10, 256),
    ] {
        let launched = launches(&[product(rows, transposed)], Card::ANY);
        let [Command::Launch { kernel, shape, .. }] = &launched[..] else {
            panic!("{launched:?}");
        };
        assert_eq!(kernel.function, function);
        assert_eq!((shape.grid[0], shape.block[0]), (blocks, threads));
    }
}
