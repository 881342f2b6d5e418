//! From moments to the columns of a picture: a step has thousands of nodes, a screen has fewer
//! pixels. A column shows the moment with the most bytes in it, so that no peak is lost; where
//! it is asked what runs there, it is the moment that fills most of the column.

/// Which moment each column stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Columns {
    /// The first with the most bytes.
    pub highest: Vec<usize>,
    /// The first that covers most of the column.
    pub longest: Vec<usize>,
}

/// Divides an axis from 0 to 1 into `count` columns. `spans` are the moments on it, in order and
/// without gaps, `totals` their bytes. Without moments there are no columns.
pub(crate) fn columns(spans: &[(f64, f64)], totals: &[u64], count: usize) -> Columns {
    let mut columns = Columns {
        highest: Vec::with_capacity(count),
        longest: Vec::with_capacity(count),
    };
    if count == 0 {
        return columns;
    }
    // How much of its column the moment in `longest` covers.
    let mut covered = Vec::with_capacity(count);
    for (moment, (span, &bytes)) in spans.iter().zip(totals).enumerate() {
        let (start, end) = (span.0 * count as f64, span.1 * count as f64);
        let first = (start as usize).min(count - 1);
        let last = (end.ceil() as usize).clamp(first + 1, count) - 1;
        for column in first..=last {
            let cover = end.min((column + 1) as f64) - start.max(column as f64);
            // Columns between the last one and this are skipped only by a rounding.
            while columns.highest.len() <= column {
                columns.highest.push(moment);
                columns.longest.push(moment);
                covered.push(cover);
            }
            if bytes > totals[columns.highest[column]] {
                columns.highest[column] = moment;
            }
            if cover > covered[column] {
                columns.longest[column] = moment;
                covered[column] = cover;
            }
        }
    }
    if let Some(last) = spans.len().checked_sub(1) {
        columns.highest.resize(count, last);
        columns.longest.resize(count, last);
    }
    columns
}

/// Neighbouring columns with the same key, as (first column, one past the last, key).
pub(crate) fn runs<K: PartialEq>(keys: impl Iterator<Item = K>) -> Vec<(usize, usize, K)> {
    let mut runs: Vec<(usize, usize, K)> = Vec::new();
    for (column, key) in keys.enumerate() {
        match runs.last_mut() {
            Some((_, end, last)) if *last == key => *end = column + 1,
            _ => runs.push((column, column + 1, key)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spans(lengths: &[f64]) -> Vec<(f64, f64)> {
        let total: f64 = lengths.iter().sum();
        let mut end = 0.0;
        let span = |length: &f64| {
            let start = end;
            end += length / total;
            (start, end)
        };
        lengths.iter().map(span).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Against the definition: a column shows the largest of all moments that touch it.
        #[test]
        fn a_column_shows_the_most_that_happens_in_it(
            moments in prop::collection::vec((0.001..3.0_f64, 0..100_u64), 1..200),
            count in 1..60_usize,
        ) {
            let (lengths, totals): (Vec<f64>, Vec<u64>) = moments.into_iter().unzip();
            let spans = spans(&lengths);
            let columns = columns(&spans, &totals, count);
            prop_assert_eq!(columns.highest.len(), count);
            for (column, &shown) in columns.highest.iter().enumerate() {
                let low = column as f64 / count as f64;
                let high = (column + 1) as f64 / count as f64;
                // Away from the borders, where the rounding of a sum decides.
                let inside = |span: &(f64, f64)| span.0 < high - 1e-9 && span.1 > low + 1e-9;
                for (span, total) in spans.iter().zip(&totals) {
                    prop_assert!(!inside(span) || *total <= totals[shown]);
                }
                let near = spans[shown].0 < high + 1e-9 && spans[shown].1 > low - 1e-9;
                prop_assert!(near, "column {} shows {}", column, shown);
            }
            let most = totals.iter().max();
            prop_assert_eq!(columns.highest.iter().map(|&m| &totals[m]).max(), most);
        }
    }

    #[test]
    fn the_longest_is_what_fills_a_column() {
        let spans = [(0.0, 0.1), (0.1, 0.45), (0.45, 1.0)];
        let columns = columns(&spans, &[9, 1, 1], 2);
        assert_eq!(columns.longest, [1, 2]);
        assert_eq!(columns.highest, [0, 2]);
    }

    #[test]
    fn nothing_has_no_columns() {
        assert!(columns(&[], &[], 10).highest.is_empty());
        assert!(columns(&[(0.0, 1.0)], &[1], 0).highest.is_empty());
    }

    #[test]
    fn runs_join_equal_neighbours() {
        assert_eq!(
            runs("aabca".chars()),
            [(0, 2, 'a'), (2, 3, 'b'), (3, 4, 'c'), (4, 5, 'a')]
        );
    }
}
