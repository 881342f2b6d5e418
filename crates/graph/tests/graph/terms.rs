//! A loss of several terms.

use cinch_graph::{Count, DType, Graph, Init, differentiate, verify};

use crate::random_model::optimizer;

const INIT: Init = Init::Normal { std: 0.02 };

/// Two heads over one layer, each with targets of its own.
fn two_heads() -> Graph {
    let mut g = Graph::new(DType::F32);
    let tokens = g.batch("tokens", [2, 3], DType::I32);
    let table = g.weight("table", [11, 4], INIT);
    let x = g.embedding("embedding", tokens, table, None, None).unwrap();
    let weight = g.weight("layer", [4, 4], INIT);
    let h = g.linear("layer", x, weight, None).unwrap();
    for name in ["first", "second"] {
        let head = g.weight(&format!("{name}.head"), [5, 4], INIT);
        let targets = g.batch(&format!("{name}.targets"), [2, 3], DType::I32);
        g.cross_entropy(name, h, head, targets, 0.0, None).unwrap();
    }
    g
}

#[test]
fn each_term_has_a_weight_and_a_count_of_its_own() {
    let mut graph = two_heads();
    assert!(graph.weigh_term("second", 0.25));
    assert!(!graph.weigh_term("third", 0.25));
    let [first, second] = &graph.terms[..] else {
        panic!("{:?}", graph.terms);
    };
    assert_eq!((first.weight, second.weight), (1.0, 0.25));
    assert_ne!(first.inputs, second.inputs);
    for term in [first, second] {
        let Count::Targets(targets) = term.count else {
            panic!("{:?}", term.count);
        };
        let expected = format!("{}.targets", term.name);
        assert_eq!(graph.tensor(targets).name, expected);
        assert!(graph.term_of(term.value).is_some());
    }
    assert_eq!(graph.whole_batch(), None);
}

/// A term of the batch as a whole is told by its name.
#[test]
fn what_counts_the_batch_needs_all_of_it() {
    let mut graph = two_heads();
    graph.terms[1].count = Count::Batch;
    let whole = graph.whole_batch().unwrap();
    assert_eq!(whole.what, "the term `second`");
    assert!(whole.reason.contains("whole batch"), "{}", whole.reason);
    // The step knows it too.
    let step = differentiate(graph, &optimizer()).unwrap();
    assert_eq!(step.whole_batch(), Some(whole));
}

/// The gradients of both reach what they share, and each head its own.
#[test]
fn all_terms_are_differentiated() {
    let step = differentiate(two_heads(), &optimizer()).unwrap();
    verify(&step).unwrap();
    for parameter in &step.parameters {
        let name = &step.tensor(parameter.master).name;
        assert!(parameter.gradient.is_some(), "{name}");
    }
    let sums = step.nodes.iter().filter(|node| node.op.name() == "add");
    assert_eq!(sums.count(), 1, "{}", *step);
}
