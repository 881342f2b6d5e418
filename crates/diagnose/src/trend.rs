//! Whether memory climbs: a slope that noise, evaluation, a warming allocator and single jumps do
//! not make.
//!
//! A series is cut into blocks of equal length, and each is represented by a low value of its own,
//! which peaks and the upper half of a sawtooth do not touch. Memory leaks where those values rise
//! by far more than their own uncertainty, nearly always from block to block, along a line rather
//! than in one or two jumps, and still do so at the end.
//!
//! What is held is bounded however long the series is: neighbours are joined, and of joined ones
//! the lowest is kept, and the highest for whoever draws the series.

/// Readings that are held; beyond, neighbours are joined.
const MOST_POINTS: usize = 1024;
/// Blocks that are compared.
const BLOCKS: usize = 12;
/// The share of the series that a warming allocator may take.
const WARM_UP: f64 = 0.2;
/// Readings below which nothing is said.
pub const FEWEST_SAMPLES: u64 = 40;
/// Of all pairs of blocks, the share that must rise minus the share that falls.
const LEAST_AGREEMENT: f64 = 0.75;
/// The rise as a multiple of a block's uncertainty. A series without a trend has a spread of about
/// one: six are beyond any of thousands of series.
const LEAST_RISE: f64 = 6.0;
/// From here on noise hides nothing, and a pause is a pause.
const CLEAR_RISE: f64 = 5.0 * LEAST_RISE;
/// Blocks that may pause in a clear rise.
const MOST_PAUSES: usize = 3;
/// A rise below this share of the memory in use is rounding, whatever its certainty.
const LEAST_SHARE: f64 = 1e-4;

/// One or several neighbouring readings.
#[derive(Clone, Copy, Debug)]
struct Point {
    at: f64,
    low: f64,
    high: f64,
    weight: f64,
}

impl Point {
    fn new(at: f64, bytes: f64) -> Self {
        Self {
            at,
            low: bytes,
            high: bytes,
            weight: 1.0,
        }
    }
}

/// Memory over time or steps.
#[derive(Clone, Debug, Default)]
pub struct Series {
    points: Vec<Point>,
    /// Readings in a whole point.
    stride: u64,
    /// Readings in the last point.
    filled: u64,
    samples: u64,
}

/// What a series does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trend {
    /// Bytes for each unit of time or each step.
    pub slope: f64,
    /// Bytes by which the line rises over the part that was looked at.
    pub rise: f64,
    /// The spread of single readings, in bytes.
    pub noise: f64,
    /// The median of the last block.
    pub level: f64,
    pub samples: u64,
    /// Whether memory climbs without end in sight.
    pub is_rising: bool,
}

impl Trend {
    /// Units until `limit` is reached, where memory climbs.
    pub fn until(&self, limit: f64) -> Option<f64> {
        let left = (limit - self.level) / self.slope;
        (self.is_rising && left.is_finite() && left >= 0.0).then_some(left)
    }
}

/// Readings after which a slope is found for certain beside noise of this spread, both in bytes;
/// a test holds the estimator to it.
pub fn samples_to_find(slope: f64, noise: f64) -> u64 {
    // The rise grows with the readings and the uncertainty of a block falls with their root.
    let ratio = (noise / slope).max(0.0);
    2 * FEWEST_SAMPLES + (30.0 * ratio.powf(2.0 / 3.0)).ceil() as u64
}

impl Series {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// A reading; `at` is a step or a time and never falls. What is not a number is left out.
    pub fn push(&mut self, at: f64, bytes: f64) {
        if !at.is_finite() || !bytes.is_finite() {
            return;
        }
        self.samples += 1;
        self.stride = self.stride.max(1);
        if self.filled > 0
            && self.filled < self.stride
            && let Some(last) = self.points.last_mut()
        {
            *last = joined(*last, Point::new(at, bytes));
            self.filled += 1;
            return;
        }
        if self.points.len() == MOST_POINTS {
            let pairs = self.points.chunks(2);
            self.points = pairs
                .map(|pair| pair[1..].iter().fold(pair[0], |all, one| joined(all, *one)))
                .collect();
            self.stride *= 2;
        }
        self.points.push(Point::new(at, bytes));
        self.filled = 1;
    }

    /// Readings in their order; of joined neighbours the highest.
    pub fn peaks(&self) -> impl Iterator<Item = (f64, f64)> {
        self.points.iter().map(|point| (point.at, point.high))
    }

    /// What the series does; nothing of one that is too short to tell.
    pub fn trend(&self) -> Option<Trend> {
        if self.samples < FEWEST_SAMPLES {
            return None;
        }
        let skipped = (self.points.len() as f64 * WARM_UP) as usize;
        let settled = &self.points[skipped..];
        let blocks: Vec<Block> = (0..BLOCKS)
            .map(|index| {
                let edge = |index: usize| index * settled.len() / BLOCKS;
                Block::of(&settled[edge(index)..edge(index + 1)])
            })
            .collect::<Option<_>>()?;
        let slope = median(pairs(&blocks).map(|(a, b)| (b.low - a.low) / (b.at - a.at)))?;
        let (first, last) = (blocks.first()?, blocks.last()?);
        let rise = slope * (last.at - first.at);
        let noise = median(blocks.iter().map(|block| block.spread))?;
        let length = settled.len() as f64 / BLOCKS as f64;
        // Of a low quantile; one reading of 4 KiB may always differ.
        let uncertainty = (1.4 * noise / length.sqrt()).max(4096.0);
        let is_rising = rise > LEAST_RISE * uncertainty
            && rise > LEAST_SHARE * last.low
            && agreement(&blocks) >= LEAST_AGREEMENT
            && follows_a_line(&blocks, slope, uncertainty)
            && (rise < CLEAR_RISE * uncertainty || rises_steadily(&blocks, rise))
            && goes_on(&blocks, rise);
        Some(Trend {
            slope,
            rise,
            noise,
            level: last.middle,
            samples: self.samples,
            is_rising,
        })
    }
}

fn joined(a: Point, b: Point) -> Point {
    let weight = a.weight + b.weight;
    Point {
        at: (a.at * a.weight + b.at * b.weight) / weight,
        low: a.low.min(b.low),
        high: a.high.max(b.high),
        weight,
    }
}

/// A part of the series in three numbers.
#[derive(Clone, Copy, Debug)]
struct Block {
    at: f64,
    /// The lower fifth: below peaks, and not the single lowest.
    low: f64,
    middle: f64,
    /// The spread of its readings around the line through them, as a standard deviation.
    spread: f64,
}

impl Block {
    fn of(points: &[Point]) -> Option<Block> {
        let at = points.iter().map(|point| point.at).sum::<f64>() / points.len() as f64;
        let mut lows: Vec<f64> = points.iter().map(|point| point.low).collect();
        lows.sort_by(f64::total_cmp);
        let low = *lows.get(lows.len() / 5)?;
        let middle = *lows.get(lows.len() / 2)?;
        // Differences of neighbours have the noise and hardly any of the slope.
        let changes = points
            .windows(2)
            .map(|pair| (pair[1].low - pair[0].low).abs());
        let spread = median(changes).unwrap_or(0.0) / (0.6745 * std::f64::consts::SQRT_2);
        Some(Block {
            at,
            low,
            middle,
            spread,
        })
    }
}

fn pairs(blocks: &[Block]) -> impl Iterator<Item = (&Block, &Block)> {
    blocks
        .iter()
        .enumerate()
        .flat_map(move |(index, a)| blocks[index + 1..].iter().map(move |b| (a, b)))
        .filter(|(a, b)| b.at > a.at)
}

/// Kendall's measure: 1 where every later block is higher, 0 where as many are lower.
fn agreement(blocks: &[Block]) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0);
    for (a, b) in pairs(blocks) {
        let change = b.low - a.low;
        sum += match change == 0.0 {
            true => 0.0,
            false => change.signum(),
        };
        count += 1.0;
    }
    sum / f64::max(count, 1.0)
}

/// Whether a line describes the blocks better than three levels do. Memory that rises once or
/// twice and stays, as when a longer batch or the first evaluation came, has levels.
fn follows_a_line(blocks: &[Block], slope: f64, uncertainty: f64) -> bool {
    let offset = median(blocks.iter().map(|block| block.low - slope * block.at)).unwrap_or(0.0);
    let off_line: f64 = blocks
        .iter()
        .map(|block| (block.low - slope * block.at - offset).powi(2))
        .sum();
    // As near as noise lets it be.
    if off_line < 3.0 * blocks.len() as f64 * uncertainty.powi(2) {
        return true;
    }
    let mut off_levels = f64::INFINITY;
    for first in 1..blocks.len() - 1 {
        for second in first + 1..blocks.len() {
            let parts = [&blocks[..first], &blocks[first..second], &blocks[second..]];
            let total: f64 = parts.iter().map(|part| off_mean(part)).sum();
            off_levels = off_levels.min(total);
        }
    }
    off_line < off_levels
}

/// Whether nearly every block is above the one before. The highest of all batches so far rises
/// ever more rarely.
fn rises_steadily(blocks: &[Block], rise: f64) -> bool {
    let usual = rise / (blocks.len() - 1) as f64;
    let steps = blocks.windows(2).map(|pair| pair[1].low - pair[0].low);
    steps.filter(|step| *step < 0.1 * usual).count() <= MOST_PAUSES
}

fn off_mean(blocks: &[Block]) -> f64 {
    let mean = blocks.iter().map(|block| block.low).sum::<f64>() / blocks.len() as f64;
    blocks.iter().map(|block| (block.low - mean).powi(2)).sum()
}

/// Whether the last third rises too: what warms up comes to rest.
fn goes_on(blocks: &[Block], rise: f64) -> bool {
    let third = blocks.len() / 3;
    let level =
        |part: &[Block]| part.iter().map(|block| block.low).sum::<f64>() / part.len() as f64;
    let begins = level(&blocks[blocks.len() - 2 * third..][..third]);
    let ends = level(&blocks[blocks.len() - third..]);
    // A line rises from one third to the next by the third of its whole, and a little more.
    ends - begins > 0.5 * rise / 3.0
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: f64 = 1024.0 * 1024.0;

    /// The same numbers in every run.
    struct Noise(u64);

    impl Noise {
        fn uniform(&mut self) -> f64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let mixed = (self.0 ^ (self.0 >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
            (mixed >> 11) as f64 / (1_u64 << 53) as f64
        }

        fn normal(&mut self) -> f64 {
            (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
        }
    }

    fn series(length: u64, mut value: impl FnMut(f64) -> f64) -> Series {
        let mut series = Series::new();
        for step in 0..length {
            series.push(step as f64, value(step as f64) * MIB);
        }
        series
    }

    fn rises(series: &Series) -> bool {
        series.trend().is_some_and(|trend| trend.is_rising)
    }

    #[test]
    fn leaks_are_found_within_the_stated_number_of_steps() {
        let mut count = 0;
        for slope in [0.1, 0.3, 1.0, 3.0, 10.0, 50.0] {
            for noise in [0.0, 2.0, 20.0, 100.0] {
                for seed in 0..10 {
                    let mut random = Noise(seed + 1);
                    let steps = samples_to_find(slope, noise);
                    // With a warming allocator and an evaluation every fifty steps.
                    let leak = series(steps, |step| {
                        let warming = -600.0 * (-step / 3.0).exp();
                        let evaluation = f64::from(u8::from(step % 50.0 > 47.0)) * 2000.0;
                        9000.0 + warming + evaluation + slope * step + noise * random.normal()
                    });
                    let trend = leak.trend().expect("it is long enough");
                    assert!(trend.is_rising, "{slope} beside {noise}: {trend:?}");
                    let found = trend.slope / MIB;
                    assert!((found / slope - 1.0).abs() < 0.5, "{slope}: {found}");
                    count += 1;
                }
            }
        }
        assert_eq!(count, 240);
    }

    #[test]
    fn a_thousand_clean_series_raise_no_alarm_at_any_length() {
        let mut count = 0;
        for seed in 0..200 {
            let mut random = Noise(1000 + seed);
            let noise = 40.0 * random.uniform();
            let period = (5.0 + 25.0 * random.uniform()).round();
            let height = 3000.0 * random.uniform();
            let warming = 3.0 + 7.0 * random.uniform();
            let jumps = [400.0 * random.uniform(), 400.0 * random.uniform()];
            let lengths: Vec<f64> = (0..800).map(|_| random.uniform()).collect();
            let mut draw = Noise(seed + 7);
            let mut most = 0.0_f64;
            let kinds: [Box<dyn FnMut(f64) -> f64>; 5] = [
                Box::new(|_| 8000.0 + noise * draw.normal()),
                // A sawtooth: memory climbs until an evaluation lets it go.
                Box::new(|step| 8000.0 + height * (step % period) / period),
                Box::new(|step| 8000.0 - 2000.0 * (-step / warming).exp()),
                Box::new(|step| {
                    let first = f64::from(u8::from(step > jumps[0]));
                    let second = f64::from(u8::from(step > jumps[1]));
                    8000.0 + 700.0 * first + 500.0 * second
                }),
                // The highest so far of batches of many lengths.
                Box::new(|step| {
                    most = most.max(lengths[step as usize]);
                    8000.0 + 2000.0 * most
                }),
            ];
            for (kind, mut value) in kinds.into_iter().enumerate() {
                let mut series = Series::new();
                for step in 0..800 {
                    series.push(f64::from(step), value(f64::from(step)) * MIB);
                    if step % 40 == 39 {
                        assert!(!rises(&series), "kind {kind}, seed {seed}, step {step}");
                    }
                }
                count += 1;
            }
        }
        assert_eq!(count, 1000);
    }

    #[test]
    fn a_long_series_is_held_in_bounded_memory_and_still_read() {
        let mut random = Noise(3);
        let leak = series(200_000, |step| {
            5000.0 + 0.02 * step + 30.0 * random.normal()
        });
        assert!(leak.points.len() <= MOST_POINTS);
        let trend = leak.trend().expect("it is long enough");
        assert!(trend.is_rising);
        assert!((trend.slope / MIB - 0.02).abs() < 0.002, "{trend:?}");
        let left = trend.until(20_000.0 * MIB).expect("it climbs");
        assert!((left - 550_000.0).abs() < 60_000.0, "{left}");
        let flat = series(200_000, |_| 5000.0 + 30.0 * random.normal());
        assert!(!rises(&flat));
    }

    #[test]
    fn what_is_no_series_is_no_trend() {
        assert_eq!(series(FEWEST_SAMPLES - 1, |step| step).trend(), None);
        let mut odd = Series::new();
        for _ in 0..200 {
            odd.push(f64::NAN, 1.0);
            odd.push(5.0, f64::INFINITY);
        }
        assert_eq!(odd.trend(), None);
        // One moment only: there is no slope.
        let mut still = Series::new();
        (0..200).for_each(|count| still.push(5.0, f64::from(count)));
        assert!(!rises(&still));
    }
}
