//! `torch.einsum` of two operands: permuted and reshaped to batches of matrices, multiplied by `bmm`.

use super::super::autocast;
use super::super::tensor::Tensor;
use super::{matmul, view};

/// `einsum("left,right->out")`. Letters in both operands and the result are batches, letters in neither result nor
/// left-only are summed; every summed letter must be in both operands.
///
/// Reshaping copies an operand whose letters do not lie in that order; the copies are what `bmm` keeps. As in PyTorch a
/// letter of size 1 in both operands counts as the right one's.
pub fn einsum(
    left: &Tensor,
    left_letters: &str,
    right: &Tensor,
    right_letters: &str,
    out: &str,
) -> Tensor {
    let size = |tensor: &Tensor, letters: &str, letter: char| {
        letters.find(letter).map_or(1, |at| tensor.size(at))
    };
    let summed: Vec<char> = left_letters
        .chars()
        .filter(|letter| !out.contains(*letter))
        .collect();
    let (mut batch, mut rows, mut columns) = (Vec::new(), Vec::new(), Vec::new());
    for letter in out.chars() {
        let (a, b) = (
            size(left, left_letters, letter),
            size(right, right_letters, letter),
        );
        match (a > 1, b > 1) {
            (true, true) => batch.push(letter),
            (true, false) => rows.push(letter),
            _ => columns.push(letter),
        }
    }
    let extent = |letters: &[char]| -> u64 {
        let one = |&letter: &char| {
            size(left, left_letters, letter).max(size(right, right_letters, letter))
        };
        letters.iter().map(one).product()
    };
    let arranged = |tensor: &Tensor, letters: &str, order: &[&[char]]| {
        let places: Vec<usize> = order
            .concat()
            .iter()
            .filter_map(|letter| letters.find(*letter))
            .collect();
        // Letters of size 1 that the order leaves out stand last.
        let rest = (0..tensor.dim()).filter(|place| !places.contains(place));
        let places: Vec<usize> = places.iter().copied().chain(rest).collect();
        view::permute(tensor, &places)
    };
    let (b, r, s, c) = (
        extent(&batch),
        extent(&rows),
        extent(&summed),
        extent(&columns),
    );
    // Operands are a list, which is cast from its start; C++ destroys it so too.
    let left = autocast::lower(left);
    let right = autocast::lower(right);
    let first = view::reshape(
        arranged(&left, left_letters, &[&batch, &rows, &summed]),
        [b, r, s],
    );
    let second = view::reshape(
        arranged(&right, right_letters, &[&batch, &summed, &columns]),
        [b, s, c],
    );
    let product = matmul::bmm(&first, &second);
    drop(second);
    drop(first);
    let letters: Vec<char> = [batch, rows, columns].concat();
    let sizes: Vec<u64> = letters.iter().map(|letter| extent(&[*letter])).collect();
    let seen = view::view(&product, super::super::shape::Dims::new(&sizes));
    drop(product);
    let order: Vec<usize> = out
        .chars()
        .filter_map(|letter| letters.iter().position(|other| *other == letter))
        .collect();
    drop(left);
    drop(right);
    view::permute(seen, &order)
}
