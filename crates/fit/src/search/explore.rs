//! Looking at every point of a tier, and choosing among them.
//!
//! **Objective.** The highest predicted tokens per second within the budget. Speeds closer than
//! [`SAME_SPEED`] to the best are the same, because no prediction is better than that; among
//! them the least memory is taken, and among equals the fewest changes from what the user wrote.
//!
//! **Exactness.** A sketch gives each point's time, and a lower bound of its bytes that is nearly
//! always met. So nothing fits that does not fit by its sketch, and what fits by its sketch is
//! planned in full before it is believed.

use std::collections::HashMap;
use std::sync::Arc;

use cinch_config::Config;
use cinch_step::{CUDA_CHUNK_BYTES, StepPlan, same_graph};
use rayon::prelude::*;

use super::request::Request;
use super::sketch::{Length, Processor, Sketch, Steps};
use super::space::{Point, Space, Tier, is_sensible, with_recomputed};
use crate::FitError;

/// Speeds that differ by less are one.
pub(crate) const SAME_SPEED: f64 = 0.005;

/// Sizes that differ by less are one, before they are planned.
const SAME_SIZE: f64 = 0.01;

/// Every point of one tier.
pub(crate) struct Explored<'a> {
    pub request: &'a Request<'a>,
    pub space: &'a Space,
    pub sites: Vec<Site>,
    /// The fastest first.
    pub candidates: Vec<Candidate>,
    plans: HashMap<(usize, usize), Arc<StepPlan>>,
    length: Length,
}

/// A point with its sketch.
pub(crate) struct Site {
    pub point: Point,
    pub config: Config,
    sketch: Sketch,
    /// What predictions are multiplied by.
    factor: f64,
}

/// What decides among candidates that are as fast: bytes in host memory, bytes, and changes.
type Rank = (u64, u64, usize);

/// A site with a number of recomputed blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    pub site: usize,
    pub recomputed: usize,
    /// At the least.
    pub bytes: u64,
    /// What lies in host memory instead.
    pub host_bytes: u64,
    /// Seconds for a token.
    pub pace: f64,
    pub changes: usize,
}

/// What settings take, by their sketch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Glance {
    /// At the least.
    pub bytes: u64,
    pub host_bytes: u64,
    /// Seconds for a token.
    pub pace: f64,
}

/// Why a choice was not made.
pub(crate) enum Halt {
    /// The model's blocks are not alike: a short chain does not tell.
    Unlike,
    Failed(FitError),
}

impl<E: Into<FitError>> From<E> for Halt {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl<'a> Explored<'a> {
    /// Sketches the points of a tier that may fit `limit`, and some that do not.
    pub fn new(
        request: &'a Request<'a>,
        space: &'a Space,
        tier: &Tier,
        length: Length,
        limit: u64,
    ) -> Result<Self, FitError> {
        let alike: Vec<Vec<Site>> = columns_alike(request, space, tier)
            .into_par_iter()
            .map(|columns| sketch_columns(request, space, columns, length, limit))
            .collect::<Result<_, _>>()?;
        let sites: Vec<Site> = alike.into_iter().flatten().collect();
        let mut candidates: Vec<Candidate> = sites
            .iter()
            .enumerate()
            .flat_map(|(index, site)| site.candidates(index, request, space))
            .collect();
        candidates.sort_by(|a, b| a.pace.total_cmp(&b.pace).then(a.bytes.cmp(&b.bytes)));
        Ok(Self {
            request,
            space,
            sites,
            candidates,
            plans: HashMap::new(),
            length,
        })
    }

    pub fn config(&self, candidate: Candidate) -> Config {
        with_recomputed(&self.sites[candidate.site].config, candidate.recomputed)
    }

    pub fn num_planned(&self) -> usize {
        self.plans.len()
    }

    /// The candidate that needs least, whatever it takes.
    pub fn smallest(&self) -> Option<Candidate> {
        let candidates = self.candidates.iter().copied();
        candidates.min_by(|a, b| a.bytes.cmp(&b.bytes).then(a.pace.total_cmp(&b.pace)))
    }

    /// The full plan of a candidate.
    pub fn plan(&mut self, candidate: Candidate) -> Result<Arc<StepPlan>, Halt> {
        let key = (candidate.site, candidate.recomputed);
        if let Some(plan) = self.plans.get(&key) {
            return Ok(Arc::clone(plan));
        }
        let plan = StepPlan::new(
            &self.config(candidate),
            self.request.machine,
            candidate.recomputed,
        )?;
        if !self.agrees(candidate, &plan) {
            return Err(Halt::Unlike);
        }
        let plan = Arc::new(plan);
        self.plans.insert(key, Arc::clone(&plan));
        Ok(plan)
    }

    /// Plans several at once, so that [`Self::plan`] finds them.
    pub fn plan_all(&mut self, candidates: &[Candidate]) -> Result<(), Halt> {
        let missing = candidates
            .iter()
            .filter(|c| !self.plans.contains_key(&(c.site, c.recomputed)));
        let missing: Vec<Candidate> = missing.copied().collect();
        let planned: Vec<(Candidate, StepPlan)> = missing
            .into_par_iter()
            .map(|candidate| {
                let config = self.config(candidate);
                let machine = self.request.machine;
                let plan = StepPlan::new(&config, machine, candidate.recomputed)?;
                Ok((candidate, plan))
            })
            .collect::<Result<_, FitError>>()?;
        for (candidate, plan) in planned {
            if !self.agrees(candidate, &plan) {
                return Err(Halt::Unlike);
            }
            let key = (candidate.site, candidate.recomputed);
            self.plans.insert(key, Arc::new(plan));
        }
        Ok(())
    }

    /// What a candidate's sketch says.
    pub fn glance(&self, candidate: Candidate) -> Glance {
        self.sites[candidate.site].glance(candidate.recomputed)
    }

    /// The same for settings that need not be among the points.
    pub fn look_at(&self, config: &Config, recomputed: usize) -> Result<Glance, FitError> {
        let counts = [self.space.recomputed(config), vec![recomputed]].concat();
        let steps = Steps::new(config, self.request.machine.target, self.length, &counts)?;
        let site = Site::new(self.request, Point::new(), config.clone(), &steps);
        Ok(site.glance(recomputed))
    }

    /// Whether a sketch was right about a plan.
    fn agrees(&self, candidate: Candidate, plan: &StepPlan) -> bool {
        const ROUNDING: f64 = 1e-6;
        let peak = plan.peak_bytes();
        let bytes = peak.saturating_add(plan.overhead_bytes());
        let seconds = plan.predict(self.request.card, self.request.tf32).seconds;
        let sketched = self.sites[candidate.site].sketch.seconds[candidate.recomputed];
        if self.length == Length::Whole {
            return true;
        }
        let off = (sketched / seconds - 1.0).abs();
        match plan.config.model.repeats() {
            1 => bytes == candidate.bytes && off < ROUNDING,
            // What all repeats share grows with their number, not quite in a line.
            _ => {
                let more = bytes.checked_sub(candidate.bytes);
                more.is_some_and(|more| more as f64 <= SAME_SIZE * bytes as f64) && off < SAME_SPEED
            }
        }
    }

    /// The best candidate within a budget, with its plan.
    pub fn best_within(&mut self, budget: u64) -> Result<Option<(Candidate, Arc<StepPlan>)>, Halt> {
        let may_fit = self
            .candidates
            .iter()
            .copied()
            .filter(|c| c.bytes <= budget);
        let may_fit: Vec<Candidate> = may_fit.collect();
        let mut fastest = None;
        for &candidate in &may_fit {
            if self.plan(candidate)?.total_bytes() <= budget {
                fastest = Some(candidate);
                break;
            }
        }
        let Some(fastest) = fastest else {
            return Ok(None);
        };
        let slowest = fastest.pace * (1.0 + SAME_SPEED);
        let as_fast = |c: &Candidate| c.pace >= fastest.pace && c.pace <= slowest;
        let mut as_fast: Vec<Candidate> = may_fit.into_iter().filter(as_fast).collect();
        as_fast.sort_by_key(|c| (c.host_bytes, c.bytes, c.changes));
        let mut best: Option<(Rank, Candidate)> = None;
        for candidate in as_fast {
            let least = (candidate.host_bytes, candidate.bytes, 0);
            if best.is_some_and(|(rank, _)| least > rank) {
                break;
            }
            let bytes = self.plan(candidate)?.total_bytes();
            let rank = (candidate.host_bytes, bytes, candidate.changes);
            if bytes <= budget && best.is_none_or(|(least, _)| rank < least) {
                best = Some((rank, candidate));
            }
        }
        let best = best.map_or(fastest, |(_, best)| best);
        Ok(Some((best, self.plan(best)?)))
    }
}

/// A point of a column, and its configuration.
type Place = (Point, Config);

/// The columns of a tier, those together whose steps have the same graph.
fn columns_alike(request: &Request<'_>, space: &Space, tier: &Tier) -> Vec<Vec<Vec<Place>>> {
    let mut alike: Vec<(Config, Vec<Vec<Place>>)> = Vec::new();
    for column in space.columns(tier) {
        let place = |point: Point| {
            let config = space.config(request.config, &point);
            (point, config)
        };
        let places = column.into_iter().map(place);
        let places = places.filter(|(_, config)| is_sensible(config, request.config));
        let places: Vec<Place> = places.collect();
        let Some((_, first)) = places.first() else {
            continue;
        };
        let graph = same_graph(first);
        match alike.iter_mut().find(|(known, _)| *known == graph) {
            Some((_, columns)) => columns.push(places),
            None => alike.push((graph, vec![places])),
        }
    }
    alike.into_iter().map(|(_, columns)| columns).collect()
}

/// Sketches columns from the smallest micro batch on, each until one is far beyond the limit:
/// more sequences at once take no less memory, but for the planner's own choice of logits, and for
/// weights without masters, whose gradients may be smaller in the last micro batch, the whole one.
fn sketch_columns(
    request: &Request<'_>,
    space: &Space,
    columns: Vec<Vec<Place>>,
    length: Length,
    limit: u64,
) -> Result<Vec<Site>, FitError> {
    let mut sites = Vec::new();
    let mut columns: Vec<_> = columns.into_iter().map(Vec::into_iter).collect();
    while !columns.is_empty() {
        let mut steps: Option<Steps> = None;
        let mut go_on = Vec::with_capacity(columns.len());
        for mut column in columns {
            let Some((point, config)) = column.next() else {
                continue;
            };
            let built = match steps.take() {
                Some(built) => built,
                None => {
                    let counts = space.recomputed(&config);
                    Steps::new(&config, request.machine.target, length, &counts)?
                }
            };
            let grows = config.tuning.has_masters();
            let site = Site::new(request, point, config, steps.insert(built));
            let least = site.sketch.bytes.iter().copied().min().unwrap_or(u64::MAX);
            sites.push(site);
            if !grows || least.saturating_sub(CUDA_CHUNK_BYTES) <= limit {
                go_on.push(column);
            }
        }
        columns = go_on;
    }
    Ok(sites)
}

impl Site {
    fn new(request: &Request<'_>, point: Point, config: Config, steps: &Steps) -> Self {
        let processor = Processor {
            machine: request.machine,
            card: request.card,
            tf32: request.tf32,
        };
        let (card, model) = (&request.card.name, config.model.name());
        let precision = config.batch.precision;
        Self {
            sketch: Sketch::new(&config, steps, processor),
            factor: request.calibration.factor(card, model, precision),
            point,
            config,
        }
    }

    /// Seconds for a token.
    fn pace(&self, recomputed: usize) -> f64 {
        let batch = &self.config.batch;
        let tokens = batch.effective_batch() as f64 * batch.seq_len as f64;
        self.sketch.seconds[recomputed] * self.factor / tokens
    }

    fn glance(&self, recomputed: usize) -> Glance {
        Glance {
            bytes: self.sketch.bytes[recomputed],
            host_bytes: self.sketch.host_bytes,
            pace: self.pace(recomputed),
        }
    }

    fn candidates(&self, index: usize, request: &Request<'_>, space: &Space) -> Vec<Candidate> {
        let written = crate::asked_blocks(&self.config);
        let changes = space.num_changes(request.config, &self.point);
        let candidate = |&recomputed: &usize| Candidate {
            site: index,
            recomputed,
            bytes: self.sketch.bytes[recomputed],
            host_bytes: self.sketch.host_bytes,
            pace: self.pace(recomputed),
            changes: changes + usize::from(written.is_some_and(|asked| asked != recomputed)),
        };
        let counts = space.recomputed(&self.config);
        counts.iter().map(candidate).collect()
    }
}
