//! A checkpoint that several ranks write together.
//!
//! The first rank makes the folder, and in it each file with its header and its full length. Then
//! every rank writes its parts where they belong in the same files, and forces them to the disk;
//! when all have, each hashes its share of the bytes, and the first adds state and checksums and
//! gives the folder its name. Whoever fails on the way ends the others, and the first takes the
//! folder back: there is a whole checkpoint, or none.
//!
//! All ranks need a disk that all of them see, which is found out here by opening the files.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use cinch_ranks::World;
use serde_json::Value;

use super::checksums::{Checksums, FileDigest, hash_part};
use super::error::{CheckpointError, IoContext};
use super::store::Store;
use super::tensor_file::{SharedLayout, TensorPart};
use super::{MODEL_FILE, OPTIMIZER_FILE};

impl Store {
    /// Saves a checkpoint of which every rank has a part; all of them call it. Returns its folder
    /// once it is there.
    pub fn save_shared(
        &self,
        step: u64,
        model: &[TensorPart<'_>],
        optimizer: &[TensorPart<'_>],
        state: &Value,
        world: &mut World,
    ) -> Result<PathBuf, CheckpointError> {
        let files = [
            (MODEL_FILE, SharedLayout::new(model)?),
            (OPTIMIZER_FILE, SharedLayout::new(optimizer)?),
        ];
        // The first rank's folder is kept here: dropped before its time, it is removed.
        let partial = match world.is_first() {
            true => Some(self.begin(step)?),
            false => None,
        };
        if let Some(partial) = &partial {
            for (name, layout) in &files {
                create(&partial.path().join(name), layout)?;
            }
        }
        let name = partial
            .as_ref()
            .and_then(|partial| partial.path().file_name());
        let name = name.map(|name| name.to_string_lossy().into_owned());
        let name = world.spread(&name.unwrap_or_default())?;
        let folder = self.folder().join(name);
        for (name, layout) in &files {
            write_parts(&folder.join(name), layout, world.rank())?;
        }
        world.barrier()?;
        let mut checksums = Checksums::default();
        for (name, layout) in &files {
            let digest = hash(&folder.join(name), layout.num_bytes(), world)?;
            checksums.files.insert((*name).to_owned(), digest);
        }
        if let Some(partial) = partial {
            let state = format!("{state:#}\n").into_bytes();
            self.finish(step, partial, checksums, &state)?;
        }
        world.barrier()?;
        Ok(self.path_of(step))
    }
}

/// A file with its header and room for everything else.
fn create(path: &Path, layout: &SharedLayout<'_>) -> Result<(), CheckpointError> {
    let mut file = File::create_new(path).at("create", path)?;
    file.write_all(layout.header()).at("write", path)?;
    file.set_len(layout.num_bytes()).at("write", path)?;
    file.sync_all().at("sync", path)
}

fn write_parts(path: &Path, layout: &SharedLayout<'_>, rank: usize) -> Result<(), CheckpointError> {
    let file = OpenOptions::new().write(true).open(path);
    let file = file.map_err(|source| CheckpointError::NotSeen {
        rank,
        path: path.to_owned(),
        source,
    })?;
    layout.write_parts(|bytes, offset| file.write_all_at(bytes, offset).at("write", path))?;
    file.sync_all().at("sync", path)
}

/// Fewer bytes are not worth another rank's reading.
const LEAST_PART: u64 = 1 << 20;

/// The digest of a file, of which each rank hashes a part; only the first rank has it whole.
fn hash(path: &Path, bytes: u64, world: &mut World) -> Result<FileDigest, CheckpointError> {
    let part_bytes = bytes.div_ceil(world.num_ranks() as u64).max(LEAST_PART);
    let first = world.rank() as u64 * part_bytes;
    let own = match first < bytes {
        true => hash_part(path, first, part_bytes).at("read", path)?,
        false => Vec::new(),
    };
    let told = serde_json::to_string(&own).unwrap_or_default();
    let hashes = world.collect(&told)?;
    let hashes = hashes
        .iter()
        .map(|told| serde_json::from_str(told).unwrap_or_default());
    let hashes: Vec<Vec<u8>> = hashes.collect();
    Ok(FileDigest::of_parts(bytes, part_bytes, &hashes))
}
