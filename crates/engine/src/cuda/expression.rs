//! The source text of an expression's kernels. Widths are written into it, because they belong to
//! the model, and so are small numbers of rows, which would take longer to divide by than all else;
//! large ones and streams of dropout are arguments, so that one kernel serves every batch and every
//! layer.

use std::fmt::Write;

use cinch_graph::expression::{Binary, Broadcast, Comparison, SMALLEST, Scalar, Unary};
use cinch_graph::op::{CudaReduction, Map, Pointwise, Reduce, ReduceKind};
use cinch_graph::{DType, Dropout};

use super::command::Argument;

/// Threads of a block.
pub const THREADS: usize = 256;
/// Columns and rows of a block that sums rows of so many columns: a row that is narrower than a
/// warp leaves none of it idle.
pub fn row_block(width: usize) -> [usize; 2] {
    let columns = width.max(1).next_power_of_two().min(32);
    [columns, THREADS / columns]
}

/// Numbers of rows up to this are the model's.
const SMALL: usize = 64;
/// Outputs of a block that puts parts together, and threads for the parts of each: a thread alone
/// would wait for hundreds of them, one after the other.
pub const FINISH_BLOCK: [usize; 2] = [32, 32];

/// A kernel's source, and how it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    pub source: String,
    /// Elements that a thread has at a time.
    pub vector: usize,
}

/// How rows of a tensor follow from rows of the domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    All,
    One,
    /// So many neighbouring rows read one.
    Groups(usize),
    /// One after the other, again and again.
    Cycle(usize),
    /// Both: a group and a number of rows.
    Some(usize, usize),
}

fn rows_of(broadcast: &Broadcast, rows: usize) -> Rows {
    match (broadcast.row_group, broadcast.rows) {
        (_, 1) => Rows::One,
        (_, all) if all == rows => Rows::All,
        (group, some) if group * some == rows => Rows::Groups(group),
        (1, some) => Rows::Cycle(some),
        (group, some) => Rows::Some(group, some),
    }
}

impl Rows {
    /// What the row of a place is divided by and what is left of that: the numbers that a kernel
    /// has by a name, where it has them.
    fn numbers(self) -> [Option<(&'static str, usize)>; 2] {
        match self {
            Self::All | Self::One => [None, None],
            Self::Groups(group) => [Some(("group", group)), None],
            Self::Cycle(rows) => [None, Some(("rows", rows))],
            Self::Some(group, rows) => [Some(("group", group)), Some(("rows", rows))],
        }
    }

    /// Those that are too large to be written into a source.
    fn arguments(self) -> impl Iterator<Item = (&'static str, usize)> {
        let numbers = self.numbers().into_iter().flatten();
        numbers.filter(|(_, number)| *number > SMALL)
    }
}

/// A number of rows as a source has it.
fn number(value: usize, name: &str) -> String {
    match value <= SMALL {
        true => format!("{value}u"),
        false => name.to_owned(),
    }
}

/// The parts of a kernel that every use of an expression has.
struct Text<'a> {
    pointwise: &'a Pointwise,
    vector: usize,
    /// Whether places are counted through, without rows and columns.
    is_flat: bool,
}

impl<'a> Text<'a> {
    /// `run` is how many neighbouring elements a thread may take: a divisor of a row.
    fn new(pointwise: &'a Pointwise, is_flat: bool, run: usize, outputs: &[DType]) -> Self {
        let shape = &pointwise.shape;
        let whole = pointwise.reads.iter();
        let whole = whole.filter(|read| read.broadcast.is_full(shape));
        let sizes = whole.map(|read| read.dtype.size());
        let smallest = sizes.chain(outputs.iter().map(|dtype| dtype.size())).min();
        let most = 16 / smallest.unwrap_or(4) as usize;
        let vector = [8, 4, 2, 1]
            .into_iter()
            .find(|&vector| vector <= most && run.is_multiple_of(vector));
        Self {
            pointwise,
            vector: vector.unwrap_or(1),
            is_flat,
        }
    }

    fn width(&self) -> usize {
        self.pointwise.shape.width()
    }

    fn rows(&self, broadcast: &Broadcast) -> Rows {
        rows_of(broadcast, self.pointwise.shape.rows())
    }

    /// Inputs with what says which of their rows are read, the random state and streams.
    fn parameters(&self) -> String {
        let mut text = String::new();
        for (input, read) in self.pointwise.reads.iter().enumerate() {
            let _ = write!(text, "const {}* p{input}, ", type_name(read.dtype));
            for (name, _) in self.rows(&read.broadcast).arguments() {
                let _ = write!(text, "u32 {name}{input}, ");
            }
        }
        if self.pointwise.expression.drops() {
            text += "const u32* random, ";
        }
        for (number, scalar) in self.scalars() {
            if let Scalar::Kept { .. } = scalar {
                let _ = write!(text, "u32 stream{number}, ");
            }
        }
        text
    }

    /// What is the same for all places of a thread.
    fn preparation(&self) -> String {
        let mut text = String::new();
        for (number, scalar) in self.scalars() {
            if let Scalar::Kept { rate, .. } = scalar {
                let limit = Dropout::threshold(rate.value());
                let _ = writeln!(
                    text,
                    "    Dropout drop{number}(random, stream{number}, {limit}u);"
                );
            }
        }
        for (input, read) in self.pointwise.reads.iter().enumerate() {
            if read.broadcast.is_single() {
                let _ = writeln!(text, "    float s{input} = to_float(p{input}[0]);");
            }
        }
        text
    }

    fn scalars(&self) -> impl Iterator<Item = (usize, Scalar)> {
        self.pointwise
            .expression
            .scalars()
            .iter()
            .copied()
            .enumerate()
    }

    /// Loads what belongs to `vector` places from (row, column) on, `place` elements from the
    /// start, and computes `z0`, `z1` … of each.
    fn body(&self) -> String {
        let vector = self.vector;
        let mut text = String::new();
        for (input, read) in self.pointwise.reads.iter().enumerate() {
            if !read.broadcast.is_single() {
                let _ = writeln!(text, "        float x{input}[{vector}];");
                text += &self.load(input, &read.broadcast);
            }
        }
        for (number, scalar) in self.scalars() {
            if let Scalar::Kept { .. } = scalar {
                let _ = writeln!(text, "        u32 base{number} = drop{number}.row(row);");
            }
        }
        let outputs = self.pointwise.expression.outputs();
        for output in 0..outputs.len() {
            let _ = writeln!(text, "        float z{output}[{vector}];");
        }
        text += "#pragma unroll\n";
        let _ = writeln!(text, "        for (int j = 0; j < {vector}; j++) {{");
        for (number, scalar) in self.scalars() {
            let value = self.value(number, &scalar);
            let _ = writeln!(text, "            float t{number} = {value};");
        }
        for (output, scalar) in outputs.iter().enumerate() {
            let _ = writeln!(text, "            z{output}[j] = t{scalar};");
        }
        text + "        }\n"
    }

    fn load(&self, input: usize, broadcast: &Broadcast) -> String {
        let (vector, width) = (self.vector, self.width());
        if broadcast.is_full(&self.pointwise.shape) {
            return format!("        load(p{input} + place, x{input});\n");
        }
        let row = match self.rows(broadcast) {
            Rows::All => "row".to_owned(),
            Rows::One => "0u".to_owned(),
            some => {
                let [group, rows] = some.numbers().map(|numbers| {
                    numbers.map(|(name, value)| number(value, &format!("{name}{input}")))
                });
                let group = group.map_or(String::new(), |group| format!(" / {group}"));
                let rows = rows.map_or(String::new(), |rows| format!(" % {rows}"));
                format!("(row{group}{rows})")
            }
        };
        let columns = broadcast.columns;
        if columns == width {
            return format!("        load(p{input} + (u64){row} * {width}u + column, x{input});\n");
        }
        let group = broadcast.column_group;
        let column = match columns {
            1 => "0u".to_owned(),
            _ => format!("(column + j) / {group}u % {columns}u"),
        };
        // Neighbouring places read the same element, mostly; the compiler and the cache see that.
        format!(
            "#pragma unroll\n        for (int j = 0; j < {vector}; j++)\n            \
             x{input}[j] = to_float(p{input}[(u64){row} * {columns}u + {column}]);\n"
        )
    }

    fn value(&self, number: usize, scalar: &Scalar) -> String {
        match *scalar {
            Scalar::Input(input) => {
                let read = &self.pointwise.reads[input as usize];
                if read.broadcast.is_single() {
                    format!("s{input}")
                } else {
                    format!("x{input}[j]")
                }
            }
            Scalar::Constant(value) => literal(value.value()),
            Scalar::Column => "(float)(column + j)".to_owned(),
            Scalar::Kept { .. } => format!("drop{number}.factor(base{number}, column + j)"),
            Scalar::Unary(function, a) => unary(function, a),
            Scalar::Binary(function, a, b) => match function {
                Binary::Add => format!("t{a} + t{b}"),
                Binary::Subtract => format!("t{a} - t{b}"),
                Binary::Multiply => format!("t{a} * t{b}"),
                Binary::Divide => format!("t{a} / t{b}"),
                Binary::Max => format!("t{a} > t{b} ? t{a} : t{b}"),
                Binary::Min => format!("t{a} < t{b} ? t{a} : t{b}"),
            },
            Scalar::Select(comparison, [a, b, then, otherwise]) => {
                let sign = match comparison {
                    Comparison::Less => "<",
                    Comparison::Equal => "==",
                };
                format!("t{a} {sign} t{b} ? t{then} : t{otherwise}")
            }
        }
    }

    /// `row` and `column` from `place`, where something needs them.
    fn position(&self) -> String {
        if self.is_flat {
            return String::new();
        }
        let width = self.width();
        format!("        u32 row = place / {width}u, column = place % {width}u;\n")
    }
}

fn unary(function: Unary, a: u32) -> String {
    match function {
        Unary::Detach => format!("t{a}"),
        Unary::Negate => format!("-t{a}"),
        Unary::Abs => format!("fabsf(t{a})"),
        Unary::Exp => format!("expf(t{a})"),
        Unary::Ln => format!("logf(fmaxf(t{a}, {}))", literal(SMALLEST)),
        Unary::Sqrt => format!("sqrtf(t{a})"),
        Unary::InverseSqrt => format!("rsqrtf(t{a})"),
        // By the special function units: exact to a few units in the last place.
        Unary::Sigmoid => format!("__fdividef(1.0f, 1.0f + __expf(-t{a}))"),
        Unary::Tanh => format!("tanhf(t{a})"),
        Unary::Softplus => format!("softplus(t{a})"),
        Unary::NormalDistribution => format!("fmaf(0.5f, erff(t{a} * 0.70710678118654752f), 0.5f)"),
        Unary::Cosh => format!("coshf(t{a})"),
        Unary::Sinh => format!("sinhf(t{a})"),
        Unary::Acosh => format!("acoshf(t{a})"),
    }
}

/// A constant to the bit.
fn literal(value: f64) -> String {
    format!("__uint_as_float({:#010x}u)", (value as f32).to_bits())
}

/// The name of an element type in `common.cuh`.
fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::Bf16 => "bf16",
        DType::F16 => "f16",
        DType::I32 => "i32",
        _ => "float",
    }
}

/// The arguments of [`Text::parameters`], in their order.
pub fn arguments(pointwise: &Pointwise, input: impl Fn(usize) -> Argument) -> Vec<Argument> {
    let mut arguments = Vec::new();
    for (index, read) in pointwise.reads.iter().enumerate() {
        arguments.push(input(index));
        let rows = rows_of(&read.broadcast, pointwise.shape.rows());
        arguments.extend(rows.arguments().map(|(_, some)| Argument::U32(some as u32)));
    }
    if pointwise.expression.drops() {
        arguments.push(input(pointwise.reads.len()));
    }
    for scalar in pointwise.expression.scalars() {
        if let Scalar::Kept { stream, .. } = *scalar {
            arguments.push(Argument::Stream(stream));
        }
    }
    arguments
}

/// Whether places are counted in 32 bits.
fn is_short(elements: usize) -> bool {
    elements < 1 << 31
}

/// The last argument of `map`.
pub fn num_vectors(elements: usize, vector: usize) -> Argument {
    let vectors = elements / vector;
    if is_short(elements) {
        Argument::U32(vectors as u32)
    } else {
        Argument::U64(vectors as u64)
    }
}

/// `map(inputs…, outputs…, adds…, vectors)`: each output has its own number of `adds`, 1 where it
/// is added to.
pub fn map(op: &Map) -> Generated {
    let pointwise = &op.pointwise;
    let shape = &pointwise.shape;
    let is_whole = |broadcast: &Broadcast| broadcast.is_full(shape) || broadcast.is_single();
    let mut scalars = pointwise.expression.scalars().iter();
    let is_flat = pointwise.reads.iter().all(|read| is_whole(&read.broadcast))
        && !scalars.any(|scalar| matches!(scalar, Scalar::Column | Scalar::Kept { .. }));
    let run = if is_flat {
        shape.elements()
    } else {
        shape.width()
    };
    let text = Text::new(pointwise, is_flat, run, &op.outputs);
    let vector = text.vector;
    let index = if is_short(shape.elements()) {
        "u32"
    } else {
        "u64"
    };
    let mut parameters = text.parameters();
    let mut stores = String::new();
    for (output, dtype) in op.outputs.iter().enumerate() {
        let _ = write!(
            parameters,
            "{}* y{output}, u32 adds{output}, ",
            type_name(*dtype)
        );
        if output + op.accumulated >= op.outputs.len() {
            let _ = write!(
                stores,
                "        if (adds{output}) {{\n            float before[{vector}];\n            \
                 load(y{output} + place, before);\n#pragma unroll\n            \
                 for (int j = 0; j < {vector}; j++) z{output}[j] += before[j];\n        }}\n"
            );
        }
        let _ = writeln!(stores, "        store(y{output} + place, z{output});");
    }
    let source = format!(
        "#include \"common.cuh\"\n\n\
         KERNEL __launch_bounds__({THREADS}) map({parameters}{index} vectors) {{\n    await_earlier();\n{}    \
         {index} threads = gridDim.x * {THREADS}u;\n    \
         for ({index} i = blockIdx.x * {THREADS}u + threadIdx.x; i < vectors; i += threads) {{\n        \
         {index} place = i * {vector}u;\n{}{}{stores}    }}\n}}\n",
        text.preparation(),
        text.position(),
        text.body(),
    );
    Generated { source, vector }
}

/// `reduce(inputs…, to, outputs, span_rows, row_group, out_rows, adds)`, where `to` are partials
/// (float) if the reduction is in parts, and then `finish(partials, output, outputs, parts, adds)`.
pub fn reduce(op: &Reduce) -> Generated {
    let (first, start, join) = match op.kind {
        ReduceKind::Sum => ("z0[j]", "0.0f", "a + b"),
        ReduceKind::Max => ("z0[j]", "__uint_as_float(0xff800000u)", "b > a ? b : a"),
    };
    let reduction = op.cuda_reduction();
    let output = type_name(op.output.dtype);
    let stored = match reduction.parts() {
        1 => output,
        _ => "float",
    };
    let (body, vector) = match reduction {
        CudaReduction::Rows { .. } => rows_kernel(op, first),
        CudaReduction::Lanes { lanes, .. } => lanes_kernel(op, lanes, first),
        CudaReduction::Each => each_kernel(op, first),
    };
    let [columns, rows] = FINISH_BLOCK;
    let source = format!(
        "#include \"common.cuh\"\n\n\
         __device__ __forceinline__ float join(float a, float b) {{ return {join}; }}\n\
         constexpr u32 START = {}u;\n\
         typedef {stored} Stored;\n\
         typedef {output} Output;\n\n{body}\n\
         KERNEL __launch_bounds__({}) finish(const float* partials, Output* output, \
         u32 outputs, u32 parts, u32 adds) {{\n    await_earlier();\n    \
         __shared__ float sums[{rows}][{columns}];\n    \
         u32 i = blockIdx.x * {columns}u + threadIdx.x;\n    \
         float total = {start};\n    \
         if (i < outputs) {{\n\
         #pragma unroll 4\n    \
         for (u32 part = threadIdx.y; part < parts; part += {rows}u)\n        \
         total = join(total, partials[(u64)part * outputs + i]);\n    }}\n    \
         sums[threadIdx.y][threadIdx.x] = total;\n    \
         __syncthreads();\n    \
         if (threadIdx.y != 0 || i >= outputs) return;\n\
         #pragma unroll\n    \
         for (int y = 1; y < {rows}; y++) total = join(total, sums[y][threadIdx.x]);\n    \
         if (adds) total += to_float(output[i]);\n    \
         output[i] = from_float<Output>(total);\n}}\n",
        match op.kind {
            ReduceKind::Sum => 0_u32,
            ReduceKind::Max => f32::NEG_INFINITY.to_bits(),
        },
        columns * rows,
    );
    Generated { source, vector }
}

/// The row of the domain that is the `turn`-th of `out_row`.
fn row_text(op: &Reduce) -> String {
    let Broadcast {
        row_group, rows, ..
    } = op.broadcast;
    let [group, count] = [number(row_group, "row_group"), number(rows, "out_rows")];
    let row = if rows == op.pointwise.shape.rows() {
        "out_row".to_owned()
    } else if rows == 1 {
        "turn".to_owned()
    } else if row_group == 1 {
        format!("turn * {count} + out_row")
    } else if row_group * rows == op.pointwise.shape.rows() {
        format!("out_row * {group} + turn")
    } else {
        format!("(turn / {group} * {count} + out_row) * {group} + turn % {group}")
    };
    format!("        u32 row = {row};\n")
}

/// A column, or a vector of them, to a thread, and every so many rows.
fn rows_kernel(op: &Reduce, value: &str) -> (String, usize) {
    let width = op.pointwise.shape.width();
    let [columns, rows] = row_block(width);
    // Vectors only as long as a block's columns are all there.
    let run = [8, 4, 2]
        .into_iter()
        .find(|&v| width.is_multiple_of(v * columns));
    let text = Text::new(&op.pointwise, false, run.unwrap_or(1), &[]);
    let vector = text.vector;
    let blocks = width.div_ceil(columns * vector);
    let body = format!(
        "KERNEL __launch_bounds__({THREADS}) reduce({}Stored* to, u32 outputs, u32 span_rows, \
         u32 row_group, u32 out_rows, u32 adds) {{\n    await_earlier();\n    \
         __shared__ float sums[{rows}][{}];\n{}    \
         u32 out_row = blockIdx.x / {blocks}u;\n    \
         u32 column = (blockIdx.x % {blocks}u * {columns}u + threadIdx.x) * {vector}u;\n    \
         float total[{vector}];\n#pragma unroll\n    \
         for (int j = 0; j < {vector}; j++) total[j] = __uint_as_float(START);\n    \
         if (column < {width}u) {{\n\
         #pragma unroll 4\n    \
         for (u32 turn = blockIdx.y * {rows}u + threadIdx.y; turn < span_rows; \
         turn += gridDim.y * {rows}u) {{\n{}        \
         u64 place = (u64)row * {width}u + column;\n{}\
         #pragma unroll\n        \
         for (int j = 0; j < {vector}; j++) total[j] = join(total[j], {value});\n    }}\n    }}\n\
         #pragma unroll\n    \
         for (int j = 0; j < {vector}; j++) sums[threadIdx.y][threadIdx.x * {vector} + j] = total[j];\n    \
         __syncthreads();\n    \
         if (threadIdx.y != 0 || column >= {width}u) return;\n\
         #pragma unroll\n    \
         for (int j = 0; j < {vector}; j++) {{\n        \
         float sum = __uint_as_float(START);\n        \
         for (int y = 0; y < {rows}; y++) sum = join(sum, sums[y][threadIdx.x * {vector} + j]);\n        \
         u64 at = (u64)blockIdx.y * outputs + (u64)out_row * {width}u + column + j;\n        \
         if (adds) sum += to_float(to[at]);\n        \
         to[at] = from_float<Stored>(sum);\n    }}\n}}\n",
        text.parameters(),
        columns * vector,
        text.preparation(),
        row_text(op),
        text.body(),
    );
    (body, vector)
}

/// Neighbouring outputs to a thread, with all rows of each.
fn each_kernel(op: &Reduce, value: &str) -> (String, usize) {
    let width = op.pointwise.shape.width();
    // No more than four: threads are to be many.
    let run = [4, 2].into_iter().find(|&v| width.is_multiple_of(v));
    let text = Text::new(&op.pointwise, false, run.unwrap_or(1), &[op.output.dtype]);
    let vector = text.vector;
    let body = format!(
        "KERNEL __launch_bounds__({THREADS}) reduce({}Stored* to, u32 outputs, u32 span_rows, \
         u32 row_group, u32 out_rows, u32 adds) {{\n    await_earlier();\n{}    \
         u32 output = (blockIdx.x * {THREADS}u + threadIdx.x) * {vector}u;\n    \
         if (output >= outputs) return;\n    \
         u32 out_row = output / {width}u, column = output % {width}u;\n    \
         float total[{vector}];\n#pragma unroll\n    \
         for (int j = 0; j < {vector}; j++) total[j] = __uint_as_float(START);\n\
         #pragma unroll 4\n    \
         for (u32 turn = 0; turn < {}; turn++) {{\n{}        \
         u64 place = (u64)row * {width}u + column;\n{}\
         #pragma unroll\n        \
         for (int j = 0; j < {vector}; j++) total[j] = join(total[j], {value});\n    }}\n    \
         if (adds) {{\n        \
         float before[{vector}];\n        \
         load(to + output, before);\n#pragma unroll\n        \
         for (int j = 0; j < {vector}; j++) total[j] += before[j];\n    }}\n    \
         store(to + output, total);\n}}\n",
        text.parameters(),
        text.preparation(),
        number(op.span().0, "span_rows"),
        row_text(op),
        text.body(),
    );
    (body, vector)
}

/// Some threads to an output, each with every so many of its places.
fn lanes_kernel(op: &Reduce, lanes: usize, value: &str) -> (String, usize) {
    let width = op.pointwise.shape.width();
    let Broadcast {
        columns,
        column_group: group,
        ..
    } = op.broadcast;
    let text = Text::new(&op.pointwise, false, group, &[]);
    let vector = text.vector;
    let vectors = width / columns / vector;
    let together = if lanes > 32 {
        "    __shared__ float scratch[32];\n    \
         int warp = threadIdx.x / 32;\n\
         #pragma unroll\n    \
         for (int offset = 16; offset > 0; offset /= 2)\n        \
         total = join(total, __shfl_xor_sync(0xffffffffu, total, offset));\n    \
         if (threadIdx.x % 32 == 0) scratch[warp] = total;\n    \
         __syncthreads();\n    \
         total = scratch[0];\n    \
         for (int w = 1; w < 8; w++) total = join(total, scratch[w]);\n"
            .to_owned()
    } else {
        format!(
            "#pragma unroll\n    \
             for (int offset = {}; offset > 0; offset /= 2)\n        \
             total = join(total, __shfl_xor_sync(0xffffffffu, total, offset));\n",
            lanes / 2
        )
    };
    let body = format!(
        "KERNEL __launch_bounds__({THREADS}) reduce({}Stored* to, u32 outputs, u32 span_rows, \
         u32 row_group, u32 out_rows, u32 adds) {{\n    await_earlier();\n{}    \
         u32 lane = threadIdx.x % {lanes}u;\n    \
         u32 output = blockIdx.x * {}u + threadIdx.x / {lanes}u;\n    \
         float total = __uint_as_float(START);\n    \
         if (output < outputs) {{\n    \
         u32 out_row = output / {columns}u, out_column = output % {columns}u;\n    \
         u64 places = (u64){} * {vectors}u;\n    \
         for (u64 s = (u64)blockIdx.y * {lanes}u + lane; s < places; s += (u64)gridDim.y * {lanes}u) {{\n        \
         u32 turn = s / {vectors}u, c = (u32)(s % {vectors}u) * {vector}u;\n{}        \
         u32 column = (c / {group}u * {columns}u + out_column) * {group}u + c % {group}u;\n        \
         u64 place = (u64)row * {width}u + column;\n{}\
         #pragma unroll\n        \
         for (int j = 0; j < {vector}; j++) total = join(total, {value});\n    }}\n    }}\n{together}    \
         if (lane != 0 || output >= outputs) return;\n    \
         u64 at = (u64)blockIdx.y * outputs + output;\n    \
         if (adds) total += to_float(to[at]);\n    \
         to[at] = from_float<Stored>(total);\n}}\n",
        text.parameters(),
        text.preparation(),
        THREADS / lanes,
        number(op.span().0, "span_rows"),
        row_text(op),
        text.body(),
    );
    (body, vector)
}

#[cfg(test)]
mod tests {
    use cinch_graph::op::{Op, Over};
    use cinch_graph::{DType, Graph};

    use super::*;

    /// The sources of two layers over a batch of so many rows.
    fn sources(rows: usize) -> Vec<String> {
        let mut graph = Graph::new(DType::Bf16);
        let x = graph.batch("x", [rows, 24], DType::Bf16);
        let row = graph.batch("row", [24], DType::F32);
        let column = graph.batch("column", [rows], DType::F32);
        for layer in 0..2 {
            let dropout = graph.dropout(0.1);
            let name = format!("{layer}");
            graph
                .map(&name, &[x, row, column], |v| {
                    (v[0].silu() * &v[1] + &v[2]).dropout(dropout)
                })
                .unwrap();
            graph
                .sum(&name, Over::Columns, &[x], |v| v[0].square())
                .unwrap();
        }
        let source = |op: &Op| match op {
            Op::Map(op) => map(op).source,
            Op::Reduce(op) => reduce(op).source,
            other => panic!("{other:?}"),
        };
        graph.nodes.iter().map(|node| source(&node.op)).collect()
    }

    #[test]
    fn layers_and_batches_share_their_kernels() {
        let few = sources(5);
        assert_eq!(few[..2], few[2..]);
        assert_eq!(few, sources(300));
        assert!(few[0].contains("load(p0 + place, x0)"), "{}", few[0]);
    }
}
