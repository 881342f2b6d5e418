//! A recorded PyTorch run: its course, its peak, and what helps.

use cinch_config::Bytes;
use cinch_report::{Page, PageChart, Part, Section, held_table};
use cinch_torch::snapshot::{Snapshot, explain};

use crate::args::ReportArguments;
use crate::pytorch::snapshot;

pub fn page(arguments: &ReportArguments) -> anyhow::Result<Page> {
    let path = &arguments.subject;
    let read = Snapshot::read(path)?;
    let explanation = explain(&read)?;
    let picture = snapshot::picture(path, &read, &explanation);
    let figures = vec![
        (
            "allocated at the peak".to_owned(),
            Bytes::new(explanation.peak_allocated).to_string(),
        ),
        (
            "reserved at the peak".to_owned(),
            Bytes::new(explanation.peak_reserved).to_string(),
        ),
        ("events".to_owned(), explanation.num_events.to_string()),
    ];
    let diagnosis = Section {
        title: "Diagnosis".to_owned(),
        parts: vec![
            Part::Figures(figures),
            Part::Lines(snapshot::explained(&read, &explanation)?),
        ],
    };
    let memory = Section {
        title: "Memory over the recording".to_owned(),
        parts: vec![
            Part::Chart(PageChart::of_step(&picture)),
            held_table(&picture),
        ],
    };
    Ok(Page {
        title: picture.title.clone(),
        subtitle: picture.subtitle.clone(),
        sections: vec![memory, diagnosis],
        refresh_seconds: None,
    })
}
