//! A model's folder where a run could be named as well: by its path, or by a hub id whose files were
//! downloaded.

use std::path::{Path, PathBuf};

use cinch_architecture::HubFolders;
use cinch_config::{Config, Settings, Source};
use cinch_data::sample::{Moment, TokenizerConfig};

use crate::settings::FIRST_ARGUMENT;

/// What a model is known by.
const DESCRIPTION: &str = "config.json";

/// The folders that models are downloaded to.
pub fn hub_folders() -> HubFolders {
    HubFolders::of_environment(|name| std::env::var_os(name).map(PathBuf::from))
}

/// The folder of the model that is meant, if it is not a run.
pub fn model_folder(given: &Path) -> Option<PathBuf> {
    if given.exists() {
        let is_model = given.join(DESCRIPTION).is_file() && !given.join("checkpoints").exists();
        return is_model.then(|| given.to_owned());
    }
    hub_folders().downloaded(given.to_str()?, DESCRIPTION)
}

/// The model that a folder describes.
pub fn described(folder: &Path) -> anyhow::Result<Config> {
    let mut settings = Settings::new();
    let source = Source::Flag(FIRST_ARGUMENT.to_owned());
    // As a path: the folder may be called as a family of models is.
    let path = Path::new(".").join(folder);
    settings.set("model.type", &path.display().to_string(), source)?;
    Ok(settings.resolve()?)
}

/// What the folder of a configuration's model says of its text, where it does.
pub fn words_of(config: &Config) -> anyhow::Result<Option<TokenizerConfig>> {
    let folder = config.named.folder.as_deref();
    let folder = folder.filter(|folder| folder.join("tokenizer_config.json").is_file());
    let Some(folder) = folder else {
        return Ok(None);
    };
    Ok(Some(TokenizerConfig::from_folder(folder, Moment::now())?))
}
