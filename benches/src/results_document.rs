//! benches/RESULTS.md: one section for each group of figures, replaced as a whole by a new run.
//!
//! A section is the text between `<!-- figures: GROUP -->` and `<!-- end of GROUP -->`. Text outside
//! of sections is never changed.

use crate::figure::Figure;
use anyhow::anyhow;
use std::fmt::Write;

/// Machine, commit and date of a run, for the heading of a section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunOrigin {
    /// One line about processor and kernel.
    pub machine: String,
    /// Commit of the measured programs.
    pub commit: String,
    /// Day of the run, as YYYY-MM-DD.
    pub date: String,
}

/// Returns `document` with the section of `group` replaced, or added at the end if there is none.
/// `transfers` is a Markdown table of the transfers behind the figures, or empty.
///
/// # Errors
/// A section has a beginning but no end.
pub fn replace_section(
    document: &str,
    group: &str,
    origin: &RunOrigin,
    figures: &[Figure],
    transfers: &str,
) -> anyhow::Result<String> {
    let begin = format!("<!-- figures: {group} -->\n");
    let end = format!("<!-- end of {group} -->\n");
    let section = format_section(group, origin, figures, transfers);
    let Some(start) = document.find(&begin) else {
        let document = document.trim_end();
        return Ok(format!("{document}\n\n{begin}{section}{end}"));
    };
    let inside = start + begin.len();
    let length = document[inside..]
        .find(&end)
        .ok_or_else(|| anyhow!("`{}` is missing", end.trim_end()))?;
    let (before, after) = (&document[..inside], &document[inside + length..]);
    Ok(format!("{before}{section}{after}"))
}

fn format_section(group: &str, origin: &RunOrigin, figures: &[Figure], transfers: &str) -> String {
    let RunOrigin {
        machine,
        commit,
        date,
    } = origin;
    let mut text = format!("## {group}: {machine}, commit {commit}, {date}\n\n");
    text.push_str("| figure | value | unit | floor |\n|---|---:|---|---:|\n");
    for figure in figures {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            figure.figure,
            format_value(figure),
            figure.unit,
            format_floor(figure)
        );
    }
    if !transfers.is_empty() {
        let _ = write!(
            text,
            "\nThe transfers behind them:\n\n{}\n",
            transfers.trim()
        );
    }
    text
}

/// The value, bold if it does not reach the floor.
fn format_value(figure: &Figure) -> String {
    let value = figure
        .value
        .map_or("not measured".into(), |value| value.to_string());
    if figure.holds {
        value
    } else {
        format!("**{value}**")
    }
}

/// The floor with its direction, which the goal shows; "-" for a ratio without a floor.
fn format_floor(figure: &Figure) -> String {
    let (floor, goal) = (figure.floor, figure.goal);
    if goal < floor {
        format!("at most {floor}")
    } else if goal == floor {
        floor.to_string()
    } else if floor == 0.0 {
        "-".into()
    } else {
        format!("at least {floor}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::BetterValue;

    fn origin(date: &str) -> RunOrigin {
        RunOrigin {
            machine: "A CPU, family 6, 2 cores, Linux 6.1".into(),
            commit: "abc".into(),
            date: date.into(),
        }
    }

    fn figures() -> Vec<Figure> {
        vec![
            Figure::new("rate", Some(3.5), "Gb/s", 4.0, 8.0, BetterValue::Higher),
            Figure::new("time", Some(3.5), "us", 4.0, 2.0, BetterValue::Lower),
            Figure::new("left", Some(0.0), "", 0.0, 0.0, BetterValue::Lower),
            Figure::new("gain", Some(1.1), "ratio", 0.0, 1.0, BetterValue::Higher),
            Figure::new("lost", None, "us", 4.0, 2.0, BetterValue::Lower),
        ]
    }

    #[test]
    fn a_section_is_replaced_and_the_rest_is_kept() {
        let old = "# Results\n\n<!-- figures: tcp -->\nold\n<!-- end of tcp -->\n\nAfter.\n";
        let new = replace_section(old, "tcp", &origin("2026-01-02"), &figures(), "").unwrap();
        let expected = "# Results\n\n<!-- figures: tcp -->\n\
            ## tcp: A CPU, family 6, 2 cores, Linux 6.1, commit abc, 2026-01-02\n\n\
            | figure | value | unit | floor |\n|---|---:|---|---:|\n\
            | rate | **3.5** | Gb/s | at least 4 |\n\
            | time | 3.5 | us | at most 4 |\n\
            | left | 0 |  | 0 |\n\
            | gain | 1.1 | ratio | - |\n\
            | lost | **not measured** | us | at most 4 |\n\
            <!-- end of tcp -->\n\nAfter.\n";
        assert_eq!(new, expected);
        let again = replace_section(&new, "tcp", &origin("2026-01-02"), &figures(), "");
        assert_eq!(again.unwrap(), expected);
    }

    #[test]
    fn a_new_group_is_added_at_the_end() {
        let old = "# Results\n\n<!-- figures: speed-idle -->\nold\n<!-- end of speed-idle -->\n";
        let new = replace_section(old, "speed", &origin("d"), &figures(), "| a |\n").unwrap();
        assert!(new.starts_with(old), "{new}");
        assert!(
            new.contains("\n<!-- figures: speed -->\n## speed: "),
            "{new}"
        );
        let end = "The transfers behind them:\n\n| a |\n<!-- end of speed -->\n";
        assert!(new.ends_with(end), "{new}");
    }

    #[test]
    fn a_section_without_its_end_is_refused() {
        let old = "<!-- figures: tcp -->\nold\n";
        let error = replace_section(old, "tcp", &origin("d"), &figures(), "")
            .unwrap_err()
            .to_string();
        assert!(error.contains("end of tcp"), "{error}");
    }
}
