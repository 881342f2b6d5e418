//! A scene as PNG: the same marks, filled and stroked on a grid of pixels.
//!
//! The rasterizer works in single precision on one thread, and the encoder has no clock and no
//! names in it: the same scene gives the same bytes.

use tiny_skia::{
    FillRule, LineCap, LineJoin, Paint, Path, PathBuilder, Pixmap, Rect, Stroke, StrokeDash,
    Transform,
};

use crate::error::ReportError;
use crate::font::{self, Segment};
use crate::palette::{Ink, Theme};
use crate::scene::{Anchor, Circle, Line, Mark, Place, Point, Scene, Text};

/// More than this on a side is no picture to look at, and half a gigabyte of pixels.
const MAX_SIDE: u32 = 12_000;

impl Scene {
    /// The picture as a PNG in light colours; 2 pixels per unit are sharp on most screens.
    pub fn to_png(&self, scale: f64) -> Result<Vec<u8>, ReportError> {
        self.to_png_in(Theme::Light, scale)
    }

    pub fn to_png_in(&self, theme: Theme, scale: f64) -> Result<Vec<u8>, ReportError> {
        let mut canvas = Canvas::new(self, theme, scale)?;
        for mark in &self.marks {
            canvas.draw(mark);
        }
        encode(&canvas.pixels)
    }
}

struct Canvas {
    pixels: Pixmap,
    theme: Theme,
    scale: Transform,
}

impl Canvas {
    fn new(scene: &Scene, theme: Theme, scale: f64) -> Result<Self, ReportError> {
        let (width, height) = (f64::from(scene.width), f64::from(scene.height));
        let rejected = || ReportError::Scale {
            scale,
            width: scene.width,
            height: scene.height,
        };
        if !scale.is_finite() || scale <= 0.0 {
            return Err(rejected());
        }
        let (wide, high) = ((width * scale).round(), (height * scale).round());
        if wide > f64::from(MAX_SIDE) || high > f64::from(MAX_SIDE) {
            return Err(ReportError::TooLarge {
                scale,
                width: wide as u64,
                height: high as u64,
                limit: MAX_SIDE,
            });
        }
        Ok(Self {
            // None for a side of no pixels.
            pixels: Pixmap::new(wide as u32, high as u32).ok_or_else(rejected)?,
            theme,
            scale: Transform::from_scale(scale as f32, scale as f32),
        })
    }

    fn draw(&mut self, mark: &Mark) {
        match mark {
            Mark::Rectangle(rectangle) => {
                let path = rounded(rectangle.place, rectangle.radius);
                self.fill(path, rectangle.fill, rectangle.opacity);
            }
            Mark::Area(area) => {
                let mut builder = polyline(&area.points);
                builder.close();
                self.fill(builder.finish(), area.fill, area.opacity);
            }
            Mark::Line(line) => self.line(line),
            Mark::Circle(circle) => self.circle(circle),
            Mark::Text(text) => self.text(text),
        }
    }

    fn paint(&self, ink: Ink, opacity: f64) -> Paint<'static> {
        let [red, green, blue] = ink.color(self.theme);
        let alpha = (opacity * 255.0).round() as u8;
        let mut paint = Paint::default();
        paint.set_color_rgba8(red, green, blue, alpha);
        paint.anti_alias = true;
        paint
    }

    /// An empty path has no outline, and nothing is drawn.
    fn fill(&mut self, path: Option<Path>, ink: Ink, opacity: f64) {
        let paint = self.paint(ink, opacity);
        if let Some(path) = path {
            let rule = FillRule::Winding;
            self.pixels.fill_path(&path, &paint, rule, self.scale, None);
        }
    }

    fn stroke(&mut self, path: Option<Path>, ink: Ink, width: f64, dash: Option<(f64, f64)>) {
        let paint = self.paint(ink, 1.0);
        let stroke = Stroke {
            width: width as f32,
            line_cap: LineCap::Round,
            line_join: LineJoin::Round,
            dash: dash.and_then(|(dash, gap)| StrokeDash::new(vec![dash as f32, gap as f32], 0.0)),
            ..Stroke::default()
        };
        if let Some(path) = path {
            self.pixels
                .stroke_path(&path, &paint, &stroke, self.scale, None);
        }
    }

    fn line(&mut self, line: &Line) {
        self.stroke(
            polyline(&line.points).finish(),
            line.ink,
            line.width,
            line.dash,
        );
    }

    fn circle(&mut self, circle: &Circle) {
        let (x, y) = circle.center;
        let path = PathBuilder::from_circle(x as f32, y as f32, circle.radius as f32);
        self.fill(path.clone(), circle.fill, 1.0);
        if let Some(ring) = circle.ring {
            self.stroke(path, ring, Circle::RING, None);
        }
    }

    fn text(&mut self, text: &Text) {
        let width = font::width(&text.text, text.size, text.bold);
        let left = match text.anchor {
            Anchor::Start => text.at.0,
            Anchor::Middle => text.at.0 - width / 2.0,
            Anchor::End => text.at.0 - width,
        };
        let place = |(x, y): Point| ((left + x) as f32, (text.at.1 + y) as f32);
        let mut builder = PathBuilder::new();
        for segment in font::outline(&text.text, text.size, text.bold) {
            match segment {
                Segment::Move(to) => {
                    let (x, y) = place(to);
                    builder.move_to(x, y);
                }
                Segment::Line(to) => {
                    let (x, y) = place(to);
                    builder.line_to(x, y);
                }
                Segment::Cubic(leave, arrive, to) => {
                    let ((ax, ay), (bx, by), (x, y)) = (place(leave), place(arrive), place(to));
                    builder.cubic_to(ax, ay, bx, by, x, y);
                }
            }
        }
        let pen = font::pen(text.size, text.bold);
        self.stroke(builder.finish(), text.ink, pen, None);
    }
}

fn polyline(points: &[Point]) -> PathBuilder {
    let mut builder = PathBuilder::new();
    for (index, &(x, y)) in points.iter().enumerate() {
        match index {
            0 => builder.move_to(x as f32, y as f32),
            _ => builder.line_to(x as f32, y as f32),
        }
    }
    builder
}

/// A rectangle with round corners.
fn rounded(place: Place, radius: f64) -> Option<Path> {
    /// Of a quarter circle's handles.
    const ARC: f64 = 0.5523;
    let radius = radius.min(place.width / 2.0).min(place.height / 2.0);
    let [left, top, right, bottom] =
        [place.left, place.top, place.right(), place.bottom()].map(|side| side as f32);
    if radius <= 0.0 {
        return Rect::from_ltrb(left, top, right, bottom).map(PathBuilder::from_rect);
    }
    let (r, h) = (radius as f32, (radius * (1.0 - ARC)) as f32);
    let mut builder = PathBuilder::new();
    builder.move_to(left + r, top);
    builder.line_to(right - r, top);
    builder.cubic_to(right - h, top, right, top + h, right, top + r);
    builder.line_to(right, bottom - r);
    builder.cubic_to(right, bottom - h, right - h, bottom, right - r, bottom);
    builder.line_to(left + r, bottom);
    builder.cubic_to(left + h, bottom, left, bottom - h, left, bottom - r);
    builder.line_to(left, top + r);
    builder.cubic_to(left, top + h, left + h, top, left + r, top);
    builder.close();
    builder.finish()
}

fn encode(pixels: &Pixmap) -> Result<Vec<u8>, ReportError> {
    // The paper covers everything, so that there is nothing to see through.
    let opaque: Vec<u8> = pixels
        .pixels()
        .iter()
        .flat_map(|pixel| [pixel.red(), pixel.green(), pixel.blue()])
        .collect();
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, pixels.width(), pixels.height());
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    encoder.set_filter(png::Filter::NoFilter);
    encoder.set_source_srgb(png::SrgbRenderingIntent::Perceptual);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&opaque)?;
    writer.finish()?;
    Ok(bytes)
}
