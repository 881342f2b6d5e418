//! The settings that every command about a model takes, by the registry's flags.

use std::ffi::OsString;
use std::path::PathBuf;

use cinch_config::{Kind, SETTINGS};
use clap::{Arg, ArgAction, ArgMatches, Args, Command as CommandLine, FromArgMatches};

/// Settings that every command about a model takes: the flags that the registry declares, and
/// what sets several at once.
#[derive(Clone, Debug, Default)]
pub struct SettingArguments {
    pub plain: PlainArguments,
    /// Each flag of a setting that was given: the flag with its dashes, the key, the text.
    pub flags: Vec<SettingFlag>,
}

/// A setting that was typed.
#[derive(Clone, Debug)]
pub struct SettingFlag {
    pub flag: String,
    pub key: &'static str,
    /// A path need not be text.
    pub text: OsString,
}

/// Arguments about settings that are no setting themselves.
#[derive(Args, Clone, Debug, Default)]
pub struct PlainArguments {
    /// Configuration file: JSON, YAML, TOML, Python constants or a shell script, of cinch or of
    /// another trainer
    #[arg(long, value_name = "FILE", help_heading = "Settings")]
    pub config: Option<PathBuf>,
    /// A folder of configuration files, or the main one of several
    #[arg(long, value_name = "PATH", help_heading = "Settings")]
    pub config_path: Option<PathBuf>,
    #[command(flatten)]
    pub memory: MemoryArguments,
    /// Batch, length and precision for a card's memory: 8gb, 12gb, … (see `cinch presets`)
    #[arg(long, value_name = "NAME", help_heading = "Settings")]
    pub vram_preset: Option<String>,
    /// Training preset: default, fast or careful
    #[arg(long, value_name = "NAME", help_heading = "Settings")]
    pub training_preset: Option<String>,
    /// Any other setting by its key, for example --set model.d_state=32
    #[arg(long = "set", value_name = "KEY=VALUE", help_heading = "Settings")]
    pub set: Vec<String>,
    /// Cut by DeepSpeed's ZeRO: stage 1, 2 or 3 (as --shard zero1 …)
    #[arg(long, value_name = "STAGE", value_parser = clap::value_parser!(u8).range(1..=3), conflicts_with = "fsdp", help_heading = "Settings")]
    pub zero: Option<u8>,
    /// Cut by FSDP (as --shard fsdp)
    #[arg(long, help_heading = "Settings")]
    pub fsdp: bool,
}

/// The heading of flags that only a PyTorch run has.
pub const PYTORCH: &str = "PyTorch";

impl Args for SettingArguments {
    fn augment_args(command: CommandLine) -> CommandLine {
        let mut command = PlainArguments::augment_args(command);
        for setting in SETTINGS.iter() {
            let Some(flag) = setting.flag else { continue };
            let mut arg = Arg::new(flag.name)
                .long(flag.name)
                .aliases(flag.aliases)
                .help(flag.help.unwrap_or(setting.help))
                .help_heading(flag.heading);
            arg = match flag.value {
                Some(name) if matches!(setting.kind, Kind::Path) => arg
                    .value_name(name)
                    .action(ArgAction::Set)
                    .value_parser(clap::value_parser!(OsString)),
                Some(name) => arg.value_name(name).action(ArgAction::Set),
                None => arg.action(ArgAction::SetTrue),
            };
            command = command.arg(arg);
        }
        command
    }

    fn augment_args_for_update(command: CommandLine) -> CommandLine {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SettingArguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Vec::new();
        for setting in SETTINGS.iter() {
            let Some(flag) = setting.flag else { continue };
            let text = match flag.value {
                Some(_) if matches!(setting.kind, Kind::Path) => {
                    matches.get_one::<OsString>(flag.name).cloned()
                }
                Some(_) => matches.get_one::<String>(flag.name).map(OsString::from),
                None => matches.get_flag(flag.name).then(|| "true".into()),
            };
            flags.extend(text.map(|text| SettingFlag {
                flag: format!("--{}", flag.name),
                key: setting.key,
                text,
            }));
        }
        Ok(Self {
            plain: PlainArguments::from_arg_matches(matches)?,
            flags,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// How much memory there is. At most one of them.
#[derive(Args, Clone, Debug, Default)]
#[group(multiple = true)]
pub struct MemoryArguments {
    /// Memory to stay within, on any device: 8gb, 512mb, 24 (GiB)
    #[arg(long, value_name = "SIZE", help_heading = "Memory")]
    pub vram: Option<String>,
    /// The memory of a GPU, of which the margin stays free: 24 (GiB), 80gb
    #[arg(
        long,
        value_name = "SIZE",
        conflicts_with = "vram",
        help_heading = "Memory"
    )]
    pub gpu_memory: Option<String>,
    /// A GPU by name, for example "A100 80GB" (see `cinch gpus`)
    #[arg(
        long,
        value_name = "NAME",
        conflicts_with = "vram",
        help_heading = "Memory"
    )]
    pub gpu: Option<String>,
    /// What is free now: on the GPU, else in host memory
    #[arg(
        long,
        alias = "vram-auto",
        conflicts_with_all = ["vram", "gpu_memory", "gpu"],
        help_heading = "Memory"
    )]
    pub auto: bool,
    /// What stays free: a share (0.15) or a size (2gb) [default: 0.1; none with --vram]
    #[arg(
        long,
        alias = "vram-safety-margin",
        value_name = "SHARE|SIZE",
        help_heading = "Memory"
    )]
    pub safety_margin: Option<String>,
}
