//! Where tokenised data, compiled kernels and measurements are kept.

use std::ffi::OsString;
use std::path::PathBuf;

/// The environment variable that names the cache folder.
pub const CACHE_VARIABLE: &str = "CINCH_CACHE";

/// `$CINCH_CACHE`, or `cinch` in the user's cache folder; none where the environment names
/// neither.
pub fn cache_folder() -> Option<PathBuf> {
    cache_folder_from(|name| std::env::var_os(name))
}

fn cache_folder_from(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name: &str| {
        variable(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    set(CACHE_VARIABLE)
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("cinch")))
        .or_else(|| set("HOME").map(|folder| folder.join(".cache").join("cinch")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_folder_follows_the_environment() {
        let folder = |pairs: &[(&str, &str)]| {
            cache_folder_from(|name| {
                let pair = pairs.iter().find(|(key, _)| *key == name);
                pair.map(|(_, value)| OsString::from(value))
            })
        };
        let all = [
            ("HOME", "/h"),
            ("XDG_CACHE_HOME", "/x"),
            ("CINCH_CACHE", "/c"),
        ];
        let found = |path: &str| Some(PathBuf::from(path));
        assert_eq!(folder(&all), found("/c"));
        assert_eq!(folder(&all[..2]), found("/x/cinch"));
        assert_eq!(folder(&all[..1]), found("/h/.cache/cinch"));
        let empty = [("CINCH_CACHE", ""), ("HOME", "/h")];
        assert_eq!(folder(&empty), found("/h/.cache/cinch"));
        assert_eq!(folder(&[]), None);
    }
}
