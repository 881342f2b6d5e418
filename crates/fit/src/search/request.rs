//! What is asked of a search.

use cinch_config::{Config, Precision, SETTINGS, Settings};
use cinch_device::Card;
use cinch_step::StepTarget;
use serde::{Deserialize, Serialize};

use super::calibration::Calibration;
use crate::FitError;

/// A configuration, a processor, and how free the search is.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    pub config: &'a Config,
    pub machine: StepTarget,
    pub card: &'a Card,
    pub tf32: bool,
    /// What the card has.
    pub memory_bytes: u64,
    /// What a plan may take of it.
    pub budget_bytes: u64,
    /// Sequences in a step; `None`: as configured. Kept exactly.
    pub effective_batch: Option<usize>,
    /// Keys of settings that stay as they are.
    pub fixed: Vec<&'static str>,
    pub permissions: Permissions,
    pub calibration: Calibration,
}

impl<'a> Request<'a> {
    /// A search that may use all of a memory and keeps the configuration's effective batch.
    pub fn new(config: &'a Config, card: &'a Card, memory_bytes: u64) -> Self {
        Self {
            config,
            machine: StepTarget::from(card.target),
            card,
            tf32: false,
            memory_bytes,
            budget_bytes: memory_bytes,
            effective_batch: None,
            fixed: Vec::new(),
            permissions: Permissions::default(),
            calibration: Calibration::default(),
        }
    }

    pub fn effective_batch(&self) -> usize {
        let configured = self.config.batch.effective_batch();
        self.effective_batch.unwrap_or(configured)
    }
}

/// When a choice that changes the result may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Permission {
    Never,
    /// Where nothing else fits; then it is said.
    LastResort,
    /// Wherever it is faster.
    Free,
}

/// What the search may do besides what keeps the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Permissions {
    /// Eight-bit optimizer states.
    pub states: Permission,
    pub sequence_length: Permission,
    /// To choose from; `None`: what the card runs best.
    pub precisions: Option<Vec<Precision>>,
}

impl Default for Permissions {
    fn default() -> Self {
        Self {
            states: Permission::LastResort,
            sequence_length: Permission::LastResort,
            precisions: None,
        }
    }
}

/// The keys that the user stated: what [`Request::fixed`] holds where a search must not touch
/// them.
pub fn stated_keys(settings: &Settings) -> Vec<&'static str> {
    let keys = SETTINGS.iter().map(|setting| setting.key);
    keys.filter(|key| settings.is_explicit(key)).collect()
}

/// What of a memory may be used: all but a share of it.
pub fn budget_with_margin(memory_bytes: u64, margin: f64) -> Result<u64, FitError> {
    if !(0.0..1.0).contains(&margin) {
        return Err(FitError::Margin { margin });
    }
    Ok((memory_bytes as f64 * (1.0 - margin)) as u64)
}
