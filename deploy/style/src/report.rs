//! The findings of all crates, and their output formats: table, JSON, list.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Value, json};

use crate::comments::comment_lines;
use crate::counts::{Counts, Place, count_file};
use crate::documents::check_documents;
use crate::imports::{find_edges, largest_circle, uses_inside};
use crate::language::LanguageCounts;
use crate::source::{Crate, SourceFile, list_files, load_crates};

/// Lines above which a file counts as long.
const FILE_LINES: usize = 600;
/// Lines above which a function counts as long, from `fn` to its closing brace.
const FUNCTION_LINES: usize = 120;
/// Type names that every crate may declare once, as is conventional in Rust.
const CONVENTIONAL_TYPE_NAMES: [&str; 2] = ["Error", "Result"];

/// Metrics that `--list` can show.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Metric {
    Bindings,
    Functions,
    Comments,
    Docs,
    TypeNames,
    ConventionalTypeNames,
    Circles,
    LongFiles,
    LongTestFiles,
    LongFunctions,
    /// Names in documents that do not exist in the code, and broken links.
    Documents,
    /// Comment lines with words that often make sentences hard to read.
    Words,
    /// Documentation that opens without a subject.
    Openings,
}

impl Metric {
    /// The metric for `--list NAME`.
    pub fn from_name(name: &str) -> Option<Metric> {
        Some(match name {
            "bindings" => Metric::Bindings,
            "functions" => Metric::Functions,
            "comments" => Metric::Comments,
            "docs" => Metric::Docs,
            "type-names" => Metric::TypeNames,
            "conventional-type-names" => Metric::ConventionalTypeNames,
            "circles" => Metric::Circles,
            "long-files" => Metric::LongFiles,
            "long-test-files" => Metric::LongTestFiles,
            "long-functions" => Metric::LongFunctions,
            "documents" => Metric::Documents,
            "words" => Metric::Words,
            "openings" => Metric::Openings,
            _ => return None,
        })
    }
}

/// Findings of one crate, or of files outside all crates if `folder` is `.`.
#[derive(Default)]
pub struct CrateReport {
    folder: String,
    package: String,
    files: usize,
    lines: usize,
    counts: Counts,
    comments: Vec<Place>,
    shared_type_names: Vec<Place>,
    conventional_type_names: Vec<Place>,
    circle_files: usize,
    circle_uses: Vec<Place>,
    long_files: Vec<Place>,
    long_test_files: Vec<Place>,
    documents: Vec<Place>,
    language: LanguageCounts,
}

/// Findings of every crate, and of the files outside all crates.
pub struct StyleReport {
    crates: Vec<CrateReport>,
}

fn percent(part: usize, whole: usize) -> f64 {
    if whole == 0 {
        0.0
    } else {
        100.0 * part as f64 / whole as f64
    }
}

impl CrateReport {
    fn measure(krate: &Crate) -> CrateReport {
        let mut report = CrateReport {
            folder: krate.folder.clone(),
            package: krate.package.clone(),
            ..CrateReport::default()
        };
        for file in &krate.files {
            report.language.add_file(file);
            let lines = file.text.lines().count();
            if lines > FILE_LINES {
                let name = format!("{lines} lines");
                let place = Place {
                    path: file.path.clone(),
                    line: 1,
                    name,
                };
                let places = if file.is_test {
                    &mut report.long_test_files
                } else {
                    &mut report.long_files
                };
                places.push(place);
            }
        }
        for file in krate.code_files() {
            report.add_file(krate, file);
        }
        let edges = find_edges(krate);
        let circle = largest_circle(&edges);
        report.circle_files = circle.len();
        report.circle_uses = uses_inside(krate, &edges, &circle);
        report
    }

    fn add_file(&mut self, krate: &Crate, file: &SourceFile) {
        let has_inner_docs = |declaration: &syn::ItemMod| {
            let name = declaration.ident.to_string();
            let ends = [format!("/{name}.rs"), format!("/{name}/mod.rs")];
            let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
            krate.files.iter().any(|other| {
                let is_child = ends.iter().any(|end| other.path.ends_with(end.as_str()));
                let documented = other
                    .syntax
                    .attrs
                    .iter()
                    .any(|attribute| attribute.path().is_ident("doc"));
                is_child && documented && other.path.starts_with(folder)
            })
        };
        let mut counts = count_file(file, FUNCTION_LINES, has_inner_docs);
        let is_test_line = |line: usize| {
            counts
                .test_lines
                .iter()
                .any(|&(first, last)| (first..=last).contains(&line))
        };
        self.files += 1;
        let all_lines = file.text.lines().count();
        self.lines += (1..=all_lines).filter(|&line| !is_test_line(line)).count();
        let comments = comment_lines(&file.text)
            .into_iter()
            .filter(|&line| !is_test_line(line));
        self.comments.extend(comments.map(|line| {
            Place {
                path: file.path.clone(),
                line,
                name: file
                    .text
                    .lines()
                    .nth(line - 1)
                    .unwrap_or("")
                    .trim()
                    .to_owned(),
            }
        }));
        let total = &mut self.counts;
        total.bindings += counts.bindings;
        total.functions += counts.functions;
        total.public_items += counts.public_items;
        total
            .single_letter_bindings
            .append(&mut counts.single_letter_bindings);
        total
            .one_word_functions
            .append(&mut counts.one_word_functions);
        total
            .undocumented_items
            .append(&mut counts.undocumented_items);
        total.long_functions.append(&mut counts.long_functions);
        total.types.append(&mut counts.types);
    }

    fn findings(&self, metric: Metric) -> &[Place] {
        match metric {
            Metric::Bindings => &self.counts.single_letter_bindings,
            Metric::Functions => &self.counts.one_word_functions,
            Metric::Comments => &self.comments,
            Metric::Docs => &self.counts.undocumented_items,
            Metric::TypeNames => &self.shared_type_names,
            Metric::ConventionalTypeNames => &self.conventional_type_names,
            Metric::Circles => &self.circle_uses,
            Metric::LongFiles => &self.long_files,
            Metric::LongTestFiles => &self.long_test_files,
            Metric::LongFunctions => &self.counts.long_functions,
            Metric::Documents => &self.documents,
            Metric::Words => &self.language.flagged_lines,
            Metric::Openings => &self.language.flagged_openings,
        }
    }

    fn single_letter_percent(&self) -> f64 {
        percent(
            self.counts.single_letter_bindings.len(),
            self.counts.bindings,
        )
    }

    fn one_word_percent(&self) -> f64 {
        percent(self.counts.one_word_functions.len(), self.counts.functions)
    }

    fn documented_percent(&self) -> f64 {
        let undocumented = self.counts.undocumented_items.len();
        if self.counts.public_items == 0 {
            100.0
        } else {
            100.0 - percent(undocumented, self.counts.public_items)
        }
    }

    fn flagged_words_percent(&self) -> f64 {
        let language = &self.language;
        percent(language.flagged_lines.len(), language.comment_lines)
    }

    fn flagged_openings_percent(&self) -> f64 {
        let language = &self.language;
        percent(language.flagged_openings.len(), language.doc_comments)
    }

    fn to_json(&self) -> Value {
        let round = |value: f64| (value * 10.0).round() / 10.0;
        json!({
            "crate": self.folder,
            "package": self.package,
            "files": self.files,
            "lines": self.lines,
            "single_letter_bindings_percent": round(self.single_letter_percent()),
            "one_word_functions_percent": round(self.one_word_percent()),
            "comment_lines_percent": round(percent(self.comments.len(), self.lines)),
            "documented_items_percent": round(self.documented_percent()),
            "shared_type_names": self.shared_type_names.len(),
            "conventional_type_names": self.conventional_type_names.len(),
            "largest_import_circle": self.circle_files,
            "long_files": self.long_files.len(),
            "long_test_files": self.long_test_files.len(),
            "long_functions": self.counts.long_functions.len(),
            "findings_in_documents": self.documents.len(),
            "flagged_words_percent": round(self.flagged_words_percent()),
            "flagged_openings_percent": round(self.flagged_openings_percent()),
        })
    }

    fn table_row(&self) -> Vec<String> {
        vec![
            self.folder.clone(),
            self.lines.to_string(),
            format!("{:.1}", self.single_letter_percent()),
            format!("{:.1}", self.one_word_percent()),
            format!("{:.1}", percent(self.comments.len(), self.lines)),
            format!("{:.1}", self.documented_percent()),
            format!(
                "{}+{}",
                self.shared_type_names.len(),
                self.conventional_type_names.len()
            ),
            format!("{}/{}", self.circle_files, self.files),
            format!("{}+{}", self.long_files.len(), self.long_test_files.len()),
            self.counts.long_functions.len().to_string(),
            format!("{:.1}", self.flagged_words_percent()),
            format!("{:.1}", self.flagged_openings_percent()),
        ]
    }
}

impl StyleReport {
    /// Measures the repository in `root`.
    pub fn measure(root: &Path) -> anyhow::Result<StyleReport> {
        let files = list_files(root)?;
        let crates = load_crates(root, &files)?;
        let mut reports: Vec<CrateReport> = crates.iter().map(CrateReport::measure).collect();
        find_shared_type_names(&mut reports);
        reports.push(CrateReport {
            folder: ".".to_owned(),
            documents: check_documents(root, &files),
            ..CrateReport::default()
        });
        Ok(StyleReport { crates: reports })
    }

    /// Returns true if a crate has this folder or package name.
    pub fn has_crate(&self, name: &str) -> bool {
        self.selected(Some(name)).next().is_some()
    }

    fn selected<'a>(&'a self, name: Option<&'a str>) -> impl Iterator<Item = &'a CrateReport> {
        self.crates.iter().filter(move |report| {
            name.is_none_or(|name| name == report.folder || name == report.package)
        })
    }

    /// Lists the findings of a metric as `path:line name`.
    pub fn list_findings(&self, metric: Metric, krate: Option<&str>) -> String {
        let mut text = String::new();
        for place in self
            .selected(krate)
            .flat_map(|report| report.findings(metric))
        {
            text.push_str(&format!("{}:{} {}\n", place.path, place.line, place.name));
        }
        text
    }

    /// All counts as a JSON array.
    pub fn to_json(&self, krate: Option<&str>) -> Value {
        self.selected(krate).map(CrateReport::to_json).collect()
    }

    /// All counts as a table.
    pub fn to_table(&self, krate: Option<&str>) -> String {
        let heads = [
            "crate",
            "lines",
            "1-letter %",
            "1-word fn %",
            "// %",
            "docs %",
            "types twice+conv.",
            "circle/files",
            "long files+tests",
            "long fns",
            "words %",
            "openings %",
        ];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        rows.extend(self.selected(krate).map(CrateReport::table_row));
        let widths: Vec<usize> = (0..heads.len())
            .map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0))
            .collect();
        let mut table = String::new();
        for row in rows {
            let mut line = format!("{:<width$}", row[0], width = widths[0]);
            for (cell, width) in row.iter().zip(&widths).skip(1) {
                line.push_str(&format!("  {cell:>width$}"));
            }
            table.push_str(&line);
            table.push('\n');
        }
        table
    }
}

/// Finds type names declared by more than one file; several declarations in one file are variants
/// of one type under different conditions.
fn find_shared_type_names(reports: &mut [CrateReport]) {
    let mut declarations: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for place in reports.iter().flat_map(|report| &report.counts.types) {
        declarations
            .entry(place.name.clone())
            .or_default()
            .insert(place.path.clone());
    }
    for report in reports {
        for place in &report.counts.types {
            let files = &declarations[&place.name];
            if files.len() > 1 {
                let others: Vec<&str> = files
                    .iter()
                    .filter(|path| **path != place.path)
                    .map(String::as_str)
                    .collect();
                let named = Place {
                    name: format!("{} also in {}", place.name, others.join(" ")),
                    ..place.clone()
                };
                let conventional = CONVENTIONAL_TYPE_NAMES.contains(&place.name.as_str());
                if conventional {
                    report.conventional_type_names.push(named);
                } else {
                    report.shared_type_names.push(named);
                }
            }
        }
    }
}
