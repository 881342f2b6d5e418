//! What happens before what: a clock for everything that reads and writes shared memory, and which
//! of its moments each thread knows of.
//!
//! A thread knows what it did itself, and of others what they did before something that it waited
//! for: a barrier, a phase of a barrier in shared memory, the end of a copy or of a product. Copies of
//! the copy engine and products of the matrix units are apart from the thread that starts them, so
//! each has a clock of its own: one for each barrier that copies report to, and for each warp one of
//! its products, one of its copies to global memory and one of the copies of each lane. They go past
//! the threads' way to shared memory, so what a thread wrote reaches them only after a fence, which
//! is what `published` knows.
//!
//! Lanes of a warp mostly know the same, and after a barrier all threads of a block do. So what is
//! known is kept once for all who know it; what a thread knows of itself and of its own copies, which
//! is different for each, is kept beside it.

use std::rc::Rc;

use super::lanes::LANES;
use super::warp::{LANE_BITS, lanes_of};

/// Who reads or writes. Threads come first, by warp and lane.
pub(crate) type Unit = u32;

/// Moments, by unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    /// What was done until then has been done.
    all: Vec<u32>,
    /// And the copy engine and the matrix units see it.
    published: Vec<u32>,
}

impl Known {
    pub fn new(units: usize) -> Self {
        Self {
            all: vec![0; units],
            published: vec![0; units],
        }
    }

    fn learn(&mut self, other: &Self) {
        for (mine, theirs) in self.all.iter_mut().zip(&other.all) {
            *mine = (*mine).max(*theirs);
        }
        for (mine, theirs) in self.published.iter_mut().zip(&other.published) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Whether the other knows nothing besides.
    fn has(&self, other: &Self) -> bool {
        let has = |mine: &[u32], theirs: &[u32]| {
            let mut pairs = mine.chunks(64).zip(theirs.chunks(64));
            pairs.all(|(mine, theirs)| {
                let later = mine.iter().zip(theirs).map(|(mine, theirs)| theirs > mine);
                !later.fold(false, |any, later| any | later)
            })
        };
        has(&self.all, &other.all) && has(&self.published, &other.published)
    }

    /// Of something that is apart from threads.
    pub fn learn_end(&mut self, unit: Unit, clock: u32) {
        self.learn_of(unit, clock, clock);
    }

    fn learn_of(&mut self, unit: Unit, all: u32, published: u32) {
        let unit = unit as usize;
        self.all[unit] = self.all[unit].max(all);
        self.published[unit] = self.published[unit].max(published);
    }
}

/// What those who have arrived somewhere know, until all have.
#[derive(Debug, Default)]
pub(crate) struct Telling {
    known: Option<Known>,
    /// Whose knowledge is in it already: that of threads who know the same.
    last: Option<Rc<Known>>,
}

impl Telling {
    fn hear(&mut self, known: &Rc<Known>) -> &mut Known {
        let is_heard = self
            .last
            .as_ref()
            .is_some_and(|last| Rc::ptr_eq(last, known));
        if !is_heard {
            self.last = Some(known.clone());
            if let Some(mine) = &mut self.known {
                mine.learn(known);
            }
        }
        self.known.get_or_insert_with(|| Known::clone(known))
    }

    /// What is told, by those who have arrived since the last time.
    pub fn end(&mut self, units: usize) -> Known {
        self.last = None;
        self.known.take().unwrap_or_else(|| Known::new(units))
    }
}

/// What a thread knows of itself: until when the copy engine sees what it wrote, and until when its
/// own copies have ended.
#[derive(Clone, Copy, Debug, Default)]
struct Own {
    published: u32,
    copied: u32,
    copied_published: u32,
}

/// Lanes of a warp that know the same.
#[derive(Clone, Debug)]
struct Group {
    lanes: u32,
    known: Rc<Known>,
}

/// What one thread knows, or what several lanes of a warp know that know the same.
pub(crate) struct View<'a> {
    known: &'a Known,
    own: Own,
    /// The only one; of several each knows more of itself than the others do.
    thread: Option<Unit>,
    /// The first thread of the warp, and the lanes.
    first: Unit,
    lanes: u32,
    /// Its own copies.
    copies: Unit,
}

impl View<'_> {
    pub fn all(&self, unit: Unit) -> u32 {
        let known = self.known.all[unit as usize];
        if Some(unit) == self.thread {
            // Whatever a thread has done itself, it knows of.
            u32::MAX
        } else if unit == self.copies {
            known.max(self.own.copied)
        } else {
            known
        }
    }

    pub fn published(&self, unit: Unit) -> u32 {
        let known = self.known.published[unit as usize];
        if Some(unit) == self.thread {
            known.max(self.own.published)
        } else if unit == self.copies {
            known.max(self.own.copied_published)
        } else {
            known
        }
    }

    /// Whether it knows of a moment of each of some lanes of a warp, of which this is the first.
    pub fn has_lanes(&self, first: Unit, lanes: u32, clock: u32) -> bool {
        let known = &self.known.all[first as usize..];
        let mut missing = 0;
        if let Some(known) = known.first_chunk::<LANES>() {
            for (&known, bit) in known.iter().zip(LANE_BITS) {
                missing |= if known < clock { bit } else { 0 };
            }
        }
        if first == self.first {
            // Each of them knows of itself.
            missing &= !self.lanes;
        }
        missing & lanes == 0
    }
}

/// The clocks of a cluster.
#[derive(Debug)]
pub(crate) struct Order {
    /// Of each warp.
    groups: Vec<Vec<Group>>,
    /// Of each thread.
    own: Vec<Own>,
    /// Of each warp: a thread's own moment is its warp's.
    clocks: Vec<u32>,
    num_units: usize,
    /// The first of the units of threads' own copies, where there are any.
    copies: Option<Unit>,
}

impl Order {
    pub fn new(warps: usize, others: usize, copies: Option<Unit>) -> Self {
        let num_units = warps * LANES + others;
        let nothing = Group {
            lanes: u32::MAX,
            known: Rc::new(Known::new(num_units)),
        };
        Self {
            groups: vec![vec![nothing]; warps],
            own: vec![Own::default(); warps * LANES],
            clocks: vec![1; warps],
            num_units,
            copies,
        }
    }

    pub fn clock(&self, unit: Unit) -> u32 {
        self.clocks[unit as usize / LANES]
    }

    pub fn num_units(&self) -> usize {
        self.num_units
    }

    /// Of some lanes of a thread's warp, if they know the same.
    pub fn view_of(&self, thread: Unit, lanes: u32) -> View<'_> {
        let (warp, lane) = (thread as usize / LANES, thread as usize % LANES);
        let groups = &self.groups[warp];
        let group = groups.iter().find(|group| group.lanes >> lane & 1 == 1);
        let is_single = lanes.is_power_of_two();
        let copies = self.copies.filter(|_| is_single);
        View {
            // Every lane is in one of them.
            known: &group.unwrap_or(&groups[0]).known,
            own: self.own[thread as usize],
            thread: is_single.then_some(thread),
            first: (warp * LANES) as Unit,
            lanes,
            copies: copies.map_or(Unit::MAX, |first| first + thread),
        }
    }

    pub fn view(&self, thread: Unit) -> View<'_> {
        self.view_of(thread, 1 << (thread as usize % LANES))
    }

    /// Whether all lanes of a warp know the same.
    pub fn is_same(&self, warp: usize) -> bool {
        self.groups[warp].len() == 1
    }

    /// What some lanes of a warp tell by arriving somewhere: all that they know, and what they have
    /// done. What they do from here on is later.
    pub fn tell(&mut self, warp: usize, lanes: u32, to: &mut Telling) {
        let clock = self.clocks[warp];
        for group in &self.groups[warp] {
            if group.lanes & lanes == 0 {
                continue;
            }
            let told = to.hear(&group.known);
            for lane in lanes_of(group.lanes & lanes) {
                let thread = warp * LANES + lane;
                let own = self.own[thread];
                told.learn_of(thread as Unit, clock, own.published);
                if let Some(first) = self.copies {
                    told.learn_of(first + thread as Unit, own.copied, own.copied_published);
                }
            }
        }
        self.clocks[warp] += 1;
    }

    /// Changes what some lanes know.
    fn change(&mut self, warp: usize, lanes: u32, change: impl Fn(&mut Rc<Known>)) {
        let groups = &mut self.groups[warp];
        for index in 0..groups.len() {
            let group = &mut groups[index];
            let others = group.lanes & !lanes;
            if others == group.lanes {
                continue;
            }
            if others != 0 {
                let known = group.known.clone();
                group.lanes &= lanes;
                change(&mut group.known);
                groups.push(Group {
                    lanes: others,
                    known,
                });
            } else {
                change(&mut group.known);
            }
        }
        // Those that know the same again are one.
        let mut index = 1;
        while index < groups.len() {
            let group = &groups[index];
            let same = groups[..index].iter().position(|other| {
                Rc::ptr_eq(&other.known, &group.known) || other.known == group.known
            });
            match same {
                Some(same) => {
                    groups[same].lanes |= groups[index].lanes;
                    groups.remove(index);
                }
                None => index += 1,
            }
        }
    }

    pub fn learn(&mut self, warp: usize, lanes: u32, told: &Rc<Known>) {
        self.change(warp, lanes, |known| {
            if Rc::ptr_eq(known, told) {
                return;
            }
            if told.has(known) {
                *known = told.clone();
            } else {
                Rc::make_mut(known).learn(told);
            }
        });
    }

    /// Of something that is apart from threads.
    pub fn learn_end(&mut self, warp: usize, lanes: u32, unit: Unit, clock: u32) {
        self.change(warp, lanes, |known| {
            let at = unit as usize;
            if known.all[at] < clock || known.published[at] < clock {
                Rc::make_mut(known).learn_end(unit, clock);
            }
        });
    }

    /// Of a thread's own copies that go the threads' own way: the copy engine does not see them by
    /// themselves.
    pub fn learn_copied(&mut self, thread: Unit, clock: u32) {
        let own = &mut self.own[thread as usize];
        own.copied = own.copied.max(clock);
    }

    /// What threads did and know of is seen by the copy engine and the matrix units.
    pub fn publish(&mut self, warp: usize, lanes: u32) {
        self.change(warp, lanes, |known| {
            if known.published != known.all {
                let known = Rc::make_mut(known);
                known.published.copy_from_slice(&known.all);
            }
        });
        for lane in lanes_of(lanes) {
            let thread = warp * LANES + lane;
            let own = &mut self.own[thread];
            own.published = self.clocks[warp];
            own.copied_published = own.copied;
        }
        self.clocks[warp] += 1;
    }

    /// Lanes of a warp tell each other what they know.
    pub fn meet(&mut self, warp: usize, lanes: u32) {
        let mut telling = Telling::default();
        self.tell(warp, lanes, &mut telling);
        let told = Rc::new(telling.end(self.num_units));
        self.learn(warp, lanes, &told);
    }
}
