//! Why there is no plan.

use cinch_config::ConfigError;
use cinch_device::DeviceError;
use cinch_step::StepError;
use thiserror::Error;

use crate::DoesNotFit;

#[derive(Debug, Error)]
pub enum FitError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(
        "the effective batch is empty: batch_size and gradient_accumulation_steps must be 1 or more"
    )]
    EmptyBatch,
    #[error(
        "an effective batch of {target} cannot be had exactly with {}\n\
         hint: {}",
        stated_values(stated),
        offers(nearest)
    )]
    EffectiveBatch {
        target: usize,
        /// What was stated of micro batch and accumulation.
        stated: Vec<(&'static str, usize)>,
        /// The nearest effective batches that can be had, in rising order.
        nearest: Vec<usize>,
    },
    #[error(
        "no settings are left to choose from: {stated} cannot be had together on this machine\n\
         hint: leave one of them open"
    )]
    NothingToChoose { stated: String },
    #[error(
        "a margin of {margin} leaves nothing\nhint: the margin is a share from 0 to just below 1, such as 0.1"
    )]
    Margin { margin: f64 },
    #[error("the guide's figures in {file} cannot be read: {problem}")]
    GuideData { file: &'static str, problem: String },
    /// An answer, not a failure: what is needed, and what would fit.
    #[error("{0}")]
    DoesNotFit(Box<DoesNotFit>),
}

fn stated_values(stated: &[(&str, usize)]) -> String {
    let values = stated.iter().map(|(key, value)| format!("{key} = {value}"));
    values.collect::<Vec<_>>().join(" and ")
}

fn offers(nearest: &[usize]) -> String {
    let offers: Vec<String> = nearest.iter().map(ToString::to_string).collect();
    format!(
        "the nearest that can is {}; or leave the micro batch and the accumulation open",
        offers.join(" or ")
    )
}
