//! The macro that declares a struct of counters with their names.

/// Declares a struct of `u64` counters. `drops` names those that count discarded frames, segments and
/// datagrams, and requests that are not answered. Each counter has its name in Linux's nstat.
#[macro_export]
macro_rules! counters {
    (
        $(#[$meta:meta])* $struct:ident;
        drops: [$($drop:literal),* $(,)?];
        $($(#[doc = $doc:literal])* $name:ident = $mib:literal),* $(,)?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct $struct { $($(#[doc = $doc])* pub $name: u64),* }

        impl $struct {
            /// Adds another worker's counters.
            pub fn merge(&mut self, other: &$struct) { $(self.$name += other.$name;)* }
            /// Name and value of each counter.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
            /// Name in nstat and value of each counter.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$(($mib, self.$name)),*].into_iter()
            }
            /// Meaning of the counter with this name in nstat; `None`: it is not one of these.
            pub fn meaning_of(name: &str) -> Option<&'static str> {
                match name {
                    $($mib => Some(concat!($($doc),*).trim_ascii()),)*
                    _ => None,
                }
            }
            /// Returns true for the name in nstat of a counter of discarded or refused frames.
            pub fn is_drop(name: &str) -> bool {
                [$($drop),*].contains(&name)
            }
        }
    };
}
