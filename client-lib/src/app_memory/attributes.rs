//! Attributes of mappings that madvise(2), mlock(2) and mmap(2) have set, which a registration must not
//! change. Only /proc/self/smaps shows them, and reading it takes long in a large process. Therefore it is
//! read only if the program has set some ([`note_change`]), by calls that the drop-in library overrides.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::mm::{Advice, MlockFlags};
use siw_shm::shared_memory::PAGE;

use super::pages::is_in_thread_heap;
use super::vma::{Vma, parse_line};

/// Attributes of a mapping, apart from its access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Attributes {
    /// MADV_DONTFORK
    is_not_inherited: bool,
    /// MADV_DONTDUMP
    is_not_dumped: bool,
    /// MADV_MERGEABLE
    is_mergeable: bool,
    /// MADV_HUGEPAGE, or MADV_NOHUGEPAGE.
    has_huge_pages: Option<bool>,
    /// mlock(2), or mlock2(2) with MLOCK_ONFAULT.
    lock: Option<Lock>,
    /// MAP_NORESERVE
    pub is_not_reserved: bool,
    /// Reason why the pages cannot be replaced.
    pub why_not_replaced: Option<&'static str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lock {
    Whole,
    OnFault,
}

/// The program has set attributes of some mapping.
static MAY_EXIST: AtomicBool = AtomicBool::new(false);

/// Records that the program sets attributes of a mapping.
pub(super) fn note_change() {
    MAY_EXIST.store(true, Ordering::Release);
}

impl Attributes {
    /// Attributes of a part of a mapping of private memory.
    pub fn of(vma: &Vma, bytes: &Range<usize>) -> Attributes {
        let mut found = Attributes::default();
        if MAY_EXIST.load(Ordering::Acquire) {
            found = read_attributes(vma.range.start).unwrap_or_default();
        }
        found.is_not_reserved |= is_in_thread_heap(bytes.start);
        found
    }

    /// Attributes from the flags of /proc/self/smaps (proc_pid_smaps(5)).
    fn parse(flags: &str) -> Attributes {
        let mut found = Attributes::default();
        for flag in flags.split_whitespace() {
            match flag {
                "dc" => found.is_not_inherited = true,
                "dd" => found.is_not_dumped = true,
                "mg" => found.is_mergeable = true,
                "hg" => found.has_huge_pages = Some(true),
                "nh" => found.has_huge_pages = Some(false),
                "lo" => found.lock = found.lock.or(Some(Lock::Whole)),
                "lf" => found.lock = Some(Lock::OnFault),
                "nr" => found.is_not_reserved = true,
                "wf" => found.why_not_replaced = Some("memory that is wiped on fork"),
                _ => {}
            }
        }
        found
    }

    /// Sets the attributes of pages that have just been mapped. A refusal leaves the page usable.
    pub fn apply_to(self, pages: &Range<usize>) {
        let (start, len) = (pages.start as *mut std::ffi::c_void, pages.len());
        let all = [
            (self.is_not_inherited, Advice::LinuxDontFork),
            (self.is_not_dumped, Advice::LinuxDontDump),
            (self.is_mergeable, Advice::LinuxMergeable),
            (self.has_huge_pages == Some(true), Advice::LinuxHugepage),
            (self.has_huge_pages == Some(false), Advice::LinuxNoHugepage),
        ];
        for (_, advice) in all.into_iter().filter(|(is_set, _)| *is_set) {
            // SAFETY: none of these changes content.
            let _ = unsafe { rustix::mm::madvise(start, len, advice) };
        }
        let flags = match self.lock {
            Some(Lock::Whole) => MlockFlags::empty(),
            Some(Lock::OnFault) => MlockFlags::ONFAULT,
            None => return,
        };
        // SAFETY: changes no content.
        let _ = unsafe { rustix::mm::mlock_with(start, len, flags) };
    }
}

/// Reads the attributes of the mapping that begins at an address.
fn read_attributes(start: usize) -> Option<Attributes> {
    let lines = BufReader::new(File::open("/proc/self/smaps").ok()?).lines();
    let (mut is_found, mut has_key) = (false, false);
    for line in lines {
        let line = line.ok()?;
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if is_found {
                let mut found = Attributes::parse(flags);
                if has_key {
                    found.why_not_replaced = Some("memory with a protection key");
                }
                return Some(found);
            }
        } else if let Some(key) = line.strip_prefix("ProtectionKey:") {
            has_key = is_found && key.trim() != "0";
        } else if let Some((mapping, _)) = parse_line(&line) {
            is_found = mapping.range.start == start;
        }
    }
    None
}

/// Attributes of replaced pages, where they are not those of ordinary memory.
#[derive(Debug, Default)]
pub(super) struct ReplacedAttributes(BTreeMap<usize, (usize, Attributes)>);

impl ReplacedAttributes {
    /// Sets the attributes of replaced pages.
    pub fn set(&mut self, pages: &Range<usize>, attributes: Attributes) {
        self.remove(pages);
        if attributes == Attributes::default() {
            return;
        }
        let mut pages = pages.clone();
        // Long memory is replaced in parts.
        if let Some((&start, &(end, before))) = self.0.range(..pages.start).next_back()
            && end == pages.start
            && before == attributes
        {
            pages.start = start;
        }
        self.0.insert(pages.start, (pages.end, attributes));
    }

    /// Forgets the attributes of pages.
    pub fn remove(&mut self, pages: &Range<usize>) {
        for (part, attributes) in self.split(pages) {
            if attributes == Attributes::default() {
                continue;
            }
            let whole = self.0.range(..=part.start).next_back();
            let Some((&start, &(end, _))) = whole else {
                continue;
            };
            self.0.remove(&start);
            if start < part.start {
                self.0.insert(start, (part.start, attributes));
            }
            if part.end < end {
                self.0.insert(part.end, (end, attributes));
            }
        }
    }

    /// Splits pages into parts of equal attributes.
    pub fn split(&self, pages: &Range<usize>) -> Vec<(Range<usize>, Attributes)> {
        let mut parts = Vec::new();
        let mut at = pages.start;
        let before = self.0.range(..pages.start).next_back();
        let inside = self.0.range(pages.clone());
        for (&start, &(end, attributes)) in before.into_iter().chain(inside) {
            let part = start.max(at)..end.min(pages.end);
            if part.is_empty() {
                continue;
            }
            if at < part.start {
                parts.push((at..part.start, Attributes::default()));
            }
            at = part.end;
            parts.push((part, attributes));
        }
        if at < pages.end {
            parts.push((at..pages.end, Attributes::default()));
        }
        debug_assert!(parts.iter().all(|(part, _)| part.start % PAGE == 0));
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_smaps_are_attributes() {
        let found = Attributes::parse(" rd wr mr mw me dc lo ac dd hg sd ");
        let expected = Attributes {
            is_not_inherited: true,
            is_not_dumped: true,
            has_huge_pages: Some(true),
            lock: Some(Lock::Whole),
            ..Attributes::default()
        };
        assert_eq!(found, expected);
        assert_eq!(
            Attributes::parse("rd wr mr mw me ac sd"),
            Attributes::default()
        );
    }

    #[test]
    fn parts_keep_their_attributes() {
        let mut replaced = ReplacedAttributes::default();
        let special = Attributes {
            is_not_reserved: true,
            ..Attributes::default()
        };
        let page = |number: usize| number * PAGE;
        replaced.set(&(page(2)..page(4)), special);
        replaced.set(&(page(4)..page(8)), special);
        replaced.remove(&(page(5)..page(6)));
        let plain = Attributes::default();
        let expected = [
            (page(0)..page(2), plain),
            (page(2)..page(5), special),
            (page(5)..page(6), plain),
            (page(6)..page(8), special),
            (page(8)..page(9), plain),
        ];
        assert_eq!(replaced.split(&(page(0)..page(9))), expected);
        replaced.set(&(page(0)..page(9)), plain);
        assert_eq!(replaced.split(&(page(0)..page(9))).len(), 1);
    }
}
