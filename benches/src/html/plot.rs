//! Line plots over a logarithmic (powers of two) or linear x axis, as SVG.

use crate::measurement::format_bytes;
use crate::summary::Spread;
use anyhow::anyhow;
use plotters::prelude::{
    ChartBuilder, Circle, Color, IntoDrawingArea, Palette, Palette99, PathElement, RGBColor,
    SVGBackend, WHITE,
};
use plotters::series::{DashedLineSeries, LineSeries as LineElement};
use std::fmt::Write;

/// siwd's colour, in plots and in the bars of comparisons.
pub(super) const SIWD: RGBColor = RGBColor(212, 106, 60);
/// The darkest and the lightest shade of siwd's colour, for several lines of siwd.
const SIWD_SHADES: [RGBColor; 2] = [RGBColor(110, 44, 14), RGBColor(246, 178, 142)];
/// Colours of bounds.
const BOUNDS: [RGBColor; 2] = [RGBColor(90, 98, 115), RGBColor(164, 172, 186)];
/// Ratio of the highest to the lowest value from which on an axis is logarithmic.
const LOG_SPAN: f64 = 20.0;

/// Meaning of a line, which determines its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LineKind {
    /// A value of siwd.
    Siwd,
    /// A high quantile of the line of the same name without its suffix.
    SiwdHigh,
    /// A bound of the machine.
    Bound,
    /// A limit of the machine, or a mode without siwd.
    Machine,
}

/// One line: values at ascending positions of the x axis.
#[derive(Debug, Clone)]
pub(super) struct LineSeries {
    pub(super) name: String,
    pub(super) kind: LineKind,
    pub(super) points: Vec<(u32, Spread)>,
}

impl LineSeries {
    /// The same line with another name and meaning.
    pub(super) fn renamed(self, name: String, kind: LineKind) -> LineSeries {
        LineSeries { name, kind, ..self }
    }
}

/// Unit of the x axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum XUnit {
    /// Bytes, on a logarithmic axis.
    Bytes,
    /// A number, on a logarithmic axis.
    Count,
    /// Parts per million, on a linear axis from zero.
    PartsPerMillion,
}

impl XUnit {
    /// Coordinate of a value on the axis.
    fn place(self, x: u32) -> f64 {
        match self {
            XUnit::Bytes | XUnit::Count => f64::from(x.max(1)).log2(),
            XUnit::PartsPerMillion => f64::from(x),
        }
    }

    /// Label at a coordinate of the axis.
    fn label(self, place: f64) -> String {
        match self {
            XUnit::Bytes => format_bytes(place.exp2().round() as u32),
            XUnit::Count => (place.exp2().round() as u32).to_string(),
            XUnit::PartsPerMillion => format!("{:.2} %", place / 1e4),
        }
    }

    /// Number of labels between two coordinates.
    fn label_count(self, left: f64, right: f64) -> usize {
        match self {
            XUnit::Bytes | XUnit::Count => (right - left).round() as usize + 1,
            XUnit::PartsPerMillion => 8,
        }
    }
}

/// A line plot.
pub(super) struct LinePlot<'a> {
    pub(super) x_title: &'a str,
    pub(super) x_unit: XUnit,
    pub(super) y_title: &'a str,
    pub(super) series: &'a [LineSeries],
}

/// Width and height of a plot.
const SIZE: (u32, u32) = (960, 420);
/// Room above the highest value.
const HEADROOM: f64 = 1.15;
/// The lowest value of a logarithmic axis.
const LEAST_LOG: f64 = 1e-6;

impl LinePlot<'_> {
    pub(super) fn to_svg(&self) -> anyhow::Result<String> {
        let mut svg = String::new();
        self.draw(&mut svg).map_err(|error| anyhow!("{error}"))?;
        Ok(svg)
    }

    /// Colours of the lines: shades of one colour for siwd.
    fn colors(&self) -> Vec<RGBColor> {
        let count = |kind| self.series.iter().filter(|line| line.kind == kind).count();
        let shades = count(LineKind::Siwd).max(count(LineKind::SiwdHigh));
        let place = |at: usize| {
            let before = &self.series[..at];
            let kind = self.series[at].kind;
            before.iter().filter(|line| line.kind == kind).count()
        };
        let color = |at: usize| match self.series[at].kind {
            LineKind::Siwd | LineKind::SiwdHigh => shade(place(at), shades),
            LineKind::Bound => BOUNDS[place(at) % BOUNDS.len()],
            LineKind::Machine => {
                let (red, green, blue) = Palette99::COLORS[place(at) % Palette99::COLORS.len()];
                RGBColor(red, green, blue)
            }
        };
        (0..self.series.len()).map(color).collect()
    }

    /// The legend as HTML; `escape` makes names safe.
    pub(super) fn to_legend(&self, escape: impl Fn(&str) -> String) -> String {
        let mut text = String::from("<p class=\"legend\">");
        for (line, RGBColor(red, green, blue)) in self.series.iter().zip(self.colors()) {
            let style = match line.kind {
                LineKind::SiwdHigh => "dashed",
                _ => "solid",
            };
            // Writing into a string never fails.
            let _ = write!(
                text,
                "<span><i style=\"border-top:3px {style} rgb({red},{green},{blue})\"></i>{}</span>",
                escape(&line.name)
            );
        }
        text + "</p>\n"
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let points = || self.series.iter().flat_map(|line| &line.points);
        let place = |x: u32| self.x_unit.place(x);
        let y_is_log = spans_decades(points().map(|(_, spread)| spread.median));
        let scale = |y: f64| {
            if y_is_log {
                y.max(LEAST_LOG).log10()
            } else {
                y
            }
        };
        let left = points().map(|(x, _)| place(*x)).fold(f64::MAX, f64::min);
        let right = points().map(|(x, _)| place(*x)).fold(0.0, f64::max);
        let highest = points().map(|(_, spread)| spread.max).fold(0.0, f64::max) * HEADROOM;
        let lowest = points()
            .map(|(_, spread)| spread.min)
            .fold(f64::MAX, f64::min)
            / HEADROOM;
        // Whole decades, so that their labels are round numbers.
        let (bottom, top) = match y_is_log {
            true => (scale(lowest).floor(), scale(highest).ceil()),
            false => (0.0, highest),
        };
        let top = top.max(bottom + f64::MIN_POSITIVE);
        let mut chart = ChartBuilder::on(&root)
            .margin(12)
            .margin_right(36)
            .x_label_area_size(42)
            .y_label_area_size(64)
            .build_cartesian_2d(left..right, bottom..top)?;
        let label = |x: &f64| self.x_unit.label(*x);
        let y_label = |y: &f64| match y_is_log {
            true => format!("{}", (10f64.powf(*y) * 1e6).round() / 1e6),
            false => format!("{y:.1}"),
        };
        let y_labels = match y_is_log {
            true => (top - bottom) as usize + 1,
            false => 8,
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .max_light_lines(0)
            .y_labels(y_labels)
            .y_label_formatter(&y_label)
            .x_desc(self.x_title)
            .y_desc(self.y_title)
            .x_labels(self.x_unit.label_count(left, right))
            .x_label_formatter(&label)
            .label_style(("sans-serif", 13))
            .draw()?;
        for (line, color) in self.series.iter().zip(self.colors()) {
            let medians = line
                .points
                .iter()
                .map(|(x, spread)| (place(*x), scale(spread.median)));
            let style = color.stroke_width(2);
            if line.kind == LineKind::SiwdHigh {
                chart.draw_series(DashedLineSeries::new(medians.clone(), 6, 4, style))?;
            } else {
                chart.draw_series(LineElement::new(medians.clone(), style))?;
            }
            chart.draw_series(medians.map(|point| Circle::new(point, 3, color.filled())))?;
            // From the lowest to the highest round.
            chart.draw_series(line.points.iter().map(|(x, spread)| {
                PathElement::new(
                    [
                        (place(*x), scale(spread.min)),
                        (place(*x), scale(spread.max)),
                    ],
                    color,
                )
            }))?;
        }
        root.present()?;
        Ok(())
    }
}

/// Returns true if the values span so many decades that a linear axis would hide the low ones.
fn spans_decades(values: impl Iterator<Item = f64>) -> bool {
    let bounds = values.fold((f64::MAX, 0.0), |(low, high): (f64, f64), value| {
        (low.min(value), high.max(value))
    });
    bounds.0 > 0.0 && bounds.1 / bounds.0 >= LOG_SPAN
}

/// Shade `place` of `count` of siwd's colour.
fn shade(place: usize, count: usize) -> RGBColor {
    if count < 2 {
        return SIWD;
    }
    let share = place as f64 / (count - 1) as f64;
    let [from, to] = SIWD_SHADES;
    let mix = |from: u8, to: u8| {
        (f64::from(from) + share * (f64::from(to) - f64::from(from))).round() as u8
    };
    RGBColor(mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, kind: LineKind, values: &[f64]) -> LineSeries {
        let point = |(index, value): (usize, &f64)| {
            let spread = Spread::of([*value]).unwrap();
            (64 << index, spread)
        };
        LineSeries {
            name: name.into(),
            kind,
            points: values.iter().enumerate().map(point).collect(),
        }
    }

    fn plot(series: &[LineSeries]) -> LinePlot<'_> {
        LinePlot {
            x_title: "size",
            x_unit: XUnit::Bytes,
            y_title: "Gb/s",
            series,
        }
    }

    #[test]
    fn values_over_decades_have_a_logarithmic_axis() {
        assert!(spans_decades([0.5, 40.0].into_iter()));
        assert!(!spans_decades([4.0, 40.0].into_iter()));
        assert!(!spans_decades([0.0, 40.0].into_iter()));
        let series = [line("a", LineKind::Siwd, &[0.2, 3.0, 45.0])];
        let svg = plot(&series).to_svg().unwrap();
        for label in ["0.1", "1", "10", "100"] {
            assert!(svg.contains(&format!(">\n{label}\n<")), "{label} in {svg}");
        }
    }

    #[test]
    fn siwd_has_one_colour_and_a_bound_another() {
        let series = [
            line("a", LineKind::Siwd, &[1.0, 2.0]),
            line("b", LineKind::Bound, &[3.0, 4.0]),
            line("a: 99 of 100", LineKind::SiwdHigh, &[2.0, 3.0]),
        ];
        let colors = plot(&series).colors();
        assert_eq!((colors[0], colors[1], colors[2]), (SIWD, BOUNDS[0], SIWD));
        let several = [series[0].clone(), series[0].clone()];
        let colors = plot(&several).colors();
        assert_eq!((colors[0], colors[1]), (SIWD_SHADES[0], SIWD_SHADES[1]));
        let legend = plot(&series).to_legend(|name| name.into());
        assert!(legend.contains("solid rgb(212,106,60)") && legend.contains("dashed"));
        assert!(!plot(&series).to_svg().unwrap().contains("99 of 100"));
    }
}
