//! What a GPU loses besides the arena, as measured on this machine: the context, loaded modules and
//! library handles. Kept in the cache folder, so that later plans for the same card and driver hold
//! the measured figure instead of the built-in one. Recorded steps are left out: what they take
//! follows from the number of their launches, which is another for each model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use cinch_config::ShardedPart;
use cinch_engine::Engine;
use cinch_engine::cuda::{self, CudaExecutor};
use cinch_graph::Target;
use cinch_step::{NetworkBytes, StepPlan, StepTarget};
use serde::{Deserialize, Serialize};

use crate::files;

/// One card's overhead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    pub card: String,
    /// CUDA version of the driver.
    pub driver_version: i32,
    /// In use right after the context was created. What other programs hold is part of the
    /// reading, so the smallest one ever seen is kept.
    pub context_bytes: u64,
    /// What came on top of context, arena and recorded steps until the first step could run; the
    /// newest reading.
    pub loaded_bytes: u64,
    /// What NCCL took where several ranks ran, by what of the step was cut; the newest readings.
    #[serde(default)]
    pub network: BTreeMap<ShardedPart, u64>,
    /// Seconds since 1970.
    pub measured_at: u64,
}

impl Measured {
    /// What the session of a plan has taken on a GPU before its first step; none on the CPU.
    pub fn read(engine: &Engine, plan: &StepPlan) -> anyhow::Result<Option<Self>> {
        let Some(executor) = engine.cuda() else {
            return Ok(None);
        };
        let context_bytes = executor.context_bytes();
        let outside = executor
            .used_bytes()?
            .saturating_sub(executor.arena_bytes());
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(Some(Self {
            card: executor.info().name.clone(),
            driver_version: executor.info().driver_version,
            context_bytes,
            loaded_bytes: outside
                .saturating_sub(context_bytes)
                .saturating_sub(plan.recorded_bytes())
                .saturating_sub(executor.network_bytes()),
            network: network(plan, executor.network_bytes()),
            measured_at: since.map_or(0, |since| since.as_secs()),
        }))
    }

    pub fn total_bytes(&self) -> u64 {
        self.context_bytes.saturating_add(self.loaded_bytes)
    }

    /// Where ranks share a card, readings of it are of all of them. They are alike, so what one has
    /// besides what is known is the network's.
    fn of_shared(self, executor: &CudaExecutor, plan: &StepPlan) -> anyhow::Result<Self> {
        let bytes = executor
            .own_used_bytes()?
            .saturating_sub(executor.arena_bytes())
            .saturating_sub(plan.recorded_bytes())
            .saturating_sub(self.total_bytes());
        Ok(Self {
            network: network(plan, bytes),
            ..self
        })
    }

    fn is_of(&self, card: &str, driver_version: i32) -> bool {
        self.card == card && self.driver_version == driver_version
    }
}

/// What a plan for this target holds on this machine.
pub fn machine(target: Target) -> StepTarget {
    let measured = match target {
        Target::Cpu => None,
        Target::Cuda => known(),
    };
    measured.map_or_else(
        || StepTarget::from(target),
        |measured| StepTarget {
            target,
            overhead_bytes: measured.total_bytes(),
            network: measured
                .network
                .iter()
                .fold(NetworkBytes::assumed(target), |network, (&part, &bytes)| {
                    network.with(part, bytes)
                }),
        },
    )
}

/// The figure of this machine's card, where one was kept.
pub fn known() -> Option<Measured> {
    let card = cuda::card()?;
    let list = list(&path()?);
    list.into_iter()
        .find(|one| one.is_of(&card.name, card.driver_version))
}

/// Keeps a reading. Where the cache cannot be written, later plans go on with the built-in figure.
pub fn keep(measured: &Measured) {
    if let Some(path) = path() {
        let _ = store(&path, measured);
    }
}

/// Keeps what a rank has taken before its first step. Where several share a card, only the
/// network's part can be told.
pub fn keep_of_rank(engine: &Engine, plan: &StepPlan) {
    let shared = engine.cuda().filter(|executor| executor.other_ranks() > 0);
    let reading = match shared {
        None => Measured::read(engine, plan),
        Some(executor) => known()
            .map(|known| known.of_shared(executor, plan))
            .transpose(),
    };
    if let Ok(Some(reading)) = reading {
        keep(&reading);
    }
}

/// What NCCL has taken, where ranks were connected.
fn network(plan: &StepPlan, bytes: u64) -> BTreeMap<ShardedPart, u64> {
    let world = &plan.config.batch.world;
    let reading = (!world.is_alone() && bytes > 0).then_some((world.shard, bytes));
    reading.into_iter().collect()
}

fn path() -> Option<PathBuf> {
    Some(cinch_files::cache_folder()?.join("overhead.json"))
}

/// A file that is not there or not readable holds nothing.
fn list(path: &Path) -> Vec<Measured> {
    let text = cinch_files::read_regular_text(path, cinch_files::MAX_READ).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

fn store(path: &Path, measured: &Measured) -> anyhow::Result<()> {
    let (same, mut all): (Vec<_>, Vec<_>) = list(path)
        .into_iter()
        .partition(|one| one.is_of(&measured.card, measured.driver_version));
    let seen = same.iter().map(|one| one.context_bytes);
    let before = same.iter().flat_map(|one| &one.network);
    let network = before.chain(&measured.network);
    all.push(Measured {
        context_bytes: seen.fold(measured.context_bytes, u64::min),
        network: network.map(|(&part, &bytes)| (part, bytes)).collect(),
        ..measured.clone()
    });
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    files::replace(path, serde_json::to_string_pretty(&all)?.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(card: &str, context_bytes: u64, loaded_bytes: u64) -> Measured {
        Measured {
            card: card.to_owned(),
            driver_version: 13000,
            context_bytes,
            loaded_bytes,
            network: BTreeMap::new(),
            measured_at: 1,
        }
    }

    #[test]
    fn the_smallest_context_and_the_newest_rest_are_kept_by_card() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/overhead.json");
        store(&path, &reading("A", 600, 50)).unwrap();
        store(&path, &reading("B", 300, 20)).unwrap();
        // Another program was there too.
        store(&path, &reading("A", 9000, 55)).unwrap();
        let mut kept = list(&path);
        kept.sort_by_key(|one| one.card.clone());
        assert_eq!(kept, [reading("A", 600, 55), reading("B", 300, 20)]);
        let newer = Measured {
            driver_version: 14000,
            ..reading("A", 700, 60)
        };
        store(&path, &newer).unwrap();
        assert_eq!(list(&path).len(), 3);
    }

    #[test]
    fn a_run_of_one_rank_leaves_the_networks_figure() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("overhead.json");
        let of_ranks = |bytes: &[(ShardedPart, u64)]| Measured {
            network: bytes.iter().copied().collect(),
            ..reading("A", 600, 50)
        };
        let (whole, cut) = (ShardedPart::None, ShardedPart::Weights);
        store(&path, &of_ranks(&[(whole, 70)])).unwrap();
        store(&path, &reading("A", 600, 50)).unwrap();
        assert_eq!(list(&path), [of_ranks(&[(whole, 70)])]);
        store(&path, &of_ranks(&[(cut, 90)])).unwrap();
        store(&path, &of_ranks(&[(whole, 80)])).unwrap();
        assert_eq!(list(&path), [of_ranks(&[(whole, 80), (cut, 90)])]);
    }

    #[test]
    fn a_damaged_file_holds_nothing_and_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("overhead.json");
        std::fs::write(&path, "[{").unwrap();
        assert_eq!(list(&path), []);
        store(&path, &reading("A", 1, 2)).unwrap();
        assert_eq!(list(&path), [reading("A", 1, 2)]);
    }
}
