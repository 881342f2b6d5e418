//! Which kernel `scaled_dot_product_attention` runs: the first that serves, in PyTorch's order.

use super::super::super::dtype::DType;
use super::super::super::tensor::Tensor;
use crate::chip::Chip;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backend {
    Cudnn,
    Flash,
    Efficient,
    Math,
}

/// What decides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    chip: Chip,
    dtype: DType,
    width: u64,
    shares_keys: bool,
    mask: Mask,
    is_recorded: bool,
    has_dropout: bool,
}

/// Numbers that are added to the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mask {
    Absent,
    Plain,
    /// It has a gradient, which only the memory-efficient kernel makes.
    Trained,
    /// Its last dimension does not lie in one piece, and no kernel reads it.
    Scattered,
}

impl Asked {
    pub(super) fn of(
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        bias: Option<&Tensor>,
        dropout: f64,
    ) -> Asked {
        let context = query.context();
        let requires_grad = [query, key, value].iter().any(|one| one.requires_grad());
        Asked {
            chip: context.chip(),
            dtype: query.dtype(),
            width: query.size(3),
            shares_keys: key.size(1) != query.size(1),
            mask: match bias {
                None => Mask::Absent,
                Some(bias) if bias.strides().last() != 1 => Mask::Scattered,
                Some(bias) if bias.requires_grad() => Mask::Trained,
                Some(_) => Mask::Plain,
            },
            is_recorded: context.is_grad_enabled() && requires_grad,
            has_dropout: dropout > 0.0,
        }
    }

    pub(super) fn backend(self) -> Backend {
        if self.mask == Mask::Scattered {
            return Backend::Math;
        }
        if self.chip.prefers_cudnn() && self.serves_cudnn() {
            return Backend::Cudnn;
        }
        if self.serves_flash() {
            return Backend::Flash;
        }
        match self.serves_efficient() {
            true => Backend::Efficient,
            false => Backend::Math,
        }
    }

    /// Whether the card has kernels for the half type.
    fn is_native_half(self) -> bool {
        match self.dtype {
            DType::Float16 => true,
            DType::BFloat16 => self.chip.has_bf16(),
            _ => false,
        }
    }

    fn serves_cudnn(self) -> bool {
        const VECTOR: u64 = 8;
        self.is_native_half()
            && self.width.is_multiple_of(VECTOR)
            && self.width <= self.chip.widest_in_cudnn()
            && self.mask != Mask::Trained
    }

    fn serves_flash(self) -> bool {
        const WIDEST: u64 = 256;
        self.chip.has_flash_attention()
            && self.is_native_half()
            && self.mask == Mask::Absent
            && self.width <= WIDEST
            && self.has_flash_backward()
    }

    /// Where a backward will follow it must have shared memory enough.
    fn has_flash_backward(self) -> bool {
        const NARROW: u64 = 192;
        const WIDE: u64 = 224;
        !self.is_recorded
            || !self.chip.narrows_flash_backward()
            || self.width <= NARROW
            || (self.width > WIDE && !self.has_dropout)
    }

    fn serves_efficient(self) -> bool {
        let serves_type = self.dtype == DType::Float32 || self.is_native_half();
        serves_type && !self.shares_keys && self.width.is_multiple_of(self.vector())
    }

    /// Numbers of a head that the memory-efficient kernels read at a time: 16 bytes for tensor cores.
    fn vector(self) -> u64 {
        match (self.dtype.is_half(), self.chip.has_bf16()) {
            (true, _) => 8,
            (false, true) => 4,
            (false, false) => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Those of `fixtures/attention_kernels.py`.
    const WIDTHS: [u64; 12] = [32, 36, 64, 80, 96, 100, 128, 160, 192, 224, 256, 288];

    /// What PyTorch 2.11 itself answers on nine cards.
    #[test]
    fn kernels_are_those_that_pytorch_chooses() {
        let text = include_str!("../../../../tests/fixtures/attention_kernels.txt");
        for line in text.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let card = cinch_device::find(&fields[0].replace('_', " ")).unwrap();
            let flag = |index: usize| fields[index] == "1";
            let asked = Asked {
                chip: Chip::of(&card.card()).unwrap(),
                dtype: match fields[1] {
                    "float32" => DType::Float32,
                    "float16" => DType::Float16,
                    _ => DType::BFloat16,
                },
                width: 0,
                shares_keys: flag(5),
                mask: match flag(4) {
                    true => Mask::Plain,
                    false => Mask::Absent,
                },
                is_recorded: flag(2),
                has_dropout: flag(3),
            };
            let letter = |width: u64| match (Asked { width, ..asked }).backend() {
                Backend::Cudnn => 'c',
                Backend::Flash => 'f',
                Backend::Efficient => 'e',
                Backend::Math => 'm',
            };
            let letters: String = WIDTHS.into_iter().map(letter).collect();
            assert_eq!(letters, fields[6], "{line}");
        }
    }
}
