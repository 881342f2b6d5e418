//! The training loop: forward, loss, backward, clipping, optimizer step, gradients to none.

use super::autocast;
use super::clip::clip_grad_norm;
use super::context::{AllocationCategory, Context};
use super::dtype::DType;
use super::engine;
use super::line::at;
use super::op::pointwise::mul_number;
use super::optimizer::{self, Optimizer};
use super::scaler::GradScaler;
use super::tensor::Tensor;
use super::trainer;
use crate::convention::Convention;

/// A model with its loss, as the loop sees it.
pub trait Program {
    /// One micro batch on the device.
    fn batch(&self) -> Vec<Tensor>;
    /// The loss of a batch, with all that Python keeps alive on the way.
    fn loss(&self, batch: &[Tensor]) -> Tensor;
    /// Loss and logits, as a language model of transformers gives them: of labels apart from the ids, divided by the number of
    /// labelled tokens where one is given; without logits where a fused loss makes none. None of other programs.
    fn outputs(
        &self,
        _ids: &Tensor,
        _labels: &Tensor,
        _items: Option<&Tensor>,
    ) -> Option<(Tensor, Option<Tensor>)> {
        None
    }
    /// Weights of `nn.Embedding`, as far as the program says.
    fn embeddings(&self) -> Vec<Tensor> {
        Vec::new()
    }
    /// The parameters given to the optimizer.
    fn trainable(&self) -> Vec<Tensor>;
}

/// Types of weights and of computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    Float32,
    /// fp32 weights under autocast.
    AutocastBFloat16,
    /// The same in fp16, with a gradient scaler.
    AutocastFloat16,
    /// Weights in the type itself.
    BFloat16,
    Float16,
    /// Weights in the type itself, under autocast to it as well.
    BFloat16UnderAutocast,
    /// The same in fp16, with a gradient scaler.
    Float16UnderAutocast,
}

impl Precision {
    /// The type of the weights.
    pub fn weights(self) -> DType {
        match self {
            Precision::BFloat16 | Precision::BFloat16UnderAutocast => DType::BFloat16,
            Precision::Float16 | Precision::Float16UnderAutocast => DType::Float16,
            _ => DType::Float32,
        }
    }

    /// The type that autocast lowers to.
    pub fn autocast(self) -> Option<DType> {
        match self {
            Precision::AutocastBFloat16 | Precision::BFloat16UnderAutocast => Some(DType::BFloat16),
            Precision::AutocastFloat16 | Precision::Float16UnderAutocast => Some(DType::Float16),
            _ => None,
        }
    }

    /// Whether the loss is scaled: gradients of fp16 would lose their small values.
    pub fn scales_loss(self) -> bool {
        self.autocast() == Some(DType::Float16)
    }
}

/// How a model is trained.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    pub precision: Precision,
    pub optimizer: Optimizer,
    /// Micro batches of a step.
    pub accumulation: u32,
    pub clips_gradients: bool,
    /// Whose loop runs.
    pub convention: Convention,
}

/// A point of the run at which memory was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadingPoint {
    Model,
    Forward(u32),
    Backward(u32),
    Clip(u32),
    Optimizer(u32),
    End(u32),
}

impl ReadingPoint {
    /// The name in measured runs.
    pub fn name(self) -> String {
        match self {
            ReadingPoint::Model => "model".into(),
            ReadingPoint::Forward(step) => format!("step{step}.forward"),
            ReadingPoint::Backward(step) => format!("step{step}.backward"),
            ReadingPoint::Clip(step) => format!("step{step}.clip"),
            ReadingPoint::Optimizer(step) => format!("step{step}.optim"),
            ReadingPoint::End(step) => format!("step{step}.end"),
        }
    }
}

/// The allocator's counters at a phase.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    pub phase: ReadingPoint,
    pub allocated: u64,
    pub peak_allocated: u64,
    /// What tensors asked for, before rounding.
    pub requested: u64,
    pub reserved: u64,
    pub peak_reserved: u64,
}

/// Reads the counters.
pub fn read(context: &Context, phase: ReadingPoint) -> Reading {
    let memory = context.memory();
    Reading {
        phase,
        allocated: memory.allocated(),
        peak_allocated: memory.peak_allocated(),
        requested: memory.requested(),
        reserved: memory.reserved(),
        peak_reserved: memory.peak_reserved(),
    }
}

/// Micro batches that are run at most where they never repeat.
const MICRO_BATCHES: u32 = 8;

/// Counts the micro batches of a step. From the second on each adds into gradients that exist, and soon finds memory as an
/// earlier one left it: whole rounds of what follows would change nothing, and are not run.
pub(super) struct Accumulation {
    left: u32,
    seen: Vec<u64>,
    repeats: bool,
}

impl Accumulation {
    pub(super) fn new(micro_batches: u32) -> Accumulation {
        Accumulation {
            left: micro_batches,
            seen: Vec::new(),
            repeats: false,
        }
    }

    /// Whether another follows after one that left memory so.
    pub(super) fn goes_on(&mut self, arrangement: u64) -> bool {
        self.left -= 1;
        let before = self.seen.iter().rev().position(|&seen| seen == arrangement);
        if let Some(distance) = before {
            self.left %= distance as u32 + 1;
            self.repeats = true;
        }
        self.seen.push(arrangement);
        self.left > 0 && (self.repeats || self.seen.len() < MICRO_BATCHES as usize)
    }
}

/// Trains for some steps; peaks are reset before each.
pub fn train(
    context: &Context,
    program: &dyn Program,
    recipe: &Recipe,
    steps: u32,
) -> Vec<Reading> {
    if recipe.convention == Convention::Trainer {
        return trainer::train(context, program, recipe, steps);
    }
    let mut readings = Vec::new();
    let parameters = program.trainable();
    let mut optimizer = optimizer::State::new(recipe.optimizer, parameters.clone());
    let mut scaler = recipe
        .precision
        .scales_loss()
        .then(|| GradScaler::new(context));
    let mut last_loss: Option<Tensor> = None;
    for step in 0..steps {
        context.reset_peaks();
        let mut loss_value = None;
        let mut accumulation = Accumulation::new(recipe.accumulation);
        for micro in 0.. {
            context.set_category(AllocationCategory::Batch);
            at!(context, "batch = next(loader)");
            let batch = program.batch();
            context.set_category(AllocationCategory::Activation);
            // Until the model names its own lines.
            at!(context, "loss = model(batch)");
            let dtype = recipe.precision.autocast();
            if step == 0 && micro == 0 {
                autocast::ask(context, dtype);
            }
            let loss = match dtype {
                Some(_) => autocast::with(context, dtype, || program.loss(&batch)),
                None => program.loss(&batch),
            };
            at!(context, "loss = loss / accumulation");
            let loss = mul_number(loss);
            if micro == 0 {
                readings.push(read(context, ReadingPoint::Forward(step)));
            }
            at!(context, "loss.backward()");
            match &mut scaler {
                Some(scaler) => engine::backward(&scaler.scale(&loss)),
                None => engine::backward(&loss),
            }
            if micro == 0 {
                readings.push(read(context, ReadingPoint::Backward(step)));
            }
            drop(loss_value.replace(loss.detach()));
            drop(loss);
            drop(batch);
            if !accumulation.goes_on(context.memory().arrangement()) {
                break;
            }
        }
        context.set_category(AllocationCategory::Optimizer);
        if let Some(scaler) = &mut scaler {
            at!(context, "scaler.unscale_(optimizer)");
            scaler.unscale();
        }
        if recipe.clips_gradients {
            at!(context, "clip_grad_norm_(parameters)");
            drop(clip_grad_norm(&parameters));
        }
        readings.push(read(context, ReadingPoint::Clip(step)));
        at!(context, "optimizer.step()");
        optimizer.step();
        if let Some(scaler) = &mut scaler {
            scaler.update();
        }
        readings.push(read(context, ReadingPoint::Optimizer(step)));
        optimizer.zero_grad();
        last_loss = loss_value;
        readings.push(read(context, ReadingPoint::End(step)));
    }
    // What follows is Python leaving the process.
    context.stop_recording();
    drop(last_loss);
    readings
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever is left out, memory ends as the whole would have left it.
    #[test]
    fn only_whole_rounds_are_left_out() {
        for (begins, round) in [(0, 1), (1, 1), (3, 2), (2, 3), (4, 3)] {
            let arrangement = |micro: u32| match micro.checked_sub(begins) {
                Some(since) => u64::from(begins + since % round),
                None => u64::from(micro),
            };
            for wanted in 1..40 {
                let mut accumulation = Accumulation::new(wanted);
                let mut run = 0;
                while accumulation.goes_on(arrangement(run)) {
                    run += 1;
                }
                assert_eq!(arrangement(run), arrangement(wanted - 1));
                assert!(run < wanted.min(MICRO_BATCHES + round));
            }
        }
    }
}
