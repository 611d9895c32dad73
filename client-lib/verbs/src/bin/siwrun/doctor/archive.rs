//! ELF files in a zip archive, such as a wheel.

use super::elf_file::is_elf;
use std::ffi::OsStr;
use std::io::{self, Cursor, Read};
use std::path::Path;
use zip::ZipArchive;

/// Maximum length of a library. The lengths stated in an archive are not trusted.
const LONGEST_FILE: u64 = 4 << 30;

/// Checks for the first bytes of a zip archive.
pub fn is_archive(data: &[u8]) -> bool {
    data.starts_with(b"PK\x03\x04")
}

/// Checks for the name of a wheel.
pub fn is_wheel(path: &Path) -> bool {
    path.extension() == Some(OsStr::new("whl"))
}

/// Reads an ELF file; None for other files.
fn read_elf(mut content: impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut data = Vec::new();
    content.by_ref().take(4).read_to_end(&mut data)?;
    if !is_elf(&data) {
        return Ok(None);
    }
    // One byte more than the limit, to detect longer files.
    let room = LONGEST_FILE - data.len() as u64 + 1;
    content.take(room).read_to_end(&mut data)?;
    if data.len() as u64 > LONGEST_FILE {
        return Err(io::Error::other(format!(
            "it is longer than {LONGEST_FILE} bytes"
        )));
    }
    Ok(Some(data))
}

/// Calls `with` for each ELF file of an archive, in directory order, with the archive's path and
/// the path within. No file is unpacked to disk.
pub fn for_each_elf_file(
    archive: &Path,
    data: &[u8],
    mut with: impl FnMut(&Path, &[u8]) -> Result<(), String>,
) -> Result<(), String> {
    let explain =
        |what: &Path, why: &dyn std::fmt::Display| format!("cannot read {}: {why}", what.display());
    let mut entries =
        ZipArchive::new(Cursor::new(data)).map_err(|error| explain(archive, &error))?;
    for index in 0..entries.len() {
        let entry = entries
            .by_index(index)
            .map_err(|error| explain(archive, &error))?;
        if !entry.is_file() {
            continue;
        }
        // Only displayed, never opened: a name outside the archive does no harm.
        let name = entry.name().map_err(|error| explain(archive, &error))?;
        let path = archive.join(&*name);
        drop(name);
        if let Some(data) = read_elf(entry).map_err(|error| explain(&path, &error))? {
            with(&path, &data)?;
        }
    }
    Ok(())
}
