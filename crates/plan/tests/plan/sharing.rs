//! Several graphs in one arena: training and evaluation, longer and shorter rows.

use cinch_graph::{Graph, Recompute, Role, Target, TensorId, TensorType, verify};
use cinch_plan::{Options, Plan, PlanError};
use proptest::prelude::*;

use crate::check::check;
use crate::random_model::{ModelSpec, cases, models};

/// The model as it is evaluated: nothing is dropped.
fn evaluation(model: &ModelSpec) -> Graph {
    let model = ModelSpec {
        dropout: 0.0,
        ..model.clone()
    };
    model.forward()
}

fn by_name(graph: &Graph, name: &str) -> TensorId {
    let found = graph.tensors.iter().position(|t| t.name == name);
    TensorId(found.unwrap_or_else(|| panic!("no `{name}`")) as u32)
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn both_graphs_find_the_weights_in_one_place(
        model in models(),
        offload_states in any::<bool>(),
    ) {
        let step = model.training().recompute(Recompute::Full).unwrap();
        let evaluation = evaluation(&model);
        let options = Options { offload_states, ..Options::new(Target::Cpu) };
        let alone = Plan::new(&step, options);
        let plans = Plan::several(&[&step, &evaluation], options).unwrap();
        let [training, shared] = &plans[..] else { panic!("a plan for each graph") };
        // Who shares has what it has alone.
        prop_assert_eq!(&alone, training);
        check(&evaluation, shared);
        prop_assert_eq!(shared.persistent_bytes, training.persistent_bytes);
        for (index, tensor) in evaluation.tensors.iter().enumerate() {
            if tensor.role.is_persistent() {
                let here = shared.placement(TensorId(index as u32));
                let there = training.placement(by_name(&step, &tensor.name));
                prop_assert!(here.is_some());
                prop_assert_eq!(here, there, "{}", &tensor.name);
            }
        }
        // The evaluation's transients are over the step's, never over its gradients or states.
        for buffer in (0..evaluation.tensors.len() as u32).map(TensorId) {
            if evaluation.tensor(buffer).role == Role::Activation
                && let Some(place) = shared.placement(buffer)
            {
                prop_assert!(place.offset >= training.persistent_bytes);
            }
        }
        prop_assert!(shared.breakdown(&evaluation).total() >= shared.arena_bytes);
    }
}

fn plain() -> ModelSpec {
    ModelSpec {
        batch: 1,
        length: 3,
        width: 4,
        vocabulary: 9,
        compute: cinch_graph::DType::F32,
        norm: cinch_graph::op::NormKind::Rms,
        dropout: 0.0,
        positions: false,
        bias: false,
        tied: true,
        padding: false,
        blocks: vec![vec![crate::random_model::Layer::Columns]],
        frozen: 0,
    }
}

fn sharing(graphs: &[&Graph]) -> Result<Vec<Plan>, PlanError> {
    Plan::several(graphs, Options::new(Target::Cpu))
}

fn not_shared(tensor: &str) -> Result<Vec<Plan>, PlanError> {
    let tensor = tensor.to_owned();
    Err(PlanError::NotShared { tensor })
}

#[test]
fn a_weight_of_another_shape_is_not_shared() {
    let step = plain().training();
    let larger = ModelSpec {
        vocabulary: 10,
        ..plain()
    };
    assert_eq!(sharing(&[&step, &evaluation(&larger)]), not_shared("table"));
}

/// A transient of the step has the name and type of an input of the other graph: its place
/// is not the input's, which nobody else may write.
#[test]
fn a_transient_of_the_same_name_is_no_place_for_an_input() {
    let step = plain().training();
    let mut graph = evaluation(&plain());
    let ty: TensorType = step.ty(by_name(&step, "first"));
    let input = graph.add_tensor("first", ty, Role::Batch);
    verify(&graph).unwrap();
    let plans = sharing(&[&step, &graph]).unwrap();
    assert!(plans[1].placement(input).unwrap().end() <= plans[0].persistent_bytes);
    let alone = Plan::new(&step, Options::new(Target::Cpu));
    assert!(plans[0].persistent_bytes > alone.persistent_bytes);
}

#[test]
fn two_tensors_of_one_graph_never_share_a_place() {
    let graph = evaluation(&plain());
    assert!(sharing(&[&graph, &graph]).is_ok());
    let mut twice = graph.clone();
    twice.add_tensor("tokens", graph.ty(by_name(&graph, "tokens")), Role::Batch);
    assert_eq!(sharing(&[&twice]), not_shared("tokens"));
}

/// Rows of several lengths: gradients and states in one place, each graph's transients over the
/// others', and the arena as large as the largest takes alone.
#[test]
fn shorter_rows_take_no_more_than_the_longest() {
    for target in [Target::Cpu, Target::Cuda] {
        let options = Options::new(target);
        let steps = [3, 9, 5].map(|length| {
            let model = ModelSpec { length, ..plain() };
            model.training().recompute(Recompute::None).unwrap()
        });
        let graphs: Vec<&Graph> = steps.iter().map(|step| -> &Graph { step }).collect();
        let plans = Plan::several(&graphs, options).unwrap();
        let alone = Plan::new(&steps[1], options);
        assert_eq!(plans[1], alone);
        for (graph, plan) in graphs.iter().zip(&plans) {
            check(graph, plan);
            assert!(plan.arena_bytes <= alone.arena_bytes);
            assert_eq!(plan.persistent_bytes, alone.persistent_bytes);
            for (index, tensor) in graph.tensors.iter().enumerate() {
                let place = plan.placement(TensorId(index as u32));
                let longest = steps[1].find(&tensor.name);
                if let (Some(place), Some(longest)) = (place, longest)
                    && tensor.role.is_persistent()
                {
                    let there = alone.placement(longest).unwrap();
                    assert_eq!(place.offset, there.offset, "{}", tensor.name);
                    let shorter = tensor.role == Role::Batch;
                    assert!(place.bytes == there.bytes || shorter && place.bytes < there.bytes);
                }
            }
        }
    }
}

/// A graph that keeps something between runs, over so many rows of a batch.
fn caching(rows: usize, batch: usize) -> Graph {
    use cinch_graph::op::{Attention, AttentionInputs, CachedAttention};
    let mut graph = Graph::new(cinch_graph::DType::F32);
    let x = graph.batch("x", [batch, rows, 12], cinch_graph::DType::F32);
    let positions = graph.batch("positions", [batch, rows], cinch_graph::DType::I32);
    let attention = Attention {
        inputs: AttentionInputs::Packed,
        heads: 2,
        kv_heads: 1,
        head_dim: 3,
        causal: true,
        scale: 1.0,
        dropout: None,
        padding: false,
        window: None,
        documents: false,
        selection: false,
    };
    let op = CachedAttention {
        attention,
        slots: 16,
    };
    let o = graph
        .attend_cached("attention", op, &[x], positions)
        .unwrap();
    graph.result = Some(o);
    verify(&graph).unwrap();
    graph
}

#[test]
fn graphs_that_read_fewer_tokens_share_the_cache() {
    for target in [Target::Cpu, Target::Cuda] {
        let (many, one) = (caching(8, 1), caching(1, 1));
        // Whichever comes first, the longer has room.
        let plans = Plan::several(&[&one, &many], Options::new(target)).unwrap();
        let [shared, plan] = &plans[..] else {
            panic!("a plan for each graph")
        };
        for name in ["attention.keys", "attention.values"] {
            let (here, there) = (by_name(&one, name), by_name(&many, name));
            assert_eq!(one.tensor(here).role, Role::Cache);
            assert_eq!(shared.placement(here), plan.placement(there));
        }
        // What a batch brings is smaller, in the same place.
        let (here, there) = (by_name(&one, "x"), by_name(&many, "x"));
        let (here, there) = (
            shared.placement(here).unwrap(),
            plan.placement(there).unwrap(),
        );
        assert_eq!(here.offset, there.offset);
        assert_eq!(8 * here.bytes, there.bytes);
        let cache = cinch_plan::Category::Cache.index();
        let bytes = plan.timeline_by_category(&many)[0][cache];
        assert!(bytes >= 2 * 16 * 3 * 4, "{bytes}");
    }
}

#[test]
fn a_cache_of_another_size_is_not_shared() {
    assert_eq!(
        sharing(&[&caching(8, 2), &caching(8, 1)]),
        not_shared("attention.keys")
    );
}
