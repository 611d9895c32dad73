//! Tests of the neighbour table.

use super::*;
use crate::base::quota_owner::OwnerScope;
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
        table.process_claim(A, [2; 6], ClaimKind::Answer, Instant(1)),
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

#[test]
fn a_known_address_is_kept_while_it_answers() {
    let mut table = table(8);
    let mut now = Instant(1);
    table.lookup(A, conn(7), false, None, now);
    table.process_claim(A, [2; 6], ClaimKind::Answer, now);
    table.solicits.clear();
    // Just confirmed: no probe is sent.
    table.process_claim(A, [6; 6], ClaimKind::Solicitation, now);
    assert!(table.solicits.is_empty());
    now = now + Duration::from_secs(2);
    for kind in [ClaimKind::Solicitation, ClaimKind::Answer, ClaimKind::Hint] {
        table.process_claim(A, [6; 6], kind, now);
        assert!(
            matches!(table.lookup(A, conn(7), false, None, now), NeighbourLookup::Found(m) if m == [2; 6])
        );
    }
    assert_eq!(table.solicits.len(), 1, "one probe, however many claims");
    assert_eq!(table.solicits[0].to, Some([2; 6]));
    table.process_claim(A, [2; 6], ClaimKind::Answer, now);
    assert!(table.entries[&A].status == NeighbourState::Reachable);
    // Again, without an answer to the probes: twelve within three seconds.
    now = now + Duration::from_secs(2);
    table.solicits.clear();
    table.process_claim(A, [6; 6], ClaimKind::Solicitation, now);
    for _ in 0..12 {
        now = now + Duration::from_millis(250);
        table.poll(now);
    }
    // Then everybody on the link is asked.
    assert_eq!(table.solicits.len(), 13);
    assert_eq!(table.solicits[12].to, None);
    assert!(matches!(
        table.lookup(A, conn(7), false, None, now),
        NeighbourLookup::Wait
    ));
    assert_eq!(
        table.process_claim(A, [6; 6], ClaimKind::Answer, now),
        [conn(7)]
    );
    assert!(
        matches!(table.lookup(A, conn(7), false, None, now), NeighbourLookup::Found(m) if m == [6; 6])
    );
}

#[test]
fn a_neighbour_that_announces_its_move_is_followed_at_once() {
    let mut table = table(8);
    let now = Instant(1);
    table.lookup(A, conn(7), false, None, now);
    table.process_claim(A, [2; 6], ClaimKind::Answer, now);
    table.solicits.clear();
    let is_at = |table: &mut Neighbours, mac, now| {
        let found = table.lookup(A, conn(7), false, None, now);
        matches!(found, NeighbourLookup::Found(found) if found == mac)
    };
    let generation = table.generation;
    table.process_claim(A, [6; 6], ClaimKind::Announcement, now);
    assert_ne!(table.generation, generation, "connections ask again");
    assert!(is_at(&mut table, [6; 6], now));
    assert_eq!(table.solicits[0].to, Some([6; 6]), "the new one is probed");
    // Overheard ARP counts once the entry is a second old (locktime of arp(7)).
    table.process_claim(A, [8; 6], ClaimKind::Overheard, now);
    assert!(is_at(&mut table, [6; 6], now));
    let later = now + Duration::from_secs(1);
    table.process_claim(A, [8; 6], ClaimKind::Overheard, later);
    assert!(is_at(&mut table, [8; 6], later));
    // Neither creates an entry, and none replaces a permanent one.
    let other = IpAddr::V4(7.into());
    table.process_claim(other, [6; 6], ClaimKind::Announcement, now);
    assert!(!table.entries.contains_key(&other));
    table.set_known(A, [10; 6], true, later);
    table.process_claim(A, [6; 6], ClaimKind::Announcement, later);
    assert!(is_at(&mut table, [10; 6], later));
}

#[test]
fn solicitations_do_not_evict_a_neighbour_in_use() {
    let mut table = table(8);
    table.lookup(A, conn(7), false, None, Instant(1));
    table.process_claim(A, [2; 6], ClaimKind::Answer, Instant(1));
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
        table.process_claim(addr, [4; 6], ClaimKind::Answer, Instant(3));
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
        table.process_claim(near(i), [2; 6], ClaimKind::Answer, Instant(1));
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
        table.process_claim(near(100), [4; 6], ClaimKind::Answer, Instant(3)),
        [7, 100].map(conn)
    );
    assert_eq!(
        table.process_claim(near(101), [4; 6], ClaimKind::Answer, Instant(3)),
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
        Err(StackError::TooManyUnresolved {
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
    table.process_claim(address(40), [2; 6], ClaimKind::Answer, now);
    assert_eq!(table.check_quota(address(43), owner(1, 8)), Ok(()));
    for second in 1..4 {
        table.poll(now + Duration::from_secs(second));
    }
    assert_eq!(table.entries.len(), 1);
    assert_eq!(table.unresolved.owner_count(), 0);
}
