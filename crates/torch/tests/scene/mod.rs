//! A small training run through the allocator, written down as the recorder would.

use std::fmt::Write as _;

use cinch_torch::allocator::{Allocator, AllocatorConfig, BlockId, SegmentEvent};

pub const MIB: u64 = 1 << 20;

/// Frames as PyTorch's recorder gives them; the backward's thread has none.
pub const BUILD: &[&str] = &[
    "/site/torch/nn/modules/linear.py:106:__init__",
    "train.py:9:main",
];
pub const LOOP: &[&str] = &["train.py:20:load", "train.py:31:main"];
pub const FORWARD: &[&str] = &[
    "/site/torch/nn/functional.py:2567:linear",
    "/site/torch/nn/modules/module.py:1790:_call_impl",
    "train.py:33:main",
];
pub const BACKWARD: &[&str] = &[];
pub const OPTIMIZER: &[&str] = &["/site/torch/optim/adamw.py:90:step", "train.py:36:main"];
pub const ZERO_GRAD: &[&str] = &[
    "/site/torch/optim/optimizer.py:1000:zero_grad",
    "train.py:37:main",
];

pub struct Scene {
    pub allocator: Allocator,
    settings: String,
    lines: String,
    stacks: Vec<&'static [&'static str]>,
    time: u64,
    recording: bool,
    blocks: Vec<(BlockId, u64, &'static [&'static str])>,
}

impl Scene {
    pub fn new(settings: &str) -> Self {
        let config = AllocatorConfig::parse(settings).unwrap();
        Self {
            allocator: Allocator::new(config, None),
            settings: settings.into(),
            lines: String::new(),
            stacks: Vec::new(),
            time: 1_700_000_000_000_000,
            recording: false,
            blocks: Vec::new(),
        }
    }

    pub fn record(&mut self) {
        self.recording = true;
        self.allocator.reset_peaks();
    }

    fn stack(&mut self, frames: &'static [&'static str]) -> Option<usize> {
        if frames.is_empty() {
            return None;
        }
        if let Some(place) = self.stacks.iter().position(|known| *known == frames) {
            return Some(place);
        }
        self.stacks.push(frames);
        let number = self.stacks.len() - 1;
        writeln!(self.lines, "{{\"stack\":{number},\"frames\":{frames:?}}}").unwrap();
        Some(number)
    }

    fn event(&mut self, action: &str, size: u64, address: u64, frames: &'static [&'static str]) {
        if !self.recording {
            return;
        }
        let stack = self.stack(frames);
        self.time += 10;
        let time = self.time;
        write!(
            self.lines,
            "{{\"action\":\"{action}\",\"size\":{size},\"addr\":{address},\"time_us\":{time}"
        )
        .unwrap();
        if let Some(stack) = stack {
            write!(self.lines, ",\"stack\":{stack}").unwrap();
        }
        self.lines.push_str("}\n");
    }

    fn segments(&mut self, frames: &'static [&'static str]) {
        for event in self.allocator.take_segment_events() {
            let (action, bytes, address) = match event {
                SegmentEvent::Alloc { address, bytes } => ("segment_alloc", bytes, address),
                SegmentEvent::Free { address, bytes } => ("segment_free", bytes, address),
                SegmentEvent::Map { address, bytes } => ("segment_map", bytes, address),
                SegmentEvent::Unmap { address, bytes } => ("segment_unmap", bytes, address),
            };
            self.event(action, bytes, address, frames);
        }
    }

    pub fn allocate(&mut self, bytes: u64, frames: &'static [&'static str]) -> BlockId {
        let block = self.allocator.allocate(bytes, 0).unwrap();
        self.segments(frames);
        let address = self.allocator.address(block);
        self.event("alloc", bytes, address, frames);
        self.blocks.push((block, bytes, frames));
        block
    }

    pub fn free(&mut self, block: BlockId, frames: &'static [&'static str]) {
        let address = self.allocator.address(block);
        let place = self
            .blocks
            .iter()
            .position(|&(living, ..)| living == block)
            .unwrap();
        let (_, bytes, _) = self.blocks.swap_remove(place);
        self.allocator.free(block);
        self.event("free_requested", bytes, address, frames);
        self.event("free_completed", bytes, address, frames);
    }

    pub fn release_cached(&mut self) {
        self.allocator.release_cached();
        self.segments(LOOP);
    }

    pub fn mark(&mut self, batch: u64) {
        self.time += 10;
        writeln!(
            self.lines,
            "{{\"mark\":\"step\",\"time_us\":{},\"batch\":{batch}}}",
            self.time
        )
        .unwrap();
        self.time += 10;
    }

    /// The whole file: header, events, segments.
    pub fn finish(mut self) -> String {
        let header = format!(
            "{{\"cinch_snapshot\":1,\"torch\":\"2.11.0\",\"device_name\":\"NVIDIA H200\",\"device_total\":{},\"settings\":\"{}\",\"complete\":true}}\n",
            150_109_880_320_u64, self.settings
        );
        for segment in self.allocator.segments() {
            self.segment_lines(&segment);
        }
        header + &self.lines
    }

    /// Of an expandable segment each mapped range is a line, as in PyTorch's snapshot.
    fn segment_lines(&mut self, segment: &cinch_torch::allocator::SegmentView) {
        let mut ranges: Vec<(u64, u64, Vec<String>)> = Vec::new();
        for block in &segment.blocks {
            let owner = self
                .blocks
                .iter()
                .find(|&&(id, ..)| self.allocator.address(id) == block.address)
                .map_or(&[][..], |&(_, _, frames)| frames);
            let state = if block.allocated {
                "active_allocated"
            } else {
                "inactive"
            };
            let stack = self
                .stack(owner)
                .map_or("null".to_owned(), |number| number.to_string());
            let text = format!("[{},{},\"{state}\",{stack}]", block.size, block.requested);
            match ranges.last_mut() {
                Some((_, end, blocks)) if *end == block.address => {
                    *end += block.size;
                    blocks.push(text);
                }
                _ => ranges.push((block.address, block.address + block.size, vec![text])),
            }
        }
        for (start, end, blocks) in ranges {
            writeln!(
                self.lines,
                "{{\"segment\":{start},\"size\":{},\"stream\":{},\"pool\":\"{}\",\"expandable\":{},\"blocks\":[{}]}}",
                end - start,
                segment.stream,
                if segment.small { "small" } else { "large" },
                segment.expandable,
                blocks.join(",")
            )
            .unwrap();
        }
    }
}

/// Two weights, built before the recording, and steps of the given batch sizes. Activations
/// grow with the batch; a workspace stays.
pub fn training(settings: &str, batches: &[u64]) -> Scene {
    let mut scene = Scene::new(settings);
    let weights = [6 * MIB, 300_000];
    for bytes in weights {
        scene.allocate(bytes, BUILD);
    }
    scene.record();
    let mut states = Vec::new();
    for (number, &batch) in batches.iter().enumerate() {
        scene.mark(batch);
        let input = scene.allocate(4096 * batch, LOOP);
        if number == 0 {
            scene.allocate(8 * MIB, FORWARD);
        }
        let activations: Vec<BlockId> = (1..=3)
            .map(|layer| {
                let temporary = scene.allocate(MIB * batch, FORWARD);
                let kept = scene.allocate(2 * MIB * batch + layer * 10_000, FORWARD);
                scene.free(temporary, FORWARD);
                kept
            })
            .collect();
        let mut gradients = Vec::new();
        for (layer, activation) in activations.into_iter().enumerate().rev() {
            let flowing = scene.allocate(MIB * batch, BACKWARD);
            scene.free(activation, BACKWARD);
            if let Some(&bytes) = weights.get(layer) {
                gradients.push(scene.allocate(bytes, BACKWARD));
            }
            scene.free(flowing, BACKWARD);
        }
        scene.free(input, LOOP);
        if states.is_empty() {
            for bytes in weights.iter().flat_map(|&bytes| [bytes, bytes]) {
                states.push(scene.allocate(bytes, OPTIMIZER));
            }
        }
        let temporary = scene.allocate(weights[0], OPTIMIZER);
        scene.free(temporary, OPTIMIZER);
        for gradient in gradients {
            scene.free(gradient, ZERO_GRAD);
        }
    }
    scene
}
