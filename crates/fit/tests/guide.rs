//! Every row of guide 000 as the guide's setting, the plan of it and the recommendation, against
//! the text that is kept.

use std::fmt::Write;

use cinch_config::Bytes;
use cinch_fit::search::{FitOutcome, GuideRow, guide_rows};

const KEPT: &str = include_str!("fixtures/guide_000.txt");

fn outcome(outcome: &FitOutcome) -> String {
    let bytes = Bytes::new(outcome.total_bytes).exact();
    format!("{bytes} bytes, {:.0} tokens/s", outcome.tokens_per_second)
}

fn render(rows: &[GuideRow]) -> String {
    let mut text = String::new();
    for row in rows {
        writeln!(text, "{}: {} on {}", row.source, row.size, row.card).unwrap();
        writeln!(text, "  guide        {}", row.setting).unwrap();
        if let Some(claim) = &row.claim {
            let [claimed, planned] =
                [claim.claimed_bytes, claim.planned_bytes].map(|bytes| Bytes::new(bytes).exact());
            let what = claim.what;
            writeln!(text, "  {what}: guide {claimed}, planned {planned}").unwrap();
        }
        writeln!(text, "  planned      {}", outcome(&row.plan)).unwrap();
        match &row.recommendation {
            Some(best) => {
                writeln!(text, "  recommended  {}", best.settings.text()).unwrap();
                writeln!(text, "               {}", outcome(best)).unwrap();
            }
            None => writeln!(text, "  recommended  nothing fits").unwrap(),
        }
    }
    text
}

/// Where the planner changed on purpose, the new text replaces the fixture.
#[test]
fn the_guide_beside_the_plan_is_as_kept() {
    let text = render(&guide_rows().unwrap());
    assert!(text == KEPT, "the rows are now:\n{text}");
}

#[test]
fn a_recommendation_keeps_the_batch_at_full_length() {
    for row in guide_rows().unwrap() {
        let best = row.recommendation.unwrap();
        let (asked, full) = (&row.plan.settings, &best.settings);
        assert_eq!(
            full.effective_batch, asked.effective_batch,
            "{}",
            row.source
        );
        assert!(full.seq_len >= asked.seq_len && full.seq_len >= 1024);
        assert_eq!(full.optimizer_states, "fp32", "{}", row.source);
        assert!(best.total_bytes <= row.memory_bytes);
        assert!(
            best.tokens_per_second > row.plan.tokens_per_second * 0.995,
            "{}",
            row.source
        );
    }
}
