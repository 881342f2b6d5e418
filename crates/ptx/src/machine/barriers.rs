//! Where threads meet: a block's numbered barriers, a cluster's, and those in shared memory.

use std::rc::Rc;

use super::order::{Known, Order, Telling, Unit};

/// Threads that have arrived, and what they know.
#[derive(Debug)]
pub(crate) struct Meeting {
    /// How often all have met.
    pub generation: u32,
    arrived: usize,
    /// Whether something holds for all that have arrived, and whether it did the last time.
    holds: bool,
    pub held: bool,
    telling: Telling,
    told: Rc<Known>,
    units: usize,
}

impl Meeting {
    pub fn new(units: usize) -> Self {
        Self {
            generation: 0,
            arrived: 0,
            holds: true,
            held: true,
            telling: Telling::default(),
            told: Rc::new(Known::new(units)),
            units,
        }
    }

    /// Lanes of a warp of the cluster.
    pub fn arrive(&mut self, warp: usize, lanes: u32, order: &mut Order) {
        self.arrived += lanes.count_ones() as usize;
        order.tell(warp, lanes, &mut self.telling);
    }

    pub fn say(&mut self, holds: bool) {
        self.holds &= holds;
    }

    /// Ends the meeting if there are so many.
    pub fn end_with(&mut self, threads: usize) {
        if self.arrived >= threads && self.arrived > 0 {
            self.arrived = 0;
            self.held = std::mem::replace(&mut self.holds, true);
            self.generation += 1;
            self.told = Rc::new(self.telling.end(self.units));
        }
    }

    pub fn told(&self) -> &Rc<Known> {
        &self.told
    }
}

/// A barrier in shared memory: a phase ends when as many have arrived as it was made for, and all
/// bytes have come that were announced.
#[derive(Debug)]
pub(crate) struct Phases {
    count: i64,
    pending: i64,
    bytes: i64,
    phase: u32,
    telling: Telling,
    told: Rc<Known>,
    units: usize,
    /// Copies that report here, and the moment of those of this phase.
    copies: Unit,
    clock: u32,
}

impl Phases {
    pub fn new(count: u32, copies: Unit, units: usize) -> Self {
        Self {
            count: count.into(),
            pending: count.into(),
            bytes: 0,
            phase: 0,
            telling: Telling::default(),
            told: Rc::new(Known::new(units)),
            units,
            copies,
            clock: 1,
        }
    }

    /// Who copies, and when.
    pub fn copies(&self) -> (Unit, u32) {
        (self.copies, self.clock)
    }

    /// An error where more arrive than it was made for.
    pub fn arrive(&mut self, warp: usize, lane: usize, order: &mut Order) -> Result<(), String> {
        if self.pending == 0 {
            return Err("arrives at a barrier at which all have arrived".to_owned());
        }
        self.pending -= 1;
        order.tell(warp, 1 << lane, &mut self.telling);
        self.end_phase();
        Ok(())
    }

    pub fn expect(&mut self, bytes: u32) {
        self.bytes += i64::from(bytes);
    }

    pub fn complete(&mut self, bytes: usize) {
        self.bytes -= bytes as i64;
        self.end_phase();
    }

    fn end_phase(&mut self) {
        if self.pending != 0 || self.bytes != 0 {
            return;
        }
        self.phase += 1;
        self.pending = self.count;
        let mut told = self.telling.end(self.units);
        told.learn_end(self.copies, self.clock);
        self.told = Rc::new(told);
        self.clock += 1;
    }

    /// What whoever waits for a phase of this parity gets to know, once it is over.
    pub fn over(&self, parity: u32) -> Option<&Rc<Known>> {
        (self.phase & 1 != parity & 1).then_some(&self.told)
    }

    pub fn state(&self) -> String {
        format!(
            "phase {}, {} of {} have to arrive, {} bytes to come",
            self.phase, self.pending, self.count, self.bytes
        )
    }
}
