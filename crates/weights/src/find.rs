//! Where the files of a named model or adapter are: a path, or an id in the local Hugging Face
//! cache. Nothing is downloaded.

use std::path::{Path, PathBuf};

use cinch_architecture::HubFolders;

use crate::error::WeightError;

/// The folder (or single file) that a name means. `holds` is the file by which a download is
/// known to be one: `config.json` of a model, `adapter_config.json` of an adapter.
///
/// A path comes first, then one beside the file that named it, then the hub's cache.
pub fn find_folder(name: &str, holds: &str, folders: &HubFolders) -> Result<PathBuf, WeightError> {
    let name = name.trim();
    let beside = folders.beside.as_ref().map(|folder| folder.join(name));
    std::iter::once(Path::new(name).to_owned())
        .chain(beside)
        .find(|path| !name.is_empty() && path.exists())
        .or_else(|| folders.downloaded(name, holds))
        .ok_or_else(|| WeightError::NotDownloaded {
            name: name.to_owned(),
            caches: folders.caches.clone(),
        })
}
