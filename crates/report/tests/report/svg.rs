//! The SVG is XML, says what the scene says, and survives any text.

use cinch_report::{Mark, Scene, StepPicture, front, timeline};
use roxmltree::{Document, Node};

use crate::sample::{GIB, Sample, choices};

fn texts<'a>(document: &'a Document<'_>) -> Vec<&'a str> {
    let nodes = document.descendants().filter(|n| n.has_tag_name(TEXT));
    nodes.filter_map(|node| node.text()).collect()
}

const NAMESPACE: &str = "http://www.w3.org/2000/svg";
const TEXT: (&str, &str) = (NAMESPACE, "text");

fn child<'a>(node: Node<'a, 'a>, name: &'static str) -> Option<&'a str> {
    let found = node.children().find(|n| n.has_tag_name((NAMESPACE, name)));
    found.and_then(|n| n.text())
}

#[test]
fn a_step_is_well_formed_and_accessible() {
    let picture = Sample::default().step();
    let svg = timeline(&picture).to_svg();
    let document = Document::parse(&svg).unwrap();
    let root = document.root_element();
    assert!(root.has_tag_name((NAMESPACE, "svg")));
    assert_eq!(root.attribute("viewBox"), Some("0 0 1200 640"));
    assert_eq!(root.attribute("role"), Some("img"));
    assert_eq!(child(root, "title"), Some(picture.title.as_str()));
    let description = child(root, "desc").unwrap();
    assert!(description.contains("loss.backward"), "{description}");
    let texts = texts(&document);
    for text in [
        "forward",
        "recompute",
        "backward",
        "update",
        "optimizer states",
        "8 GiB",
    ] {
        assert!(texts.contains(&text), "no `{text}` in {texts:?}");
    }
    let hovers = root
        .descendants()
        .filter(|n| n.has_tag_name((NAMESPACE, "title")));
    let hovers: Vec<&str> = hovers.filter_map(|n| n.text()).collect();
    assert!(hovers.contains(&"optimizer states: 950.0 MiB at the peak"));
}

#[test]
fn hostile_names_stay_text() {
    let mut picture = Sample::default().step();
    let hostile = "a<b> & \"c\" 'd' ]]> \u{0}\u{8}\u{fffe}\n日本語";
    picture.title = hostile.to_owned();
    picture.subtitle = hostile.to_owned();
    picture.largest[0].name = hostile.to_owned();
    for moment in &mut picture.moments {
        moment.name = hostile.to_owned();
    }
    let svg = timeline(&picture).to_svg();
    let document = Document::parse(&svg).unwrap();
    let shown = "a<b> & \"c\" 'd' ]]>";
    assert!(texts(&document).iter().any(|text| text.starts_with(shown)));
    // Nothing in a name opens an element.
    assert!(document.descendants().all(|n| n.tag_name().name() != "b"));
    let mut choices = choices();
    choices.points[0].label = hostile.to_owned();
    choices.unit = hostile.to_owned();
    Document::parse(&front(&choices).to_svg()).unwrap();
}

/// Every class has its rule in both themes, and no rule is idle.
#[test]
fn classes_have_a_light_and_a_dark_colour() {
    for scene in [timeline(&Sample::default().step()), front(&choices())] {
        let svg = scene.to_svg();
        let document = Document::parse(&svg).unwrap();
        let style = child(document.root_element(), "style").unwrap();
        let (light, dark) = style
            .split_once("@media(prefers-color-scheme:dark)")
            .unwrap();
        let classes = document.descendants().filter_map(|n| n.attribute("class"));
        let classes: std::collections::BTreeSet<&str> = classes
            .flat_map(str::split_whitespace)
            .filter(|class| class.contains('-'))
            .collect();
        assert!(classes.len() > 10);
        for class in &classes {
            let rule = format!(".{class}{{");
            assert!(light.contains(&rule), "{class}");
            assert!(dark.contains(&rule), "{class}");
        }
        assert_eq!(dark.matches('.').count(), classes.len());
    }
}

/// The relative steps of a path, followed, lead to the points of the scene.
#[test]
fn paths_lead_where_the_scene_says() {
    let scene = timeline(&Sample::default().step());
    let svg = scene.to_svg();
    let document = Document::parse(&svg).unwrap();
    let paths = document.descendants().filter_map(|n| n.attribute("d"));
    let mut areas = 0;
    for (path, mark) in paths.zip(
        scene
            .marks
            .iter()
            .filter(|mark| matches!(mark, Mark::Area(_) | Mark::Line(_))),
    ) {
        let points = match mark {
            Mark::Area(area) => &area.points,
            Mark::Line(line) => &line.points,
            _ => unreachable!(),
        };
        let followed = follow(path);
        for &(x, y) in points {
            let near = |p: &(f64, f64)| (p.0 - x).abs() < 0.051 && (p.1 - y).abs() < 0.051;
            assert!(followed.iter().any(near), "({x}, {y}) is not on {path}");
        }
        areas += usize::from(path.ends_with('Z'));
    }
    assert_eq!(areas, 9);
}

/// The corners of a path of `M`, `h`, `v` and `l`.
fn follow(path: &str) -> Vec<(f64, f64)> {
    let mut points = Vec::new();
    let mut pen = (0.0, 0.0);
    let mut rest = path.trim_end_matches('Z');
    while let Some(letter) = rest.chars().next() {
        let after = &rest[1..];
        let end = after.find(char::is_alphabetic).unwrap_or(after.len());
        let numbers: Vec<f64> = after[..end]
            .split(' ')
            .map(|n| n.parse().unwrap())
            .collect();
        rest = &after[end..];
        match (letter, &numbers[..]) {
            ('M', &[x, y]) => pen = (x, y),
            ('h', &[dx]) => pen.0 += dx,
            ('v', &[dy]) => pen.1 += dy,
            ('l', &[dx, dy]) => pen = (pen.0 + dx, pen.1 + dy),
            other => panic!("{other:?}"),
        }
        points.push(pen);
    }
    points
}

#[test]
fn thousands_of_nodes_are_a_small_file() {
    let picture = Sample {
        blocks: 96,
        ops: 40,
        recomputed: 48,
        seconds: false,
    };
    let picture = picture.step();
    assert!(picture.moments.len() > 9000);
    let svg = timeline(&picture).to_svg();
    assert!(svg.len() < 80_000, "{} bytes", svg.len());
}

#[test]
fn nothing_to_show_is_still_a_picture() {
    let empty = timeline(&StepPicture::default());
    let none = front(&cinch_report::FrontPicture::default());
    let mut one = Sample::default().step();
    one.moments.truncate(1);
    let mut idle = one.clone();
    idle.moments[0].seconds = Some(0.0);
    idle.budget_bytes = Some(GIB);
    for scene in [empty, none, timeline(&one), timeline(&idle)] {
        let svg = scene.to_svg();
        Document::parse(&svg).unwrap();
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}

#[test]
fn equal_figures_give_equal_files() {
    let scene = |_: u8| -> Scene { timeline(&Sample::default().step()) };
    assert_eq!(scene(0).to_svg(), scene(1).to_svg());
    assert_eq!(front(&choices()).to_svg(), front(&choices()).to_svg());
}
