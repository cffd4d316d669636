//! Charts as SVG, drawn by plotters at the size that they need: widths follow from bars and names,
//! so that nothing overlaps, and what is too wide goes on in a second drawing of the same scale.
//! Pure.

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Bar, BarGroup, Bars, Curves, Scale, grouped, palette, rounded};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;
type Chart<'a, 'b, Y> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, Y>>;

/// Widths of bars, by how many stand side by side at most.
const BAR_WIDTHS: [(usize, usize); 3] = [(3, 18), (5, 13), (usize::MAX, 9)];
const GROUP_GAP: usize = 18;
/// Width of the bars of a drawing; more go on in the next.
const BARS_WIDTH_MAX: usize = 1180;
const BARS_WIDTH_MIN: usize = 220;
const BARS_HEIGHT: usize = 240;
const CURVES_WIDTH: usize = 500;
const CURVES_HEIGHT: usize = 200;
/// Width of the numbers left of an axis.
const NUMBERS_WIDTH: usize = 62;
const NUMBERS_HEIGHT: usize = 26;
const MARGIN: usize = 8;
/// The library writes four fifths of it into the file.
const FONT_SIZE: i32 = 14;
const LINE_HEIGHT: usize = 14;
/// Width of a character in the widest of the usual fonts.
const CHARACTER_WIDTH: f64 = 6.9;
/// Names are wrapped into lines of about this many characters unless bars take more room anyway.
const LINE_CHARACTERS: usize = 13;
const LINES_MAX: usize = 4;
/// A word that is longer is cut.
const WORD_CHARACTERS_MAX: usize = 22;
const GRID_LINES: usize = 6;

/// A drawing of this size.
fn drawing(width: usize, height: usize, draw: impl FnOnce(&Area<'_>) -> Drawn) -> String {
    let mut out = String::new();
    {
        let backend = SVGBackend::with_string(&mut out, (width as u32, height as u32));
        let area = backend.into_drawing_area();
        let drawn = draw(&area).and_then(|()| Ok(area.present()?));
        drawn.expect("a string takes all that is drawn");
    }
    // It is the default, and half of the text.
    out.replace(" opacity=\"1\"", "")
}

fn label_style() -> TextStyle<'static> {
    ("sans-serif", FONT_SIZE)
        .into_font()
        .color(&palette::TEXT.colour())
}

/// Wraps the name of a group into lines of at most `characters` characters; a longer word has a
/// line of its own.
fn wrapped(name: &str, characters: usize) -> Vec<String> {
    let cut = |word: &str| -> String {
        match word.chars().count() > WORD_CHARACTERS_MAX {
            true => word
                .chars()
                .take(WORD_CHARACTERS_MAX - 1)
                .chain(['…'])
                .collect(),
            false => word.to_string(),
        }
    };
    let mut lines: Vec<String> = Vec::new();
    for word in name.split_whitespace().map(cut) {
        let length = |text: &str| text.chars().count();
        match lines.last_mut() {
            Some(line) if length(line) + 1 + length(&word) <= characters => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    if lines.len() > LINES_MAX {
        lines.truncate(LINES_MAX);
        lines[LINES_MAX - 1].push('…');
    }
    lines
}

/// A group and where it is.
struct Placed<'a> {
    group: &'a BarGroup,
    lines: Vec<String>,
    /// Distance from the beginning of the plot, in pixels.
    left: usize,
    width: usize,
}

impl<'a> Placed<'a> {
    fn new(group: &'a BarGroup, bar_width: usize) -> Placed<'a> {
        let bars = group.bars.iter().flatten().count() * bar_width;
        let room = (bars as f64 / CHARACTER_WIDTH) as usize;
        let lines = wrapped(&group.name, room.max(LINE_CHARACTERS));
        let longest = lines.iter().map(|line| line.chars().count()).max();
        let text = (longest.unwrap_or(0) as f64 * CHARACTER_WIDTH).ceil() as usize;
        Placed {
            group,
            lines,
            left: 0,
            width: bars.max(text) + GROUP_GAP,
        }
    }
}

/// The width of each bar of a chart.
fn bar_width(groups: &[BarGroup]) -> usize {
    let counts = groups
        .iter()
        .map(|group| group.bars.iter().flatten().count());
    let most = counts.max().unwrap_or(0);
    let mut widths = BAR_WIDTHS.iter().filter(|(count, _)| most <= *count);
    widths.next().map_or(1, |(_, width)| *width)
}

/// Groups by drawing, each where it is to be.
fn placed(groups: &[BarGroup], bar_width: usize) -> Vec<Vec<Placed<'_>>> {
    let mut drawings: Vec<Vec<Placed<'_>>> = Vec::new();
    let mut end = 0;
    for mut group in groups.iter().map(|group| Placed::new(group, bar_width)) {
        match drawings.last_mut() {
            Some(drawing) if end + group.width <= BARS_WIDTH_MAX => {
                group.left = end;
                end += group.width;
                drawing.push(group);
            }
            _ => {
                end = group.width;
                drawings.push(vec![group]);
            }
        }
    }
    drawings
}

fn shown(bars: &Bars) -> impl Iterator<Item = Bar> {
    let is_number = |bar: &Bar| {
        [bar.value, bar.least, bar.most]
            .iter()
            .all(|v| v.is_finite())
    };
    let all = bars.groups.iter().flat_map(|group| &group.bars);
    all.flatten().copied().filter(is_number)
}

/// The chart, in one drawing or several.
pub fn bars(bars: &Bars) -> Vec<String> {
    let most = shown(bars)
        .map(|bar| bar.most.max(bar.value))
        .fold(0.0, f64::max);
    let draw = |groups: Vec<Placed<'_>>| {
        let plot = groups.last().map_or(0, |group| group.left + group.width);
        let plot = plot.max(BARS_WIDTH_MIN);
        let lines = groups.iter().map(|group| group.lines.len()).max();
        let names = lines.unwrap_or(0) * LINE_HEIGHT + 10;
        let (width, height) = (
            NUMBERS_WIDTH + plot + 3 * MARGIN,
            MARGIN + BARS_HEIGHT + names,
        );
        drawing(width, height, |area| match bars.scale {
            Scale::Linear => {
                let top = if most > 0.0 { most * 1.04 } else { 1.0 };
                draw_bars(area, bars, &groups, (plot, names), (0.0..top, 0.0))
            }
            Scale::Logarithmic => {
                let positive = shown(bars).flat_map(|bar| [bar.least, bar.value]);
                let least = positive.filter(|value| *value > 0.0).fold(most, f64::min);
                // From a power of ten below all to one above.
                let decade = |value: f64| value.max(f64::MIN_POSITIVE).log10();
                let (bottom, top) = match most > 0.0 {
                    true => ((decade(least) - 0.01).floor(), (decade(most) + 0.01).ceil()),
                    false => (0.0, 1.0),
                };
                let (bottom, top) = (10_f64.powf(bottom), 10_f64.powf(top));
                let range = (bottom..top).log_scale();
                draw_bars(area, bars, &groups, (plot, names), (range, bottom))
            }
        })
    };
    let bar_width = bar_width(&bars.groups);
    let drawings = placed(&bars.groups, bar_width);
    drawings.into_iter().map(draw).collect()
}

/// Axes and lines of a chart: its horizontal range with the number of its labels and their height,
/// its vertical range, and the greatest value in it.
fn frame<'a, 'b, Y>(
    area: &'a Area<'b>,
    (x, x_labels, x_height): (std::ops::Range<f64>, usize, usize),
    y: Y,
    most: f64,
) -> Result<Chart<'a, 'b, Y::CoordDescType>, Box<dyn std::error::Error>>
where
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let right = x.end;
    let mut chart = ChartBuilder::on(area)
        .margin_top(MARGIN as i32)
        .margin_right(2 * MARGIN as i32)
        .margin_left(MARGIN as i32)
        .x_label_area_size(x_height as i32)
        .y_label_area_size(NUMBERS_WIDTH as i32)
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(x_labels)
        .y_labels(GRID_LINES)
        .max_light_lines(1)
        .x_label_formatter(&|value| axis_number(*value, right))
        .y_label_formatter(&|value| axis_number(*value, most))
        .label_style(label_style())
        .axis_style(palette::AXIS.colour())
        .bold_line_style(palette::GRID.colour())
        .light_line_style(TRANSPARENT)
        .draw()?;
    Ok(chart)
}

fn draw_bars<Y>(
    area: &Area<'_>,
    bars: &Bars,
    groups: &[Placed<'_>],
    (plot, names): (usize, usize),
    (range, bottom): (Y, f64),
) -> Drawn
where
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let most = shown(bars).map(|bar| bar.most).fold(0.0, f64::max);
    let bar_width = bar_width(&bars.groups);
    let x = (0.0..plot as f64, 0, names);
    let mut chart = frame(area, x, range, most)?;
    for placed in groups {
        let count = placed.group.bars.iter().flatten().count();
        let mut left = placed.left as f64 + (placed.width - count * bar_width) as f64 / 2.0;
        for (series, bar) in bars.series.iter().zip(&placed.group.bars) {
            let Some(bar) = bar else { continue };
            let right = left + bar_width as f64;
            draw_bar(
                &mut chart,
                bar,
                (left..right, bottom),
                palette::colour(series.key),
            )?;
            left = right;
        }
        let middle = MARGIN + NUMBERS_WIDTH + placed.left + placed.width / 2;
        let style = label_style().pos(Pos::new(HPos::Center, VPos::Top));
        for (index, line) in placed.lines.iter().enumerate() {
            let top = MARGIN + BARS_HEIGHT + 6 + index * LINE_HEIGHT;
            area.draw_text(line, &style, (middle as i32, top as i32))?;
        }
    }
    Ok(())
}

fn draw_bar<X, Y>(
    chart: &mut ChartContext<'_, SVGBackend<'_>, Cartesian2d<X, Y>>,
    bar: &Bar,
    (across, bottom): (std::ops::Range<f64>, f64),
    colour: RGBColor,
) -> Drawn
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    let Bar { value, least, most } = *bar;
    if ![value, least, most].iter().all(|value| value.is_finite()) {
        return Ok(());
    }
    let at_least = |value: f64| value.max(bottom);
    // A pixel is between it and the next.
    let right = across.end - 1.0;
    let corners = [(across.start, at_least(value)), (right, bottom)];
    chart.draw_series([Rectangle::new(corners, colour.filled())])?;
    if least < most {
        let middle = (across.start + right) / 2.0;
        let ends = [at_least(least), at_least(most)];
        let stem = vec![(middle, ends[0]), (middle, ends[1])];
        let cap = |value| vec![(middle - 2.0, value), (middle + 2.0, value)];
        let lines = [stem, cap(ends[0]), cap(ends[1])];
        let style = palette::WHISKER.colour().stroke_width(1);
        chart.draw_series(lines.map(|line| PathElement::new(line, style)))?;
    }
    Ok(())
}

/// A number beside an axis that goes to `most`.
fn axis_number(value: f64, most: f64) -> String {
    // Texts that would not fit.
    let units = [(1e13, 1.0, ""), (1e10, 1e9, " G"), (1e7, 1e6, " M")];
    if let Some((least, unit, name)) = units.into_iter().find(|(least, ..)| most >= *least) {
        return match (least > 1e12, value < 1e3) {
            (true, _) => format!("{value:.0e}"),
            // The lower end of a logarithmic axis.
            (false, true) => grouped(value, 0),
            (false, false) => rounded(value / unit) + name,
        };
    }
    let decimals = match most {
        most if most > 8.0 => 0,
        most if most > 0.8 => 1,
        _ => 2,
    };
    // On a logarithmic axis there are values far below the most.
    let first_digit = -value.log10().floor();
    match value > 0.0 && first_digit > decimals as f64 {
        true => format!("{value:.*}", first_digit as usize),
        false => grouped(value, decimals),
    }
}

/// The chart.
pub fn curves(curves: &Curves) -> String {
    let stacked = stacked(curves);
    let points = || {
        stacked
            .iter()
            .flatten()
            .filter(|(x, y)| x.is_finite() && y.is_finite())
    };
    let right = points().map(|(x, _)| *x).fold(0.0, f64::max);
    let top = points().map(|(_, y)| *y).fold(0.0, f64::max);
    let range = |end: f64| 0.0..if end > 0.0 { end } else { 1.0 };
    let width = NUMBERS_WIDTH + CURVES_WIDTH + 3 * MARGIN;
    let height = CURVES_HEIGHT + NUMBERS_HEIGHT + MARGIN;
    drawing(width, height, |area| {
        let x = (range(right), GRID_LINES + 2, NUMBERS_HEIGHT);
        let mut chart = frame(area, x, range(top * 1.04), top)?;
        let mut below: Vec<(f64, f64)> = Vec::new();
        for ((series, _), points) in curves.series.iter().zip(&stacked) {
            let colour = palette::colour(series.key);
            if curves.is_stacked {
                let floor = match below.is_empty() {
                    true => points.iter().map(|(x, _)| (*x, 0.0)).collect(),
                    false => std::mem::take(&mut below),
                };
                let outline: Vec<(f64, f64)> =
                    points.iter().chain(floor.iter().rev()).copied().collect();
                chart.draw_series([Polygon::new(outline, colour.filled())])?;
                below.clone_from(points);
            } else {
                let line = PathElement::new(points.clone(), colour.stroke_width(2));
                chart.draw_series([line])?;
            }
        }
        Ok(())
    })
}

/// The points as they are drawn.
fn stacked(curves: &Curves) -> Vec<Vec<(f64, f64)>> {
    let mut sums: Vec<Vec<(f64, f64)>> = Vec::new();
    for (_, points) in &curves.series {
        let below = sums.last().filter(|_| curves.is_stacked);
        let on_top = points.iter().enumerate().map(|(index, (x, y))| {
            let floor = below
                .and_then(|below| below.get(index))
                .map_or(0.0, |point| point.1);
            (*x, floor + y)
        });
        let on_top = on_top.collect();
        sums.push(on_top);
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{Kind, Series};

    fn series(count: usize) -> Vec<Series> {
        Series::numbered((0..count).map(|index| (format!("series {index}"), Kind::Ours)))
    }

    fn chart(groups: usize, scale: Scale, value: f64) -> Bars {
        let bar = Some(Bar {
            value,
            least: value / 2.0,
            most: value * 2.0,
        });
        let group = |index| BarGroup {
            name: format!("group {index} of a long name"),
            bars: vec![bar, None, bar],
        };
        Bars {
            title: "title".to_string(),
            unit: "IOPS".to_string(),
            scale,
            series: series(3),
            groups: (0..groups).map(group).collect(),
        }
    }

    /// The values of an attribute of all elements of a name.
    fn attributes(svg: &str, element: &str, name: &str) -> Vec<f64> {
        let begin = format!("<{element} ");
        let elements = svg.split(&begin).skip(1);
        let value = |text: &str| {
            let text = text.split_once(&format!(" {name}=\""))?.1;
            text.split('"').next()?.parse().ok()
        };
        elements.filter_map(|e| value(&format!(" {e}"))).collect()
    }

    #[test]
    fn bars_are_as_high_as_their_values_and_end_at_the_axis() {
        let mut bars_of = chart(1, Scale::Linear, 10.0);
        bars_of.groups[0].bars[2] = Some(Bar {
            value: 5.0,
            least: 5.0,
            most: 5.0,
        });
        let svg = bars(&bars_of).remove(0);
        let heights = attributes(&svg, "rect", "height");
        assert_eq!(heights.len(), 2, "{svg}");
        assert!((heights[0] / heights[1] - 2.0).abs() < 0.05, "{heights:?}");
        // One whisker of three lines.
        let whisker = format!("stroke=\"{}\"", "#14171A");
        assert_eq!(svg.matches(&whisker).count(), 3, "{svg}");
    }

    #[test]
    fn no_group_is_lost_and_no_drawing_is_too_wide() {
        for groups in [0, 1, 7, 60] {
            let drawings = bars(&chart(groups, Scale::Linear, 3.0));
            let mut bars = 0;
            for svg in &drawings {
                let width = attributes(svg, "svg", "width")[0];
                assert!(width <= (BARS_WIDTH_MAX + NUMBERS_WIDTH + 3 * MARGIN) as f64);
                let ends = attributes(svg, "rect", "x");
                bars += ends.len();
                let bar = attributes(svg, "rect", "width");
                assert!(ends.iter().zip(bar).all(|(x, bar)| x + bar <= width));
            }
            assert_eq!(bars, 2 * groups);
        }
    }

    #[test]
    fn odd_values_are_drawn_all_the_same() {
        for value in [0.0, f64::NAN, f64::INFINITY, 1e-9, 1e15, -3.0] {
            for scale in [Scale::Linear, Scale::Logarithmic] {
                let drawings = bars(&chart(2, scale, value));
                assert!(drawings[0].ends_with("</svg>\n"), "{value}");
                assert!(!drawings[0].contains("NaN") && !drawings[0].contains("inf"));
            }
        }
    }

    #[test]
    fn a_logarithmic_axis_is_marked_by_powers_of_ten() {
        let svg = bars(&chart(1, Scale::Logarithmic, 300.0)).remove(0);
        for number in ["\n100\n", "\n1\u{202f}000\n"] {
            assert!(svg.contains(&format!(">{number}")), "{svg}");
        }
    }

    #[test]
    fn numbers_beside_an_axis_stay_short() {
        assert_eq!(axis_number(2e8, 1e9), "200 M");
        assert_eq!(axis_number(2e10, 1e11), "20 G");
        assert_eq!(axis_number(2e14, 1e15), "2e14");
        assert_eq!(axis_number(10.0, 1e9), "10");
        assert_eq!(axis_number(0.5, 0.9), "0.5");
        assert_eq!(axis_number(0.0, 0.9), "0.0");
        let below_one = [1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0].map(|value| axis_number(value, 2.5));
        assert_eq!(below_one, ["0.0001", "0.001", "0.01", "0.1", "1.0", "10.0"]);
        assert_eq!(axis_number(0.1, 90.0), "0.1");
    }

    #[test]
    fn names_are_wrapped_and_cut() {
        assert_eq!(wrapped("64K, depth 32", 13), ["64K, depth 32"]);
        assert_eq!(
            wrapped("preallocation metadata", 13),
            ["preallocation", "metadata"]
        );
        let long = "x".repeat(200);
        assert_eq!(wrapped(&long, 13)[0].chars().count(), WORD_CHARACTERS_MAX);
        assert_eq!(wrapped(&"word ".repeat(100), 4).len(), LINES_MAX);
    }

    #[test]
    fn areas_lie_on_top_of_each_other() {
        let line = |y: f64| vec![(0.0, y), (1.0, y)];
        let names = series(2);
        let curves_of = Curves {
            is_stacked: true,
            series: names.into_iter().zip([line(1.0), line(2.0)]).collect(),
            ..Curves::default()
        };
        assert_eq!(stacked(&curves_of)[1], line(3.0));
        assert_eq!(curves(&curves_of).matches("<polygon ").count(), 2);
        let lines = Curves {
            is_stacked: false,
            ..curves_of
        };
        assert_eq!(curves(&lines).matches("stroke-width=\"2\"").count(), 2);
    }
}
