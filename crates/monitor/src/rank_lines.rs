//! The ranks of a run, from `ranks.jsonl` in its folder, and as lines of text.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use cinch_config::Bytes;
use cinch_ranks::pace::{FILE_NAME, RankRow, RanksBegin, RanksLine, RanksTable, seconds};
use serde::Deserialize;

use crate::error::{IoContext, MonitorError};

/// The longest line that is read: that of some ten thousand ranks.
const LONGEST_LINE: u64 = 1 << 20;

#[derive(Deserialize)]
struct Numbered<T> {
    step: u64,
    #[serde(flatten)]
    line: T,
}

/// The ranks that train a run; none where one process does. Lines that cannot be read are left out.
pub fn read_ranks(folder: &Path) -> Result<Option<RanksTable>, MonitorError> {
    let path = folder.join(FILE_NAME);
    let file = match cinch_files::open_regular(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        file => file.at("read", &path)?,
    };
    let mut reader = BufReader::new(file);
    let mut table = RanksTable::default();
    loop {
        let mut line = Vec::new();
        let mut limited = reader.by_ref().take(LONGEST_LINE);
        let read = limited.read_until(b'\n', &mut line).at("read", &path)?;
        if read == 0 {
            return Ok(Some(table).filter(RanksTable::is_of_several));
        }
        if let Ok(Numbered { step, line }) = serde_json::from_slice::<Numbered<RanksBegin>>(&line) {
            table.begin(step, line);
        } else if let Ok(Numbered { step, line }) =
            serde_json::from_slice::<Numbered<RanksLine>>(&line)
        {
            table.add(step, &line);
        }
    }
}

/// A heading and a line for each rank, the slowest first, as many as there is room for.
pub fn rank_lines(table: &RanksTable, most: usize) -> Vec<String> {
    let mut rows: Vec<(usize, &RankRow)> = table.rows.iter().enumerate().collect();
    rows.sort_by(|(_, a), (_, b)| {
        let busy = |row: &RankRow| row.lately.busy_seconds();
        busy(b).total_cmp(&busy(a))
    });
    let slowest = table.slowest_lately();
    let heading = match slowest {
        None => ", and no step is logged yet".to_owned(),
        Some(slowest) if slowest.is_clear => {
            let facts = &table.rows[slowest.rank].facts;
            format!(
                ", slowest: rank {} on {} (process {})",
                slowest.rank, facts.host, facts.process
            )
        }
        Some(_) => ", none clearly slower than the others".to_owned(),
    };
    let titles = [
        "rank", "host", "process", "device", "computes", "waits", "memory", "plan",
    ];
    let heading = format!("{} ranks{heading}", rows.len());
    let mut lines = vec![heading, columns(titles.map(str::to_owned))];
    let room = most.saturating_sub(lines.len());
    let shown = match rows.len() > room {
        true => room.saturating_sub(1),
        false => rows.len(),
    };
    lines.extend(
        rows[..shown]
            .iter()
            .map(|(rank, row)| rank_line(*rank, row, table)),
    );
    if shown < rows.len() && room > 0 {
        lines.push(format!(
            "and {} more, which wait longer",
            rows.len() - shown
        ));
    }
    lines.truncate(most);
    lines
}

fn rank_line(rank: usize, row: &RankRow, table: &RanksTable) -> String {
    let memory = row.measured();
    let share = memory.map_or_else(String::new, |bytes| {
        let share = 100.0 * bytes as f64 / table.planned_bytes.max(1) as f64;
        format!("{share:.0} %")
    });
    let memory = memory.map_or_else(|| "-".to_owned(), |bytes| Bytes::new(bytes).to_string());
    columns([
        rank.to_string(),
        cut(&row.facts.host, 12),
        row.facts.process.to_string(),
        cut(&row.facts.device, 12),
        seconds(row.lately.busy_seconds()),
        seconds(row.lately.waited_seconds),
        memory,
        share,
    ])
}

/// Eighty columns of a terminal, the last one free.
fn columns([rank, host, process, device, computes, waits, memory, plan]: [String; 8]) -> String {
    format!(
        "{rank:>4}  {host:<12} {process:>8}  {device:<12} {computes:>9} {waits:>9}  {memory:>10} \
         {plan:>5}"
    )
}

/// The beginning of a text, with a mark where more follows.
fn cut(text: &str, width: usize) -> String {
    match text.chars().count() > width {
        true => text.chars().take(width - 1).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(text: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE_NAME), text).unwrap();
        folder
    }

    const BEGIN: &str = "{\"step\":0,\"members\":[{\"host\":\"a\",\"process\":1,\"device\":\"H100\"},\
        {\"host\":\"b\",\"process\":2,\"device\":\"H100\"}],\"planned_bytes\":1000}\n";
    const LINE: &str = "{\"step\":10,\"steps\":10,\"seconds\":[5.0,5.0],\"waited_seconds\":[4.0,1.0],\
        \"resident_bytes\":[1,2],\"device_used_bytes\":[900,null]}\n";

    #[test]
    fn damaged_lines_are_left_out_and_a_new_start_forgets_the_old() {
        let wild = "not json\n[1]\n{\"step\":12,\"steps\":1,\"seconds\":[1.0]}\n{\"step\":";
        let table = read_ranks(folder(&format!("{BEGIN}{LINE}{wild}")).path());
        let table = table.unwrap().unwrap();
        assert_eq!((table.step, table.steps, table.rows.len()), (10, 10, 2));
        assert_eq!(table.rows[0].measured(), Some(900));
        assert_eq!(table.slowest().unwrap().rank, 1);
        let alone = format!("{BEGIN}{LINE}{{\"step\":10,\"members\":[],\"planned_bytes\":5}}\n");
        assert!(read_ranks(folder(&alone).path()).unwrap().is_none());
        assert!(read_ranks(Path::new("nowhere")).unwrap().is_none());
    }

    #[test]
    fn what_there_is_no_room_for_is_counted() {
        let table = read_ranks(folder(&format!("{BEGIN}{LINE}")).path());
        let table = table.unwrap().unwrap();
        let lines = rank_lines(&table, 10);
        assert_eq!(lines.len(), 4);
        assert!(lines[2].trim_start().starts_with('1'), "{lines:#?}");
        assert!(lines.iter().all(|line| line.chars().count() <= 80));
        assert_eq!(lines[0], "2 ranks, slowest: rank 1 on b (process 2)");
        let lines = rank_lines(&table, 3);
        assert_eq!(lines[2], "and 2 more, which wait longer");
        for most in 0..4 {
            assert!(rank_lines(&table, most).len() <= most);
        }
    }
}
