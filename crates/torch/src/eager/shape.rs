//! Sizes and strides of tensors: enough of PyTorch's layout rules to tell a view from a copy.

use smallvec::SmallVec;

/// The most dimensions a tensor here can have.
pub const MAX_DIMS: usize = 6;

/// The sizes, or the strides, of a tensor. Inline, because every op makes some.
#[derive(Clone, Copy, Eq)]
pub struct Dims {
    len: u8,
    /// Zero beyond the end.
    values: [u64; MAX_DIMS],
}

impl PartialEq for Dims {
    /// All values at once: every op compares sizes, and a loop that may end early costs more than it saves.
    fn eq(&self, other: &Dims) -> bool {
        let pairs = self.values.iter().zip(&other.values);
        let difference = pairs.fold(0, |difference, (a, b)| difference | (a ^ b));
        difference == 0 && self.len == other.len
    }
}

impl Dims {
    /// Panics above [`MAX_DIMS`]: the models' code decides it, never a user's input.
    pub fn new(values: &[u64]) -> Dims {
        assert!(
            values.len() <= MAX_DIMS,
            "a tensor of more than {MAX_DIMS} dimensions"
        );
        let mut dims = Dims {
            len: values.len() as u8,
            values: [0; MAX_DIMS],
        };
        dims.values[..values.len()].copy_from_slice(values);
        dims
    }

    pub fn as_slice(&self) -> &[u64] {
        &self.values[..self.len as usize]
    }

    pub fn as_mut_slice(&mut self) -> &mut [u64] {
        &mut self.values[..self.len as usize]
    }

    pub fn push(&mut self, value: u64) {
        assert!(
            (self.len as usize) < MAX_DIMS,
            "a tensor of more than {MAX_DIMS} dimensions"
        );
        self.values[self.len as usize] = value;
        self.len += 1;
    }

    pub fn insert(&mut self, at: usize, value: u64) {
        self.push(value);
        for i in (at + 1..self.len as usize).rev() {
            self.values[i] = self.values[i - 1];
        }
        self.values[at] = value;
    }

    pub fn remove(&mut self, at: usize) {
        self.len -= 1;
        for i in at..self.len as usize {
            self.values[i] = self.values[i + 1];
        }
        self.values[self.len as usize] = 0;
    }

    pub fn numel(&self) -> u64 {
        self.as_slice().iter().product()
    }

    pub fn last(&self) -> u64 {
        self.as_slice().last().copied().unwrap_or(1)
    }

    /// Strides of a dense row-major tensor of these sizes.
    pub fn contiguous_strides(&self) -> Dims {
        let mut strides = *self;
        let mut step = 1;
        for i in (0..self.len as usize).rev() {
            strides.values[i] = step;
            step *= self.values[i].max(1);
        }
        strides
    }
}

impl std::ops::Deref for Dims {
    type Target = [u64];
    fn deref(&self) -> &[u64] {
        self.as_slice()
    }
}

impl std::fmt::Debug for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_slice().fmt(f)
    }
}

impl<const N: usize> From<[u64; N]> for Dims {
    fn from(values: [u64; N]) -> Dims {
        Dims::new(&values)
    }
}

/// Whether elements lie row-major without gaps; dimensions of size 1 may have any stride.
pub fn is_contiguous(sizes: &[u64], strides: &[u64]) -> bool {
    let mut step = 1;
    for (&size, &stride) in sizes.iter().zip(strides).rev() {
        if size == 0 {
            return true;
        }
        if size != 1 {
            if stride != step {
                return false;
            }
            step *= size;
        }
    }
    true
}

/// Whether some permutation of the dimensions is contiguous: what in-place accumulation needs.
pub fn is_dense(sizes: &[u64], strides: &[u64]) -> bool {
    let mut pairs: SmallVec<[(u64, u64); MAX_DIMS]> = sizes
        .iter()
        .zip(strides)
        .filter(|(size, _)| **size != 1)
        .map(|(&size, &stride)| (stride, size))
        .collect();
    pairs.sort_unstable();
    let mut step = 1;
    for (stride, size) in pairs {
        if stride != step {
            return false;
        }
        step *= size;
    }
    true
}

/// Strides of a dense tensor in the element order of another, which may have gaps or be broadcast: what a new
/// tensor "like" it gets. Dimensions are ordered by stride, and left as they are where a stride is zero.
pub fn dense_strides(sizes: &[u64], strides: &[u64]) -> Dims {
    let mut order: SmallVec<[usize; MAX_DIMS]> = (0..sizes.len()).rev().collect();
    for i in 1..order.len() {
        let mut at = i;
        for before in (0..i).rev() {
            let (a, b) = (order[before], order[at]);
            if strides[a] == 0 || strides[b] == 0 {
                continue;
            }
            let swaps =
                strides[a] > strides[b] || (strides[a] == strides[b] && sizes[a] > sizes[b]);
            if swaps {
                order.swap(before, at);
                at = before;
            } else if strides[a] < strides[b] {
                break;
            }
        }
    }
    let mut result = Dims::new(sizes);
    let mut step = 1;
    for dim in order {
        result.as_mut_slice()[dim] = step;
        step *= sizes[dim].max(1);
    }
    result
}

/// Strides of the view of a tensor under new sizes, or none where it must be copied.
///
/// The old dimensions are read from the last to the first in runs that are contiguous among
/// themselves; the new dimensions must fill each run exactly.
pub fn view_strides(sizes: &[u64], strides: &[u64], new: &[u64]) -> Option<Dims> {
    let numel: u64 = sizes.iter().product();
    if numel == 0 || sizes.is_empty() {
        return Some(Dims::new(new).contiguous_strides());
    }
    let mut result = Dims::new(new);
    let mut at = new.len() as isize - 1;
    let mut base = *strides.last()?;
    let (mut run, mut filled) = (1u64, 1u64);
    for i in (0..sizes.len()).rev() {
        run *= sizes[i];
        let ends = i == 0 || (sizes[i - 1] != 1 && strides[i - 1] != run * base);
        if ends {
            while at >= 0 && (filled < run || new[at as usize] == 1) {
                result.as_mut_slice()[at as usize] = filled * base;
                filled *= new[at as usize];
                at -= 1;
            }
            if filled != run {
                return None;
            }
            if i > 0 {
                base = strides[i - 1];
                run = 1;
                filled = 1;
            }
        }
    }
    (at == -1).then_some(result)
}

/// Sizes of the result of a broadcast.
pub fn broadcast(a: &[u64], b: &[u64]) -> Dims {
    let (long, short) = if a.len() >= b.len() { (a, b) } else { (b, a) };
    let mut out = Dims::new(long);
    let offset = long.len() - short.len();
    for (i, &size) in short.iter().enumerate() {
        let slot = &mut out.as_mut_slice()[offset + i];
        if *slot == 1 {
            *slot = size;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_exists_where_pytorch_finds_one() {
        // [4, 512, 768] row-major as [2048, 768].
        assert_eq!(
            view_strides(&[4, 512, 768], &[393216, 768, 1], &[2048, 768])
                .unwrap()
                .as_slice(),
            [768, 1]
        );
        // A transposed pair of dimensions cannot be merged ...
        assert!(view_strides(&[4, 12, 512, 64], &[393216, 64, 768, 1], &[48, 512, 64]).is_none());
        // ... but a dimension can be split.
        assert_eq!(
            view_strides(&[4, 512, 768], &[1179648, 2304, 1], &[4, 512, 12, 64])
                .unwrap()
                .as_slice(),
            [1179648, 2304, 64, 1]
        );
        // A broadcast dimension stays one.
        assert_eq!(
            view_strides(&[1, 8], &[0, 1], &[8]).unwrap().as_slice(),
            [1]
        );
    }

    #[test]
    fn a_tensor_like_another_keeps_the_order_of_elements() {
        // Heads of a fused projection, [batch, heads, length, width] over rows of 2304.
        assert_eq!(
            dense_strides(&[4, 12, 512, 64], &[1179648, 64, 2304, 1]).as_slice(),
            [393216, 64, 768, 1]
        );
        assert_eq!(dense_strides(&[2, 3], &[0, 1]).as_slice(), [3, 1]);
    }

    #[test]
    fn dense_means_some_order_is_contiguous() {
        assert!(is_dense(&[768, 50257], &[1, 768]));
        assert!(!is_contiguous(&[768, 50257], &[1, 768]));
        assert!(!is_dense(&[4, 8], &[0, 1]));
    }
}
