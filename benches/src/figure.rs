//! A figure with its floor and goal: one line of JSON of `./benches/figures`.

use serde::Serialize;
use serde_json::Value;

/// Which side of the floor is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Good {
    /// At least the floor.
    High,
    /// At most the floor.
    Low,
}

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    pub figure: String,
    /// Null when it could not be measured.
    pub value: Option<f64>,
    pub unit: String,
    pub floor: f64,
    pub goal: f64,
    pub holds: bool,
}

impl Figure {
    pub fn new(
        name: &str,
        value: Option<f64>,
        unit: &str,
        floor: f64,
        goal: f64,
        good: Good,
    ) -> Figure {
        let holds = value.is_some_and(|v| match good {
            Good::High => v >= floor,
            Good::Low => v <= floor,
        });
        Figure {
            figure: name.into(),
            value: value.map(|v| (v * 1000.0).round() / 1000.0),
            unit: unit.into(),
            floor,
            goal,
            holds,
        }
    }

    /// One line of JSON.
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// The best number at `key` (`gbps`, `lat_us.p50`) in lines of JSON.
pub fn best(lines: &str, key: &str, good: Good) -> Result<f64, String> {
    let mut best: Option<f64> = None;
    for line in lines.lines().filter(|l| !l.trim().is_empty()) {
        let json: Value =
            serde_json::from_str(line).map_err(|e| format!("no result of siw-perf: {e}"))?;
        let value = key
            .split('.')
            .try_fold(&json, |v, k| v.get(k))
            .and_then(Value::as_f64)
            .ok_or_else(|| format!("a result has no {key}; its notes: {}", json["notes"]))?;
        best = Some(match (best, good) {
            (None, _) => value,
            (Some(b), Good::High) => b.max(value),
            (Some(b), Good::Low) => b.min(value),
        });
    }
    best.ok_or_else(|| "no run gave a result".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_holds_on_the_good_side_of_its_floor() {
        let at = |v, good| Figure::new("f", v, "x", 4.0, 2.0, good).holds;
        assert!(at(Some(4.0), Good::Low) && at(Some(4.0), Good::High));
        assert!(at(Some(3.9), Good::Low) && !at(Some(3.9), Good::High));
        assert!(!at(Some(4.1), Good::Low) && at(Some(4.1), Good::High));
        assert!(!at(None, Good::Low) && !at(None, Good::High));
    }

    #[test]
    fn the_line_has_its_six_keys() {
        let f = Figure::new("f", Some(1.23456), "Gb/s", 1.0, 2.0, Good::High);
        assert_eq!(
            f.json(),
            r#"{"figure":"f","value":1.235,"unit":"Gb/s","floor":1.0,"goal":2.0,"holds":true}"#
        );
    }

    #[test]
    fn a_figure_that_was_not_measured_is_null_and_does_not_hold() {
        let f = Figure::new("f", None, "us", 4.0, 2.0, Good::Low);
        assert!(f.json().contains(r#""value":null"#) && f.json().contains(r#""holds":false"#));
    }

    #[test]
    fn the_best_run_counts() {
        let runs =
            "{\"gbps\":1.5,\"lat_us\":{\"p50\":3}}\n\n{\"gbps\":2.5,\"lat_us\":{\"p50\":4}}\n";
        assert_eq!(best(runs, "gbps", Good::High), Ok(2.5));
        assert_eq!(best(runs, "lat_us.p50", Good::Low), Ok(3.0));
    }

    #[test]
    fn missing_results_are_explained() {
        let e = best("", "gbps", Good::High).unwrap_err();
        assert!(e.contains("no run"), "{e}");
        let e = best(r#"{"ratio":null,"notes":["no DPDK"]}"#, "ratio", Good::High).unwrap_err();
        assert!(e.contains("ratio") && e.contains("no DPDK"), "{e}");
        assert!(best("oops", "gbps", Good::High).is_err());
    }
}
