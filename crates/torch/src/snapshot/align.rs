//! Two steps of one loop laid beside each other, where one of them does a little more.

/// Requests in a row that must agree before two steps count as being at the same place again.
const NUM_AGREEING: usize = 4;

/// Which items of one list are which of the other, in order. Where the lists part, the shorter
/// of the two ways on is taken after which they agree for a while; the search is given up when
/// it has cost a multiple of the lists' length, which no two steps of one loop need.
pub(super) fn matches<T: PartialEq>(one: &[T], two: &[T]) -> Vec<(usize, usize)> {
    let agree = |first: usize, second: usize| {
        let (rest, other) = (&one[first..], &two[second..]);
        let length = NUM_AGREEING.min(rest.len()).min(other.len());
        length > 0 && rest[..length] == other[..length]
    };
    let mut effort = 64 * (one.len() + two.len());
    let mut matched = Vec::with_capacity(one.len().min(two.len()));
    let (mut first, mut second) = (0, 0);
    while first < one.len() && second < two.len() {
        if one[first] == two[second] {
            matched.push((first, second));
            first += 1;
            second += 1;
            continue;
        }
        let farthest = (one.len() - first).max(two.len() - second).min(effort);
        let found = (1..farthest).find_map(|skipped| {
            if first + skipped < one.len() && agree(first + skipped, second) {
                Some((skipped, 0))
            } else if second + skipped < two.len() && agree(first, second + skipped) {
                Some((0, skipped))
            } else {
                None
            }
        });
        effort -= found.map_or(farthest, |(one, two)| one + two);
        let (skip_first, skip_second) = found.unwrap_or((1, 1));
        first += skip_first;
        second += skip_second;
    }
    matched
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_step_does_more_is_passed_over() {
        let two: Vec<u32> = (0..20).collect();
        let mut one = two.clone();
        one.splice(7..7, [100, 101, 102]);
        one.remove(17);
        let matched = matches(&one, &two);
        assert!(
            matched
                .iter()
                .all(|&(first, second)| one[first] == two[second])
        );
        assert_eq!(matched.len(), 19);
        assert_eq!(matches(&one, &[]), []);
        // Nothing in common, however long.
        assert_eq!(matches(&vec![0; 300_000], &vec![1; 300_000]), []);
    }
}
