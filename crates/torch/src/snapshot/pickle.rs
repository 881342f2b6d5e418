//! A reader of Python's pickle format for one kind of content: memory snapshots.
//!
//! Pickle is a program for a stack machine. This one knows the instructions that build
//! dictionaries, lists, tuples, strings and numbers, and refuses those that import or call
//! something, so a file can do nothing but be read.
//!
//! Snapshots reach gigabytes, nearly all of it events. Dictionaries of an event or a frame are
//! turned into compact values as soon as they are complete, and their memory is used again; what
//! grows with the file is 32 bytes an event and 16 for each remembered object. Lengths in the
//! file are not believed: strings are read piece by piece.

use std::io::{BufRead, Read};

use super::compact::KEYS;
use crate::trace::{Event, Frames, StackId, Trace};

/// What is on the stack, 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(u32),
    List(u32),
    Dict(u32),
    Tuple(u32),
    /// A dictionary with file, line and function.
    Frame(u32),
    /// A list of frames.
    Stack(StackId),
    /// A dictionary with an action, waiting for its list.
    Event(u32),
    /// Bytes, or an event that its list has taken in.
    Opaque,
}

#[derive(Debug)]
pub(super) enum Content {
    Values(Vec<Value>),
    Pairs(Vec<(Value, Value)>),
    Trace(Trace),
    /// It was made compact while something else still pointed here.
    Compact(Value),
}

pub(super) struct Container {
    pub content: Content,
    /// Where the file remembers it.
    pub memo: Option<usize>,
    /// More than one value may point here, so that its memory must not be used again. PyTorch
    /// gives blocks without a stack one and the same empty list, and a segment may wait on the
    /// stack with it while its blocks are read.
    pub shared: bool,
}

/// The root of a pickle, with everything it refers to.
pub(super) struct Pickle {
    pub root: Value,
    pub frames: Frames,
    containers: Vec<Container>,
}

/// A problem and the byte at which it was found.
#[derive(Debug)]
pub(super) struct PickleError {
    pub offset: u64,
    pub problem: String,
}

pub(super) type Result<T> = std::result::Result<T, String>;

impl Pickle {
    pub fn read(reader: impl BufRead) -> std::result::Result<Self, PickleError> {
        let mut machine = Machine::new(reader);
        match machine.run() {
            Ok(root) => Ok(Self {
                root,
                frames: machine.frames,
                containers: machine.containers,
            }),
            Err(problem) => Err(PickleError {
                offset: machine.offset,
                problem,
            }),
        }
    }

    /// The value of a key of a dictionary.
    pub fn get(&self, value: Value, key: &str) -> Option<Value> {
        let Value::Dict(index) = value else {
            return None;
        };
        let Content::Pairs(pairs) = &self.containers[index as usize].content else {
            return None;
        };
        pairs
            .iter()
            .find(|&&(name, _)| matches!(name, Value::Text(text) if self.frames.text(text) == key))
            .map(|&(_, value)| value)
    }

    /// The items of a list or tuple.
    pub fn items(&self, value: Value) -> Option<&[Value]> {
        let (Value::List(index) | Value::Tuple(index)) = value else {
            return None;
        };
        match &self.containers[index as usize].content {
            Content::Values(values) => Some(values),
            Content::Pairs(_) | Content::Trace(_) | Content::Compact(_) => None,
        }
    }

    /// The events that a list held. An empty list is an empty trace.
    pub fn take_trace(&mut self, value: Value) -> Option<Trace> {
        let Value::List(index) = value else {
            return None;
        };
        match &mut self.containers[index as usize].content {
            Content::Trace(trace) => Some(std::mem::take(trace)),
            Content::Values(values) if values.is_empty() => Some(Trace::default()),
            Content::Values(_) | Content::Pairs(_) | Content::Compact(_) => None,
        }
    }
}

pub(super) struct Machine<R> {
    reader: R,
    offset: u64,
    pub frames: Frames,
    pub containers: Vec<Container>,
    pub vacant: Vec<u32>,
    stack: Vec<Value>,
    marks: Vec<usize>,
    pub memo: Vec<Value>,
    /// Events that no list has taken in yet.
    pub events: Vec<(Event, u64)>,
    /// For the text that is being read.
    buffer: Vec<u8>,
}

impl<R: BufRead> Machine<R> {
    fn new(reader: R) -> Self {
        let mut frames = Frames::default();
        for key in KEYS {
            frames.intern(key);
        }
        Self {
            reader,
            offset: 0,
            frames,
            containers: Vec::new(),
            vacant: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
            events: Vec::new(),
            buffer: Vec::new(),
        }
    }

    fn run(&mut self) -> Result<Value> {
        let [first, version] = self.bytes()?;
        if first != 0x80 {
            return Err("this is not a pickle of protocol 2 or later".into());
        }
        if !(2..=5).contains(&version) {
            return Err(format!(
                "pickle protocol {version} is unknown: 2 to 5 are read"
            ));
        }
        loop {
            let [code] = self.bytes()?;
            if code == b'.' {
                return self.pop();
            }
            self.execute(code)?;
        }
    }

    fn execute(&mut self, code: u8) -> Result<()> {
        match code {
            // FRAME and its length, PROTO and its version: without effect here.
            0x95 => drop(self.bytes::<8>()?),
            0x80 => drop(self.bytes::<1>()?),
            b'N' => self.stack.push(Value::None),
            0x88 => self.stack.push(Value::Bool(true)),
            0x89 => self.stack.push(Value::Bool(false)),
            b'J' => {
                let number = i32::from_le_bytes(self.bytes()?);
                self.stack.push(Value::Int(number.into()));
            }
            b'K' => {
                let [number] = self.bytes()?;
                self.stack.push(Value::Int(number.into()));
            }
            b'M' => {
                let number = u16::from_le_bytes(self.bytes()?);
                self.stack.push(Value::Int(number.into()));
            }
            0x8a => {
                let [length] = self.bytes()?;
                self.long(length.into())?;
            }
            0x8b => {
                let length = u32::from_le_bytes(self.bytes()?);
                self.long(length.into())?;
            }
            b'G' => {
                let number = f64::from_be_bytes(self.bytes()?);
                self.stack.push(Value::Float(number));
            }
            0x8c => {
                let [length] = self.bytes()?;
                self.text(length.into())?;
            }
            b'X' => {
                let length = u32::from_le_bytes(self.bytes()?);
                self.text(length.into())?;
            }
            0x8d => {
                let length = u64::from_le_bytes(self.bytes()?);
                self.text(length)?;
            }
            b'C' => {
                let [length] = self.bytes()?;
                self.skip(length.into())?;
            }
            b'B' => {
                let length = u32::from_le_bytes(self.bytes()?);
                self.skip(length.into())?;
            }
            0x8e | 0x96 => {
                let length = u64::from_le_bytes(self.bytes()?);
                self.skip(length)?;
            }
            b']' => self.push_list(Vec::new()),
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.append(items)?;
            }
            b'}' => {
                let dict = self.container(Content::Pairs(Vec::new()));
                self.stack.push(Value::Dict(dict));
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set_items(vec![key, value])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set_items(items)?;
            }
            b')' => self.push_tuple(Vec::new()),
            b't' => {
                let items = self.pop_mark()?;
                self.push_tuple(items);
            }
            0x85..=0x87 => {
                let mut items = Vec::new();
                for _ in 0x85..=code {
                    items.push(self.pop()?);
                }
                items.reverse();
                self.push_tuple(items);
            }
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let value = self.top()?;
                self.share(value);
                self.stack.push(value);
            }
            0x94 => self.remember(self.memo.len())?,
            b'q' => {
                let [place] = self.bytes()?;
                self.remember(place.into())?;
            }
            b'r' => {
                let place = u32::from_le_bytes(self.bytes()?);
                self.remember(place as usize)?;
            }
            b'h' => {
                let [place] = self.bytes()?;
                self.recall(place.into())?;
            }
            b'j' => {
                let place = u32::from_le_bytes(self.bytes()?);
                self.recall(place as usize)?;
            }
            b'c' | b'i' | b'o' | b'R' | b'b' | b'Q' | b'P' | 0x81..=0x84 | 0x92 | 0x93 => {
                return Err(
                    "the file wants to import or call Python code, which no snapshot does".into(),
                );
            }
            _ => {
                return Err(format!(
                    "pickle instruction 0x{code:02x} does not occur in a snapshot"
                ));
            }
        }
        Ok(())
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.reader
            .read_exact(&mut bytes)
            .map_err(|error| ended(&error))?;
        self.offset += N as u64;
        Ok(bytes)
    }

    /// A little-endian two's complement number of any length, of which 64 bits are enough.
    fn long(&mut self, length: u64) -> Result<()> {
        if length > 9 {
            return Err(format!(
                "a number of {length} bytes does not occur in a snapshot"
            ));
        }
        let mut bytes = [0; 16];
        self.reader
            .read_exact(&mut bytes[..length as usize])
            .map_err(|error| ended(&error))?;
        self.offset += length;
        let unused = 128 - 8 * length as u32;
        let number = match unused {
            128 => 0,
            unused => i128::from_le_bytes(bytes) << unused >> unused,
        };
        // Streams are pointers: the upper half of 64 bits is kept as it is.
        let number = i64::try_from(number)
            .or_else(|_| u64::try_from(number).map(|number| number as i64))
            .map_err(|_| format!("{number} does not fit 64 bits"))?;
        self.stack.push(Value::Int(number));
        Ok(())
    }

    fn text(&mut self, length: u64) -> Result<()> {
        self.buffer.clear();
        let read = self
            .reader
            .by_ref()
            .take(length)
            .read_to_end(&mut self.buffer)
            .map_err(|error| ended(&error))?;
        self.offset += read as u64;
        if (read as u64) < length {
            return Err(format!("the file ends in a text of {length} bytes"));
        }
        // Python writes lone surrogates of odd file names as invalid UTF-8.
        let text = String::from_utf8_lossy(&self.buffer);
        let text = self.frames.intern(&text);
        self.stack.push(Value::Text(text));
        Ok(())
    }

    fn skip(&mut self, length: u64) -> Result<()> {
        let skipped = std::io::copy(&mut self.reader.by_ref().take(length), &mut std::io::sink())
            .map_err(|error| ended(&error))?;
        self.offset += skipped;
        if skipped < length {
            return Err(format!("the file ends in {length} bytes of data"));
        }
        self.stack.push(Value::Opaque);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value> {
        if self
            .marks
            .last()
            .is_some_and(|&mark| mark == self.stack.len())
        {
            return Err("a value is taken that was never given".into());
        }
        self.stack
            .pop()
            .ok_or_else(|| "a value is taken that was never given".into())
    }

    pub fn top(&self) -> Result<Value> {
        self.stack
            .last()
            .copied()
            .ok_or_else(|| "a value is used that was never given".into())
    }

    fn pop_mark(&mut self) -> Result<Vec<Value>> {
        let mark = self
            .marks
            .pop()
            .ok_or("a group ends that was never begun")?;
        Ok(self.stack.split_off(mark))
    }

    fn container(&mut self, content: Content) -> u32 {
        let container = Container {
            content,
            memo: None,
            shared: false,
        };
        match self.vacant.pop() {
            Some(index) => {
                self.containers[index as usize] = container;
                index
            }
            None => {
                self.containers.push(container);
                (self.containers.len() - 1) as u32
            }
        }
    }

    fn push_list(&mut self, items: Vec<Value>) {
        let list = self.container(Content::Values(items));
        self.stack.push(Value::List(list));
    }

    fn push_tuple(&mut self, items: Vec<Value>) {
        let tuple = self.container(Content::Values(items));
        self.stack.push(Value::Tuple(tuple));
    }

    fn remember(&mut self, place: usize) -> Result<()> {
        let value = self.top()?;
        if let Value::List(index) | Value::Dict(index) = value {
            let container = &mut self.containers[index as usize];
            container.shared |= container.memo.replace(place).is_some();
        }
        if place == self.memo.len() {
            self.memo.push(value);
        } else {
            // Python numbers them in order; another number would be room for nothing.
            *self
                .memo
                .get_mut(place)
                .ok_or_else(|| format!("object {place} is remembered before its predecessors"))? =
                value;
        }
        Ok(())
    }

    fn recall(&mut self, place: usize) -> Result<()> {
        let value = *self
            .memo
            .get(place)
            .ok_or_else(|| format!("object {place} is used before it is given"))?;
        self.share(value);
        self.stack.push(value);
        Ok(())
    }

    fn share(&mut self, value: Value) {
        if let Value::List(index) | Value::Dict(index) = value {
            self.containers[index as usize].shared = true;
        }
    }

    /// Forgets a container for a compact value, which whatever still points to it now means.
    /// Its memory is used again unless there may be such a thing.
    pub fn compact(&mut self, index: u32, remembered: Value) {
        let container = &mut self.containers[index as usize];
        if let Some(memo) = container.memo.take()
            && let Some(place) = self.memo.get_mut(memo)
        {
            *place = remembered;
        }
        container.content = Content::Compact(remembered);
        if !container.shared {
            self.vacant.push(index);
        }
    }

    /// Puts another value on top of the stack.
    pub fn set_top(&mut self, value: Value) {
        if let Some(top) = self.stack.last_mut() {
            *top = value;
        }
    }

    fn append(&mut self, items: Vec<Value>) -> Result<()> {
        let Value::List(list) = self.top()? else {
            return Err("items are added to something that is not a list".into());
        };
        let content = &mut self.containers[list as usize].content;
        let holds_events = items.iter().any(|item| matches!(item, Value::Event(_)));
        if holds_events && matches!(content, Content::Values(values) if values.is_empty()) {
            *content = Content::Trace(Trace::default());
        }
        match content {
            Content::Values(values) if !holds_events => values.extend(items),
            Content::Trace(trace) => {
                for item in items {
                    let Value::Event(index) = item else {
                        return Err("a list of events holds something else".into());
                    };
                    let &(mut event, stream) = self
                        .events
                        .get(index as usize)
                        .ok_or("an event is in two lists")?;
                    event.stream = trace.stream(stream);
                    trace.events.push(event);
                }
                self.events.clear();
            }
            _ => return Err("a list of events holds something else".into()),
        }
        Ok(())
    }
}

fn ended(error: &std::io::Error) -> String {
    if error.kind() == std::io::ErrorKind::UnexpectedEof {
        "the file ends too early".into()
    } else {
        error.to_string()
    }
}
