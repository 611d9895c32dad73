//! Mappings of this process.

use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{null_mut, write_bytes};

/// Addresses that nothing else uses, with what is mapped there; this process gives them back when the
/// object is dropped.
#[derive(Debug)]
pub(crate) struct Reserved {
    start: usize,
    len: usize,
}

impl Reserved {
    /// Reserves `len` bytes of addresses, without access.
    pub fn new(len: usize) -> io::Result<Reserved> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { libc::mmap(null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = start as usize;
        Ok(Reserved { start, len })
    }

    /// The addresses.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the addresses belong to this object, and nothing refers to them any more.
        unsafe { libc::munmap(self.start as *mut c_void, self.len) };
    }
}

/// Maps a part of a file at reserved addresses, as a private copy.
pub(crate) fn map_file(
    range: &Range<usize>,
    protection: i32,
    file: BorrowedFd<'_>,
    offset: u64,
) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
    map(range, protection, flags, file.as_raw_fd(), offset)
}

/// Maps memory of zeroes at reserved addresses.
pub(crate) fn map_zeroes(range: &Range<usize>, protection: i32) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_ANONYMOUS;
    match range.is_empty() {
        true => Ok(()),
        false => map(range, protection, flags, -1, 0),
    }
}

/// Maps memory to read and write at reserved addresses.
pub(crate) fn make_writable(range: &Range<usize>) -> io::Result<()> {
    map_zeroes(range, libc::PROT_READ | libc::PROT_WRITE)
}

fn map(
    range: &Range<usize>,
    protection: i32,
    flags: i32,
    file: i32,
    offset: u64,
) -> io::Result<()> {
    let (start, len) = (range.start as *mut c_void, range.len());
    // SAFETY: the callers give addresses of a `Reserved`, which nothing else uses.
    let mapped = unsafe { libc::mmap(start, len, protection, flags, file, offset as i64) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Clears bytes of a reserved range that is mapped for writing.
pub(crate) fn zero(range: &Range<usize>) {
    // SAFETY: the callers give addresses of a `Reserved`, which they have mapped.
    unsafe { write_bytes(range.start as *mut u8, 0, range.len()) };
}

/// Copies bytes to a reserved range that is mapped for writing.
pub(crate) fn write(address: usize, bytes: &[u8]) {
    // SAFETY: the callers give addresses of a `Reserved`, which they have mapped.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
}

/// Mappings of the kernel, which every program finds by AT_SYSINFO_EHDR.
const OF_KERNEL: [&str; 4] = ["[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]"];

/// The mapped ranges of this process that are not among the kept ones, in the order of their addresses.
pub(crate) fn list_others(kept: &[Range<usize>]) -> io::Result<Vec<Range<usize>>> {
    let text = std::fs::read_to_string("/proc/self/maps")?;
    let mut mapped: Vec<Range<usize>> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let range = words.next().and_then(parse_range);
        let range = range.ok_or_else(|| io::Error::other(format!("unknown line: {line}")))?;
        if words.nth(4).is_some_and(|name| OF_KERNEL.contains(&name)) {
            continue;
        }
        match mapped.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => mapped.push(range),
        }
    }
    Ok(subtract(mapped, kept))
}

fn parse_range(text: &str) -> Option<Range<usize>> {
    let (start, end) = text.split_once('-')?;
    let parse = |text| usize::from_str_radix(text, 16).ok();
    Some(parse(start)?..parse(end)?)
}

/// The parts of ascending ranges that are in none of `kept`.
fn subtract(mapped: Vec<Range<usize>>, kept: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut kept = kept.to_vec();
    kept.sort_unstable_by_key(|range| range.start);
    let mut others = Vec::new();
    let mut next = 0;
    for range in mapped {
        let mut start = range.start;
        while next < kept.len() && kept[next].end <= start {
            next += 1;
        }
        let mut index = next;
        while index < kept.len() && kept[index].start < range.end {
            if kept[index].start > start {
                others.push(start..kept[index].start);
            }
            start = start.max(kept[index].end);
            index += 1;
        }
        if start < range.end {
            others.push(start..range.end);
        }
    }
    others
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_ranges_are_left_out() {
        let ranges = |text: &str| -> Vec<Range<usize>> {
            text.split_whitespace().filter_map(parse_range).collect()
        };
        let cases = [
            ("", "10-20 30-40"),
            ("0-100", ""),
            ("12-14 16-18", "10-12 14-16 18-20 30-40"),
            ("5-12 18-32", "12-18 32-40"),
            ("10-20", "30-40"),
            ("35-50 0-11", "11-20 30-35"),
            ("11-15 14-16", "10-11 16-20 30-40"),
        ];
        for (kept, expected) in cases {
            let others = subtract(ranges("10-20 30-40"), &ranges(kept));
            assert_eq!(others, ranges(expected), "{kept}");
        }
    }

    #[test]
    fn the_mappings_of_this_process_are_found() {
        let local = 0u8;
        let address = &raw const local as usize;
        let code = kept_ranges_are_left_out as fn() as usize;
        let all = list_others(&[]).unwrap();
        for inside in [address, code] {
            assert!(
                all.iter().any(|range| range.contains(&inside)),
                "{inside:#x}"
            );
        }
    }
}
