//! How ranks find each other. Rank 0 listens; the others come to it, say who they are, and are
//! told where everybody is, or why they are refused. Then each connects to those before it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{RanksError, Refusal, ranks_named};
use crate::greeting::{
    Answer, Greeting, Join, Member, Opening, PROTOCOL, hear, hear_opening, tell,
};
use crate::identity::{Identity, Meeting};
use crate::limits::{Limits, MEETING_VARIABLE};

/// Between two looks for a connection, or two attempts at one.
const RETRY_TIME: Duration = Duration::from_millis(20);

/// Which ranks are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// Each with rank 0, for what the loop agrees on.
    Star,
    /// Each with each, for large sums too.
    Mesh,
}

/// The connections of a rank after the meeting.
pub(crate) struct Met {
    pub members: Vec<Member>,
    /// By rank; none with itself, and in a star none but with rank 0.
    pub links: Vec<Option<TcpStream>>,
    /// Rank 0's with the others, the others' with rank 0.
    pub watched: Vec<(usize, TcpStream)>,
}

/// One rank's side of the meeting.
pub(crate) struct Party<'a> {
    pub identity: &'a Identity,
    pub greeting: &'a Greeting,
    pub limits: Limits,
    pub topology: Topology,
}

/// Opens the socket at which rank 0 meets the others.
pub(crate) fn listen(meeting: &Meeting) -> Result<TcpListener, RanksError> {
    if meeting.is_inherited {
        let inherited = io::stdin()
            .as_fd()
            .try_clone_to_owned()
            .map(TcpListener::from);
        let listening = inherited.and_then(|listener| listener.local_addr().map(|_| listener));
        return listening.map_err(|error| RanksError::Listen {
            address: "the socket that `cinch launch` gave it".to_owned(),
            problem: error.to_string(),
        });
    }
    // Names of this machine may mean one that only itself sees, so all are listened on, unless
    // every rank is here.
    let local = matches!(meeting.host.as_str(), "localhost" | "127.0.0.1");
    let ip = match local {
        true => IpAddr::V4(Ipv4Addr::LOCALHOST),
        false => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    let mut problem = None;
    for &port in &meeting.ports {
        let address = SocketAddr::new(ip, port);
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => problem = problem.or(Some(RanksError::listen(address, &error))),
        }
    }
    Err(problem.unwrap_or_else(|| RanksError::Listen {
        address: meeting.host.clone(),
        problem: "no port is left".to_owned(),
    }))
}

impl Party<'_> {
    fn rank(&self) -> usize {
        self.identity.rank
    }

    fn num_ranks(&self) -> usize {
        self.identity.num_ranks
    }

    fn address(&self) -> String {
        let Meeting { host, ports, .. } = &self.identity.meeting;
        match ports.as_slice() {
            [] => host.clone(),
            [port] => format!("{host}:{port}"),
            [first, .., last] => format!("{host}:{first}-{last}"),
        }
    }

    /// Rank 0's side.
    pub fn host(&self, listener: TcpListener) -> Result<Met, RanksError> {
        let deadline = Instant::now() + self.limits.meeting;
        let mut guests: Vec<Option<(Join, TcpStream)>> = Vec::new();
        guests.resize_with(self.num_ranks(), || None);
        let missing = |guests: &[Option<(Join, TcpStream)>]| -> Vec<usize> {
            (1..guests.len())
                .filter(|&rank| guests[rank].is_none())
                .collect()
        };
        let (mut refusal, mut refused) = (None, None);
        while refusal.is_none() && !missing(&guests).is_empty() {
            let Some(mut stream) = accept(&listener, deadline) else {
                // Those that came may say why the rest did not: another number of ranks.
                break;
            };
            let Ok(Opening::Join(join)) = hear_opening(&mut stream) else {
                continue;
            };
            if join.protocol != PROTOCOL || join.run != self.identity.meeting.run {
                let _ = tell(&mut stream, &Answer::OtherRun);
                continue;
            }
            refusal = join.refusal(self.num_ranks(), self.greeting);
            let rank = join.rank;
            match guests.get_mut(rank) {
                Some(place @ None) if rank > 0 => *place = Some((join, stream)),
                taken => {
                    let known = taken.and_then(|taken| taken.as_ref());
                    let known = known.map(|(known, _)| known.host.clone());
                    let hosts = [known.unwrap_or_else(own_host), join.host];
                    refusal = refusal.or(Some(Refusal::Twice { rank, hosts }));
                    refused = Some(stream);
                }
            }
        }
        if let Some(reason) = refusal {
            let guests = guests.iter_mut().flatten().map(|(_, stream)| stream);
            for stream in guests.chain(&mut refused) {
                let _ = tell(stream, &Answer::Refused(reason.clone()));
            }
            return Err(RanksError::Refused { reason });
        }
        let late = missing(&guests);
        if !late.is_empty() {
            return Err(self.missing(&late));
        }
        self.welcome(&listener, deadline, guests.into_iter().flatten().collect())
    }

    fn missing(&self, late: &[usize]) -> RanksError {
        RanksError::Missing {
            missing: ranks_named(late),
            num_ranks: self.num_ranks(),
            address: self.address(),
            waited: self.limits.meeting,
            variable: MEETING_VARIABLE,
        }
    }

    /// Tells everybody who takes part, and waits for the connections that are watched.
    fn welcome(
        &self,
        listener: &TcpListener,
        deadline: Instant,
        guests: Vec<(Join, TcpStream)>,
    ) -> Result<Met, RanksError> {
        let own = listener
            .local_addr()
            .map_err(|error| self.unreachable(&error))?;
        let mut members = vec![Member {
            host: own_host(),
            pid: std::process::id(),
            address: own,
        }];
        for (join, stream) in &guests {
            let from = stream.peer_addr().map_err(|_| self.missing(&[join.rank]))?;
            members.push(Member {
                host: join.host.clone(),
                pid: join.pid,
                address: SocketAddr::new(from.ip(), join.port),
            });
        }
        let key = new_key();
        let mut links = vec![None];
        for (join, mut stream) in guests {
            let members = members.clone();
            tell(&mut stream, &Answer::Welcome { key, members })
                .map_err(|_| self.missing(&[join.rank]))?;
            links.push(Some(stream));
        }
        let mut watched: Vec<(usize, TcpStream)> = Vec::new();
        while watched.len() + 1 < self.num_ranks() {
            let Some(mut stream) = accept(listener, deadline) else {
                let came = |rank: &usize| watched.iter().any(|(other, _)| other == rank);
                let late: Vec<usize> = (1..self.num_ranks()).filter(|rank| !came(rank)).collect();
                return Err(self.missing(&late));
            };
            match hear_opening(&mut stream) {
                Ok(Opening::Watch { key: told, rank }) if told == key => {
                    watched.push((rank, stream));
                }
                _ => {}
            }
        }
        Ok(Met {
            members,
            links,
            watched,
        })
    }

    fn unreachable(&self, error: &io::Error) -> RanksError {
        RanksError::NoMeeting {
            rank: self.rank(),
            address: self.address(),
            waited: self.limits.meeting,
            problem: error.to_string(),
        }
    }

    /// The side of every other rank.
    pub fn visit(&self) -> Result<Met, RanksError> {
        let deadline = Instant::now() + self.limits.meeting;
        let (mut first, listener, key, members) = self.knock(deadline)?;
        let met = self.connect(&mut first, &listener, (key, &members), deadline);
        let (mut links, watched) = met.map_err(|error| self.unreachable(&error))?;
        links[0] = Some(first);
        Ok(Met {
            members,
            links,
            watched: vec![(0, watched)],
        })
    }

    /// Comes to rank 0 until it answers. It may not be there yet, and at some of the ports there
    /// may be others.
    fn knock(
        &self,
        deadline: Instant,
    ) -> Result<(TcpStream, TcpListener, u64, Vec<Member>), RanksError> {
        let meeting = &self.identity.meeting;
        let mut problem = io::Error::other("nobody answered");
        loop {
            for &port in &meeting.ports {
                match self.ask(port, deadline) {
                    Ok((stream, listener, Answer::Welcome { key, members })) => {
                        return Ok((stream, listener, key, members));
                    }
                    Ok((_, _, Answer::Refused(reason))) => {
                        return Err(RanksError::Refused { reason });
                    }
                    Ok((_, _, Answer::OtherRun)) => {
                        problem = io::Error::other("another run meets there");
                    }
                    Err(error) => problem = error,
                }
            }
            if Instant::now() >= deadline {
                return Err(self.unreachable(&problem));
            }
            thread::sleep(RETRY_TIME);
        }
    }

    fn ask(&self, port: u16, deadline: Instant) -> io::Result<(TcpStream, TcpListener, Answer)> {
        let meeting = &self.identity.meeting;
        let mut addresses = (meeting.host.as_str(), port).to_socket_addrs()?;
        let address = addresses.find(SocketAddr::is_ipv4);
        let address = address.ok_or_else(|| io::Error::other("the name has no IPv4 address"))?;
        let mut stream = TcpStream::connect_timeout(&address, left(deadline))?;
        // Others reach this rank where rank 0 does.
        let listener = TcpListener::bind((stream.local_addr()?.ip(), 0))?;
        let join = Join {
            protocol: PROTOCOL.to_owned(),
            run: meeting.run.clone(),
            rank: self.rank(),
            num_ranks: self.num_ranks(),
            host: own_host(),
            pid: std::process::id(),
            port: listener.local_addr()?.port(),
            greeting: self.greeting.clone(),
        };
        tell(&mut stream, &Opening::Join(join))?;
        let answer = hear(&mut stream, left(deadline))?;
        Ok((stream, listener, answer))
    }

    /// The connection to be watched, and where sums go between all, those with the other ranks:
    /// each connects to those before it and is connected to by those after it.
    fn connect(
        &self,
        first: &mut TcpStream,
        listener: &TcpListener,
        (key, members): (u64, &[Member]),
        deadline: Instant,
    ) -> io::Result<(Vec<Option<TcpStream>>, TcpStream)> {
        let mut watched = TcpStream::connect_timeout(&first.peer_addr()?, left(deadline))?;
        let rank = self.rank();
        tell(&mut watched, &Opening::Watch { key, rank })?;
        let mut links: Vec<Option<TcpStream>> = Vec::new();
        links.resize_with(self.num_ranks(), || None);
        if self.topology == Topology::Star {
            return Ok((links, watched));
        }
        for (other, member) in members.iter().enumerate().take(rank).skip(1) {
            let mut stream = TcpStream::connect_timeout(&member.address, left(deadline))?;
            tell(&mut stream, &(key, rank))?;
            links[other] = Some(stream);
        }
        while links.iter().skip(rank + 1).any(Option::is_none) {
            let Some(mut stream) = accept(listener, deadline) else {
                return Err(io::Error::other("other ranks did not connect"));
            };
            match hear_opening::<(u64, usize)>(&mut stream) {
                Ok((told, other)) if told == key && other > rank && other < links.len() => {
                    links[other] = Some(stream);
                }
                _ => {}
            }
        }
        Ok((links, watched))
    }
}

/// The next connection; None where none comes in time.
fn accept(listener: &TcpListener, deadline: Instant) -> Option<TcpStream> {
    listener.set_nonblocking(true).ok()?;
    loop {
        if let Ok((stream, _)) = listener.accept() {
            return stream.set_nonblocking(false).is_ok().then_some(stream);
        }
        if Instant::now() >= deadline {
            return None;
        }
        thread::sleep(RETRY_TIME);
    }
}

/// What is left until a deadline; a connection is always given some time.
fn left(deadline: Instant) -> Duration {
    let left = deadline.saturating_duration_since(Instant::now());
    left.max(RETRY_TIME)
}

/// The name of this machine.
pub(crate) fn own_host() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

/// A number that nobody guesses by accident: standard hashing is seeded by the system.
fn new_key() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}
