//! Which machine this is.

/// The name of this machine, reduced to what is safe in a file name.
pub(crate) fn host_name() -> String {
    #[cfg(unix)]
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    #[cfg(not(unix))]
    let name = std::env::var("COMPUTERNAME").unwrap_or_default();
    let safe: String = name
        .chars()
        .filter(|character| character.is_ascii_alphanumeric() || "-_.".contains(*character))
        .collect();
    if safe.is_empty() {
        "localhost".to_owned()
    } else {
        safe
    }
}
