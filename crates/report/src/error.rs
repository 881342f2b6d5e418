//! What can go wrong between a scene and its pixels. Scenes and SVG cannot fail.

use thiserror::Error;

#[derive(Debug, Error)]
pub enum ReportError {
    #[error(
        "a picture cannot be drawn at scale {scale}\nhint: 1 gives {width}×{height} pixels, 2 is sharp on most screens"
    )]
    Scale { scale: f64, width: u32, height: u32 },

    #[error(
        "a picture at scale {scale} would be {width}×{height} pixels, and no side may have more than {limit}\nhint: use a smaller scale, or the SVG, which is sharp at every size"
    )]
    TooLarge {
        scale: f64,
        width: u64,
        height: u64,
        limit: u32,
    },

    #[error("the picture could not be written as PNG: {0}")]
    Encode(#[from] png::EncodingError),
}
