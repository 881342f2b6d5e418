//! What ranks exchange.
//!
//! An exchange is a list of messages that every rank knows, from one rank to another each, and
//! every rank goes through the list in its order, skipping those that are not its own. So no two
//! ranks ever wait for each other, however little a connection holds: of the first message that
//! has not been delivered, both ends are there.
//!
//! Sums are added by their owner in the order of ranks, whoever comes first: `((x₀ + x₁) + x₂) + …`.
//! Values are cut into one part for each rank, which owns it, and parts into pieces of a fixed
//! size, for which alone there are buffers. All parts are as long, but the last ones, where nothing
//! is left.

use std::ops::Range;
use std::time::Instant;

use crate::error::RanksError;
use crate::link::{HEADER_BYTES, LinkError};
use crate::meeting::Topology;
use crate::number::{Element, Number, add, decode, encode};
use crate::world::World;

/// Bytes of a message: enough that its price does not count, few enough to stay in the cache.
const PIECE_BYTES: usize = 256 << 10;

/// What exchanges take on a rank, whatever their size: a piece that travels and one that is
/// summed.
pub const BUFFER_BYTES: usize = 2 * (HEADER_BYTES + PIECE_BYTES);

/// Room for the pieces under way, made once.
pub(crate) struct Buffers {
    /// With room for the header before the bytes.
    moving: Box<[u8]>,
    sum: Box<[u8]>,
}

impl Buffers {
    pub fn new() -> Self {
        let buffer = || vec![0; HEADER_BYTES + PIECE_BYTES].into_boxed_slice();
        Self {
            moving: buffer(),
            sum: buffer(),
        }
    }
}

/// A range in pieces of at most so many elements.
fn pieces<T: Element>(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let most = PIECE_BYTES / T::BYTES;
    let Range { start, end } = range;
    (start..end)
        .step_by(most)
        .map(move |first| first..(first + most).min(end))
}

impl World {
    fn begin(&mut self) -> u64 {
        self.exchanges += 1;
        self.exchanges
    }

    fn failed(&self, other: usize, error: LinkError) -> RanksError {
        match error {
            LinkError::Closed => RanksError::Lost(self.watch.verdict(other)),
            LinkError::OutOfStep(problem) => RanksError::OutOfStep {
                rank: self.rank(),
                other,
                problem,
            },
        }
    }

    /// Sends the first `bytes` of the piece under way.
    fn send(&mut self, exchange: u64, to: usize, bytes: usize) -> Result<(), RanksError> {
        let begun = Instant::now();
        let message = &mut self.buffers.moving[..HEADER_BYTES + bytes];
        let sent = match &mut self.links[to] {
            Some(link) => link.send(exchange, message),
            None => Err(LinkError::OutOfStep("they are not connected".to_owned())),
        };
        self.waited += begun.elapsed();
        sent.map_err(|error| self.failed(to, error))
    }

    /// Receives a piece of so many bytes.
    fn receive(&mut self, exchange: u64, from: usize, bytes: usize) -> Result<(), RanksError> {
        let begun = Instant::now();
        self.watch.waits_for((!self.is_patient).then_some(from));
        let message = &mut self.buffers.moving[HEADER_BYTES..HEADER_BYTES + bytes];
        let received = match &mut self.links[from] {
            Some(link) => link.receive(exchange, message),
            None => Err(LinkError::OutOfStep("they are not connected".to_owned())),
        };
        self.watch.waits_for(None);
        self.waited += begun.elapsed();
        received.map_err(|error| self.failed(from, error))
    }

    /// Sends values to a rank.
    fn send_values<T: Element>(
        &mut self,
        exchange: u64,
        to: usize,
        values: &[T],
    ) -> Result<(), RanksError> {
        let bytes = encode(values, &mut self.buffers.moving[HEADER_BYTES..]).len();
        self.send(exchange, to, bytes)
    }

    /// One piece of a sum, to its owner, whose buffer then holds it.
    fn reduce_piece<T: Number>(
        &mut self,
        exchange: u64,
        owner: usize,
        values: &[T],
    ) -> Result<(), RanksError> {
        if owner != self.rank() {
            return self.send_values(exchange, owner, values);
        }
        let bytes = values.len() * T::BYTES;
        for from in 0..self.num_ranks() {
            if from == owner {
                encode(values, &mut self.buffers.moving[HEADER_BYTES..]);
            } else {
                self.receive(exchange, from, bytes)?;
            }
            let Buffers { moving, sum } = &mut self.buffers;
            let moving = &moving[HEADER_BYTES..HEADER_BYTES + bytes];
            match from {
                0 => sum[..bytes].copy_from_slice(moving),
                _ => add::<T>(&mut sum[..bytes], moving),
            }
        }
        Ok(())
    }

    /// The sum that [`Self::reduce_piece`] left with its owner.
    fn take_sum<T: Element>(&self, owner: usize, values: &mut [T]) {
        if owner == self.rank() {
            decode(&self.buffers.sum, values);
        }
    }

    /// One piece from its owner to all others.
    fn gather_piece<T: Element>(
        &mut self,
        exchange: u64,
        owner: usize,
        values: &mut [T],
    ) -> Result<(), RanksError> {
        if owner != self.rank() {
            self.receive(exchange, owner, values.len() * T::BYTES)?;
            decode(&self.buffers.moving[HEADER_BYTES..], values);
            return Ok(());
        }
        for to in (0..self.num_ranks()).filter(|&to| to != owner) {
            self.send_values(exchange, to, values)?;
        }
        Ok(())
    }

    /// Every rank has the sums of all ranks' values.
    pub fn all_reduce<T: Number>(&mut self, values: &mut [T]) -> Result<(), RanksError> {
        let (len, exchange) = (values.len(), self.begin());
        let part = len.div_ceil(self.num_ranks());
        for owner in 0..self.num_ranks() {
            for piece in pieces::<T>(self.owned(len, part, owner)) {
                self.reduce_piece(exchange, owner, &values[piece.clone()])?;
                self.take_sum(owner, &mut values[piece]);
            }
        }
        self.gather(values, part)
    }

    /// The sums of all ranks' values, of which this rank gets the part that it owns, in parts of
    /// `part` values: written to `own`, or added to it. What `own` has beyond that is not touched.
    pub fn reduce_scatter<T: Number>(
        &mut self,
        values: &[T],
        part: usize,
        own: &mut [T],
        adds: bool,
    ) -> Result<(), RanksError> {
        self.require_mesh()?;
        let exchange = self.begin();
        for owner in 0..self.num_ranks() {
            let range = self.owned(values.len(), part, owner);
            let first = range.start;
            for piece in pieces::<T>(range) {
                self.reduce_piece(exchange, owner, &values[piece.clone()])?;
                if owner == self.rank() {
                    let own = &mut own[piece.start - first..piece.end - first];
                    take(&self.buffers.sum, own, adds);
                }
            }
        }
        Ok(())
    }

    /// Every rank has the parts of all, of `part` values each: `own` is this rank's.
    pub fn all_gather<T: Element>(
        &mut self,
        own: &[T],
        part: usize,
        values: &mut [T],
    ) -> Result<(), RanksError> {
        self.require_mesh()?;
        let range = self.owned(values.len(), part, self.rank());
        let own = &own[..range.len()];
        values[range].copy_from_slice(own);
        self.gather(values, part)
    }

    /// Every rank has every part as its owner has it.
    fn gather<T: Element>(&mut self, values: &mut [T], part: usize) -> Result<(), RanksError> {
        let exchange = self.begin();
        for owner in 0..self.num_ranks() {
            for piece in pieces::<T>(self.owned(values.len(), part, owner)) {
                self.gather_piece(exchange, owner, &mut values[piece])?;
            }
        }
        Ok(())
    }

    /// Every rank has rank 0's values.
    pub fn broadcast<T: Element>(&mut self, values: &mut [T]) -> Result<(), RanksError> {
        let exchange = self.begin();
        for piece in pieces::<T>(0..values.len()) {
            self.gather_piece(exchange, 0, &mut values[piece])?;
        }
        Ok(())
    }

    /// The values that a rank owns. In a star, rank 0 owns all of them.
    fn owned(&self, len: usize, part: usize, rank: usize) -> Range<usize> {
        let begin = |rank: usize| part.saturating_mul(rank).min(len);
        match (self.topology(), rank) {
            (Topology::Mesh, _) => begin(rank)..begin(rank + 1),
            (Topology::Star, 0) => 0..len,
            (Topology::Star, _) => 0..0,
        }
    }

    /// Parts go between all ranks.
    fn require_mesh(&self) -> Result<(), RanksError> {
        match self.topology() {
            Topology::Mesh => Ok(()),
            Topology::Star => Err(RanksError::NoMesh),
        }
    }

    /// The sums of a few numbers, by way of rank 0, which is connected with all in any topology.
    pub fn sum(&mut self, values: &mut [f64]) -> Result<(), RanksError> {
        let exchange = self.begin();
        for piece in pieces::<f64>(0..values.len()) {
            self.reduce_piece(exchange, 0, &values[piece.clone()])?;
            self.take_sum(0, &mut values[piece.clone()]);
            self.gather_piece(exchange, 0, &mut values[piece])?;
        }
        Ok(())
    }

    /// Nobody goes on before all are here.
    pub fn barrier(&mut self) -> Result<(), RanksError> {
        self.sum(&mut [0.0])
    }

    /// As [`Self::barrier`], for as long as the others live: one of them may have hours of work
    /// before.
    pub fn barrier_without_limit(&mut self) -> Result<(), RanksError> {
        self.is_patient = true;
        let met = self.barrier();
        self.is_patient = false;
        met
    }

    /// The texts of all ranks, by rank; the texts of the others on rank 0 only.
    pub fn collect(&mut self, text: &str) -> Result<Vec<String>, RanksError> {
        let mut lengths = vec![0.0; self.num_ranks()];
        lengths[self.rank()] = text.len() as f64;
        self.sum(&mut lengths)?;
        let exchange = self.begin();
        let mut texts = vec![String::new(); self.num_ranks()];
        texts[self.rank()] = text.to_owned();
        for (from, &length) in lengths.iter().enumerate().skip(1) {
            let mut bytes = match from == self.rank() {
                true => text.as_bytes().to_vec(),
                false => vec![0; length as usize],
            };
            for piece in pieces::<u8>(0..length as usize) {
                if from == self.rank() {
                    self.send_values(exchange, 0, &bytes[piece])?;
                } else if self.is_first() {
                    self.receive(exchange, from, piece.len())?;
                    decode(&self.buffers.moving[HEADER_BYTES..], &mut bytes[piece]);
                }
            }
            if self.is_first() {
                texts[from] = String::from_utf8_lossy(&bytes).into_owned();
            }
        }
        Ok(texts)
    }

    /// A few numbers of each rank, as many of each, one rank after the other; those of the others
    /// on rank 0 only. Nobody waits for an answer.
    pub fn collect_numbers(&mut self, own: &[f64]) -> Result<Vec<f64>, RanksError> {
        let exchange = self.begin();
        let mut numbers = own.to_vec();
        if !self.is_first() {
            self.send_values(exchange, 0, own)?;
            return Ok(numbers);
        }
        for from in 1..self.num_ranks() {
            self.receive(exchange, from, own.len() * f64::BYTES)?;
            let first = numbers.len();
            numbers.resize(first + own.len(), 0.0);
            decode(&self.buffers.moving[HEADER_BYTES..], &mut numbers[first..]);
        }
        Ok(numbers)
    }

    /// An error on all ranks where they do not have the same value.
    pub fn require_same(&mut self, what: &str, value: &str) -> Result<(), RanksError> {
        let values = self.collect(value)?;
        let differ = self.is_first() && values.iter().any(|other| other != value);
        let text = match differ {
            true => serde_json::to_string(&values).unwrap_or_default(),
            false => String::new(),
        };
        let text = self.spread(&text)?;
        match text.is_empty() {
            true => Ok(()),
            false => Err(RanksError::Differ {
                what: what.to_owned(),
                values: serde_json::from_str(&text).unwrap_or_default(),
            }),
        }
    }

    /// Rank 0's text, on every rank.
    pub fn spread(&mut self, text: &str) -> Result<String, RanksError> {
        let mut length = [match self.is_first() {
            true => text.len() as f64,
            false => 0.0,
        }];
        self.sum(&mut length)?;
        let mut bytes = match self.is_first() {
            true => text.as_bytes().to_vec(),
            false => vec![0; length[0] as usize],
        };
        self.broadcast(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Writes numbers to values, or adds them.
fn take<T: Number>(bytes: &[u8], values: &mut [T], adds: bool) {
    if !adds {
        return decode(bytes, values);
    }
    for (value, place) in values.iter_mut().zip(bytes.chunks_exact(T::BYTES)) {
        *value = value.plus(T::read(place));
    }
}
