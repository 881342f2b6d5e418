//! From PTX to kernels: declarations, scopes of names, labels. What an opcode means is `decode`'s.

use std::collections::HashMap;

use crate::decode::{Operand, decode};
use crate::error::PtxError;
use crate::lifetimes;
use crate::program::{Instruction, Kernel, Module, Op, Register, Special};
use crate::text::{Token, tokens};
use crate::{CONSTANTS, MAX_THREADS, SHARED_START};

/// The kernels of a source.
pub fn parse(text: &str) -> Result<Module, PtxError> {
    let mut parser = Parser {
        tokens: tokens(text),
        at: 0,
        symbols: HashMap::new(),
        constants: Vec::new(),
        shared_end: SHARED_START,
        dynamic_align: 16,
    };
    let kernels = parser.module()?;
    Ok(Module {
        kernels: kernels.into_iter().map(|k| (k.name.clone(), k)).collect(),
        constants: parser.constants,
    })
}

/// In place of the address of what is asked for at a launch.
const DYNAMIC: u64 = u64::MAX;

/// The bytes of an element of a declared type, `.f32` say.
fn bytes_of(ty: &str) -> Option<usize> {
    let bits = ty.trim_start_matches(|c: char| !c.is_ascii_digit());
    bits.parse().ok().map(|bits: usize| bits.div_ceil(8))
}

struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    /// Variables of the source, by name: their addresses.
    symbols: HashMap<String, u64>,
    constants: Vec<u8>,
    shared_end: usize,
    /// Of the shared memory that is asked for at a launch, which comes after all other.
    dynamic_align: usize,
}

/// Where a kernel's names are found.
struct Scope {
    names: HashMap<String, Register>,
    /// By prefix, the first of a range of registers.
    ranges: HashMap<String, Register>,
    number: usize,
}

/// A kernel's body while it is read.
struct Body {
    symbols: HashMap<String, u64>,
    scopes: Vec<Scope>,
    num_scopes: usize,
    num_registers: usize,
    local_bytes: usize,
    labels: HashMap<String, usize>,
    /// Instructions that go to a label, which may come later.
    branches: Vec<(usize, String)>,
    code: Vec<Instruction>,
}

impl Parser {
    fn module(&mut self) -> Result<Vec<Kernel>, PtxError> {
        let mut kernels = Vec::new();
        while self.at < self.tokens.len() {
            let word = self.word()?;
            match word.as_str() {
                ".version" | ".target" | ".address_size" => {
                    self.word()?;
                }
                ".visible" | ".extern" | ".weak" => {}
                ".global" | ".const" => self.constant()?,
                ".shared" => {
                    let (name, align, bytes) = self.variable()?;
                    let address = match bytes {
                        None => {
                            self.dynamic_align = self.dynamic_align.max(align);
                            DYNAMIC
                        }
                        Some(bytes) => self.shared(align, bytes),
                    };
                    self.symbols.insert(name, address);
                    self.expect(';')?;
                }
                ".entry" => kernels.push(self.kernel()?),
                _ => return Err(self.unknown(&word)),
            }
        }
        Ok(kernels)
    }

    /// What is asked for at a launch comes after what the kernel has anyway.
    fn dynamic_start(&self) -> usize {
        self.shared_end.next_multiple_of(self.dynamic_align)
    }

    fn shared(&mut self, align: usize, bytes: usize) -> u64 {
        let address = self.shared_end.next_multiple_of(align);
        self.shared_end = address + bytes;
        address as u64
    }

    /// `.align 4 .b8 name[64]`: name, alignment and bytes, which an open end has none of.
    fn variable(&mut self) -> Result<(String, usize, Option<usize>), PtxError> {
        let mut align = 1;
        let mut size = 1;
        loop {
            let word = self.word()?;
            if word == ".align" {
                align = self.number()?;
            } else if word.starts_with('.') {
                size = bytes_of(&word).ok_or_else(|| self.unknown(&word))?;
            } else {
                let count = if !self.next_is('[') {
                    Some(1)
                } else {
                    self.expect('[')?;
                    let count = match self.next_is(']') {
                        true => None,
                        false => Some(self.number()?),
                    };
                    self.expect(']')?;
                    count
                };
                return Ok((word, align, count.map(|count| count * size)));
            }
        }
    }

    fn constant(&mut self) -> Result<(), PtxError> {
        let begin = self.at;
        let (name, align, bytes) = self.variable()?;
        // The element's type is the last word before the name.
        let types = self.tokens[begin..self.at].iter();
        let size = types
            .filter_map(|(token, _)| token.word().filter(|word| word.starts_with('.')))
            .filter(|word| *word != ".align")
            .filter_map(bytes_of)
            .next_back()
            .unwrap_or(1);
        let bytes = bytes.ok_or_else(|| self.unknown(&name))?;
        let start = self.constants.len().next_multiple_of(align);
        self.constants.resize(start + bytes, 0);
        self.symbols.insert(name, CONSTANTS + start as u64);
        if self.next_is('=') {
            self.expect('=')?;
            let is_list = self.next_is('{');
            let mut values = Vec::new();
            while !self.next_is(';') {
                let (token, _) = self.next()?;
                match token {
                    Token::Word(word) => values.push((word, false)),
                    Token::Mark('-') => values.push((self.word()?, true)),
                    Token::Mark(_) => {}
                }
            }
            debug_assert!(is_list || values.len() == 1);
            for (index, (word, is_negative)) in values.into_iter().enumerate() {
                let value = number(&word).ok_or_else(|| self.unknown(&word))?;
                let value = if is_negative {
                    value.wrapping_neg()
                } else {
                    value
                };
                let at = start + index * size;
                self.constants[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
            }
        }
        self.expect(';')
    }

    fn kernel(&mut self) -> Result<Kernel, PtxError> {
        let name = self.word()?;
        let shared_before = self.shared_end;
        let mut symbols = self.symbols.clone();
        let parameters = self.parameters(&mut symbols)?;
        let mut cluster = 1;
        let mut max_threads = MAX_THREADS;
        while !self.next_is('{') {
            let word = self.word()?;
            match word.as_str() {
                ".explicitcluster" => {}
                ".minnctapersm" => {
                    self.number()?;
                }
                ".maxntid" | ".reqntid" | ".reqnctapercluster" => {
                    let sides = [self.number()?, self.after_comma()?, self.after_comma()?];
                    let product = sides.iter().product();
                    match word.as_str() {
                        ".reqnctapercluster" => cluster = product,
                        _ => max_threads = product,
                    }
                }
                _ => return Err(self.unknown(&word)),
            }
        }
        let mut body = Body {
            symbols,
            scopes: Vec::new(),
            num_scopes: 0,
            num_registers: Register::SINK.at as usize + 1,
            local_bytes: 0,
            labels: HashMap::new(),
            branches: Vec::new(),
            code: Vec::new(),
        };
        self.block(&mut body)?;
        for (instruction, label) in body.branches {
            let Some(&target) = body.labels.get(&label) else {
                return Err(PtxError::Unknown {
                    what: label,
                    line: body.code[instruction].line,
                });
            };
            body.code[instruction].op = Op::Branch(target);
        }
        let shared_bytes = self.dynamic_start() - SHARED_START;
        // What is declared in a kernel is its own.
        self.shared_end = shared_before;
        Ok(Kernel {
            name,
            parameters,
            num_rows: lifetimes::assign(&mut body.code),
            shared_bytes,
            local_bytes: body.local_bytes,
            max_threads,
            cluster,
            code: body.code,
        })
    }

    fn parameters(
        &mut self,
        symbols: &mut HashMap<String, u64>,
    ) -> Result<Vec<(usize, usize)>, PtxError> {
        let mut parameters = Vec::new();
        let mut end = 0_usize;
        self.expect('(')?;
        while !self.next_is(')') {
            let word = self.word()?;
            if word != ".param" {
                return Err(self.unknown(&word));
            }
            let (name, align, bytes) = self.variable()?;
            let bytes = bytes.ok_or_else(|| self.unknown(&name))?;
            // A number is aligned to its own size.
            let align = if align == 1 { bytes.min(8) } else { align };
            let begin = end.next_multiple_of(align);
            end = begin + bytes;
            symbols.insert(name, begin as u64);
            parameters.push((begin, bytes));
            if self.next_is(',') {
                self.expect(',')?;
            }
        }
        self.expect(')')?;
        Ok(parameters)
    }

    /// Statements in braces, with names of their own.
    fn block(&mut self, body: &mut Body) -> Result<(), PtxError> {
        self.expect('{')?;
        body.num_scopes += 1;
        body.scopes.push(Scope {
            names: HashMap::new(),
            ranges: HashMap::new(),
            number: body.num_scopes,
        });
        while !self.next_is('}') {
            self.statement(body)?;
        }
        self.expect('}')?;
        body.scopes.pop();
        Ok(())
    }

    fn statement(&mut self, body: &mut Body) -> Result<(), PtxError> {
        if self.next_is('{') {
            return self.block(body);
        }
        if self.next_is(';') {
            return self.expect(';');
        }
        let guard = if self.next_is('@') {
            self.expect('@')?;
            let is_negated = self.next_is('!');
            if is_negated {
                self.expect('!')?;
            }
            let name = self.word()?;
            let register = body.register(&name).ok_or_else(|| self.unknown(&name))?;
            Some((register, !is_negated))
        } else {
            None
        };
        let line = self.line();
        let begin = self.at;
        let word = self.word()?;
        if self.next_is(':') {
            self.expect(':')?;
            let label = body.local_label(&word);
            body.labels.insert(label, body.code.len());
            return Ok(());
        }
        match word.as_str() {
            ".reg" => return self.registers(body),
            ".pragma" => {
                self.word()?;
                return self.expect(';');
            }
            ".local" => {
                let (name, align, bytes) = self.variable()?;
                let bytes = bytes.ok_or_else(|| self.unknown(&name))?;
                let at = body.local_bytes.next_multiple_of(align);
                body.local_bytes = at + bytes;
                body.symbols.insert(name, at as u64);
                return self.expect(';');
            }
            ".shared" => {
                let (name, align, bytes) = self.variable()?;
                let bytes = bytes.ok_or_else(|| self.unknown(&name))?;
                let address = self.shared(align, bytes);
                body.symbols.insert(name, address);
                return self.expect(';');
            }
            _ => {}
        }
        let mut operands = Vec::new();
        while !self.next_is(';') {
            operands.push(self.operand(body)?);
            if self.next_is(',') {
                self.expect(',')?;
            }
        }
        let text = self.text(begin);
        self.expect(';')?;
        let unknown = || PtxError::Unknown {
            what: text.clone(),
            line,
        };
        if word == "bra" || word == "bra.uni" {
            let Some(Operand::Label(label)) = operands.pop() else {
                return Err(unknown());
            };
            body.branches.push((body.code.len(), label));
        }
        let (op, to, from) = decode(&word, &operands).ok_or_else(unknown)?;
        body.code.push(Instruction {
            guard,
            op,
            to,
            from,
            line,
            text,
        });
        Ok(())
    }

    /// `.reg .b32 %r<5>` or `.reg .pred done`.
    fn registers(&mut self, body: &mut Body) -> Result<(), PtxError> {
        let is_wide = bytes_of(&self.word()?) == Some(8);
        loop {
            let name = self.word()?;
            let first = Register {
                at: body.num_registers as u32,
                is_wide,
            };
            let Some(scope) = body.scopes.last_mut() else {
                return Err(self.unknown(&name));
            };
            if self.next_is('<') {
                self.expect('<')?;
                body.num_registers += self.number()?;
                self.expect('>')?;
                scope.ranges.insert(name, first);
            } else {
                body.num_registers += 1;
                scope.names.insert(name, first);
            }
            if !self.next_is(',') {
                return self.expect(';');
            }
            self.expect(',')?;
        }
    }

    fn operand(&mut self, body: &Body) -> Result<Operand, PtxError> {
        let (token, _) = self.next()?;
        match token {
            Token::Mark('{') => {
                let mut list = Vec::new();
                while !self.next_is('}') {
                    list.push(self.operand(body)?);
                    if self.next_is(',') {
                        self.expect(',')?;
                    }
                }
                self.expect('}')?;
                Ok(Operand::List(list))
            }
            Token::Mark('[') => self.memory(body),
            Token::Mark('-') => {
                let word = self.word()?;
                let value = number(&word).ok_or_else(|| self.unknown(&word))?;
                Ok(Operand::Value(value.wrapping_neg()))
            }
            Token::Word(word) => {
                let operand = self.named(&word, body);
                if self.next_is('|') {
                    self.expect('|')?;
                    let second = self.word()?;
                    return match (operand, self.named(&second, body)) {
                        (Operand::Register(a), Operand::Register(b)) => Ok(Operand::Pair(a, b)),
                        _ => Err(self.unknown(&second)),
                    };
                }
                Ok(operand)
            }
            Token::Mark(mark) => Err(self.unknown(&mark.to_string())),
        }
    }

    /// `base+8]`, or `base, {coordinates}]`.
    fn memory(&mut self, body: &Body) -> Result<Operand, PtxError> {
        let base = Box::new(self.operand(body)?);
        let mut offset = 0;
        if self.next_is('+') {
            self.expect('+')?;
            let is_negative = self.next_is('-');
            if is_negative {
                self.expect('-')?;
            }
            let word = self.word()?;
            let value = number(&word).ok_or_else(|| self.unknown(&word))? as i64;
            offset = if is_negative { -value } else { value };
        }
        let mut coordinates = Vec::new();
        if self.next_is(',') {
            self.expect(',')?;
            let Operand::List(list) = self.operand(body)? else {
                return Err(self.unknown("coordinates"));
            };
            coordinates = list;
        }
        self.expect(']')?;
        Ok(Operand::Memory {
            base,
            offset,
            coordinates,
        })
    }

    fn named(&self, word: &str, body: &Body) -> Operand {
        if word == "_" {
            return Operand::Register(Register::SINK);
        }
        if let Some(register) = body.register(word) {
            return Operand::Register(register);
        }
        if let Some(special) = special(word) {
            return Operand::Special(special);
        }
        if let Some(value) = number(word) {
            return Operand::Value(value);
        }
        match body.symbols.get(word) {
            Some(&DYNAMIC) => Operand::Value(self.dynamic_start() as u64),
            Some(&address) => Operand::Value(address),
            None => Operand::Label(body.label(word)),
        }
    }

    fn next(&mut self) -> Result<(Token, u32), PtxError> {
        let token = self.tokens.get(self.at).cloned();
        self.at += 1;
        token.ok_or(PtxError::Ends)
    }

    fn next_is(&self, mark: char) -> bool {
        (self.tokens.get(self.at)).is_some_and(|(token, _)| token.is(mark))
    }

    fn line(&self) -> u32 {
        self.tokens.get(self.at).map_or(0, |(_, line)| *line)
    }

    fn word(&mut self) -> Result<String, PtxError> {
        let (token, line) = self.next()?;
        match token {
            Token::Word(word) => Ok(word),
            Token::Mark(mark) => Err(PtxError::Unknown {
                what: mark.to_string(),
                line,
            }),
        }
    }

    fn number(&mut self) -> Result<usize, PtxError> {
        let word = self.word()?;
        word.parse().map_err(|_| self.unknown(&word))
    }

    fn after_comma(&mut self) -> Result<usize, PtxError> {
        self.expect(',')?;
        self.number()
    }

    fn expect(&mut self, mark: char) -> Result<(), PtxError> {
        let (token, line) = self.next()?;
        if token.is(mark) {
            return Ok(());
        }
        Err(PtxError::Unknown {
            what: format!("{token:?} where {mark} is expected"),
            line,
        })
    }

    fn unknown(&self, what: &str) -> PtxError {
        PtxError::Unknown {
            what: what.to_owned(),
            line: self.tokens.get(self.at - 1).map_or(0, |(_, line)| *line),
        }
    }

    /// What stands from a token up to here.
    fn text(&self, begin: usize) -> String {
        const MOST: usize = 24;
        let tokens = &self.tokens[begin..self.at];
        let mut text = String::new();
        for (token, _) in tokens.iter().take(MOST) {
            match token {
                Token::Word(word) => {
                    text += if text.is_empty() { "" } else { " " };
                    text += word;
                }
                Token::Mark(mark) => text.push(*mark),
            }
        }
        if tokens.len() > MOST {
            text += " …";
        }
        text
    }
}

impl Body {
    fn register(&self, name: &str) -> Option<Register> {
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let number = name[prefix.len()..].parse::<u32>();
        self.scopes.iter().rev().find_map(|scope| {
            let named = scope.names.get(name).copied();
            named.or_else(|| {
                let first = *scope.ranges.get(prefix)?;
                let at = first.at + number.clone().ok()?;
                Some(Register { at, ..first })
            })
        })
    }

    /// Labels of an inner block are its own, and the compiler's are the kernel's.
    fn local_label(&self, name: &str) -> String {
        let scope = self.scopes.last().map_or(0, |scope| scope.number);
        if name.starts_with('$') {
            name.to_owned()
        } else {
            format!("{scope}.{name}")
        }
    }

    fn label(&self, name: &str) -> String {
        self.local_label(name)
    }
}

fn special(word: &str) -> Option<Special> {
    if word == "%cluster_ctarank" {
        return Some(Special::ClusterRank);
    }
    let (name, dimension) = word.split_once('.')?;
    let dimension = ["x", "y", "z"].iter().position(|d| *d == dimension)?;
    Some(match name {
        "%tid" => Special::Thread(dimension),
        "%ntid" => Special::Threads(dimension),
        "%ctaid" => Special::Block(dimension),
        "%nctaid" => Special::Blocks(dimension),
        _ => return None,
    })
}

/// An integer, or the bits of a float.
fn number(word: &str) -> Option<u64> {
    for prefix in ["0f", "0F", "0d", "0D", "0x", "0X"] {
        if let Some(digits) = word.strip_prefix(prefix) {
            return u64::from_str_radix(digits, 16).ok();
        }
    }
    word.parse().ok()
}
