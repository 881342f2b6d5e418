//! A training run, and the prediction of its memory.

use cinch_architecture::Architecture;
use cinch_device::Generation;

use super::adapter::Lora;
use super::frozen::Frozen;
use super::liger::Liger;
use super::mask::Attention;
use super::module::touch_device;
use super::profile::Profile;
use super::replay::{self, Setup};
use crate::TorchError;
use crate::allocator::AllocatorConfig;
use crate::chip::Chip;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::context::Libraries;
use crate::eager::memory::{Caching, Ledger, MemoryModel};
use crate::eager::optimizer::Optimizer;
use crate::eager::training::{self, Program, Reading, ReadingPoint, Recipe};
use crate::eager::{Context, DType, Event};

/// Everything that decides a run's memory.
#[derive(Clone, Debug)]
pub struct Workload {
    pub architecture: Architecture,
    pub batch: u64,
    pub length: u64,
    pub attention: Attention,
    /// Activation checkpointing of every layer.
    pub checkpoints: Checkpointing,
    /// Liger's kernels, as far as it has them for the model.
    pub liger: Liger,
    pub lora: Option<Lora>,
    /// Of the weights that are not trained.
    pub frozen: Frozen,
    /// `prepare_model_for_kbit_training`, which brings what is not quantised to fp32.
    pub prepared: bool,
    pub recipe: Recipe,
    pub allocator: AllocatorConfig,
    /// The card that it runs on.
    pub chip: Chip,
    /// The most that the allocator may reserve: the card's memory less its overhead, or a cap. Without it memory never runs
    /// out.
    pub memory_limit: Option<u64>,
}

/// Which requests are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Record {
    Nothing,
    Steps,
    Everything,
}

/// Steps that are run: the first makes the optimizer's state, the second is like all later ones.
pub const STEPS: u32 = 2;

/// The longest sequence and the largest batch: they keep products of sizes far from overflow.
const MOST_LENGTH: u64 = 1 << 20;
const MOST_TOKENS: u64 = 1 << 28;
const MOST_RANK: u64 = 1 << 16;
/// States of all channels at all timesteps, of which a layer has some tensors.
const MOST_STATES: u64 = 1 << 48;
/// Pixels of the patches whose convolution was held to rehearsals.
const REHEARSED_PATCH: [u64; 2] = [16, 16];
/// Timesteps of a loop in Python: each is some twenty nodes of the graph in every layer, and all are held at once.
const MOST_TIMESTEPS: u64 = 1 << 14;
/// The same over all layers: some kilobytes of this process for each.
const MOST_LAYER_TIMESTEPS: u64 = 1 << 20;

/// What a run will take.
#[derive(Clone, Debug)]
pub struct Prediction {
    /// The allocator's counters at every phase of the steps.
    pub readings: Vec<Reading>,
    pub peak_allocated: u64,
    pub peak_reserved: u64,
    /// Held from the driver when the last step ends.
    pub reserved_at_end: u64,
    pub libraries: Libraries,
    /// Managed memory, which the driver keeps on the card while there is room.
    pub paged: u64,
    /// The request that found no memory under the limit; the run ends there.
    pub out_of_memory: Option<u64>,
}

/// A model before its first step.
#[derive(Clone, Debug)]
pub struct Weights {
    /// Parameters and buffers, as they were asked for.
    pub bytes: u64,
    /// Of each parameter that is trained: how many values, of which type.
    pub trainable: Vec<(u64, DType)>,
}

impl Weights {
    /// Values that are trained.
    pub fn num_trainable(&self) -> u64 {
        self.trainable.iter().map(|&(values, _)| values).sum()
    }
}

impl Workload {
    /// Replays the run through PyTorch's allocator.
    pub fn predict(&self) -> Result<Prediction, TorchError> {
        self.check()?;
        Ok(self.run(Box::new(self.caching()), Record::Nothing).0)
    }

    fn caching(&self) -> Caching {
        let mut allocator = self.allocator.clone();
        if self.memory_limit.is_some() {
            // All of it is the process's, and garbage collection knows it as the cap.
            allocator.memory_fraction = Some(1.0);
        }
        Caching::new(allocator, self.memory_limit)
    }

    /// The same, or none as soon as tensors hold more than this.
    pub fn predict_within(&self, most_allocated: u64) -> Result<Option<Prediction>, TorchError> {
        self.check()?;
        let memory = self.caching().with_ceiling(most_allocated);
        let prediction = self.run(Box::new(memory), Record::Nothing).0;
        Ok(Some(prediction).filter(|prediction| prediction.out_of_memory.is_none()))
    }

    /// The requests of the steps, without what the allocator makes of them.
    pub fn trace(&self) -> Result<Vec<Event>, TorchError> {
        self.check()?;
        Ok(self.run(Box::new(Ledger::default()), Record::Steps).1)
    }

    /// The model alone.
    pub fn weights(&self) -> Result<Weights, TorchError> {
        self.check()?;
        let context = Context::new(self.chip, Box::new(Ledger::default()));
        let program = self.program(&context);
        let bytes = context.memory().requested();
        let trainable = program
            .trainable()
            .iter()
            .map(|parameter| (parameter.numel(), parameter.dtype()))
            .collect();
        Ok(Weights { bytes, trainable })
    }

    /// Every request of the run, the model's own included.
    pub fn events(&self) -> Result<Vec<Event>, TorchError> {
        self.check()?;
        Ok(self.run(Box::new(Ledger::default()), Record::Everything).1)
    }

    /// Where the memory goes: the course of the run, and what is alive at its peak.
    pub fn profile(&self) -> Result<Profile, TorchError> {
        self.check()?;
        let events = self.run(Box::new(Ledger::default()), Record::Everything).1;
        Ok(Profile::of(&events))
    }

    /// Whether the model takes such a batch, and the replay ends in a time and memory that one can wait for.
    fn check(&self) -> Result<(), TorchError> {
        let at_most = |what, value: u64, most: u64| {
            let fits = value <= most;
            fits.then_some(())
                .ok_or(TorchError::TooLarge { what, value, most })
        };
        if self.batch == 0 || self.length < 2 || self.recipe.accumulation == 0 {
            return Err(TorchError::EmptyRun {
                batch: self.batch,
                length: self.length,
                accumulation: self.recipe.accumulation,
            });
        }
        at_most("length", self.length, MOST_LENGTH)?;
        let beyond = self.architecture.beyond_the_replay();
        if let Some(problem) = beyond.or_else(|| replay::refuses(self)) {
            return Err(TorchError::Beyond { problem });
        }
        if let Some(tokens) = self.architecture.positions()
            && self.architecture.has_one_length()
            && tokens != self.length
        {
            return Err(TorchError::Beyond {
                problem: format!(
                    "a sequence of {} is one image, {tokens} tokens, and never {}",
                    self.architecture.family().title,
                    self.length
                ),
            });
        }
        let tokens = self
            .batch
            .saturating_mul(self.length)
            .saturating_mul(self.architecture.sequences_per_sample());
        at_most("tokens in a micro batch", tokens, MOST_TOKENS)?;
        if let Some(scanned) = self.architecture.scanned_states() {
            at_most("length", self.length, MOST_TIMESTEPS)?;
            let timesteps = self.length.saturating_mul(self.architecture.layers());
            at_most("timesteps in all layers", timesteps, MOST_LAYER_TIMESTEPS)?;
            let states = tokens.saturating_mul(scanned);
            at_most("states of a layer's tokens", states, MOST_STATES)?;
        } else if let Some(positions) = self.architecture.positions() {
            at_most("length", self.length, positions)?;
        }
        if self.frozen.is_quantised() {
            if self.lora.is_none() {
                return Err(TorchError::NothingTrained);
            }
            if !replay::can_be_quantised(&self.architecture) {
                return Err(TorchError::Beyond {
                    problem: format!(
                        "quantised weights in {} are not computed",
                        self.architecture.family().title
                    ),
                });
            }
        }
        if let Some(lora) = &self.lora {
            at_most("rank of the adapters", lora.rank, MOST_RANK)?;
        }
        Ok(())
    }

    /// Those of Liger's kernels that are asked for and exist for the model.
    pub fn liger_in_effect(&self) -> Liger {
        replay::liger(&self.architecture, self.liger)
    }

    /// What the prediction takes for granted because only the run can tell.
    pub fn assumptions(&self) -> Vec<&'static str> {
        let mut list = Vec::new();
        if self.recipe.precision.scales_loss() {
            list.push("the gradient scaler skips no step: a skipped first step leaves the optimizer's state to the second");
        }
        list.extend(self.architecture.family().assumptions);
        if self.lora.is_some() && matches!(self.architecture, Architecture::HuggingFaceMamba(_)) {
            list.push("adapters in transformers' Mamba follow its source; only full training was measured");
        }
        if self.liger.is_on() {
            list.push(match self.liger_in_effect().is_on() {
                true => "Liger's kernels ask for memory as those of liger-kernel 0.8.5 do",
                false => "Liger has no kernels for this family: the model runs with its own ops",
            });
        }
        if self.liger_in_effect().is_on() && self.frozen.is_quantised() {
            list.push("Liger's kernels beside quantised weights follow its source; only runs without such weights were rehearsed");
        }
        if let Architecture::Vit(shape) = &self.architecture
            && shape.patch != REHEARSED_PATCH
        {
            list.push("not certain: what cuDNN takes while it convolves patches was rehearsed for 16 × 16 pixels, and other patches follow the same rule; `cinch rehearse` asks cuDNN itself");
        }
        list.extend(self.assumed_of_the_card());
        if self.frozen == Frozen::EightBit {
            list.push("no activation is an outlier to LLM.int8(): columns of outliers are multiplied apart and kept");
        }
        if let Optimizer::PagedAdam { .. } = self.recipe.optimizer {
            list.push("paged states are in managed memory, outside the allocator: on the card while it has room, and moved to the host by the driver where it has none; the figure to plan with leaves them out");
        }
        list
    }

    /// What is not known of other cards than those of the measured generation.
    fn assumed_of_the_card(&self) -> Vec<&'static str> {
        let (chip, precision) = (self.chip, self.recipe.precision);
        let generation = chip.capability.generation();
        let mut list = Vec::new();
        if generation == Chip::H200.capability.generation() {
            return list;
        }
        let lowest = precision.autocast().unwrap_or(precision.weights());
        if lowest == DType::BFloat16 && !chip.has_bf16() {
            list.push("the card emulates bf16: fused attention runs op by op in fp32, and cuBLAS is taken to multiply bf16 as it multiplies fp16");
        }
        match generation {
            Some(Generation::Volta) => list.push("PyTorch for CUDA 13 has no kernels for a V100: memory is that of PyTorch 2.11 for CUDA 12.6 by the same rules, of which sorting was not compared"),
            Some(Generation::Blackwell) => list.push("on Blackwell cuBLAS is given 8.1 MiB, as PyTorch 2.11 does (later versions give 32), and cuDNN's attention takes what cuDNN 9.19 names without a card"),
            _ => {}
        }
        if matches!(self.architecture, Architecture::Vit(_)) {
            list.push("not certain: what cuDNN takes while it convolves patches was found for an H200, and other cards take other kernels; `cinch rehearse` asks cuDNN itself");
        }
        if matches!(self.frozen, Frozen::FourBit { .. }) {
            list.push("up to how many tokens bitsandbytes multiplies four bits without restoring the weight was measured on an H200, and is scaled by the card's multiprocessors");
        }
        list
    }

    fn run(&self, memory: Box<dyn MemoryModel>, record: Record) -> (Prediction, Vec<Event>) {
        let context = Context::new(self.chip, memory);
        touch_device(&context);
        if record == Record::Everything {
            context.start_recording();
        }
        context.reset_peaks();
        let program = self.program(&context);
        let mut readings = vec![training::read(&context, ReadingPoint::Model)];
        if record == Record::Steps {
            context.start_recording();
        }
        readings.extend(training::train(
            &context,
            program.as_ref(),
            &self.recipe,
            STEPS,
        ));
        let prediction = Prediction {
            peak_allocated: readings
                .iter()
                .map(|reading| reading.peak_allocated)
                .max()
                .unwrap_or(0),
            peak_reserved: readings
                .iter()
                .map(|reading| reading.peak_reserved)
                .max()
                .unwrap_or(0),
            reserved_at_end: readings.last().map_or(0, |reading| reading.reserved),
            libraries: context.libraries(),
            paged: context.paged(),
            out_of_memory: context.out_of_memory(),
            readings,
        };
        (prediction, context.take_events())
    }

    fn program(&self, context: &Context) -> Box<dyn Program> {
        let setup = Setup {
            context: context.clone(),
            dtype: self.recipe.precision.weights(),
            lora: self.lora.clone(),
            frozen: self.frozen,
            prepared: self.prepared,
            attention: self.attention,
            checkpoints: self.checkpoints,
            liger: self.liger_in_effect(),
            batch: [self.batch, self.length],
        };
        replay::program(&self.architecture, &setup)
    }
}
