//! The daemon's objects as data, for a live upgrade: a successor process continues with the mappings and
//! descriptors of its predecessor, which it has at the same addresses and with the same numbers
//! (`siw-successor`), and with state that serde writes in the predecessor and reads in the successor.
//!
//! Mappings and descriptors are not data. The state refers to them by number, and [`KeptResources`] lists
//! them: the predecessor passes the lists of this list to the start of the successor, which adopts it before
//! it reads any state. Many objects share a mapping, a descriptor or another object through an [`Arc`]. The
//! first one that is saved carries the content, the others its number, and all have the same `Arc` again
//! when they are restored.
//!
//! serde passes no context to the types that it saves and restores. Fields that need one are marked with
//! `#[serde(with = "siw_shm::saved")]` and find it in the scope that the thread is in:
//!
//! ```
//! use siw_shm::saved::{Restoring, Saving};
//! # use serde::{Deserialize, Serialize};
//! # use siw_shm::SharedMemory;
//! # use std::sync::Arc;
//!
//! #[derive(Serialize, Deserialize)]
//! struct Queue {
//!     #[serde(with = "siw_shm::saved")]
//!     memory: Arc<SharedMemory>,
//!     offset: usize,
//! }
//!
//! // Predecessor
//! # let memory = Arc::new(SharedMemory::new_anonymous(4096)?);
//! # let queues = [0, 64].map(|offset| Queue { memory: memory.clone(), offset });
//! let mut saving = Saving::default();
//! let state = saving.run(|| postcard::to_stdvec(&queues))?;
//! let kept = saving.into_kept();
//!
//! // Successor
//! # std::mem::forget((memory, queues));
//! // SAFETY: the process has them from its predecessor, and no other owner of them.
//! let mut restoring = unsafe { Restoring::adopt(&kept) }?;
//! let queues: [Queue; 2] = restoring.run(|| postcard::from_bytes(&state))?;
//! assert!(Arc::ptr_eq(&queues[0].memory, &queues[1].memory));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! State of several threads is saved in one [`Saving`], part by part. Outside of a scope, saving and
//! restoring fail with an error.
//!
//! The state itself is trusted, since only the predecessor has written it. Indices that lead into memory are
//! checked all the same, and words that clients can write are read again as on every other access.

use crate::shared_memory::{PAGE, SharedMemory};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};
use std::any::Any;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};

/// Version of the serialised form of the types of siw-shm, siw-memory and siw-iwarp. A successor restores
/// only the version that it writes itself. Raise it with every change of these types that a test of the form
/// notices (`saved_form` in each crate).
pub const FORMAT: u32 = 1;

/// Maximum depth of objects shared through an `Arc` inside of others. Rings of a shared receive queue are the
/// deepest: one in the other, 32 at most.
const MAX_DEPTH: u32 = 64;

/// A mapping, and what its owner knows of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedMapping {
    /// First address.
    pub(crate) address: usize,
    /// Length in bytes, whole pages.
    pub(crate) len: usize,
    /// Number of the descriptor of its file.
    pub(crate) descriptor: Option<RawFd>,
    /// Hugetlb pages back it.
    pub(crate) huge: bool,
    pub(crate) writable: bool,
    /// Owner that its faults are charged to, if it is guarded.
    pub(crate) guard_owner: Option<u64>,
    /// See [`SharedMemory::io_address`].
    pub(crate) io_address: u64,
    /// See [`SharedMemory::own_pages`].
    pub(crate) owns_pages: bool,
}

/// The mappings and descriptors that the saved state refers to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptResources {
    mappings: Vec<SavedMapping>,
    /// Descriptors that belong to no mapping.
    descriptors: BTreeSet<RawFd>,
}

impl KeptResources {
    /// Address ranges of the mappings, in no order.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        let mappings = self.mappings.iter();
        mappings
            .map(|mapping| mapping.address..mapping.address.saturating_add(mapping.len))
            .collect()
    }

    /// Numbers of all descriptors, those of mappings included, in no order.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let of_mappings = self.mappings.iter();
        let of_mappings = of_mappings.filter_map(|mapping| mapping.descriptor);
        of_mappings
            .chain(self.descriptors.iter().copied())
            .collect()
    }

    /// Checks that the mappings exist and do not overlap, and that the descriptors are open and have one
    /// owner each.
    fn check(&self) -> Result<(), AdoptError> {
        let mut ranges = Vec::with_capacity(self.mappings.len());
        for mapping in &self.mappings {
            let (start, len) = (mapping.address, mapping.len);
            let refused = AdoptError::Mapping { start, len };
            let end = start.checked_add(len).ok_or(refused)?;
            let is_whole = start.is_multiple_of(PAGE) && len.is_multiple_of(PAGE) && len > 0;
            // Changes nothing (msync(2)); fails if a page of the range is not mapped.
            // SAFETY: the kernel checks the range.
            if !is_whole || unsafe { libc::msync(start as *mut _, len, libc::MS_ASYNC) } != 0 {
                let (start, len) = (mapping.address, mapping.len);
                return Err(AdoptError::Mapping { start, len });
            }
            ranges.push(start..end);
        }
        ranges.sort_unstable_by_key(|range| range.start);
        for pair in ranges.windows(2) {
            if pair[0].end > pair[1].start {
                let (start, len) = (pair[1].start, pair[1].len());
                return Err(AdoptError::Mapping { start, len });
            }
        }
        let mut seen = BTreeSet::new();
        for number in self.descriptors() {
            // SAFETY: only asks for the flags of the number.
            let is_open = number >= 0 && unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
            if !is_open || !seen.insert(number) {
                return Err(AdoptError::Descriptor(number));
            }
        }
        Ok(())
    }
}

/// Reason why kept resources cannot be adopted.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The process does not have this mapping, or two of them overlap.
    #[error("the saved state names a mapping of {len} bytes at {start:#x}, which does not exist")]
    Mapping {
        /// First address.
        start: usize,
        /// Length in bytes.
        len: usize,
    },
    /// The descriptor is closed, or has two owners.
    #[error("the saved state names descriptor {0}, which is closed or has two owners")]
    Descriptor(RawFd),
    /// The guard against faults has no room, or pages cannot be locked.
    #[error("cannot guard an adopted mapping: {0}")]
    Guard(#[from] io::Error),
}

/// Collects the mappings and descriptors that saved state refers to, and numbers shared objects.
#[derive(Default)]
pub struct Saving {
    kept: KeptResources,
    /// Shared objects by address, with their numbers.
    numbers: HashMap<usize, u32>,
    /// The same objects: none is freed, so no other one gets its address.
    shared: Vec<Arc<dyn Any + Send + Sync>>,
}

impl Saving {
    /// Calls `serialize` in a scope in which the types of this module can be saved.
    pub fn run<R>(&mut self, serialize: impl FnOnce() -> R) -> R {
        let scope = Scope::enter(Context::Saving(std::mem::take(self)));
        let result = serialize();
        if let Some(Context::Saving(saving)) = scope.leave() {
            *self = saving;
        }
        result
    }

    /// The mappings and descriptors that the state refers to.
    pub fn into_kept(self) -> KeptResources {
        self.kept
    }

    /// Number of a shared object, and whether it has no number before.
    fn number_of(&mut self, object: Arc<dyn Any + Send + Sync>) -> (u32, bool) {
        let next = self.shared.len() as u32;
        let address = Arc::as_ptr(&object).cast::<()>().addr();
        match self.numbers.get(&address) {
            Some(number) => (*number, false),
            None => {
                self.numbers.insert(address, next);
                self.shared.push(object);
                (next, true)
            }
        }
    }
}

/// Owns the adopted mappings and descriptors until restored objects take them. What no object takes is
/// unmapped or closed with it.
#[derive(Default)]
pub struct Restoring {
    mappings: Vec<Option<SharedMemory>>,
    descriptors: BTreeMap<RawFd, OwnedFd>,
    shared: HashMap<u32, Arc<dyn Any + Send + Sync>>,
    /// Shared objects that are being restored, one in the other.
    depth: u32,
}

impl Restoring {
    /// Takes over the mappings and descriptors of a predecessor. Those of guarded mappings are guarded
    /// again, so [`crate::fault_guard::install`] comes first, and [`crate::shared_memory::lock_owned_pages`],
    /// too: memory locks do not pass to a child (fork(2)).
    ///
    /// # Errors
    /// A mapping does not exist, a descriptor is closed, or something has two owners. Nothing is
    /// taken over then, unless a guard failed.
    ///
    /// # Safety
    ///
    /// The mappings and descriptors belong to the caller and have no other owner in this process: they
    /// are those of a predecessor, kept by `siw-successor`. The lengths, files and access rights are as the
    /// predecessor's [`Saving`] found them.
    pub unsafe fn adopt(kept: &KeptResources) -> Result<Restoring, AdoptError> {
        kept.check()?;
        let descriptors = kept.descriptors.iter();
        let mut restoring = Restoring {
            descriptors: descriptors
                // SAFETY: open, and the caller's, who has no other owner of it.
                .map(|number| (*number, unsafe { OwnedFd::from_raw_fd(*number) }))
                .collect(),
            ..Restoring::default()
        };
        for mapping in &kept.mappings {
            // SAFETY: as the caller promises.
            let memory = unsafe { SharedMemory::adopt(mapping) }?;
            restoring.mappings.push(Some(memory));
        }
        Ok(restoring)
    }

    /// Calls `deserialize` in a scope in which the types of this module can be restored.
    pub fn run<R>(&mut self, deserialize: impl FnOnce() -> R) -> R {
        let scope = Scope::enter(Context::Restoring(std::mem::take(self)));
        let result = deserialize();
        if let Some(Context::Restoring(restoring)) = scope.leave() {
            *self = restoring;
            self.depth = 0;
        }
        result
    }
}

enum Context {
    Saving(Saving),
    Restoring(Restoring),
}

thread_local! {
    /// Context of the scope that the thread is in.
    static CONTEXT: RefCell<Option<Context>> = const { RefCell::new(None) };
}

/// A scope of [`Saving::run`] or [`Restoring::run`]; has the context of the enclosing scope.
struct Scope(Option<Context>);

impl Scope {
    fn enter(context: Context) -> Scope {
        Scope(CONTEXT.replace(Some(context)))
    }

    /// Ends the scope; returns its context.
    fn leave(self) -> Option<Context> {
        CONTEXT.take()
    }
}

/// Also after a panic.
impl Drop for Scope {
    fn drop(&mut self) {
        CONTEXT.set(self.0.take());
    }
}

fn with_saving<R, E: ser::Error>(look: impl FnOnce(&mut Saving) -> R) -> Result<R, E> {
    CONTEXT.with_borrow_mut(|context| match context {
        Some(Context::Saving(saving)) => Ok(look(saving)),
        _ => Err(E::custom(
            "shared memory is saved in a scope of Saving::run",
        )),
    })
}

fn with_restoring<R, E: de::Error>(look: impl FnOnce(&mut Restoring) -> Option<R>) -> Result<R, E> {
    CONTEXT.with_borrow_mut(|context| match context {
        Some(Context::Restoring(restoring)) => {
            look(restoring).ok_or_else(|| E::custom("not kept, or restored before"))
        }
        _ => Err(E::custom(
            "shared memory is restored in a scope of Restoring::run",
        )),
    })
}

/// A value that refers to mappings, descriptors or shared objects. Of fields with such values,
/// `#[serde(with = "siw_shm::saved")]` calls these functions.
pub trait Kept: Sized {
    /// Serialises it, in a scope of [`Saving::run`].
    fn save<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error>;

    /// Deserialises it, in a scope of [`Restoring::run`].
    fn restore<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error>;
}

/// [`Kept::save`], for `#[serde(with = "siw_shm::saved")]`.
pub fn serialize<T: Kept, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    value.save(serializer)
}

/// [`Kept::restore`], for `#[serde(with = "siw_shm::saved")]`.
pub fn deserialize<'de, T: Kept, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    T::restore(deserializer)
}

/// Makes types with serde's traits [`Kept`], so that they can be shared through an `Arc`.
#[macro_export]
macro_rules! keep_by_serde {
    ($($kept:ty),+) => {$(
        impl $crate::saved::Kept for $kept {
            fn save<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serde::Serialize::serialize(self, serializer)
            }

            fn restore<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                serde::Deserialize::deserialize(deserializer)
            }
        }
    )+};
}

/// A [`Kept`] value inside of another one, when saved.
struct SavedPart<'a, T>(&'a T);

impl<T: Kept> Serialize for SavedPart<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.save(serializer)
    }
}

/// A [`Kept`] value inside of another one, when restored.
struct RestoredPart<T>(T);

impl<'de, T: Kept> Deserialize<'de> for RestoredPart<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::restore(deserializer).map(RestoredPart)
    }
}

impl Kept for SharedMemory {
    fn save<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let number = with_saving(|saving| {
            saving.kept.mappings.push(self.describe_mapping());
            saving.kept.mappings.len() as u32 - 1
        })?;
        number.serialize(serializer)
    }

    fn restore<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = u32::deserialize(deserializer)?;
        with_restoring(|restoring| restoring.mappings.get_mut(number as usize)?.take())
    }
}

impl Kept for OwnedFd {
    fn save<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let number = self.as_raw_fd();
        with_saving(|saving| saving.kept.descriptors.insert(number))?;
        number.serialize(serializer)
    }

    fn restore<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = RawFd::deserialize(deserializer)?;
        with_restoring(|restoring| restoring.descriptors.remove(&number))
    }
}

impl<T: Kept + Send + Sync + 'static> Kept for Arc<T> {
    fn save<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (number, is_first) = with_saving(|saving| saving.number_of(self.clone()))?;
        (number, is_first.then_some(SavedPart(&**self))).serialize(serializer)
    }

    fn restore<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        with_restoring(|restoring| {
            restoring.depth += 1;
            (restoring.depth <= MAX_DEPTH).then_some(())
        })?;
        let (number, content) = <(u32, Option<RestoredPart<T>>)>::deserialize(deserializer)?;
        with_restoring(|restoring| {
            restoring.depth -= 1;
            let Some(RestoredPart(content)) = content else {
                return restoring.shared.get(&number)?.clone().downcast().ok();
            };
            let object = Arc::new(content);
            let before = restoring.shared.insert(number, object.clone());
            before.is_none().then_some(object)
        })
    }
}

/// Saved as the object that it refers to, if that still exists.
impl<T: Kept + Send + Sync + 'static> Kept for Weak<T> {
    fn save<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.upgrade().save(serializer)
    }

    fn restore<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let object: Option<Arc<T>> = Kept::restore(deserializer)?;
        Ok(object.as_ref().map_or_else(Weak::new, Arc::downgrade))
    }
}

impl<T: Kept> Kept for Option<T> {
    fn save<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.as_ref().map(SavedPart).serialize(serializer)
    }

    fn restore<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let part: Option<RestoredPart<T>> = Deserialize::deserialize(deserializer)?;
        Ok(part.map(|part| part.0))
    }
}

impl<T: Kept> Kept for Vec<T> {
    fn save<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter().map(SavedPart))
    }

    fn restore<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let parts: Vec<RestoredPart<T>> = Deserialize::deserialize(deserializer)?;
        Ok(parts.into_iter().map(|part| part.0).collect())
    }
}
