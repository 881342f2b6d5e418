//! A log, line by line: messages with the tracebacks before them, step lines, and what a run says
//! of itself. What is held is bounded, however long the log is.

mod curve;
mod told;
mod traceback;

pub use curve::{Curve, Quantity};
pub use told::Told;

use std::collections::HashMap;

use crate::clean::{Source, plain, unprefixed};
use crate::frame::{Frame, Phase, Server, phase, server};
use crate::lines::Lines;
use crate::message::{Event, Framework, Message};
use crate::trend::{Series, Trend};
use crate::words::{Measure, Word, announces, breaks_a_word, words_of};

use told::Readings;
use traceback::Traceback;

/// Lines and bytes that a message may have.
const MOST_LINES: usize = 24;
const MOST_BYTES: usize = 4096;
/// Ranks and workers that are kept apart.
const MOST_SOURCES: usize = 512;
/// Words of a line that are looked at one by one: no step line has more. What is left of it is
/// only searched for a failure.
const MOST_WORDS: usize = 64;
/// Failures that are kept; more are counted.
pub const MOST_FAILURES: usize = 64;
/// Lengths of batches that are remembered.
const MOST_LENGTHS: usize = 512;
/// A line that a terminal broke is at least so long, and at most.
const BROKEN: std::ops::Range<usize> = 40..512;
/// Messages that are read in any case, and bytes of the log for each further one. Nothing prints
/// more of them but a log that was made to take time.
const SURE_READS: u64 = 50_000;
const BYTES_A_READ: u64 = 4096;

/// A failure, before its cause is told.
#[derive(Clone, Debug)]
pub struct Incident {
    pub message: Message,
    pub source: Source,
    /// Where its message begins.
    pub line: u64,
    /// How often it was printed.
    pub times: u64,
    pub phase: Option<Phase>,
    /// The innermost frame outside of installed packages.
    pub place: Option<Frame>,
    /// The last step that was told before.
    pub step: Option<u64>,
    /// Step lines before it.
    pub steps: u64,
    pub trend: Option<(Measure, Trend)>,
    pub length: Option<LengthChange>,
    /// Host memory in use, as the log told it last.
    pub host: Option<f64>,
    /// The program that trains nothing, where it is one.
    pub server: Option<Server>,
}

/// The last batch beside those before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LengthChange {
    pub usual: f64,
    pub last: f64,
}

#[derive(Debug, Default)]
struct Pending {
    text: String,
    lines: usize,
    line: u64,
}

/// What becomes of a message.
#[derive(Clone, Copy, Debug, Default)]
enum Outcome {
    /// It is none, or follows from one that is known.
    #[default]
    Nothing,
    /// A failure of its own, or one that was told already: its place.
    Told(usize),
    LeftOut,
}

/// What is known of one rank or worker.
#[derive(Debug, Default)]
struct State {
    pending: Option<Pending>,
    traceback: Traceback,
    /// The message that was read last, and what became of it.
    last_message: String,
    outcome: Outcome,
    step: Option<u64>,
    steps: u64,
    series: Vec<(Measure, Series)>,
    losses: Series,
    lengths: Vec<f64>,
    /// Host memory in use, as it was told last.
    host: Option<f64>,
    is_evaluating: bool,
}

/// Reads a log as it comes.
#[derive(Debug, Default)]
pub struct Log {
    lines: Lines,
    reader: Reader,
}

#[derive(Debug, Default)]
struct Reader {
    number: u64,
    bytes: u64,
    reads: u64,
    states: HashMap<Source, usize>,
    known: Vec<State>,
    /// The source that was asked for last, and its place.
    last: Option<(Source, usize)>,
    incidents: Vec<Incident>,
    left_out: u64,
    told: Told,
    /// The line before, where a terminal may have broken it.
    before: Vec<u8>,
    before_source: Source,
    escapes: Vec<u8>,
    seam: Vec<u8>,
}

impl Log {
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes of the log.
    pub fn feed(&mut self, bytes: &[u8]) {
        let reader = &mut self.reader;
        self.lines.feed(bytes, |line| reader.line(line));
    }

    /// The log ends here: what was begun is complete.
    pub fn finish(&mut self) {
        let reader = &mut self.reader;
        self.lines.finish(|line| reader.line(line));
        self.settle();
    }

    /// Completes messages that may still go on, as when a log has come to rest.
    pub fn settle(&mut self) {
        let sources: Vec<Source> = self.reader.states.keys().copied().collect();
        let mut sources = sources;
        sources.sort();
        for source in sources {
            self.reader.close(source);
        }
    }

    /// The log is the output of one process, whose streams came in any order: step lines that were
    /// held back until its end stand after the message, and belong before it.
    pub fn join_streams(&mut self) {
        let reader = &mut self.reader;
        for place in 0..reader.incidents.len() {
            let source = reader.incidents[place].source;
            if reader.incidents[place].trend.is_some() {
                continue;
            }
            let trend = reader.trend(source);
            let (step, steps) = reader.furthest();
            let incident = &mut reader.incidents[place];
            incident.trend = trend;
            incident.step = step.or(incident.step);
            incident.steps = incident.steps.max(steps);
        }
    }

    /// What no line tells and the kernel counted: so many processes ended for want of host memory.
    pub fn note_kernel_kills(&mut self, count: u64) {
        let reader = &mut self.reader;
        let mut message = Message::new(Framework::Linux, Event::HostKilled);
        message
            .remarks
            .push(format!("the kernel counted {count} such ends meanwhile"));
        let end = Pending {
            line: reader.number,
            ..Pending::default()
        };
        if let Outcome::Told(place) = reader.record(Source::Unnamed, &end, message) {
            reader.incidents[place].times += 1;
        }
    }

    pub fn lines_read(&self) -> u64 {
        self.reader.number
    }

    /// Failures that are complete, in the order of their lines.
    pub fn incidents(&self) -> Vec<Incident> {
        let mut found = self.reader.incidents.clone();
        found.sort_by_key(|incident| incident.line);
        // What follows from running out of memory is no failure of its own.
        let is_memory =
            |incident: &Incident| !matches!(incident.message.event, Event::NotMemory(_));
        if found.iter().any(is_memory) {
            found.retain(is_memory);
        }
        found
    }

    /// Failures beyond those that are kept.
    pub fn left_out(&self) -> u64 {
        self.reader.left_out
    }

    pub fn told(&self) -> &Told {
        &self.reader.told
    }

    /// What is known of each rank or worker, in their order.
    fn states(&self) -> impl Iterator<Item = (Source, &State)> {
        let mut sources: Vec<_> = self.reader.states.iter().collect();
        sources.sort();
        let known = &self.reader.known;
        sources
            .into_iter()
            .map(|(source, place)| (*source, &known[*place]))
    }

    /// What memory does from step to step, rank by rank, where there are steps enough to tell.
    pub fn trends(&self) -> Vec<(Source, Measure, Trend)> {
        let of_state = |(source, state): (Source, &State)| {
            let trends = state.series.iter();
            let trends = trends
                .filter_map(move |(measure, series)| Some((source, *measure, series.trend()?)));
            trends.collect::<Vec<_>>()
        };
        self.states().flat_map(of_state).collect()
    }

    /// What step lines tell over the steps, rank by rank.
    pub fn curves(&self) -> Vec<Curve> {
        self.states()
            .flat_map(|(source, state)| curve::of(source, &state.series, &state.losses))
            .collect()
    }
}

impl Reader {
    fn line(&mut self, raw: &[u8]) {
        self.number += 1;
        self.bytes += raw.len() as u64 + 1;
        let mut escapes = std::mem::take(&mut self.escapes);
        let (source, text) = unprefixed(plain(raw, &mut escapes));
        let source = match self.states.len() < MOST_SOURCES || self.states.contains_key(&source) {
            true => source,
            false => Source::Unnamed,
        };
        self.read(source, text);
        self.before.clear();
        if BROKEN.contains(&text.len()) {
            self.before.extend_from_slice(text);
        }
        self.before_source = source;
        self.escapes = escapes;
    }

    fn read(&mut self, source: Source, text: &[u8]) {
        // A terminal breaks a line after its prefix was printed: the rest has none.
        let is_rest = source == Source::Unnamed && self.before_source != source;
        let goes_on = is_rest && self.state(self.before_source).pending.is_some();
        let source = match goes_on {
            true => self.before_source,
            false => source,
        };
        let is_python_frame = text.trim_ascii_start().starts_with(b"File \"");
        if is_python_frame && self.state(source).traceback.take(text) {
            self.told.note_path(self.number, text);
            return self.close(source);
        }
        let mut readings = Readings::default();
        let (mut begins, mut has_figure, mut is_traceback, mut has_frame) =
            (false, false, false, false);
        for (index, found) in words_of(text).enumerate() {
            if index == MOST_WORDS {
                begins |= announces(&text[found.start..]);
                break;
            }
            match found.word {
                Word::Failure => begins = true,
                Word::Figure => has_figure = true,
                Word::Traceback => is_traceback = true,
                Word::Frame => has_frame = true,
                Word::Evaluation => self.state(source).is_evaluating = true,
                _ => self.told.note(self.number, text, found, &mut readings),
            }
        }
        let state = self.state(source);
        // What begins as Python's frames do was looked at above.
        let may_be_frame = !is_python_frame && (has_frame || state.traceback.is_broken());
        let frame = may_be_frame && state.traceback.take(text);
        if is_traceback {
            self.close(source);
            self.state(source).traceback.clear();
        }
        let is_open = self.state(source).pending.is_some();
        let is_blank = text.iter().all(u8::is_ascii_whitespace);
        if is_open {
            let is_bar = memchr::memmem::find(text, b"%|").is_some();
            let ends = is_blank || is_traceback || frame || begins;
            let ends = ends || is_bar || readings.ends_a_message();
            match ends {
                true => self.close(source),
                false => return self.append(source, text),
            }
        }
        if frame || is_blank {
            return;
        }
        let may_go_on = self.before_source == source && !self.before.is_empty();
        if begins || has_figure {
            // What stands alone of a message may have its beginning in the line before.
            return self.open(source, text, may_go_on && !begins);
        }
        if may_go_on && breaks_a_word(&self.before, text, &mut self.seam) {
            return self.open(source, text, true);
        }
        if readings.is_step() || !readings.memory.is_empty() {
            self.take(source, &readings);
        }
    }

    /// The place of a source's state; lines of one source mostly come together.
    fn place(&mut self, source: Source) -> usize {
        if let Some((last, place)) = self.last
            && last == source
        {
            return place;
        }
        let next = self.known.len();
        let place = *self.states.entry(source).or_insert(next);
        if place == next {
            self.known.push(State::default());
        }
        self.last = Some((source, place));
        place
    }

    fn state(&mut self, source: Source) -> &mut State {
        let place = self.place(source);
        &mut self.known[place]
    }

    fn open(&mut self, source: Source, text: &[u8], with_before: bool) {
        let mut pending = Pending {
            text: String::new(),
            lines: 1,
            line: self.number - u64::from(with_before),
        };
        if with_before {
            pending
                .text
                .push_str(&String::from_utf8_lossy(&self.before));
            pending.text.push('\n');
        }
        // Long lines are searched for where the message stands by the readers themselves.
        let kept = &text[..text.len().min(MOST_BYTES)];
        let start = match text.len() > MOST_BYTES {
            true => words_of(text)
                .find(|found| matches!(found.word, Word::Failure | Word::Figure))
                .map_or(0, |found| found.start.saturating_sub(256)),
            false => 0,
        };
        let kept = match start {
            0 => kept,
            start => &text[start..text.len().min(start + MOST_BYTES)],
        };
        pending.text.push_str(&String::from_utf8_lossy(kept));
        self.state(source).pending = Some(pending);
    }

    fn append(&mut self, source: Source, text: &[u8]) {
        let Some(pending) = &mut self.state(source).pending else {
            return;
        };
        pending.lines += 1;
        pending.text.push('\n');
        let room = MOST_BYTES.saturating_sub(pending.text.len());
        pending
            .text
            .push_str(&String::from_utf8_lossy(&text[..text.len().min(room)]));
        if pending.lines >= MOST_LINES || pending.text.len() >= MOST_BYTES {
            self.close(source);
        }
    }

    /// The message of a source is complete.
    fn close(&mut self, source: Source) {
        let Some(pending) = self.state(source).pending.take() else {
            return;
        };
        let state = self.state(source);
        // Ranks, retries and loggers print a message again and again.
        let outcome = match state.last_message == pending.text {
            true => state.outcome,
            false => self.read_message(source, &pending),
        };
        match outcome {
            Outcome::Told(place) => self.incidents[place].times += 1,
            Outcome::LeftOut => self.left_out += 1,
            Outcome::Nothing => {}
        }
        let state = self.state(source);
        state.outcome = outcome;
        state.last_message = pending.text;
    }

    fn read_message(&mut self, source: Source, pending: &Pending) -> Outcome {
        self.reads += 1;
        if self.reads > SURE_READS + self.bytes / BYTES_A_READ {
            return Outcome::LeftOut;
        }
        match Message::read(&pending.text) {
            Some(message) => self.record(source, pending, message),
            None => Outcome::Nothing,
        }
    }

    /// A failure as it is kept, which nobody has told yet.
    fn incident(&mut self, source: Source, pending: &Pending, message: Message) -> Incident {
        let trend = self.trend(source);
        let host = self.known.iter().find_map(|state| state.host);
        let state = self.state(source);
        let (phase, place, server) = moment(&state.traceback);
        let is_evaluating = state.is_evaluating;
        let phase = message.phase.or(phase);
        let phase = phase.or(is_evaluating.then_some(Phase::Evaluation));
        let (step, steps) = match state.steps {
            // A rank that prints no steps is where another one is.
            0 => self.furthest(),
            steps => (state.step, steps),
        };
        let length = length_change(self.state(source));
        Incident {
            message,
            source,
            line: pending.line,
            times: 0,
            phase,
            place,
            step,
            steps,
            trend,
            length,
            host,
            server,
        }
    }

    fn furthest(&self) -> (Option<u64>, u64) {
        let furthest = self.known.iter().max_by_key(|state| state.steps);
        furthest.map_or((None, 0), |state| (state.step, state.steps))
    }

    /// What memory did before: of the source itself, or of the one that measured most.
    fn trend(&self, source: Source) -> Option<(Measure, Trend)> {
        let own = self.states.get(&source).map(|place| &self.known[*place]);
        let own = own.filter(|state| !state.series.is_empty());
        let state = own.or_else(|| {
            let measured = self.known.iter().filter(|state| !state.series.is_empty());
            measured.max_by_key(|state| state.steps)
        })?;
        let order = [
            Measure::Allocated,
            Measure::Used,
            Measure::Reserved,
            Measure::Host,
        ];
        let mut trends = order.iter().filter_map(|measure| {
            let (_, series) = state.series.iter().find(|(known, _)| known == measure)?;
            let trend = series.trend()?;
            Some((*measure, trend))
        });
        let first = trends.next()?;
        match first.1.is_rising {
            true => Some(first),
            false => Some(trends.find(|(_, trend)| trend.is_rising).unwrap_or(first)),
        }
    }

    fn take(&mut self, source: Source, readings: &Readings) {
        let state = self.state(source);
        state.is_evaluating &= readings.loss.is_none();
        if let Some(step) = readings.step {
            state.step = Some(step);
        }
        state.steps += u64::from(readings.is_step());
        let at = state.step.map_or(state.steps as f64, |step| step as f64);
        for (measure, bytes) in &readings.memory {
            if *measure == Measure::Host {
                state.host = Some(*bytes);
            }
            let known = state.series.iter().position(|(known, _)| known == measure);
            let place = known.unwrap_or(state.series.len());
            if known.is_none() {
                state.series.push((*measure, Series::new()));
            }
            state.series[place].1.push(at, *bytes);
        }
        if let Some(loss) = readings.loss {
            state.losses.push(at, loss);
        }
        if let Some(length) = readings.length {
            if state.lengths.len() == MOST_LENGTHS {
                state.lengths.drain(..MOST_LENGTHS / 2);
            }
            state.lengths.push(length);
        }
    }

    /// Keeps a failure, or finds the one by which it was told already.
    fn record(&mut self, source: Source, pending: &Pending, message: Message) -> Outcome {
        let own = self.place(source);
        let event = &message.event;
        let is_weak = message.is_bare()
            && matches!(
                event,
                Event::Driver | Event::Library(_) | Event::Collective | Event::Device
            );
        for (place, known) in self.incidents.iter_mut().enumerate() {
            let (old, new) = (&known.message, &message);
            let same_source = known.source == source;
            let is_memory = !matches!(old.event, Event::NotMemory(_));
            let same = same_source
                && old.framework == new.framework
                && old.event == new.event
                && (old.numbers == new.numbers || old.is_bare() || new.is_bare());
            let follows = same_source && is_weak && is_memory;
            let is_signal = *event == Event::KilledBySignal && is_memory;
            if same || follows || is_signal {
                // Loggers print a message before its traceback, and notebooks its name.
                if same && (known.phase.is_none() || known.place.is_none()) {
                    let (phase, frame, server) = moment(&self.known[own].traceback);
                    known.server = known.server.or(server);
                    known.phase = known.phase.or(phase);
                    known.place = known.place.take().or(frame);
                }
                if old.is_bare() && !new.is_bare() {
                    known.message = message;
                    // What had no figures announced this one.
                    known.times = 0;
                }
                return match same {
                    true => Outcome::Told(place),
                    false => Outcome::Nothing,
                };
            }
            // The kernel says more than the signal.
            if old.event == Event::KilledBySignal && is_of_host(event) {
                self.incidents[place] = self.incident(source, pending, message);
                // What was read of the signal before holds no more.
                for state in &mut self.known {
                    state.last_message.clear();
                    state.outcome = Outcome::Nothing;
                }
                return Outcome::Told(place);
            }
        }
        if self.incidents.len() == MOST_FAILURES {
            return Outcome::LeftOut;
        }
        let incident = self.incident(source, pending, message);
        self.incidents.push(incident);
        Outcome::Told(self.incidents.len() - 1)
    }
}

/// What the traceback before tells: what was done, the innermost line outside of installed
/// packages, and whose program it is.
fn moment(traceback: &Traceback) -> (Option<Phase>, Option<Frame>, Option<Server>) {
    const INSTALLED: [&str; 5] = [
        "site-packages",
        "dist-packages",
        "/lib/python",
        "<frozen",
        "<string>",
    ];
    let frames = traceback.frames();
    let is_own = |frame: &&Frame| {
        let is_installed = INSTALLED.iter().any(|folder| frame.file.contains(folder));
        !is_installed && frame.function != "<module>"
    };
    let place = frames.iter().rev().find(is_own).cloned();
    (phase(&frames), place, server(&frames))
}

fn is_of_host(event: &Event) -> bool {
    matches!(
        event,
        Event::HostKilled | Event::HostAllocation | Event::SharedMemory
    )
}

fn length_change(state: &State) -> Option<LengthChange> {
    /// Batches that make a usual one.
    const FEWEST: usize = 8;
    let (last, before) = state.lengths.split_last()?;
    let mut before = before.to_vec();
    before.sort_by(f64::total_cmp);
    let usual = *before
        .get(before.len() / 2)
        .filter(|_| before.len() >= FEWEST)?;
    Some(LengthChange { usual, last: *last })
}
