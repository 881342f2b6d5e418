//! Sizes as frameworks print them.
//!
//! Messages are read without their spaces and in small letters (see [`squeezed`]): a terminal may
//! have broken them anywhere, inside a number too.

use memchr::memmem;

/// From here on a figure stands for "none": `17179869184.00 GiB` is 2^64 bytes.
const ABSURD: f64 = (1_u64 << 60) as f64;

/// The text without spaces and in small letters.
pub fn squeezed(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    for piece in text.split(char::is_whitespace) {
        kept.push_str(piece);
    }
    kept.make_ascii_lowercase();
    kept
}

/// Where some words begin.
pub fn place(text: &str, words: &str) -> Option<usize> {
    memmem::find(text.as_bytes(), words.as_bytes())
}

/// A number and the text after it.
pub fn number(text: &str) -> Option<(f64, &str)> {
    let text = text.strip_prefix('~').unwrap_or(text);
    let bytes = text.as_bytes();
    let mut end = 0;
    let mut point = false;
    while let Some(byte) = bytes.get(end) {
        let next_is_digit = bytes.get(end + 1).is_some_and(u8::is_ascii_digit);
        match byte {
            b'0'..=b'9' => {}
            b'.' if !point && next_is_digit => point = true,
            _ => break,
        }
        end += 1;
    }
    let value: f64 = text[..end].parse().ok()?;
    let rest = &text[end..];
    Some((value, rest.strip_prefix('+').unwrap_or(rest)))
}

/// Units from the longest on, so that `gib` is not read as `g`.
const UNITS: [(&str, f64); 15] = [
    ("bytes", 1.0),
    ("byte", 1.0),
    ("tib", (1_u64 << 40) as f64),
    ("gib", (1_u64 << 30) as f64),
    ("mib", (1_u64 << 20) as f64),
    ("kib", (1_u64 << 10) as f64),
    ("tb", (1_u64 << 40) as f64),
    ("gb", (1_u64 << 30) as f64),
    ("mb", (1_u64 << 20) as f64),
    ("kb", (1_u64 << 10) as f64),
    ("t", (1_u64 << 40) as f64),
    ("g", (1_u64 << 30) as f64),
    ("m", (1_u64 << 20) as f64),
    ("k", (1_u64 << 10) as f64),
    ("b", 1.0),
];

/// A unit in small letters as bytes, and the text after it. Sizes are in powers of two whatever the
/// letters say, because that is how the programs here compute them.
pub fn unit(text: &str) -> Option<(f64, &str)> {
    let mut units = UNITS.iter();
    units.find_map(|(name, bytes)| Some((*bytes, text.strip_prefix(name)?)))
}

/// A size at the beginning of squeezed text, and the text after it. A number without a unit is
/// none: in a message that was cut off its unit is what is missing.
pub fn size(text: &str) -> Option<(u64, &str)> {
    let (value, rest) = number(text)?;
    let (bytes, rest) = unit(rest)?;
    let total = value * bytes;
    (total < ABSURD).then(|| (total.round() as u64, rest))
}

/// The size after some words, the first time they stand before one.
pub fn after<'a>(text: &'a str, words: &str) -> Option<(u64, &'a str)> {
    let mut rest = text;
    while let Some(at) = place(rest, words) {
        rest = &rest[at + words.len()..];
        if let Some(found) = size(rest) {
            return Some(found);
        }
    }
    None
}

/// The size before some words, the first time they stand behind one.
pub fn before(text: &str, words: &str) -> Option<u64> {
    let mut from = 0;
    while let Some(at) = place(&text[from..], words).map(|at| at + from) {
        if let Some(found) = last(&text[..at]) {
            return Some(found);
        }
        from = at + words.len();
    }
    None
}

/// The size at the end of squeezed text.
fn last(text: &str) -> Option<u64> {
    /// The longest size there is: twenty digits, a point, three more and a unit.
    const LONGEST: usize = 30;
    let bytes = text.as_bytes();
    let start = bytes.len().saturating_sub(LONGEST);
    let is_number = |byte: u8| byte.is_ascii_digit() || byte == b'.';
    let mut at = bytes.len();
    while at > start && bytes[at - 1].is_ascii_alphabetic() {
        at -= 1;
    }
    while at > start && is_number(bytes[at - 1]) {
        at -= 1;
    }
    // A point that ends the sentence before is none of the number's.
    let text = text.get(at..)?.trim_start_matches('.');
    let (found, rest) = size(text)?;
    rest.is_empty().then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_all_kinds_are_read() {
        for (text, bytes) in [
            ("2.00 MiB", 2 << 20),
            ("30.85GiB", 33_124_935_270),
            ("4770354232 bytes", 4_770_354_232),
            ("6291456B", 6_291_456),
            ("890.06M", 933_295_555),
            ("129.21 MB", 135_486_505),
            ("123456kB", 126_418_944),
            ("512.00 KiB", 524_288),
            ("0 bytes", 0),
            ("~21GB", 21 << 30),
            ("51+ GB", 51 << 30),
        ] {
            let squeezed = squeezed(text);
            assert_eq!(size(&squeezed).map(|found| found.0), Some(bytes), "{text}");
        }
        assert_eq!(size("17179869184.00gib"), None);
        assert_eq!(size("x.xxgib"), None);
        assert_eq!(size("2.00"), None);
        assert_eq!(size(&"9".repeat(5000)), None);
    }

    #[test]
    fn sizes_are_found_beside_their_words() {
        let text = "gpu0;3.81gibtotalcapacity;3.08gibalreadyallocated;55.38mibfree";
        assert_eq!(before(text, "totalcapacity"), Some(4_090_956_349));
        assert_eq!(before(text, "free"), Some(58_070_139));
        assert_eq!(before(text, "cached"), None);
        assert_eq!(
            after("allocate2.00mib.gpu", "allocate").map(|found| found.0),
            Some(2 << 20)
        );
        assert_eq!(before("memory.2.44mibisfree", "isfree"), Some(2_558_525));
    }
}
