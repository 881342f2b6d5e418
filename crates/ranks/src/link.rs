//! A connection between two ranks on which numbers go.

use std::io::{self, Read, Write};
use std::net::TcpStream;

/// Before each message: the number of the exchange, and the bytes that follow.
pub(crate) const HEADER_BYTES: usize = 16;

pub(crate) struct Link {
    stream: TcpStream,
}

/// Why nothing came.
#[derive(Debug)]
pub(crate) enum LinkError {
    /// The connection is gone.
    Closed,
    /// The other rank is elsewhere in its step.
    OutOfStep(String),
}

impl Link {
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        // Sums are waited for: small messages go at once.
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        Ok(Self { stream })
    }

    /// Another hold on the connection, by which it can be shut from outside.
    pub fn handle(&self) -> io::Result<TcpStream> {
        self.stream.try_clone()
    }

    /// Sends a message whose bytes stand in `buffer` after room for the header.
    pub fn send(&mut self, exchange: u64, buffer: &mut [u8]) -> Result<(), LinkError> {
        let bytes = (buffer.len() - HEADER_BYTES) as u64;
        buffer[..8].copy_from_slice(&exchange.to_le_bytes());
        buffer[8..HEADER_BYTES].copy_from_slice(&bytes.to_le_bytes());
        self.stream.write_all(buffer).map_err(|_| LinkError::Closed)
    }

    /// Receives a message that fills `bytes`.
    pub fn receive(&mut self, exchange: u64, bytes: &mut [u8]) -> Result<(), LinkError> {
        let mut header = [0; HEADER_BYTES];
        self.stream
            .read_exact(&mut header)
            .map_err(|_| LinkError::Closed)?;
        let words = header.as_chunks::<8>().0;
        let found = (u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1]));
        let wanted = (exchange, bytes.len() as u64);
        if found != wanted {
            return Err(LinkError::OutOfStep(format!(
                "{} bytes in exchange {} were sent where {} in exchange {} were due",
                found.1, found.0, wanted.1, wanted.0
            )));
        }
        self.stream.read_exact(bytes).map_err(|_| LinkError::Closed)
    }
}
