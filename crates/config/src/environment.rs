//! Settings from environment variables named `CINCH_SECTION_KEY`.

use std::ffi::OsString;

use crate::ConfigError;
use crate::registry;
use crate::settings::Settings;
use crate::source::Source;
use cinch_architecture::nearest_name;

impl Settings {
    /// Takes settings from variables named `CINCH_SECTION_KEY`, such as
    /// `CINCH_TRAINING_SEED`. Other variables are ignored, except those that
    /// look like a misspelt setting. `std::env::vars_os()` fits as it is.
    pub fn load_environment<N, V>(
        &mut self,
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Result<(), ConfigError>
    where
        N: Into<OsString>,
        V: Into<OsString>,
    {
        let variable_of = |key: &str| format!("CINCH_{}", key.replace('.', "_").to_uppercase());
        let known: Vec<(String, &str)> = registry::keys()
            .map(|key| (variable_of(key), key))
            .collect();
        let mut loaded = self.clone();
        for (name, value) in variables {
            // A name that is not text cannot be one of ours.
            let Ok(name) = name.into().into_string() else {
                continue;
            };
            // CINCH_CACHE is the cache folder, no setting.
            if !name.starts_with("CINCH_") || name == cinch_files::CACHE_VARIABLE {
                continue;
            }
            if let Some((_, key)) = known.iter().find(|(variable, _)| *variable == name) {
                let value =
                    value
                        .into()
                        .into_string()
                        .map_err(|bytes| ConfigError::WrongValue {
                            origin: Box::new(Source::Environment(name.clone())),
                            key: (*key).to_owned(),
                            found: format!("{:?}", bytes.to_string_lossy()),
                            accepted: "UTF-8 text".to_owned(),
                            hint: None,
                        })?;
                if !value.is_empty() {
                    loaded.set(key, &value, Source::Environment(name))?;
                }
                continue;
            }
            let in_section = registry::sections()
                .iter()
                .any(|section| name.starts_with(&format!("{}_", variable_of(section))));
            let suggestion = nearest_variable(&name, known.iter().map(|(variable, _)| variable));
            if in_section || suggestion.is_some() {
                return Err(ConfigError::UnknownVariable { name, suggestion });
            }
        }
        *self = loaded;
        Ok(())
    }
}

/// The prefix all variables share must not make strangers look alike.
fn nearest_variable<'a>(name: &str, known: impl Iterator<Item = &'a String>) -> Option<String> {
    let rest = name.strip_prefix("CINCH_").unwrap_or(name);
    nearest_name(rest, known.filter_map(|known| known.strip_prefix("CINCH_")))
        .map(|nearest| format!("CINCH_{nearest}"))
}
