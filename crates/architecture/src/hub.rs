//! What a name means: a family, a short name, a hub id, a folder, a `config.json`, or an id whose
//! files lie in the local Hugging Face cache.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use cinch_files::{MAX_READ, open_regular, read_regular_text};
use serde_json::Value;

use crate::catalogue::{Entry, catalogue, naming};
use crate::error::ArchitectureError;
use crate::family::{Family, families};
use crate::model::{Model, Quantization};
use crate::nearest::nearest_name;

/// Where models may lie on this machine.
#[derive(Clone, Debug, Default)]
pub struct HubFolders {
    /// Folders such as `~/.cache/huggingface/hub`.
    pub caches: Vec<PathBuf>,
    /// Relative paths are seen from here too: the folder of the file that named the model.
    pub beside: Option<PathBuf>,
}

impl HubFolders {
    /// From the variables that Hugging Face's own library reads, in its order.
    pub fn of_environment(variable: impl Fn(&str) -> Option<PathBuf>) -> HubFolders {
        let set = |name: &str| variable(name).filter(|path| !path.as_os_str().is_empty());
        let home = || set("HOME").map(|home| home.join(".cache"));
        let cache = || set("XDG_CACHE_HOME").or_else(home);
        let hub = set("HF_HUB_CACHE")
            .or_else(|| set("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| set("HF_HOME").map(|folder| folder.join("hub")))
            .or_else(|| cache().map(|folder| folder.join("huggingface").join("hub")));
        HubFolders {
            caches: hub.into_iter().collect(),
            beside: None,
        }
    }

    /// The folder of an id that was downloaded, if it holds a file of that name: of the revision
    /// that `main` names, else of any.
    pub fn downloaded(&self, id: &str, holds: &str) -> Option<PathBuf> {
        let folder = format!("models--{}", id.replace('/', "--"));
        self.caches.iter().find_map(|cache| {
            let model = cache.join(&folder);
            let main = read_regular_text(&model.join("refs").join("main"), MAX_READ).ok();
            let snapshots = model.join("snapshots");
            let named = main.map(|revision| snapshots.join(revision.trim()));
            let others = std::fs::read_dir(&snapshots)
                .into_iter()
                .flatten()
                .flatten();
            let mut folders: Vec<PathBuf> = others.map(|entry| entry.path()).collect();
            folders.sort();
            named
                .into_iter()
                .chain(folders)
                .find(|folder| folder.join(holds).is_file())
        })
    }
}

/// The model of a name.
///
/// Families come first, then a path that holds a `config.json`, ids in the local cache, short names
/// and ids of the catalogue, and re-uploads of what the catalogue has.
pub fn find(name: &str, folders: &HubFolders) -> Result<Model, ArchitectureError> {
    let name = name.trim();
    if let Some(family) = Family::named(name)
        && let Some(model) = Model::of_family(family, None)
    {
        return Ok(model);
    }
    if let Some(path) = existing(name, folders) {
        return read_path(&path, name);
    }
    // What was downloaded says more than the catalogue: it is the file itself.
    if let Some(path) = folders.downloaded(name, "config.json") {
        return read_path(&path, name);
    }
    if let Some(entry) = of_catalogue(name) {
        let mut model = of_entry(entry, name)?;
        // A short name is a shape; an id is an upload, whose weights have a type.
        if entry
            .names
            .iter()
            .any(|short| short.eq_ignore_ascii_case(name))
        {
            model.weights = None;
        }
        return Ok(model);
    }
    if let Some((entry, quantization)) = of_reupload(name) {
        let mut model = of_entry(entry, name)?;
        model.found_in = format!("the catalogue, as {}", entry.ids[0]);
        model.quantization = quantization.or(model.quantization);
        return Ok(model);
    }
    if Path::new(name).is_dir() {
        return Err(ArchitectureError::NoConfig { path: name.into() });
    }
    if looks_like_a_path(name) {
        // What is there and no file says what it is.
        let other = open_regular(Path::new(name)).err();
        let other = other.filter(|error| error.kind() != ErrorKind::NotFound);
        return Err(ArchitectureError::File {
            path: name.into(),
            source: other.unwrap_or_else(|| ErrorKind::NotFound.into()),
        });
    }
    Err(ArchitectureError::UnknownModel {
        name: name.to_owned(),
        suggestion: suggestion(name),
    })
}

/// A model of the catalogue with fields of its `config.json` replaced.
pub fn configured(
    name: &str,
    overrides: &serde_json::Map<String, Value>,
) -> Result<Model, ArchitectureError> {
    let entry = of_catalogue(name).ok_or_else(|| ArchitectureError::UnknownModel {
        name: name.to_owned(),
        suggestion: suggestion(name),
    })?;
    let mut config = entry.config.clone();
    if let Value::Object(fields) = &mut config {
        fields.extend(overrides.clone());
    }
    Model::of_config(&config, name, "config.json")
}

fn existing(name: &str, folders: &HubFolders) -> Option<PathBuf> {
    let beside = folders.beside.as_ref().map(|folder| folder.join(name));
    std::iter::once(PathBuf::from(name))
        .chain(beside)
        .find(|path| path.is_file() || path.join("config.json").is_file())
}

/// `models/x/config.json`, `./x`, `/x`: nothing that a hub has.
fn looks_like_a_path(name: &str) -> bool {
    let parts = name.split('/').filter(|part| !part.is_empty()).count();
    name.ends_with(".json") || name.starts_with(['.', '/', '~']) || name.contains('\\') || parts > 2
}

fn read_path(path: &Path, name: &str) -> Result<Model, ArchitectureError> {
    let file = match path.is_dir() {
        true => path.join("config.json"),
        false => path.to_owned(),
    };
    let text = read_regular_text(&file, MAX_READ).map_err(|source| ArchitectureError::File {
        path: file.clone(),
        source,
    })?;
    let config: Value =
        serde_json::from_str(&text).map_err(|problem| ArchitectureError::NotJson {
            path: file.clone(),
            problem: problem.to_string(),
        })?;
    let mut model = Model::of_config(&config, name, &file.display().to_string())?;
    model.folder = file.parent().map(Path::to_owned);
    Ok(model)
}

fn of_entry(entry: &Entry, name: &str) -> Result<Model, ArchitectureError> {
    let mut model = Model::of_config(&entry.config, name, "the catalogue")?;
    model.found_in = "the catalogue".to_owned();
    Ok(model)
}

fn of_catalogue(name: &str) -> Option<&'static Entry> {
    let same = |known: &String| known.eq_ignore_ascii_case(name);
    let mut entries = catalogue().iter();
    entries.find(|entry| entry.ids.iter().chain(&entry.names).any(same))
}

/// An id that an owner of re-uploads, or a revision of a known model, has.
fn of_reupload(name: &str) -> Option<(&'static Entry, Option<Quantization>)> {
    let naming = naming();
    let mut exceptions = naming.shape_exceptions.iter();
    if exceptions.any(|known| known.eq_ignore_ascii_case(name)) {
        return None;
    }
    let (plain, quantization) = without_quantization(name);
    let alias = |name: &str| {
        let mut aliases = naming.aliases.iter();
        aliases
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, original)| original.as_str())
    };
    if let Some(original) = alias(name).or_else(|| alias(&plain)) {
        return of_catalogue(original).map(|entry| (entry, quantization));
    }
    if let Some(entry) = of_catalogue(&plain) {
        return Some((entry, quantization));
    }
    let (owner, tail) = plain.split_once('/')?;
    let is_reupload = naming
        .reupload_owners
        .iter()
        .any(|known| known.eq_ignore_ascii_case(owner));
    let candidates = || {
        catalogue()
            .iter()
            .flat_map(|entry| entry.ids.iter().map(move |id| (entry, id)))
    };
    let answers = |id: &str| {
        let (known_owner, known) = id.split_once('/').unwrap_or(("", id));
        let owners_agree = is_reupload || known_owner.eq_ignore_ascii_case(owner);
        owners_agree && bare(known).eq_ignore_ascii_case(&bare(tail))
    };
    candidates()
        .find(|(_, id)| answers(id))
        .map(|(entry, _)| (entry, quantization))
}

/// A name without the endings that leave the shape as it is.
fn bare(name: &str) -> String {
    let mut name = name.to_lowercase();
    loop {
        let mut suffixes = naming().revision_suffixes.iter();
        let Some(suffix) = suffixes.find(|suffix| name.ends_with(&suffix.to_lowercase())) else {
            return name;
        };
        name.truncate(name.len() - suffix.len());
    }
}

fn without_quantization(name: &str) -> (String, Option<Quantization>) {
    let lower = name.to_lowercase();
    // The longest ending that fits: `-unsloth-bnb-4bit` before `-bnb-4bit`.
    let found = naming()
        .quantised_suffixes
        .iter()
        .filter(|(suffix, _)| lower.ends_with(&suffix.to_lowercase()))
        .max_by_key(|(suffix, _)| suffix.len());
    let Some((suffix, scheme)) = found else {
        return (name.to_owned(), None);
    };
    let quantization = match scheme.as_str() {
        "nf4" => Quantization::FourBit { double: true },
        "int8" => Quantization::EightBit,
        other => Quantization::Other(other.to_owned()),
    };
    let plain = &name[..name.len() - suffix.len()];
    (plain.to_owned(), Some(quantization))
}

fn suggestion(name: &str) -> Option<String> {
    let ids = catalogue()
        .iter()
        .flat_map(|entry| entry.ids.iter().chain(&entry.names))
        .map(String::as_str);
    let families = families().map(|family| family.name);
    nearest_name(name, ids.chain(families)).map(str::to_owned)
}
