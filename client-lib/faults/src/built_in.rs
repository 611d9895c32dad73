//! Plans that are part of the program, by name.

use crate::plan::Plan;
use std::path::Path;

/// A plan that is part of the program.
#[derive(Debug, Clone, Copy)]
pub struct BuiltIn {
    /// Name, for `siwrun --faults NAME`.
    pub name: &'static str,
    /// The plan as a file.
    pub text: &'static str,
}

macro_rules! built_in {
    ($($name:literal),* $(,)?) => {
        &[$(BuiltIn {
            name: $name,
            text: include_str!(concat!("../plans/", $name, ".toml")),
        }),*]
    };
}

const BUILT_IN: &[BuiltIn] = built_in! {
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
    "event-storm",
};

/// All built-in plans, in the order in which they are listed.
pub fn built_in_plans() -> impl Iterator<Item = BuiltIn> {
    BUILT_IN.iter().copied()
}

/// Finds a built-in plan.
pub(crate) fn find_built_in(name: &str) -> Option<BuiltIn> {
    built_in_plans().find(|plan| plan.name == name)
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
        Plan::parse(Path::new(self.name), self.text)
            .unwrap_or_else(|error| unreachable!("built-in plan: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_plans_can_be_read_and_are_described() {
        for built_in in built_in_plans() {
            assert!(!built_in.plan().faults.is_empty());
            assert!(built_in.description().ends_with('.'), "{}", built_in.name);
            assert_eq!(Plan::find(built_in.name).unwrap(), built_in.plan());
        }
    }
}
