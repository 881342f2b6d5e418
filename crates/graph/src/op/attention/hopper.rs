//! What Hopper's kernels take of an attention, and how their backward is laid out: which blocks
//! run together and what they sum in the workspace. Plan and lowering both ask here.

use super::super::{aligned, product, sum};
use super::Attention;
use crate::types::{DType, TensorType};

/// The kernels' launches and workspaces are for no more multiprocessors: no Hopper card has more.
pub(super) const MOST_MULTIPROCESSORS: usize = 132;

/// The one-pass backward on a card. A team of blocks has one query head at a time, one block for
/// each [`HopperBackward::KEYS`] keys; all teams run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperBackward {
    /// Blocks of keys of a sequence, and blocks of a team.
    pub blocks: usize,
    pub teams: usize,
    /// Heads that a team has, one after the other.
    pub rounds: usize,
    /// From one head of a team to the next; 1 where a team has neighbours.
    pub apart: usize,
    /// Queries of a tile.
    pub tile_rows: usize,
    /// Key heads whose gradients are summed at the same time.
    pub key_places: usize,
    most_teams: usize,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// The backward over short sequences of narrow heads on a Hopper card: a block has a whole head, so
/// that nothing is summed across blocks and there is no workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperShort {
    /// Heads of all sequences.
    pub heads: usize,
    /// Positions of a sequence in whole blocks.
    pub padded: usize,
}

/// The backward of few heads on a card, evenly dealt out: a step is a tile of queries against a
/// block of keys, and every block of the launch has an equal stretch of the line of all steps
/// (`attention_hopper_dealt.cu`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperDealt {
    /// Blocks of the launch.
    pub stretches: usize,
    /// Blocks of keys of a sequence.
    blocks: usize,
    /// Of the whole batch.
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// Bytes of each part of its workspace, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperDealtParts {
    pub lse: u64,
    pub delta: u64,
    /// Of dQ, of all heads.
    pub query_sums: u64,
    /// Of dK and dV, where stretches share a block of keys.
    pub key_parts: u64,
    pub turns: u64,
}

/// Bytes of each part of the backward's workspace, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperParts {
    pub lse: u64,
    pub delta: u64,
    pub query_sums: u64,
    pub key_sums: u64,
    /// Counters of both.
    pub turns: u64,
    pub lows: u64,
}

impl Attention {
    /// Whether Hopper's kernels take it: 16 bits, heads of 32, 64 or 128 columns, no selection, and
    /// a positive scale, because the largest score is looked for before scaling.
    pub fn suits_hopper(&self, source: &TensorType) -> bool {
        matches!(source.dtype, DType::Bf16 | DType::F16)
            && matches!(self.head_dim, 32 | 64 | 128)
            && !self.selection
            && self.scale > 0.0
            && source.shape.dims().iter().all(|size| *size > 0)
    }

    /// Whether a kernel of Hopper's takes its backward, on the largest card.
    pub(super) fn backward_suits_hopper(&self, source: &TensorType) -> bool {
        let short = self.hopper_short(source).is_some();
        short || self.hopper_backward(source, MOST_MULTIPROCESSORS).is_some()
    }

    /// Its backward over short sequences: heads of 32 columns with keys of their own, in any order.
    /// `None` where it does not suit.
    pub fn hopper_short(&self, source: &TensorType) -> Option<HopperShort> {
        let (batch, length) = (source.shape.dims()[0], source.shape.dims()[1]);
        let suits = self.suits_hopper(source)
            && self.head_dim == HopperShort::HEAD_DIM
            && self.heads == self.kv_heads
            && !self.causal
            && length <= HopperShort::MOST_POSITIONS;
        suits.then(|| HopperShort {
            heads: batch.saturating_mul(self.heads),
            padded: length.next_multiple_of(HopperBackward::KEYS),
        })
    }

    /// Its backward on a Hopper card of so many multiprocessors; `None` where it does not suit, or
    /// where a sequence has more blocks than run at the same time.
    pub fn hopper_backward(
        &self,
        source: &TensorType,
        multiprocessors: usize,
    ) -> Option<HopperBackward> {
        let (batch, length) = (source.shape.dims()[0], source.shape.dims()[1]);
        let blocks = length.div_ceil(HopperBackward::KEYS);
        let multiprocessors = multiprocessors.min(MOST_MULTIPROCESSORS);
        let suits = self.suits_hopper(source) && matches!(self.head_dim, 64 | 128);
        if !suits || blocks > multiprocessors {
            return None;
        }
        let heads = batch.saturating_mul(self.heads);
        let kv_heads = batch.saturating_mul(self.kv_heads);
        let group = self.heads / self.kv_heads;
        let most_teams = (multiprocessors / blocks).min(heads);
        let fewest = heads.div_ceil(most_teams);
        // Query heads of one key head are best one after the other: they sum into one place.
        // Where that leaves teams without work, they are taken by different teams.
        let whole = kv_heads.div_ceil(most_teams).saturating_mul(group);
        let together = whole <= fewest + fewest / 10;
        let rounds = if together { whole } else { fewest };
        let teams = heads.div_ceil(rounds);
        Some(HopperBackward {
            blocks,
            teams,
            rounds,
            apart: if together { 1 } else { teams },
            // Twice as many columns leave registers for half as many queries.
            tile_rows: HopperBackward::KEYS * 64 / self.head_dim,
            key_places: kv_heads.min(2 * teams + 2),
            most_teams,
            batch,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
        })
    }

    /// Its backward on a Hopper card of so many multiprocessors, evenly dealt out: causal order
    /// and nothing else that is hidden or dropped, sums of dQ that are small, and a shorter way
    /// than that of teams of blocks. `None` where it does not suit, whatever the card.
    pub fn hopper_dealt(&self, source: &TensorType, multiprocessors: usize) -> Option<HopperDealt> {
        let teams = self.hopper_backward(source, MOST_MULTIPROCESSORS)?;
        let is_plain = self.causal
            && self.dropout.is_none()
            && !self.padding
            && self.window.is_none()
            && !self.documents;
        let dealt = HopperDealt {
            stretches: 1,
            blocks: teams.blocks,
            heads: teams.batch.saturating_mul(self.heads),
            kv_heads: teams.batch.saturating_mul(self.kv_heads),
            head_dim: self.head_dim,
        };
        let is_small = dealt.parts().query_sums <= HopperDealt::MOST_SUM_BYTES;
        if !is_plain || !is_small {
            return None;
        }
        let steps = dealt.steps().div_ceil(MOST_MULTIPROCESSORS) + HopperDealt::FINISH_STEPS;
        (steps < teams.longest_way()).then(|| HopperDealt {
            stretches: multiprocessors.min(MOST_MULTIPROCESSORS).min(dealt.steps()),
            ..dealt
        })
    }

    /// On the largest card.
    pub(super) fn hopper_largest_dealt(&self, source: &TensorType) -> Option<HopperDealt> {
        self.hopper_dealt(source, MOST_MULTIPROCESSORS)
    }

    /// The largest workspace of the backward on any Hopper card.
    pub(super) fn hopper_workspace(&self, source: &TensorType) -> u64 {
        let dealt = self.hopper_largest_dealt(source);
        let teams = self.hopper_backward(source, MOST_MULTIPROCESSORS);
        let bytes = [
            dealt.map(|dealt| dealt.parts().bytes()),
            // Not taken where they are dealt out.
            teams
                .filter(|_| dealt.is_none())
                .map(|teams| teams.parts().bytes()),
        ];
        bytes.into_iter().flatten().max().unwrap_or(0)
    }
}

impl HopperShort {
    pub const HEAD_DIM: usize = 32;
    /// Those whose dQ a block has in shared memory.
    pub const MOST_POSITIONS: usize = 512;
}

impl HopperDealt {
    /// Queries of a tile.
    pub const TILE_ROWS: usize = 64;
    /// No more than a library's matrix product has for itself.
    const MOST_SUM_BYTES: u64 = 32 << 20;
    /// What it takes to make gradients of sums and parts, in steps.
    const FINISH_STEPS: usize = 6;
    /// Rows and columns of a piece of the sums that become gradients.
    const PANEL: usize = 64;

    /// Positions of a sequence with all of its last block.
    pub fn padded(&self) -> usize {
        self.blocks * HopperBackward::KEYS
    }

    /// Counters of tiles of queries.
    pub fn turns(&self) -> usize {
        self.heads * self.padded() / Self::TILE_ROWS
    }

    /// In causal order a block of keys is seen by its own tiles and by later ones.
    pub fn steps(&self) -> usize {
        let tiles = HopperBackward::KEYS / Self::TILE_ROWS;
        self.heads * tiles * self.blocks * (self.blocks + 1) / 2
    }

    /// Pieces of the gradients of keys and values, and of queries.
    pub fn panels(&self) -> usize {
        let columns = self.head_dim / Self::PANEL;
        let rows = (2 * self.kv_heads + self.heads) * self.padded() / Self::PANEL;
        rows * columns
    }

    pub fn parts(&self) -> HopperDealtParts {
        let words = |factors: [usize; 3]| {
            let words = product(factors.map(|factor| factor as u64));
            aligned(product([words, DType::F32.size()]))
        };
        let positions = words([self.heads, self.padded(), 1]);
        // A stretch shares its first and its last block of keys at most.
        let shared = self.stretches + self.stretches.min(self.kv_heads * self.blocks);
        HopperDealtParts {
            lse: positions,
            delta: positions,
            query_sums: words([self.heads, self.padded(), self.head_dim]),
            key_parts: words([shared, HopperBackward::KEYS, 2 * self.head_dim]),
            turns: words([self.turns(), 1, 1]),
        }
    }
}

impl HopperDealtParts {
    fn in_order(&self) -> [u64; 5] {
        [
            self.lse,
            self.delta,
            self.query_sums,
            self.key_parts,
            self.turns,
        ]
    }

    pub fn bytes(&self) -> u64 {
        sum(self.in_order())
    }

    /// Where each part begins.
    pub fn offsets(&self) -> [u64; 5] {
        offsets(self.in_order())
    }
}

/// Where parts begin that lie one after the other.
fn offsets<const N: usize>(parts: [u64; N]) -> [u64; N] {
    let mut next = 0;
    parts.map(|bytes| {
        let offset = next;
        next += bytes;
        offset
    })
}

impl HopperBackward {
    /// Keys of a block.
    pub const KEYS: usize = 128;
    /// Heads of a team that have sums at the same time: some of its blocks are ahead of others.
    const HEADS_WITH_SUMS: usize = 4;

    /// Positions of a sequence with all of its last block.
    pub fn padded(&self) -> usize {
        self.blocks * Self::KEYS
    }

    pub fn tiles(&self) -> usize {
        self.padded() / self.tile_rows
    }

    /// Steps of the block that has the most to do, in causal order: that of the first keys in
    /// every other round, that of the last in the rest.
    fn longest_way(&self) -> usize {
        let blocks = self.rounds.div_ceil(2) * self.blocks + self.rounds / 2;
        blocks * Self::KEYS / HopperDealt::TILE_ROWS
    }

    /// Counters of tiles of queries, and of blocks of keys after them.
    pub fn turns(&self) -> [usize; 2] {
        [
            self.teams * Self::HEADS_WITH_SUMS * self.tiles(),
            self.key_places * self.blocks,
        ]
    }

    /// As large as any card needs that has no more multiprocessors.
    pub fn parts(&self) -> HopperParts {
        let words = |factors: [usize; 3]| {
            let words = product(factors.map(|factor| factor as u64));
            aligned(product([words, DType::F32.size()]))
        };
        let (padded, teams) = (self.padded(), self.most_teams);
        let positions = words([self.batch, self.heads, padded]);
        let places = self.batch.saturating_mul(self.kv_heads);
        let places = places.min(2 * teams + 2);
        let shared_keys = if self.heads > self.kv_heads {
            places
        } else {
            0
        };
        let counters = teams * Self::HEADS_WITH_SUMS * self.tiles() + places * self.blocks;
        HopperParts {
            lse: positions,
            delta: positions,
            query_sums: words([teams * Self::HEADS_WITH_SUMS, padded, self.head_dim]),
            key_sums: words([shared_keys, padded, 2 * self.head_dim]),
            turns: words([counters, 1, 1]),
            lows: words([self.batch, self.tiles(), 1]),
        }
    }
}

impl HopperParts {
    fn in_order(&self) -> [u64; 6] {
        [
            self.lse,
            self.delta,
            self.query_sums,
            self.key_sums,
            self.turns,
            self.lows,
        ]
    }

    pub fn bytes(&self) -> u64 {
        sum(self.in_order())
    }

    /// Where each part begins.
    pub fn offsets(&self) -> [u64; 6] {
        offsets(self.in_order())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::AttentionInputs;

    fn attention(heads: usize, kv_heads: usize, head_dim: usize) -> Attention {
        Attention {
            inputs: AttentionInputs::Separate,
            heads,
            kv_heads,
            head_dim,
            causal: true,
            scale: 0.125,
            dropout: None,
            padding: false,
            window: None,
            documents: false,
            selection: false,
        }
    }

    fn queries(batch: usize, length: usize, op: &Attention) -> TensorType {
        TensorType::new([batch, length, op.heads * op.head_dim], DType::Bf16)
    }

    #[test]
    fn every_head_is_taken_once() {
        for (heads, kv_heads) in [(12, 12), (28, 4), (7, 1), (6, 2), (1, 1)] {
            let op = attention(heads, kv_heads, 128);
            for (batch, length) in [
                (1, 1),
                (1, 1536),
                (1, 8192),
                (3, 300),
                (32, 1024),
                (2, 16896),
            ] {
                for multiprocessors in [132, 114, 78] {
                    let source = queries(batch, length, &op);
                    let Some(back) = op.hopper_backward(&source, multiprocessors) else {
                        assert!(length.div_ceil(128) > multiprocessors);
                        continue;
                    };
                    assert!(back.teams * back.blocks <= multiprocessors);
                    let mut taken: Vec<usize> = (0..back.teams)
                        .flat_map(|team| {
                            (0..back.rounds).map(move |round| match back.apart {
                                1 => team * back.rounds + round,
                                apart => team + round * apart,
                            })
                        })
                        .filter(|head| *head < batch * heads)
                        .collect();
                    taken.sort_unstable();
                    assert_eq!(taken, (0..batch * heads).collect::<Vec<_>>());
                    // Teams that have whole groups begin with one.
                    let group = heads / kv_heads;
                    assert!(back.apart != 1 || back.teams == 1 || back.rounds % group == 0);
                }
            }
        }
    }

    #[test]
    fn no_smaller_card_needs_more_than_the_plan_has() {
        for (heads, kv_heads, head_dim) in [(12, 12, 64), (28, 4, 128), (6, 2, 64)] {
            let op = attention(heads, kv_heads, head_dim);
            for (batch, length) in [(1, 1), (1, 1536), (5, 4000), (32, 1024)] {
                let source = queries(batch, length, &op);
                let planned = op.hopper_workspace(&source);
                for multiprocessors in 1..=200 {
                    let Some(back) = op.hopper_backward(&source, multiprocessors) else {
                        continue;
                    };
                    match op.hopper_dealt(&source, multiprocessors) {
                        Some(dealt) => assert!(dealt.parts().bytes() <= planned),
                        None => assert!(back.parts().bytes() <= planned),
                    }
                    let counters = back.turns().into_iter().sum::<usize>() as u64 * 4;
                    assert!(counters <= back.parts().turns);
                }
            }
        }
    }

    #[test]
    fn few_heads_are_dealt_out_evenly() {
        let op = attention(28, 4, 128);
        let source = queries(1, 1536, &op);
        let dealt = op.hopper_dealt(&source, 132).unwrap();
        // 12 blocks of keys, seen by 24, 22, … 2 tiles.
        assert_eq!((dealt.stretches, dealt.steps()), (132, 28 * 156));
        assert_eq!(dealt.turns(), 28 * 24);
        assert_eq!(dealt.panels(), 2 * 24 * (4 + 4 + 28));
        let parts = dealt.parts();
        assert_eq!(parts.query_sums, 28 * 1536 * 128 * 4);
        assert_eq!(parts.key_parts, (132 + 4 * 12) * 128 * 256 * 4);
        assert_eq!(op.hopper_workspace(&source), parts.bytes());
        // More blocks of keys than stretches: each shares two at most.
        let own_keys = attention(28, 28, 128);
        let dealt = own_keys.hopper_dealt(&source, 114).unwrap();
        assert_eq!(dealt.parts().key_parts, 2 * 114 * 128 * 256 * 4);
        // What fills the card in teams stays there, and what has sums of more than 32 MiB.
        let of_64 = attention(12, 12, 64);
        let is_dealt = |op: &Attention, batch, length| {
            let dealt = op.hopper_dealt(&queries(batch, length, op), 132);
            dealt.is_some()
        };
        assert!(is_dealt(&of_64, 1, 1024));
        assert!(!is_dealt(&of_64, 4, 256));
        assert!(!is_dealt(&of_64, 32, 1024));
        assert!(is_dealt(&op, 1, 2048));
        assert!(!is_dealt(&op, 2, 1536));
        assert!(!is_dealt(&op, 1, 8192));
    }

    #[test]
    fn other_widths_types_and_lengths_are_not_hoppers() {
        let op = attention(4, 4, 64);
        let source = queries(1, 100, &op);
        assert!(op.suits_hopper(&source));
        assert!(!attention(4, 4, 16).suits_hopper(&source));
        assert!(!op.suits_hopper(&TensorType::new([1, 100, 256], DType::F32)));
        let negative = Attention {
            scale: -1.0,
            ..op.clone()
        };
        assert!(!negative.suits_hopper(&source));
        assert!(
            op.hopper_backward(&queries(1, 133 * 128, &op), 132)
                .is_none()
        );
        assert_eq!(op.hopper_workspace(&queries(1, 133 * 128, &op)), 0);
    }

    #[test]
    fn heads_of_32_have_a_backward_over_short_sequences_in_any_order() {
        let op = Attention {
            causal: false,
            ..attention(12, 12, 32)
        };
        let source = queries(3, 500, &op);
        let short = op.hopper_short(&source).unwrap();
        assert_eq!((short.heads, short.padded), (36, 512));
        assert_eq!(op.hopper_workspace(&source), 0);
        assert!(op.backward_suits_hopper(&source));
        assert!(op.hopper_backward(&source, 132).is_none());
        let causal = attention(12, 12, 32);
        let grouped = Attention {
            kv_heads: 6,
            ..op.clone()
        };
        for other in [&causal, &grouped] {
            assert!(other.suits_hopper(&source));
            assert!(!other.backward_suits_hopper(&source));
            assert_eq!(other.hopper_workspace(&source), 0);
        }
        assert!(!op.backward_suits_hopper(&queries(3, 513, &op)));
    }
}
