//! Mappings of this process, from PROCMAP_QUERY (proc_pid_maps(5), Linux 6.11), which finds one
//! mapping without reading all, or else from the text of /proc/self/maps. [`find_mapping`] and
//! [`for_each_mapping`] allocate no memory.

use std::fs::File;
use std::io;
use std::ops::{ControlFlow, Deref, Range};
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::mm::ProtFlags;

/// Device and inode of a mapped file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MappedFileId {
    major: u32,
    minor: u32,
    inode: u64,
}

impl MappedFileId {
    /// Device and inode as numbers, neither of which is 0 for a file in memory.
    pub fn to_numbers(self) -> (u64, u64) {
        (
            u64::from(self.major) << 32 | u64::from(self.minor),
            self.inode,
        )
    }

    /// Major and minor number of the device.
    pub fn device(self) -> (u32, u32) {
        (self.major, self.minor)
    }

    /// Inode on the device.
    pub fn inode(self) -> u64 {
        self.inode
    }

    /// Identity of an open file.
    pub fn of_file(fd: impl AsFd) -> io::Result<MappedFileId> {
        Ok(MappedFileId::from_status(&rustix::fs::fstat(fd)?))
    }

    /// Identity from the result of stat(2).
    pub fn from_status(status: &rustix::fs::Stat) -> MappedFileId {
        MappedFileId {
            major: rustix::fs::major(status.st_dev),
            minor: rustix::fs::minor(status.st_dev),
            inode: status.st_ino,
        }
    }
}

/// A mapping of this process, without its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    pub range: Range<usize>,
    pub readable: bool,
    pub writable: bool,
    pub executable: bool,
    pub shared: bool,
    /// File offset of the first byte.
    pub offset: u64,
    /// None for anonymous memory.
    pub file: Option<MappedFileId>,
    /// The name is that of memory of the program: heap, or without a special purpose.
    has_plain_name: bool,
}

impl Mapping {
    /// Checks for private memory without a file behind it: heap, static data without initial
    /// values, anonymous mappings; not the main thread's stack or mappings made by the kernel.
    pub fn is_private_anonymous(&self) -> bool {
        !self.shared && self.file.is_none() && self.has_plain_name
    }

    /// Its access.
    pub fn prot(&self) -> ProtFlags {
        let mut prot = ProtFlags::empty();
        prot.set(ProtFlags::READ, self.readable);
        prot.set(ProtFlags::WRITE, self.writable);
        prot.set(ProtFlags::EXEC, self.executable);
        prot
    }

    /// Intersection with a range of addresses.
    pub fn clip_to(&self, range: &Range<usize>) -> Range<usize> {
        self.range.start.max(range.start)..self.range.end.min(range.end)
    }

    /// File offset of an address in the mapping.
    pub fn offset_of(&self, address: usize) -> u64 {
        self.offset + (address - self.range.start) as u64
    }
}

/// A mapping of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Vma {
    mapping: Mapping,
    /// Path, or a name in brackets; empty for most anonymous memory.
    pub name: String,
}

impl Deref for Vma {
    type Target = Mapping;
    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}

fn is_plain_name(name: &[u8]) -> bool {
    name.is_empty() || name == b"[heap]" || name.starts_with(b"[anon")
}

/// The mappings that overlap a range, in order.
///
/// # Errors
/// /proc is not mounted.
pub(super) fn list_vmas(range: &Range<usize>) -> io::Result<Vec<Vma>> {
    let maps = File::open("/proc/self/maps")?;
    let mut found = Vec::new();
    let mut at = range.start;
    while at < range.end {
        match query_vma(&maps, at) {
            Ok(Some(vma)) if vma.range.start < range.end => {
                at = vma.range.end;
                found.push(vma);
            }
            Ok(_) => return Ok(found),
            Err(_) => return parse_maps(&std::fs::read_to_string("/proc/self/maps")?, range),
        }
    }
    Ok(found)
}

/// The mappings in the text of /proc/self/maps that overlap a range.
fn parse_maps(text: &str, range: &Range<usize>) -> io::Result<Vec<Vma>> {
    let mut found = Vec::new();
    for line in text.lines() {
        let (mapping, name) = parse_line(line).ok_or(Errno::INVAL)?;
        if mapping.range.end > range.start && mapping.range.start < range.end {
            let name = name.to_owned();
            found.push(Vma { mapping, name });
        }
    }
    Ok(found)
}

pub(super) fn parse_line(line: &str) -> Option<(Mapping, &str)> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let bits = fields.next()?.as_bytes();
    let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let inode = fields.next()?.parse().ok()?;
    let id = MappedFileId {
        major: u32::from_str_radix(major, 16).ok()?,
        minor: u32::from_str_radix(minor, 16).ok()?,
        inode,
    };
    let name = fields.next().unwrap_or("").trim_start();
    let mapping = Mapping {
        range: usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?,
        readable: *bits.first()? == b'r',
        writable: *bits.get(1)? == b'w',
        executable: *bits.get(2)? == b'x',
        shared: *bits.get(3)? == b's',
        offset,
        file: (inode != 0).then_some(id),
        has_plain_name: is_plain_name(name.as_bytes()),
    };
    Some((mapping, name))
}

/// Returns the mapping at an address, or the next one. `maps` is /proc/self/maps.
pub(super) fn find_mapping(maps: &File, address: usize) -> Result<Option<Mapping>, Errno> {
    let mut name = [0; NAME_LEN];
    match query_mapping(maps, address, &mut name) {
        Ok(found) => Ok(found.map(|(mapping, _)| mapping)),
        Err(_) => find_in_text(maps, address),
    }
}

/// Calls a function for each mapping; it may change the mapping that it is called for. `maps` is
/// /proc/self/maps, opened by this process.
pub(super) fn for_each_mapping(maps: &File, mut call: impl FnMut(&Mapping)) -> Result<(), Errno> {
    let mut at = 0;
    loop {
        let mut name = [0; NAME_LEN];
        match query_mapping(maps, at, &mut name) {
            Ok(Some((mapping, _))) => {
                call(&mapping);
                at = mapping.range.end;
            }
            Ok(None) => return Ok(()),
            Err(_) => break,
        }
    }
    let call = |mapping: Mapping| {
        if mapping.range.start >= at {
            call(&mapping);
        }
        ControlFlow::<()>::Continue(())
    };
    scan_text(maps, call).map(|_| ())
}

/// [`find_mapping`] in the text of /proc/self/maps.
fn find_in_text(maps: impl AsFd, address: usize) -> Result<Option<Mapping>, Errno> {
    let found = scan_text(maps, |mapping| match mapping.range.end > address {
        true => ControlFlow::Break(mapping),
        false => ControlFlow::Continue(()),
    })?;
    Ok(found.break_value())
}

/// Calls a function for each mapping in the text of /proc/self/maps until it breaks. Allocates no
/// memory.
fn scan_text<B>(
    maps: impl AsFd,
    mut call: impl FnMut(Mapping) -> ControlFlow<B>,
) -> Result<ControlFlow<B>, Errno> {
    // A line has a path, and at most 100 characters before it.
    let mut buffer = [0u8; NAME_LEN + 4096];
    let (mut filled, mut position) = (0, 0);
    loop {
        let count = match rustix::io::pread(&maps, &mut buffer[filled..], position) {
            Ok(0) => return Ok(ControlFlow::Continue(())),
            Ok(count) => count,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error),
        };
        (filled, position) = (filled + count, position + count as u64);
        let mut start = 0;
        while let Some(len) = buffer[start..filled].iter().position(|byte| *byte == b'\n') {
            // Only names have other characters.
            let line = &buffer[start..start + len];
            let text = match std::str::from_utf8(line) {
                Ok(text) => text,
                Err(error) => std::str::from_utf8(&line[..error.valid_up_to()]).unwrap_or(""),
            };
            let (mapping, _) = parse_line(text).ok_or(Errno::INVAL)?;
            if let ControlFlow::Break(value) = call(mapping) {
                return Ok(ControlFlow::Break(value));
            }
            start += len + 1;
        }
        if start == 0 && filled == buffer.len() {
            return Err(Errno::NAMETOOLONG);
        }
        buffer.copy_within(start..filled, 0);
        filled -= start;
    }
}

/// `struct procmap_query` of linux/fs.h.
#[repr(C)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const EXECUTABLE: u64 = 4;
const SHARED: u64 = 8;
const COVERING_OR_NEXT: u64 = 0x10;
/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: rustix::ioctl::Opcode =
    rustix::ioctl::opcode::read_write::<ProcmapQuery>(b'f', 17);
/// Maximum length of the name that the kernel returns (PATH_MAX).
const NAME_LEN: usize = 4096;

/// Returns the mapping at an address, or the next one, and the length of its name.
fn query_mapping(
    maps: impl AsFd,
    address: usize,
    name: &mut [u8; NAME_LEN],
) -> Result<Option<(Mapping, usize)>, Errno> {
    // SAFETY: an all-zero query is valid.
    let mut query: ProcmapQuery = unsafe { std::mem::zeroed() };
    query.size = size_of::<ProcmapQuery>() as u64;
    query.query_flags = COVERING_OR_NEXT;
    query.query_addr = address as u64;
    query.vma_name_size = NAME_LEN as u32;
    query.vma_name_addr = name.as_mut_ptr() as u64;
    // SAFETY: the structure matches this request, and its only pointer is to a buffer of the length
    // given in it.
    let asked = unsafe {
        let request = rustix::ioctl::Updater::<PROCMAP_QUERY, ProcmapQuery>::new(&mut query);
        rustix::ioctl::ioctl(maps, request)
    };
    match asked {
        Ok(()) => {}
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error),
    }
    let has = |bit| query.vma_flags & bit != 0;
    let name_len = (query.vma_name_size as usize)
        .saturating_sub(1)
        .min(NAME_LEN);
    let id = MappedFileId {
        major: query.dev_major,
        minor: query.dev_minor,
        inode: query.inode,
    };
    let mapping = Mapping {
        range: query.vma_start as usize..query.vma_end as usize,
        readable: has(READABLE),
        writable: has(WRITABLE),
        executable: has(EXECUTABLE),
        shared: has(SHARED),
        offset: query.vma_offset,
        file: (query.inode != 0).then_some(id),
        has_plain_name: is_plain_name(&name[..name_len]),
    };
    Ok(Some((mapping, name_len)))
}

/// [`query_mapping`] with the name.
fn query_vma(maps: &File, address: usize) -> Result<Option<Vma>, Errno> {
    let mut name = [0; NAME_LEN];
    let found = query_mapping(maps, address, &mut name)?;
    Ok(found.map(|(mapping, len)| Vma {
        mapping,
        name: String::from_utf8_lossy(&name[..len]).into_owned(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_to_ask_give_the_same() {
        let local = 1u8;
        let boxed = vec![1u8; 300_000];
        for address in [
            &raw const local as usize,
            boxed.as_ptr() as usize,
            list_vmas as *const () as usize,
        ] {
            let range = address..address + 1;
            let text = std::fs::read_to_string("/proc/self/maps").expect("/proc");
            let parsed = parse_maps(&text, &range).expect("the format of proc_pid_maps(5)");
            assert_eq!(parsed.len(), 1, "{address:x}");
            assert_eq!(list_vmas(&range).expect("/proc"), parsed);
            let maps = File::open("/proc/self/maps").expect("/proc");
            let found = find_in_text(&maps, address).expect("the format of proc_pid_maps(5)");
            assert_eq!(found.as_ref(), Some(&*parsed[0]));
            assert_eq!(find_mapping(&maps, address), Ok(found));
            let mut all = Vec::new();
            for_each_mapping(&maps, |mapping| all.push(mapping.clone())).expect("/proc");
            assert!(all.contains(&parsed[0]));
        }
    }

    #[test]
    fn heap_is_plain_and_the_stack_is_not() {
        let text = "55d0c8a00000-55d0c8a21000 rw-p 00000000 00:00 0                          [heap]\n\
                    7ffd1c0de000-7ffd1c0ff000 rw-p 00000000 00:00 0                          [stack]\n\
                    7f0000000000-7f0000200000 rw-s 00001000 00:01 1234                       /memfd:a b (deleted)\n";
        let all = parse_maps(text, &(0..usize::MAX)).expect("parses");
        assert!(all[0].is_private_anonymous() && !all[1].is_private_anonymous());
        assert!(all[2].shared && all[2].offset_of(0x7f0000001000) == 0x2000);
        assert_eq!(all[2].name, "/memfd:a b (deleted)");
        let one = parse_maps(text, &(0x7f00001fffff..0x7f00001fffff + 1)).expect("parses");
        assert_eq!(one, all[2..]);
    }
}
