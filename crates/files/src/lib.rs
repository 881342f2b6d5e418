//! What every crate that reads or writes files needs: opening only regular ones, replacing one
//! whole, making a folder whole, folders that outlast a power cut, how paths are told, and where the cache lies.

mod cache;
mod folder;
mod new_folder;
mod read;
mod replace;
mod shown;

pub use cache::{CACHE_VARIABLE, Refused, cache_folder, find_cache_folder, private_folder};
pub use folder::{create_folder, parent_of, sync_folder};
pub use new_folder::NewFolder;
pub use read::{MAX_READ, open_regular, read_regular, read_regular_text};
pub use replace::{PARTIAL_PREFIX, Replacement, replace};
pub use shown::{Shown, shown};
