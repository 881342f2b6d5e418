//! Dialects: how the programs that people train with name their settings.
//!
//! A dialect is data. It says by which keys its files are known, what each key means here and how
//! a value is written back, what the program takes where a file is silent, and what a file can
//! say that cannot be computed. One reading ([`draft`]) and one editor (`place`) serve them all.
//!
//! A file is cinch's own unless something in it says otherwise. In cinch's own files an unknown
//! key is a mistake. In those of other programs most keys concern only that program: the ones
//! that may bear on memory are told by name, the rest are counted.

mod accelerate;
mod axolotl;
mod constants;
mod deepspeed;
pub(crate) mod draft;
mod liger;
mod lightning;
mod llama_factory;
mod mu;
mod names;
mod optimizer;
pub(crate) mod scalar;
mod seeds;
mod torchtune;
mod training_arguments;

use std::fmt;

use crate::document::Document;
use crate::error::ConfigError;
use crate::format::Format;
use crate::registry;
use crate::setting::{Meaning, Setting};

use crate::unfollowed::Instead;
use draft::Draft;
use names::is_slip;
pub(crate) use names::plain_name;
pub(crate) use names::stands_for;

/// Whose run a file describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Program {
    Cinch,
    PyTorch,
}

/// How one program names its settings.
pub(crate) struct Dialect {
    /// As people know it.
    pub name: &'static str,
    pub program: Program,
    /// The keys by which a file is known to be of this program, where it is.
    pub recognise: fn(&Keys<'_>) -> Option<Vec<String>>,
    /// Of two rules of one name, the one of the earlier table holds.
    pub rules: &'static [&'static [Rule]],
    /// What the program takes where a file does not say: settings with their values.
    pub defaults: &'static [(&'static str, &'static str)],
    /// Whether the program reads a key of its own that a file does not have yet. A stranger's
    /// constants may be read by nobody.
    pub adds_keys: bool,
    /// The keys of a whole step's sequences, where a file can state the product.
    pub whole_batch: Option<WholeBatch>,
    /// What takes more than one key to say.
    pub arithmetic: Option<Arithmetic>,
}

/// What several keys say together, added to what each says alone.
pub(crate) type Arithmetic = fn(&mut Draft<'_>) -> Result<(), ConfigError>;

/// `whole = micro batch × accumulation × GPUs`, as a file states it.
pub(crate) struct WholeBatch {
    /// The key of the product.
    pub whole: &'static str,
    /// Whether the accumulation has a key too; else the program finds it from the product.
    pub has_accumulation: bool,
}

/// What one key means.
#[derive(Debug)]
pub(crate) struct Rule {
    /// A plain name (see `names`), or the beginning of one with `*`.
    pub name: &'static str,
    pub says: Says,
    /// Why a value that none of the words fits cannot be computed; without it such a value is
    /// listed as not understood.
    pub otherwise: Option<&'static str>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Says {
    Setting {
        key: &'static str,
        meaning: Meaning,
    },
    /// Saves memory of PyTorch in a way that is not computed: the figure is an upper bound.
    Saves {
        why: &'static str,
        /// What cinch's own engine does where it does not save it.
        instead: Option<Instead>,
    },
    /// Makes another run of it, which cannot be computed: an error, unless it is switched off or
    /// one of these.
    Refused {
        unless: &'static [&'static str],
        why: &'static str,
    },
    /// Makes PyTorch allocate what is not computed: a prediction of it is refused, and cinch's own
    /// engine has nothing of the kind.
    NotPredicted(&'static str),
    /// Changes what a run learns, which a plan does not ask and training here does not follow.
    NotFollowed,
    /// Read together with others, by the dialect's arithmetic.
    Combined,
    /// Bears on neither memory nor the settings here.
    Harmless,
}

pub(crate) const fn same(name: &'static str, key: &'static str) -> Rule {
    setting(name, key, Meaning::Same)
}

pub(crate) const fn setting(name: &'static str, key: &'static str, meaning: Meaning) -> Rule {
    Rule {
        name,
        says: Says::Setting { key, meaning },
        otherwise: None,
    }
}

pub(crate) const fn words(
    name: &'static str,
    key: &'static str,
    words: &'static [(&'static str, &'static str)],
) -> Rule {
    setting(name, key, Meaning::Words(words))
}

pub(crate) const fn switch(
    name: &'static str,
    key: &'static str,
    on: &'static str,
    off: &'static str,
) -> Rule {
    setting(name, key, Meaning::Switch { on, off })
}

/// A switch that some files give as a word.
pub(crate) const fn switch_or(
    name: &'static str,
    key: &'static str,
    [on, off]: [&'static str; 2],
    words: &'static [(&'static str, &'static str)],
) -> Rule {
    setting(name, key, Meaning::SwitchOr { on, off, words })
}

/// A list of names, or one text with commas between them.
pub(crate) const fn list(name: &'static str, key: &'static str) -> Rule {
    setting(name, key, Meaning::List)
}

pub(crate) const fn saves(name: &'static str, why: &'static str) -> Rule {
    rule(name, Says::Saves { why, instead: None })
}

/// As [`saves`], where cinch's own engine has it as a setting that nobody stated.
pub(crate) const fn saves_there(name: &'static str, why: &'static str, instead: Instead) -> Rule {
    let instead = Some(instead);
    rule(name, Says::Saves { why, instead })
}

pub(crate) const fn refused(name: &'static str, why: &'static str) -> Rule {
    rule(name, Says::Refused { unless: &[], why })
}

pub(crate) const fn refused_unless(
    name: &'static str,
    unless: &'static [&'static str],
    why: &'static str,
) -> Rule {
    rule(name, Says::Refused { unless, why })
}

/// PyTorch's compiler, wherever a program can switch it on.
pub(crate) const fn compiles(name: &'static str) -> Rule {
    rule(
        name,
        Says::NotPredicted("what torch.compile allocates is not predicted"),
    )
}

pub(crate) const fn not_followed(name: &'static str) -> Rule {
    rule(name, Says::NotFollowed)
}

pub(crate) const fn combined(name: &'static str) -> Rule {
    rule(name, Says::Combined)
}

pub(crate) const fn harmless(name: &'static str) -> Rule {
    rule(name, Says::Harmless)
}

const fn rule(name: &'static str, says: Says) -> Rule {
    Rule {
        name,
        says,
        otherwise: None,
    }
}

impl Rule {
    pub(crate) const fn otherwise(mut self, why: &'static str) -> Rule {
        self.otherwise = Some(why);
        self
    }
}

pub(crate) const MODEL: &str = "model.type";
pub(crate) const BATCH: &str = "vram.batch_size";
pub(crate) const ACCUMULATION: &str = "vram.gradient_accumulation_steps";
pub(crate) const SEQUENCE: &str = "vram.max_seq_len";
pub(crate) const PRECISION: &str = "vram.precision";
pub(crate) const CHECKPOINTING: &str = "vram.checkpointing";
pub(crate) const OFFLOAD: &str = "vram.use_cpu_offload";
pub(crate) const RATE: &str = "training.learning_rate";
pub(crate) const SCHEDULE: &str = "training.schedule";
pub(crate) const STEPS: &str = "training.max_steps";
pub(crate) const EPOCHS: &str = "training.epochs";
pub(crate) const WARMUP: &str = "training.warmup_steps";
pub(crate) const WARMUP_RATIO: &str = "training.warmup_ratio";
pub(crate) const DECAY: &str = "training.weight_decay";
pub(crate) const CLIP: &str = "training.max_grad_norm";
pub(crate) const BETA1: &str = "training.adam_beta1";
pub(crate) const BETA2: &str = "training.adam_beta2";
pub(crate) const EPSILON: &str = "training.adam_epsilon";
pub(crate) const LOGGING: &str = "training.logging_steps";
pub(crate) const EVALUATION: &str = "training.eval_interval";
pub(crate) const SAVING: &str = "training.save_interval";
pub(crate) const SEED: &str = "training.seed";
pub(crate) const OUTPUT: &str = "output.output_dir";
pub(crate) const HELD_OUT: &str = "data.val_split";
pub(crate) const SAMPLES: &str = "data.max_samples";
pub(crate) const ROWS_PACKED: &str = "data.packing";
pub(crate) const TOO_LONG: &str = "data.too_long";
pub(crate) const ON_INPUTS: &str = "data.train_on_inputs";
pub(crate) const SMOOTHING: &str = "training.label_smoothing";
pub(crate) const SAVED: &str = "training.save_total_limit";
pub(crate) const ROOT_OF_RANK: &str = "lora.rank_stabilised";
pub(crate) const ADAPTER: &str = "lora.adapter";
pub(crate) const RANK: &str = "lora.rank";
pub(crate) const ALPHA: &str = "lora.alpha";
pub(crate) const ADAPTER_DROPOUT: &str = "lora.dropout";
pub(crate) const ADAPTER_TYPE: &str = "lora.dtype";
pub(crate) const TARGETS: &str = "lora.targets";
pub(crate) const MODULES_TO_SAVE: &str = "lora.modules_to_save";
pub(crate) const TORCH_PRECISION: &str = "pytorch.precision";
pub(crate) const ATTENTION: &str = "pytorch.attention";
pub(crate) const OPTIMIZER: &str = "pytorch.optimizer";
pub(crate) const OPTIMIZER_STATES: &str = "vram.optimizer_states";
pub(crate) const LOOP: &str = "pytorch.loop";
pub(crate) const QUANTIZATION: &str = "lora.quantization";
pub(crate) const DOUBLE_QUANTIZATION: &str = "lora.double_quantization";
pub(crate) const PREPARED: &str = "pytorch.prepared";
pub(crate) const WHOLE_TYPE: &str = "pytorch.whole_dtype";
pub(crate) const REENTRANT: &str = "pytorch.reentrant";
pub(crate) const PACKING: &str = "pytorch.packing";
pub(crate) const LIGER: &str = "pytorch.liger";
pub(crate) const SHARDING: &str = "world.shard";
pub(crate) const NODES: &str = "world.nodes";
pub(crate) const RANKS: &str = "world.ranks";

pub(crate) const SCHEDULE_WORDS: &[(&str, &str)] = &[
    ("linear", "linear"),
    ("cosine", "cosine"),
    ("constant", "constant"),
    ("constant_with_warmup", "constant"),
    ("onecycle", "onecycle"),
    ("one_cycle", "onecycle"),
    // Of one cycle unless lr_scheduler_kwargs says more, which is told: the plain cosine.
    ("cosine_with_restarts", "cosine"),
];

pub(crate) const ATTENTION_WORDS: &[(&str, &str)] = &[
    ("sdpa", "sdpa"),
    ("eager", "eager"),
    ("flash_attention_2", "flash_attention_2"),
    ("flash_attention_3", "flash_attention_3"),
    ("flex_attention", "flex_attention"),
];

pub(crate) const OTHER_OPTIMIZER: &str = "the states of this optimizer are not known here";

const SOME_TOKENS: &str = "embeddings that are trained for some tokens only are not computed";
const TIED_COPIES: &str = "embeddings and head that are trained whole as one are not computed";
const REPLICATED: &str = "layers that are used more than once are not computed";
const SOME_LAYERS: &str = "adapters on some of the layers are not computed";
const BARE_PARAMETERS: &str = "adapters on bare parameters are not computed";
const BIASES: &str = "biases that are trained beside adapters are not computed";

/// Keys of peft's `LoraConfig` that make another run of it, in programs that hand them on.
pub(crate) const PEFT: &[Rule] = &[
    refused("trainable_token_indices", SOME_TOKENS),
    refused("lora.trainable_token_indices", SOME_TOKENS),
    refused("ensure_weight_tying", TIED_COPIES),
    refused("lora.ensure_weight_tying", TIED_COPIES),
    refused("layer_replication", REPLICATED),
    refused("lora.layer_replication", REPLICATED),
    refused("layers_to_transform", SOME_LAYERS),
    refused("lora.layers_to_transform", SOME_LAYERS),
    refused("lora_layers_to_transform", SOME_LAYERS),
    refused("target_parameters", BARE_PARAMETERS),
    refused("lora.target_parameters", BARE_PARAMETERS),
    refused("lora_target_parameters", BARE_PARAMETERS),
    refused_unless("lora.bias", &["none"], BIASES),
    refused_unless("peft.bias", &["none"], BIASES),
    refused_unless("lora_bias", &["none"], BIASES),
];

/// Most particular first. The last takes any file with names that people commonly give.
static DIALECTS: [&Dialect; 12] = [
    &torchtune::TORCHTUNE,
    &deepspeed::DEEPSPEED,
    &accelerate::ACCELERATE,
    &axolotl::AXOLOTL,
    &llama_factory::LLAMA_FACTORY,
    &llama_factory::LLAMA_FACTORY_V1,
    &seeds::SPARSE_ATTENTION,
    &seeds::EMBEDDER,
    &mu::MU,
    &training_arguments::TRAINING_ARGUMENTS,
    &lightning::LIGHTNING,
    &constants::CONSTANTS,
];

/// The programs whose files are known, by name.
pub(crate) fn known_dialects() -> Vec<&'static str> {
    DIALECTS.iter().map(|dialect| dialect.name).collect()
}

/// The plain names of a file's keys.
pub(crate) struct Keys<'a> {
    pub document: &'a Document,
    pub names: Vec<String>,
}

impl<'a> Keys<'a> {
    pub(crate) fn of(document: &'a Document) -> Keys<'a> {
        let names = document
            .entries
            .iter()
            .map(|entry| plain_name(&entry.path))
            .collect();
        Keys { document, names }
    }

    /// Whether a key stands at the top or in a section about training.
    pub(crate) fn has(&self, known: &str) -> bool {
        self.names.iter().any(|name| stands_for(known, name))
    }

    /// Those of some keys that the file has.
    pub(crate) fn of_these(&self, known: &[&str]) -> Vec<String> {
        let found = known.iter().filter(|name| self.has(name));
        found.map(|name| (*name).to_owned()).collect()
    }

    pub(crate) fn has_section(&self, section: &str) -> bool {
        let beginning = format!("{section}.");
        let sections = &self.document.sections;
        self.names.iter().any(|name| name.starts_with(&beginning))
            || sections
                .iter()
                .any(|name| plain_name(std::slice::from_ref(name)) == section)
    }
}

/// How a file names its settings.
#[derive(Clone, Copy)]
pub(crate) enum Naming {
    /// `section.key`, as the registry has them.
    Own,
    Foreign(&'static Dialect),
}

impl fmt::Debug for Naming {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A file's dialect, and the keys that say so.
pub(crate) struct Recognised {
    pub naming: Naming,
    pub evidence: Vec<String>,
}

impl Naming {
    pub(crate) fn of(document: &Document) -> Naming {
        Recognised::of(document).naming
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Naming::Own => "cinch",
            Naming::Foreign(dialect) => dialect.name,
        }
    }

    /// The setting that the value at `path` is.
    pub(crate) fn find(self, path: &[String]) -> Option<(&'static Setting, Meaning)> {
        let Naming::Foreign(dialect) = self else {
            return registry::find(&path.join("."));
        };
        match dialect.rule(&plain_name(path))?.says {
            Says::Setting { key, meaning } => {
                registry::find(key).map(|(setting, _)| (setting, meaning))
            }
            _ => None,
        }
    }

    /// The names a setting can be written under, the usual one first.
    pub(crate) fn spellings(self, key: &str) -> impl Iterator<Item = (&'static str, Meaning)> {
        let dialect = match self {
            Naming::Own => None,
            Naming::Foreign(dialect) => Some(dialect),
        };
        let rules = dialect.into_iter().flat_map(Dialect::own_rules);
        rules.filter_map(move |rule| match rule.says {
            Says::Setting { key: own, meaning } if own == key => Some((rule.name, meaning)),
            _ => None,
        })
    }

    /// What its program takes for a setting where a file is silent.
    pub(crate) fn default(self, key: &str) -> Option<&'static str> {
        match self {
            Naming::Own => None,
            Naming::Foreign(dialect) => {
                let mut defaults = dialect.defaults.iter();
                defaults
                    .find(|(known, _)| *known == key)
                    .map(|(_, value)| *value)
            }
        }
    }

    /// Whether a key may be added that the file does not have.
    pub(crate) fn adds_keys(self) -> bool {
        match self {
            Naming::Own => true,
            Naming::Foreign(dialect) => dialect.adds_keys,
        }
    }
}

impl Recognised {
    pub(crate) fn of(document: &Document) -> Recognised {
        let keys = Keys::of(document);
        // In a program `VRAM_CONFIG` may be anybody's; a section of that very name is ours.
        let own = || match document.format {
            Format::Shell => false,
            Format::Python => document.sections.iter().any(|name| name == "vram"),
            _ => keys.names.iter().any(|name| name.starts_with("vram.")),
        };
        if own() {
            return Recognised {
                naming: Naming::Own,
                evidence: vec!["vram".to_owned()],
            };
        }
        let found = DIALECTS
            .iter()
            .find_map(|dialect| Some((*dialect, (dialect.recognise)(&keys)?)));
        match found {
            Some((dialect, evidence)) => Recognised {
                naming: Naming::Foreign(dialect),
                evidence,
            },
            None => Recognised {
                naming: Naming::Own,
                evidence: Vec::new(),
            },
        }
    }
}

impl Dialect {
    /// Its rules, without those that an earlier table says otherwise.
    fn own_rules(&self) -> impl Iterator<Item = &'static Rule> {
        let tables = self.rules;
        tables.iter().enumerate().flat_map(move |(index, table)| {
            let earlier = &tables[..index];
            table.iter().filter(move |rule| {
                let mut known = earlier.iter().flat_map(|table| table.iter());
                known.all(|other| other.name != rule.name)
            })
        })
    }

    /// The rule of a plain name: an exact one before a beginning.
    pub(crate) fn rule(&self, name: &str) -> Option<&'static Rule> {
        let rules = || self.rules.iter().flat_map(|rules| rules.iter());
        let exact = |rule: &&Rule| !rule.name.ends_with('*') && stands_for(rule.name, name);
        let open = |rule: &&Rule| rule.name.ends_with('*') && stands_for(rule.name, name);
        rules().find(exact).or_else(|| rules().find(open))
    }
}

/// Parts of names that speak of memory: a key with one of them that no rule knows is told.
const ABOUT_MEMORY: &[&str] = &[
    "batch",
    "accum",
    "length",
    "seq_len",
    "cutoff",
    "pack",
    "precision",
    "bf16",
    "fp16",
    "fp8",
    "float",
    "dtype",
    "quant",
    "4bit",
    "8bit",
    "_bit",
    "lora",
    "adapter",
    "peft",
    "rank",
    "checkpointing",
    "offload",
    "shard",
    "fsdp",
    "deepspeed",
    "zero_",
    "parallel",
    "attn",
    "attention",
    "flash",
    "compile",
    "kernel",
    "liger",
    "fuse",
    "optim",
    "layer",
    "hidden",
    "heads",
    "vocab",
    "expert",
    "moe",
    "freeze",
    "frozen",
    "trainable",
    "image",
    "pixel",
    "video",
    "audio",
    "vision",
    "generations",
    "gpus",
    "devices",
    "nodes",
    "world",
    "ref_model",
    "reward",
    "teacher",
    "n_negatives",
    "n_positives",
    "max_tokens",
    "use_cache",
    "memory",
];

/// Of those, parts that do not.
const NOT_ABOUT_MEMORY: &[&str] = &[
    "revision",
    "eval",
    "val_",
    "test",
    "logging",
    "log_",
    "save",
    "resume",
    "wandb",
    "predict",
    "generat_",
    "epoch",
    "steps_per",
    "warmup",
    "lr_",
    "learning_rate",
    "_lr",
    "num_workers",
    "prefetch",
    "preprocess",
    "dataset",
    "push_to_hub",
    "hub_",
    "report",
    "name",
    "path",
    "dir",
    "seed",
];

/// Whether a key that no rule knows may bear on memory, by its name.
pub(crate) fn speaks_of_memory(name: &str) -> bool {
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    has(ABOUT_MEMORY) && !has(NOT_ABOUT_MEMORY)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A rule is looked for by a plain name, so it must be one itself.
    #[test]
    fn every_rule_has_a_plain_name() {
        for dialect in DIALECTS {
            for rule in dialect.rules.iter().flat_map(|rules| rules.iter()) {
                let path: Vec<String> = rule.name.split('.').map(str::to_owned).collect();
                assert_eq!(plain_name(&path), rule.name, "{}", dialect.name);
            }
        }
    }

    #[test]
    fn every_rule_leads_to_a_value_of_its_setting() {
        for dialect in DIALECTS {
            for table in dialect.rules {
                let mut names = BTreeSet::new();
                for rule in *table {
                    let is_new = names.insert(rule.name);
                    assert!(is_new, "{}: {} twice", dialect.name, rule.name);
                }
            }
            for rule in dialect.own_rules() {
                let Says::Setting { key, meaning } = rule.says else {
                    continue;
                };
                let (setting, _) = registry::find(key).expect(key);
                assert_eq!(setting.key, key);
                for value in meaning.values() {
                    assert!(setting.kind.parse(value).is_ok(), "{} {value}", rule.name);
                }
            }
            for (key, value) in dialect.defaults {
                let (setting, _) = registry::find(key).expect(key);
                assert!(setting.kind.parse(value).is_ok(), "{key} = {value}");
            }
        }
    }
}
