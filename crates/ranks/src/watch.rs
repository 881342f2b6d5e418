//! Whether the other ranks live. Beside the connections on which numbers go, every rank has one to
//! rank 0 on which both beat. Rank 0 is the one that decides who was lost first, and tells the
//! others, so that all of them name the same rank.
//!
//! A killed process is found at once: its connections close. One that is stopped, or whose machine
//! is gone, is found by its silence. One that beats but does not come to an exchange is given up
//! after a longer time: beats say whom their sender waits for, and at the end of such a chain is
//! the one that is late. Whoever waits in an exchange then is let go, because its connections are
//! shut.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Cause, Loss};
use crate::greeting::{Member, hear, tell};
use crate::limits::Limits;

/// What is said on a watched connection. After a beat, whom its sender waits for and for how many
/// milliseconds; after a loss, what it is.
const BEAT: u8 = b'.';
const LOST: u8 = b'!';
const LEAVING: u8 = b'-';

/// Waits for nobody.
const NOBODY: u32 = u32::MAX;

/// The watch's threads need little.
const STACK_BYTES: usize = 128 << 10;

/// Once a connection closed, this long is waited for rank 0's word on who was lost first.
const VERDICT_TIME: Duration = Duration::from_secs(2);

/// Called once when a rank is lost.
pub(crate) type OnLoss = Box<dyn FnOnce(&Loss) + Send>;

/// The watch of one rank over the others.
pub(crate) struct Watch {
    shared: Arc<Shared>,
}

struct Shared {
    rank: usize,
    members: Vec<Member>,
    limits: Limits,
    state: Mutex<State>,
    changed: Condvar,
    /// Set as soon as a rank is lost, to be asked without a lock.
    is_lost: AtomicBool,
}

#[derive(Default)]
struct State {
    loss: Option<Loss>,
    /// The ranks that said that they leave.
    left: Vec<usize>,
    /// Connections on which this rank beats, by the rank at their other end.
    watched: Vec<(usize, TcpStream)>,
    /// Those on which numbers go, to be shut.
    links: Vec<TcpStream>,
    /// Whom the exchange waits for, and since when.
    waiting: Option<(usize, Instant)>,
    /// The same of other ranks, as far as they said.
    others_wait: Vec<(usize, usize, Duration)>,
    on_loss: Option<OnLoss>,
}

impl Watch {
    /// Starts to watch: rank 0 over connections to all others, another over the one to rank 0.
    pub fn start(
        rank: usize,
        members: Vec<Member>,
        limits: Limits,
        watched: Vec<(usize, TcpStream)>,
        links: Vec<TcpStream>,
    ) -> io::Result<Self> {
        let mut own = Vec::new();
        for (other, stream) in &watched {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(limits.beat()))?;
            stream.set_write_timeout(Some(limits.silence))?;
            own.push((*other, stream.try_clone()?));
        }
        let shared = Arc::new(Shared {
            rank,
            members,
            limits,
            state: Mutex::new(State {
                watched: own,
                links,
                ..State::default()
            }),
            changed: Condvar::new(),
            is_lost: AtomicBool::new(false),
        });
        for (other, stream) in watched {
            let shared = shared.clone();
            thread::Builder::new()
                .name(format!("cinch-watch-{other}"))
                .stack_size(STACK_BYTES)
                .spawn(move || shared.watch(other, stream))?;
        }
        Ok(Self { shared })
    }

    pub fn members(&self) -> &[Member] {
        &self.shared.members
    }

    /// Has `then` called when a rank is lost, on a thread of the watch; at once where one is.
    pub fn on_loss(&self, then: OnLoss) {
        let mut state = self.shared.lock();
        match state.loss.clone() {
            None => state.on_loss = Some(then),
            Some(loss) => {
                drop(state);
                then(&loss);
            }
        }
    }

    pub fn loss(&self) -> Option<Loss> {
        match self.shared.is_lost.load(Ordering::Acquire) {
            true => self.shared.lock().loss.clone(),
            false => None,
        }
    }

    /// Says whom an exchange waits for from now on.
    pub fn waits_for(&self, rank: Option<usize>) {
        self.shared.lock().waiting = rank.map(|rank| (rank, Instant::now()));
    }

    /// Who was lost, after the connection to a rank closed. That rank may only have followed
    /// another, which rank 0 knows.
    pub fn verdict(&self, rank: usize) -> Loss {
        let state = self.shared.lock();
        let waited = self
            .shared
            .changed
            .wait_timeout_while(state, VERDICT_TIME, |state| state.loss.is_none());
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &state.loss {
            Some(loss) => loss.clone(),
            None => {
                drop(state);
                self.shared.lose(self.shared.loss_of(rank, Cause::Ended))
            }
        }
    }

    /// Tells the others that this rank ends with an error.
    pub fn fail(&self, problem: String) {
        let (rank, cause) = (self.shared.rank, Cause::Failed(problem));
        self.shared.lose(self.shared.loss_of(rank, cause));
    }

    /// Says goodbye: what closes from now on is no loss.
    pub fn leave(&self) {
        let mut state = self.shared.lock();
        for (_, stream) in &mut state.watched {
            // Who is gone already needs no goodbye.
            let _ = stream.write_all(&[LEAVING]);
        }
        let rank = self.shared.rank;
        state.left.push(rank);
    }
}

impl Drop for Watch {
    /// Ends the watch's threads; to others, a rank that did not leave before is lost.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let rank = self.shared.rank;
        state.left.push(rank);
        for (_, stream) in &state.watched {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn loss_of(&self, rank: usize, cause: Cause) -> Loss {
        let member = self.members.get(rank);
        Loss {
            rank,
            host: member.map_or_else(String::new, |member| member.host.clone()),
            pid: member.map_or(0, |member| member.pid),
            cause,
        }
    }

    /// Reads what comes on one connection, and beats on it.
    fn watch(&self, other: usize, mut stream: TcpStream) {
        let mut heard = Instant::now();
        let mut beaten = None::<Instant>;
        loop {
            if beaten.is_none_or(|last| last.elapsed() >= self.limits.beat()) {
                self.beat(other);
                beaten = Some(Instant::now());
            }
            let mut said = [0];
            match stream.read(&mut said) {
                Ok(0) => return self.closed(other),
                Ok(_) => heard = Instant::now(),
                Err(error) if is_timeout(&error) => {}
                Err(_) => return self.closed(other),
            }
            match said[0] {
                BEAT if self.hear_beat(other, &mut stream) => {}
                BEAT => return self.closed(other),
                LEAVING => self.lock().left.push(other),
                LOST => {
                    let loss = hear::<Loss>(&mut stream, self.limits.silence);
                    let loss = loss.unwrap_or_else(|_| self.loss_of(other, Cause::Ended));
                    self.lose(loss);
                    let _ = stream.set_read_timeout(Some(self.limits.beat()));
                }
                _ => {}
            }
            let silence = heard.elapsed();
            if silence > self.limits.silence && !self.has_left(other) {
                self.lose(self.loss_of(other, Cause::Silent(self.limits.silence)));
            }
            // Only rank 0 hears who waits for whom.
            if self.rank == 0
                && let Some(late) = self.late()
            {
                self.lose(self.loss_of(late, Cause::Waited(self.limits.exchange)));
            }
        }
    }

    /// Reads the rest of a beat; false where the connection closed.
    fn hear_beat(&self, other: usize, stream: &mut TcpStream) -> bool {
        let mut words = [0; 8];
        let _ = stream.set_read_timeout(Some(self.limits.silence));
        let heard = stream.read_exact(&mut words).is_ok();
        let _ = stream.set_read_timeout(Some(self.limits.beat()));
        let [rank, time] = [0, 4].map(|at| {
            let word = [words[at], words[at + 1], words[at + 2], words[at + 3]];
            u32::from_le_bytes(word)
        });
        let mut state = self.lock();
        state.others_wait.retain(|(waiting, ..)| *waiting != other);
        if heard && rank != NOBODY {
            let time = Duration::from_millis(u64::from(time));
            state.others_wait.push((other, rank as usize, time));
        }
        heard
    }

    /// The rank that others have waited for too long: one that itself waits for nobody.
    fn late(&self) -> Option<usize> {
        let state = self.lock();
        let own = state
            .waiting
            .map(|(rank, since)| (0, rank, since.elapsed()));
        let waits: Vec<_> = own
            .into_iter()
            .chain(state.others_wait.iter().copied())
            .collect();
        let too_long = waits.iter().find(|(.., time)| *time > self.limits.exchange);
        let (_, mut late, _) = *too_long?;
        for _ in 0..self.members.len() {
            match waits.iter().find(|(rank, ..)| *rank == late) {
                Some(&(_, next, _)) => late = next,
                None => return Some(late),
            }
        }
        None
    }

    fn has_left(&self, other: usize) -> bool {
        let state = self.lock();
        state.left.contains(&other) || state.left.contains(&self.rank)
    }

    fn closed(&self, other: usize) {
        if !self.has_left(other) {
            self.lose(self.loss_of(other, Cause::Ended));
        }
    }

    fn beat(&self, other: usize) {
        let mut state = self.lock();
        let (rank, time) = match state.waiting {
            Some((rank, since)) => (rank as u32, since.elapsed().as_millis() as u32),
            None => (NOBODY, 0),
        };
        let mut message = [BEAT; 9];
        message[1..5].copy_from_slice(&rank.to_le_bytes());
        message[5..].copy_from_slice(&time.to_le_bytes());
        let watched = state.watched.iter_mut().find(|(rank, _)| *rank == other);
        if let Some((_, stream)) = watched {
            // A connection that takes nothing is found by reading it.
            let _ = stream.write_all(&message);
        }
    }

    /// Records a loss, if it is the first, tells the other ranks, and lets go of whoever waits.
    /// Returns the one that was first.
    fn lose(&self, loss: Loss) -> Loss {
        let mut state = self.lock();
        if let Some(first) = &state.loss {
            return first.clone();
        }
        state.loss = Some(loss.clone());
        self.is_lost.store(true, Ordering::Release);
        // The lost one too: it may be alive, and late.
        for (_, stream) in &mut state.watched {
            let _ = stream.write_all(&[LOST]).and_then(|()| tell(stream, &loss));
        }
        for link in &state.links {
            let _ = link.shutdown(Shutdown::Both);
        }
        let then = state.on_loss.take();
        drop(state);
        self.changed.notify_all();
        if let Some(then) = then {
            then(&loss);
        }
        loss
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}
