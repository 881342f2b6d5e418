//! A small answerer of HTTP requests on one address: `GET` of a few paths, one answer a
//! connection. It is for a page on this machine and for a scraper, not for the open network.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::error::MonitorError;

/// How long a client may take to ask.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest request that is read.
const LONGEST: u64 = 16 << 10;

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub content_type: &'static str,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn text(body: String) -> Self {
        Self {
            content_type: "text/plain; version=0.0.4; charset=utf-8",
            body: body.into_bytes(),
        }
    }

    pub fn html(body: String) -> Self {
        Self {
            content_type: "text/html; charset=utf-8",
            body: body.into_bytes(),
        }
    }
}

/// An address that listens.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
}

impl Server {
    /// Listens on `address`: `PORT` and `:PORT` mean this machine alone.
    pub fn listen(address: &str) -> Result<Self, MonitorError> {
        let failed = |source| MonitorError::Listen {
            address: address.to_owned(),
            source,
        };
        let port = address.strip_prefix(':').unwrap_or(address);
        let whole = match port.parse::<u16>() {
            Ok(port) => format!("127.0.0.1:{port}"),
            Err(_) => address.to_owned(),
        };
        let listener = TcpListener::bind(whole).map_err(failed)?;
        Ok(Self { listener })
    }

    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Whether only this machine can reach it.
    pub fn is_local(&self) -> bool {
        self.address()
            .is_some_and(|address| address.ip().is_loopback())
    }

    /// Answers requests for ever, one after the other. `reply` gives the answer to a path.
    pub fn serve(&self, reply: impl Fn(&str) -> Option<Reply>) {
        for stream in self.listener.incoming().flatten() {
            // A client that goes away in the middle harms nobody.
            let _ = self.answer(stream, &reply);
        }
    }

    fn answer(
        &self,
        stream: TcpStream,
        reply: impl Fn(&str) -> Option<Reply>,
    ) -> std::io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut reader = BufReader::new(stream.try_clone()?).take(LONGEST);
        let mut request = String::new();
        reader.read_line(&mut request)?;
        let mut host = String::new();
        loop {
            let mut line = String::new();
            let read = reader.read_line(&mut line)?;
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("host")
            {
                host = value.trim().to_owned();
            }
            if read == 0 || line.trim().is_empty() {
                break;
            }
        }
        let mut words = request.split_whitespace();
        let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let path = path.split('?').next().unwrap_or("");
        let plain = |text: &str| Reply {
            content_type: "text/plain; charset=utf-8",
            body: text.as_bytes().to_vec(),
        };
        let (status, reply) = match method {
            // A page of another site that makes its name point here would read what is shown.
            _ if self.is_local() && !is_local_name(&host) => {
                ("403 Forbidden", plain("only for this machine\n"))
            }
            "GET" | "HEAD" => match reply(path) {
                Some(reply) => ("200 OK", reply),
                None => ("404 Not Found", plain("nothing here\n")),
            },
            _ => ("405 Method Not Allowed", plain("only GET\n")),
        };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {}\r\nContent-Length: {}\r\nCache-Control: no-store\r\n\
             X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
            reply.content_type,
            reply.body.len()
        );
        let mut stream = stream;
        stream.write_all(head.as_bytes())?;
        if method != "HEAD" {
            stream.write_all(&reply.body)?;
        }
        stream.flush()
    }
}

/// Names under which a browser reaches this machine; none is one too, of a plain client.
fn is_local_name(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    ["", "localhost", "127.0.0.1", "[::1]"].contains(&name)
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;
    use std::thread;

    use super::*;

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn paths_are_answered_on_this_machine_alone() {
        let server = Server::listen("0").unwrap();
        assert!(server.is_local());
        let address = server.address().unwrap();
        thread::spawn(move || {
            server.serve(|path| (path == "/metrics").then(|| Reply::text("up 1\n".to_owned())));
        });
        let answer = ask(
            address,
            "GET /metrics?x=1 HTTP/1.1\r\nHost: localhost:80\r\n\r\n",
        );
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        assert!(answer.ends_with("\r\n\r\nup 1\n"), "{answer}");
        for (request, status) in [
            ("GET /other HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", "403"),
            ("nonsense\r\n\r\n", "405"),
        ] {
            let answer = ask(address, request);
            assert!(answer.contains(status), "{request}: {answer}");
        }
    }

    #[test]
    fn an_address_that_is_taken_is_told() {
        let first = Server::listen("127.0.0.1:0").unwrap();
        let address = first.address().unwrap().to_string();
        let message = Server::listen(&address).unwrap_err().to_string();
        assert!(
            message.contains(&address) && message.contains("hint:"),
            "{message}"
        );
        assert!(Server::listen("nowhere").is_err());
    }
}
