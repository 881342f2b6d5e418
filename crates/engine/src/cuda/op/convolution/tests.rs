//! Launches as the kernels expect them.

use cinch_graph::DType;

use super::*;
use crate::cuda::command::Command;
use crate::cuda::op::scan::tests::{launches, lowered, num_parameters};

fn check_arguments(commands: &[Command]) {
    let source = include_str!("../../kernels/convolution.cu");
    for (function, _, arguments) in launches(commands) {
        let digits = function.trim_end_matches(|c: char| c.is_ascii_digit());
        let family = if digits == function {
            function.to_owned()
        } else {
            format!("{digits}##W")
        };
        let expected = num_parameters(source, &family, &[]);
        assert_eq!(arguments.len(), expected, "{function}");
    }
}

/// x, weight, bias.
fn inputs(channels: usize, width: usize) -> Vec<TensorType> {
    vec![
        TensorType::new([2, 70, channels + 8], DType::Bf16),
        TensorType::new([channels, width], DType::F32),
        TensorType::new([channels], DType::F32),
    ]
}

#[test]
fn narrow_windows_take_four_channels_a_thread() {
    let op = op::Convolution { first_column: 4 };
    let (commands, workspace) = lowered(op, &inputs(400, 4));
    let [(function, shape, arguments)] = launches(&commands)[..] else {
        panic!("{commands:?}");
    };
    assert_eq!((function, workspace), ("convolution_forward_4", 0));
    // 100 pieces in three runs of each of two sequences.
    assert_eq!(shape.grid[0], 600_u32.div_ceil(128));
    assert_eq!(arguments.last(), Some(&Argument::U32(1)));
    check_arguments(&commands);
}

#[test]
fn a_gradient_has_sums_of_each_run() {
    let mut types = inputs(37, 7);
    types.insert(0, TensorType::new([2, 70, 37], DType::Bf16));
    let op = op::ConvolutionBackward {
        first_column: 3,
        accumulate: false,
        parameters: true,
    };
    let (commands, workspace) = lowered(op, &types);
    assert!(matches!(commands[0], Command::Clear { .. }));
    assert_eq!(workspace, 6 * 37 * 8 * 4);
    let functions: Vec<_> = launches(&commands).iter().map(|launch| launch.0).collect();
    assert_eq!(
        functions,
        ["convolution_backward_16", "convolution_parameters"]
    );
    check_arguments(&commands);
}

#[test]
fn untrained_parameters_cost_nothing() {
    let mut types = inputs(36, 3);
    types.insert(0, TensorType::new([2, 70, 36], DType::Bf16));
    types.push(types[1]);
    let op = op::ConvolutionBackward {
        first_column: 2,
        accumulate: true,
        parameters: false,
    };
    let (commands, workspace) = lowered(op, &types);
    assert_eq!((launches(&commands).len(), workspace), (1, 0));
    // Column 2 is no place for vectors of four.
    let (_, _, arguments) = launches(&commands)[0];
    assert_eq!(arguments.last(), Some(&Argument::U32(0)));
    check_arguments(&commands);
}
