//! How long ranks wait for each other before they give up.

use std::time::Duration;

use crate::error::RanksError;
use crate::identity::Variable;

/// Times after which a rank that does not come is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Until all ranks have met.
    pub meeting: Duration,
    /// Without a sign of life.
    pub silence: Duration,
    /// In one exchange, for a rank that is alive: data that is read from a slow disk, a checkpoint
    /// that is written.
    pub exchange: Duration,
}

pub(crate) const MEETING_VARIABLE: &str = "CINCH_MEETING_SECONDS";
pub(crate) const SILENCE_VARIABLE: &str = "CINCH_SILENCE_SECONDS";
pub(crate) const EXCHANGE_VARIABLE: &str = "CINCH_EXCHANGE_SECONDS";

impl Default for Limits {
    fn default() -> Self {
        Self {
            meeting: Duration::from_secs(120),
            silence: Duration::from_secs(30),
            exchange: Duration::from_secs(1800),
        }
    }
}

impl Limits {
    /// From the environment of this process.
    pub fn of_process() -> Result<Self, RanksError> {
        Self::of(&|name| std::env::var(name).ok())
    }

    pub fn of(variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, RanksError> {
        let seconds = |name: &'static str, otherwise: Duration| {
            let Some(value) = variable(name) else {
                return Ok(otherwise);
            };
            let number = value.trim().parse::<f64>().ok();
            let number = number.filter(|number| (0.1..=1e6).contains(number));
            number
                .map(Duration::from_secs_f64)
                .ok_or(RanksError::Variable {
                    variable: Variable {
                        name,
                        value: Some(value),
                    },
                    problem: "it is no number of seconds from 0.1 to 1000000".to_owned(),
                    launcher: "whoever starts the run",
                })
        };
        let standard = Self::default();
        Ok(Self {
            meeting: seconds(MEETING_VARIABLE, standard.meeting)?,
            silence: seconds(SILENCE_VARIABLE, standard.silence)?,
            exchange: seconds(EXCHANGE_VARIABLE, standard.exchange)?,
        })
    }

    /// Between two signs of life: several may be late before a rank counts as silent.
    pub(crate) fn beat(&self) -> Duration {
        (self.silence / 8).min(Duration::from_secs(1))
    }
}
