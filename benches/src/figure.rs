//! A figure with its floor and goal: one line of the JSON that `./benches/figures` prints.

use anyhow::anyhow;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Direction in which a value is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BetterValue {
    /// At least the floor.
    Higher,
    /// At most the floor.
    Lower,
}

/// A figure's value, floor and goal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// Name of the figure.
    pub figure: String,
    /// `None` (null) if it could not be measured.
    pub value: Option<f64>,
    /// Unit of value, floor and goal.
    pub unit: String,
    /// The value that must be reached.
    pub floor: f64,
    /// The value to aim for.
    pub goal: f64,
    /// True if the floor is reached.
    pub holds: bool,
}

impl Figure {
    /// Judges a value; `None` if it could not be measured.
    pub fn new(
        name: &str,
        value: Option<f64>,
        unit: &str,
        floor: f64,
        goal: f64,
        good: BetterValue,
    ) -> Figure {
        let holds = value.is_some_and(|value| match good {
            BetterValue::Higher => value >= floor,
            BetterValue::Lower => value <= floor,
        });
        Figure {
            figure: name.into(),
            value: value.map(|value| (value * 1000.0).round() / 1000.0),
            unit: unit.into(),
            floor,
            goal,
            holds,
        }
    }

    /// One line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads lines of [`Figure::to_json`].
    ///
    /// # Errors
    /// A line is not a figure.
    pub fn from_lines(lines: &str) -> anyhow::Result<Vec<Figure>> {
        lines
            .lines()
            .filter(|line| !line.trim().is_empty())
            .map(|line| serde_json::from_str(line).map_err(|error| anyhow!("`{line}`: {error}")))
            .collect()
    }
}

/// The best number at `key` (`gbps`, `lat_us.p50`) in lines of JSON.
///
/// # Errors
/// A line has no such number, there are no lines, or a `ratio` to a bound is above 1: then the bound
/// or the transfer was measured wrongly.
pub fn best_value(lines: &str, key: &str, good: BetterValue) -> anyhow::Result<f64> {
    let mut best: Option<f64> = None;
    for line in lines.lines().filter(|line| !line.trim().is_empty()) {
        let json: Value = serde_json::from_str(line)
            .map_err(|error| anyhow!("no result of siw-perf: {error}"))?;
        let value = key
            .split('.')
            .try_fold(&json, |value, part| value.get(part))
            .and_then(Value::as_f64)
            .ok_or_else(|| anyhow!("a result has no {key}; its notes: {}", json["notes"]))?;
        if key == "ratio" && !json["bound"]["path_gbps"].is_null() && value > 1.0 {
            return Err(anyhow!(
                "a transfer exceeded its bound (ratio {value}): one of them was measured wrongly; \
                 measure again on a quiet machine"
            ));
        }
        best = Some(match (best, good) {
            (None, _) => value,
            (Some(best), BetterValue::Higher) => best.max(value),
            (Some(best), BetterValue::Lower) => best.min(value),
        });
    }
    best.ok_or_else(|| anyhow!("no run gave a result"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_holds_on_the_good_side_of_its_floor() {
        let at = |value, good| Figure::new("f", value, "x", 4.0, 2.0, good).holds;
        assert!(at(Some(4.0), BetterValue::Lower) && at(Some(4.0), BetterValue::Higher));
        assert!(at(Some(3.9), BetterValue::Lower) && !at(Some(3.9), BetterValue::Higher));
        assert!(!at(Some(4.1), BetterValue::Lower) && at(Some(4.1), BetterValue::Higher));
        assert!(!at(None, BetterValue::Lower) && !at(None, BetterValue::Higher));
    }

    #[test]
    fn the_line_has_its_six_keys() {
        let f = Figure::new("f", Some(1.23456), "Gb/s", 1.0, 2.0, BetterValue::Higher);
        assert_eq!(
            f.to_json(),
            r#"{"figure":"f","value":1.235,"unit":"Gb/s","floor":1.0,"goal":2.0,"holds":true}"#
        );
    }

    #[test]
    fn lines_are_read_again() {
        let figures = [
            Figure::new("f", Some(1.5), "Gb/s", 1.0, 2.0, BetterValue::Higher),
            Figure::new("g", None, "us", 4.0, 2.0, BetterValue::Lower),
        ];
        let lines = format!("{}\n\n{}\n", figures[0].to_json(), figures[1].to_json());
        assert_eq!(Figure::from_lines(&lines).unwrap(), &figures[..]);
        assert!(Figure::from_lines("{}").is_err());
    }

    #[test]
    fn a_figure_that_was_not_measured_is_null_and_does_not_hold() {
        let f = Figure::new("f", None, "us", 4.0, 2.0, BetterValue::Lower);
        assert!(
            f.to_json().contains(r#""value":null"#) && f.to_json().contains(r#""holds":false"#)
        );
    }

    #[test]
    fn the_best_run_counts() {
        let runs =
            "{\"gbps\":1.5,\"lat_us\":{\"p50\":3}}\n\n{\"gbps\":2.5,\"lat_us\":{\"p50\":4}}\n";
        assert_eq!(best_value(runs, "gbps", BetterValue::Higher).unwrap(), 2.5);
        assert_eq!(
            best_value(runs, "lat_us.p50", BetterValue::Lower).unwrap(),
            3.0
        );
    }

    #[test]
    fn a_ratio_above_its_bound_is_an_error() {
        let line = |ratio| format!("{{\"ratio\":{ratio},\"bound\":{{\"path_gbps\":10}}}}\n");
        let best = |lines: &str| best_value(lines, "ratio", BetterValue::Higher);
        assert_eq!(best(&line(0.9)).unwrap(), 0.9);
        let error = best(&(line(0.9) + &line(1.01))).unwrap_err().to_string();
        assert!(error.contains("exceeded its bound (ratio 1.01)"), "{error}");
        // Ratios to other things are not bounded.
        assert_eq!(best("{\"ratio\":1.5}").unwrap(), 1.5);
    }

    #[test]
    fn missing_results_are_explained() {
        let error = best_value("", "gbps", BetterValue::Higher)
            .unwrap_err()
            .to_string();
        assert!(error.contains("no run"), "{error}");
        let error = best_value(
            r#"{"ratio":null,"notes":["no DPDK"]}"#,
            "ratio",
            BetterValue::Higher,
        )
        .unwrap_err()
        .to_string();
        assert!(
            error.contains("ratio") && error.contains("no DPDK"),
            "{error}"
        );
        assert!(best_value("oops", "gbps", BetterValue::Higher).is_err());
    }
}
