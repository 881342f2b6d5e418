//! The date that a chat template may print.
//!
//! Some templates put today's date into the system turn. A run that is resumed a day later would
//! then have other tokens, so the moment is a value that the caller gives and can keep.

use minijinja::{Error, ErrorKind};

const SECONDS_PER_DAY: u64 = 86_400;
/// After so many years the calendar repeats, whichever year they begin with.
const YEARS_PER_CYCLE: u64 = 400;
const DAYS_PER_CYCLE: u64 = 146_097;
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// A moment in UTC, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Moment(pub u64);

impl Moment {
    /// What the clock says.
    pub fn now() -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self(since.map_or(0, |duration| duration.as_secs()))
    }

    /// (year, month from 1, day from 1), in the Gregorian calendar.
    fn date(self) -> (u64, usize, u64) {
        let days = self.0 / SECONDS_PER_DAY;
        let mut day = days % DAYS_PER_CYCLE;
        let mut year = 1970 + days / DAYS_PER_CYCLE * YEARS_PER_CYCLE;
        while day >= days_of_year(year) {
            day -= days_of_year(year);
            year += 1;
        }
        let mut month = 0;
        while day >= days_of_month(year, month) {
            day -= days_of_month(year, month);
            month += 1;
        }
        (year, month + 1, day + 1)
    }

    /// `strftime` with the directives that dates and times are written with.
    pub(super) fn format(self, format: &str) -> Result<String, Error> {
        let (year, month, day) = self.date();
        let second = self.0 % SECONDS_PER_DAY;
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        let weekday = WEEKDAYS[(self.0 / SECONDS_PER_DAY % 7) as usize];
        let name = MONTHS[month - 1];
        let mut text = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                text.push(character);
                continue;
            }
            let directive = characters.next();
            // `%-d` is glibc's number without a leading zero.
            let (padded, directive) = match directive {
                Some('-') => (false, characters.next()),
                other => (true, other),
            };
            let number = |value: u64| {
                if padded {
                    format!("{value:02}")
                } else {
                    value.to_string()
                }
            };
            let part = match directive {
                Some('Y') => year.to_string(),
                Some('y') => number(year % 100),
                Some('m') => number(month as u64),
                Some('d') => number(day),
                Some('B') => name.to_owned(),
                Some('b') => name[..3].to_owned(),
                Some('A') => weekday.to_owned(),
                Some('a') => weekday[..3].to_owned(),
                Some('H') => number(hour),
                Some('I') => number((hour + 11) % 12 + 1),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
                Some('M') => number(minute),
                Some('S') => number(second),
                Some('Z') => "UTC".to_owned(),
                Some('z') => "+0000".to_owned(),
                Some('%') => "%".to_owned(),
                other => {
                    let other = other.map_or_else(String::new, String::from);
                    return Err(Error::new(
                        ErrorKind::InvalidOperation,
                        format!("strftime_now does not know the directive `%{other}`"),
                    ));
                }
            };
            text.push_str(&part);
        }
        Ok(text)
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_of_year(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn days_of_month(year: u64, month: usize) -> u64 {
    match month {
        1 if is_leap(year) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_written_as_dates() {
        // 1 709 210 096 is Thursday, 29 February 2024, 12:34:56.
        let moment = Moment(1_709_210_096);
        let text = moment.format("%d %b %Y, %A %B %-m, %H:%M:%S %I%p %y%%");
        assert_eq!(
            text.unwrap(),
            "29 Feb 2024, Thursday February 2, 12:34:56 12PM 24%"
        );
        assert_eq!(Moment(0).format("%Y-%m-%d %a").unwrap(), "1970-01-01 Thu");
        let last = Moment(951_868_799);
        assert_eq!(
            last.format("%F").unwrap_err().kind(),
            ErrorKind::InvalidOperation
        );
        assert_eq!(last.format("%Y-%m-%d").unwrap(), "2000-02-29");
        // 1 January of the year that is four cycles after 1970.
        let late = Moment(4 * DAYS_PER_CYCLE * SECONDS_PER_DAY);
        assert_eq!(late.format("%Y-%m-%d").unwrap(), "3570-01-01");
        assert!(Moment(u64::MAX).format("%Y").is_ok());
    }
}
