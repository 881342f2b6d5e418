use super::*;
use crate::cuda::command::{Kernel, LaunchShape, MatrixAt};
use crate::cuda::op::joined::join;

fn matrix(address: u64, row_stride: usize, transposed: bool) -> MatrixAt {
    MatrixAt {
        address,
        row_stride,
        dtype: DType::F16,
        transposed,
    }
}

/// Of 64 × 64 elements; its parts for each of two tiles of columns take 4096 bytes.
const C: u64 = 0x10000;
const ACTIVE: u64 = 0x20000;
const SCRATCH: Bytes = (0x30000, 0x31000);
const OWN: Bytes = (0x40000, 0x42000);
const NARROW: u64 = 0x50000;

fn product() -> Product {
    Product {
        m: 64,
        n: 64,
        k: 64,
        a: matrix(0, 64, false),
        b: matrix(0x8000, 64, true),
        c: matrix(C, 64, false),
        scale: 1.0,
        accumulate: false,
        bias: None,
        workspace: SCRATCH.0,
        workspace_bytes: SCRATCH.1 - SCRATCH.0,
    }
}

fn node(commands: Vec<Command>, tail: Option<TailKind>, memory: [Bytes; 2]) -> Lowered {
    let [read, written] = memory;
    Lowered {
        op: "",
        node: String::new(),
        commands,
        memory: Memory {
            reads: vec![read],
            writes: vec![written],
        },
        tail,
    }
}

fn launch() -> Vec<Command> {
    vec![Command::Launch {
        kernel: Kernel {
            file: "",
            function: "",
        },
        shape: LaunchShape::linear(1, 32),
        arguments: Vec::new(),
    }]
}

/// Where the parts of a narrow product are that follows GELU, which is written to `active`; nowhere
/// where it does not join the product. Between them is a node that touches this.
fn parts(active: u64, narrow: u64, between: [Bytes; 2]) -> Option<Bytes> {
    let all = |address| (address, address + 64 * 64 * 2);
    let gelu = TailKind::Activation {
        function: ActivationKind::Gelu,
        from: C,
        to: active,
        elements: 64 * 64,
    };
    let tail = TailKind::Narrow {
        from: active,
        rows: 64,
        inner: 64,
        weight: 0x60000,
        columns: 8,
        to: narrow,
        dropout: DropoutAt {
            random: 0x70000,
            stream: 1,
            threshold: 1,
        },
        parts: OWN,
    };
    let written = (narrow, narrow + 64 * 8 * 2);
    let mut lowered = vec![
        node(vec![Command::Product(product())], None, [all(0), all(C)]),
        node(launch(), Some(gelu), [all(C), all(active)]),
        node(launch(), None, between),
        node(launch(), Some(tail), [all(active), written]),
    ];
    join(&mut lowered);
    let Some(Command::Products { tails, .. }) = lowered[0].commands.last() else {
        panic!("{lowered:?}");
    };
    let is_left = !lowered[3].commands.is_empty();
    let parts = tails.iter().find_map(|tail| match tail.kind {
        TailKind::Narrow { parts, .. } => Some(parts),
        _ => None,
    });
    assert_eq!(parts.is_none(), is_left);
    parts
}

#[test]
fn parts_of_a_narrow_product_are_where_nothing_else_is() {
    let elsewhere = [(0x80000, 0x80010), (0x90000, 0x90010)];
    let (of_products, own) = (SCRATCH, (OWN.0, OWN.0 + 0x1000));
    assert_eq!(parts(ACTIVE, NARROW, elsewhere), Some(of_products));
    assert_eq!(parts(C, NARROW, elsewhere), Some(of_products));
    // What is written lies over the products' scratch memory, or over both.
    assert_eq!(parts(SCRATCH.0 + 0x800, NARROW, elsewhere), Some(own));
    assert_eq!(parts(ACTIVE, SCRATCH.0, elsewhere), Some(own));
    assert_eq!(parts(SCRATCH.0, OWN.0, elsewhere), None);
    // Somebody between reads what lies there, or writes there later.
    let reads = [(OWN.0, OWN.0 + 16), elsewhere[1]];
    assert_eq!(parts(SCRATCH.0, NARROW, reads), None);
    let writes = [elsewhere[0], (OWN.0, OWN.0 + 16)];
    assert_eq!(parts(SCRATCH.0, NARROW, writes), Some(own));
    // Somebody between reads or writes what would be written before.
    assert_eq!(
        parts(ACTIVE, NARROW, [(NARROW, NARROW + 16), elsewhere[1]]),
        None
    );
    assert_eq!(
        parts(ACTIVE, NARROW, [elsewhere[0], (NARROW, NARROW + 16)]),
        None
    );
}

/// Where a norm's results are, besides its tensors of one number a row.
const NORMED: u64 = 0x20000;
const STATISTICS: [u64; 2] = [0x2d000, 0x2e000];

const WEIGHT: u64 = 0xa0000;

/// Whether a norm of what a product adds to a stream joins it, behind a node that touches this.
fn joins_norm(norm: NormAt, between: [Bytes; 2]) -> bool {
    let all = |address| (address, address + 64 * 64 * 2);
    let mut lowered = vec![
        node(vec![Command::Product(product())], None, [all(0), all(C)]),
        node(launch(), None, between),
        node(launch(), Some(TailKind::Norm(norm)), [all(C), all(norm.to)]),
    ];
    // What takes it has 384 columns.
    if let [Command::Product(product)] = &mut lowered[0].commands[..] {
        (product.n, product.c.row_stride) = (384, 384);
        product.b.address = WEIGHT;
    }
    join(&mut lowered);
    let is_left = !lowered[2].commands.is_empty();
    let is_joined = matches!(
        lowered[0].commands.last(),
        Some(Command::Products { tails, .. }) if !tails.is_empty()
    );
    assert_eq!(is_joined, !is_left);
    is_joined
}

#[test]
fn a_norm_joins_where_nobody_else_reads_what_it_adds() {
    let [mean, rstd] = STATISTICS;
    let norm = NormAt {
        branch: C,
        x: 0x60000,
        gamma: 0x70000,
        beta: 0x71000,
        dropout: None,
        epsilon: 1e-5,
        to: NORMED,
        sum: None,
        mean: Some(mean),
        rstd: Some(rstd),
        rows: 64,
        width: 384,
    };
    let elsewhere = [(0x80000, 0x80010), (0x90000, 0x90010)];
    assert!(joins_norm(norm, elsewhere));
    // In the place of what it adds, which is not written otherwise.
    let sum = Some(C);
    assert!(joins_norm(NormAt { sum, ..norm }, elsewhere));
    // Somebody between reads it, or writes what is added.
    assert!(!joins_norm(norm, [(C, C + 16), elsewhere[1]]));
    assert!(!joins_norm(norm, [elsewhere[0], (C, C + 16)]));
    // Something is written over what other blocks still read.
    assert!(!joins_norm(NormAt { to: 0x100, ..norm }, elsewhere));
    for over in [0, WEIGHT] {
        let mean = Some(over);
        assert!(!joins_norm(NormAt { mean, ..norm }, elsewhere));
        let rstd = Some(over);
        assert!(!joins_norm(NormAt { rstd, ..norm }, elsewhere));
    }
    // Of another tensor, or of rows of another width.
    let branch = C + 16;
    assert!(!joins_norm(NormAt { branch, ..norm }, elsewhere));
    let (rows, width) = (128, 192);
    assert!(!joins_norm(
        NormAt {
            rows,
            width,
            ..norm
        },
        elsewhere
    ));
}
