//! Rights of a client over the objects of others.

use nix::libc;

use crate::control::request::refusal::Refusal;
use crate::control::resources::Client;

/// Rights of a client: operators see the objects of all users, others those of their own user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::control) struct Viewer {
    is_operator: bool,
    uid: u32,
}

impl Viewer {
    /// Operators see the objects of all users.
    pub fn of(client: &Client) -> Viewer {
        Viewer {
            is_operator: client.account.is_operator(),
            uid: client.account.uid(),
        }
    }

    /// Refuses an action to other users than operators. `what`: the action, for example "end captures".
    pub fn require_operator(self, what: &str) -> Result<(), Refusal> {
        if self.is_operator {
            return Ok(());
        }
        let who = "root, the user of siwd, and the group in [control] operators";
        let why = format!("only operators can {what}: {who}");
        Err(Refusal::new(libc::EPERM, why))
    }

    /// The only user whose objects are visible; `None` if all are.
    pub fn only_user(self) -> Option<u32> {
        (!self.is_operator).then_some(self.uid)
    }

    /// Returns true if the objects of this user are visible.
    pub fn sees(self, user: u32) -> bool {
        self.is_operator || self.uid == user
    }
}
