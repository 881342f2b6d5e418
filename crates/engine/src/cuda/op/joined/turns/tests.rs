use cinch_graph::DType;

use super::*;
use crate::cuda::command::MatrixAt;

const C: u64 = 0x20000;
const ELEMENTS: usize = 300 * 768;

fn matrix(address: u64, row_stride: usize, transposed: bool) -> MatrixAt {
    MatrixAt {
        address,
        row_stride,
        dtype: DType::Bf16,
        transposed,
    }
}

/// `C[300, 768] = A[300, 1000]·B[1000, 768]`.
fn product(by_rows: bool) -> Product {
    let b_stride = if by_rows { 1000 } else { 768 };
    Product {
        m: 300,
        n: 768,
        k: 1000,
        a: matrix(0, 1000, false),
        b: matrix(0x10000, b_stride, by_rows),
        c: matrix(C, 768, false),
        scale: 1.0,
        accumulate: false,
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

fn gate(function: ActivationKind, to: u64) -> Tail {
    tail(TailKind::Gate {
        function,
        gate: 0x100_000,
        up: C,
        to,
        elements: ELEMENTS,
    })
}

fn gradients(value: Option<u64>) -> Tail {
    tail(TailKind::GateGradients {
        function: ActivationKind::Silu,
        gradient: C,
        gate: 0x100_000,
        up: 0x200_000,
        to_gate: 0x100_000,
        to_up: 0x200_000,
        value,
        elements: ELEMENTS,
    })
}

#[test]
fn functions_and_orders_that_have_a_kernel_are_taken() {
    let (rows, columns) = ([product(true)], [product(false)]);
    assert!(takes(&rows, &[gate(ActivationKind::Silu, 0x300_000)]));
    assert!(takes(&columns, &[gradients(Some(C))]));
    // Of another function, in the other order, unaligned, and one after another.
    assert!(!takes(&rows, &[gate(ActivationKind::Relu, 0x300_000)]));
    assert!(!takes(&columns, &[gate(ActivationKind::Silu, 0x300_000)]));
    assert!(!takes(&rows, &[gradients(None)]));
    assert!(!takes(&rows, &[gate(ActivationKind::Silu, 0x300_008)]));
    let twice = [gate(ActivationKind::Silu, C), gate(ActivationKind::Silu, C)];
    assert!(!takes(&rows, &twice));
}

#[test]
fn a_launch_is_given_what_it_reads_and_writes() {
    assert_eq!(launch(&[product(true)], &[], Card::ANY), None);
    let launched = |by_rows: bool, tails: &[Tail]| {
        let command = launch(&[product(by_rows)], tails, Card::HOPPER);
        let Some(Command::LaunchTable {
            kernel,
            shape,
            table,
            arguments,
        }) = command
        else {
            panic!("{command:?}");
        };
        // Two pairs of tiles of rows by four of columns.
        assert_eq!(
            (shape.grid, &table[..7]),
            ([16, 1, 1], &[300, 768, 768, 2, 4, 2, 1][..])
        );
        (kernel.function, arguments[8..].to_vec())
    };
    let at = Argument::Address;
    let none = Argument::Null;
    assert_eq!(
        launched(true, &[]),
        ("turns_rows", vec![at(C), none, none, none, none, none])
    );
    // C is written beside what the gate makes of it, unless that is in its place.
    let (function, ends) = launched(true, &[gate(ActivationKind::Silu, 0x300_000)]);
    assert_eq!(function, "turns_rows_swiglu");
    assert_eq!(ends[..4], [at(C), at(0x100_000), none, at(0x300_000)]);
    let (_, ends) = launched(true, &[gate(ActivationKind::Silu, C)]);
    assert_eq!(ends[..4], [none, at(0x100_000), none, at(C)]);
    // Each gradient over its own tensor, and the value over what C would have been.
    let (function, ends) = launched(false, &[gradients(Some(C))]);
    assert_eq!(function, "turns_columns_swiglu");
    let (gate, up) = (at(0x100_000), at(0x200_000));
    assert_eq!(ends, [gate, gate, up, at(C), up, none]);
}
