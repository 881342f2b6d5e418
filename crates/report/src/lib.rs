//! Pictures of memory: the timeline of one training step, and memory against speed.
//!
//! A picture is a [`Scene`], a list of marks, made from plain figures. The same scene is
//! written as SVG, drawn as PNG, or shown in a few lines of a terminal; nothing here depends on
//! fonts, a clock or the system, and the same figures give the same bytes.
//!
//! ```
//! use cinch_report::{FrontPicture, FrontPoint, front, sparkline};
//!
//! assert_eq!(sparkline(&[1, 4, 8, 2], 4), "▁▄█▂");
//! let picture = FrontPicture {
//!     title: "memory against speed".to_owned(),
//!     unit: "tokens/s".to_owned(),
//!     budget_bytes: Some(8 << 30),
//!     points: vec![FrontPoint {
//!         label: "recommended".to_owned(),
//!         bytes: 6 << 30,
//!         rate: 90_600.0,
//!         recommended: true,
//!     }],
//!     ..FrontPicture::default()
//! };
//! assert!(front(&picture).to_svg().contains("90.60 k tokens/s"));
//! ```

mod axis;
mod columns;
mod error;
mod font;
mod frame;
mod front;
mod label;
mod page;
mod palette;
mod pixels;
mod scene;
mod step;
mod svg;
mod terminal;
mod timeline;

pub use error::ReportError;
pub use front::{FrontPicture, FrontPoint, front};
pub use page::{Page, PageChart, Part, Section, Unit, held_table};
pub use palette::{Color, Ink, Theme};
pub use scene::{Anchor, Area, Circle, Line, Mark, Place, Point, Rectangle, Scene, Text};
pub use step::{Held, Moment, StepPicture, Words};
pub use terminal::{TextChart, sparkline, text_chart};
pub use timeline::timeline;
