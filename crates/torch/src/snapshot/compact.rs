//! Dictionaries of a pickle that are made small as soon as they are complete: frames, stacks of
//! frames, and events.

use std::io::BufRead;

use super::check_event;
use super::pickle::{Content, Machine, Result, Value};
use crate::trace::{Action, Event, StackId};

/// Keys that are looked up, interned first so that their numbers are known.
macro_rules! keys {
    ($($name:ident = $text:literal),* $(,)?) => {
        #[expect(non_camel_case_types, reason = "the names of the keys")]
        #[derive(Clone, Copy)]
        enum Key { $($name),* }
        pub(super) const KEYS: &[&str] = &[$($text),*];
    };
}

keys! {
    action = "action",
    size = "size",
    addr = "addr",
    device_free = "device_free",
    stream = "stream",
    time_us = "time_us",
    frames = "frames",
    filename = "filename",
    line = "line",
    name = "name",
}

impl<R: BufRead> Machine<R> {
    pub(super) fn set_items(&mut self, items: Vec<Value>) -> Result<()> {
        let Value::Dict(dict) = self.top()? else {
            return Err("keys are set of something that is not a dictionary".into());
        };
        if !items.len().is_multiple_of(2) {
            return Err("a key has no value".into());
        }
        let mut added: Vec<(Value, Value)> = items
            .chunks_exact(2)
            .map(|pair| (pair[0], pair[1]))
            .collect();
        for (key, value) in &mut added {
            if *key == Value::Text(Key::frames as u32)
                && let Value::List(list) = *value
            {
                *value = self.stack_of(list);
            }
        }
        let Content::Pairs(pairs) = &mut self.containers[dict as usize].content else {
            return Err("keys are set of something that is not a dictionary".into());
        };
        pairs.append(&mut added);
        let pairs = std::mem::take(pairs);
        if let Some(frame) = self.frame_of(&pairs) {
            self.compact(dict, Value::Frame(frame));
            self.set_top(Value::Frame(frame));
        } else if let Some(event) = self.event_of(&pairs)? {
            self.events.push(event);
            self.compact(dict, Value::Opaque);
            self.set_top(Value::Event((self.events.len() - 1) as u32));
        } else {
            self.containers[dict as usize].content = Content::Pairs(pairs);
        }
        Ok(())
    }

    /// A list of frames, once it is some dictionary's `frames`.
    fn stack_of(&mut self, list: u32) -> Value {
        let values = match &self.containers[list as usize].content {
            Content::Values(values) => values,
            Content::Compact(stack) => return *stack,
            Content::Pairs(_) | Content::Trace(_) => return Value::List(list),
        };
        let frames: Option<Vec<u32>> = values
            .iter()
            .map(|value| match value {
                Value::Frame(frame) => Some(*frame),
                _ => None,
            })
            .collect();
        let Some(frames) = frames else {
            return Value::List(list);
        };
        let stack = Value::Stack(self.frames.stack(&frames));
        self.compact(list, stack);
        stack
    }

    fn frame_of(&mut self, pairs: &[(Value, Value)]) -> Option<u32> {
        let Value::Text(file) = find(pairs, Key::filename)? else {
            return None;
        };
        let Value::Int(line) = find(pairs, Key::line)? else {
            return None;
        };
        let Value::Text(function) = find(pairs, Key::name)? else {
            return None;
        };
        Some(
            self.frames
                .frame(file, line.try_into().unwrap_or(0), function),
        )
    }

    /// The event and its stream.
    fn event_of(&self, pairs: &[(Value, Value)]) -> Result<Option<(Event, u64)>> {
        let Some(Value::Text(action)) = find(pairs, Key::action) else {
            return Ok(None);
        };
        let number = |key| match find(pairs, key) {
            Some(Value::Int(number)) => number as u64,
            _ => 0,
        };
        let action = Action::parse(self.frames.text(action));
        let event = Event {
            size: number(Key::size),
            address: match action {
                Action::OutOfMemory => number(Key::device_free),
                _ => number(Key::addr),
            },
            time: number(Key::time_us),
            stack: match find(pairs, Key::frames) {
                Some(Value::Stack(stack)) => stack,
                _ => StackId::EMPTY,
            },
            stream: 0,
            action,
        };
        check_event(&event)?;
        Ok(Some((event, number(Key::stream))))
    }
}

fn find(pairs: &[(Value, Value)], key: Key) -> Option<Value> {
    let key = Value::Text(key as u32);
    pairs
        .iter()
        .find(|&&(name, _)| name == key)
        .map(|&(_, value)| value)
}
