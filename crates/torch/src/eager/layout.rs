//! Layouts: sizes and strides together, with what ops ask of them again and again.
//!
//! A program makes millions of tensors and a few dozen layouts. Tensors and nodes therefore hold a shared one: they are
//! smaller by hundreds of bytes, and what follows from a layout is worked out once.

use std::cell::RefCell;
use std::rc::Rc;

use super::op::reduce::Reduction;
use super::shape::{self, Dims};

/// How a tensor's elements lie in its storage.
pub struct Layout {
    pub sizes: Dims,
    pub strides: Dims,
    pub numel: u64,
    /// Row-major without gaps.
    pub is_contiguous: bool,
    /// Contiguous under some order of the dimensions.
    pub is_dense: bool,
    /// A new tensor "like" one of this layout has this layout.
    pub is_own_likeness: bool,
    /// Reductions of such tensors so far: a handful.
    pub reductions: RefCell<Vec<Reduction>>,
}

impl Layout {
    fn new(sizes: Dims, strides: Dims) -> Layout {
        Layout {
            numel: sizes.numel(),
            is_contiguous: shape::is_contiguous(&sizes, &strides),
            is_dense: shape::is_dense(&sizes, &strides),
            reductions: RefCell::default(),
            is_own_likeness: shape::dense_strides(&sizes, &strides) == strides,
            sizes,
            strides,
        }
    }
}

/// Slots of [`Layouts`]: enough that the layouts of a model's layer seldom share one.
const SLOTS: usize = 256;

/// The layouts made last, one in each slot. What is not found is made again, so that a collision costs only time.
pub(super) struct Layouts {
    slots: Vec<Option<Rc<Layout>>>,
}

impl Default for Layouts {
    fn default() -> Layouts {
        Layouts {
            slots: vec![None; SLOTS],
        }
    }
}

impl Layouts {
    /// The layout of these sizes and strides.
    pub fn of(&mut self, sizes: Dims, strides: Dims) -> Rc<Layout> {
        let slot = &mut self.slots[slot(&sizes, &strides)];
        match slot {
            Some(layout) if layout.sizes == sizes && layout.strides == strides => layout.clone(),
            _ => slot.insert(Rc::new(Layout::new(sizes, strides))).clone(),
        }
    }
}

/// Multiplicative hashing: the high bits of the products mix all that came before.
fn slot(sizes: &Dims, strides: &Dims) -> usize {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let hash = sizes
        .iter()
        .chain(strides.iter())
        .fold(0, |hash: u64, value| {
            (hash.rotate_left(23) ^ value).wrapping_mul(MULTIPLIER)
        });
    (hash >> (u64::BITS - SLOTS.ilog2())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More layouts than slots, twice over: each comes back as it was asked for, and one that was just made is shared.
    #[test]
    fn a_layout_is_found_or_made() {
        let mut layouts = Layouts::default();
        for _ in 0..2 {
            for size in 1..2 * SLOTS as u64 {
                let sizes = Dims::from([size, 3]);
                let turned = Dims::from([1, size]);
                let layout = layouts.of(sizes, turned);
                assert_eq!((layout.sizes, layout.strides), (sizes, turned));
                assert_eq!(layout.numel, 3 * size);
                assert_eq!(layout.is_contiguous, size == 1);
                assert!(layout.is_dense);
                assert!(Rc::ptr_eq(&layout, &layouts.of(sizes, turned)));
            }
        }
    }
}
