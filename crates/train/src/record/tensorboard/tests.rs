//! Reads the written files back with a reader that shares no code with the writer: its own
//! bit-by-bit checksum and its own protobuf decoding.

use super::*;

/// CRC-32C by long division, one bit at a time.
fn checksum(bytes: &[u8]) -> u32 {
    let mut remainder = u32::MAX;
    for byte in bytes {
        for bit in 0..8 {
            let carry = (remainder ^ u32::from(byte >> bit)) & 1;
            remainder = (remainder >> 1) ^ (carry * 0x82F6_3B78);
        }
    }
    !remainder
}

fn masked(bytes: &[u8]) -> u32 {
    checksum(bytes).rotate_left(17).wrapping_add(0xa282_ead8)
}

#[derive(Debug, PartialEq)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take(&mut self, count: usize) -> Vec<u8> {
        let (head, tail) = self.0.split_at(count);
        self.0 = tail;
        head.to_vec()
    }

    fn number(&mut self, count: usize) -> u64 {
        self.take(count)
            .iter()
            .rev()
            .fold(0, |value, &byte| value * 256 + u64::from(byte))
    }

    fn varint(&mut self) -> u64 {
        let mut value = 0;
        for position in 0.. {
            let byte = self.number(1);
            value += (byte % 128) << (7 * position);
            if byte < 128 {
                break;
            }
        }
        value
    }

    fn records(mut self) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        while !self.0.is_empty() {
            let length_bytes = self.0[..8].to_vec();
            let length = self.number(8) as usize;
            assert_eq!(self.number(4) as u32, masked(&length_bytes));
            let data = self.take(length);
            assert_eq!(self.number(4) as u32, masked(&data));
            records.push(data);
        }
        records
    }

    fn fields(mut self) -> Vec<(u64, Field)> {
        let mut fields = Vec::new();
        while !self.0.is_empty() {
            let key = self.varint();
            let field = match key % 8 {
                0 => Field::Number(self.varint()),
                1 => Field::Number(self.number(8)),
                2 => {
                    let length = self.varint() as usize;
                    Field::Bytes(self.take(length))
                }
                5 => Field::Number(self.number(4)),
                other => panic!("wire type {other}"),
            };
            fields.push((key / 8, field));
        }
        fields
    }
}

#[derive(Debug, PartialEq)]
enum Event {
    Version(String),
    Start,
    Scalar(String, f32),
}

/// The events of a file with their steps; every wall time must be that of now.
fn events(path: &Path) -> Vec<(u64, Event)> {
    let contents = fs::read(path).unwrap();
    let records = Reader(&contents).records();
    records.iter().map(|record| event(record)).collect()
}

fn event(record: &[u8]) -> (u64, Event) {
    let fields = Reader(record).fields();
    let [
        (1, Field::Number(time)),
        (2, Field::Number(step)),
        (what, Field::Bytes(data)),
    ] = fields.as_slice()
    else {
        panic!("unexpected fields {fields:?}");
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    assert!((f64::from_bits(*time) - now.as_secs_f64()).abs() < 100.0);
    let event = match what {
        3 => Event::Version(String::from_utf8(data.clone()).unwrap()),
        5 => {
            let summary = Reader(data).fields();
            let [(1, Field::Bytes(point))] = summary.as_slice() else {
                panic!("unexpected summary {summary:?}");
            };
            let point = Reader(point).fields();
            let [(1, Field::Bytes(tag)), (2, Field::Number(bits))] = point.as_slice() else {
                panic!("unexpected value {point:?}");
            };
            let tag = String::from_utf8(tag.clone()).unwrap();
            Event::Scalar(tag, f32::from_bits(*bits as u32))
        }
        7 => {
            assert_eq!(Reader(data).fields(), [(1, Field::Number(1))]);
            Event::Start
        }
        other => panic!("unexpected event field {other}"),
    };
    (*step, event)
}

#[test]
fn the_independent_checksum_is_right() {
    assert_eq!(checksum(b"123456789"), 0xE306_9283);
}

#[test]
fn scalars_come_back_in_order() {
    let run = tempfile::tempdir().unwrap();
    let mut writer = EventWriter::create(run.path().join("events")).unwrap();
    let long_tag = "t".repeat(300);
    let points = [
        ("train/loss", 0, 10.5),
        ("train/loss", 127, -1.0e-30),
        ("größe", 128, f32::INFINITY),
        (&long_tag, 1 << 40, f32::MAX),
    ];
    for (tag, step, value) in points {
        writer.scalar(tag, step, value).unwrap();
    }
    writer.flush().unwrap();
    let found = events(writer.path());
    assert_eq!(found[0], (0, Event::Version("brain.Event:2".to_owned())));
    assert_eq!(found[1], (0, Event::Start));
    for (found, (tag, step, value)) in found[2..].iter().zip(points) {
        assert_eq!(found, &(step, Event::Scalar(tag.to_owned(), value)));
    }
    assert_eq!(found.len(), 6);
}

#[test]
fn a_flushed_point_is_in_the_file_while_the_writer_lives() {
    let run = tempfile::tempdir().unwrap();
    let mut writer = EventWriter::create(run.path()).unwrap();
    for step in 1..=3 {
        writer.scalar("loss", step, 1.0).unwrap();
        writer.flush().unwrap();
        assert_eq!(events(writer.path()).len() as u64, 2 + step);
    }
}

#[test]
fn a_resumed_run_starts_a_session_in_a_later_file() {
    let run = tempfile::tempdir().unwrap();
    let mut paths = vec![EventWriter::create(run.path()).unwrap().path().to_owned()];
    // All within one second, by one process.
    for step in [100, 200] {
        let writer = EventWriter::resume(run.path(), step).unwrap();
        assert_eq!(events(writer.path())[1], (step + 1, Event::Start));
        paths.push(writer.path().to_owned());
    }
    assert!(paths.is_sorted() && paths[0] != paths[1] && paths[1] != paths[2]);
}

#[test]
fn the_file_name_has_five_parts() {
    let run = tempfile::tempdir().unwrap();
    let writer = EventWriter::create(run.path()).unwrap();
    let name = writer.path().file_name().unwrap().to_str().unwrap();
    let rest = name.strip_prefix("events.out.tfevents.").unwrap();
    let (seconds, rest) = rest.split_once('.').unwrap();
    assert_eq!(seconds.len(), 10);
    assert!(rest.ends_with(&format!(".{}.0", process::id())), "{name}");
}
