//! The training loop of transformers' Trainer, with accelerate around the model.
//!
//! It differs from a plain loop in what it keeps by name: the running loss, the last loss and norm, labels beside the inputs,
//! the number of labelled tokens of a step; and in that accelerate brings the model's output to fp32 under autocast.

use super::autocast;
use super::clip::clip_grad_norm;
use super::context::{AllocationCategory, Context};
use super::dtype::DType;
use super::engine;
use super::line::at;
use super::op::pointwise::{apply, like, mul_number, mul_number_in_place};
use super::op::{cast, view};
use super::optimizer;
use super::scaler::GradScaler;
use super::tensor::Tensor;
use super::training::{Accumulation, Program, Reading, ReadingPoint, Recipe, read};

/// A micro batch.
struct Batch {
    inputs: Vec<Tensor>,
    labels: Tensor,
}

/// Trains for some steps; peaks are reset before each. Programs that do not give their logits back run as in a plain loop.
pub fn train(
    context: &Context,
    program: &dyn Program,
    recipe: &Recipe,
    steps: u32,
) -> Vec<Reading> {
    let mut readings = Vec::new();
    let parameters = program.trainable();
    let mut optimizer = optimizer::State::new(recipe.optimizer, grouped(&parameters));
    optimizer.keep_in_float32(program.embeddings());
    let mut scaler = recipe
        .precision
        .scales_loss()
        .then(|| GradScaler::new(context));
    context.set_category(AllocationCategory::Activation);
    at!(context, "trainer.train()");
    // accelerate begins with empty hands.
    context.empty_cache();
    let running_loss = context.empty("tr_loss", [], DType::Float32);
    let (mut last_loss, mut norm): (Option<Tensor>, Option<Tensor>) = (None, None);
    let (mut batches, mut items): (Vec<Batch>, Option<Tensor>) = (Vec::new(), None);
    for step in 0..steps {
        context.reset_peaks();
        context.set_category(AllocationCategory::Batch);
        at!(context, "batch = next(loader)");
        let fresh = samples(program, recipe.accumulation);
        let counted = count(&fresh);
        // The loop's own name holds the last batch until the loop begins again.
        let held = std::mem::replace(&mut batches, fresh).pop();
        drop(std::mem::replace(&mut items, counted));
        drop(held);
        let mut accumulation = Accumulation::new(recipe.accumulation);
        for batch in batches.iter().cycle() {
            context.set_category(AllocationCategory::Activation);
            let loss = forward(context, program, recipe, batch, items.as_ref());
            at!(context, "loss.backward()");
            let divided = mul_number(&loss);
            match &mut scaler {
                Some(scaler) => engine::backward(&scaler.scale(&divided)),
                None => engine::backward(&divided),
            }
            drop(divided);
            drop(last_loss.replace(loss.detach()));
            drop(loss);
            if let Some(loss) = &last_loss {
                look_at(loss);
            }
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
            drop(norm.take());
            norm = clip_grad_norm(&parameters);
        }
        readings.push(read(context, ReadingPoint::Clip(step)));
        at!(context, "optimizer.step()");
        optimizer.step();
        if let Some(scaler) = &mut scaler {
            scaler.update();
        }
        readings.push(read(context, ReadingPoint::Optimizer(step)));
        // `model.zero_grad()`, in the model's order.
        for parameter in &parameters {
            parameter.set_grad(None);
        }
        readings.push(read(context, ReadingPoint::End(step)));
    }
    // What follows is Python leaving the process.
    context.stop_recording();
    drop(running_loss);
    readings
}

/// The optimizer's two groups: what weight decay applies to, then biases and norms.
fn grouped(parameters: &[Tensor]) -> Vec<Tensor> {
    let (decayed, rest): (Vec<&Tensor>, Vec<&Tensor>) =
        parameters.iter().partition(|parameter| parameter.dim() > 1);
    decayed.into_iter().chain(rest).cloned().collect()
}

/// The micro batches of a step, all at once: the loss is divided by the labelled tokens of all of them. Ids are small beside
/// anything else, so that of very many only so many are made.
fn samples(program: &dyn Program, micro_batches: u32) -> Vec<Batch> {
    const MOST: u32 = 64;
    (0..micro_batches.min(MOST))
        .filter_map(|_| {
            let inputs = program.batch();
            let ids = inputs.first()?;
            let labels = like(ids, ids.dtype(), "labels");
            Some(Batch { inputs, labels })
        })
        .collect()
}

/// `sum((labels[..., 1:] != -100).sum() for each batch)`.
fn count(batches: &[Batch]) -> Option<Tensor> {
    let mut total: Option<Tensor> = None;
    for Batch { labels, .. } in batches {
        let last = labels.dim() - 1;
        let shifted = view::slice(labels, last, labels.size(last) - 1);
        let is_label = labels.context().empty("ne", shifted.sizes(), DType::Bool);
        drop(shifted);
        let number = labels.context().empty("sum", [], DType::Int64);
        drop(like(&is_label, DType::Int64, "_to_copy"));
        drop(is_label);
        let sum = like(&number, DType::Int64, "add");
        drop(total.replace(sum));
        drop(number);
    }
    total
}

/// The model under autocast; its logits in fp32 when it returns, where autocast lowered them, and gone with the outputs.
fn forward(
    context: &Context,
    program: &dyn Program,
    recipe: &Recipe,
    batch: &Batch,
    items: Option<&Tensor>,
) -> Tensor {
    at!(context, "loss = model(batch)");
    let run = || match program.outputs(&batch.inputs[0], &batch.labels, items) {
        Some(outputs) => outputs,
        None => (program.loss(&batch.inputs), None),
    };
    let dtype = recipe.precision.autocast();
    let (loss, logits) = match dtype {
        Some(_) => autocast::with(context, dtype, run),
        None => run(),
    };
    if let Some(logits) = logits {
        at!(context, "outputs = convert_to_fp32(outputs)");
        let converted = dtype.map(|_| cast::to(&logits, DType::Float32));
        drop(logits);
        drop(converted);
    }
    // By the number of processes.
    mul_number_in_place(&loss);
    loss
}

/// `isnan(loss) or isinf(loss)`.
fn look_at(loss: &Tensor) {
    drop(apply(loss, "isnan", DType::Bool));
    let magnitude = like(loss, loss.dtype(), "abs");
    let is_infinite = like(loss, DType::Bool, "eq");
    drop(magnitude);
    drop(is_infinite);
}
