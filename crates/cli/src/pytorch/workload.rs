//! The run in PyTorch that a configuration describes, with all that was taken for granted.

use cinch_config::{Config, Settings, Sharding};
use cinch_device::Card;
use cinch_torch::configured::Configured;
use cinch_torch::model::Workload;

use crate::args::SettingArguments;
use crate::settings::Asked;
use crate::voice;

/// Where PyTorch itself looks for the allocator's settings, the newer name first.
const VARIABLES: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];

/// A run, and how it came about.
pub struct Run {
    /// The model, for people.
    pub name: String,
    pub workload: Workload,
    /// The allocator's settings as text; empty for PyTorch's defaults.
    pub alloc_conf: String,
    pub settings: Settings,
    pub config: Config,
    /// What nobody said, in sentences.
    pub assumed: Vec<String>,
    /// Why it is a run in PyTorch, where nobody said so.
    pub because: Option<String>,
}

impl Run {
    /// On a card, where one is known.
    pub fn new(
        arguments: &SettingArguments,
        asked: &Asked,
        card: Option<&Card>,
    ) -> anyhow::Result<Self> {
        refuse_other_settings(arguments)?;
        if let Some(card) = card.filter(|card| card.compute_capability.is_none()) {
            voice::aside(Some(format!(
                "the kernels of the {} are not known here: the figures are with those of an H200",
                card.name
            )));
        }
        let (settings, config) = (&asked.settings, &asked.config);
        let mut assumed: Vec<String> = settings
            .readings()
            .iter()
            .flat_map(|reading| reading.assumed.clone())
            .collect();
        assumed.extend(settings.notes());
        let (alloc_conf, origin) = alloc_conf(config.torch.alloc_conf.as_deref());
        if let Some(variable) = origin {
            assumed.push(format!(
                "the allocator's settings are those of {variable}: {alloc_conf}"
            ));
        }
        let configured = Configured::of(config, &alloc_conf, card)?;
        let workload = configured.workload;
        assumed.extend(configured.assumed);
        if !workload.architecture.has_one_length()
            && !settings.is_explicit("vram.max_seq_len")
            && settings.program_says("vram.max_seq_len").is_none()
        {
            assumed.push(format!(
                "sequences of {} tokens: say --seq-len",
                workload.length
            ));
        }
        if !settings.is_explicit("vram.batch_size")
            && settings.program_says("vram.batch_size").is_none()
        {
            assumed.push(format!(
                "a batch of {} × {}: say --batch-size and --grad-accum",
                workload.batch, workload.recipe.accumulation
            ));
        }
        let divides = !matches!(config.torch.sharding, Sharding::None | Sharding::Replicated);
        if divides && config.torch.ranks.is_none() {
            assumed.push(format!(
                "one GPU, although states are divided ({}): say --ranks",
                config.torch.sharding.name()
            ));
        }
        if let Some(found) = config
            .named
            .found_in
            .as_deref()
            .filter(|found| found.contains(" as "))
        {
            assumed.push(format!("the shape is that of {found}"));
        }
        Ok(Self {
            name: config.model_title(),
            workload,
            alloc_conf,
            settings: settings.clone(),
            config: config.clone(),
            assumed,
            because: asked.because.clone(),
        })
    }

    /// The run with as many micro batches as it takes to see all that happens: the first makes
    /// gradients, the second adds into them, and each further one is like the second.
    pub fn outline(&self) -> Workload {
        let mut workload = self.workload.clone();
        let accumulation = &mut workload.recipe.accumulation;
        *accumulation = (*accumulation).min(2);
        workload
    }
}

/// Flags and settings that only cinch's own engine has a meaning for.
fn refuse_other_settings(arguments: &SettingArguments) -> anyhow::Result<()> {
    let flags: Vec<&'static str> = [
        ("vram.use_cpu_offload", "--offload"),
        ("vram.offload_frozen", "--offload-frozen"),
        ("vram.offload_activations", "--offload-activations"),
        ("vram.update_in_backward", "--update-in-backward"),
        ("vram.optimizer_states", "--optimizer-states"),
        ("training.master_weights", "--master-weights"),
    ]
    .into_iter()
    .filter(|(key, _)| arguments.value(key).is_some())
    .map(|(_, flag)| flag)
    .collect();
    super::refuse_flags_of_cinch(&flags)
}

/// The allocator's settings, and the variable they come from where nothing else says them.
fn alloc_conf(stated: Option<&str>) -> (String, Option<&'static str>) {
    if let Some(text) = stated {
        return (text.to_owned(), None);
    }
    let mut variables = VARIABLES.into_iter();
    variables
        .find_map(|name| {
            let text = std::env::var(name).ok()?;
            (!text.is_empty()).then_some((text, Some(name)))
        })
        .unwrap_or_default()
}
