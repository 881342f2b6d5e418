//! How the backward deals out blocks of keys where teams with whole heads would come out uneven:
//! which blocks of the launch get which, so that long walks come with short ones. The kernel finds
//! its own items by the same rules (`Deal` of `attention_hopper_backward.cu`).

use super::HopperBackward;

/// Items are blocks of keys of heads, `block · heads + head`: at causal order the longest walks
/// first. `main_slots` of the launch's blocks, the slots, get the first `main_items` in rows, every
/// other row from the last slot to the first; the other slots get the rest likewise. Odd slots go
/// through their rows backwards, and so do odd heads through their queries: heads that share keys
/// then end at different times, and the blocks of a head come to a tile one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperDeal {
    pub slots: usize,
    pub main_slots: usize,
    pub main_items: usize,
    heads: usize,
    blocks: usize,
    /// Tiles of queries beside a block of keys.
    tiles: usize,
}

/// Slots of one kind and the items that they get.
struct Zone {
    first_slot: usize,
    slots: usize,
    first_item: usize,
    items: usize,
}

impl HopperDeal {
    /// The one whose longest slot is shortest, over so many multiprocessors.
    pub(super) fn shortest(
        heads: usize,
        blocks: usize,
        tiles: usize,
        multiprocessors: usize,
    ) -> Option<Self> {
        let items = heads * blocks;
        let slots = multiprocessors.min(items);
        let deals = (1..=slots).flat_map(|main_slots| {
            let rows = 1..=items.div_ceil(main_slots);
            let deal = move |rows: usize| Self {
                slots,
                main_slots,
                main_items: items.min(rows * main_slots),
                heads,
                blocks,
                tiles,
            };
            // Somebody has to take the rest.
            let is_whole = move |deal: &Self| main_slots < slots || deal.main_items == items;
            rows.map(deal).filter(is_whole)
        });
        deals.min_by_key(Self::longest)
    }

    /// Steps of the longest slot.
    pub(super) fn longest(&self) -> usize {
        let steps = |slot: usize| self.items(slot).map(|item| self.steps(item)).sum();
        (0..self.slots).map(steps).max().unwrap_or(0)
    }

    fn zone(&self, is_main: bool) -> Zone {
        match is_main {
            true => Zone {
                first_slot: 0,
                slots: self.main_slots,
                first_item: 0,
                items: self.main_items,
            },
            false => Zone {
                first_slot: self.main_slots,
                slots: self.slots - self.main_slots,
                first_item: self.main_items,
                items: self.heads * self.blocks - self.main_items,
            },
        }
    }

    /// What a slot does, in this order.
    fn items(&self, slot: usize) -> impl Iterator<Item = usize> + use<> {
        let zone = self.zone(slot < self.main_slots);
        let column = slot - zone.first_slot;
        let place = move |row: usize| match row % 2 {
            0 => column,
            _ => zone.slots - 1 - column,
        };
        let whole = zone.items / zone.slots;
        let rows = whole + usize::from(place(whole) < zone.items % zone.slots);
        (0..rows).map(move |round| {
            let row = if slot.is_multiple_of(2) {
                round
            } else {
                rows - 1 - round
            };
            zone.first_item + row * zone.slots + place(row)
        })
    }

    /// A walk over tiles of queries; an item takes one step besides.
    fn steps(&self, item: usize) -> usize {
        HopperBackward::steps_of(self.blocks, item / self.heads, self.tiles)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Heads, how many share a key head, blocks, tiles beside a block, multiprocessors.
    const SHAPES: [[usize; 5]; 7] = [
        [28, 7, 12, 2, 132],
        [28, 7, 12, 2, 114],
        [28, 7, 16, 2, 132],
        [48, 1, 8, 1, 132],
        [40, 5, 9, 2, 132],
        [25, 1, 11, 1, 78],
        [3, 3, 5, 2, 132],
    ];

    fn deal([heads, _, blocks, tiles, multiprocessors]: [usize; 5]) -> HopperDeal {
        HopperDeal::shortest(heads, blocks, tiles, multiprocessors).unwrap()
    }

    #[test]
    fn every_block_of_keys_is_dealt_out_once() {
        for shape in SHAPES {
            let deal = deal(shape);
            let mut items: Vec<_> = (0..deal.slots).flat_map(|slot| deal.items(slot)).collect();
            items.sort_unstable();
            assert_eq!(items, (0..shape[0] * shape[2]).collect::<Vec<_>>());
        }
    }

    #[test]
    fn heads_of_a_7b_model_come_out_even() {
        let deal = deal(SHAPES[0]);
        assert_eq!((deal.main_slots, deal.main_items), (112, 224));
        // Of 33.1 tiles and 2.5 items on average.
        assert_eq!(deal.longest(), 36);
    }

    /// A sequence whose turns come as the kernel has them: of a tile's sum in the order in which
    /// walks come to it, of a block of keys in the order in which heads begin with it.
    struct Turns<'a> {
        deal: &'a HopperDeal,
        group: usize,
        starts: BTreeMap<usize, usize>,
        /// Additions so far to tiles of heads, and to blocks of key heads.
        tiles: BTreeMap<(usize, usize), usize>,
        keys: BTreeMap<(usize, usize), usize>,
    }

    impl<'a> Turns<'a> {
        fn new(deal: &'a HopperDeal, group: usize) -> Self {
            let mut starts = BTreeMap::new();
            for slot in 0..deal.slots {
                let mut now = 0;
                for item in deal.items(slot) {
                    starts.insert(item, now);
                    now += deal.steps(item);
                }
            }
            Self {
                deal,
                group,
                starts,
                tiles: BTreeMap::new(),
                keys: BTreeMap::new(),
            }
        }

        /// Whether an item's next event can happen; if so, it does. After the last tile comes the
        /// sum of the keys.
        fn advance(&mut self, item: usize, step: usize) -> bool {
            let deal = self.deal;
            let (head, block) = (item % deal.heads, item / deal.heads);
            let steps = deal.steps(item) - 1;
            if step == steps {
                let first = head / self.group * self.group;
                let order = |head: usize| (self.starts[&(block * deal.heads + head)], head);
                let others = first..first + self.group;
                let rank = others.filter(|&other| order(other) < order(head)).count();
                let done = self.keys.entry((head / self.group, block)).or_default();
                let is_next = *done == rank;
                *done += usize::from(is_next);
                return is_next;
            }
            let backwards = head % 2 == 1;
            let tile = match backwards {
                true => deal.blocks * deal.tiles - 1 - step,
                false => block * deal.tiles + step,
            };
            let order = |block: usize| {
                let start = self.starts[&(block * deal.heads + head)] as i64;
                let first = if backwards { 0 } else { block * deal.tiles };
                (start - first as i64, block)
            };
            let others = 0..=tile / deal.tiles;
            let rank = others.filter(|&b| order(b) < order(block)).count();
            let done = self.tiles.entry((head, tile)).or_default();
            let is_next = *done == rank;
            *done += usize::from(is_next);
            is_next
        }
    }

    #[test]
    fn no_turn_waits_for_ever() {
        for shape in SHAPES {
            let deal = deal(shape);
            let mut turns = Turns::new(&deal, shape[1]);
            let slots = (0..deal.slots).map(|slot| deal.items(slot).collect());
            let slots: Vec<Vec<usize>> = slots.collect();
            // Item and step of each slot.
            let mut now = vec![(0, 0); deal.slots];
            let mut moved = true;
            while moved {
                moved = false;
                for (items, (index, step)) in slots.iter().zip(&mut now) {
                    while *index < items.len() && turns.advance(items[*index], *step) {
                        moved = true;
                        *step += 1;
                        if *step == deal.steps(items[*index]) {
                            (*index, *step) = (*index + 1, 0);
                        }
                    }
                }
            }
            for (items, (index, _)) in slots.iter().zip(now) {
                assert_eq!(index, items.len(), "{shape:?}");
            }
        }
    }
}
