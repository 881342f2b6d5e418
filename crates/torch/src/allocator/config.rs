//! The allocator's settings: the text of `PYTORCH_ALLOC_CONF` (before PyTorch 2.9
//! `PYTORCH_CUDA_ALLOC_CONF`), with PyTorch's syntax and its limits.

use thiserror::Error;

use super::size::LARGE_SEGMENT;

const MIB: u64 = 1 << 20;

/// `roundup_power2_divisions` has one value for each power of two from 1 MiB on; smaller
/// requests use the first, larger ones the last.
const INTERVALS: usize = 16;

const KEYS: [&str; 7] = [
    "expandable_segments",
    "max_split_size_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "max_non_split_rounding_mb",
    "large_segment_size_mb",
    "per_process_memory_fraction",
];

/// Settings of PyTorch that are about host memory, locks or graph capture: accepted, and
/// without effect on the memory of the device.
const WITHOUT_EFFECT: [&str; 10] = [
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
    "use_kernel_mapped_memory",
];

/// A setting that PyTorch would not take either.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    #[error(
        "allocator setting `{key}` is unknown\nhint: known are {known}; several are separated by commas, as in `expandable_segments:True,max_split_size_mb:128`"
    )]
    UnknownKey { key: String, known: String },
    #[error("allocator setting `{key}` is `{value}`, but must be {expected}")]
    Value {
        key: String,
        value: String,
        expected: String,
    },
    #[error("allocator settings `{text}`: expected {expected} after `{after}`\nhint: {form}")]
    Syntax {
        text: String,
        expected: String,
        after: String,
        form: &'static str,
    },
    #[error(
        "allocator setting backend:{backend} is not modelled: memory is then managed by the driver's pool\nhint: leave `backend` out, or set backend:native"
    )]
    Backend { backend: String },
}

const FORM: &str = "settings have the form key:value,key:value; \
                    lists the form roundup_power2_divisions:[256:1,512:2,>:4]";

/// What PyTorch's caching allocator is told.
#[derive(Clone, Debug, PartialEq)]
pub struct AllocatorConfig {
    /// One growing address range per stream and pool, mapped page by page.
    pub expandable_segments: bool,
    /// Blocks of this size or more are never split; `u64::MAX` when unset.
    pub max_split: u64,
    /// How much larger than an unsplittable request a block may be.
    pub max_non_split_rounding: u64,
    /// Share of the allowed memory above which old free segments are given back; 0 when off.
    pub garbage_collection_threshold: f64,
    /// The shared segment of the large pool, and the page of its expandable segments.
    pub large_segment: u64,
    /// Share of the device's memory that the process may reserve.
    pub memory_fraction: Option<f64>,
    roundup_divisions: [u64; INTERVALS],
}

impl Default for AllocatorConfig {
    fn default() -> Self {
        Self {
            expandable_segments: false,
            max_split: u64::MAX,
            max_non_split_rounding: LARGE_SEGMENT,
            garbage_collection_threshold: 0.0,
            large_segment: LARGE_SEGMENT,
            memory_fraction: None,
            roundup_divisions: [0; INTERVALS],
        }
    }
}

impl AllocatorConfig {
    /// Reads the value of `PYTORCH_ALLOC_CONF`. Empty text is the default.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let mut tokens = Tokens::new(text);
        while let Some(key) = tokens.next() {
            if matches!(key, "," | ":" | "[" | "]") {
                return Err(tokens.expected("a setting's name"));
            }
            tokens.take(":")?;
            config.set(key, &mut tokens)?;
            if !tokens.at_end() {
                tokens.take(",")?;
            }
        }
        if config.max_split < config.large_segment {
            return Err(ConfigError::Value {
                key: "max_split_size_mb".into(),
                value: (config.max_split / MIB).to_string(),
                expected: format!("{} or more", config.large_segment / MIB),
            });
        }
        Ok(config)
    }

    fn set(&mut self, key: &str, tokens: &mut Tokens<'_>) -> Result<(), ConfigError> {
        match key {
            "expandable_segments" => {
                self.expandable_segments = boolean(key, tokens.value(key)?)?;
            }
            "max_split_size_mb" => self.max_split = mebibytes(key, tokens.value(key)?, 1)?,
            "max_non_split_rounding_mb" => {
                let least = LARGE_SEGMENT / MIB;
                self.max_non_split_rounding = mebibytes(key, tokens.value(key)?, least)?;
            }
            "large_segment_size_mb" => {
                self.large_segment = mebibytes(key, tokens.value(key)?, 2)?;
            }
            "garbage_collection_threshold" => {
                self.garbage_collection_threshold =
                    share(key, tokens.value(key)?, "between 0 and 1", |x| {
                        x > 0.0 && x < 1.0
                    })?;
            }
            "per_process_memory_fraction" => {
                self.memory_fraction = Some(share(key, tokens.value(key)?, "from 0 to 1", |x| {
                    (0.0..=1.0).contains(&x)
                })?);
            }
            "roundup_power2_divisions" => self.set_divisions(key, tokens)?,
            "backend" => match tokens.value(key)? {
                "native" => {}
                backend => {
                    return Err(ConfigError::Backend {
                        backend: backend.into(),
                    });
                }
            },
            key if WITHOUT_EFFECT.contains(&key) => {
                tokens.value(key)?;
            }
            key => {
                return Err(ConfigError::UnknownKey {
                    key: key.into(),
                    known: KEYS.join(", "),
                });
            }
        }
        Ok(())
    }

    /// Either one number for all sizes, or a list of `MiB:divisions`. The first entry of a list
    /// also holds for everything smaller, `>` for everything after the last one named.
    fn set_divisions(&mut self, key: &str, tokens: &mut Tokens<'_>) -> Result<(), ConfigError> {
        let first = tokens.value(key)?;
        if first != "[" {
            let divisions = power_of_two(key, first, false)?;
            self.roundup_divisions = [divisions; INTERVALS];
            return Ok(());
        }
        let mut last_interval = None;
        loop {
            let interval = match tokens.next() {
                None => return Err(tokens.expected("`]`")),
                Some("]") => return Ok(()),
                Some(interval) => interval,
            };
            tokens.take(":")?;
            let divisions = power_of_two(key, tokens.value(key)?, true)?;
            if interval == ">" {
                let after = last_interval.map_or(0, |index: usize| index + 1);
                self.roundup_divisions[after..].fill(divisions);
            } else {
                let index = power_of_two(key, interval, false)?.ilog2() as usize;
                let index = index.min(INTERVALS - 1);
                if last_interval.is_none() {
                    self.roundup_divisions[..index].fill(divisions);
                }
                self.roundup_divisions[index] = divisions;
                last_interval = Some(index);
            }
            if tokens.peek() != Some("]") {
                tokens.take(",")?;
            }
        }
    }

    /// How many parts the interval between two powers of two has at this size; 0 and 1 mean no
    /// rounding beyond 512 bytes.
    pub fn roundup_divisions(&self, bytes: u64) -> u64 {
        let interval = (bytes / MIB).checked_ilog2().unwrap_or(0) as usize;
        self.roundup_divisions[interval.min(INTERVALS - 1)]
    }
}

fn boolean(key: &str, value: &str) -> Result<bool, ConfigError> {
    match value {
        "True" => Ok(true),
        "False" => Ok(false),
        _ => Err(wrong(
            key,
            value,
            "True or False, spelled with a capital letter",
        )),
    }
}

fn mebibytes(key: &str, value: &str, least: u64) -> Result<u64, ConfigError> {
    value
        .parse::<u64>()
        .ok()
        .filter(|&number| number >= least)
        .map(|number| number.saturating_mul(MIB))
        .ok_or_else(|| {
            wrong(
                key,
                value,
                &format!("a whole number of MiB, {least} or more"),
            )
        })
}

fn share(
    key: &str,
    value: &str,
    range: &str,
    inside: impl Fn(f64) -> bool,
) -> Result<f64, ConfigError> {
    value
        .parse::<f64>()
        .ok()
        .filter(|&number| inside(number))
        .ok_or_else(|| wrong(key, value, &format!("a number {range}")))
}

fn power_of_two(key: &str, value: &str, zero: bool) -> Result<u64, ConfigError> {
    value
        .parse::<u64>()
        .ok()
        .filter(|&number| number.is_power_of_two() || (zero && number == 0))
        .ok_or_else(|| wrong(key, value, "a power of two"))
}

fn wrong(key: &str, value: &str, expected: &str) -> ConfigError {
    ConfigError::Value {
        key: key.into(),
        value: value.into(),
        expected: expected.into(),
    }
}

/// Words and the four signs `, : [ ]`. White space between them means nothing.
struct Tokens<'text> {
    text: &'text str,
    rest: &'text str,
    last: &'text str,
}

impl<'text> Tokens<'text> {
    fn new(text: &'text str) -> Self {
        Self {
            text,
            rest: text.trim_start(),
            last: "",
        }
    }

    fn split(&self) -> Option<(&'text str, &'text str)> {
        let is_sign = |c: char| matches!(c, ',' | ':' | '[' | ']');
        let first = self.rest.chars().next()?;
        let end = if is_sign(first) {
            first.len_utf8()
        } else {
            self.rest
                .find(|c: char| is_sign(c) || c.is_whitespace())
                .unwrap_or(self.rest.len())
        };
        Some(self.rest.split_at(end))
    }

    fn next(&mut self) -> Option<&'text str> {
        let (token, rest) = self.split()?;
        self.rest = rest.trim_start();
        self.last = token;
        Some(token)
    }

    fn peek(&self) -> Option<&'text str> {
        self.split().map(|(token, _)| token)
    }

    fn at_end(&self) -> bool {
        self.rest.is_empty()
    }

    fn take(&mut self, sign: &str) -> Result<(), ConfigError> {
        if self.peek() == Some(sign) {
            self.next();
            Ok(())
        } else {
            Err(self.expected(&format!("`{sign}`")))
        }
    }

    fn value(&mut self, key: &str) -> Result<&'text str, ConfigError> {
        match self.peek() {
            Some(token) if !matches!(token, "," | ":" | "]") => {
                self.next();
                Ok(token)
            }
            _ => Err(self.expected(&format!("a value of {key}"))),
        }
    }

    fn expected(&self, expected: &str) -> ConfigError {
        ConfigError::Syntax {
            text: self.text.into(),
            expected: expected.into(),
            after: self.last.into(),
            form: FORM,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divisions(config: &AllocatorConfig, mebibytes: u64) -> u64 {
        config.roundup_divisions(mebibytes * MIB)
    }

    /// The values that PyTorch's own tests of its parser expect.
    #[test]
    fn reads_what_pytorch_reads() {
        let config = AllocatorConfig::parse(
            "max_split_size_mb:40,max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,\
             roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],\
             expandable_segments:True,pinned_use_background_threads:True",
        )
        .unwrap();
        assert_eq!(config.max_split, 40 * MIB);
        assert_eq!(config.max_non_split_rounding, 30 * MIB);
        assert_eq!(config.garbage_collection_threshold, 0.5);
        assert!(config.expandable_segments);
        let expected = [
            (32, 8),
            (64, 8),
            (128, 2),
            (256, 4),
            (512, 2),
            (1024, 4),
            (2048, 1),
            (8192, 1),
        ];
        for (size, expected) in expected {
            assert_eq!(divisions(&config, size), expected, "{size} MiB");
        }

        let config =
            AllocatorConfig::parse("roundup_power2_divisions:[128:8,256:16,512:1,2048:8,>:2]")
                .unwrap();
        let expected = [(64, 8), (256, 16), (1024, 0), (2048, 8), (4096, 2)];
        for (size, expected) in expected {
            assert_eq!(divisions(&config, size), expected, "{size} MiB");
        }
        assert_eq!(config.roundup_divisions(700), 8, "below 1 MiB");

        let config = AllocatorConfig::parse("large_segment_size_mb:15, max_split_size_mb:20,");
        assert_eq!(config.unwrap().large_segment, 15 * MIB);
        assert_eq!(
            AllocatorConfig::parse(" ").unwrap(),
            AllocatorConfig::default()
        );
    }

    #[test]
    fn refuses_what_pytorch_refuses() {
        let cases = [
            ("foo:123", "allocator setting `foo` is unknown"),
            ("max_split_size_mb", "expected `:`"),
            (
                "max_split_size_mb:",
                "expected a value of max_split_size_mb",
            ),
            ("max_split_size_mb:10", "is `10`, but must be 20 or more"),
            ("max_split_size_mb:-3", "must be a whole number of MiB"),
            (
                "max_split_size_mb:20,large_segment_size_mb:25",
                "25 or more",
            ),
            ("expandable_segments:true", "must be True or False"),
            (
                "garbage_collection_threshold:1.0",
                "a number between 0 and 1",
            ),
            (
                "garbage_collection_threshold:nan",
                "a number between 0 and 1",
            ),
            ("roundup_power2_divisions:3", "must be a power of two"),
            ("roundup_power2_divisions:[64:8", "expected `,`"),
            ("roundup_power2_divisions:[64:8,", "expected `]`"),
            ("roundup_power2_divisions:[65:8]", "must be a power of two"),
            (
                "expandable_segments:True max_split_size_mb:64",
                "expected `,`",
            ),
            ("backend:cudaMallocAsync", "is not modelled"),
            (":", "expected a setting's name"),
        ];
        for (text, message) in cases {
            let error = AllocatorConfig::parse(text).unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}
