//! Line plots over a logarithmic (powers of two) or linear x axis, as SVG.

use crate::measurement::format_bytes;
use crate::summary::Spread;
use anyhow::anyhow;
use plotters::prelude::{
    ChartBuilder, Circle, Color, IntoDrawingArea, Palette, Palette99, PathElement, RGBColor,
    SVGBackend, SeriesLabelPosition, WHITE,
};
use plotters::series::LineSeries as LineElement;

/// One line: values at ascending positions of the x axis.
#[derive(Debug, Clone)]
pub(super) struct LineSeries {
    pub(super) name: String,
    pub(super) points: Vec<(u32, Spread)>,
}

impl LineSeries {
    /// The same line with another name.
    pub(super) fn renamed(self, name: String) -> LineSeries {
        LineSeries { name, ..self }
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
    /// True if the y axis is logarithmic.
    pub(super) y_is_log: bool,
    pub(super) series: &'a [LineSeries],
}

/// Width and height of a plot.
const SIZE: (u32, u32) = (960, 420);
/// Room above the highest value.
const HEADROOM: f64 = 1.15;
/// The lowest value of a logarithmic axis.
const LEAST_LOG: f64 = 1e-3;

impl LinePlot<'_> {
    pub(super) fn to_svg(&self) -> anyhow::Result<String> {
        let mut svg = String::new();
        self.draw(&mut svg).map_err(|error| anyhow!("{error}"))?;
        Ok(svg)
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let points = || self.series.iter().flat_map(|line| &line.points);
        let place = |x: u32| self.x_unit.place(x);
        let scale = |y: f64| {
            if self.y_is_log {
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
        let bottom = if self.y_is_log { scale(lowest) } else { 0.0 };
        let top = scale(highest).max(bottom + f64::MIN_POSITIVE);
        let mut chart = ChartBuilder::on(&root)
            .margin(12)
            .margin_right(36)
            .x_label_area_size(42)
            .y_label_area_size(64)
            .build_cartesian_2d(left..right, bottom..top)?;
        let label = |x: &f64| self.x_unit.label(*x);
        let y_label = |y: &f64| match self.y_is_log {
            true => format!("{:.1}", 10f64.powf(*y)),
            false => format!("{y:.1}"),
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .max_light_lines(0)
            .y_label_formatter(&y_label)
            .x_desc(self.x_title)
            .y_desc(self.y_title)
            .x_labels(self.x_unit.label_count(left, right))
            .x_label_formatter(&label)
            .label_style(("sans-serif", 13))
            .draw()?;
        for (index, line) in self.series.iter().enumerate() {
            let color = Palette99::pick(index).to_rgba();
            let medians = line
                .points
                .iter()
                .map(|(x, spread)| (place(*x), scale(spread.median)));
            chart
                .draw_series(LineElement::new(medians.clone(), color.stroke_width(2)))?
                .label(&line.name)
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2))
                });
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
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.85))
            .border_style(RGBColor(200, 205, 215))
            .label_font(("sans-serif", 13))
            .draw()?;
        root.present()?;
        Ok(())
    }
}
