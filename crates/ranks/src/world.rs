//! The ranks of a run as one of them sees it.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::error::{Loss, RanksError};
use crate::exchange::Buffers;
use crate::greeting::{Greeting, Member};
use crate::identity::{Identity, Meeting};
use crate::limits::Limits;
use crate::link::Link;
use crate::meeting::{Met, Party, Topology, listen};
use crate::watch::Watch;

/// This rank's connections to the others, and the watch over them.
pub struct World {
    rank: usize,
    num_ranks: usize,
    topology: Topology,
    pub(crate) links: Vec<Option<Link>>,
    pub(crate) watch: Watch,
    pub(crate) buffers: Buffers,
    /// Exchanges so far: every rank counts the same ones.
    pub(crate) exchanges: u64,
    /// In which this rank stood in an exchange.
    pub(crate) waited: Duration,
    /// Whether waiting is limited by more than signs of life.
    pub(crate) is_patient: bool,
}

/// A world that the loop and its executor use in turn.
#[derive(Clone)]
pub struct SharedWorld(Arc<Mutex<World>>);

impl SharedWorld {
    pub fn new(world: World) -> Self {
        Self(Arc::new(Mutex::new(world)))
    }

    /// Everything here is one exchange after the other: who panicked in one has ended the run.
    pub fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl World {
    /// Meets the other ranks. Whoever has another version, other settings or another number of
    /// ranks is refused, on all ranks with the same words.
    pub fn join(
        identity: &Identity,
        greeting: &Greeting,
        limits: Limits,
        topology: Topology,
    ) -> Result<Self, RanksError> {
        let party = Party {
            identity,
            greeting,
            limits,
            topology,
        };
        let met = match identity.rank {
            0 => party.host(listen(&identity.meeting)?)?,
            _ => party.visit()?,
        };
        Self::new(&party, met)
    }

    /// Ranks in threads of one process, by rank.
    pub fn loopback(
        num_ranks: usize,
        greeting: &Greeting,
        limits: Limits,
        topology: Topology,
    ) -> Result<Vec<Self>, RanksError> {
        let failed = |problem: std::io::Error| RanksError::Listen {
            address: "127.0.0.1".to_owned(),
            problem: problem.to_string(),
        };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let identity = |rank| Identity {
            rank,
            num_ranks,
            local_rank: rank,
            local_ranks: num_ranks,
            meeting: Meeting {
                host: Ipv4Addr::LOCALHOST.to_string(),
                ports: vec![port],
                is_inherited: false,
                run: String::new(),
            },
        };
        let join = |rank: usize, listener: Option<TcpListener>| {
            let party = Party {
                identity: &identity(rank),
                greeting,
                limits,
                topology,
            };
            let met = match listener {
                Some(listener) => party.host(listener)?,
                None => party.visit()?,
            };
            Self::new(&party, met)
        };
        let join = &join;
        thread::scope(|scope| {
            let others: Vec<_> = (1..num_ranks)
                .map(|rank| scope.spawn(move || join(rank, None)))
                .collect();
            let mut worlds = vec![join(0, Some(listener))?];
            for other in others {
                match other.join() {
                    Ok(world) => worlds.push(world?),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            Ok(worlds)
        })
    }

    fn new(party: &Party<'_>, met: Met) -> Result<Self, RanksError> {
        let Identity {
            rank, num_ranks, ..
        } = *party.identity;
        let failed = |error: std::io::Error| RanksError::Address {
            address: party.identity.meeting.host.clone(),
            problem: error.to_string(),
        };
        let mut links = Vec::new();
        for stream in met.links {
            links.push(stream.map(Link::new).transpose().map_err(failed)?);
        }
        let handles = links.iter().flatten().map(Link::handle);
        let handles = handles.collect::<Result<_, _>>().map_err(failed)?;
        let (members, limits) = (met.members, party.limits);
        let watch = Watch::start(rank, members, limits, met.watched, handles).map_err(failed)?;
        Ok(Self {
            rank,
            num_ranks,
            topology: party.topology,
            links,
            watch,
            buffers: Buffers::new(),
            exchanges: 0,
            waited: Duration::ZERO,
            is_patient: false,
        })
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// The one that prints, and writes what there is one of.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// By rank.
    pub fn members(&self) -> &[Member] {
        self.watch.members()
    }

    /// How long this rank has stood in exchanges so far: it waited for others, and messages were on
    /// their way.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The rank that was lost, if one was.
    pub fn loss(&self) -> Option<Loss> {
        self.watch.loss()
    }

    /// Has `then` called as soon as a rank is lost, on another thread: this one may be in the
    /// middle of something that nothing ends.
    pub fn on_loss(&self, then: impl FnOnce(&Loss) + Send + 'static) {
        self.watch.on_loss(Box::new(then));
    }

    /// Tells the others that this rank ends with an error.
    pub fn fail(&self, problem: &str) {
        self.watch.fail(problem.to_owned());
    }

    /// Ends the run together: nobody leaves before all are done.
    pub fn leave(&mut self) -> Result<(), RanksError> {
        self.barrier()?;
        self.watch.leave();
        Ok(())
    }
}
