//! What things are drawn in: names for colours, with one value for light and one for dark.
//!
//! A scene never holds a colour, only an [`Ink`]. The SVG writes both values and lets the
//! reader's system choose; a PNG is drawn in one [`Theme`].

use cinch_graph::Phase;
use cinch_plan::Category;

/// Which of the two values of each ink a picture is drawn in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Theme {
    #[default]
    Light,
    Dark,
}

/// Red, green, blue.
pub type Color = [u8; 3];

/// What something is drawn in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ink {
    Paper,
    Text,
    /// Text that explains other text.
    Muted,
    Grid,
    /// What is outside the arena.
    Overhead,
    Category(Category),
    Phase(Phase),
    Budget,
    /// The memory of the card, and what the plan allocates.
    Capacity,
    Peak,
    /// Points and lines of the front.
    Front,
    /// A point that another one beats, or that does not fit.
    Beaten,
    Recommended,
}

impl Ink {
    pub fn color(self, theme: Theme) -> Color {
        let (light, dark) = self.both();
        let hex: u32 = match theme {
            Theme::Light => light,
            Theme::Dark => dark,
        };
        let [_, red, green, blue] = hex.to_be_bytes();
        [red, green, blue]
    }

    /// Light and dark, as one writes them in a style sheet. The areas are of similar lightness,
    /// so that none shouts; neighbours in the stack differ in hue.
    fn both(self) -> (u32, u32) {
        match self {
            Self::Paper => (0xfd_fd_fc, 0x14_17_1c),
            Self::Text => (0x20_26_30, 0xe7_e9_ec),
            Self::Muted => (0x66_6f_7d, 0x9a_a3_b0),
            Self::Grid => (0xe4_e6_ea, 0x2b_31_3a),
            Self::Overhead => (0xcd_d1_d7, 0x4b_52_5d),
            Self::Category(Category::Weights) => (0x4f_6d_96, 0x5c_7e_ae),
            Self::Category(Category::ComputeCopies) => (0x86_a1_c3, 0x86_a3_cb),
            Self::Category(Category::Gradients) => (0xcf_94_58, 0xcd_93_59),
            Self::Category(Category::Optimizer) => (0x8c_7a_ad, 0x94_81_b8),
            Self::Category(Category::Activations) => (0x5d_9f_90, 0x55_9c_8c),
            Self::Category(Category::Workspace) => (0xc8_6e_72, 0xc9_72_77),
            Self::Category(Category::Batch) => (0xb5_ab_62, 0xae_a5_5f),
            Self::Category(Category::Cache) => (0x6b_9f_c0, 0x64_9a_bd),
            Self::Category(Category::Staged) => (0x6f_8f_b8, 0x6f_91_bd),
            Self::Category(Category::Exchanged) => (0xdd_b3_82, 0xd9_af_7e),
            Self::Category(Category::Other) => (0x97_9e_a9, 0x78_80_8c),
            Self::Phase(Phase::Forward) => (0xa9_c3_de, 0x4d_6a_8a),
            Self::Phase(Phase::Recompute) => (0xec_c9_8f, 0x8d_6e_3b),
            Self::Phase(Phase::Backward) => (0xb4_d3_b4, 0x4c_75_54),
            Self::Phase(Phase::Exchange) => (0xd9_b3_a6, 0x85_5b_4d),
            Self::Phase(Phase::Update) => (0xc9_ba_e0, 0x6d_5d_8c),
            Self::Budget => (0xb4_2c_2c, 0xff_85_7c),
            Self::Capacity => (0x4a_52_5f, 0xb4_bb_c6),
            Self::Peak => (0x20_26_30, 0xff_ff_ff),
            Self::Front => (0x4f_6d_96, 0x7d_a2_d6),
            Self::Beaten => (0xb3_b9_c2, 0x59_61_6d),
            Self::Recommended => (0x2f_85_6f, 0x5c_c2_a8),
        }
    }

    /// The name in the style sheet.
    pub(crate) fn class(self) -> &'static str {
        match self {
            Self::Paper => "paper",
            Self::Text => "text",
            Self::Muted => "muted",
            Self::Grid => "grid",
            Self::Overhead => "overhead",
            Self::Category(Category::Weights) => "weights",
            Self::Category(Category::ComputeCopies) => "copies",
            Self::Category(Category::Gradients) => "gradients",
            Self::Category(Category::Optimizer) => "optimizer",
            Self::Category(Category::Activations) => "activations",
            Self::Category(Category::Workspace) => "workspace",
            Self::Category(Category::Batch) => "batch",
            Self::Category(Category::Cache) => "cache",
            Self::Category(Category::Staged) => "staged",
            Self::Category(Category::Exchanged) => "exchanged",
            Self::Category(Category::Other) => "other",
            Self::Phase(Phase::Forward) => "forward",
            Self::Phase(Phase::Recompute) => "recompute",
            Self::Phase(Phase::Backward) => "backward",
            Self::Phase(Phase::Exchange) => "exchange",
            Self::Phase(Phase::Update) => "update",
            Self::Budget => "budget",
            Self::Capacity => "capacity",
            Self::Peak => "peak",
            Self::Front => "front",
            Self::Beaten => "beaten",
            Self::Recommended => "recommended",
        }
    }
}
