//! How long the rows of samples are, for every command that plans: read before the plan, so that
//! the longest real row is planned, and told with it.

use cinch_config::{BatchConfig, BucketChoice, Config, Settings, Source};
use cinch_data::Progress;
use cinch_step::PlanReport;
use cinch_train::{Padding, RowSurvey};
use serde::Serialize;

const SEQUENCE: &str = "vram.max_seq_len";
const BUCKETS: &str = "data.buckets";

/// What is known of the rows of a run.
pub enum Rows {
    /// It does not train on samples.
    None,
    Read(Box<RowSurvey>),
    /// Why the samples could not be read.
    Unread(String),
}

impl Rows {
    /// Reads the samples that settings name, and has what nobody stated follow from them: how long
    /// a row is, and to which shorter lengths rows are padded.
    pub fn settle(
        settings: &mut Settings,
        config: &mut Config,
        progress: &dyn Progress,
    ) -> anyhow::Result<Self> {
        let length_is_free = is_free(settings, SEQUENCE);
        let survey = match RowSurvey::read(config, length_is_free, progress) {
            Ok(None) => return Ok(Self::None),
            Ok(Some(survey)) => survey,
            Err(error) => return Ok(Self::Unread(error.to_string())),
        };
        let source = Source::Data(survey.source.clone());
        if length_is_free {
            settings.set(SEQUENCE, &survey.seq_len.to_string(), source.clone())?;
        }
        if config.data.buckets == BucketChoice::Auto {
            let lengths = survey.buckets.iter().map(usize::to_string);
            let lengths = match survey.buckets.is_empty() {
                true => "off".to_owned(),
                false => lengths.collect::<Vec<_>>().join(","),
            };
            settings.set(BUCKETS, &lengths, source)?;
        }
        *config = settings.resolve()?;
        Ok(Self::Read(Box::new(survey)))
    }

    /// How many samples there are, where a run trains on samples and they could be read.
    pub fn num_samples(&self) -> Option<u64> {
        match self {
            Rows::Read(survey) => Some(survey.num_samples as u64),
            Rows::None | Rows::Unread(_) => None,
        }
    }

    /// What samples take of the host's memory.
    pub fn host_bytes(&self) -> u64 {
        match self {
            Self::None | Self::Unread(_) => 0,
            Self::Read(survey) => survey.host_bytes,
        }
    }

    /// What there is to say beside a plan.
    pub fn lines(&self, batch: &BatchConfig) -> Vec<String> {
        match self {
            Self::None => Vec::new(),
            Self::Read(survey) => describe(survey, batch),
            Self::Unread(problem) => {
                let first = problem.lines().next().unwrap_or_default();
                vec![format!(
                    "how long the samples are is not known, and the plan is for rows of {} \
                     tokens: {first}",
                    batch.seq_len
                )]
            }
        }
    }

    /// A plan's report, with what is known of the rows.
    pub fn report(&self, mut plan: PlanReport, batch: &BatchConfig) -> Reported {
        plan.memory.host.samples = self.host_bytes();
        let rows = match self {
            Self::None | Self::Unread(_) => None,
            Self::Read(survey) => Some(RowReport {
                samples: survey.num_samples,
                longest_sample: survey.longest,
                padding: survey.training.padding(batch),
            }),
        };
        Reported { plan, rows }
    }
}

/// A plan as data, with the rows it is for.
#[derive(Serialize)]
pub struct Reported {
    #[serde(flatten)]
    pub plan: PlanReport,
    /// None where the data is no samples, or was not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<RowReport>,
}

#[derive(Serialize)]
struct RowReport {
    samples: usize,
    /// Tokens of the longest, as it was read.
    longest_sample: usize,
    #[serde(flatten)]
    padding: Padding,
}

/// The longest row, and to what all are padded.
pub fn describe(survey: &RowSurvey, batch: &BatchConfig) -> Vec<String> {
    vec![
        format!(
            "the longest of {} samples has {} tokens; {}",
            survey.num_samples, survey.longest, survey.limited
        ),
        survey.training.padding(batch).to_string(),
    ]
}

/// Whether nobody stated a value: neither the user nor a preset.
fn is_free(settings: &Settings, key: &str) -> bool {
    let unstated = |source: &Source| matches!(source, Source::Default | Source::Derived(_));
    let explained = settings.explain();
    let Some(one) = explained.iter().find(|one| one.key == key) else {
        return true;
    };
    let mut overridden = one.overridden.iter();
    unstated(&one.source) && overridden.all(|other| unstated(&other.source))
}
