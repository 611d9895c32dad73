//! Contents of an ELF file: its needs, its definitions, and how it is started.

use object::elf::{
    DT_NEEDED, DT_RPATH, DT_RUNPATH, DT_SONAME, ET_CORE, ET_REL, FileHeader64, SHN_UNDEF,
    SHT_DYNSYM, STB_WEAK,
};
use object::read::elf::{Dyn, FileHeader, ProgramHeader, SectionTable, Sym};
use object::{Endianness, ReadRef};

type ElfHeader = FileHeader64<Endianness>;

/// A dynamic symbol with its version, or the version required.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct VersionedSymbol {
    pub name: String,
    /// Empty if the symbol has no version.
    pub version: String,
}

/// The dynamic section and symbols of a file, as ld.so sees them.
#[derive(Debug, Default)]
pub struct ElfFile {
    /// `e_machine` of the header.
    pub machine: u16,
    /// ld.so starts it: a program, or a library that can be run.
    pub has_interpreter: bool,
    /// It has needed libraries or a soname; ld.so takes no part in other files.
    pub is_dynamic: bool,
    pub soname: Option<String>,
    pub needed: Vec<String>,
    /// DT_RPATH or DT_RUNPATH.
    pub search_path: Option<String>,
    pub defined: Vec<VersionedSymbol>,
    /// Undefined symbols, without weak ones, which may be missing.
    pub required: Vec<VersionedSymbol>,
}

/// Checks for the first bytes of an ELF file.
pub fn is_elf(data: &[u8]) -> bool {
    data.starts_with(b"\x7fELF")
}

impl ElfFile {
    /// Reads the header and the dynamic section. For a file of another machine only `machine` is
    /// filled in, because its layout may differ.
    pub fn parse(data: &[u8], own_machine: Option<u16>) -> Result<Self, String> {
        if !is_elf(data) {
            return Err("it is no ELF file".into());
        }
        let machine = machine_of(data).ok_or("its header is truncated")?;
        if own_machine.is_some_and(|own| own != machine) {
            return Ok(Self {
                machine,
                ..Self::default()
            });
        }
        parse_64(data).map_err(|error| format!("its ELF structure cannot be read: {error}"))
    }

    pub fn is_statically_linked(&self) -> bool {
        !self.has_interpreter && !self.is_dynamic
    }
}

/// Reads `e_machine`, which has the same offset in files of 32 and 64 bits; byte 5 of the
/// identification is the byte order.
fn machine_of(data: &[u8]) -> Option<u16> {
    let bytes = [*data.get(18)?, *data.get(19)?];
    Some(match data.get(5) {
        Some(2) => u16::from_be_bytes(bytes),
        _ => u16::from_le_bytes(bytes),
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn parse_64(data: &[u8]) -> Result<ElfFile, String> {
    let explain = |error: object::Error| error.to_string();
    let header = ElfHeader::parse(data).map_err(explain)?;
    let endian = header.endian().map_err(explain)?;
    if [ET_REL, ET_CORE].contains(&header.e_type(endian)) {
        return Err("it is an object file or a core dump, not a program or a library".into());
    }
    let mut file = ElfFile {
        machine: header.e_machine(endian),
        ..ElfFile::default()
    };
    for segment in header.program_headers(endian, data).map_err(explain)? {
        let interpreter = segment.interpreter(endian, data).map_err(explain)?;
        file.has_interpreter |= interpreter.is_some();
    }
    let sections = header.sections(endian, data).map_err(explain)?;
    read_dynamic_section(&mut file, &sections, endian, data).map_err(explain)?;
    read_symbols(&mut file, &sections, endian, data).map_err(explain)?;
    if sections.is_empty() && file.has_interpreter {
        return Err("its section headers were removed".into());
    }
    Ok(file)
}

fn read_dynamic_section<'data>(
    file: &mut ElfFile,
    sections: &SectionTable<'data, ElfHeader>,
    endian: Endianness,
    data: &'data [u8],
) -> object::Result<()> {
    let Some((entries, strings_at)) = sections.dynamic(endian, data)? else {
        return Ok(());
    };
    // A position-independent static program has a dynamic section, but needs nothing.
    let strings = sections.strings(endian, data, strings_at)?;
    for entry in entries {
        let Some(tag) = entry.tag32(endian) else {
            continue;
        };
        let value = || entry.string(endian, strings).map(text);
        match tag {
            DT_NEEDED => file.needed.push(value()?),
            DT_SONAME => file.soname = Some(value()?),
            DT_RPATH | DT_RUNPATH => file.search_path = Some(value()?),
            _ => {}
        }
    }
    file.is_dynamic = !file.needed.is_empty() || file.soname.is_some();
    Ok(())
}

fn read_symbols<'data, R: ReadRef<'data>>(
    file: &mut ElfFile,
    sections: &SectionTable<'data, ElfHeader, R>,
    endian: Endianness,
    data: R,
) -> object::Result<()> {
    let symbols = sections.symbols(endian, data, SHT_DYNSYM)?;
    let versions = sections.versions(endian, data)?;
    for (index, symbol) in symbols.enumerate() {
        let name = text(symbols.symbol_name(endian, symbol)?);
        if name.is_empty() {
            continue;
        }
        let version = match &versions {
            Some(table) => table.version(table.version_index(endian, index))?,
            None => None,
        };
        let version = version.map_or_else(String::new, |version| text(version.name()));
        let symbol_with_version = VersionedSymbol { name, version };
        if symbol.st_shndx(endian) != SHN_UNDEF {
            file.defined.push(symbol_with_version);
        } else if symbol.st_bind() != STB_WEAK {
            file.required.push(symbol_with_version);
        }
    }
    Ok(())
}
