//! What every crate that reads or writes files needs: opening only regular ones, reading a part,
//! replacing one whole, clearing what a killed writer left, making a folder whole, folders that
//! outlast a power cut, how paths are told, and where the cache lies.

mod cache;
mod folder;
mod new_folder;
mod read;
mod read_at;
mod replace;
mod shown;

pub use cache::{CACHE_VARIABLE, Refused, cache_folder, find_cache_folder, private_folder};
pub use folder::{create_folder, parent_of, sync_folder};
pub use new_folder::NewFolder;
pub use read::{MAX_READ, open_regular, read_regular, read_regular_text};
pub use read_at::read_exact_at;
pub use replace::{PARTIAL_PREFIX, Replacement, replace, sweep};
pub use shown::{Shown, shown};
