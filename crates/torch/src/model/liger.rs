//! Which of Liger's kernels run in the place of a model's own ops. Liger patches a model by its type, kernel by kernel; what
//! the kernels allocate stands in [`crate::eager::op::liger`].

/// The kernels that a run asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Liger {
    pub rope: bool,
    pub rms_norm: bool,
    /// SwiGLU or GeGLU: the gate of the feed-forward part.
    pub gate: bool,
    pub cross_entropy: bool,
    pub fused_linear_cross_entropy: bool,
}

/// What becomes of hidden states and labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LigerLoss {
    /// The head, then transformers' loss.
    Own,
    /// The head, then Liger's cross entropy, whose gradient takes the place of the logits.
    CrossEntropy,
    /// Head and loss in one, over chunks of tokens: there are never logits of all.
    FusedLinear,
}

impl Liger {
    /// What Liger applies where nothing is chosen.
    pub const USUAL: Liger = Liger {
        rope: true,
        rms_norm: true,
        gate: true,
        cross_entropy: false,
        fused_linear_cross_entropy: true,
    };

    /// The names of the arguments by which Liger is told which kernels to apply.
    pub const KERNELS: [&str; 6] = [
        "rope",
        "rms_norm",
        "swiglu",
        "geglu",
        "cross_entropy",
        "fused_linear_cross_entropy",
    ];

    /// Switches a kernel by its argument's name; false of another name.
    pub fn switch(&mut self, kernel: &str, is_on: bool) -> bool {
        let place = match kernel {
            "rope" => &mut self.rope,
            "rms_norm" => &mut self.rms_norm,
            "swiglu" | "geglu" => &mut self.gate,
            "cross_entropy" => &mut self.cross_entropy,
            "fused_linear_cross_entropy" => &mut self.fused_linear_cross_entropy,
            _ => return false,
        };
        *place = is_on;
        true
    }

    pub fn is_on(self) -> bool {
        self != Liger::default()
    }

    /// The fused loss needs no other.
    pub fn loss(self) -> LigerLoss {
        match (self.fused_linear_cross_entropy, self.cross_entropy) {
            (true, _) => LigerLoss::FusedLinear,
            (false, true) => LigerLoss::CrossEntropy,
            (false, false) => LigerLoss::Own,
        }
    }
}
