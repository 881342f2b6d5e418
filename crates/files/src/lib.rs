//! What every crate that writes files needs: replacing one whole, folders that outlast a power
//! cut, and where the cache lies.

mod cache;
mod folder;
mod replace;

pub use cache::{CACHE_VARIABLE, Refused, cache_folder, find_cache_folder, private_folder};
pub use folder::{create_folder, parent_of, sync_folder};
pub use replace::{PARTIAL_PREFIX, Replacement, clear_abandoned, replace};
