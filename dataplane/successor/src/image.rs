//! Programs and dynamic linkers as ELF files: their segments, and how they are mapped (elf(5)).

use std::ffi::{CStr, OsStr, OsString};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;

use object::Endianness;
use object::elf;
use object::read::elf::{FileHeader, ProgramHeader};
use object::read::{ReadCache, ReadRef};

use crate::PAGE;
use crate::maps;

/// Reasons why a file cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It is something else.
    #[error("it is no program for 64-bit x86 ({0})")]
    NoProgram(String),
    /// It is linked to fixed addresses, which this process may use.
    #[error("it is not position-independent (build it as PIE)")]
    FixedAddress,
    /// Its dynamic linker cannot be opened.
    #[error("its dynamic linker {path}: {error}")]
    Linker { path: String, error: io::Error },
}

/// A segment that is loaded.
#[derive(Debug)]
struct Segment {
    /// Its place, relative to the base.
    address: usize,
    /// Place in the file.
    offset: u64,
    file_len: usize,
    memory_len: usize,
    protection: i32,
}

/// What is loaded of a file.
#[derive(Debug)]
pub(crate) struct Image {
    segments: Vec<Segment>,
    entry: usize,
    /// Place of the program headers in memory, relative to the base, and their number.
    pub headers: usize,
    pub header_count: usize,
    /// Path of its dynamic linker, if it needs one.
    pub linker: Option<OsString>,
}

/// Longest path of a dynamic linker.
const LONGEST_PATH: u64 = 4096;

/// Highest address of an image relative to its base. Larger ones are damaged.
const LARGEST_IMAGE: usize = 1 << 32;

impl Image {
    /// Reads the headers of a file.
    pub fn read(file: &File) -> Result<Image, ProgramError> {
        let wrong = |error: object::Error| ProgramError::NoProgram(error.to_string());
        let damaged = |what: &str| ProgramError::NoProgram(what.to_owned());
        let cache = ReadCache::new(file);
        let header = elf::FileHeader64::<Endianness>::parse(&cache).map_err(wrong)?;
        let endian = header.endian().map_err(wrong)?;
        if endian != Endianness::Little || header.e_machine(endian) != elf::EM_X86_64 {
            return Err(damaged("it is for another machine"));
        }
        match header.e_type(endian) {
            elf::ET_DYN => {}
            elf::ET_EXEC => return Err(ProgramError::FixedAddress),
            _ => return Err(damaged("it is neither a program nor a library")),
        }
        let mut image = Image {
            segments: Vec::new(),
            entry: header.e_entry(endian) as usize,
            headers: header.e_phoff(endian) as usize,
            header_count: header.e_phnum(endian).into(),
            linker: None,
        };
        for segment in header.program_headers(endian, &cache).map_err(wrong)? {
            let (offset, file_len) = segment.file_range(endian);
            match segment.p_type(endian) {
                elf::PT_LOAD => image.segments.push(Segment {
                    address: segment.p_vaddr(endian) as usize,
                    offset,
                    file_len: file_len as usize,
                    memory_len: segment.p_memsz(endian) as usize,
                    protection: protection_of(segment.p_flags(endian)),
                }),
                elf::PT_PHDR => image.headers = segment.p_vaddr(endian) as usize,
                elf::PT_INTERP => {
                    let bytes = (&cache)
                        .read_bytes_at(offset, file_len.min(LONGEST_PATH))
                        .map_err(|()| damaged("the path of its dynamic linker is missing"))?;
                    let path = CStr::from_bytes_until_nul(bytes)
                        .map_err(|_| damaged("the path of its dynamic linker has no end"))?;
                    image.linker = Some(OsStr::from_bytes(path.to_bytes()).to_owned());
                }
                _ => {}
            }
        }
        let is_damaged = |segment: &Segment| {
            segment.file_len > segment.memory_len
                || segment.address as u64 % PAGE as u64 != segment.offset % PAGE as u64
                || (segment.address.checked_add(segment.memory_len))
                    .is_none_or(|end| end > LARGEST_IMAGE)
        };
        if image.segments.is_empty() || image.segments.iter().any(is_damaged) {
            return Err(damaged("its segments are damaged"));
        }
        Ok(image)
    }

    /// Addresses that it needs, with room to align its base.
    pub fn len(&self) -> usize {
        self.end() + PAGE
    }

    /// The first address behind its last segment, relative to the base, as whole pages.
    fn end(&self) -> usize {
        let ends = self
            .segments
            .iter()
            .map(|part| part.address + part.memory_len);
        ends.max().unwrap_or(0).next_multiple_of(PAGE)
    }

    /// The base of an image whose addresses start here.
    pub fn place(&self, start: usize) -> usize {
        start.next_multiple_of(PAGE)
    }

    /// Its first instruction.
    pub fn entry_at(&self, base: usize) -> usize {
        base + self.entry
    }

    /// The addresses of its code, and of its data.
    pub fn code_and_data(&self, base: usize) -> [Range<usize>; 2] {
        let range_of = |flag: i32| {
            let parts = || {
                self.segments
                    .iter()
                    .filter(|part| part.protection & flag != 0)
            };
            let start = parts().map(|part| part.address).min().unwrap_or(0);
            let end = parts().map(|part| part.address + part.memory_len).max();
            base + start..base + end.unwrap_or(start)
        };
        [range_of(libc::PROT_EXEC), range_of(libc::PROT_WRITE)]
    }

    /// Maps the segments. The addresses have to be reserved by the caller.
    pub fn map(&self, file: BorrowedFd<'_>, base: usize) -> io::Result<()> {
        for segment in &self.segments {
            let start = base + segment.address;
            let file_end = start + segment.file_len;
            let whole = start / PAGE * PAGE..(start + segment.memory_len).next_multiple_of(PAGE);
            let from_file = whole.start..file_end.next_multiple_of(PAGE);
            let offset = segment.offset / PAGE as u64 * PAGE as u64;
            if segment.file_len > 0 {
                maps::map_file(&from_file, segment.protection, file, offset)?;
            }
            if segment.memory_len > segment.file_len {
                maps::zero(&(file_end..from_file.end.min(whole.end)));
                let rest = from_file.end.min(whole.end)..whole.end;
                maps::map_zeroes(&rest, segment.protection)?;
            }
        }
        Ok(())
    }
}

fn protection_of(flags: u32) -> i32 {
    let bit = |flag, protection| if flags & flag != 0 { protection } else { 0 };
    bit(elf::PF_R, libc::PROT_READ)
        | bit(elf::PF_W, libc::PROT_WRITE)
        | bit(elf::PF_X, libc::PROT_EXEC)
}
