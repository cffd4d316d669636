//! Charts: bars as a table whose bars are elements with a length, lines as SVG that stretches with
//! its box. Words and numbers are text of the page, so it lays them out. Pure.

use std::fmt::Write;

use maud::{Markup, html};

use super::{Bar, Bars, Curves, Scale, palette, rounded};

/// Size of the coordinates of curves.
const WIDTH: f64 = 500.0;
const HEIGHT: f64 = 200.0;

/// A scale of values from its beginning to its end, as parts of a hundred.
struct Percent {
    scale: Scale,
    least: f64,
    most: f64,
}

impl Percent {
    /// A scale for all of these; logarithmic ones begin at a power of ten below all.
    fn of(scale: Scale, bars: &[Bar]) -> Percent {
        let most = bars
            .iter()
            .map(|bar| bar.most.max(bar.value))
            .fold(0.0, f64::max);
        let positive = bars.iter().flat_map(|bar| [bar.least, bar.value]);
        let positive = positive.filter(|value| *value > 0.0);
        let decade = (positive.fold(most, f64::min).log10() - 0.01).floor();
        Percent {
            scale,
            least: 10_f64.powf(decade),
            most,
        }
    }

    /// Distance from the beginning.
    fn at(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => value / self.most,
            Scale::Logarithmic => (value / self.least).ln() / (self.most / self.least).ln(),
        };
        let share = if share.is_finite() { share } else { 0.0 };
        (share.clamp(0.0, 1.0) * 1000.0).round() / 10.0
    }
}

fn is_number(bar: &Bar) -> bool {
    [bar.value, bar.least, bar.most]
        .iter()
        .all(|value| value.is_finite())
}

/// The bars of each group below its name; whiskers from the least to the most.
pub fn bars(bars: &Bars) -> Markup {
    let shown = bars.groups.iter().flat_map(|group| &group.bars);
    let shown: Vec<Bar> = shown.flatten().copied().filter(is_number).collect();
    let percent = Percent::of(bars.scale, &shown);
    let bar = |(series, bar): (&super::Series, &Option<Bar>)| {
        let bar = bar.filter(is_number)?;
        let (least, most) = (percent.at(bar.least), percent.at(bar.most));
        Some(html! {
            div.bar.(palette::class(series.key)) {
                span.name { (series.name) }
                span.track {
                    span.fill style={ "width:" (percent.at(bar.value)) "%" } {}
                    @if bar.least < bar.most {
                        span.whisker style={ "left:" (least) "%;width:" (most - least) "%" } {}
                    }
                }
                span.value { (rounded(bar.value)) }
            }
        })
    };
    html! {
        div.bars { "\n"
            @for group in &bars.groups {
                div.group {
                    div.title { (group.name) }
                    @for bar in bars.series.iter().zip(&group.bars).filter_map(bar) { (bar) }
                } "\n"
            }
        }
    }
}

/// Lines, or areas on top of each other, between the greatest values of both axes.
pub fn curves(curves: &Curves) -> Markup {
    let stacked = stacked(curves);
    let points = || {
        let all = stacked.iter().flatten();
        all.filter(|(x, y)| x.is_finite() && y.is_finite())
    };
    let right = points().map(|(x, _)| *x).fold(0.0, f64::max);
    let top = points().map(|(_, y)| *y).fold(0.0, f64::max);
    let corners = |points: &mut dyn Iterator<Item = &(f64, f64)>| {
        let mut text = String::new();
        for (x, y) in points {
            let part = |value: f64, most: f64| if most > 0.0 { value / most } else { 0.0 };
            let (x, y) = (part(*x, right) * WIDTH, (1.0 - part(*y, top)) * HEIGHT);
            write!(text, "{x:.1},{y:.1} ").expect("a string takes all");
        }
        text
    };
    let names: Vec<&str> = curves
        .series
        .iter()
        .map(|(series, _)| &*series.name)
        .collect();
    let described = format!(
        "{} over {}: {}",
        curves.y_unit,
        curves.x_unit,
        names.join(", ")
    );
    html! {
        div.curves {
            span.top { (rounded(top)) }
            svg role="img" aria-label=(described) preserveAspectRatio="none"
                viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } {
                @for (index, ((series, _), points)) in curves.series.iter().zip(&stacked).enumerate() {
                    @if curves.is_stacked {
                        @let floor = floor(&stacked, index);
                        polygon class=(palette::class(series.key))
                            points=(corners(&mut points.iter().chain(floor.iter().rev()))) {}
                    } @else {
                        polyline class=(palette::class(series.key))
                            points=(corners(&mut points.iter())) {}
                    }
                }
            }
            span.from { "0" }
            span.right { (rounded(right)) " " (curves.x_unit) }
        }
    }
}

/// The lower edge of an area.
fn floor(stacked: &[Vec<(f64, f64)>], index: usize) -> Vec<(f64, f64)> {
    match index.checked_sub(1) {
        Some(below) => stacked[below].clone(),
        None => stacked[index].iter().map(|(x, _)| (*x, 0.0)).collect(),
    }
}

/// The points as they are drawn.
fn stacked(curves: &Curves) -> Vec<Vec<(f64, f64)>> {
    let mut sums: Vec<Vec<(f64, f64)>> = Vec::new();
    for (_, points) in &curves.series {
        let below: &[(f64, f64)] = match sums.last() {
            Some(below) if curves.is_stacked => below,
            _ => &[],
        };
        let floor = |index: usize| below.get(index).map_or(0.0, |point| point.1);
        let on_top = points.iter().enumerate();
        let on_top = on_top
            .map(|(index, (x, y))| (*x, floor(index) + y))
            .collect();
        sums.push(on_top);
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{BarGroup, Kind, Series};

    fn series(count: usize) -> Vec<Series> {
        Series::numbered((0..count).map(|index| (format!("series {index}"), Kind::Ours)))
    }

    fn chart(scale: Scale, values: &[f64]) -> String {
        let bar = |value: &f64| {
            Some(Bar {
                value: *value,
                least: value / 2.0,
                most: value * 2.0,
            })
        };
        let group = |value| BarGroup {
            name: "a group".to_string(),
            bars: vec![bar(value), None],
        };
        bars(&Bars {
            scale,
            series: series(2),
            groups: values.iter().map(group).collect(),
            ..Bars::default()
        })
        .into_string()
    }

    #[test]
    fn bars_are_as_long_as_their_values() {
        let html = chart(Scale::Linear, &[100.0, 50.0]);
        assert_eq!(html.matches("class=\"bar ours0\"").count(), 2);
        for style in ["width:50%", "left:25%;width:75%", "width:25%"] {
            assert!(html.contains(style), "{style}: {html}");
        }
        let html = chart(Scale::Logarithmic, &[20.0, 2000.0]);
        // From 1 to 4000.
        assert!(
            html.contains("width:36.1%") && html.contains("width:91.6%"),
            "{html}"
        );
    }

    #[test]
    fn odd_values_are_drawn_all_the_same() {
        for value in [0.0, f64::NAN, f64::INFINITY, 1e-9, 1e15, -3.0] {
            for scale in [Scale::Linear, Scale::Logarithmic] {
                let html = chart(scale, &[value]);
                assert!(
                    !html.contains("NaN") && !html.contains("inf"),
                    "{value}: {html}"
                );
            }
        }
    }

    #[test]
    fn areas_lie_on_top_of_each_other() {
        let line = |y: f64| vec![(0.0, y), (1.0, y)];
        let curves_of = Curves {
            is_stacked: true,
            series: series(2).into_iter().zip([line(1.0), line(2.0)]).collect(),
            ..Curves::default()
        };
        assert_eq!(stacked(&curves_of)[1], line(3.0));
        let html = curves(&curves_of).into_string();
        assert!(
            html.contains("points=\"0.0,0.0 500.0,0.0 500.0,133.3 0.0,133.3 \""),
            "{html}"
        );
        let lines = Curves {
            is_stacked: false,
            ..curves_of
        };
        assert_eq!(
            curves(&lines).into_string().matches("<polyline ").count(),
            2
        );
    }
}
