//! The bpf(2) system call, as far as steering needs it: maps, a program, a link.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::instruction::Instruction;
use crate::{Error, Result};

const COMMAND_MAP_CREATE: libc::c_int = 0;
const COMMAND_MAP_UPDATE: libc::c_int = 2;
const COMMAND_MAP_DELETE: libc::c_int = 3;
const COMMAND_PROGRAM_LOAD: libc::c_int = 5;
const COMMAND_PROGRAM_TEST: libc::c_int = 10;
const COMMAND_LINK_CREATE: libc::c_int = 28;

const PROGRAM_TYPE_XDP: u32 = 6;
const ATTACH_TYPE_XDP: u32 = 37;
/// The program reads only the first buffer of a frame, so that a frame may have more.
const PROGRAM_HAS_FRAGMENTS: u32 = 1 << 5;

/// Bytes of the verifier's log that are kept.
const LOG_BYTES: usize = 64 << 10;
/// Lines of the log that an error shows.
const LOG_LINES: usize = 12;

/// Kinds of maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MapType {
    /// Keys and values of any form.
    Hash = 1,
    /// As `Hash`, but evicts the entries that were not used recently.
    RecentHash = 9,
    /// AF_XDP sockets by number.
    Sockets = 17,
}

/// The shape of a map.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MapShape {
    pub kind: MapType,
    pub key_bytes: usize,
    pub value_bytes: usize,
    pub entries: u32,
    pub name: &'static str,
}

#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map: u32,
    numa_node: u32,
    name: [u8; 16],
}

#[repr(C)]
struct MapElement {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct ProgramLoad {
    program_type: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    expected_attach_type: u32,
}

#[repr(C)]
struct ProgramTest {
    program: u32,
    result: u32,
    data_in_size: u32,
    data_out_size: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    interface: u32,
    attach_type: u32,
    flags: u32,
}

/// # Safety
/// Addresses in `attributes` are valid for the accesses of the command.
unsafe fn call_bpf<T>(command: libc::c_int, attributes: &mut T) -> io::Result<i32> {
    // SAFETY: the kernel reads and writes within the structure, and accesses the memory it points to
    // as the caller promises.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attributes),
            size_of::<T>(),
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result as i32)
    }
}

fn address_of<T: ?Sized>(value: &T) -> u64 {
    std::ptr::from_ref(value).cast::<u8>() as u64
}

fn short_name(name: &str) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (to, from) in bytes.iter_mut().zip(name.bytes().take(15)) {
        *to = from;
    }
    bytes
}

fn error_of(what: &'static str, source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => Error::Permission { what },
        _ => Error::Call {
            what: what.to_owned(),
            source,
        },
    }
}

/// Takes ownership of the descriptor that a command created.
fn own_descriptor(descriptor: i32) -> OwnedFd {
    // SAFETY: the kernel has just opened it for us.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

/// A map in the kernel; freed with its last descriptor and program.
#[derive(Debug)]
pub(crate) struct Map {
    descriptor: OwnedFd,
    key_bytes: usize,
    value_bytes: usize,
}

impl Map {
    pub(crate) fn create_map(shape: &MapShape) -> Result<Map> {
        let mut attributes = MapCreate {
            map_type: shape.kind as u32,
            key_size: shape.key_bytes as u32,
            value_size: shape.value_bytes as u32,
            max_entries: shape.entries,
            map_flags: 0,
            inner_map: 0,
            numa_node: 0,
            name: short_name(shape.name),
        };
        // SAFETY: the attributes hold no address.
        let descriptor = unsafe { call_bpf(COMMAND_MAP_CREATE, &mut attributes) }
            .map_err(|source| error_of("creating a BPF map", source))?;
        Ok(Map {
            descriptor: own_descriptor(descriptor),
            key_bytes: shape.key_bytes,
            value_bytes: shape.value_bytes,
        })
    }

    pub(crate) fn raw_fd(&self) -> i32 {
        self.descriptor.as_raw_fd()
    }

    /// Sets the value of a key.
    pub(crate) fn update_element(&self, key: &[u8], value: &[u8]) -> Result<()> {
        assert_eq!((key.len(), value.len()), (self.key_bytes, self.value_bytes));
        let mut attributes = self.element_attributes(key);
        attributes.value = address_of(value);
        // SAFETY: key and value have the lengths that the map was created with.
        unsafe { call_bpf(COMMAND_MAP_UPDATE, &mut attributes) }
            .map(|_| ())
            .map_err(|source| error_of("setting an entry of a BPF map", source))
    }

    /// Removes a key; a missing key is not an error.
    pub(crate) fn delete_element(&self, key: &[u8]) -> Result<()> {
        assert_eq!(key.len(), self.key_bytes);
        // SAFETY: the key has the length that the map was created with.
        match unsafe { call_bpf(COMMAND_MAP_DELETE, &mut self.element_attributes(key)) } {
            Err(source) if source.raw_os_error() != Some(libc::ENOENT) => {
                Err(error_of("removing an entry of a BPF map", source))
            }
            _ => Ok(()),
        }
    }

    fn element_attributes(&self, key: &[u8]) -> MapElement {
        MapElement {
            map: self.raw_fd() as u32,
            padding: 0,
            key: address_of(key),
            value: 0,
            flags: 0,
        }
    }
}

/// Loads an XDP program.
///
/// # Errors
/// [`Error::Program`] with the verifier's reason.
pub(crate) fn load_program(name: &str, instructions: &[Instruction]) -> Result<OwnedFd> {
    let license = c"Dual MIT/GPL";
    let mut log = vec![0u8; LOG_BYTES];
    let mut outcome = Err(io::Error::from_raw_os_error(libc::EINVAL));
    // Kernels before 5.18 do not know the flag, and have no frames of several buffers either.
    for flags in [PROGRAM_HAS_FRAGMENTS, 0] {
        let mut attributes = ProgramLoad {
            program_type: PROGRAM_TYPE_XDP,
            instruction_count: instructions.len() as u32,
            instructions: address_of(instructions),
            license: address_of(license.to_bytes_with_nul()),
            log_level: 1,
            log_size: LOG_BYTES as u32,
            log: log.as_mut_ptr() as u64,
            kernel_version: 0,
            flags,
            name: short_name(name),
            interface: 0,
            expected_attach_type: ATTACH_TYPE_XDP,
        };
        // SAFETY: instructions, license and log live through the call, and have the lengths given.
        outcome = unsafe { call_bpf(COMMAND_PROGRAM_LOAD, &mut attributes) };
        if outcome.is_ok() {
            break;
        }
    }
    outcome.map(own_descriptor).map_err(|source| {
        let text = String::from_utf8_lossy(&log);
        let lines: Vec<_> = text.trim_end_matches('\0').lines().collect();
        // An empty log means that the verifier did not run.
        if lines.is_empty() && matches!(source.raw_os_error(), Some(libc::EPERM | libc::EACCES)) {
            return error_of("loading the XDP program", source);
        }
        Error::Program {
            reason: source,
            log: lines[lines.len().saturating_sub(LOG_LINES)..].join("\n"),
        }
    })
}

/// Runs a program on a frame without sending it anywhere, and returns the program's result.
pub(crate) fn test_program(program: &OwnedFd, frame: &[u8]) -> Result<u32> {
    let mut attributes = ProgramTest {
        program: program.as_raw_fd() as u32,
        result: 0,
        data_in_size: frame.len() as u32,
        data_out_size: 0,
        data_in: address_of(frame),
        data_out: 0,
        repeat: 1,
        duration: 0,
    };
    // SAFETY: the frame lives through the call; nothing is written to an output whose length is 0.
    unsafe { call_bpf(COMMAND_PROGRAM_TEST, &mut attributes) }
        .map_err(|source| error_of("a test run of the XDP program", source))?;
    Ok(attributes.result)
}

/// Attaches a program to an interface until the returned descriptor is closed. `flags`: `XDP_FLAGS_*`
/// of linux/if_link.h.
pub(crate) fn attach_program(program: &OwnedFd, interface: u32, flags: u32) -> io::Result<OwnedFd> {
    let mut attributes = LinkCreate {
        program: program.as_raw_fd() as u32,
        interface,
        attach_type: ATTACH_TYPE_XDP,
        flags,
    };
    // SAFETY: the attributes hold no address.
    unsafe { call_bpf(COMMAND_LINK_CREATE, &mut attributes) }.map(own_descriptor)
}
