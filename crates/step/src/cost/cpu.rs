//! How long a CPU takes for a node: matrix products by the rate of large ones and what is brought
//! into order for them, vector code by the rate of sigmoids, or bytes, whichever takes longer.
//!
//! Both rates are measured where a step is predicted: how they relate differs between processors,
//! from 40 operations of a product in the time of a sigmoid to half as many.

use cinch_device::Card;
use cinch_graph::{CpuCost, CpuProducts, CpuTiles};

pub(super) struct Rates {
    threads: usize,
    matrix: f64,
    /// The same of operations as [`operations`] counts them.
    multiplied: f64,
    sigmoids: f64,
    bandwidth: f64,
    /// Of what the last cache may still hold.
    cache_bandwidth: f64,
}

/// What a product takes besides: for each element that is brought into order, and for each of the
/// result that is written once for a part of its sum, in operations of the product.
const PACKED: f64 = 49.0;
const WRITTEN: f64 = 54.0;
/// Of the rest, which the measured rate has with both of these.
const MULTIPLIED: f64 = 0.87;
/// Sides of the tiles that registers hold.
const UNIT: [usize; 2] = [12, 32];

/// To the start of a node.
const NODE: f64 = 1.2e-6;
/// From the start of several tasks to the time at which all threads are at them, and back.
const WAKE: f64 = 9.4e-6;

impl Rates {
    pub fn new(card: &Card, matrix: f64) -> Self {
        let threads = card.multiprocessors.max(1);
        let side = Card::CPU_PRODUCT;
        let yardstick = operations(threads, [side; 3]);
        Self {
            threads,
            matrix,
            multiplied: matrix * yardstick / (2.0 * (side as f64).powi(3)),
            sigmoids: card.sigmoids.unwrap_or(f64::INFINITY),
            bandwidth: card.bandwidth,
            cache_bandwidth: card.cache_bandwidth.unwrap_or(card.bandwidth),
        }
    }

    pub fn node(&self, cost: &CpuCost) -> f64 {
        let products: f64 = cost.products.iter().map(|one| self.products(one)).sum();
        let work = cost.operations / self.matrix + cost.sigmoids / self.sigmoids;
        let dealt = match cost.tasks {
            0 => work,
            tasks => work * self.uneven(tasks),
        };
        let wake = if cost.tasks > 1 { WAKE } else { 0.0 };
        let computed = products + dealt + wake;
        let bandwidth = match cost.bytes <= Card::CACHED_BYTES {
            true => self.cache_bandwidth,
            false => self.bandwidth,
        };
        NODE + computed.max(cost.bytes as f64 / bandwidth)
    }

    fn products(&self, products: &CpuProducts) -> f64 {
        let wake = match work(products.shape) < CpuTiles::SERIAL_WORK {
            true => 0.0,
            false => WAKE,
        };
        products.times * (operations(self.threads, products.shape) / self.multiplied + wake)
    }

    fn uneven(&self, tasks: usize) -> f64 {
        uneven(self.threads, tasks)
    }
}

/// Multiply-adds of a product.
fn work([m, n, k]: [usize; 3]) -> usize {
    m.saturating_mul(n).saturating_mul(k.max(1))
}

/// Operations of a product, with what takes as long as they do.
fn operations(threads: usize, shape: [usize; 3]) -> f64 {
    let [m, n, k] = shape;
    if m == 0 || n == 0 {
        return 0.0;
    }
    let (down, across, tasks) = if work(shape) < CpuTiles::SERIAL_WORK {
        let down = m.div_ceil(CpuTiles::MOST_ROWS);
        (down, n.div_ceil(CpuTiles::MOST_COLUMNS), 1)
    } else {
        let tiles = CpuTiles::new([m, n], threads, UNIT);
        (tiles.down, tiles.across, tiles.count())
    };
    let [m, n, k] = [m, n, k].map(|side| side as f64);
    let parts = (k / CpuTiles::DEPTH as f64).ceil().max(1.0);
    let packed = k * (m * across as f64 + n * down as f64);
    let all = MULTIPLIED * 2.0 * m * n * k + PACKED * packed + WRITTEN * m * n * parts;
    uneven(threads, tasks) * all
}

/// How much longer tasks take than if all threads were at work to the end.
fn uneven(threads: usize, tasks: usize) -> f64 {
    let rounds = tasks.div_ceil(threads) as f64;
    rounds * threads as f64 / tasks as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(threads: usize) -> Rates {
        let share = threads as f64 / 2.0;
        let card = Card::cpu(threads, 490e9 * share, 12.2e9 * share, 110e9);
        Rates::new(&card, card.single_flops)
    }

    fn share(threads: usize, [m, n, k]: [usize; 3]) -> f64 {
        let rates = rates(threads);
        let flops = 2.0 * m as f64 * n as f64 * k as f64;
        flops / rates.matrix / rates.node(&CpuCost::product([m, n, k], 0))
    }

    /// The product that the rate is measured by reaches it; measured beside it were the others.
    #[test]
    fn products_reach_the_share_of_the_rate_that_was_measured() {
        for (shape, measured) in [
            ([1024, 1024, 1024], 1.0),
            ([1536, 1536, 1536], 1.0),
            ([1024, 1536, 384], 0.95),
            ([1024, 384, 384], 0.86),
            ([256, 512, 1536], 0.76),
        ] {
            let predicted = share(2, shape);
            let error = (predicted / measured - 1.0).abs();
            assert!(error < 0.1, "{shape:?}: {predicted} {measured}");
        }
        // What adapters add, and what one thread does by itself.
        assert!(share(2, [256, 4864, 16]) < 0.5);
        assert!(share(2, [64, 64, 64]) < 0.25);
    }

    #[test]
    fn a_task_more_than_there_are_threads_is_a_round_more() {
        let rates = rates(4);
        let time = |tasks: usize| {
            let cost = CpuCost {
                sigmoids: 1e6 * tasks as f64,
                tasks,
                ..CpuCost::default()
            };
            rates.node(&cost)
        };
        assert!(time(5) > 1.8 * time(4));
        assert!(time(8) < 1.01 * time(5));
        // One thread of four has all of it.
        assert!((time(1) / time(4) - 1.0).abs() < 0.1);
    }

    #[test]
    fn bytes_count_where_they_take_longer() {
        let rates = rates(2);
        let copied = CpuCost::vector(1.0, 1, 11_000_000_000);
        assert!((rates.node(&copied) - 0.1).abs() < 1e-4);
        let computed = CpuCost::vector(12.2e9, 1 << 24, 1);
        assert!((rates.node(&computed) - 1.0).abs() < 1e-4);
    }
}
