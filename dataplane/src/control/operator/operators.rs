//! Operators, who see the counters and names of all clients: root and the user that the daemon runs
//! as, in the daemon's own user and pid namespaces, and the members of a configured group. Other users
//! see their own. Root in a container is another user.

use std::collections::HashSet;

use nix::unistd::{Gid, Group, User};

use crate::control::client::peers::PeerCredentials;

/// User and group ids, looked up once at the start, because a name service could be slow later.
#[derive(Debug, Clone, Default)]
pub struct Operators {
    /// Members of the group.
    uids: HashSet<u32>,
    gid: Option<u32>,
}

impl Operators {
    /// Looks up the operators: root, the daemon's own user, and the members of `group`.
    ///
    /// # Errors
    /// The group does not exist; the text says how to create it.
    pub fn look_up(group: Option<&str>) -> Result<Operators, String> {
        let mut operators = Operators::default();
        let Some(name) = group else {
            return Ok(operators);
        };
        let group: Option<Group> = Group::from_name(name).ok().flatten();
        let group = group.ok_or_else(|| {
            format!("group {name:?} does not exist; create it with: groupadd {name}")
        })?;
        operators.gid = Some(Gid::as_raw(group.gid));
        let members = group.mem.iter();
        let uids = members.filter_map(|member| Some(User::from_name(member).ok()??.uid.as_raw()));
        operators.uids.extend(uids);
        Ok(operators)
    }

    /// Returns true if a process belongs to an operator.
    pub fn include(&self, peer: &PeerCredentials) -> bool {
        peer.owns_daemon || self.uids.contains(&peer.uid) || self.gid == Some(peer.gid)
    }
}
