//! Rows of samples: what every place of a row holds, and in which order rows come.

use std::collections::HashSet;

use cinch_data::sample::{Row, RowStyle, Rows, SampleOptions, Samples, Selection};
use cinch_data::{DataError, NoProgress, Tokenizer, TokenizerSpec};
use cinch_graph::op::IGNORE_INDEX;
use serde_json::json;

const SEQ_LEN: usize = 40;
const END: i32 = 256;

/// Samples of many lengths, each told from all others by its prompt.
fn samples(num: usize) -> Samples {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let lines: String = (0..num)
        .map(|index| {
            let completion = "x".repeat(index * 7 % 31);
            json!({"prompt": format!("{index:04}"), "completion": completion})
        })
        .map(|record| format!("{record}\n"))
        .collect();
    std::fs::write(&path, lines).unwrap();
    let options = SampleOptions {
        paths: vec![path],
        ..SampleOptions::default()
    };
    let tokenizer = Tokenizer::load(&TokenizerSpec::Bytes).unwrap();
    Samples::prepare(&options, &tokenizer, None, &NoProgress).unwrap()
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Filled {
    tokens: Vec<i32>,
    targets: Vec<i32>,
    positions: Vec<i32>,
    starts: Vec<i32>,
}

fn filled(seq_len: usize, fill: impl FnOnce(&mut Row<'_>)) -> Filled {
    let mut row = Filled {
        tokens: vec![-7; seq_len],
        targets: vec![-7; seq_len],
        positions: vec![-7; seq_len],
        starts: vec![-7; seq_len],
    };
    fill(&mut Row {
        tokens: &mut row.tokens,
        targets: &mut row.targets,
        positions: &mut row.positions,
        starts: &mut row.starts,
    });
    row
}

fn in_order(rows: &Rows, index: u64) -> Filled {
    filled(rows.seq_len(), |row| rows.fill_in_order(index, row))
}

fn drawn(rows: &Rows, sample: u64, seed: u64) -> Filled {
    filled(rows.seq_len(), |row| rows.fill(sample, seed, row))
}

/// The documents of a row by its starts.
fn documents(row: &Filled) -> Vec<std::ops::Range<usize>> {
    let mut begins: Vec<usize> = (0..row.starts.len())
        .filter(|place| row.starts[*place] == *place as i32)
        .collect();
    begins.push(row.starts.len());
    begins.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

/// The samples of a part by their text, from all rows; checks each place on the way.
fn check(rows: &Rows, part: &Selection) -> Vec<Vec<i32>> {
    let mut found = Vec::new();
    for index in 0..rows.len() {
        let row = in_order(rows, index);
        for document in documents(&row) {
            let tokens = &row.tokens[document.clone()];
            for (position, place) in document.clone().enumerate() {
                assert_eq!(row.positions[place], position as i32);
                assert_eq!(row.starts[place], document.start as i32);
            }
            let targets = &row.targets[document.clone()];
            // The prompt has four bytes, and a byte is a token.
            let is_padding = tokens.iter().all(|token| *token == END);
            for (place, target) in targets.iter().enumerate() {
                let is_learned = !is_padding && place + 1 >= 4 && place + 1 < tokens.len();
                let expected = if is_learned {
                    tokens[place + 1]
                } else {
                    IGNORE_INDEX
                };
                assert_eq!(*target, expected, "{tokens:?} at {place}");
            }
            if is_padding {
                assert_eq!(document.end, rows.seq_len(), "padding is at the end");
            } else {
                found.push(tokens.to_vec());
            }
        }
    }
    let mut expected: Vec<Vec<i32>> = part
        .indices()
        .iter()
        .map(|index| part.samples().sample(*index).tokens.to_vec())
        .collect();
    expected.sort();
    found.sort();
    assert_eq!(found, expected, "every sample is in one row, whole");
    found
}

#[test]
fn packed_rows_hold_every_sample_once_and_whole() {
    let (training, validation) = samples(200).split(0.1, 3);
    assert_eq!((training.len(), validation.len()), (180, 20));
    let rows = training.rows(SEQ_LEN, RowStyle::Packed, 5).unwrap();
    check(&rows, &training);
    assert_eq!(rows.num_samples(), 180);
    let padded = training.rows(SEQ_LEN, RowStyle::Padded, 5).unwrap();
    check(&padded, &training);
    assert_eq!(padded.len(), 180);
    assert!(rows.len() < 120 && rows.padding_share() < 0.05, "{rows:?}");
    let places = (180 * SEQ_LEN) as f64;
    let share = 1.0 - training.lengths().num_tokens as f64 / places;
    assert!((padded.padding_share() - share).abs() < 1e-12);
    assert_eq!(padded.host_bytes(), 8 * (180 + 181));
}

#[test]
fn a_sample_may_fill_a_row_but_not_more() {
    let (training, _) = samples(50).split(0.0, 0);
    let longest = training.lengths().longest;
    let rows = training.rows(longest, RowStyle::Packed, 0).unwrap();
    check(&rows, &training);
    assert_eq!(
        training.lengths().padded_length(16),
        longest.next_multiple_of(16)
    );
    for style in [RowStyle::Packed, RowStyle::Padded] {
        let error = training.rows(longest - 1, style, 0).unwrap_err();
        assert!(matches!(error, DataError::SampleTooLong { .. }), "{error}");
    }
    assert!(matches!(
        training.rows(0, RowStyle::Packed, 0),
        Err(DataError::ZeroSequenceLength)
    ));
}

#[test]
fn no_sample_is_in_both_parts() {
    let texts = |part: &Selection| -> HashSet<Vec<i32>> {
        let rows = part.rows(SEQ_LEN, RowStyle::Packed, 1).unwrap();
        check(&rows, part).into_iter().collect()
    };
    let (training, validation) = samples(100).split(0.25, 8);
    let (a, b) = (texts(&training), texts(&validation));
    assert_eq!((a.len(), b.len()), (75, 25));
    assert!(a.is_disjoint(&b));
    assert_eq!(
        samples(100).split(0.25, 8).1.indices(),
        validation.indices()
    );
    assert_ne!(
        samples(100).split(0.25, 9).1.indices(),
        validation.indices()
    );
    // A fraction that rounds to nothing still gives a sample, and never all of them.
    assert_eq!(samples(3).split(0.01, 0).1.len(), 1);
    assert_eq!(samples(3).split(0.99, 0).0.len(), 1);
    assert_eq!(samples(1).split(0.5, 0).0.len(), 1);
    assert!(samples(3).split(0.0, 0).1.is_empty());
}

#[test]
fn epochs_visit_every_row_in_an_order_of_their_own() {
    let (training, _) = samples(60).split(0.0, 0);
    let rows = training.rows(SEQ_LEN, RowStyle::Padded, 0).unwrap();
    let epoch = |epoch: u64, seed: u64| -> Vec<Filled> {
        let first = epoch * rows.len();
        (first..first + rows.len())
            .map(|sample| drawn(&rows, sample, seed))
            .collect()
    };
    let in_order: Vec<Filled> = (0..rows.len())
        .map(|index| in_order(&rows, index))
        .collect();
    let sorted = |mut list: Vec<Filled>| {
        list.sort();
        list
    };
    for (number, seed) in [(0, 1), (1, 1), (5, 2)] {
        assert_ne!(epoch(number, seed), in_order);
        assert_eq!(sorted(epoch(number, seed)), sorted(in_order.clone()));
        assert_eq!(
            epoch(number, seed),
            epoch(number, seed),
            "a resumed run sees the same"
        );
    }
    assert_ne!(epoch(0, 1), epoch(1, 1));
    assert_ne!(epoch(0, 1), epoch(0, 2));
}

#[test]
fn beyond_the_end_there_is_padding() {
    let (training, validation) = samples(2).split(0.0, 0);
    let rows = training.rows(SEQ_LEN, RowStyle::Packed, 0).unwrap();
    let none = validation.rows(SEQ_LEN, RowStyle::Packed, 0).unwrap();
    assert!(none.is_empty() && none.padding_share() == 0.0);
    for row in [in_order(&rows, 99), in_order(&none, 0), drawn(&none, 3, 1)] {
        assert!(row.tokens.iter().all(|token| *token == END));
        assert!(row.targets.iter().all(|target| *target == IGNORE_INDEX));
        assert!(row.starts.iter().all(|start| *start == 0));
        assert!(row.positions.iter().copied().eq(0..SEQ_LEN as i32));
    }
}

#[test]
fn fingerprints_tell_data_and_layout_apart() {
    let rows = |num, seq_len, style, seed| {
        let (training, _) = samples(num).split(0.1, 1);
        training.rows(seq_len, style, seed).unwrap().fingerprint()
    };
    let base = rows(50, 40, RowStyle::Packed, 1);
    assert_eq!(base, rows(50, 40, RowStyle::Packed, 1));
    assert_eq!(base.len(), 32);
    for other in [
        rows(51, 40, RowStyle::Packed, 1),
        rows(50, 41, RowStyle::Packed, 1),
        rows(50, 40, RowStyle::Padded, 1),
        rows(50, 40, RowStyle::Packed, 2),
    ] {
        assert_ne!(base, other);
    }
}
