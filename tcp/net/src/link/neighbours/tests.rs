//! Tests of the neighbour table.

use super::*;
use crate::quota_owner::OwnerScope;
use core::time::Duration;

const A: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(10, 0, 0, 2));

fn conn(index: u32) -> ConnId {
    ConnId {
        index,
        generation: 0,
    }
}

fn table(max_entries: usize) -> Neighbours {
    Neighbours::new(NeighbourConfig {
        max_entries,
        ..NeighbourConfig::default()
    })
}

#[test]
fn an_unanswered_neighbour_fails_its_waiters() {
    let mut table = table(8);
    let mut now = Instant(1);
    assert!(matches!(
        table.lookup(A, conn(7), false, None, now),
        NeighbourLookup::Wait
    ));
    assert!(matches!(
        table.lookup(A, conn(7), false, None, now),
        NeighbourLookup::Wait
    ));
    for _ in 0..2 {
        now = now + Duration::from_secs(1);
        assert!(table.poll(now).is_empty());
    }
    assert_eq!(table.solicits.len(), 3);
    now = now + Duration::from_secs(1);
    assert_eq!(table.poll(now), [conn(7)]);
    assert!(table.next_deadline().is_none());
}

#[test]
fn a_stale_entry_is_probed_while_it_is_used() {
    let mut table = table(8);
    table.lookup(A, conn(7), false, None, Instant(1));
    assert_eq!(
        table
            .process_claim(A, [2; 6], ClaimKind::Reply, Instant(1))
            .waiters,
        [conn(7)]
    );
    let generation = table.generation;
    table.poll(Instant(1) + Duration::from_secs(31));
    assert_ne!(table.generation, generation, "connections ask again");
    table.solicits.clear();
    assert!(matches!(
        table.lookup(A, conn(7), false, None, Instant::from_millis(31_000)),
        NeighbourLookup::Found(_)
    ));
    assert_eq!(
        table.solicits[0].to,
        Some([2; 6]),
        "RFC 4861 section 7.3.3: a unicast probe"
    );
}

/// An advertisement with these flags.
const fn advertisement(is_solicited: bool, overrides: bool) -> ClaimKind {
    ClaimKind::Advertisement {
        is_solicited,
        overrides,
    }
}

/// RFC 826 (packet reception); RFC 4861 sections 7.2.3 and 7.2.5.
#[test]
fn an_entry_follows_claims_as_the_protocols_say() {
    use NeighbourState::{Incomplete, Probe, Reachable, Stale};
    let (old, new) = ([2; 6], [6; 6]);
    let followed = |state| (new, state, true);
    let kept = |state| (old, state, false);
    let second = Duration::from_secs(1);
    // Claim; age of the entry; Ethernet address, state and whether the path is new, after a claim to a
    // reachable entry, a stale one, and one that is being probed.
    let rows = [
        (
            ClaimKind::Solicitation,
            Duration::ZERO,
            [followed(Stale); 3],
        ),
        (
            ClaimKind::Announcement,
            Duration::ZERO,
            [followed(Stale); 3],
        ),
        (
            ClaimKind::Reply,
            Duration::ZERO,
            [kept(Reachable), kept(Stale), kept(Probe)],
        ),
        (
            ClaimKind::Reply,
            second,
            [followed(Stale), followed(Stale), followed(Reachable)],
        ),
        (
            ClaimKind::Overheard,
            Duration::ZERO,
            [kept(Reachable), kept(Stale), kept(Probe)],
        ),
        (ClaimKind::Overheard, second, [followed(Stale); 3]),
        (
            advertisement(true, true),
            Duration::ZERO,
            [followed(Stale), followed(Stale), followed(Reachable)],
        ),
        (
            advertisement(false, true),
            Duration::ZERO,
            [followed(Stale); 3],
        ),
        (
            advertisement(true, false),
            Duration::ZERO,
            [kept(Stale), kept(Stale), kept(Probe)],
        ),
        (
            advertisement(false, false),
            Duration::ZERO,
            [kept(Stale), kept(Stale), kept(Probe)],
        ),
    ];
    for (kind, age, expected) in rows {
        for (state, expected) in [Reachable, Stale, Probe].into_iter().zip(expected) {
            let mut table = table(8);
            let now = Instant(1);
            table.add(
                A,
                NeighbourEntry::with_mac(old, state, now.0 + 60_000_000_000, now),
            );
            let outcome = table.process_claim(A, new, kind, now + age);
            let entry = &table.entries[&A];
            assert_eq!(
                (entry.mac, entry.status, outcome.is_path_new),
                expected,
                "{kind:?} to {state:?} after {age:?}"
            );
        }
        // It resolves an entry that waits, and creates one only as a solicitation.
        let mut table = table(8);
        let now = Instant(1);
        let created = kind == ClaimKind::Solicitation;
        table.process_claim(A, new, kind, now);
        assert_eq!(table.entries.contains_key(&A), created);
        table.remove(A);
        table.lookup(A, conn(7), false, None, now);
        assert_eq!(table.entries[&A].status, Incomplete);
        let outcome = table.process_claim(A, new, kind, now);
        assert_eq!(outcome.waiters, [conn(7)]);
        let state = if kind.is_answer() { Reachable } else { Stale };
        assert_eq!(table.entries[&A].status, state, "{kind:?}");
        // None replaces a permanent entry.
        table.set_known(A, old, true, now);
        let outcome = table.process_claim(A, new, kind, now + second);
        assert_eq!((table.entries[&A].mac, outcome.is_path_new), (old, false));
    }
}

#[test]
fn a_neighbour_that_is_back_makes_the_path_new() {
    let mut table = table(8);
    let mut now = Instant(1);
    table.add(
        A,
        NeighbourEntry::with_mac([2; 6], NeighbourState::Stale, 60_000_000_000, now),
    );
    let is_new =
        |table: &mut Neighbours, kind, now| table.process_claim(A, [2; 6], kind, now).is_path_new;
    for kind in [
        ClaimKind::Solicitation,
        ClaimKind::Reply,
        ClaimKind::Overheard,
    ] {
        assert!(!is_new(&mut table, kind, now), "{kind:?}");
    }
    assert!(is_new(&mut table, ClaimKind::Announcement, now));
    table.lookup(A, conn(7), false, None, now);
    assert!(
        !is_new(&mut table, ClaimKind::Reply, now),
        "the first answer"
    );
    now = now + Duration::from_secs(31);
    table.poll(now);
    table.lookup(A, conn(7), false, None, now);
    now = now + Duration::from_secs(1);
    table.poll(now);
    assert!(
        is_new(&mut table, ClaimKind::Reply, now),
        "the second answer"
    );
}

/// A claim that nobody stands behind is corrected by the probes.
#[test]
fn a_false_claim_ends_with_its_probes() {
    let mut table = table(8);
    let mut now = Instant(1);
    table.lookup(A, conn(7), false, None, now);
    table.process_claim(A, [2; 6], ClaimKind::Reply, now);
    table.process_claim(A, [6; 6], ClaimKind::Solicitation, now);
    table.solicits.clear();
    table.lookup(A, conn(7), false, None, now);
    for _ in 0..3 {
        now = now + Duration::from_secs(1);
        table.poll(now);
    }
    let asked: Vec<_> = table.solicits.iter().map(|solicit| solicit.to).collect();
    assert_eq!(asked, [Some([6; 6]), Some([6; 6]), Some([6; 6]), None]);
    table.lookup(A, conn(7), false, None, now);
    let outcome = table.process_claim(A, [2; 6], ClaimKind::Reply, now);
    assert!(outcome.is_path_new);
    assert_eq!(outcome.waiters, [conn(7)]);
}

#[test]
fn solicitations_do_not_evict_a_neighbour_in_use() {
    let mut table = table(8);
    table.lookup(A, conn(7), false, None, Instant(1));
    table.process_claim(A, [2; 6], ClaimKind::Reply, Instant(1));
    for i in 0..1000u32 {
        table.process_claim(
            IpAddr::V4(i.into()),
            [3; 6],
            ClaimKind::Solicitation,
            Instant(2),
        );
    }
    assert!(matches!(
        table.lookup(A, conn(7), false, None, Instant(3)),
        NeighbourLookup::Found(_)
    ));
    // Neighbours that we contact evict those of unproven peers.
    for i in 0..7u32 {
        let addr = IpAddr::V4((i + 5000).into());
        assert!(matches!(
            table.lookup(addr, conn(1), false, None, Instant(3)),
            NeighbourLookup::Wait
        ));
        table.process_claim(addr, [4; 6], ClaimKind::Reply, Instant(3));
    }
    assert!(matches!(
        table.lookup(A, conn(7), false, None, Instant(3)),
        NeighbourLookup::Found(_)
    ));
}

#[test]
fn half_open_connections_get_a_quarter_of_the_table() {
    let mut table = table(16);
    let near = |i: u32| IpAddr::V4((0x0a00_0000 + i).into());
    for i in 0..12 {
        table.lookup(near(i), conn(i), false, None, Instant(1));
        table.process_claim(near(i), [2; 6], ClaimKind::Reply, Instant(1));
    }
    for i in 100..1000 {
        table.lookup(near(i), conn(i), true, None, Instant(2));
    }
    assert_eq!((table.entries.len(), table.for_unproven), (16, 4));
    for i in 0..12 {
        assert!(matches!(
            table.lookup(near(i), conn(i), false, None, Instant(3)),
            NeighbourLookup::Found(_)
        ));
    }
    // A neighbour that we contact no longer counts as unproven.
    assert!(matches!(
        table.lookup(near(100), conn(7), false, None, Instant(3)),
        NeighbourLookup::Wait
    ));
    assert_eq!(table.for_unproven, 3);
    assert_eq!(
        table
            .process_claim(near(100), [4; 6], ClaimKind::Reply, Instant(3))
            .waiters,
        [7, 100].map(conn)
    );
    assert_eq!(
        table
            .process_claim(near(101), [4; 6], ClaimKind::Reply, Instant(3))
            .waiters,
        [conn(101)]
    );
    let mut now = Instant(3);
    for _ in 0..4 {
        now = now + Duration::from_secs(1);
        table.poll(now);
    }
    assert_eq!((table.incomplete, table.for_unproven), (0, 0));
}

#[test]
fn a_flood_of_claims_cannot_grow_the_table() {
    let mut table = table(8);
    for i in 0..1000u32 {
        table.process_claim(
            IpAddr::V4(i.into()),
            [2; 6],
            ClaimKind::Solicitation,
            Instant(1),
        );
        assert!(table.entries.len() <= 8);
    }
    for i in 0..20u32 {
        table.lookup(
            IpAddr::V4((i + 5000).into()),
            conn(1),
            false,
            None,
            Instant(1),
        );
    }
    assert!(table.entries.len() <= 8);
    assert!(matches!(
        table.lookup(A, conn(1), false, None, Instant(1)),
        NeighbourLookup::Full
    ));
    table.process_claim(A, [0xff; 6], ClaimKind::Solicitation, Instant(1));
    assert!(
        !table.entries.contains_key(&A),
        "a multicast MAC is no neighbour's"
    );
}

#[test]
fn one_user_leaves_room_for_the_questions_of_others() {
    let address = |i: u32| IpAddr::V4((0x0a00_0000 + i).into());
    let owner = |client, user| Some(QuotaOwner { client, user });
    let mut table = Neighbours::new(NeighbourConfig {
        max_entries: 8,
        max_unresolved_per_client: 3,
        max_unresolved_per_user: 4,
        ..NeighbourConfig::default()
    });
    let now = Instant(1);
    for i in 0..20 {
        let client = i % 5;
        table.lookup(address(i), conn(i), false, owner(client, 7), now);
    }
    assert_eq!(table.entries.len(), 4);
    assert_eq!(
        table.check_quota(address(30), owner(9, 7)),
        Err(NetError::TooManyUnresolved {
            scope: OwnerScope::User,
            limit: 4
        })
    );
    // Further connections may wait for an entry that is already requested.
    assert_eq!(table.check_quota(address(0), owner(9, 7)), Ok(()));
    for i in 40..43 {
        let asked = table.lookup(address(i), conn(i), false, owner(1, 8), now);
        assert!(matches!(asked, NeighbourLookup::Wait));
    }
    let refused = table.check_quota(address(43), owner(1, 8)).unwrap_err();
    let why = refused.to_string();
    assert!(why.contains("unresolved_per_client"), "{why}");
    // An answer makes room, and so does giving up.
    table.process_claim(address(40), [2; 6], ClaimKind::Reply, now);
    assert_eq!(table.check_quota(address(43), owner(1, 8)), Ok(()));
    for second in 1..4 {
        table.poll(now + Duration::from_secs(second));
    }
    assert_eq!(table.entries.len(), 1);
    assert_eq!(table.unresolved.owner_count(), 0);
}
