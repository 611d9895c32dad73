//! Changes of memory keys by work requests: bind and unbind windows, register pages, invalidate.
//! Workers call them on their [`KeyReader`], in the order of a send queue; they never allocate, lock
//! or wait.
//!
//! ```text
//!  window 1:  unbound <--bind, length 0-- bound --bind--> bound with another key
//!  window 2:  unbound --bind--> bound to a stream --invalidate--> unbound
//!  fast MR:   invalid --register--> valid --invalidate--> invalid
//!  MR:        valid --invalidate--> invalid for ever
//! ```
//! A region counts its windows: while it has any, it is neither invalidated nor deregistered.

use crate::key_table::{KeyReader, Stag};
use crate::registered_memory::{KeyError, KeyKind, RegisteredMemory, Scope};
use core::sync::atomic::Ordering;
use siw_lockfree::key_cell::KeyWord;
use siw_shm::local_wqe::{MAX_PAGE_SHIFT, MIN_PAGE_SHIFT};
use siw_shm::{Access, BindMw, FastReg, WindowType};

impl KeyReader {
    /// The current or last key of a window or region; 0 when it has left the table.
    pub fn entry_key(&self, any: Stag) -> u32 {
        self.entry_at(any).map_or(0, |mr| mr.key_word().stag())
    }

    /// The slow path of [`KeyReader::check_access`], for keys whose fields change in place.
    #[cold]
    pub(crate) fn check_changeable<'a>(
        &'a self,
        mr: &'a RegisteredMemory,
        word: KeyWord,
        off: u64,
        len: u32,
        need: Access,
    ) -> Result<(&'a RegisteredMemory, u64), KeyError> {
        let parent = mr.parent_key();
        // The fields that were read belong together.
        if !mr.key_cell().is_unchanged(word) {
            return Err(KeyError::Stag);
        }
        if !matches!(mr.key_kind(), KeyKind::Window(_)) {
            return Ok((mr, off));
        }
        // A window has an rkey, but no lkey.
        if !need.intersects(Access::REMOTE) {
            return Err(KeyError::Access);
        }
        let region = self.entry_of_home(parent).ok_or(KeyError::Stag)?;
        let word = region.key_word();
        if !word.is_valid() {
            return Err(KeyError::Stag);
        }
        let off = region.check_range(off, u64::from(len))?;
        if !region.is_fixed() && !region.key_cell().is_unchanged(word) {
            return Err(KeyError::Stag);
        }
        Ok((region, off))
    }

    /// Executes BIND_MW (ibv_bind_mw(3), and IBV_WR_BIND_MW of ibv_post_send(3)). Length 0 unbinds.
    /// `Ok(true)`: the window was bound before, and other workers may still be accessing memory
    /// through the old binding ([`KeyReader::has_elapsed_for_others`]).
    pub fn bind_window(&self, bind: &BindMw, pd: u32, qp: u32) -> Result<bool, KeyError> {
        let (old, new) = (Stag(bind.rkey), Stag(bind.new_rkey));
        let mw = self.entry_at(old).ok_or(KeyError::Stag)?;
        let word = mw.key_word();
        let KeyKind::Window(kind) = mw.key_kind() else {
            return Err(KeyError::Stag);
        };
        if word.stag() != old.0 || new.table_index() != old.table_index() || !word.is_settled() {
            return Err(KeyError::Stag);
        }
        if mw.pd() != pd {
            return Err(KeyError::Pd);
        }
        if kind == WindowType::Two && word.is_valid() {
            if mw.allowed_qp() != Some(qp) {
                return Err(KeyError::Stream);
            }
            if bind.length > 0 {
                return Err(KeyError::Access);
            }
        }
        let scope = match bind.length {
            0 => None,
            _ => Some(self.window_scope(bind, kind, pd, qp)?),
        };
        if !mw.key_cell().try_claim(word) {
            if let Some((region, _)) = scope {
                region.release_window();
            }
            return Err(KeyError::Stag);
        }
        let before = word.is_valid().then(|| mw.parent_key());
        if let Some((_, scope)) = &scope {
            mw.set_scope(scope);
        }
        mw.key_cell().publish_key(new.0, scope.is_some());
        self.release_window(before);
        Ok(before.is_some())
    }

    /// The key that [`crate::KeyTable::insert`] gave a window, if the window is bound to one stream:
    /// it must be unbound when that stream ends ([`crate::KeyTable::unbind_stream`]).
    pub fn stream_window(&self, any: Stag) -> Option<Stag> {
        let mw = self.entry_at(any)?;
        let is_of_stream = mw.key_kind() == KeyKind::Window(WindowType::Two);
        (is_of_stream && mw.key_word().is_valid()).then(|| mw.home_key())
    }

    /// Checks a binding, and adds the window to its region's count.
    fn window_scope(
        &self,
        bind: &BindMw,
        kind: WindowType,
        pd: u32,
        qp: u32,
    ) -> Result<(&RegisteredMemory, Scope), KeyError> {
        const ALLOWED: Access = Access(Access::REMOTE.0 | Access::ZERO_BASED.0);
        let mr = self.entry_at(Stag(bind.lkey)).ok_or(KeyError::Stag)?;
        let word = mr.key_word();
        if !word.is_valid_for(bind.lkey) || matches!(mr.key_kind(), KeyKind::Window(_)) {
            return Err(KeyError::Stag);
        }
        if mr.pd() != pd {
            return Err(KeyError::Pd);
        }
        if mr.allowed_qp().is_some_and(|allowed| allowed != qp) {
            return Err(KeyError::Stream);
        }
        let writes = bind.access.allows_remote_changes();
        if !ALLOWED.contains(bind.access)
            || !mr.access_rights().contains(Access::MW_BIND)
            || (writes && !mr.access_rights().contains(Access::LOCAL_WRITE))
        {
            return Err(KeyError::Access);
        }
        mr.check_range(bind.addr, bind.length)?;
        if !mr.try_add_window() {
            return Err(KeyError::Stag);
        }
        // Recheck: the region may have been invalidated or registered again before the window was
        // counted.
        if !mr.key_cell().is_unchanged(word) {
            mr.release_window();
            return Err(KeyError::Stag);
        }
        let zero = bind.access.contains(Access::ZERO_BASED);
        Ok((
            mr,
            Scope {
                allowed_qp: (kind == WindowType::Two).then_some(qp),
                access_rights: bind.access,
                base_address: if zero { 0 } else { bind.addr },
                len: bind.length,
                start_offset: bind.addr,
                parent_key: mr.home_key(),
            },
        ))
    }

    /// The region that the table gave this key, unless another one has taken its place in the table.
    #[inline]
    fn entry_of_home(&self, home: Stag) -> Option<&RegisteredMemory> {
        self.entry_at(home).filter(|mr| mr.home_key() == home)
    }

    fn release_window(&self, region: Option<Stag>) {
        if let Some(mr) = region.and_then(|parent| self.entry_of_home(parent)) {
            mr.release_window();
        }
    }

    /// Executes FAST_REG (IB_WR_REG_MR): the pages of the list become addressable from `iova` on. The
    /// list is copied out of shared memory once, and the copy is checked.
    pub fn register_pages(&self, fast_reg: &FastReg, pd: u32) -> Result<(), KeyError> {
        let key = Stag(fast_reg.key);
        let mr = self.entry_at(key).ok_or(KeyError::Stag)?;
        let word = mr.key_word();
        if mr.key_kind() != KeyKind::Fast || word.is_valid() || !word.is_settled() {
            return Err(KeyError::Stag);
        }
        if mr.pd() != pd {
            return Err(KeyError::Pd);
        }
        let access = fast_reg.access.without(Access::OPTIONAL);
        if !Access::ALL.contains(access)
            || (access.allows_remote_changes() && !access.contains(Access::LOCAL_WRITE))
        {
            return Err(KeyError::Access);
        }
        let zero = access.contains(Access::ZERO_BASED);
        let base = if zero { 0 } else { fast_reg.iova };
        base.checked_add(u64::from(fast_reg.length))
            .ok_or(KeyError::Wrap)?;
        if !mr.key_cell().try_claim(word) {
            return Err(KeyError::Stag);
        }
        if let Err(error) = copy_pages(mr, fast_reg) {
            mr.key_cell().abandon_claim(word);
            return Err(error);
        }
        mr.set_scope(&Scope {
            allowed_qp: None,
            access_rights: access,
            base_address: base,
            len: fast_reg.length.into(),
            start_offset: fast_reg.first_offset.into(),
            parent_key: Stag(0),
        });
        mr.unlock_windows();
        mr.key_cell().publish_key(key.0, true);
        Ok(())
    }

    /// Executes LOCAL_INV, and the end of READ_WITH_INV: the key becomes invalid for all workers. A
    /// region that was registered by the control path still has to be deregistered. Other workers may
    /// still be accessing the memory ([`KeyReader::has_elapsed_for_others`]).
    pub fn invalidate_key(&self, stag: Stag, pd: u32, qp: u32) -> Result<(), KeyError> {
        let mr = self.entry_at(stag).ok_or(KeyError::Stag)?;
        let word = mr.key_word();
        if !word.is_valid_for(stag.0) {
            return Err(KeyError::Stag);
        }
        if mr.pd() != pd {
            return Err(KeyError::Pd);
        }
        if mr.allowed_qp().is_some_and(|allowed| allowed != qp) {
            return Err(KeyError::Stream);
        }
        match mr.key_kind() {
            // Shared by the streams of its protection domain: it is unbound by a bind of length 0.
            KeyKind::Window(WindowType::One) => return Err(KeyError::Access),
            KeyKind::Window(WindowType::Two) => {}
            KeyKind::Fixed | KeyKind::Fast if mr.lock_windows() > 0 => {
                return Err(KeyError::Access);
            }
            KeyKind::Fixed | KeyKind::Fast => {}
        }
        if !mr.key_cell().try_claim(word) {
            return Err(KeyError::Stag);
        }
        let parent = matches!(mr.key_kind(), KeyKind::Window(_)).then(|| mr.parent_key());
        mr.key_cell().publish_key(stag.0, false);
        self.release_window(parent);
        Ok(())
    }

    /// Executes Send with Invalidate: like [`Self::invalidate_key`], for memory that the peer may use
    /// at all (RFC 5040 section 8.1.1).
    pub fn invalidate_remote(&self, stag: Stag, pd: u32, qp: u32) -> Result<(), KeyError> {
        if let Some(mr) = self.lookup(stag)
            && mr.pd() == pd
            && mr.allowed_qp().is_none_or(|allowed| allowed == qp)
            && !mr.access_rights().intersects(Access::REMOTE)
        {
            return Err(KeyError::Access);
        }
        self.invalidate_key(stag, pd, qp)
    }
}

/// Copies the page list out of shared memory, once.
fn copy_pages(mr: &RegisteredMemory, fast_reg: &FastReg) -> Result<(), KeyError> {
    let (Some(pages), Some(region)) = (mr.page_list(), mr.shared_memory()) else {
        return Err(KeyError::Stag);
    };
    if !(MIN_PAGE_SHIFT..=MAX_PAGE_SHIFT).contains(&fast_reg.page_shift) {
        return Err(KeyError::Bounds);
    }
    let size = 1u64 << fast_reg.page_shift;
    if u64::from(fast_reg.first_offset) >= size {
        return Err(KeyError::Bounds);
    }
    let page_count = (u64::from(fast_reg.first_offset) + u64::from(fast_reg.length)).div_ceil(size);
    let places = usize::try_from(page_count)
        .ok()
        .and_then(|page_count| pages.offsets.get(..page_count))
        .ok_or(KeyError::Bounds)?;
    for (i, place) in places.iter().enumerate() {
        let mut bytes = [0; 8];
        pages
            .list
            .read(pages.list_at + i * 8, &mut bytes)
            .map_err(|_| KeyError::Bounds)?;
        let at = u64::from_le_bytes(bytes);
        let fits = at
            .checked_add(size)
            .is_some_and(|end| end <= region.len() as u64);
        if !at.is_multiple_of(1 << MIN_PAGE_SHIFT) || !fits {
            return Err(KeyError::Bounds);
        }
        place.store(at, Ordering::Relaxed);
    }
    pages
        .shift
        .store(fast_reg.page_shift.into(), Ordering::Relaxed);
    Ok(())
}
