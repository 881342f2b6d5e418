//! The step of one of several ranks: well formed at every level, with the bytes that a hand
//! computes, and with collectives where gradients are complete.

use cinch_graph::op::{
    AllGather, AllReduce, Await, GatherRows, MomentFormat, Op, Quantisation, ReduceScatter,
};
use cinch_graph::{
    Count, DType, Graph, Init, Optimizer, Phase, Recompute, Role, Shape, Shard, ShardLevel,
    Sharding, TensorId, TensorType, TrainingGraph, differentiate, verify,
};
use proptest::prelude::*;

use crate::random_model::{cases, models, optimizer};
use crate::small_model;

const LEVELS: [ShardLevel; 4] = [
    ShardLevel::None,
    ShardLevel::Optimizer,
    ShardLevel::Gradients,
    ShardLevel::Weights,
];

/// Two matrices of 512·256 and 8·512 numbers and a bias of 8, in blocks of one.
fn two_layers(compute: DType, optimizer: &Optimizer) -> TrainingGraph {
    let mut g = Graph::new(compute);
    let x = g.batch("x", [4, 256], compute);
    g.enter_block("first");
    let weight = g.weight("first.weight", [512, 256], Init::Zeros);
    let h = g.linear("first", x, weight, None).unwrap();
    g.leave_block();
    g.enter_block("second");
    let weight = g.weight("second.weight", [8, 512], Init::Zeros);
    let bias = g.small_weight("second.bias", [8], Init::Zeros);
    let h = g.linear("second", h, weight, Some(bias)).unwrap();
    g.leave_block();
    let head = g.weight("head.weight", [16, 8], Init::Zeros);
    let targets = g.batch("targets", [4], DType::I32);
    g.cross_entropy("loss", h, head, targets, 0.0, None)
        .unwrap();
    differentiate(g, optimizer).unwrap()
}

const WHOLE: [usize; 4] = [512 * 256, 8 * 512, 8, 16 * 8];

fn bytes(graph: &Graph, role: Role) -> u64 {
    let tensors = graph.tensors.iter().filter(|tensor| tensor.role == role);
    tensors.map(|tensor| tensor.ty.bytes()).sum()
}

#[test]
fn parts_are_alike_and_cover_the_whole() {
    for (elements, ranks, part) in [
        (1024, 4, 256),
        (1025, 4, 512),
        (8, 4, 256),
        (1 << 20, 8, 1 << 17),
    ] {
        let shard = Shard::of(&TensorType::new([elements], DType::F32), ranks);
        assert_eq!(shard.part(), part);
        let mut next = 0;
        for rank in 0..ranks {
            let range = shard.range(rank);
            assert!(range.len() <= part);
            assert_eq!(range.start, next);
            next = range.end;
        }
        assert_eq!(next, elements);
    }
}

#[test]
fn a_rank_keeps_what_its_level_says() {
    let whole: u64 = WHOLE.iter().sum::<usize>() as u64;
    for ranks in [2_usize, 4, 6] {
        let part = |elements: usize| elements.div_ceil(ranks).next_multiple_of(256) as u64;
        let part: u64 = WHOLE.iter().map(|&elements| part(elements)).sum();
        let step = two_layers(DType::Bf16, &optimizer());
        // Masters, compute copies (all but the bias, which is read in single precision),
        // gradients and states.
        let copies = (whole - 8) * 2;
        let expected = [
            [whole * 4, copies, whole * 4, whole * 8],
            [part * 4, copies + 8 * 4, whole * 4, part * 8],
            [part * 4, copies + 8 * 4, part * 4, part * 8],
            [part * 4, 0, part * 4, part * 8],
        ];
        for (level, expected) in LEVELS.into_iter().zip(expected) {
            let rank = step.shard(Sharding { ranks, level }).unwrap();
            verify(&rank).unwrap();
            let roles = [
                Role::Parameter,
                Role::ComputeCopy,
                Role::Gradient,
                Role::State,
            ];
            assert_eq!(roles.map(|role| bytes(&rank, role)), expected, "{level:?}");
        }
    }
}

#[test]
fn one_rank_is_the_step_itself() {
    let step = two_layers(DType::F32, &optimizer());
    for level in LEVELS {
        assert_eq!(step.shard(Sharding { ranks: 1, level }).unwrap(), step);
    }
}

#[test]
fn evaluation_reads_what_training_keeps() {
    for level in LEVELS {
        let sharding = Sharding { ranks: 2, level };
        let evaluation = small_model::forward().shard(sharding);
        verify(&evaluation).unwrap();
        let step = differentiate(small_model::forward(), &optimizer()).unwrap();
        let step = step.shard(sharding).unwrap();
        for tensor in &evaluation.tensors {
            if !matches!(tensor.role, Role::Parameter | Role::ComputeCopy) {
                continue;
            }
            let id = step.find(&tensor.name).unwrap();
            assert_eq!(step.tensor(id), tensor, "{level:?}");
        }
    }
}

#[test]
fn states_in_eight_bits_are_cut_between_blocks() {
    let optimizer = Optimizer {
        moments: MomentFormat::EightBit,
        ..optimizer()
    };
    let sharding = Sharding {
        ranks: 4,
        level: ShardLevel::Optimizer,
    };
    let step = two_layers(DType::F32, &optimizer).shard(sharding).unwrap();
    verify(&step).unwrap();
    let of = |name: &str| step.ty(step.find(name).unwrap());
    assert_eq!(of("first.weight.m"), TensorType::new([512 * 64], DType::U8));
    assert_eq!(
        of("first.weight.m.scales"),
        TensorType::new([128], DType::F32)
    );
    // A small tensor is kept in full, by the size of the whole and not of its part.
    assert_eq!(of("second.bias.m"), TensorType::new([256], DType::F32));
}

#[test]
fn gradients_leave_when_they_are_complete() {
    let step = two_layers(DType::F32, &optimizer());
    let plain = step
        .shard(Sharding {
            ranks: 2,
            level: ShardLevel::None,
        })
        .unwrap();
    let summed = |node: &&cinch_graph::Node| node.phase == Phase::Exchange;
    let exchanged: usize = plain
        .nodes
        .iter()
        .filter(summed)
        .map(|n| n.outputs.len())
        .sum();
    // Four gradients and the loss.
    assert_eq!(exchanged, WHOLE.len() + 1);
    let cut = step
        .shard(Sharding {
            ranks: 2,
            level: ShardLevel::Gradients,
        })
        .unwrap();
    let is_reduced = |node: &&cinch_graph::Node| matches!(node.op, Op::ReduceScatter(_));
    let reduced: Vec<_> = cut.nodes.iter().filter(is_reduced).collect();
    assert!(reduced.iter().all(|node| node.phase != Phase::Exchange));
    for id in reduced.iter().flat_map(|node| &node.inputs) {
        assert_eq!(cut.tensor(*id).role, Role::Activation);
        // Whoever waits for the reduction keeps its place until then.
        let last = cut.nodes.iter().rfind(|node| node.inputs.contains(id));
        assert!(matches!(last.unwrap().op, Op::Await(_)));
    }
}

#[test]
fn what_a_collective_sends_follows_from_the_ring() {
    let step = two_layers(DType::F32, &optimizer());
    let whole: u64 = WHOLE.iter().sum::<usize>() as u64;
    let ranks = 4;
    let sharding = Sharding {
        ranks,
        level: ShardLevel::None,
    };
    let rank = step.shard(sharding).unwrap();
    let sent: u64 = rank
        .nodes
        .iter()
        .filter_map(|node| rank.wire(node))
        .map(|wire| wire.bytes)
        .sum();
    // Gradients and the loss, once around for the sums and once for what they are.
    assert_eq!(sent, 2 * (whole + 1) * 4 * 3 / 4);
}

#[test]
fn a_step_that_updates_in_its_backward_is_refused() {
    let step = two_layers(DType::F32, &optimizer()).update_in_backward();
    let sharding = Sharding {
        ranks: 2,
        level: ShardLevel::None,
    };
    let error = step.shard(sharding).unwrap_err();
    assert!(error.to_string().contains("2 ranks"), "{error}");
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn every_model_is_well_formed_at_every_level(model in models(), ranks in 2_usize..9) {
        let base = differentiate(model.forward(), &optimizer()).unwrap();
        for count in [0, base.blocks.len()] {
            let step = base.recompute(Recompute::Blocks(count)).unwrap();
            for level in LEVELS {
                let rank = step.shard(Sharding { ranks, level }).unwrap();
                prop_assert_eq!(verify(&rank), Ok(()));
            }
        }
    }
}

/// Adapters on a frozen base: the base is cut with the weights and gathered, codes too.
#[test]
fn frozen_weights_are_cut_with_the_others() {
    let build = |quantised: bool| {
        let mut g = Graph::new(DType::Bf16);
        let x = g.batch("x", [4, 256], DType::Bf16);
        g.enter_block("first");
        let base = match quantised {
            true => g
                .quantised_weight("base", [512, 256], Init::Zeros, Quantisation::Int8)
                .unwrap(),
            false => g.frozen_weight("base", [512, 256], Init::Zeros),
        };
        let h = g.linear("base", x, base, None).unwrap();
        let down = g.weight("down", [8, 512], Init::Zeros);
        let h = g.linear("down", h, down, None).unwrap();
        g.leave_block();
        let head = g.weight("head", [16, 8], Init::Zeros);
        let targets = g.batch("targets", [4], DType::I32);
        g.cross_entropy("loss", h, head, targets, 0.0, None)
            .unwrap();
        differentiate(g, &optimizer()).unwrap()
    };
    for (quantised, bytes) in [(false, 2), (true, 1)] {
        let step = build(quantised);
        for level in LEVELS {
            let rank = step.shard(Sharding { ranks: 4, level }).unwrap();
            verify(&rank).unwrap();
            let base = rank.ty(rank.find("base").unwrap());
            let expected = match level {
                ShardLevel::Weights => 512 * 256 * bytes / 4,
                _ => 512 * 256 * bytes,
            };
            assert_eq!(base.bytes(), expected, "{level:?}");
            let gathers = rank.nodes.iter().filter(|node| {
                let of_base = |id: &TensorId| rank.tensor(*id).name == "base";
                matches!(node.op, Op::AllGather(_)) && node.inputs.iter().any(of_base)
            });
            assert_eq!(gathers.count() > 0, level == ShardLevel::Weights);
        }
    }
}

/// A term of a mean over the rows of all ranks times a sum of the rank's own.
fn balanced(detached: bool) -> Result<TrainingGraph, cinch_graph::GraphError> {
    let mut g = Graph::new(DType::F32);
    let x = g.batch("x", [4, 6], DType::F32);
    g.enter_block("first");
    let weight = g.weight("weight", [3, 6], Init::Zeros);
    let h = g.linear("h", x, weight, None)?;
    let mean = g.mean_of_ranks("mean", &[h], |v| v[0].detach())?;
    g.leave_block();
    let own = g.sum_of_micro_batch("own", &[h], |v| v[0].square())?;
    g.loss_term("term", Count::Rows(1), &[mean, own], |v| match detached {
        true => v[0].detach() * &v[1],
        false => &v[0] * &v[1],
    })?;
    differentiate(g, &optimizer())
}

#[test]
fn rows_of_all_ranks_meet_in_a_mean_without_gradient() {
    let step = balanced(true).unwrap();
    assert_eq!(step.whole_batch(), None);
    for count in [0, 1] {
        let step = step.recompute(Recompute::Blocks(count)).unwrap();
        for level in LEVELS {
            let rank = step.shard(Sharding { ranks: 3, level }).unwrap();
            verify(&rank).unwrap();
            let gathers = rank.nodes.iter();
            let gathers = gathers.filter(|node| matches!(node.op, Op::GatherRows(_)));
            let gathers: Vec<_> = gathers.collect();
            // Nothing is exchanged in the backward: what is known of the others is kept.
            assert!(gathers.iter().all(|node| node.phase == Phase::Forward));
            assert_eq!(gathers.len(), 1, "{level:?}, {count} recomputed");
            let all = gathers[0].outputs[0];
            assert_eq!(rank.ty(all), TensorType::new([3, 3], DType::F32));
            assert_eq!(rank.wire(gathers[0]).unwrap().bytes, 3 * 3 * 4 * 2 / 3);
            let mean = rank.nodes.iter().find(|node| node.inputs.contains(&all));
            assert_eq!(mean.unwrap().name, "mean");
        }
    }
    let error = balanced(false).unwrap_err().to_string();
    assert!(error.contains("`mean`"), "{error}");
}

#[test]
fn collectives_are_printed_and_checked() {
    let step = two_layers(DType::F32, &optimizer());
    let sharding = Sharding {
        ranks: 2,
        level: ShardLevel::Gradients,
    };
    let rank = step.shard(sharding).unwrap();
    let text = rank.to_string();
    for word in ["reduce_scatter(", "await(", "all_gather(", "all_reduce("] {
        assert!(text.contains(word), "no {word} in {text}");
    }
    let mut broken: Graph = (*rank).clone();
    let sum = Op::from(AllReduce {
        ranks: 2,
        tensors: vec![TensorType::new([1], DType::F32)],
    });
    let first = small_model::position(&broken, "loss.summed");
    let mut node = broken.nodes.remove(first);
    node.op = sum;
    node.phase = Phase::Forward;
    broken.nodes.insert(0, node);
    let error = verify(&broken).unwrap_err().to_string();
    assert!(error.contains("before it is written"), "{error}");
    // One rank has nobody to add up with.
    let alone = AllReduce {
        ranks: 1,
        tensors: vec![TensorType::new([1], DType::F32)],
    };
    assert!(Op::from(alone).declaration().infer(&[]).is_err());
    let gather = Op::from(AllGather {
        ranks: 2,
        tensors: vec![TensorType::new([512], DType::Bf16)],
    });
    let gather = gather.declaration();
    let part = |elements: usize, dtype| [TensorType::new([elements], dtype)];
    assert!(gather.infer(&part(256, DType::F32)).is_ok());
    assert!(gather.infer(&part(128, DType::F32)).is_err());
    assert!(gather.infer(&part(256, DType::F16)).is_err());
    assert!(gather.infer(&[]).is_err());
    let rows = Op::from(GatherRows { ranks: 2 });
    assert!(rows.declaration().infer(&part(8, DType::F32)).is_ok());
    assert!(rows.declaration().infer(&part(8, DType::I32)).is_err());
    assert!(rows.declaration().infer(&[]).is_err());
    let deep = TensorType::new(Shape::new(&[1; Shape::MAX_RANK]), DType::F32);
    assert!(rows.declaration().infer(&[deep]).is_err());
    let scatter = Op::from(ReduceScatter { ranks: 2 });
    assert!(scatter.declaration().infer(&[]).is_err());
    assert!(scatter.declaration().infer(&part(8, DType::I32)).is_err());
    assert!(Op::from(Await).declaration().infer(&[]).is_err());
}
