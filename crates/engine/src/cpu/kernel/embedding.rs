//! Rows of a table looked up by token, with learned positions added and dropout applied:
//! `y[r] = mask ⊙ (table[token_r] + positions[r mod seq])`.

use crate::cpu::dropout::Dropout;
use crate::cpu::parallel::{Accumulate, Shared, for_each};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

/// Rows of one task in the forward pass and in the gradient of positions.
const ROWS: usize = 16;

/// Columns of one task in the gradient of the table. A task walks all rows in order, so that
/// a token's gradients always add up in the same order.
const COLUMNS: usize = 64;

/// Elements of one task when a buffer is set to zero.
const FILL: usize = 64 * 1024;

/// A token that the table has no row for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "token {token} in row {row} is outside the vocabulary of {vocabulary}\n\
     hint: tokens must be 0 to {}; was the data made with another tokenizer?",
    vocabulary.saturating_sub(1)
)]
pub struct TokenOutOfRange {
    pub row: usize,
    pub token: i32,
    pub vocabulary: usize,
}

/// `y` is [rows, width], rows = `tokens.len()`, in sequences of `seq`; `table` is
/// [vocabulary, width], `positions` [at least seq, width].
pub fn forward<F: Real>(
    tokens: &[i32],
    seq: usize,
    table: &[F],
    positions: Option<&[F]>,
    dropout: Option<Dropout>,
    y: &mut [F],
) -> Result<(), TokenOutOfRange> {
    let Some(width) = width(tokens, y) else {
        return Ok(());
    };
    check(tokens, table.len() / width)?;
    let y = Shared::new(y);
    for_each(tokens.len().div_ceil(ROWS), |task| {
        for row in task * ROWS..tokens.len().min((task + 1) * ROWS) {
            let entry = &table[tokens[row] as usize * width..][..width];
            let position = positions.map(|p| &p[row % seq * width..][..width]);
            // SAFETY: each row belongs to one task.
            let y = unsafe { y.part(row * width, width) };
            forward_row(row, entry, position, dropout, y);
        }
    });
    Ok(())
}

simd! {
    fn forward_row<F: Real>(
        row: usize,
        entry: &[F],
        position: Option<&[F]>,
        dropout: Option<Dropout>,
        y: &mut [F],
    ) {
        match position {
            Some(position) => {
                for ((y, entry), position) in y.iter_mut().zip(entry).zip(position) {
                    *y = *entry + *position;
                }
            }
            None => y.copy_from_slice(entry),
        }
        if let Some(dropout) = dropout {
            dropout.multiply(dropout.row(row), 0, y);
        }
    }
}

/// Adds the rows of `dy` [rows, width] to the rows of `dtable` and `dpositions` they came
/// from; `Overwrite` sets those to zero first.
pub fn backward<F: Real>(
    tokens: &[i32],
    seq: usize,
    dy: &[F],
    dropout: Option<Dropout>,
    dtable: Option<(&mut [F], Accumulate)>,
    dpositions: Option<(&mut [F], Accumulate)>,
) -> Result<(), TokenOutOfRange> {
    let width = width(tokens, dy);
    if let (Some((dtable, _)), Some(width)) = (&dtable, width) {
        check(tokens, dtable.len() / width)?;
    }
    let table = dtable.map(|(dtable, mode)| prepare(dtable, mode));
    let positions = dpositions.map(|(dpositions, mode)| prepare(dpositions, mode));
    let Some(width) = width else {
        return Ok(());
    };
    if let Some(table) = table {
        for_each(width.div_ceil(COLUMNS), |task| {
            let start = task * COLUMNS;
            let len = COLUMNS.min(width - start);
            for (row, token) in tokens.iter().enumerate() {
                // SAFETY: each task takes its own columns, and one row at a time.
                let target = unsafe { table.part(*token as usize * width + start, len) };
                add_row(
                    row,
                    start,
                    &dy[row * width + start..][..len],
                    dropout,
                    target,
                );
            }
        });
    }
    if let Some(positions) = positions {
        for_each(seq.div_ceil(ROWS), |task| {
            for time in task * ROWS..seq.min((task + 1) * ROWS) {
                // SAFETY: each position belongs to one task.
                let target = unsafe { positions.part(time * width, width) };
                for row in (time..tokens.len()).step_by(seq) {
                    add_row(row, 0, &dy[row * width..][..width], dropout, target);
                }
            }
        });
    }
    Ok(())
}

simd! {
    /// `target += mask ⊙ dy`, columns counting from `start`.
    fn add_row<F: Real>(
        row: usize,
        start: usize,
        dy: &[F],
        dropout: Option<Dropout>,
        target: &mut [F],
    ) {
        match dropout {
            None => {
                for (target, dy) in target.iter_mut().zip(dy) {
                    *target += *dy;
                }
            }
            Some(dropout) => {
                let base = dropout.row(row);
                for (column, (target, dy)) in target.iter_mut().zip(dy).enumerate() {
                    *target += *dy * dropout.factor(base, start + column);
                }
            }
        }
    }
}

/// The width of a row, or `None` where there is nothing to do.
fn width<F>(tokens: &[i32], data: &[F]) -> Option<usize> {
    assert_eq!(data.len() % tokens.len().max(1), 0, "embedding rows");
    let width = data.len().checked_div(tokens.len())?;
    (width > 0).then_some(width)
}

fn check(tokens: &[i32], vocabulary: usize) -> Result<(), TokenOutOfRange> {
    let outside = |token: i32| usize::try_from(token).map_or(true, |token| token >= vocabulary);
    match tokens.iter().position(|token| outside(*token)) {
        None => Ok(()),
        Some(row) => Err(TokenOutOfRange {
            row,
            token: tokens[row],
            vocabulary,
        }),
    }
}

fn prepare<F: Real>(data: &mut [F], mode: Accumulate) -> Shared<'_, F> {
    let data = Shared::new(data);
    if mode == Accumulate::Overwrite {
        for_each(data.len().div_ceil(FILL), |task| {
            let start = task * FILL;
            // SAFETY: each task takes its own block.
            unsafe { data.part(start, FILL.min(data.len() - start)) }.fill(F::ZERO);
        });
    }
    data
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::dropout::RandomState;
    use crate::cpu::kernel::check::*;

    const VOCABULARY: usize = 11;
    const POSITIONS: usize = 9;

    fn tokens(rows: usize) -> Vec<i32> {
        (0..rows).map(|i| (i * 7 % VOCABULARY) as i32).collect()
    }

    fn dropout() -> Dropout {
        let state = RandomState {
            key: [5, 6],
            row_offset: 14,
        };
        Dropout::new(state, 2, 0.4)
    }

    fn mask(dropout: Option<Dropout>, row: usize, column: usize) -> f64 {
        dropout.map_or(1.0, |d| d.factor(d.row(row), column))
    }

    #[test]
    fn looks_up_adds_positions_and_drops() {
        for (batch, seq, width) in [(1, 1, 1), (2, 7, 37), (3, 9, 130)] {
            for dropout in [None, Some(dropout())] {
                let tokens = tokens(batch * seq);
                let table = random(VOCABULARY * width, 1);
                let positions = random(POSITIONS * width, 2);
                let mut y = vec![0.0; tokens.len() * width];
                forward(&tokens, seq, &table, Some(&positions), dropout, &mut y).unwrap();
                let mut plain = y.clone();
                forward(&tokens, seq, &table, None, dropout, &mut plain).unwrap();
                for (i, y) in y.iter().enumerate() {
                    let (row, column) = (i / width, i % width);
                    let mask = mask(dropout, row, column);
                    let entry = table[tokens[row] as usize * width + column];
                    let position = positions[row % seq * width + column];
                    assert_eq!(*y, (entry + position) * mask);
                    assert_eq!(plain[i], entry * mask);
                }
            }
        }
    }

    #[test]
    fn gradients_are_those_of_the_forward_pass() {
        let (batch, seq, width) = (3, 7, 37);
        let tokens = tokens(batch * seq);
        let table = random(VOCABULARY * width, 1);
        let positions = random(POSITIONS * width, 2);
        let dy = random(tokens.len() * width, 3);
        for dropout in [None, Some(dropout())] {
            let loss = |table: &[f64], positions: &[f64]| {
                let mut y = vec![0.0; dy.len()];
                forward(&tokens, seq, table, Some(positions), dropout, &mut y).unwrap();
                inner_product(&y, &dy)
            };
            let run = |mode| {
                let mut dtable = vec![2.0; table.len()];
                let mut dpositions = vec![2.0; positions.len()];
                let out = (
                    Some((&mut dtable[..], mode)),
                    Some((&mut dpositions[..], mode)),
                );
                backward(&tokens, seq, &dy, dropout, out.0, out.1).unwrap();
                (dtable, dpositions)
            };
            let (dtable, dpositions) = run(Accumulate::Overwrite);
            assert_gradient("table", &table, &dtable, |t| loss(t, &positions));
            assert_gradient("positions", &positions, &dpositions, |p| loss(&table, p));
            let (more_table, more_positions) = run(Accumulate::Add);
            let plus_two = |x: &[f64]| x.iter().map(|v| v + 2.0).collect::<Vec<_>>();
            assert_close("table", &more_table, &plus_two(&dtable), 1e-15);
            assert_close("positions", &more_positions, &plus_two(&dpositions), 1e-15);
        }
    }

    #[test]
    fn a_token_outside_the_table_is_named() {
        let table = vec![0.0_f32; 5 * 4];
        let mut y = vec![0.0; 3 * 4];
        for (token, tokens) in [(5, [0, 4, 5]), (-1, [0, 4, -1])] {
            let expected = TokenOutOfRange {
                row: 2,
                token,
                vocabulary: 5,
            };
            let result = forward(&tokens, 3, &table, None, None, &mut y);
            assert_eq!(result, Err(expected));
            let mut dtable = vec![1.0; table.len()];
            let target = Some((&mut dtable[..], Accumulate::Overwrite));
            assert_eq!(backward(&tokens, 3, &y, None, target, None), Err(expected));
            assert!(dtable.iter().all(|v| *v == 1.0), "nothing was written");
        }
        let message = TokenOutOfRange {
            row: 2,
            token: 5,
            vocabulary: 5,
        };
        assert!(message.to_string().contains("tokens must be 0 to 4"));
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let (seq, width) = (50, 200);
        let tokens = tokens(4 * seq);
        let dy = single(&random(tokens.len() * width, 3));
        let run = |threads| {
            with_threads(threads, || {
                let mut dtable = vec![0.0; VOCABULARY * width];
                let mut dpositions = vec![0.0; seq * width];
                let mode = Accumulate::Overwrite;
                let out = (
                    Some((&mut dtable[..], mode)),
                    Some((&mut dpositions[..], mode)),
                );
                backward(&tokens, seq, &dy, Some(dropout()), out.0, out.1).unwrap();
                (dtable, dpositions)
            })
        };
        assert_eq!(run(1), run(2));
    }

    #[test]
    fn no_tokens_is_no_work() {
        let mut dtable = vec![1.0; 8];
        let target = Some((&mut dtable[..], Accumulate::Overwrite));
        backward::<f64>(&[], 4, &[], None, target, None).unwrap();
        assert_eq!(dtable, [0.0; 8]);
        forward::<f64>(&[], 4, &dtable, None, None, &mut []).unwrap();
    }
}
