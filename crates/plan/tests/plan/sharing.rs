//! Evaluation planned into the arena of training.

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
        let training = Plan::new(&step, options);
        let shared = training.sharing(&step, &evaluation).unwrap();
        check(&evaluation, &shared);
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

#[test]
fn a_weight_of_another_shape_is_not_shared() {
    let step = plain().training();
    let plan = Plan::new(&step, Options::new(Target::Cpu));
    let larger = ModelSpec {
        vocabulary: 10,
        ..plain()
    };
    let error = plan.sharing(&step, &evaluation(&larger)).unwrap_err();
    let tensor = "table".to_owned();
    assert_eq!(error, PlanError::NotShared { tensor });
}

/// A transient of the step has the name and type of an input of the other graph: its place
/// is not the input's, which nobody else may write.
#[test]
fn a_transient_of_the_same_name_is_no_place_for_an_input() {
    let step = plain().training();
    let plan = Plan::new(&step, Options::new(Target::Cpu));
    let mut graph = evaluation(&plain());
    let ty: TensorType = step.ty(by_name(&step, "first"));
    graph.add_tensor("first", ty, Role::Batch);
    verify(&graph).unwrap();
    let tensor = "first".to_owned();
    assert_eq!(
        plan.sharing(&step, &graph),
        Err(PlanError::NotShared { tensor })
    );
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
        let plan = Plan::new(&many, Options::new(target));
        let shared = plan.sharing(&many, &one).unwrap();
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
        // A batch that is larger has no room.
        let tensor = "x".to_owned();
        let refused = shared.sharing(&one, &many).unwrap_err();
        assert_eq!(refused, PlanError::NotShared { tensor });
    }
}

#[test]
fn a_cache_of_another_size_is_not_shared() {
    let plan = Plan::new(&caching(8, 2), Options::new(Target::Cpu));
    let tensor = "attention.keys".to_owned();
    assert_eq!(
        plan.sharing(&caching(8, 2), &caching(8, 1)),
        Err(PlanError::NotShared { tensor })
    );
}
