//! The kinds of attack. Each runs until its time is over or the daemon closes the connection; then
//! it starts again.

mod control;
mod killed;
mod memory;
mod objects;
mod rings;
mod tenants;

use crate::attack::{Attack, Ended};

/// Function that runs an attack.
pub type Run = fn(&mut Attack) -> Ended;

/// Attacks by name.
pub const KINDS: &[(&str, Run)] = &[
    ("blocking-wake", rings::blocking_wake),
    ("full-rings", rings::full_rings),
    ("doorbells", rings::endless_doorbells),
    ("flush-loops", rings::flush_loops),
    ("scribbled-rings", rings::scribbled_rings),
    ("too-many-requests", rings::too_many_requests),
    ("punched-holes", memory::punched_holes),
    ("long-holes", memory::long_holes),
    ("slow-holes", memory::slow_holes),
    ("own-holes", memory::own_holes),
    ("giant-arenas", memory::giant_arenas),
    ("own-memory", memory::fill_own_memory),
    ("dereg-in-flight", memory::deregister_in_flight),
    ("descriptors", control::exhaust_descriptors),
    ("slow-socket", control::slow_socket),
    ("unread-events", control::unread_events),
    ("stats-flood", control::statistics_flood),
    ("create-destroy", control::create_and_destroy),
    ("endless-extents", tenants::endless_extents),
    ("endless-pairs", tenants::endless_pairs),
    ("lingering-sockets", tenants::lingering_sockets),
    ("log-flood", tenants::log_flood),
    ("large-imports", tenants::large_imports),
    ("departures", tenants::departures),
    ("port-binds", tenants::port_binds),
    ("idle-clients", tenants::idle_clients),
    (
        "idle-queues-and-connects",
        objects::idle_queues_and_connects,
    ),
    ("mass-departure", objects::mass_departure),
    ("parked-sends", objects::parked_sends),
    ("many-arenas", objects::many_arenas),
    ("slow-files", tenants::slow_files),
    ("clients-come-and-go", tenants::clients_come_and_go),
    ("many-objects", objects::many_objects),
    ("killed", killed::live_until_killed),
    ("many-queue-pairs", killed::hold_many_queue_pairs),
];

/// Finds the attack with that name.
pub fn by_name(name: &str) -> Option<Run> {
    KINDS
        .iter()
        .find(|(kind, _)| *kind == name)
        .map(|(_, attack)| *attack)
}
