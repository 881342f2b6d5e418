//! A series of bounded length: when it is full, neighbours are joined into one, with the larger
//! value, so that peaks stay and old times become coarse.

use std::collections::VecDeque;

/// Values over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    points: VecDeque<(f64, u64)>,
    capacity: usize,
    /// How many samples a point stands for.
    stride: u32,
    /// Samples that the last point stands for so far.
    filled: u32,
}

impl Series {
    pub fn new(capacity: usize) -> Self {
        Self {
            points: VecDeque::new(),
            capacity: capacity.max(2),
            stride: 1,
            filled: 0,
        }
    }

    pub fn push(&mut self, seconds: f64, value: u64) {
        if self.filled > 0
            && self.filled < self.stride
            && let Some(last) = self.points.back_mut()
        {
            *last = (seconds, last.1.max(value));
            self.filled += 1;
            return;
        }
        if self.points.len() >= self.capacity {
            let points = std::mem::take(&mut self.points);
            let mut points = points.into_iter();
            while let Some(first) = points.next() {
                let joined = points
                    .next()
                    .map_or(first, |second| (second.0, first.1.max(second.1)));
                self.points.push_back(joined);
            }
            self.stride = self.stride.saturating_mul(2);
        }
        self.points.push_back((seconds, value));
        self.filled = 1;
    }

    pub fn points(&self) -> impl DoubleEndedIterator<Item = (f64, u64)> + ExactSizeIterator + '_ {
        self.points.iter().copied()
    }

    pub fn len(&self) -> usize {
        self.points.len()
    }

    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    pub fn last(&self) -> Option<u64> {
        self.points.back().map(|point| point.1)
    }

    /// The points of the last so many seconds, and at least `fewest` where old times are coarse.
    pub fn recent(&self, seconds: f64, fewest: usize) -> Vec<(f64, u64)> {
        let Some(&(end, _)) = self.points.back() else {
            return Vec::new();
        };
        let newest = self.points.iter().rev().enumerate();
        let inside =
            newest.take_while(|(index, point)| *index < fewest || end - point.0 <= seconds);
        let mut points: Vec<_> = inside.map(|(_, point)| *point).collect();
        points.reverse();
        points
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_is_bounded_and_peaks_stay() {
        let mut series = Series::new(64);
        for second in 0..10_000_u64 {
            let value = if second == 1234 { 999 } else { second % 7 };
            series.push(second as f64, value);
        }
        assert!(series.len() <= 64);
        assert_eq!(series.points().map(|point| point.1).max(), Some(999));
        let times: Vec<f64> = series.points().map(|point| point.0).collect();
        assert!(times.is_sorted());
        assert_eq!(times.last(), Some(&9999.0));
    }

    #[test]
    fn recent_points_are_those_of_the_last_seconds() {
        let mut series = Series::new(100);
        for second in 0..50 {
            series.push(f64::from(second), u64::from(second as u32));
        }
        let recent = series.recent(10.0, 5);
        assert_eq!(recent.first(), Some(&(39.0, 39)));
        assert_eq!(recent.len(), 11);
        assert_eq!(series.recent(10.0, 20).len(), 20);
    }
}
