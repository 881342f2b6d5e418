//! Checkpoints of a run: when one is written, which are kept, and which one to go on from after a
//! failure.

use std::path::{Path, PathBuf};

use cinch_config::TrainingConfig;
use cinch_engine::EngineError;
use cinch_ranks::RanksError;

use super::Trainer;
use crate::checkpoint::{self, CheckpointError, Store};
use crate::error::TrainError;
use crate::event::{Event, Observer};
use crate::export::keep_adapters;
use crate::ranks::Ranks;
use crate::share::Share;
use crate::state::State;

impl Trainer<'_> {
    /// A GPU that fails in the middle of a run takes everything since the last checkpoint with
    /// it, so the message says which one that is.
    pub(super) fn with_last_checkpoint(&self, error: TrainError) -> TrainError {
        let last = self.last_checkpoint();
        let step = self.state.step + 1;
        let error = device_failed(error, step, last.clone());
        rank_lost(error, &self.ranks, step, last)
    }

    /// Where to go on from. Whoever was cut off while saving may have completed the checkpoint.
    fn last_checkpoint(&self) -> Option<PathBuf> {
        let entries = self.store.list().unwrap_or_default().into_iter();
        let mut of_this_step = entries.filter(|entry| entry.step == self.state.step);
        let last_saved = self.last_saved.as_ref().map(|(_, path)| path.clone());
        of_this_step.next().map(|entry| entry.path).or(last_saved)
    }

    /// Takes an evaluation among the lowest ones, if it is one of them and its checkpoint is kept.
    pub(super) fn enter_top(&mut self, step: u64, loss: f64) -> bool {
        let count = self.config().training.save_top;
        let top = &mut self.state.top;
        if count == 0 || !loss.is_finite() || top.iter().any(|&(known, _)| known == step) {
            return false;
        }
        top.push((step, loss));
        top.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
        top.truncate(count);
        top.iter().any(|&(known, _)| known == step)
    }

    pub(super) fn save(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let step = self.state.step;
        // A run that was taken up from a checkpoint elsewhere has none of its own yet.
        let target = self.store.path_of(step);
        if self.last_saved == Some((step, target)) {
            return Ok(());
        }
        if self.ranks.is_first() {
            if let Some(record) = &mut self.record {
                record.sync()?;
            }
            mend_best(&self.store, &self.state, observer)?;
        }
        let path = self.write_checkpoint()?;
        if self.ranks.is_first() {
            self.tidy_checkpoints(&path, observer)?;
        }
        // Nobody goes on, or tells of a checkpoint, before it is there.
        self.ranks.barrier()?;
        observer.event(Event::Saved { step, path: &path });
        self.last_saved = Some((step, path));
        self.pace.reset();
        Ok(())
    }

    /// Writes weights, states and position: the first rank what all have alike, or all ranks
    /// together what they have in parts.
    fn write_checkpoint(&self) -> Result<PathBuf, TrainError> {
        let step = self.state.step;
        let state = self.state.to_json().map_err(|error| TrainError::State {
            path: self.store.path_of(step),
            problem: error.to_string(),
        })?;
        let (weights, states) = (self.session.weights(), self.session.states());
        if let Some(world) = self.ranks.world().filter(|_| self.session.is_cut()) {
            let Share { rank, ranks } = self.ranks.share();
            let parts = [weights.parts(rank, ranks), states.parts(rank, ranks)];
            let [weights, states] = &parts;
            let mut world = world.lock();
            let path = self
                .store
                .save_shared(step, weights, states, &state, &mut world)?;
            return Ok(path);
        }
        if !self.ranks.is_first() {
            return Ok(self.store.path_of(step));
        }
        let (weights, states) = (weights.views(), states.views());
        Ok(self.store.save(step, &weights, &states, &state)?)
    }

    /// What follows a save: adapters where other programs look for them, and old checkpoints gone.
    fn tidy_checkpoints(&self, path: &Path, observer: &mut dyn Observer) -> Result<(), TrainError> {
        if let Some(lora) = &self.config().tuning.lora {
            let config = self.config();
            keep_adapters(&config.output.output_dir, config, lora, path)?;
        }
        // Once more: writing large tensors takes long enough for the mark to change.
        mend_best(&self.store, &self.state, observer)?;
        remove_old(&self.store, &self.config().training, &self.state)
    }
}

/// Removes what a save leaves beyond the limit, before the saved checkpoint may be marked as the best.
pub(super) fn remove_old(
    store: &Store,
    training: &TrainingConfig,
    state: &State,
) -> Result<(), TrainError> {
    // Those with the lowest losses and the last, or the newest.
    let limit = match training.save_top {
        0 => training.save_total_limit,
        _ => 1,
    };
    if limit > 0 {
        let top: Vec<u64> = state.top.iter().map(|&(step, _)| step).collect();
        store.prune_but(limit, &top)?;
    }
    Ok(())
}

/// Sets a damaged mark of the best checkpoint aside: the run does not need it, and knows itself
/// which one is the best, unless that was removed or is another run's.
pub(super) fn mend_best(
    store: &Store,
    state: &State,
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    let Some(aside) = store.set_aside_damaged_best()? else {
        return Ok(());
    };
    let mut note = format!(
        "the mark of the best checkpoint was damaged and is kept as {}",
        cinch_files::shown(&aside)
    );
    if let (Some(step), Some(loss)) = (state.best_step, state.best_loss)
        && is_saved_best(&store.path_of(step), step, loss)
        && store.mark_best(step, loss).is_ok()
    {
        note += &format!("; step {step} is marked again");
    }
    observer.event(Event::Note(&note));
    Ok(())
}

/// Whether the checkpoint at `path` was saved as the best, with this loss.
fn is_saved_best(path: &Path, step: u64, loss: f64) -> bool {
    let Ok(saved) = checkpoint::load_state(path) else {
        return false;
    };
    State::from_json(path, saved)
        .is_ok_and(|saved| (saved.best_step, saved.best_loss) == (Some(step), Some(loss)))
}

/// The loss of another rank with the step it came in and the checkpoint to go on from; any other
/// error as it is.
pub(super) fn rank_lost(
    error: TrainError,
    ranks: &Ranks,
    step: u64,
    last: Option<PathBuf>,
) -> TrainError {
    match error {
        TrainError::Ranks(RanksError::Lost(loss))
        | TrainError::Engine(EngineError::Ranks(RanksError::Lost(loss)))
        | TrainError::Checkpoint(CheckpointError::Ranks(RanksError::Lost(loss))) => {
            TrainError::RankLost {
                loss: Box::new(loss),
                num_ranks: ranks.share().ranks,
                step,
                last,
            }
        }
        other => other,
    }
}

/// The failure of a GPU with the step it came in and the checkpoint to go on from; any other
/// error as it is.
fn device_failed(error: TrainError, step: u64, last: Option<PathBuf>) -> TrainError {
    match error {
        TrainError::Engine(problem @ EngineError::Cuda { .. })
        | TrainError::Checkpoint(CheckpointError::Engine(problem @ EngineError::Cuda { .. })) => {
            TrainError::DeviceFailed {
                step,
                problem: Box::new(problem),
                last,
            }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost() -> TrainError {
        TrainError::Engine(EngineError::Cuda {
            action: "finish the step".to_owned(),
            problem: "CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure".to_owned(),
        })
    }

    #[test]
    fn a_failed_gpu_names_the_checkpoint_to_go_on_from() {
        let last = PathBuf::from("runs/a/checkpoints/step-00000500");
        let message = device_failed(lost(), 731, Some(last)).to_string();
        for part in [
            "at step 731",
            "CUDA_ERROR_LAUNCH_FAILED",
            "hint:",
            "--resume runs/a/checkpoints/step-00000500",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn a_failed_gpu_before_the_first_checkpoint_has_a_way_out_too() {
        let message = device_failed(lost(), 3, None).to_string();
        assert!(message.contains("nothing was saved"), "{message}");
        assert!(!message.contains("--resume"), "{message}");
    }

    #[test]
    fn other_errors_stay_what_they_are() {
        let error = device_failed(TrainError::NoTargets { step: 4 }, 9, None);
        assert!(matches!(error, TrainError::NoTargets { step: 4 }));
    }
}
