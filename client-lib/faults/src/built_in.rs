//! Plans that are part of the program, by name.

use crate::kind::Place;
use crate::plan::Plan;
use std::path::Path;

/// A plan that is part of the program.
#[derive(Debug, Clone, Copy)]
pub struct BuiltIn {
    /// Name, for `siwrun --faults NAME` or `siwctl fault load NAME`.
    pub name: &'static str,
    /// Reader of the plan.
    pub place: Place,
    /// The plan as a file.
    pub text: &'static str,
}

macro_rules! built_in {
    ($($place:ident: $($name:literal),* $(,)?;)*) => {
        &[$($(BuiltIn {
            name: $name,
            place: Place::$place,
            text: include_str!(concat!("../plans/", $name, ".toml")),
        }),*),*]
    };
}

const BUILT_IN: &[BuiltIn] = built_in! {
    Program:
    "slow-completions",
    "reordered",
    "peer-dies",
    "access-denied",
    "receiver-never-posts",
    "queue-full",
    "out-of-memory",
    "port-flaps",
    "device-fails",
    "rejected-at-first",
    "connect-times-out",
    "no-route",
    "disconnected",
    "event-storm";
    Daemon:
    "flaky-link",
    "lossy-link",
    "slow-link",
    "bit-errors",
    "cable-pulled",
    "busy-daemon";
};

/// The built-in plans of a reader, in the order in which they are listed.
pub fn built_in_plans(place: Place) -> impl Iterator<Item = BuiltIn> {
    let all = BUILT_IN.iter().copied();
    all.filter(move |plan| plan.place == place)
}

/// Finds a built-in plan.
pub(crate) fn find_built_in(name: &str, place: Place) -> Option<BuiltIn> {
    built_in_plans(place).find(|plan| plan.name == name)
}

impl BuiltIn {
    /// Its description: the comment at the beginning of the file, in one line.
    pub fn description(&self) -> String {
        let lines = self.text.lines().map_while(|line| line.strip_prefix('#'));
        let lines: Vec<_> = lines.map(str::trim).collect();
        lines.join(" ")
    }

    /// The checked plan.
    ///
    /// # Panics
    /// Never: a test reads all of them.
    pub fn plan(&self) -> Plan {
        Plan::parse(Path::new(self.name), self.text, self.place)
            .unwrap_or_else(|error| unreachable!("built-in plan: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_plans_can_be_read_and_are_described() {
        for built_in in BUILT_IN {
            assert!(!built_in.plan().faults.is_empty());
            assert!(built_in.description().ends_with('.'), "{}", built_in.name);
            let found = Plan::find(built_in.name, built_in.place);
            assert_eq!(found.unwrap(), built_in.plan());
        }
    }
}
