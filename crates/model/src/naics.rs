//! The text embedder: four encoders over the channels of a text, averages of their outputs side by
//! side, a mixture of experts, and a point in hyperbolic space. Anchors are told from negatives by
//! the distance to their positives.
//!
//! Texts meet only in the loss. They are encoded chunk by chunk, and an encoder over a chunk is a
//! block: recomputed, it keeps its averages alone. All experts run on all texts, and those that a
//! text does not take are weighed with 0: of a step's arithmetic they are a few thousandths, so
//! that gathering rows for each would save nothing.

use cinch_architecture::Naics;
use cinch_graph::op::{Domain, Joined, Over};
use cinch_graph::{Count, DType, Graph, GraphError, Init, Shape, TensorId};

use crate::bert::{Encoder, LowRank, Texts, text_inputs};
use crate::{Build, Builds, Embedded, Pooling, Purpose, TrainingPhase, input};

impl Builds for Naics {
    fn build(&self, graph: &mut Graph, build: &Build) -> Result<(), GraphError> {
        Model {
            g: graph,
            config: &self.in_stretch(build.phase),
            build,
        }
        .build()
    }

    fn embeds(&self) -> bool {
        true
    }

    /// A stretch of stages with as many negatives has a graph of its own. When it begins is known
    /// once the pairs are counted; until then only the first does.
    fn phases(&self) -> Vec<TrainingPhase> {
        let stretches = self.stretches();
        if stretches.is_empty() {
            return vec![TrainingPhase::WHOLE];
        }
        let phase = |(index, (stage, _)): (u64, &(usize, u64))| TrainingPhase {
            name: stage_phase(*stage).into(),
            first_step: match index {
                0 => 0,
                later => TrainingPhase::OPEN + later,
            },
        };
        (0..).zip(&stretches).map(phase).collect()
    }

    fn without_generation(&self) -> Option<&'static str> {
        Some("it turns texts into points, and writes none")
    }
}

/// The phase that begins with a stage, counted from 0.
pub fn stage_phase(stage: usize) -> String {
    format!("stage {}", stage + 1)
}

/// The name of the term that keeps experts evenly in use.
const BALANCE: &str = "balance";
/// The smallest distance from the origin, and how far beyond −1 a product of two points is at
/// least: both have no derivative there.
const SMALLEST_NORM: f64 = 1e-8;
const PRODUCT_MARGIN: f64 = 1e-5;
/// Below any logit of a comparison that counts.
const LEFT_OUT: f64 = -1e30;

/// A graph in the making.
struct Model<'a> {
    g: &'a mut Graph,
    config: &'a Naics,
    build: &'a Build,
}

/// Points of the hyperboloid, one for each text.
struct Points {
    /// [texts].
    time: TensorId,
    /// [texts, width].
    space: TensorId,
}

impl<'a> Model<'a> {
    fn build(mut self) -> Result<(), GraphError> {
        let joined = match self.build.purpose {
            Purpose::Embed {
                what: Embedded::Channel(index),
                ..
            } => return self.channel(index),
            Purpose::Embed {
                what: Embedded::PointsOfPooled,
                ..
            } => {
                let width = self.config.encoder.width as usize;
                let shape = [self.build.batch, Naics::CHANNEL_NAMES.len() * width];
                self.g.batch(input::POOLED, shape, self.g.compute)
            }
            Purpose::Embed { .. } => self.encode(&Naics::CHANNEL_NAMES.map(|_| vec![1]))?,
            _ => self.encode(&self.config.chunks())?,
        };
        let mixed = self.mix(joined)?;
        let points = self.points(mixed)?;
        match self.build.purpose {
            Purpose::Embed { .. } => self.embeddings(&points),
            _ => self.contrast(&points),
        }
    }

    /// The encoder of a channel.
    fn encoder(&mut self, channel: &str) -> Result<Encoder<'a>, GraphError> {
        let config = self.config;
        let adapters = LowRank {
            rank: config.adapter_rank as usize,
            scale: config.adapter_alpha / config.adapter_rank as f64,
            dropout: config.adapter_dropout,
        };
        let name = format!("encoders.{channel}");
        Encoder::new(
            self.g,
            &config.encoder,
            self.build,
            Some(adapters),
            Some(&name),
        )
    }

    /// Texts of one channel alone, all of the graph's length.
    fn channel(&mut self, index: usize) -> Result<(), GraphError> {
        let channel = Naics::CHANNEL_NAMES[index];
        let encoder = self.encoder(channel)?;
        let name = input::chunk_of(channel, 0);
        let (rows, length) = (self.build.batch, self.build.seq_len);
        let [tokens, lengths] = text_inputs(self.g, &name, rows, length);
        let texts = Texts {
            name: "chunk0",
            tokens,
            lengths,
        };
        self.g.result = Some(encoder.pooled(self.g, &texts, Pooling::Mean)?);
        Ok(())
    }

    /// Averages of all channels, side by side: [anchors · texts, channels · width], the texts of
    /// an anchor one after the other.
    fn encode(
        &mut self,
        chunks: &[Vec<u64>; Naics::CHANNEL_NAMES.len()],
    ) -> Result<TensorId, GraphError> {
        let (config, build) = (self.config, self.build);
        let mut encoders = Vec::with_capacity(Naics::CHANNEL_NAMES.len());
        for channel in Naics::CHANNEL_NAMES {
            encoders.push(self.encoder(channel)?);
        }
        let lengths = config.channel_lengths(build.seq_len as u64);
        let num_chunks = chunks.iter().map(Vec::len).max().unwrap_or(0);
        let mut parts = vec![Vec::with_capacity(num_chunks); encoders.len()];
        for chunk in 0..num_chunks {
            for (index, encoder) in encoders.iter().enumerate() {
                let (channel, chunks) = (Naics::CHANNEL_NAMES[index], &chunks[index]);
                let Some(&texts) = chunks.get(chunk) else {
                    continue;
                };
                let (rows, length) = (build.batch * texts as usize, lengths[index] as usize);
                let name = input::chunk_of(channel, chunk);
                let [tokens, lengths] = text_inputs(self.g, &name, rows, length);
                // Chunks that are alike share a state, so that their number changes nothing.
                let kind = match texts == chunks[0] {
                    true => "chunk",
                    false => "rest",
                };
                let counted = format!("{channel}.{kind}");
                self.g.count_rows(&counted, rows * length);
                self.g.enter_block(&name);
                let chunk = Texts {
                    name: &format!("chunk{chunk}"),
                    tokens,
                    lengths,
                };
                let average = encoder.pooled(self.g, &chunk, Pooling::Mean)?;
                self.g.leave_block();
                let width = self.g.ty(average).width() * texts as usize;
                let name = format!("{name}.anchors");
                let part = self.g.view(&name, average, [build.batch, width])?;
                parts[index].push(part);
            }
        }
        let texts = build.batch * chunks[0].iter().sum::<u64>() as usize;
        let mut channels = Vec::with_capacity(encoders.len());
        for (channel, parts) in Naics::CHANNEL_NAMES.iter().zip(&parts) {
            let all = match parts[..] {
                [only] => only,
                _ => {
                    let name = format!("{channel}.texts");
                    self.g.concat(&name, Joined::Columns, parts)?
                }
            };
            let width = self.g.ty(all).shape.elements() / texts.max(1);
            let name = format!("{channel}.rows");
            channels.push(self.g.view(&name, all, [texts, width])?);
        }
        self.g.count_rows("texts", texts);
        self.g.concat("texts", Joined::Columns, &channels)
    }

    /// A linear layer with a bias, as PyTorch starts it.
    fn linear(&mut self, name: &str, x: TensorId, outputs: usize) -> Result<TensorId, GraphError> {
        let inputs = self.g.ty(x).width();
        let init = Init::Uniform {
            bound: 1.0 / (inputs as f64).sqrt(),
        };
        let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
        let shape = [outputs, inputs];
        let (weight, bias) = match self.build.trains() {
            true => (
                self.g.weight(&weight, shape, init),
                self.g.small_weight(&bias, [outputs], init),
            ),
            false => (
                self.g.frozen_weight(&weight, shape, init),
                self.g.frozen_small_weight(&bias, [outputs], init),
            ),
        };
        self.g.linear(name, x, weight, Some(bias))
    }

    /// The outputs of the experts that a text takes, weighed by the softmax of their gates.
    fn mix(&mut self, x: TensorId) -> Result<TensorId, GraphError> {
        let (experts, width) = (self.config.experts as usize, self.g.ty(x).width());
        let gates = self.linear("moe.gate", x, experts)?;
        let weights = self.weights_of_experts(gates)?;
        let mut inputs = Vec::with_capacity(2 * experts);
        for expert in 0..experts {
            let name = |part: &str| format!("moe.experts.{expert}.{part}");
            let h = self.linear(&name("0"), x, self.config.expert_width as usize)?;
            let rate = self.build.dropout(self.config.expert_dropout);
            let dropout = self.g.dropout(rate);
            let h = self
                .g
                .map(&name("1"), &[h], |v| v[0].relu().dropout(dropout))?;
            inputs.push(self.linear(&name("3"), h, width)?);
        }
        inputs.extend(self.columns("moe.weights", weights)?);
        let domain = Domain {
            shape: self.g.ty(x).shape,
            dtype: self.g.compute,
        };
        self.g.map_over("moe.mixed", domain, &inputs, |v| {
            let (outputs, weights) = v.split_at(experts);
            let mut pairs = outputs.iter().zip(weights).map(|(y, w)| y * w);
            let first = pairs.next().unwrap_or_else(|| v[0].constant(0.0));
            pairs.fold(first, |sum, product| sum + product)
        })
    }

    /// [texts, experts]: the softmax over the experts that each text takes, and 0 for others. The
    /// first of equal gates is taken.
    fn weights_of_experts(&mut self, gates: TensorId) -> Result<TensorId, GraphError> {
        let (texts, experts) = (self.g.ty(gates).rows(), self.config.experts as usize);
        let chosen = self.config.chosen;
        let domain = Domain {
            shape: self.g.ty(gates).shape,
            dtype: self.g.compute.accumulator(),
        };
        let mut inputs = vec![gates];
        inputs.extend(self.columns("moe.gates", gates)?);
        let taken = self.g.map_over("moe.taken", domain, &inputs, |v| {
            let own = v[0].detach();
            let ahead = v[1..].iter().enumerate().map(|(index, other)| {
                let other = other.detach();
                let before = own
                    .constant(index as f64)
                    .where_less(own.column(), 1.0, 0.0);
                own.where_less(&other, 1.0, own.where_equal(&other, before, 0.0))
            });
            let rank = ahead.fold(own.constant(0.0), |rank, one| rank + one);
            rank.where_less(chosen as f64 - 0.5, 1.0, 0.0)
        })?;
        let largest = self
            .g
            .max("moe.largest", Over::Columns, &[gates], |v| v[0].clone())?;
        let largest = self.by_row("moe.largest.rows", largest)?;
        let inputs = [gates, largest, taken];
        let total = self.g.sum("moe.total", Over::Columns, &inputs, |v| {
            (&v[0] - v[1].detach()).exp() * v[2].detach()
        })?;
        let total = self.by_row("moe.total.rows", total)?;
        let all = self.g.sum("moe.all", Over::Columns, &inputs, |v| {
            (&v[0] - v[1].detach()).exp()
        })?;
        let all = self.by_row("moe.all.rows", all)?;
        if !matches!(self.build.purpose, Purpose::Embed { .. }) {
            // Of each micro batch by itself, as a run in PyTorch has it; those that ranks run at
            // the same time are one. Only what is routed has to be known of the others: the
            // probabilities of each are a summand.
            let rows = texts as f64;
            let routed = self
                .g
                .mean_of_ranks("moe.routed", &[taken], |v| v[0].detach() / rows)?;
            let inputs = [gates, largest, all];
            let probability = self.g.sum_of_micro_batch("moe.probability", &inputs, |v| {
                (&v[0] - v[1].detach()).exp() / &v[2] / rows
            })?;
            let scale = experts as f64 / chosen as f64;
            self.g
                .loss_term(BALANCE, Count::Rows(1), &[routed, probability], |v| {
                    v[0].detach() * &v[1] * scale
                })?;
            self.g.weigh_term(BALANCE, self.config.balance_weight);
        }
        let inputs = [gates, largest, taken, total];
        self.g.map_over("moe.shares", domain, &inputs, |v| {
            (&v[0] - v[1].detach()).exp() * v[2].detach() / &v[3]
        })
    }

    /// A number for each row, said to be that: as many rows as columns would be read by column.
    fn by_row(&mut self, name: &str, x: TensorId) -> Result<TensorId, GraphError> {
        let rows = self.g.ty(x).shape.elements();
        self.g.view(name, x, [rows, 1])
    }

    /// The columns of a matrix, each by itself.
    fn columns(&mut self, name: &str, x: TensorId) -> Result<Vec<TensorId>, GraphError> {
        let width = self.g.ty(x).width();
        match width {
            1 => Ok(vec![x]),
            _ => self.g.split(name, Joined::Columns, x, &vec![1; width]),
        }
    }

    /// From vectors to the points that they lead to from the origin of the hyperboloid.
    fn points(&mut self, x: TensorId) -> Result<Points, GraphError> {
        let width = self.config.encoder.width as usize;
        let x = self.linear("projection", x, width)?;
        let v = self.linear("hyperbolic", x, width + 1)?;
        let root = self.config.curvature.sqrt();
        let squares = self
            .g
            .sum("squares", Over::Columns, &[v], |v| v[0].square())?;
        let norm = self.g.map("norm", &[squares], |v| {
            v[0].max(SMALLEST_NORM * SMALLEST_NORM).sqrt()
        })?;
        let time = self.g.map("time", &[norm], |v| (&v[0] / root).cosh())?;
        let domain = Domain {
            shape: self.g.ty(v).shape,
            dtype: self.g.compute.accumulator(),
        };
        let norm = self.by_row("norm.rows", norm)?;
        let space = self.g.map_over("space", domain, &[v, norm], |v| {
            (&v[1] / root).sinh() * &v[0] / &v[1]
        })?;
        Ok(Points { time, space })
    }

    /// What a graph of texts alone is run for: time and space side by side.
    fn embeddings(&mut self, points: &Points) -> Result<(), GraphError> {
        let texts = self.build.batch;
        let time = self.g.view("time.column", points.time, [texts, 1])?;
        let parts = [time, points.space];
        let all = self.g.concat("embeddings", Joined::Columns, &parts)?;
        self.g.result = Some(all);
        Ok(())
    }

    /// The loss: how surely each anchor's positive is told from its negatives.
    fn contrast(&mut self, points: &Points) -> Result<(), GraphError> {
        let (anchors, texts) = (self.build.batch, self.config.texts() as usize);
        let others = texts - 1;
        let width = self.g.ty(points.space).width();
        let space = self
            .g
            .view("space.anchors", points.space, [anchors, texts * width])?;
        let sizes = [width, others * width];
        let parts = self
            .g
            .split("space.parts", Joined::Columns, space, &sizes)?;
        let anchor = self.g.view("anchor.space", parts[0], [anchors, 1, width])?;
        let other = self
            .g
            .view("other.space", parts[1], [anchors, others, width])?;
        let time = self.g.view("time.anchors", points.time, [anchors, texts])?;
        let times = self
            .g
            .split("time.parts", Joined::Columns, time, &[1, others])?;
        let inner = self
            .g
            .sum("inner", Over::Columns, &[other, anchor], |v| &v[0] * &v[1])?;
        let compared = self.g.batch(input::COMPARED, [anchors, others], DType::I32);
        let (root, temperature) = (self.config.curvature.sqrt(), self.config.temperature);
        let inputs = [inner, times[1], times[0], compared];
        let logits = self.g.map("logits", &inputs, |v| {
            let product = (&v[1] * &v[2] - &v[0]).max(1.0 + PRODUCT_MARGIN);
            let logit = -product.acosh() * (root / temperature);
            v[3].where_less(0.5, LEFT_OUT, logit)
        })?;
        let largest = self
            .g
            .max("largest", Over::Columns, &[logits], |v| v[0].clone())?;
        let largest = self.by_row("largest.rows", largest)?;
        let total = self
            .g
            .sum("total", Over::Columns, &[logits, largest], |v| {
                (&v[0] - v[1].detach()).exp()
            })?;
        let total = self.by_row("total.rows", total)?;
        let inputs = [logits, largest, total];
        self.g
            .loss_term("contrast", Count::Rows(anchors), &inputs, |v| {
                let loss = v[2].ln() + v[1].detach() - &v[0];
                v[0].column().where_equal(0.0, loss, 0.0)
            })?;
        debug_assert_eq!(self.g.ty(logits).shape, Shape::from([anchors, others]));
        Ok(())
    }
}
