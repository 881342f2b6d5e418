//! Whether a step that can be planned can also be run: a plan answers for cards and for ranks that
//! are not there, and may be ahead of the executors.

use cinch_config::{Config, ShardedPart};
use cinch_graph::{Target, gathers_during_a_step};

/// Whether ranks that keep only a part of this train on a target.
pub fn is_trained(part: ShardedPart, target: Target) -> bool {
    part != ShardedPart::Weights || gathers_during_a_step(target)
}

/// Why a configuration is planned but not trained on a target, in a sentence; none where it is.
pub fn without_training(config: &Config, target: Target) -> Option<String> {
    let world = &config.batch.world;
    let is_trained = world.is_alone() || is_trained(world.shard, target);
    (!is_trained).then(|| {
        let most = ShardedPart::ALL.into_iter().rev();
        let most = most
            .into_iter()
            .find(|&part| self::is_trained(part, target));
        format!(
            "--shard {} is planned, but cinch does not train it on GPUs yet: weights that are \
             gathered during a step gave wrong gradients there; --shard {} runs",
            world.shard.word(),
            most.unwrap_or_default().word()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One refusal, wherever it is asked for: the executor's and the planner's.
    #[test]
    fn what_gathers_no_weights_says_so() {
        let mut config = cinch_config::Settings::new().resolve().unwrap();
        for target in [Target::Cpu, Target::Cuda] {
            for part in ShardedPart::ALL {
                config.batch.world.shard = part;
                config.batch.world.ranks = 1;
                assert_eq!(without_training(&config, target), None);
                config.batch.world.ranks = 2;
                let gathers = part == ShardedPart::Weights;
                let told = without_training(&config, target);
                assert_eq!(told.is_some(), gathers && !gathers_during_a_step(target));
                if let Some(told) = told {
                    assert!(told.contains("--shard zero3") && told.contains("--shard zero2 runs"));
                }
            }
        }
    }
}
