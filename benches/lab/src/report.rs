//! Reports: JSON, JUnit, a page, and a capture of each case that did not pass.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use pcap_file::DataLink;
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketBlock;
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use quick_xml::Writer;
use quick_xml::escape::escape;
use quick_xml::events::{BytesEnd, BytesStart, BytesText, Event as Xml};
use serde::{Deserialize, Serialize};

use crate::case::{Case, Rule};
use crate::script::{Outcome, Verdict};
use crate::via::LocalLink;

/// Version of the JSON report.
pub const VERSION: u32 = 1;

/// Settings that a repetition needs.
#[derive(Debug, Clone, Serialize, Deserialize, Default)]
pub struct Settings {
    pub via: Option<String>,
    pub siwd: Option<String>,
    pub lie: Option<String>,
    #[serde(default)]
    pub link: LocalLink,
    #[serde(default)]
    pub ipv6: bool,
    pub target: Option<String>,
    pub interface: Option<String>,
    pub address: Option<String>,
    pub port: u16,
    pub client_port: u16,
    #[serde(default)]
    pub client: Option<String>,
    #[serde(default)]
    pub agent: Option<String>,
    #[serde(default)]
    pub restart: Option<String>,
    /// Settings of the target beside those that every case expects.
    #[serde(default)]
    pub settings: Vec<String>,
    pub seed: u64,
    pub hazard: bool,
}

#[derive(Debug, Serialize)]
pub struct Report<'a> {
    pub version: u32,
    pub program: &'static str,
    pub settings: &'a Settings,
    pub peer: Option<&'a str>,
    pub started: u64,
    pub seconds: f64,
    pub counts: BTreeMap<&'static str, usize>,
    pub results: Vec<Entry<'a>>,
}

#[derive(Debug, Serialize)]
pub struct Entry<'a> {
    pub name: String,
    pub case: &'a str,
    pub group: &'a str,
    pub title: &'a str,
    pub role: crate::stream::Role,
    pub params: BTreeMap<&'a str, &'a str>,
    pub rules: &'a [Rule],
    pub verdict: Verdict,
    pub news: Option<String>,
    pub reason: &'a str,
    pub known: Option<&'a str>,
    pub expected: &'a [String],
    pub actual: &'a str,
    pub file: &'a str,
    pub line: usize,
    pub notes: &'a [String],
    pub remarks: &'a [String],
    pub seconds: f64,
    pub ladder: Vec<Rung>,
}

#[derive(Debug, Serialize)]
pub struct Rung {
    pub seconds: f64,
    pub from: &'static str,
    pub text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frame: Option<String>,
}

fn hex(octets: &[u8]) -> String {
    octets.iter().fold(String::new(), |mut text, octet| {
        let _ = write!(text, "{octet:02x}");
        text
    })
}

impl<'a> Entry<'a> {
    pub fn new(
        case: &'a Case,
        outcome: &'a Outcome,
        news: Option<String>,
        known: Option<&'a str>,
    ) -> Entry<'a> {
        let begin = outcome.ladder.first().map(|line| line.at);
        let shown = outcome.verdict > Verdict::Recorded;
        let rungs = outcome.ladder.iter().filter(|_| shown).map(|line| Rung {
            seconds: begin.map_or(0.0, |begin| line.at.duration_since(begin).as_secs_f64()),
            from: if line.from_lab { "lab" } else { "target" },
            text: line.text.clone(),
            frame: line.frame.as_deref().map(hex),
        });
        Entry {
            name: outcome.name(),
            case: &case.id,
            group: case.group(),
            title: &case.title,
            role: case.role,
            params: outcome
                .params
                .iter()
                .map(|(n, v)| (n.as_str(), v.as_str()))
                .collect(),
            rules: &case.rules,
            verdict: outcome.verdict,
            news,
            reason: &outcome.reason,
            known,
            expected: &outcome.expected,
            actual: &outcome.actual,
            file: &case.file,
            line: outcome.line,
            notes: &outcome.notes,
            remarks: &case.remarks,
            seconds: outcome.duration.as_secs_f64(),
            ladder: rungs.collect(),
        }
    }

    fn passed(&self) -> bool {
        self.verdict == Verdict::Pass && self.news.is_none()
    }

    /// First lines of a terminal report, and of the other reports' details.
    pub fn details(&self) -> String {
        let mut text = String::new();
        let rule = &self.rules[0];
        let _ = writeln!(
            text,
            "  RFC {} {} {}: {}",
            rule.rfc,
            rule.section,
            rule.level.name(),
            rule.text
        );
        if !self.reason.is_empty() {
            let _ = writeln!(text, "  {}", self.reason);
        }
        for expected in self.expected {
            let _ = writeln!(text, "  expected  {expected}");
        }
        if !self.actual.is_empty() {
            let _ = writeln!(text, "  actual    {}", self.actual);
        }
        if let Some(known) = self.known {
            let _ = writeln!(text, "  known     {known}");
        }
        for note in self.notes {
            let _ = writeln!(text, "  note      {note}");
        }
        let _ = writeln!(text, "  case      {}:{}", self.file, self.line);
        text
    }
}

impl Report<'_> {
    pub fn write_json(&self, file: &Path) -> Result<()> {
        let out = File::create(file).with_context(|| format!("cannot write {}", file.display()))?;
        serde_json::to_writer_pretty(out, self)?;
        Ok(())
    }

    /// JUnit: a test case for each instance; news fail, expected verdicts other than pass are skipped.
    pub fn write_junit(&self, file: &Path) -> Result<()> {
        let out = File::create(file).with_context(|| format!("cannot write {}", file.display()))?;
        let mut xml = Writer::new_with_indent(out, b' ', 1);
        let groups = groups(&self.results);
        xml.write_event(Xml::Start(
            BytesStart::new("testsuites").with_attributes([("name", "siw-lab")]),
        ))?;
        for (group, entries) in groups {
            let tests = entries.len().to_string();
            let failures = entries
                .iter()
                .filter(|e| e.news.is_some())
                .count()
                .to_string();
            let start = BytesStart::new("testsuite").with_attributes([
                ("name", group),
                ("tests", tests.as_str()),
                ("failures", failures.as_str()),
            ]);
            xml.write_event(Xml::Start(start))?;
            for entry in entries {
                let time = format!("{:.3}", entry.seconds);
                let start = BytesStart::new("testcase").with_attributes([
                    ("classname", group),
                    ("name", entry.name.as_str()),
                    ("time", time.as_str()),
                ]);
                xml.write_event(Xml::Start(start))?;
                let inner = match &entry.news {
                    Some(news) => Some(("failure", news.as_str())),
                    None if entry.verdict > Verdict::Recorded => {
                        Some(("skipped", entry.verdict.name()))
                    }
                    None => None,
                };
                if let Some((kind, message)) = inner {
                    xml.write_event(Xml::Start(
                        BytesStart::new(kind).with_attributes([("message", message)]),
                    ))?;
                    xml.write_event(Xml::Text(BytesText::new(&entry.details())))?;
                    xml.write_event(Xml::End(BytesEnd::new(kind)))?;
                }
                xml.write_event(Xml::End(BytesEnd::new("testcase")))?;
            }
            xml.write_event(Xml::End(BytesEnd::new("testsuite")))?;
        }
        xml.write_event(Xml::End(BytesEnd::new("testsuites")))?;
        Ok(())
    }

    /// One self-contained page.
    pub fn write_html(&self, file: &Path) -> Result<()> {
        let mut page = String::from(HEAD);
        let target = self
            .peer
            .or(self.settings.target.as_deref())
            .or(self.settings.via.as_deref())
            .unwrap_or("target");
        let _ = write!(page, "<h1>siw-lab: {}</h1><p>", escape(target));
        for (verdict, count) in &self.counts {
            let _ = write!(page, "<span class='v {verdict}'>{count} {verdict}</span> ");
        }
        let _ = write!(
            page,
            "in {:.0} s, seed {}</p>",
            self.seconds, self.settings.seed
        );
        page += "<table><tr><th>group</th><th>instances</th><th>verdicts</th></tr>";
        for (group, entries) in groups(&self.results) {
            let mut verdicts: BTreeMap<Verdict, usize> = BTreeMap::new();
            for entry in &entries {
                *verdicts.entry(entry.verdict).or_default() += 1;
            }
            let _ = write!(
                page,
                "<tr><td><a href='#{group}'>{group}</a></td><td>{}</td><td>",
                entries.len()
            );
            for (verdict, count) in verdicts {
                let _ = write!(
                    page,
                    "<span class='v {0}'>{count} {0}</span> ",
                    verdict.name()
                );
            }
            page += "</td></tr>";
        }
        page += "</table>";
        let news: Vec<_> = self.results.iter().filter(|e| e.news.is_some()).collect();
        if !news.is_empty() {
            page += "<h2>News</h2><ul>";
            for entry in news {
                let _ = write!(
                    page,
                    "<li><span class='v {0}'>{0}</span> <a href='#{1}'>{1}</a> {2}</li>",
                    entry.verdict.name(),
                    escape(&entry.name),
                    escape(entry.title)
                );
            }
            page += "</ul>";
        }
        page += "<p><label><input type='checkbox' id='segments' checked> TCP segments with their octets</label></p>";
        for (group, entries) in groups(&self.results) {
            let _ = write!(page, "<h2 id='{group}'>{group}</h2>");
            for same in entries.chunk_by(|a, b| a.case == b.case && a.passed() && b.passed()) {
                if let [entry] = same {
                    self.html_entry(&mut page, entry);
                    continue;
                }
                // Instances of one case that passed need one line.
                let _ = write!(
                    page,
                    "<details><summary><span class='v pass'>pass</span> <b>{}</b> {}, {} instances</summary>",
                    escape(same[0].case),
                    escape(same[0].title),
                    same.len()
                );
                for entry in same {
                    self.html_entry(&mut page, entry);
                }
                page += "</details>";
            }
        }
        page += "</body></html>\n";
        std::fs::write(file, page).with_context(|| format!("cannot write {}", file.display()))
    }

    fn html_entry(&self, page: &mut String, entry: &Entry) {
        let open = if entry.news.is_some() { " open" } else { "" };
        let verdict = entry.verdict.name();
        let _ = write!(
            page,
            "<details{open} id='{0}'><summary><span class='v {verdict}'>{verdict}</span> <b>{0}</b> {1}{2}</summary>",
            escape(&entry.name),
            escape(entry.title),
            entry.news.as_ref().map_or(String::new(), |news| format!(
                " <i>{}</i>",
                escape(news.as_str())
            ))
        );
        for rule in entry.rules {
            let _ = write!(
                page,
                "<blockquote>RFC {} section {}, {}: {}</blockquote>",
                rule.rfc,
                escape(&rule.section),
                rule.level.name(),
                escape(&rule.text)
            );
        }
        for remark in entry.remarks {
            let _ = write!(page, "<p>{}</p>", escape(remark));
        }
        if !entry.reason.is_empty() {
            let _ = write!(page, "<p>{}</p>", escape(entry.reason));
        }
        if let Some(known) = entry.known {
            let _ = write!(page, "<p>Known: {}</p>", escape(known));
        }
        if !entry.expected.is_empty() {
            let expected = entry.expected.join("\n");
            let _ = write!(
                page,
                "<table class='two'><tr><th>expected</th><th>actual</th></tr><tr><td><pre>{}</pre></td><td><pre>{}</pre></td></tr></table>",
                escape(expected.as_str()),
                escape(entry.actual)
            );
        }
        if !entry.notes.is_empty() {
            let _ = write!(page, "<ul>");
            for note in entry.notes {
                let _ = write!(page, "<li>{}</li>", escape(note));
            }
            page.push_str("</ul>");
        }
        if !entry.ladder.is_empty() {
            page.push_str(
                "<table class='ladder'><tr><th>ms</th><th>lab</th><th></th><th>target</th></tr>",
            );
            for rung in &entry.ladder {
                let text = escape(rung.text.as_str());
                let octets = rung.frame.as_ref().map_or(String::new(), |f| {
                    format!("<div class='x'>{}</div>", spaced(f))
                });
                let class = if rung.frame.is_some() { "tcp" } else { "msg" };
                let (left, arrow, right) = if rung.from == "lab" {
                    (format!("{text}{octets}"), "→", String::new())
                } else {
                    (String::new(), "←", format!("{text}{octets}"))
                };
                let _ = write!(
                    page,
                    "<tr class='{class}'><td>{:.3}</td><td>{left}</td><td>{arrow}</td><td>{right}</td></tr>",
                    rung.seconds * 1000.0
                );
            }
            page.push_str("</table>");
            let _ = write!(
                page,
                "<p><code>siw-lab replay</code> the folder of this report with <code>{}</code></p>",
                escape(entry.case)
            );
        }
        page.push_str("</details>");
    }
}

/// Octets of a frame in pairs, sixteen pairs a line at most by the page's width.
fn spaced(frame: &str) -> String {
    let octets: Vec<&str> = (0..frame.len())
        .step_by(2)
        .filter_map(|at| frame.get(at..at + 2))
        .collect();
    octets.join(" ")
}

fn groups<'a, 'b>(entries: &'b [Entry<'a>]) -> BTreeMap<&'a str, Vec<&'b Entry<'a>>> {
    let mut groups: BTreeMap<&str, Vec<&Entry>> = BTreeMap::new();
    for entry in entries {
        groups.entry(entry.group).or_default().push(entry);
    }
    groups
}

const HEAD: &str = "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>siw-lab</title><style>
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.6em 0}td,th{border:1px solid #ccc;padding:.2em .5em;text-align:left;vertical-align:top}
summary{cursor:pointer;padding:.15em 0}blockquote{border-left:3px solid #999;margin:.4em 0;padding:.1em .8em;color:#444}
pre{margin:0;white-space:pre-wrap}details>*:not(summary){margin-left:1.2em}
.v{border-radius:3px;padding:0 .4em;color:#fff;background:#777;white-space:nowrap}
.pass{background:#2a7d3c}.recorded{background:#4a7aa8}.weak{background:#a87400}.not-supported{background:#888}
.inconclusive{background:#7a4fa0}.fail{background:#b3261e}.dead{background:#000}
.ladder{font-family:ui-monospace,monospace;font-size:12px;width:100%;table-layout:fixed}
.ladder th:nth-child(1){width:5em}.ladder th:nth-child(3){width:1.5em}
.ladder tr.msg{background:#f3f6fa;font-weight:600}.x{color:#777;font-weight:400;overflow-wrap:anywhere}
.two pre{font-size:12px}body:has(#segments:not(:checked)) tr.tcp{display:none}
</style></head><body>";

/// Writes the frames of an instance as a capture.
pub fn write_pcapng(file: &Path, outcome: &Outcome) -> Result<()> {
    let out = File::create(file).with_context(|| format!("cannot write {}", file.display()))?;
    let mut writer = PcapNgWriter::new(out)?;
    writer.write_pcapng_block(InterfaceDescriptionBlock {
        linktype: DataLink::ETHERNET,
        snaplen: 0,
        options: vec![InterfaceDescriptionOption::IfTsResol(9)],
    })?;
    // The wall clock of the first frame is reconstructed from its age.
    let wall = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let now = Instant::now();
    for line in &outcome.ladder {
        let Some(frame) = &line.frame else { continue };
        let age: Duration = now.saturating_duration_since(line.at);
        writer.write_pcapng_block(EnhancedPacketBlock {
            interface_id: 0,
            timestamp: wall.saturating_sub(age),
            original_len: frame.len() as u32,
            data: frame.into(),
            options: vec![],
        })?;
    }
    Ok(())
}

/// Name of an instance as a file name.
pub fn file_name(name: &str) -> String {
    name.replace(['/', ',', '='], "_")
}
