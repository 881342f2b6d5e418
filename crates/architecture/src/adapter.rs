//! The linear layers that LoRA adapters can be put on.

/// Names as `peft` matches them: the last part of a module's name.
#[derive(Debug)]
pub struct Adapters {
    /// Every linear layer inside the repeated blocks, in the order in which they run.
    pub linear: &'static [&'static str],
    /// What peft takes where a configuration names none.
    pub usual: &'static [&'static str],
}
