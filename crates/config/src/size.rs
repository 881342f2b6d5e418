//! Named model sizes: the shapes users ask for by word.

use crate::config::{Gpt2Config, MambaConfig, ModelKind};
use crate::nearest::nearest_name;
use crate::source::Source;
use crate::{ConfigError, ModelConfig, Settings};

/// GPT-2's byte-pair vocabulary.
pub(crate) const GPT2_VOCABULARY: usize = 50257;
/// The 256 bytes and an end-of-text token.
pub(crate) const BYTES_VOCABULARY: usize = 257;

const MAMBA_STATE: usize = 16;
const MAMBA_EXPAND: usize = 2;

/// One named size of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSize {
    pub model: ModelKind,
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub d_model: usize,
    pub n_layers: usize,
    /// Attention heads, for models that have attention.
    pub n_heads: Option<usize>,
    pub max_seq_len: usize,
    pub vocab_size: usize,
    /// The tokenizer whose vocabulary that is.
    pub tokenizer: &'static str,
    /// Trainable parameters, as documentation; builders are tested against it.
    pub parameters: u64,
}

/// Every size of every model, smallest first within a model.
pub static SIZES: &[ModelSize] = &[
    ModelSize {
        vocab_size: BYTES_VOCABULARY,
        tokenizer: "bytes",
        ..mamba("tiny", 128, 4, 256, 544_128)
    },
    mamba("small", 512, 8, 1024, 40_306_176),
    mamba("medium-lite", 640, 10, 1024, 60_097_920),
    mamba("medium-plus", 704, 11, 1536, 72_690_112),
    mamba("medium-x", 736, 12, 1792, 81_462_688),
    mamba("medium", 768, 12, 2048, 87_118_080),
    mamba("medium-extra", 832, 14, 2048, 107_699_904),
    mamba("large-lite", 896, 18, 2048, 142_441_600),
    mamba("large-plus", 960, 21, 2048, 178_069_440),
    mamba("large", 1024, 24, 2048, 219_646_976),
    mamba("xlarge", 1280, 32, 2048, 411_918_080),
    mamba("xxlarge", 1536, 40, 2048, 700_027_392),
    ModelSize {
        vocab_size: BYTES_VOCABULARY,
        tokenizer: "bytes",
        max_seq_len: 256,
        ..gpt2("tiny", &[], 128, 4, 4, 859_008)
    },
    gpt2("gpt2", &["small", "124m"], 768, 12, 12, 124_439_808),
    gpt2(
        "medium",
        &["gpt2-medium", "355m"],
        1024,
        24,
        16,
        354_823_168,
    ),
    gpt2("large", &["gpt2-large", "774m"], 1280, 36, 20, 774_030_080),
    gpt2(
        "xl",
        &["gpt2-xl", "1558m", "1.5b"],
        1600,
        48,
        25,
        1_557_611_200,
    ),
];

const fn mamba(
    name: &'static str,
    d_model: usize,
    n_layers: usize,
    max_seq_len: usize,
    parameters: u64,
) -> ModelSize {
    ModelSize {
        model: ModelKind::Mamba,
        name,
        aliases: &[],
        d_model,
        n_layers,
        n_heads: None,
        max_seq_len,
        vocab_size: GPT2_VOCABULARY,
        tokenizer: "gpt2",
        parameters,
    }
}

const fn gpt2(
    name: &'static str,
    aliases: &'static [&'static str],
    d_model: usize,
    n_layers: usize,
    n_heads: usize,
    parameters: u64,
) -> ModelSize {
    ModelSize {
        model: ModelKind::Gpt2,
        name,
        aliases,
        d_model,
        n_layers,
        n_heads: Some(n_heads),
        max_seq_len: 1024,
        vocab_size: GPT2_VOCABULARY,
        tokenizer: "gpt2",
        parameters,
    }
}

impl ModelSize {
    /// What the size says, key by key, in the words a user would type.
    pub fn values(&self) -> Vec<(&'static str, String)> {
        let mut values = vec![
            ("model.d_model", self.d_model.to_string()),
            ("model.n_layers", self.n_layers.to_string()),
            ("model.dropout", "0.1".to_owned()),
            ("model.max_seq_len", self.max_seq_len.to_string()),
            ("model.vocab_size", self.vocab_size.to_string()),
            ("data.tokenizer", self.tokenizer.to_owned()),
        ];
        match self.n_heads {
            Some(heads) => values.push(("model.n_heads", heads.to_string())),
            None => values.extend([
                ("model.d_state", MAMBA_STATE.to_string()),
                ("model.expand_factor", MAMBA_EXPAND.to_string()),
            ]),
        }
        values
    }

    /// The model of this size, everything else as by default.
    pub fn config(&self) -> Result<ModelConfig, ConfigError> {
        let mut settings = Settings::new();
        let source = || Source::Preset(self.title());
        settings.set("model.type", self.model.name(), source())?;
        settings.set("model.size", self.name, source())?;
        Ok(settings.resolve()?.model)
    }

    /// "mamba small", for provenance.
    pub fn title(&self) -> String {
        format!("{} {}", self.model.name(), self.name)
    }

    /// Whether a user means this size by that name.
    pub fn answers_to(&self, name: &str) -> bool {
        let name = name.trim().replace('_', "-");
        std::iter::once(&self.name)
            .chain(self.aliases)
            .any(|known| known.eq_ignore_ascii_case(&name))
    }
}

/// The sizes of one model.
pub fn sizes_of(model: ModelKind) -> impl Iterator<Item = &'static ModelSize> {
    SIZES.iter().filter(move |size| size.model == model)
}

pub(crate) fn find_size(
    model: ModelKind,
    name: &str,
    origin: &Source,
) -> Result<&'static ModelSize, ConfigError> {
    if let Some(size) = sizes_of(model).find(|size| size.answers_to(name)) {
        return Ok(size);
    }
    let names: Vec<&str> = sizes_of(model).map(|size| size.name).collect();
    let spellings = sizes_of(model)
        .flat_map(|size| std::iter::once(&size.name).chain(size.aliases))
        .copied();
    Err(ConfigError::UnknownSize {
        model: model.name(),
        size: name.to_owned(),
        origin: Box::new(origin.clone()),
        suggestion: nearest_name(name, spellings).map(str::to_owned),
        known: names.join(", "),
    })
}

/// The size whose weights have this shape, however the shape was arrived at. A
/// shorter position table or another dropout rate leaves the name in place;
/// any other width, depth or vocabulary makes it a shape of its own.
pub(crate) fn name_of_shape(model: &ModelConfig) -> Option<&'static str> {
    sizes_of(model.kind())
        .find(|size| match model {
            ModelConfig::Mamba(config) => same_mamba(size, config),
            ModelConfig::Gpt2(config) => same_gpt2(size, config),
        })
        .map(|size| size.name)
}

fn same_mamba(size: &ModelSize, config: &MambaConfig) -> bool {
    size.d_model == config.d_model
        && size.n_layers == config.n_layers
        && size.vocab_size == config.vocab_size
        && config.d_state == MAMBA_STATE
        && config.expand_factor == MAMBA_EXPAND
        && config.d_conv == 0
}

fn same_gpt2(size: &ModelSize, config: &Gpt2Config) -> bool {
    size.d_model == config.d_model
        && size.n_layers == config.n_layers
        && size.vocab_size == config.vocab_size
        && size.n_heads == Some(config.n_heads)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counted from the architecture, weight by weight.
    fn counted(size: &ModelSize) -> usize {
        let d = size.d_model;
        let embeddings = (size.vocab_size + size.max_seq_len) * d;
        let block = match size.model {
            ModelKind::Mamba => {
                let (inner, state) = (MAMBA_EXPAND * d, MAMBA_STATE);
                let rank = inner.div_ceil(16);
                let norm = 2 * d;
                let in_proj = d * 2 * inner;
                let x_proj = inner * (rank + 2 * state);
                let dt_proj = rank * inner + inner;
                let a_log_and_d = inner * state + inner;
                let out_proj = inner * d;
                norm + in_proj + x_proj + dt_proj + a_log_and_d + out_proj
            }
            ModelKind::Gpt2 => {
                let norms = 2 * 2 * d;
                let attention = (d * 3 * d + 3 * d) + (d * d + d);
                let feed_forward = (d * 4 * d + 4 * d) + (4 * d * d + d);
                norms + attention + feed_forward
            }
        };
        embeddings + size.n_layers * block + 2 * d
    }

    #[test]
    fn parameters_follow_from_the_shape() {
        for size in SIZES {
            assert_eq!(counted(size) as u64, size.parameters, "{}", size.title());
        }
        assert_eq!(sizes_of(ModelKind::Mamba).count(), 12);
    }

    #[test]
    fn heads_divide_the_width() {
        for size in SIZES {
            assert_eq!(size.n_heads.map_or(0, |heads| size.d_model % heads), 0);
        }
    }

    #[test]
    fn names_are_found_however_they_are_written() {
        let find = |model, name| find_size(model, name, &Source::Default).map(|size| size.name);
        assert_eq!(
            find(ModelKind::Mamba, "Medium_Lite").unwrap(),
            "medium-lite"
        );
        assert_eq!(find(ModelKind::Gpt2, "small").unwrap(), "gpt2");
        assert_eq!(find(ModelKind::Gpt2, "124M").unwrap(), "gpt2");
        assert_eq!(find(ModelKind::Gpt2, "gpt2-xl").unwrap(), "xl");
        let message = find(ModelKind::Mamba, "mediun").unwrap_err().to_string();
        assert!(
            message.starts_with("mamba has no size \"mediun\" (default); did you mean \"medium\"?\nhint: sizes of mamba are tiny, small, medium-lite"),
            "{message}"
        );
    }
}
