//! Memory sizes: the one unit every plan, budget and message is counted in.
//!
//! A size the user types is read in powers of two, because that is what
//! `nvidia-smi` and CUDA report: `gb`, `g` and `GiB` all mean 2^30 bytes. A bare
//! number is taken as GiB, since nobody buys a card of 24 bytes.

use std::borrow::Cow;
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ConfigError;

/// A number of bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(u64);

impl Bytes {
    pub const ZERO: Bytes = Bytes(0);
    pub const KIB: Bytes = Bytes(1 << 10);
    pub const MIB: Bytes = Bytes(1 << 20);
    pub const GIB: Bytes = Bytes(1 << 30);
    pub const TIB: Bytes = Bytes(1 << 40);

    pub const fn new(count: u64) -> Self {
        Bytes(count)
    }

    pub const fn from_gib(gib: u64) -> Self {
        Bytes(gib << 30)
    }

    pub const fn get(self) -> u64 {
        self.0
    }

    pub const fn checked_add(self, other: Bytes) -> Option<Bytes> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(Bytes(sum)),
            None => None,
        }
    }

    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// Every byte, with thousands separators: `1,234,567`. Totals of a plan are
    /// shown this way because they are exact.
    pub fn exact(self) -> String {
        let digits = self.0.to_string();
        let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
        for (index, digit) in digits.chars().enumerate() {
            if index > 0 && (digits.len() - index).is_multiple_of(3) {
                grouped.push(',');
            }
            grouped.push(digit);
        }
        grouped
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // (unit, name, decimals): the larger the unit, the more a digit weighs.
        const UNITS: [(Bytes, &str, usize); 4] = [
            (Bytes::KIB, "KiB", 1),
            (Bytes::MIB, "MiB", 1),
            (Bytes::GIB, "GiB", 2),
            (Bytes::TIB, "TiB", 2),
        ];
        if self.0 < Bytes::KIB.0 {
            return formatter.pad(&format!("{} B", self.0));
        }
        let mut text = String::new();
        for (unit, name, decimals) in UNITS {
            let amount = self.0 as f64 / unit.0 as f64;
            text = format!("{amount:.decimals$} {name}");
            // Judged after rounding, so that 1023.99 MiB reads "1.00 GiB".
            if !text.starts_with("1024.") && amount < 1024.0 {
                break;
            }
        }
        formatter.pad(&text)
    }
}

/// The most that is taken for GiB without a unit: more than any device has, and less than any
/// device has in MiB.
const MOST_BARE: Bytes = Bytes::TIB;

impl FromStr for Bytes {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = |reason: Cow<'static, str>| ConfigError::InvalidSize {
            text: text.to_owned(),
            reason,
        };
        let reject = |reason: &'static str| refuse(reason.into());
        let trimmed = text.trim();
        if trimmed.starts_with('-') {
            return Err(reject("a size cannot be negative"));
        }
        let number_end = trimmed
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(number_end);
        let is_bare = unit.trim().is_empty();
        let unit = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "g" | "gb" | "gib" => Bytes::GIB,
            "t" | "tb" | "tib" => Bytes::TIB,
            "m" | "mb" | "mib" => Bytes::MIB,
            "k" | "kb" | "kib" => Bytes::KIB,
            "b" | "byte" | "bytes" => Bytes(1),
            _ => return Err(reject("the unit is not one of b, kb, mb, gb, tb")),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
            return Err(reject("there is no number in it"));
        }
        // In integers, so that 1.1gb is the same number of bytes on every
        // machine; more than 18 decimals cannot matter below 2^64 bytes.
        let fraction = &fraction[..fraction.len().min(18)];
        let scale = 10_u128.pow(fraction.len() as u32);
        let count = format!("{whole}{fraction}")
            .parse::<u128>()
            .ok()
            .and_then(|digits| digits.checked_mul(u128::from(unit.0)))
            .and_then(|scaled| u64::try_from(scaled / scale).ok())
            .ok_or_else(|| reject("it is more than 64 bits can count"))?;
        if count == 0 {
            return Err(reject("a size must be above zero"));
        }
        if is_bare && count > MOST_BARE.0 {
            let megabytes = Bytes(count >> 10);
            return Err(refuse(Cow::Owned(format!(
                "a bare number means GiB, and no device has {number} of them; {number}mb is \
                 {megabytes}"
            ))));
        }
        Ok(Bytes(count))
    }
}

// Arithmetic saturates: a total beyond 64 bits stays larger than any budget,
// where wrapping around would make an impossible plan look small.

impl Add for Bytes {
    type Output = Bytes;

    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        *self = *self + other;
    }
}

impl Mul<u64> for Bytes {
    type Output = Bytes;

    fn mul(self, times: u64) -> Bytes {
        Bytes(self.0.saturating_mul(times))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(sizes: I) -> Bytes {
        sizes.fold(Bytes::ZERO, Add::add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> u64 {
        text.parse::<Bytes>().unwrap().get()
    }

    #[test]
    fn every_spelling_of_a_size_is_read() {
        for text in ["8gb", "8GB", "8 GiB", "8g", " 8 ", "8", "8.0", "8192mb"] {
            assert_eq!(parse(text), 8_589_934_592, "{text}");
        }
        assert_eq!(parse("24"), 25_769_803_776);
        assert_eq!(parse("1024"), 1 << 40);
        assert_eq!(parse("8000gb"), 8000 << 30);
        assert_eq!(parse("512mb"), 536_870_912);
        assert_eq!(parse("1.5g"), 1_610_612_736);
        assert_eq!(parse(".5g"), 536_870_912);
        assert_eq!(parse("1073741824b"), 1_073_741_824);
        assert_eq!(parse("1tib"), 1_099_511_627_776);
        assert_eq!(parse("18446744073709551615b"), u64::MAX);
        // 1.1 GiB is 1181116006.4 bytes: rounded down, never up past a budget.
        assert_eq!(parse("1.1gb"), 1_181_116_006);
    }

    #[test]
    fn what_is_not_a_size_says_why() {
        for (text, reason) in [
            ("-8gb", "a size cannot be negative"),
            ("0", "a size must be above zero"),
            ("0.0000000001gb", "a size must be above zero"),
            ("0.0000000000000000000001gb", "a size must be above zero"),
            ("", "there is no number in it"),
            (".", "there is no number in it"),
            ("1.2.3gb", "there is no number in it"),
            ("gb", "there is no number in it"),
            ("8xb", "the unit is not one of b, kb, mb, gb, tb"),
            ("inf", "the unit is not one of b, kb, mb, gb, tb"),
            ("8 GiB of it", "the unit is not one of b, kb, mb, gb, tb"),
            ("18446744073709551616b", "it is more than 64 bits can count"),
            ("99999999999999tb", "it is more than 64 bits can count"),
            ("8000", "no device has 8000 of them; 8000mb is 7.81 GiB"),
            ("1024.5", "a bare number means GiB"),
            (&"9".repeat(400), "it is more than 64 bits can count"),
        ] {
            let message = text.parse::<Bytes>().unwrap_err().to_string();
            assert!(message.contains(reason), "{text}: {message}");
        }
    }

    #[test]
    fn sizes_are_shown_for_people_and_exactly() {
        assert_eq!(Bytes::new(7_967_165_153).to_string(), "7.42 GiB");
        assert_eq!(Bytes::new(312 << 20).to_string(), "312.0 MiB");
        assert_eq!(Bytes::new(1023).to_string(), "1023 B");
        assert_eq!(Bytes::new(1536).to_string(), "1.5 KiB");
        assert_eq!(Bytes::new((1 << 30) - 1).to_string(), "1.00 GiB");
        assert_eq!(Bytes::new(3 << 40).to_string(), "3.00 TiB");
        assert_eq!(format!("[{:>10}]", Bytes::GIB), "[  1.00 GiB]");
        assert_eq!(Bytes::new(1_234_567).exact(), "1,234,567");
        assert_eq!(Bytes::new(123_456).exact(), "123,456");
        assert_eq!(Bytes::new(12).exact(), "12");
        assert_eq!(Bytes::ZERO.exact(), "0");
    }

    #[test]
    fn totals_never_wrap_around() {
        let parts = [Bytes::GIB, Bytes::MIB * 3, Bytes::new(7)];
        let total: Bytes = parts.into_iter().sum();
        assert_eq!(total.get(), 1_076_887_559);
        assert_eq!(total + Bytes::new(u64::MAX), Bytes::new(u64::MAX));
        assert_eq!(Bytes::TIB * u64::MAX, Bytes::new(u64::MAX));
        assert_eq!(Bytes::new(u64::MAX).checked_add(Bytes::new(1)), None);
        assert_eq!(Bytes::KIB.saturating_sub(Bytes::MIB), Bytes::ZERO);
    }
}
