//! Compares one ELF file with the drop-in library.

use super::elf_file::{ElfFile, VersionedSymbol};
use super::unsupported::{
    OPTIONAL, PRIVATE_BUT_WORKING, PRIVATE_NODES, PROVIDERS, REFUSING, UNSUPPORTED,
};
use serde::Serialize;
use std::collections::BTreeSet;

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Information; no failure.
    Note,
    /// A part of the program fails when it is used.
    Partial,
    /// The program does not start, or does not reach siwd.
    Fatal,
}

/// One finding, its reason, and advice.
#[derive(Debug, Serialize)]
pub struct Finding {
    pub severity: Severity,
    pub what: String,
    pub why: String,
    pub advice: String,
}

impl Finding {
    pub fn new(
        severity: Severity,
        what: impl Into<String>,
        why: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self {
            severity,
            what: what.into(),
            why: why.into(),
            advice: advice.into(),
        }
    }
}

/// The drop-in library, read from its file.
pub struct DropIn {
    pub machine: u16,
    symbols: BTreeSet<VersionedSymbol>,
    nodes: BTreeSet<String>,
}

impl DropIn {
    pub fn new(file: ElfFile) -> Self {
        let nodes = file.defined.iter().map(|symbol| symbol.version.clone());
        Self {
            machine: file.machine,
            nodes: nodes.collect(),
            symbols: file.defined.into_iter().collect(),
        }
    }
}

/// Version nodes of libibverbs and librdmacm.
fn is_rdma_node(version: &str) -> bool {
    version.starts_with("IBVERBS_") || version.starts_with("RDMACM_")
}

/// Checks for libibverbs or librdmacm, including renamed copies.
pub fn is_rdma_library(name: &str) -> bool {
    name.starts_with("libibverbs") || name.starts_with("librdmacm")
}

fn is_plain_name(name: &str) -> bool {
    matches!(name, "libibverbs.so.1" | "librdmacm.so.1")
}

/// Checks whether the file itself is libibverbs or librdmacm.
fn is_replaced(file: &ElfFile) -> bool {
    file.soname.as_deref().is_some_and(is_rdma_library)
}

/// Returns the version node of the provider interface that a file uses, as provider libraries of NICs do.
fn provider_node(file: &ElfFile) -> Option<&str> {
    let is_of_providers = |symbol: &&VersionedSymbol| {
        symbol.version.starts_with(PRIVATE_NODES)
            && !PRIVATE_BUT_WORKING.contains(&symbol.name.as_str())
    };
    let found = file.required.iter().find(is_of_providers)?;
    Some(&found.version)
}

fn contains(data: &[u8], text: &str) -> bool {
    let pattern = text.as_bytes();
    let mut rest = data;
    while let Some(at) = rest.iter().position(|byte| *byte == pattern[0]) {
        if rest[at..].starts_with(pattern) {
            return true;
        }
        rest = &rest[at + 1..];
    }
    false
}

/// Checks whether a file in a folder is worth a report: it mentions one of the two libraries.
pub fn is_about_rdma(data: &[u8]) -> bool {
    contains(data, "libibverbs") || contains(data, "librdmacm")
}

fn list(names: &[&str]) -> String {
    names.join(", ")
}

/// Collects all findings of a file. `file` was parsed from `data`.
pub fn examine(file: &ElfFile, data: &[u8], library: &DropIn) -> Vec<Finding> {
    let mut findings = Vec::new();
    if file.machine != library.machine {
        findings.push(Finding::new(
            Severity::Fatal,
            format!(
                "it is built for another processor (ELF machine {})",
                file.machine
            ),
            format!("the library is for machine {}", library.machine),
            "use a build of the program for this machine",
        ));
        return findings;
    }
    if file.is_statically_linked() {
        findings.push(Finding::new(
            Severity::Fatal,
            "it is statically linked",
            "ld.so does not start it, so that LD_PRELOAD and LD_LIBRARY_PATH have no effect",
            "link it with libibverbs.so.1 and librdmacm.so.1",
        ));
        return findings;
    }
    if is_replaced(file) {
        findings.push(Finding::new(
            Severity::Note,
            "it is a copy of libibverbs or librdmacm",
            "siwrun loads the library of siwd first, so its symbols take precedence",
            "nothing; its own version nodes are not examined",
        ));
        return findings;
    }
    find_libraries(file, data, &mut findings);
    if let Some(node) = provider_node(file) {
        findings.push(Finding::new(
            Severity::Note,
            format!("it calls functions of {node}"),
            "it is a provider library for devices of the kernel; the functions exist, and fail",
            "nothing; siwd's devices do not need it",
        ));
        find_missing_symbols(file, library, &mut findings);
        return findings;
    }
    find_missing_symbols(file, library, &mut findings);
    find_unsupported(file, &mut findings);
    find_providers(file, &mut findings);
    find_epoll(file, &mut findings);
    find_refusing(data, &mut findings);
    find_paths(data, &mut findings);
    findings
}

fn find_libraries(file: &ElfFile, data: &[u8], findings: &mut Vec<Finding>) {
    let needed: Vec<_> = file.needed.iter().map(String::as_str).collect();
    let rdma: Vec<_> = needed
        .iter()
        .copied()
        .filter(|name| is_rdma_library(name))
        .collect();
    let is_opened = contains(data, "libibverbs.so") || contains(data, "librdmacm.so");
    let (what, why, advice) = if !rdma.is_empty() {
        let is_plain = rdma.iter().all(|name| is_plain_name(name));
        let why = if is_plain {
            "siwrun replaces them by the library of siwd"
        } else {
            "a renamed copy is loaded too; siwrun preloads the library of siwd, so its symbols take precedence"
        };
        (format!("it needs {}", list(&rdma)), why, "nothing")
    } else if is_opened {
        (
            "it contains the name libibverbs.so or librdmacm.so, but is not linked with it".into(),
            "it opens the library by dlopen(3); the functions that it then looks up are not visible in the file",
            "run it with siwrun --verbose, which logs failed calls",
        )
    } else {
        (
            "it uses neither libibverbs nor librdmacm itself".into(),
            "the libraries that it needs are examined too; a plug-in that it loads later is not",
            "give the plug-in, or its folder, to siwrun doctor; TCP programs run with siwrun --rsockets",
        )
    };
    findings.push(Finding::new(Severity::Note, what, why, advice));
}

/// Finds versions and symbols that the library lacks.
fn find_missing_symbols(file: &ElfFile, library: &DropIn, findings: &mut Vec<Finding>) {
    // ld.so takes symbols missing in the preloaded library from the copy in a wheel.
    let has_copy = file
        .needed
        .iter()
        .any(|name| is_rdma_library(name) && !is_plain_name(name));
    let severity = if has_copy {
        Severity::Partial
    } else {
        Severity::Fatal
    };
    let why_of = |otherwise: &'static str| match has_copy {
        true => {
            "the library of siwd does not have it: it comes from the copy, which does not know siwd's objects"
        }
        false => otherwise,
    };
    let asked = file
        .required
        .iter()
        .filter(|symbol| is_rdma_node(&symbol.version));
    let (known, unknown): (Vec<_>, Vec<_>) =
        asked.partition(|symbol| library.nodes.contains(&symbol.version));
    let nodes: BTreeSet<_> = unknown
        .iter()
        .map(|symbol| symbol.version.as_str())
        .collect();
    for node in nodes {
        findings.push(Finding::new(
            severity,
            format!("it requires the version {node}"),
            why_of("the library of siwd does not have it, and ld.so refuses to start the program"),
            "build the program against an older rdma-core",
        ));
    }
    for symbol in known
        .into_iter()
        .filter(|symbol| !library.symbols.contains(symbol))
    {
        findings.push(Finding::new(
            severity,
            format!("it calls {}@{}", symbol.name, symbol.version),
            why_of("the library of siwd does not have that function: ld.so ends the program at its first call, or refuses to start it"),
            "build the program without that call",
        ));
    }
}

fn find_unsupported(file: &ElfFile, findings: &mut Vec<Finding>) {
    let called = |names: &[&'static str]| -> Vec<&'static str> {
        let asks = |name: &&str| {
            file.required
                .iter()
                .any(|symbol| symbol.name == *name && is_rdma_node(&symbol.version))
        };
        names.iter().copied().filter(asks).collect()
    };
    for row in UNSUPPORTED {
        let names = called(row.names);
        if !names.is_empty() {
            let what = format!("it calls {}, failing with EOPNOTSUPP", list(&names));
            findings.push(Finding::new(Severity::Partial, what, row.why, row.advice));
        }
    }
    let optional = called(OPTIONAL);
    if !optional.is_empty() {
        findings.push(Finding::new(
            Severity::Note,
            format!("it calls {}, failing with EOPNOTSUPP", list(&optional)),
            "enhanced connection establishment is optional",
            "nothing",
        ));
    }
}

/// Finds functions of a NIC's own library.
fn find_providers(file: &ElfFile, findings: &mut Vec<Finding>) {
    for (node, provider) in PROVIDERS {
        let asked = file
            .required
            .iter()
            .filter(|symbol| symbol.version.starts_with(node));
        let names: Vec<_> = asked.map(|symbol| symbol.name.as_str()).collect();
        if !names.is_empty() {
            findings.push(Finding::new(
                Severity::Partial,
                format!("it calls {} of {provider}", list(&names)),
                "they only work on devices of that vendor, not on those of siwd",
                "do not use options of the program that need them",
            ));
        }
    }
}

/// Finds rsocket programs that use epoll(7), which does not know rsockets.
fn find_epoll(file: &ElfFile, findings: &mut Vec<Finding>) {
    let calls = |name: &str| file.required.iter().any(|symbol| symbol.name == name);
    if calls("rsocket") && calls("epoll_ctl") && !calls("repoll_ctl") {
        findings.push(Finding::new(
            Severity::Partial,
            "it calls rsocket and epoll_ctl",
            "the kernel's epoll does not see rsockets",
            "run the TCP version of the program with siwrun --rsockets, or have it call repoll_ctl",
        ));
    }
}

/// Finds programs that refuse iWARP devices, and names the persona that they need.
fn find_refusing(data: &[u8], findings: &mut Vec<Finding>) {
    for row in REFUSING {
        if row.marks.iter().any(|mark| contains(data, mark)) {
            findings.push(Finding::new(
                Severity::Note,
                format!("it contains {}, which refuses iWARP devices", row.name),
                row.why,
                row.advice,
            ));
        }
    }
}

/// Finds paths of the kernel's devices, which siwrun redirects.
fn find_paths(data: &[u8], findings: &mut Vec<Finding>) {
    let paths = ["/sys/class/infiniband", "/dev/infiniband"];
    let found: Vec<_> = paths
        .into_iter()
        .filter(|path| contains(data, path))
        .collect();
    if !found.is_empty() {
        findings.push(Finding::new(
            Severity::Note,
            format!("it contains the path {}", list(&found)),
            "siwrun redirects these paths to files of the same format, which siwd writes",
            "nothing, unless it calls ioctl(2) on the devices, which only libibverbs does",
        ));
    }
}
