//! "Did you mean …?": the known name closest to a misspelt one.

/// Levenshtein distance over characters, one row at a time.
fn edit_distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &b) in right.iter().enumerate() {
            let substituted = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

fn normalized(name: &str) -> String {
    name.trim().to_lowercase().replace('-', "_")
}

/// How far a misspelling may be from the name it is taken for: one slip in
/// three letters. Beyond that a suggestion misleads more than it helps.
fn tolerance(name: &str) -> usize {
    (name.chars().count() / 3).max(1)
}

/// No known name is near so long, and comparing takes the product of the lengths: a file may hold a
/// page of text where a name belongs.
const LONGEST_NAME: usize = 256;

/// The closest of `names`, if it is close enough to be what was meant.
pub fn nearest_name<'a>(wrong: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let wrong = normalized(wrong);
    names
        .into_iter()
        .filter(|_| wrong.len() <= LONGEST_NAME)
        .map(|name| (edit_distance(&wrong, &normalized(name)), name))
        .min_by_key(|&(distance, _)| distance)
        .filter(|&(distance, _)| distance <= tolerance(&wrong))
        .map(|(_, name)| name)
}

/// The closest dotted key. A key put into the wrong section, or into none, is
/// as common as a misspelt one, so the last segment is compared on its own too,
/// at the price of one slip for the section.
pub fn nearest_key<'a>(wrong: &str, keys: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let wrong = normalized(wrong);
    let wrong_leaf = leaf(&wrong);
    keys.into_iter()
        .filter(|_| wrong.len() <= LONGEST_NAME)
        .map(|key| {
            let whole = edit_distance(&wrong, key);
            let moved = 1 + edit_distance(wrong_leaf, leaf(key));
            (whole.min(moved), key)
        })
        .min_by_key(|&(distance, _)| distance)
        .filter(|&(distance, _)| distance <= tolerance(wrong_leaf))
        .map(|(_, key)| key)
}

fn leaf(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_known_from_textbooks() {
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("saturday", "sunday"), 3);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("größe", "grosse"), 3);
        assert_eq!(edit_distance("same", "same"), 0);
    }

    #[test]
    fn a_key_is_found_across_sections() {
        let keys = ["model.d_model", "vram.batch_size", "training.max_steps"];
        assert_eq!(nearest_key("vram.batchsize", keys), Some("vram.batch_size"));
        assert_eq!(nearest_key("batch_size", keys), Some("vram.batch_size"));
        assert_eq!(
            nearest_key("training.batch_size", keys),
            Some("vram.batch_size")
        );
        assert_eq!(
            nearest_key("trainig.max-step", keys),
            Some("training.max_steps")
        );
        assert_eq!(nearest_key("vram.color", keys), None);
    }

    #[test]
    fn a_far_name_is_not_suggested() {
        assert_eq!(nearest_name("smal", ["small", "large"]), Some("small"));
        assert_eq!(nearest_name("gigantic", ["small", "large"]), None);
        let page = "small ".repeat(LONGEST_NAME);
        assert_eq!(nearest_name(&page, [page.as_str()]), None);
        assert_eq!(nearest_key(&page, [page.as_str()]), None);
    }
}
