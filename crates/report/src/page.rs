//! A page: figures, tables and charts in one HTML file that needs no network.
//!
//! Tables and figures are HTML and can be read without a script. Charts are data in the page, drawn
//! as SVG by a script that is part of it: values under the pointer or the arrow keys, zoom by
//! dragging, buttons or keys. Areas differ by pattern and lines by dash as well as by colour. A
//! policy in the page's head forbids every request.

use std::fmt::Write as _;

use cinch_plan::Category;
use serde_json::{Value, json};

use crate::columns::columns;
use crate::step::{Moment, StepPicture};
use crate::timeline::phase_name;

const STYLE: &str = include_str!("page/style.css");
const SCRIPT: &str = include_str!("page/script.js");

/// Points of a line and columns of a stack that a page holds.
const MOST_POINTS: usize = 600;
/// Tensors that are listed.
const MOST_HELD: usize = 24;

/// Everything that a page shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    pub title: String,
    pub subtitle: String,
    pub sections: Vec<Section>,
    /// Asks its server for news every so many seconds.
    pub refresh_seconds: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    pub title: String,
    pub parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// A sentence.
    Text(String),
    /// Lines as a terminal shows them.
    Lines(String),
    /// Names and values that matter most.
    Figures(Vec<(String, String)>),
    Table {
        header: Vec<String>,
        rows: Vec<Vec<String>>,
    },
    Chart(PageChart),
}

/// What the values of a chart are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unit {
    #[default]
    Number,
    Bytes,
    Percent,
    Seconds,
}

impl Unit {
    const fn name(self) -> &'static str {
        match self {
            Self::Number => "number",
            Self::Bytes => "bytes",
            Self::Percent => "percent",
            Self::Seconds => "seconds",
        }
    }
}

/// Lines over an axis, or areas on top of each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PageChart {
    pub title: String,
    /// In a sentence, for those who do not see it.
    pub description: String,
    pub x_name: String,
    pub x_unit: Unit,
    pub y_unit: Unit,
    pub is_stack: bool,
    /// Whether the axis begins at zero.
    pub from_zero: bool,
    pub series: Vec<(String, Vec<(f64, f64)>)>,
    /// Heights that mean something.
    pub levels: Vec<(String, f64)>,
    /// A place that is marked, and its name.
    pub marks: Vec<(f64, String)>,
    /// What each place of the axis is called, where it has a name.
    pub names: Vec<String>,
}

impl PageChart {
    /// The memory of a step, by what it is for.
    pub fn of_step(picture: &StepPicture) -> Self {
        let spans = picture.spans();
        let totals: Vec<u64> = picture.moments.iter().map(Moment::total).collect();
        let count = MOST_POINTS.min(picture.moments.len());
        let chosen = columns(&spans, &totals, count).highest;
        let moments: Vec<&Moment> = chosen
            .iter()
            .map(|&place| &picture.moments[place])
            .collect();
        let layer = |value: &dyn Fn(&Moment) -> u64| -> Vec<(f64, f64)> {
            let values = moments.iter().enumerate();
            values
                .map(|(place, moment)| (place as f64, value(moment) as f64))
                .collect()
        };
        let mut series = Vec::new();
        if picture.overhead_bytes > 0 {
            series.push((
                picture.words.outside.to_owned(),
                layer(&|_| picture.overhead_bytes),
            ));
        }
        for category in picture.stack() {
            let bytes = |moment: &Moment| moment.bytes[Category::index(category)];
            series.push((category.name().to_owned(), layer(&bytes)));
        }
        let most = moments.iter().map(|moment| moment.total()).max();
        let peak = moments
            .iter()
            .position(|moment| Some(moment.total()) == most);
        let mut levels = vec![(
            picture.words.total.to_owned(),
            picture.planned_bytes() as f64,
        )];
        levels.extend(
            picture
                .budget_bytes
                .map(|bytes| ("budget".to_owned(), bytes as f64)),
        );
        levels.extend(
            picture
                .capacity_bytes
                .map(|bytes| ("card".to_owned(), bytes as f64)),
        );
        let name = |moment: &&Moment| format!("{} · {}", phase_name(moment.phase), moment.name);
        Self {
            title: "Memory of one step".to_owned(),
            description: format!(
                "Live memory over {} moments of a step, at most {} bytes.",
                picture.moments.len(),
                picture.peak_bytes()
            ),
            x_name: "moment of the step".to_owned(),
            x_unit: Unit::Number,
            y_unit: Unit::Bytes,
            is_stack: true,
            from_zero: true,
            series,
            levels,
            marks: peak
                .map(|place| (place as f64, "peak".to_owned()))
                .into_iter()
                .collect(),
            names: moments.iter().map(name).collect(),
        }
    }

    fn as_json(&self) -> Value {
        let series = self.series.iter().map(|(name, points)| {
            let points = match self.is_stack {
                true => points.clone(),
                false => thinned(points),
            };
            let points: Vec<Value> = points.iter().map(|(x, y)| json!([x, y])).collect();
            json!({ "name": name, "points": points })
        });
        json!({
            "stack": self.is_stack,
            "zero": self.from_zero,
            "xname": self.x_name,
            "xunit": self.x_unit.name(),
            "yunit": self.y_unit.name(),
            "series": series.collect::<Vec<_>>(),
            "levels": self.levels.iter().map(|(name, y)| json!({"name": name, "y": y})).collect::<Vec<_>>(),
            "marks": self.marks.iter().map(|(x, name)| json!({"x": x, "name": name})).collect::<Vec<_>>(),
            "names": self.names,
        })
    }
}

/// At most [`MOST_POINTS`]: of each stretch the lowest and the highest, so that no peak is lost.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let points: Vec<(f64, f64)> = points
        .iter()
        .copied()
        .filter(|(x, y)| x.is_finite() && y.is_finite())
        .collect();
    if points.len() <= MOST_POINTS {
        return points;
    }
    let stretch = points.len().div_ceil(MOST_POINTS / 2);
    let mut kept = Vec::with_capacity(MOST_POINTS);
    for stretch in points.chunks(stretch) {
        let by_height = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let low = stretch.iter().min_by(by_height);
        let high = stretch.iter().max_by(by_height);
        let mut ends: Vec<(f64, f64)> = low.into_iter().chain(high).copied().collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        ends.dedup();
        kept.extend(ends);
    }
    kept
}

/// What is alive at the peak of a step, largest first.
pub fn held_table(picture: &StepPicture) -> Part {
    let kinds = picture.largest_kinds();
    let rows = kinds.iter().take(MOST_HELD).map(|held| {
        vec![
            held.name.clone(),
            cinch_config::Bytes::new(held.bytes).to_string(),
        ]
    });
    Part::Table {
        header: vec!["alive at the peak".to_owned(), "size".to_owned()],
        rows: rows.collect(),
    }
}

impl Page {
    /// The whole file.
    pub fn to_html(&self) -> String {
        let connect = match self.refresh_seconds {
            Some(_) => "; connect-src 'self'",
            None => "",
        };
        let refresh = self.refresh_seconds.map_or_else(String::new, |seconds| {
            format!(" data-refresh=\"{seconds}\"")
        });
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\"{refresh}>\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:{connect}\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <link rel=\"icon\" href=\"data:,\">\n\
             <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
             <a class=\"skip\" href=\"#main\">to the contents</a>\n\
             {}<script>\n{SCRIPT}</script>\n</body>\n</html>\n",
            escape(&self.title),
            self.body(),
        )
    }

    /// What changes while a run goes on: all between the head and the script.
    pub fn body(&self) -> String {
        let mut html = format!(
            "<main id=\"main\">\n<header>\n<button type=\"button\" id=\"theme\" aria-pressed=\"false\">light / dark</button>\n\
             <h1>{}</h1>\n<p class=\"sub\">{}</p>\n</header>\n",
            escape(&self.title),
            escape(&self.subtitle)
        );
        if self.sections.len() > 2 {
            html.push_str("<nav aria-label=\"contents\"><ul>\n");
            for (index, section) in self.sections.iter().enumerate() {
                let _ = writeln!(
                    html,
                    "<li><a href=\"#s{index}\">{}</a></li>",
                    escape(&section.title)
                );
            }
            html.push_str("</ul></nav>\n");
        }
        let mut num_charts = 0;
        for (index, section) in self.sections.iter().enumerate() {
            let title = escape(&section.title);
            let _ = writeln!(
                html,
                "<section id=\"s{index}\" aria-labelledby=\"h{index}\">\n<h2 id=\"h{index}\">{title}</h2>"
            );
            for part in &section.parts {
                html.push_str(&part.html(&mut num_charts));
            }
            html.push_str("</section>\n");
        }
        html.push_str("</main>\n");
        html
    }
}

impl Part {
    fn html(&self, num_charts: &mut usize) -> String {
        match self {
            Self::Text(text) => format!("<p>{}</p>\n", escape(text)),
            Self::Lines(text) => format!("<pre tabindex=\"0\">{}</pre>\n", escape(text)),
            Self::Figures(figures) => {
                let figure = |(name, value): &(String, String)| {
                    format!(
                        "<div><dt>{}</dt><dd>{}</dd></div>",
                        escape(name),
                        escape(value)
                    )
                };
                let figures: String = figures.iter().map(figure).collect();
                format!("<dl class=\"figures\">{figures}</dl>\n")
            }
            Self::Table { header, rows } => {
                let head: String = header
                    .iter()
                    .map(|cell| format!("<th scope=\"col\">{}</th>", escape(cell)))
                    .collect();
                let row = |row: &Vec<String>| {
                    let cells: String = row
                        .iter()
                        .map(|cell| format!("<td>{}</td>", escape(cell)))
                        .collect();
                    format!("<tr>{cells}</tr>\n")
                };
                let rows: String = rows.iter().map(row).collect();
                format!(
                    "<div class=\"scroll\" tabindex=\"0\"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
                )
            }
            Self::Chart(chart) => {
                *num_charts += 1;
                // A `</script>` inside a name must not end the data.
                let data = chart.as_json().to_string().replace('<', "\\u003c");
                format!(
                    "<figure class=\"chart\" id=\"c{num_charts}\" tabindex=\"0\" aria-label=\"{}. {} Arrow keys read values, + and - zoom, 0 shows all.\">\n\
                     <figcaption>{}</figcaption>\n<script type=\"application/json\">{data}</script>\n\
                     <noscript><p>{}</p></noscript>\n</figure>\n",
                    escape(&chart.title),
                    escape(&chart.description),
                    escape(&chart.title),
                    escape(&chart.description),
                )
            }
        }
    }
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // What a file can hold and HTML cannot.
            control if control.is_control() && control != '\n' && control != '\t' => {
                escaped.push('\u{fffd}')
            }
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_holds_cannot_leave_its_place() {
        let evil = "</script><script>alert(1)</script>\"'&\u{1b}";
        let page = Page {
            title: evil.to_owned(),
            subtitle: evil.to_owned(),
            sections: vec![Section {
                title: evil.to_owned(),
                parts: vec![
                    Part::Text(evil.to_owned()),
                    Part::Figures(vec![(evil.to_owned(), evil.to_owned())]),
                    Part::Table {
                        header: vec![evil.to_owned()],
                        rows: vec![vec![evil.to_owned()]],
                    },
                    Part::Chart(PageChart {
                        title: evil.to_owned(),
                        series: vec![(evil.to_owned(), vec![(0.0, 1.0), (1.0, f64::NAN)])],
                        names: vec![evil.to_owned()],
                        ..PageChart::default()
                    }),
                ],
            }],
            refresh_seconds: None,
        };
        let html = page.to_html();
        assert!(!html.contains("<script>alert"), "{html}");
        assert_eq!(html.matches("</script>").count(), 2);
        assert!(!html.contains('\u{1b}'));
        assert!(html.contains("default-src 'none'"));
    }

    #[test]
    fn long_lines_are_thinned_and_keep_their_peaks() {
        let mut points: Vec<(f64, f64)> = (0..100_000)
            .map(|x| (f64::from(x), f64::from(x % 13)))
            .collect();
        points[51_234].1 = 99.0;
        let kept = thinned(&points);
        assert!(kept.len() <= MOST_POINTS);
        assert!(kept.contains(&(51_234.0, 99.0)));
        assert!(kept.is_sorted_by(|a, b| a.0 <= b.0));
        let short = [(0.0, 1.0), (f64::NAN, 1.0), (2.0, f64::INFINITY)];
        assert_eq!(thinned(&short), [(0.0, 1.0)]);
    }
}
