//! From bytes as they come to lines: any line end, UTF-16, and lines without end in pieces.

use memchr::memchr2;

/// A longer line comes in pieces of this size, so that what is held stays bounded.
pub const LONGEST_LINE: usize = 16 << 10;

/// How the bytes are to be read, as the first of them say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Unknown,
    /// UTF-8, or whatever else has line ends as ASCII does.
    Bytes,
    /// What PowerShell's redirection writes.
    Utf16 {
        big_endian: bool,
    },
}

/// Cuts a stream into lines. `\n`, `\r\n` and the `\r` of progress bars end one.
#[derive(Debug)]
pub struct Lines {
    encoding: Encoding,
    /// The beginning of the stream, until the encoding is known; later the odd byte of UTF-16.
    head: Vec<u8>,
    /// The beginning of a line whose end has not come yet.
    rest: Vec<u8>,
    decoded: Vec<u8>,
    /// The first half of a character that UTF-16 writes as two.
    surrogate: Option<u16>,
    /// Whether the last byte was a `\r`, whose `\n` may follow.
    after_return: bool,
}

/// Bytes that are looked at to tell UTF-16 from text.
const HEAD: usize = 64;

impl Default for Lines {
    fn default() -> Self {
        Self {
            encoding: Encoding::Unknown,
            head: Vec::new(),
            rest: Vec::new(),
            decoded: Vec::new(),
            surrogate: None,
            after_return: false,
        }
    }
}

impl Lines {
    /// Takes the next bytes, and gives each line that is complete, without its end.
    pub fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8])) {
        match self.encoding {
            Encoding::Unknown => {
                self.head.extend_from_slice(bytes);
                if self.head.len() >= HEAD {
                    self.settle(&mut each);
                }
            }
            Encoding::Bytes => self.cut(bytes, &mut each),
            Encoding::Utf16 { big_endian } => self.widen(bytes, big_endian, &mut each),
        }
    }

    /// The last line, which need not have an end.
    pub fn finish(&mut self, mut each: impl FnMut(&[u8])) {
        if self.encoding == Encoding::Unknown {
            self.settle(&mut each);
        }
        if !self.rest.is_empty() {
            each(&self.rest);
            self.rest.clear();
        }
    }

    fn settle(&mut self, each: &mut impl FnMut(&[u8])) {
        let head = std::mem::take(&mut self.head);
        self.encoding = encoding_of(&head[..head.len().min(HEAD)]);
        let mark = match (self.encoding, head.as_slice()) {
            (Encoding::Utf16 { .. }, [0xff, 0xfe, ..] | [0xfe, 0xff, ..]) => 2,
            (Encoding::Bytes, [0xef, 0xbb, 0xbf, ..]) => 3,
            _ => 0,
        };
        match self.encoding {
            Encoding::Utf16 { big_endian } => self.widen(&head[mark..], big_endian, each),
            _ => self.cut(&head[mark..], each),
        }
    }

    fn widen(&mut self, bytes: &[u8], big_endian: bool, each: &mut impl FnMut(&[u8])) {
        let mut decoded = std::mem::take(&mut self.decoded);
        decoded.clear();
        self.head.extend_from_slice(bytes);
        let units = self.head.chunks_exact(2);
        let odd = units.remainder().to_vec();
        for unit in units {
            let pair = [unit[0], unit[1]];
            let unit = match big_endian {
                true => u16::from_be_bytes(pair),
                false => u16::from_le_bytes(pair),
            };
            let first = self.surrogate.take();
            let character = match (first, unit) {
                (None, 0xd800..0xdc00) => {
                    self.surrogate = Some(unit);
                    continue;
                }
                (Some(first), 0xdc00..0xe000) => {
                    let high = u32::from(first - 0xd800) << 10;
                    char::from_u32(0x10000 + high + u32::from(unit - 0xdc00))
                }
                (_, unit) => char::from_u32(u32::from(unit)),
            };
            let character = character.unwrap_or(char::REPLACEMENT_CHARACTER);
            let mut buffer = [0; 4];
            decoded.extend_from_slice(character.encode_utf8(&mut buffer).as_bytes());
        }
        self.head = odd;
        self.cut(&decoded, each);
        self.decoded = decoded;
    }

    fn cut(&mut self, mut bytes: &[u8], each: &mut impl FnMut(&[u8])) {
        while !bytes.is_empty() {
            if self.after_return && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                self.after_return = false;
                continue;
            }
            self.after_return = false;
            let end = memchr2(b'\n', b'\r', bytes);
            let line = &bytes[..end.unwrap_or(bytes.len())];
            let room = LONGEST_LINE - self.rest.len();
            if line.len() > room {
                // In place where nothing is held: most of such a line is never copied.
                let piece = &line[..room];
                match self.rest.is_empty() {
                    true => each(piece),
                    false => {
                        self.rest.extend_from_slice(piece);
                        each(&self.rest);
                        self.rest.clear();
                    }
                }
                bytes = &bytes[room..];
                continue;
            }
            match end {
                None => {
                    self.rest.extend_from_slice(line);
                    return;
                }
                Some(end) => {
                    match self.rest.is_empty() {
                        true => each(line),
                        false => {
                            self.rest.extend_from_slice(line);
                            each(&self.rest);
                            self.rest.clear();
                        }
                    }
                    self.after_return = bytes[end] == b'\r';
                    bytes = &bytes[end + 1..];
                }
            }
        }
    }
}

fn encoding_of(head: &[u8]) -> Encoding {
    match head {
        [0xff, 0xfe, ..] => return Encoding::Utf16 { big_endian: false },
        [0xfe, 0xff, ..] => return Encoding::Utf16 { big_endian: true },
        _ => {}
    }
    // Mostly ASCII in UTF-16: every other byte is zero, and no other is.
    let zeros = |first: usize| {
        let mut places = head.iter().skip(first).step_by(2);
        places.len() > 3 && places.all(|byte| *byte == 0)
    };
    match (zeros(0), zeros(1)) {
        (false, true) => Encoding::Utf16 { big_endian: false },
        (true, false) => Encoding::Utf16 { big_endian: true },
        _ => Encoding::Bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(pieces: &[&[u8]]) -> Vec<String> {
        let mut lines = Lines::default();
        let mut found = Vec::new();
        let mut each = |line: &[u8]| found.push(String::from_utf8_lossy(line).into_owned());
        for piece in pieces {
            lines.feed(piece, &mut each);
        }
        lines.finish(&mut each);
        found
    }

    #[test]
    fn every_line_end_ends_a_line_once() {
        let text = b"one\r\ntwo\n\nthree\rfour";
        let expected = ["one", "two", "", "three", "four"];
        assert_eq!(lines(&[text]), expected);
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(lines(&bytes), expected);
    }

    #[test]
    fn utf_16_is_read_with_and_without_its_mark() {
        let text = "CUDA out of memory \u{1f4a5}\r\nnext";
        let little: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let big: Vec<u8> = text.encode_utf16().flat_map(u16::to_be_bytes).collect();
        let expected = ["CUDA out of memory \u{1f4a5}", "next"];
        let marked = [&[0xff, 0xfe], little.as_slice()].concat();
        assert_eq!(lines(&[&marked]), expected);
        assert_eq!(lines(&marked.chunks(3).collect::<Vec<_>>()), expected);
        assert_eq!(lines(&[&[0xfe, 0xff], &big]), expected);
        let ascii: Vec<u8> = "a line\nb"
            .encode_utf16()
            .flat_map(u16::to_le_bytes)
            .collect();
        assert_eq!(lines(&[&ascii]), ["a line", "b"]);
    }

    #[test]
    fn the_first_bytes_alone_decide_the_encoding() {
        let mut text: Vec<u8> = [b'a', 0].repeat(HEAD / 2);
        text.extend_from_slice(b"plain\nplain");
        let pieces: Vec<&[u8]> = text.chunks(HEAD).collect();
        assert_eq!(lines(&[&text]), lines(&pieces));
    }

    #[test]
    fn a_line_without_end_comes_in_pieces() {
        let long = vec![b'x'; 3 * LONGEST_LINE + 5];
        let found = lines(&long.chunks(1000).collect::<Vec<_>>());
        assert_eq!(found.iter().map(String::len).max(), Some(LONGEST_LINE));
        assert_eq!(found.concat().len(), long.len());
        assert_eq!(lines(&[&long]).concat().len(), long.len());
    }
}
