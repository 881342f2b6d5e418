//! What every crate that writes files needs: replacing one whole, clearing what a killed writer
//! left, folders that outlast a power cut, reading a part, and where the cache lies.

mod cache;
mod folder;
mod read;
mod replace;

pub use cache::{CACHE_VARIABLE, Refused, cache_folder, find_cache_folder, private_folder};
pub use folder::{create_folder, parent_of, sync_folder};
pub use read::read_exact_at;
pub use replace::{PARTIAL_PREFIX, Replacement, replace, sweep};
