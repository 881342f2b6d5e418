//! The graph as text, one node a line: `cinch plan --graph`.

use std::fmt;

use crate::graph::{Graph, Node, Phase, TensorId};
use crate::parameter::Storage;

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for parameter in &self.parameters {
            let id = match parameter.storage {
                Storage::Quantised(_) => parameter.master,
                Storage::Trained | Storage::TrainedAsRead | Storage::Frozen => parameter.compute,
            };
            let tensor = self.tensor(id);
            let frozen = if parameter.is_trained() {
                ""
            } else {
                "  frozen"
            };
            writeln!(
                f,
                "%{} = parameter {} `{}`{frozen}",
                id.0, tensor.ty, tensor.name
            )?;
        }
        let mut section = None;
        for node in &self.nodes {
            let here = (node.phase == Phase::Update, node.block);
            if section.replace(here) != Some(here) {
                match (node.phase, node.block) {
                    (Phase::Update, _) => writeln!(f, "\nupdate")?,
                    (_, Some(block)) => writeln!(f, "\n{}", self.blocks[block.index()].name)?,
                    (_, None) => writeln!(f)?,
                }
            }
            self.write_node(f, node)?;
        }
        Ok(())
    }
}

/// Of more tensors than these, a line tells the number.
const MOST_LISTED: usize = 8;

impl Graph {
    fn write_node(&self, f: &mut fmt::Formatter<'_>, node: &Node) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, ids: &[TensorId]| {
            if ids.len() > MOST_LISTED {
                return write!(f, "{} tensors", ids.len());
            }
            for (i, id) in ids.iter().enumerate() {
                let separator = if i > 0 { ", " } else { "" };
                write!(f, "{separator}%{}", id.0)?;
            }
            Ok(())
        };
        let mark = match node.phase {
            Phase::Forward => "  ",
            Phase::Recompute => "↻ ",
            Phase::Backward => "← ",
            Phase::Exchange => "⇄ ",
            Phase::Update => "↑ ",
        };
        f.write_str(mark)?;
        list(f, &node.outputs)?;
        write!(f, " = {}(", node.op.name())?;
        list(f, &node.inputs)?;
        f.write_str(")")?;
        for &id in node.outputs.iter().take(MOST_LISTED) {
            let tensor = self.tensor(id);
            // The update overwrites its one result, the gradients' norm, and an exchange replaces
            // what it adds up.
            let adds = !matches!(node.phase, Phase::Exchange | Phase::Update);
            let sign = if tensor.role.is_accumulator() && adds {
                " +="
            } else {
                ""
            };
            write!(f, "{sign} {}", tensor.ty)?;
        }
        writeln!(f, "  `{}`", node.name)
    }
}
