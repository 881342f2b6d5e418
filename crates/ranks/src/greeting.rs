//! What ranks say to each other before they are one run.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::Refusal;

/// The version of this protocol; a connection that opens otherwise is not from a rank.
pub(crate) const PROTOCOL: &str = "cinch ranks 1";

/// Settings are a few kilobytes; what is longer is no greeting.
const MAX_FRAME_BYTES: u32 = 4 << 20;

/// A stranger that connects and says nothing is given up after this.
const GREETING_TIME: Duration = Duration::from_secs(5);

/// What must be the same on every rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// Of cinch.
    pub version: String,
    pub settings: BTreeMap<String, String>,
}

/// A rank as the others know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub host: String,
    pub pid: u32,
    /// Where it takes connections of other ranks.
    pub address: SocketAddr,
}

/// The first frame of a connection to rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Opening {
    Join(Join),
    Watch { key: u64, rank: usize },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Join {
    pub protocol: String,
    pub run: String,
    pub rank: usize,
    pub num_ranks: usize,
    pub host: String,
    pub pid: u32,
    /// Where this rank takes connections of others; on the address that it comes from.
    pub port: u16,
    pub greeting: Greeting,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Welcome {
        key: u64,
        members: Vec<Member>,
    },
    Refused(Refusal),
    /// Another run meets here.
    OtherRun,
}

impl Join {
    /// Why this rank is not one of rank 0's run.
    pub fn refusal(&self, num_ranks: usize, first: &Greeting) -> Option<Refusal> {
        let rank = self.rank;
        if self.greeting.version != first.version {
            return Some(Refusal::Versions {
                rank,
                version: self.greeting.version.clone(),
                of_rank_0: first.version.clone(),
            });
        }
        if self.num_ranks != num_ranks {
            return Some(Refusal::WorldSizes {
                rank,
                num_ranks: self.num_ranks,
                of_rank_0: num_ranks,
            });
        }
        let (own, first) = (&self.greeting.settings, &first.settings);
        let keys: BTreeSet<&String> = own.keys().chain(first.keys()).collect();
        let differing = keys
            .into_iter()
            .filter(|key| own.get(*key) != first.get(*key));
        let differences: Vec<_> = differing
            .map(|key| (key.clone(), own.get(key).cloned(), first.get(key).cloned()))
            .collect();
        (!differences.is_empty()).then_some(Refusal::Settings { rank, differences })
    }
}

/// Sends a frame: its length and JSON.
pub(crate) fn tell(stream: &mut TcpStream, what: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(what)?;
    let mut frame = Vec::with_capacity(text.len() + 4);
    frame.extend_from_slice(&(text.len() as u32).to_le_bytes());
    frame.extend_from_slice(&text);
    stream.write_all(&frame)
}

/// Reads a frame that is to come within `limit`.
pub(crate) fn hear<T: DeserializeOwned>(stream: &mut TcpStream, limit: Duration) -> io::Result<T> {
    stream.set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_FRAME_BYTES {
        return Err(io::Error::other("it is no rank of cinch"));
    }
    let mut text = vec![0; length as usize];
    stream.read_exact(&mut text)?;
    stream.set_read_timeout(None)?;
    Ok(serde_json::from_slice(&text)?)
}

/// The first frame of a connection that somebody opened.
pub(crate) fn hear_opening<T: DeserializeOwned>(stream: &mut TcpStream) -> io::Result<T> {
    hear(stream, GREETING_TIME)
}
