//! The PNG, read back: its size, the colour of the peak, and areas as high as their bytes.

use cinch_graph::Phase;
use cinch_plan::{BytesByCategory, Category};
use cinch_report::{
    Color, Ink, Mark, Moment, ReportError, Scene, StepPicture, Theme, front, timeline,
};

use crate::sample::{GIB, MIB, Sample, choices};

struct Image {
    width: usize,
    height: usize,
    bytes: Vec<u8>,
}

impl Image {
    fn decode(file: &[u8]) -> Self {
        let decoder = png::Decoder::new(std::io::Cursor::new(file));
        let mut reader = decoder.read_info().unwrap();
        let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut bytes).unwrap();
        assert_eq!(info.color_type, png::ColorType::Rgb);
        Self {
            width: info.width as usize,
            height: info.height as usize,
            bytes,
        }
    }

    fn pixel(&self, x: f64, y: f64) -> Color {
        let start = 3 * (y as usize * self.width + x as usize);
        self.bytes[start..start + 3].try_into().unwrap()
    }

    /// How many pixels of a column have a colour.
    fn count(&self, x: f64, color: Color) -> usize {
        (0..self.height)
            .filter(|&y| self.pixel(x, y as f64) == color)
            .count()
    }
}

const SCALE: f64 = 2.0;

/// Pixels per byte, and the first column of the plot: from the labels of the axes, not from the
/// areas.
fn axes(scene: &Scene) -> (f64, f64) {
    let label = |wanted: &str| {
        let texts = scene.marks.iter().filter_map(|mark| match mark {
            Mark::Text(text) if text.text == wanted => Some(text.at),
            _ => None,
        });
        texts.collect::<Vec<_>>()
    };
    let [level, across] = label("0")[..] else {
        panic!("two axes have a zero");
    };
    let gib = label("1 GiB")[0];
    (SCALE * (level.1 - gib.1) / GIB as f64, SCALE * across.0)
}

#[test]
fn areas_are_as_high_as_their_bytes() {
    let rows: [[u64; 4]; 4] = [
        [600, 900, 100, 0],
        [600, 900, 1700, 300],
        [600, 900, 1100, 512],
        [600, 900, 5, 0],
    ];
    let categories = [
        Category::Weights,
        Category::Optimizer,
        Category::Activations,
        Category::Workspace,
    ];
    let moments = rows.iter().map(|row| {
        let mut bytes = BytesByCategory::default();
        for (category, mib) in categories.into_iter().zip(row) {
            bytes[category.index()] = mib * MIB;
        }
        Moment {
            name: "node".to_owned(),
            phase: Phase::Forward,
            block: None,
            seconds: None,
            bytes,
        }
    });
    let picture = StepPicture {
        overhead_bytes: 400 * MIB,
        moments: moments.collect(),
        budget_bytes: Some(4 * GIB),
        ..StepPicture::default()
    };
    let scene = timeline(&picture);
    let (per_byte, left) = axes(&scene);
    let image = Image::decode(&scene.to_png(SCALE).unwrap());
    let column_width = (SCALE * 816.0) / 4.0;
    for (index, row) in rows.iter().enumerate() {
        // Off the middle, where the peak's dot and its label are.
        let x = left + (index as f64 + 0.2) * column_width;
        let layers = categories.map(Ink::Category).into_iter().zip(*row);
        for (ink, mib) in layers.chain([(Ink::Overhead, 400)]) {
            let height = image.count(x, ink.color(Theme::Light)) as f64;
            let expected = (mib * MIB) as f64 * per_byte;
            // A mixed pixel at either end is of neither colour.
            assert!(
                (height - expected).abs() <= 2.0,
                "{ink:?}: {height} {expected}"
            );
        }
    }
}

/// The dot's middle, found from the figures: over the node with the most bytes.
#[test]
fn the_peak_is_marked_where_it_is() {
    let picture = Sample {
        seconds: false,
        ..Sample::default()
    };
    let picture = picture.step();
    let totals: Vec<u64> = picture.moments.iter().map(Moment::total).collect();
    let most = *totals.iter().max().unwrap();
    let peak = totals.iter().position(|&total| total == most).unwrap();
    let scene = timeline(&picture);
    let texts = scene.marks.iter().filter_map(|mark| match mark {
        Mark::Text(text) => Some(text),
        _ => None,
    });
    let texts: Vec<_> = texts.collect();
    let y_of = |label: &str| texts.iter().find(|t| t.text == label).unwrap().at.1;
    // The baseline of a label is 4 below its line.
    let per_byte = (y_of("0") - y_of("2 GiB")) / (2 * GIB) as f64;
    let y = y_of("0") - 4.0 - (most + picture.overhead_bytes) as f64 * per_byte;
    let x = 84.0 + (peak as f64 + 0.5) / totals.len() as f64 * 816.0;
    for theme in [Theme::Light, Theme::Dark] {
        let image = Image::decode(&scene.to_png_in(theme, SCALE).unwrap());
        let color = Ink::Peak.color(theme);
        for (dx, dy) in [(0.0, 0.0), (3.0, 0.0), (-3.0, 0.0), (0.0, 3.0), (0.0, -3.0)] {
            assert_eq!(image.pixel(SCALE * x + dx, SCALE * y + dy), color);
        }
    }
}

/// One node in nine thousand with a little more than all others is still the highest point.
#[test]
fn a_short_peak_survives_thousands_of_nodes() {
    let sample = Sample {
        blocks: 96,
        ops: 40,
        recomputed: 96,
        seconds: true,
    };
    let mut picture = sample.step();
    picture.overhead_bytes = 0;
    picture.budget_bytes = None;
    picture.capacity_bytes = None;
    let spike = 6001;
    let workspace = &mut picture.moments[spike].bytes[Category::Workspace.index()];
    *workspace = 8 * GIB;
    picture.moments[spike].seconds = Some(1e-9);
    picture.arena_bytes = 0;
    let scene = timeline(&picture);
    let areas = scene.marks.iter().filter_map(|mark| match mark {
        Mark::Area(area) => Some(area),
        _ => None,
    });
    let top = areas.flat_map(|area| &area.points).map(|point| point.1);
    let top = top.fold(f64::INFINITY, f64::min);
    let dot = scene.marks.iter().find_map(|mark| match mark {
        Mark::Circle(circle) => Some(circle.center),
        _ => None,
    });
    assert_eq!(dot.unwrap().1, top);
}

#[test]
fn a_picture_has_the_size_that_was_asked_for_and_the_same_bytes_each_time() {
    for scene in [timeline(&Sample::default().step()), front(&choices())] {
        let file = scene.to_png(SCALE).unwrap();
        let image = Image::decode(&file);
        assert_eq!((image.width, image.height), (2400, 1280));
        assert_eq!(file, scene.clone().to_png(SCALE).unwrap());
        let paper = Ink::Paper.color(Theme::Light);
        assert_eq!(image.pixel(2.0, 2.0), paper);
        let small = Image::decode(&scene.to_png(0.5).unwrap());
        assert_eq!((small.width, small.height), (600, 320));
        let dark = Image::decode(&scene.to_png_in(Theme::Dark, 1.0).unwrap());
        assert_eq!(dark.pixel(1198.0, 638.0), Ink::Paper.color(Theme::Dark));
    }
}

/// Text is there without any font of the system: the title's line has ink, the same for the
/// same letters and another for others.
#[test]
fn titles_are_drawn() {
    let title_of = |title: &str| {
        let picture = StepPicture {
            title: title.to_owned(),
            ..StepPicture::default()
        };
        let image = Image::decode(&timeline(&picture).to_png(1.0).unwrap());
        let ink = Ink::Text.color(Theme::Light);
        let dark = (30..700).flat_map(|x| (20..60).map(move |y| (x, y)));
        dark.filter(|&(x, y)| image.pixel(f64::from(x), f64::from(y)) == ink)
            .count()
    };
    assert_eq!(title_of(""), 0);
    assert!(title_of("Mamba small") > 200);
    assert!(title_of("Mamba smaller") > title_of("Mamba small"));
}

#[test]
fn scales_that_make_no_picture_are_refused() {
    let scene = timeline(&StepPicture::default());
    for scale in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-6] {
        let error = scene.to_png(scale).unwrap_err();
        assert!(
            matches!(error, ReportError::Scale { .. }),
            "{scale}: {error}"
        );
        assert!(error.to_string().contains("hint:"));
    }
    let error = scene.to_png(1e9).unwrap_err();
    assert!(matches!(error, ReportError::TooLarge { .. }), "{error}");
}
