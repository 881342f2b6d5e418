use std::path::Path;

use super::*;
use crate::document::Document;
use crate::outline::rows::{Row, row, rows};

fn read(text: &str) -> Vec<Row> {
    rows(&outline(text).unwrap(), text)
}

#[test]
fn values_are_exactly_their_literals() {
    let text = "# é\r\na: &x 4 # c\r\nb: !!int \"5\"\r\nc:\r\n  # between\r\n  é7\r\nd:\r\ne: {k: 1, 'l': \"m\", n: }\r\nf: 1_000\r\ng: yes\r\nh:\r\n    i: 'q'  \r\n    j: 0x10";
    assert_eq!(
        read(text),
        [
            row("a", "4", "4", false),
            row("b", "5", "\"5\"", false),
            row("c", "\"é7\"", "é7", false),
            row("d", "null", "", false),
            row("e.k", "1", "1", false),
            row("e.l", "\"m\"", "\"m\"", false),
            row("e.n", "null", "", false),
            row("f", "1000", "1_000", false),
            row("g", "true", "yes", false),
            row("h.i", "\"q\"", "'q'", false),
            row("h.j", "16", "0x10", false),
        ]
    );
}

#[test]
fn closing_marks_end_a_value() {
    let text = "a: 'it''s' # 'c'\nb: \"x\\\" #\"  # d\nc: {d: {e: 1 } }   # {}\nf: { g: 'h' , i: [1 ] } # ]\nj: k # l\n";
    let outline = outline(text).unwrap();
    let raw: Vec<&str> = outline
        .leaves
        .iter()
        .map(|leaf| &text[leaf.value.clone()])
        .collect();
    assert_eq!(raw, ["'it''s'", "\"x\\\" #\"", "1", "'h'", "[1 ]", "k"]);
    let members: Vec<&str> = outline.tables[0]
        .members
        .iter()
        .map(|member| &text[member.value.clone()])
        .collect();
    assert_eq!(members[2], "{d: {e: 1 } }");
}

#[test]
fn aliases_and_merges_are_followed_and_held() {
    let text = "base: &base\n  batch: 4\n  deep: {x: 1}\nseq: &seq 256\nuse:\n  <<: *base\n  batch: 8\n  len: *seq\ncopy: *base\n";
    assert_eq!(
        read(text),
        [
            row("base.batch", "4", "4", true),
            row("base.deep.x", "1", "1", true),
            row("seq", "256", "256", true),
            row("use.batch", "8", "8", false),
            row("use.len", "256", "*seq", false),
            row("use.deep.x", "1", "1", true),
            row("copy.batch", "4", "4", true),
            row("copy.deep.x", "1", "1", true),
        ]
    );
    // Of several bases the first wins.
    let text = "a: &a {x: 1}\nb: &b {x: 2, y: 3}\nc:\n  <<: [*a, *b]\n";
    let merged: Vec<_> = read(text).split_off(3);
    assert_eq!(
        merged,
        [row("c.x", "1", "1", true), row("c.y", "3", "3", true)]
    );
}

#[test]
fn faults_have_places() {
    for (text, line) in [
        ("a: 1\n b: 2\n", 2),
        ("a: [1,\nb: 2", 2),
        ("b: 1\na: \"open\n", 2),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: *nowhere\n", 1),
        ("a: 1\n\tb: 2\n", 1),
    ] {
        match outline(text) {
            Err(Fault::Syntax { offset, .. }) => {
                let found = text[..offset].matches('\n').count() + 1;
                assert_eq!(found, line, "{text:?}");
            }
            other => panic!("{text:?}: {other:?}"),
        }
    }
    assert!(matches!(
        outline("a: 1\nb: 2\na: 3\n"),
        Err(Fault::Duplicate {
            first: 0,
            second: 10,
            ..
        })
    ));
    for text in ["", "# only\n", "---\n"] {
        assert_eq!(outline(text), Err(Fault::Empty), "{text:?}");
    }
    for text in ["- 1\n", "word"] {
        assert_eq!(outline(text), Err(Fault::NotSections), "{text:?}");
    }
}

#[test]
fn no_text_exhausts_stack_or_memory() {
    let mut laughs = String::from("a0: &a0 {x: 1, y: 2}\n");
    for level in 1..40 {
        let below = level - 1;
        laughs += &format!("a{level}: &a{level} {{x: *a{below}, y: *a{below}}}\n");
    }
    assert!(outline(&laughs).is_err());
    assert!(outline(&"[".repeat(100_000)).is_err());
    assert!(outline(&"a: {".repeat(10_000)).is_err());
    assert!(outline("a: &a {b: *a, <<: *a}\n").is_ok());
}

#[test]
fn a_bracket_may_close_below_its_key() {
    let text = "top:\n  files: [\n    \"a\",\n    \"b\",\n  ]\n  after: 1\n";
    let document = Document::read(Path::new("a.yaml"), text).unwrap();
    let keys: Vec<(String, usize)> = document
        .entries
        .iter()
        .map(|entry| (entry.key(), entry.value_at.line))
        .collect();
    assert_eq!(
        keys,
        [("top.files".to_owned(), 2), ("top.after".to_owned(), 6)]
    );
}
