//! How two codes stand to each other: by the steps from each of them up to where they meet.

use super::TOP_DIGITS;

/// Steps from the code that is nearer to the meeting point, and from the other one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Relation {
    near: usize,
    far: usize,
    /// Whether they meet only in the root, above the first level.
    is_across: bool,
}

/// Relations by name and number, as the files of a curriculum have them, with the steps from the
/// two codes to their nearest common one.
const NAMED: [(&str, u64, usize, usize); 14] = [
    ("child", 1, 0, 1),
    ("sibling", 2, 1, 1),
    ("grandchild", 3, 0, 2),
    ("great-grandchild", 4, 0, 3),
    ("nephew/niece", 5, 1, 2),
    ("great-great-grandchild", 6, 0, 4),
    ("cousin", 7, 2, 2),
    ("grand-nephew/niece", 8, 1, 3),
    ("grand-grand-nephew/niece", 9, 1, 4),
    ("cousin_1_times_removed", 10, 2, 3),
    ("second_cousin", 11, 3, 3),
    ("cousin_2_times_removed", 12, 2, 4),
    ("second_cousin_1_times_removed", 13, 3, 4),
    ("third_cousin", 14, 4, 4),
];
/// Codes of different sectors.
const ACROSS: (&str, u64) = ("cross_sector", 99);

/// Sectors of more than one number, by their first and last: they are called `31-33` and so on.
const JOINED: [(&str, &str); 3] = [("31", "33"), ("44", "45"), ("48", "49")];

/// The sector of a code of at least two digits, by its first number.
fn sector(code: &str) -> &str {
    let top = &code[..TOP_DIGITS];
    let joined = JOINED
        .iter()
        .find(|(first, last)| (*first..=*last).contains(&top));
    joined.map_or(top, |(first, _)| first)
}

/// The code of a sector that is called by its first and last number.
pub(super) fn of_range(code: &str) -> Option<&str> {
    let (first, last) = code.split_once('-')?;
    JOINED.contains(&(first, last)).then_some(first)
}

impl Relation {
    /// Of two codes of at least two digits.
    pub fn of(a: &str, b: &str) -> Self {
        let alike = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
        let common = match sector(a) == sector(b) {
            true => alike.max(TOP_DIGITS),
            false => 0,
        };
        // Codes of different sectors meet in the root, above the first level.
        let depth = |digits: usize| (digits + 1).saturating_sub(TOP_DIGITS);
        let mut steps = [a, b].map(|code| depth(code.len()) - depth(common));
        if alike < TOP_DIGITS && steps == [0, 0] {
            // The names of one sector, beside each other.
            steps = [1, 1];
        }
        Self {
            near: steps[0].min(steps[1]),
            far: steps[0].max(steps[1]),
            is_across: common < TOP_DIGITS,
        }
    }

    /// Steps between the two in the tree.
    pub fn distance(self) -> usize {
        self.near + self.far
    }

    /// The number of the relation: the larger, the less the two have in common.
    pub fn number(self) -> u64 {
        if self.is_across {
            return ACROSS.1;
        }
        let mut named = NAMED.iter();
        let found = named.find(|(_, _, near, far)| (*near, *far) == (self.near, self.far));
        found.map_or(ACROSS.1, |(_, number, ..)| *number)
    }

    /// The number of a relation by its name.
    pub fn number_of(name: &str) -> Option<u64> {
        if name == ACROSS.0 {
            return Some(ACROSS.1);
        }
        let mut named = NAMED.iter();
        let found =
            named.find(|(known, ..)| known.split('/').any(|one| one == name) || *known == name);
        found.map(|(_, number, ..)| *number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relations_are_told_by_the_steps_to_the_common_code() {
        for (a, b, name, distance) in [
            ("11", "112", "child", 1),
            ("112", "11", "child", 1),
            ("1121", "1123", "sibling", 2),
            ("1121", "11", "grandchild", 2),
            ("1121", "113", "niece", 3),
            ("1121", "1131", "cousin", 4),
            ("111111", "112111", "third_cousin", 8),
            ("11", "21", "cross_sector", 2),
            ("1121", "2121", "cross_sector", 6),
            ("31", "334", "child", 1),
            ("311", "331", "sibling", 2),
            ("3113", "3313", "cousin", 4),
            ("33", "31", "sibling", 2),
            ("441", "4561", "niece", 3),
            ("48", "51", "cross_sector", 2),
            ("491", "51", "cross_sector", 3),
        ] {
            let relation = Relation::of(a, b);
            assert_eq!(
                Some(relation.number()),
                Relation::number_of(name),
                "{a} {b}"
            );
            assert_eq!(relation.distance(), distance, "{a} {b}");
        }
        assert_eq!(Relation::number_of("uncle"), None);
    }
}
