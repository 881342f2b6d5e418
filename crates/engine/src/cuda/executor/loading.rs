//! Kernels on their way into the card: compiled, or found compiled, and loaded.

use std::sync::Arc;

use cinch_graph::DType;
use rayon::prelude::*;

use super::CudaExecutor;
use crate::cuda::command::{Command, Generated, Kernel, LaunchShape};
use crate::cuda::compile::{cubin, generated_cubin};
use crate::cuda::driver::Module;
use crate::cuda::lowering::Card;
use crate::cuda::op::joined;
use crate::error::EngineError;

/// What a module is compiled from.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    File(&'static str),
    Generated(Arc<str>),
}

impl CudaExecutor {
    /// Compiles what commands need and is not loaded yet, on all cores.
    pub(super) fn compile_all<'a>(
        &mut self,
        commands: impl Iterator<Item = &'a Command>,
        dtype: DType,
    ) -> Result<(), EngineError> {
        let card = self.context.info.card();
        let mut sources = Vec::new();
        commands.for_each(|command| gather(command, card, &mut sources));
        sources.sort();
        sources.dedup();
        sources.retain(|source| match source {
            Source::File(file) => !self.modules.contains_key(&(*file, dtype)),
            Source::Generated(text) => !self
                .generated_modules
                .contains_key(&(Arc::clone(text), dtype)),
        });
        let architecture = self.context.info.architecture();
        let compile = |source: &Source| match source {
            Source::File(file) => cubin(file, dtype, &architecture),
            Source::Generated(text) => generated_cubin(text, dtype, &architecture),
        };
        // What cannot be compiled is told where it is loaded, with the op that needs it.
        let compiled: Vec<_> = sources
            .par_iter()
            .map(|source| compile(source).ok())
            .collect();
        for (source, code) in sources.into_iter().zip(compiled) {
            let Some(code) = code else { continue };
            let module = Module::load(&code)?;
            match source {
                Source::File(file) => {
                    self.modules.insert((file, dtype), module);
                }
                Source::Generated(text) => {
                    self.generated_modules.insert((text, dtype), module);
                }
            }
        }
        Ok(())
    }

    /// Loads a kernel for launches of this shape.
    pub(super) fn load(
        &mut self,
        kernel: Kernel,
        dtype: DType,
        shape: &LaunchShape,
    ) -> Result<(), EngineError> {
        if self.functions.contains_key(&(kernel, dtype)) && shape.shared_bytes == 0 {
            return Ok(());
        }
        if !self.modules.contains_key(&(kernel.file, dtype)) {
            let code = cubin(kernel.file, dtype, &self.context.info.architecture())?;
            self.modules
                .insert((kernel.file, dtype), Module::load(&code)?);
        }
        if let Some(module) = self.modules.get(&(kernel.file, dtype)) {
            let function = module.function(kernel.function, shape.shared_bytes)?;
            self.functions.insert((kernel, dtype), function);
        }
        Ok(())
    }

    pub(super) fn load_generated(
        &mut self,
        kernel: &Generated,
        dtype: DType,
    ) -> Result<(), EngineError> {
        if self
            .generated_functions
            .contains_key(&(kernel.clone(), dtype))
        {
            return Ok(());
        }
        let key = (kernel.source.clone(), dtype);
        if !self.generated_modules.contains_key(&key) {
            let architecture = self.context.info.architecture();
            let code = generated_cubin(&kernel.source, dtype, &architecture)?;
            let module = Module::load(&code)?;
            self.generated_modules.insert(key.clone(), module);
        }
        if let Some(module) = self.generated_modules.get(&key) {
            let function = module.function(kernel.function, 0)?;
            let key = (kernel.clone(), dtype);
            self.generated_functions.insert(key, function);
        }
        Ok(())
    }
}

/// Adds the sources of a command's kernels, of all the ways to do what it does.
fn gather(command: &Command, card: Card, sources: &mut Vec<Source>) {
    match command {
        Command::Launch { kernel, .. } | Command::LaunchTable { kernel, .. } => {
            sources.push(Source::File(kernel.file));
        }
        Command::LaunchGenerated { kernel, .. } => {
            sources.push(Source::Generated(Arc::clone(&kernel.source)));
        }
        Command::Products {
            joined,
            heads,
            products,
            tails,
        } => {
            let ways = joined::ways(*joined, products, tails, card);
            let apart = heads.iter().chain(tails.iter().map(|tail| &tail.command));
            for command in ways.iter().flatten().chain(apart) {
                gather(command, card, sources);
            }
        }
        Command::Ways(ways) => {
            for command in ways.iter().flatten() {
                gather(command, card, sources);
            }
        }
        Command::Beside { commands, .. } => {
            for command in commands {
                gather(command, card, sources);
            }
        }
        Command::Product(_)
        | Command::Clear { .. }
        | Command::Copy { .. }
        | Command::Fetch(_)
        | Command::Store(_)
        | Command::Exchange(_)
        | Command::Await { .. } => {}
    }
}
