//! Encoders planned to turn texts into vectors: a graph for each of several lengths, so that a short
//! text does not run as the longest does, all of them in one arena.

use cinch_architecture::{Architecture, Bert, Naics};
use cinch_graph::{DType, Graph, Target};
use cinch_model::{Build, Embedded, Pooling, Purpose, build, sentence_encoder};
use cinch_plan::{Options, Plan};

use crate::StepError;

/// The fewest tokens that a graph is made for.
const SHORTEST: usize = 16;

/// The graphs of a model that embeds.
#[derive(Clone, Debug)]
pub struct EncoderPlan {
    /// Of each channel's encoder, the shortest texts first.
    pub channels: Vec<Vec<EncoderRun>>,
    /// From what all channels became to points, where that is asked for.
    pub head: Option<EncoderRun>,
    /// Texts of a run.
    pub texts: usize,
}

/// An encoder over texts of up to `length` tokens.
#[derive(Clone, Debug)]
pub struct EncoderRun {
    pub length: usize,
    pub graph: Graph,
    pub plan: Plan,
}

/// A graph and the tokens of its texts.
type OfLength = (usize, Graph);

impl EncoderPlan {
    /// From texts with the channels of `model` to points. Other channels than the first have up to
    /// `seq_len` tokens.
    pub fn points(
        model: &Naics,
        texts: usize,
        seq_len: usize,
        compute: DType,
        target: Target,
    ) -> Result<Self, StepError> {
        let architecture = Architecture::Naics(model.clone());
        let graph = |what: Embedded, length: usize| -> Result<OfLength, StepError> {
            let purpose = Purpose::Embed { what, frozen: true };
            let form = Build::plain(texts, length, compute, purpose);
            Ok((length, build(&architecture, &form)?))
        };
        let lengths = model.channel_lengths(seq_len as u64);
        let channels = lengths.iter().enumerate().map(|(index, &longest)| {
            let of_length = |length| graph(Embedded::Channel(index), length);
            lengths_up_to(longest as usize, target)
                .map(of_length)
                .collect()
        });
        let channels = channels.collect::<Result<Vec<Vec<OfLength>>, StepError>>()?;
        let head = graph(Embedded::PointsOfPooled, 1)?;
        Self::new(channels, Some(head), texts, target)
    }

    /// From single texts of up to `longest` tokens to what an encoder alone makes of them.
    pub fn sentences(
        model: &Bert,
        pooling: Pooling,
        [texts, longest]: [usize; 2],
        compute: DType,
        target: Target,
    ) -> Result<Self, StepError> {
        let of_length = |length: usize| -> Result<OfLength, StepError> {
            let graph = sentence_encoder(model, pooling, [texts, length], compute)?;
            Ok((length, graph))
        };
        let channel = lengths_up_to(longest, target).map(of_length);
        let channels = vec![channel.collect::<Result<Vec<OfLength>, StepError>>()?];
        Self::new(channels, None, texts, target)
    }

    fn new(
        channels: Vec<Vec<OfLength>>,
        head: Option<OfLength>,
        texts: usize,
        target: Target,
    ) -> Result<Self, StepError> {
        let all = channels.iter().flatten().chain(&head);
        let graphs: Vec<&Graph> = all.map(|(_, graph)| graph).collect();
        let mut plans = Plan::several(&graphs, Options::new(target))?.into_iter();
        let mut planned = |(length, graph): OfLength| -> Result<EncoderRun, StepError> {
            let plan = plans.next().ok_or(StepError::NoVariant)?;
            plan.check_sizes(&graph)?;
            Ok(EncoderRun {
                length,
                graph,
                plan,
            })
        };
        let mut of_channel = |runs: Vec<OfLength>| runs.into_iter().map(&mut planned).collect();
        Ok(Self {
            channels: channels
                .into_iter()
                .map(&mut of_channel)
                .collect::<Result<_, StepError>>()?,
            head: head.map(planned).transpose()?,
            texts,
        })
    }

    pub fn arena_bytes(&self) -> u64 {
        let runs = self.channels.iter().flatten().chain(&self.head);
        let arenas = runs.map(|run| run.plan.arena_bytes);
        arenas.max().unwrap_or(0)
    }
}

/// The lengths that graphs are made for: twice as long each time, up to `longest`. On a CPU, where a
/// graph costs next to nothing to make ready, there is one between each two, so that no text runs
/// as one that is half as long again.
fn lengths_up_to(longest: usize, target: Target) -> impl Iterator<Item = usize> {
    let doubled = std::iter::successors(Some(SHORTEST), |length| length.checked_mul(2));
    let between = move |length: usize| (target == Target::Cpu).then_some(length + length / 2);
    let lengths = doubled.flat_map(move |length| [Some(length), between(length)]);
    lengths
        .flatten()
        .take_while(move |&length| length < longest)
        .chain([longest])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_has_a_length_that_is_not_much_longer() {
        let of = |longest| lengths_up_to(longest, Target::Cpu).collect::<Vec<_>>();
        assert_eq!(of(100), [16, 24, 32, 48, 64, 96, 100]);
        assert_eq!(of(24), [16, 24]);
        assert_eq!(of(3), [3]);
        let on_a_card: Vec<usize> = lengths_up_to(100, Target::Cuda).collect();
        assert_eq!(on_a_card, [16, 32, 64, 100]);
        for longest in 1..600 {
            let lengths = of(longest);
            assert_eq!(lengths.last(), Some(&longest));
            assert!(lengths.is_sorted_by(|a, b| a < b), "{lengths:?}");
        }
    }

    /// What all lengths share has one place, and only the longest run decides the rest.
    #[test]
    fn all_runs_share_one_arena() {
        let model = Naics::new(4);
        let plan = |seq_len| EncoderPlan::points(&model, 2, seq_len, DType::F32, Target::Cpu);
        let (long, short) = (plan(64).unwrap(), plan(24).unwrap());
        assert_eq!(long.channels.len(), 4);
        let lengths: Vec<usize> = long.channels[1].iter().map(|run| run.length).collect();
        assert_eq!(lengths, [16, 24, 32, 48, 64]);
        let runs = long.channels.iter().flatten().chain(&long.head);
        let persistent: Vec<u64> = runs.map(|run| run.plan.persistent_bytes).collect();
        assert!(persistent.iter().all(|&bytes| bytes == persistent[0]));
        // Weights of four encoders, and of what follows them.
        let weights = 4 * Architecture::Naics(model).parameters();
        assert!((weights..weights + (1 << 20)).contains(&persistent[0]));
        assert!(long.arena_bytes() > short.arena_bytes());
    }
}
