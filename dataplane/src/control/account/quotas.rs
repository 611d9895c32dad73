//! Resource quotas: of each client, of each user (the uid of the process that connected), and of
//! all clients together.
//!
//! A resource is charged to the client's account before it is allocated. The [`Charge`] goes with the
//! resource, and gives itself back when it is dropped: for memory that a helper frees, in the helper's
//! thread. So a client that reconnects cannot exceed the limits with memory that is still to be freed.
//!
//! The daemon's own memory (heap) for a client's objects is part of the client's memory: each unit
//! of a quota is charged with the heap that it needs (`heap`), and whatever varies in
//! length is charged as [`Quota::Heap`].
//!
//! The last eighth of each sum over all clients is a reserve: half of it for users that hold little,
//! and half of it for operators alone. The connections of one worker on one device are such a sum,
//! which the worker checks.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::libc;
use siw_shm::control::MAX_AH;

use crate::config::LimitsConfig;
use crate::control::request::refusal::Refusal;

/// Counted resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quota {
    /// Connections to the control socket.
    Clients,
    /// Queue pairs, including those being destroyed.
    QueuePairs,
    /// Shared receive queues.
    SharedReceiveQueues,
    /// Completion queues.
    CompletionQueues,
    /// Protection domains.
    ProtectionDomains,
    /// Address handles.
    AddressHandles,
    /// Memory regions and windows.
    MemoryKeys,
    /// Bytes of arenas, queues, doorbells, socket buffers, and the daemon's own memory.
    Memory,
    /// Bytes of the daemon's own memory; a charge of them is a charge of `Memory` as well.
    Heap,
    /// Bytes of that memory in hugepages.
    HugeMemory,
    /// Open files and mappings of the daemon.
    Descriptors,
    /// Listeners.
    Listeners,
    /// Completion channels and channels of connection events.
    EventChannels,
    /// Queue pairs that are connected or connecting.
    Connections,
    /// Arenas, if NICs read them by DMA.
    NicArenas,
}

/// Number of kinds.
const KINDS: usize = Quota::NicArenas as usize + 1;
type Amounts = [u64; KINDS];

impl Quota {
    const ALL: [Quota; KINDS] = [
        Quota::Clients,
        Quota::QueuePairs,
        Quota::SharedReceiveQueues,
        Quota::CompletionQueues,
        Quota::ProtectionDomains,
        Quota::AddressHandles,
        Quota::MemoryKeys,
        Quota::Memory,
        Quota::Heap,
        Quota::HugeMemory,
        Quota::Descriptors,
        Quota::Listeners,
        Quota::EventChannels,
        Quota::Connections,
        Quota::NicArenas,
    ];

    /// Display name, and prefix of its keys in `[limits]`.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Quota::Clients => ("clients", "clients"),
            Quota::QueuePairs => ("queue pairs", "queue_pairs"),
            Quota::SharedReceiveQueues => ("shared receive queues", "queue_pairs"),
            Quota::CompletionQueues => ("completion queues", "completion_queues"),
            Quota::ProtectionDomains => ("protection domains", "protection_domains"),
            Quota::AddressHandles => ("address handles", "address_handles"),
            Quota::MemoryKeys => ("memory regions and windows", "memory_regions"),
            Quota::Memory => ("bytes of memory", "memory"),
            Quota::Heap => ("bytes of siwd's own memory", "memory"),
            Quota::HugeMemory => ("bytes of hugepages", "hugepages"),
            Quota::Descriptors => ("descriptors", "descriptors"),
            Quota::Listeners => ("listeners", "listeners"),
            Quota::EventChannels => ("event channels", "event_channels"),
            Quota::Connections => ("connections", "connections"),
            Quota::NicArenas => ("arenas that NICs read", "arenas"),
        }
    }
}

/// Quota amounts of a channel whose socket buffers this number of bytes.
pub const fn channel_amounts(buffered: usize) -> [(Quota, u64); 3] {
    [
        (Quota::EventChannels, 1),
        (Quota::Descriptors, 1),
        (Quota::Memory, buffered as u64),
    ]
}

/// Maximum number of protection domains of one client, as in Linux siw.
pub const MAX_PD: u32 = 102_400;

/// Capacity for all clients together, after the needs of the host and of the daemon itself.
#[derive(Debug, Clone, Copy)]
pub struct HostCapacity {
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes in free hugepages.
    pub hugepages: u64,
    /// Open files and mappings that the process can have in addition to its own.
    pub descriptors: u64,
    /// Slots of the key table.
    pub memory_keys: u64,
    /// Number of workers, each of which has its own part of an object.
    pub workers: u64,
    /// Memory regions that DPDK can map for NICs; `None` if NICs read no client memory.
    pub nic_arenas: Option<u64>,
}

/// Limits of each kind, in the three scopes.
#[derive(Debug, Clone)]
pub struct QuotaLimits {
    of_client: Amounts,
    of_user: Amounts,
    of_all: Amounts,
    /// Heap bytes of one unit.
    heap_of_one: Amounts,
    /// Connections of one worker on one device.
    of_stack: u64,
}

const UNLIMITED: u64 = u64::MAX;
/// Divisor of a sum over all clients: its reserve.
const RESERVE: u64 = 8;
/// Divisor of a reserve: the most that a user may hold in total and still use the reserve.
const NEWCOMERS: u64 = 16;

impl QuotaLimits {
    /// Computes the limits of a configuration on a host. `heap_of_one` is the heap of one unit in a
    /// daemon with a number of workers.
    pub fn new(
        limits: &LimitsConfig,
        host: &HostCapacity,
        heap_of_one: impl Fn(Quota, u64) -> u64,
    ) -> QuotaLimits {
        let memory = limits.memory.map_or(host.memory, |bytes| bytes.0);
        let memory_of_user = limits
            .memory_per_user
            .map_or(memory / 4 * 3, |bytes| bytes.0);
        let huge_of_user = limits
            .hugepages_per_user
            .map_or(host.hugepages / 2, |bytes| bytes.0);
        let descriptors_of_user = limits
            .descriptors_per_user
            .map_or(host.descriptors / 2, u64::from);
        let connections_of_user = limits
            .connections_per_user
            .map_or(u64::from(limits.connections / 2).max(1), u64::from);
        let mut all = QuotaLimits {
            of_client: [UNLIMITED; KINDS],
            of_user: [UNLIMITED; KINDS],
            of_all: [UNLIMITED; KINDS],
            heap_of_one: Quota::ALL.map(|quota| heap_of_one(quota, host.workers)),
            of_stack: limits.connections.into(),
        };
        for quota in Quota::ALL {
            let (client, user, together) = match quota {
                Quota::Clients => (
                    UNLIMITED,
                    limits.clients_per_user.into(),
                    limits.clients.into(),
                ),
                Quota::QueuePairs | Quota::SharedReceiveQueues => (
                    limits.queue_pairs_per_client.into(),
                    limits.queue_pairs_per_user.into(),
                    UNLIMITED,
                ),
                Quota::CompletionQueues => (
                    limits.completion_queues_per_client.into(),
                    limits.completion_queues_per_user.into(),
                    UNLIMITED,
                ),
                Quota::ProtectionDomains => (MAX_PD.into(), 4 * u64::from(MAX_PD), UNLIMITED),
                Quota::AddressHandles => (MAX_AH.into(), 4 * u64::from(MAX_AH), UNLIMITED),
                Quota::MemoryKeys => (
                    limits.memory_regions_per_client.into(),
                    u64::from(limits.memory_regions_per_user).min((host.memory_keys / 2).max(1)),
                    host.memory_keys,
                ),
                Quota::Memory => (limits.memory_per_client.0, memory_of_user, memory),
                // Limited as memory.
                Quota::Heap => (UNLIMITED, UNLIMITED, UNLIMITED),
                Quota::HugeMemory => (UNLIMITED, huge_of_user, host.hugepages),
                Quota::Descriptors => (
                    limits.descriptors_per_client.into(),
                    descriptors_of_user,
                    host.descriptors,
                ),
                Quota::Listeners => (
                    limits.listeners_per_client.into(),
                    limits.listeners_per_user.into(),
                    UNLIMITED,
                ),
                Quota::EventChannels => (
                    limits.event_channels_per_client.into(),
                    limits.event_channels_per_user.into(),
                    UNLIMITED,
                ),
                Quota::Connections => (UNLIMITED, connections_of_user, UNLIMITED),
                Quota::NicArenas => host
                    .nic_arenas
                    .map_or((UNLIMITED, UNLIMITED, UNLIMITED), |all| {
                        (all / 2, all / 4 * 3, all)
                    }),
            };
            all.of_client[quota as usize] = client;
            all.of_user[quota as usize] = user;
            all.of_all[quota as usize] = together;
        }
        all
    }
}

/// A limit that a charge would exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverQuota {
    quota: Quota,
    limit: u64,
    /// Suffix of the configuration key.
    scope: QuotaScope,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QuotaScope {
    Client,
    User(u32),
    All,
    /// All clients, except for the reserve.
    Reserve,
}

impl std::fmt::Display for OverQuota {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ((what, key), limit) = (self.quota.names(), self.limit);
        let scope = match self.scope {
            QuotaScope::Client => "_per_client",
            QuotaScope::User(_) => "_per_user",
            QuotaScope::All | QuotaScope::Reserve => "",
        };
        match self.scope {
            QuotaScope::Client => write!(f, "{what} of this client: the limit is {limit}")?,
            QuotaScope::User(uid) => write!(f, "{what} of user {uid}: the limit is {limit}")?,
            QuotaScope::All => write!(f, "{what} of all clients: the limit is {limit}")?,
            QuotaScope::Reserve => write!(
                f,
                "{what} of all clients: beyond {limit} they are kept for operators and new users"
            )?,
        }
        match self.quota {
            Quota::ProtectionDomains | Quota::AddressHandles => Ok(()),
            // This limit comes from DPDK, not from [limits].
            Quota::NicArenas => f.write_str(
                ", by what DPDK can map; use fewer and larger arenas, or tx_payload = \"copy\"",
            ),
            _ => write!(f, "; see [limits] {key}{scope}"),
        }
    }
}

impl From<OverQuota> for Refusal {
    fn from(over: OverQuota) -> Refusal {
        let errno = match over.quota {
            Quota::Clients => libc::EUSERS,
            _ => libc::ENOMEM,
        };
        Refusal::new(errno, over.to_string())
    }
}

/// Amounts that a client, a user or all clients hold. Only the control thread adds to them, so that its
/// checks hold; every thread may subtract, because helpers free memory of clients.
#[derive(Debug, Default)]
struct Sums([AtomicU64; KINDS]);

impl Sums {
    fn get(&self, quota: Quota) -> u64 {
        // Pairs with the Release of a subtraction: what it accounted for is freed.
        self.0[quota as usize].load(Ordering::Acquire)
    }

    fn is_empty(&self) -> bool {
        Quota::ALL.iter().all(|quota| self.get(*quota) == 0)
    }

    fn change(&self, kind: usize, from: u64, to: u64) {
        if to >= from {
            self.0[kind].fetch_add(to - from, Ordering::Relaxed);
        } else {
            self.0[kind].fetch_sub(from - to, Ordering::Release);
        }
    }
}

/// Amounts that all clients hold, and the heap of one unit of each quota.
#[derive(Debug)]
struct Totals {
    sums: Sums,
    heap_of_one: Amounts,
    /// Bytes of heap that were released since the start.
    released_heap: AtomicU64,
}

impl Totals {
    /// Sums of these amounts, with the heap that they need.
    fn with_heap(&self, amounts: &[(Quota, u64)]) -> Amounts {
        let mut totals: Amounts = [0; KINDS];
        let mut add = |quota: Quota, amount: u64| {
            let total = &mut totals[quota as usize];
            *total = total.saturating_add(amount);
        };
        for (quota, amount) in amounts {
            add(*quota, *amount);
            let heap = self.heap_of_one[*quota as usize].saturating_mul(*amount);
            add(Quota::Memory, heap);
            if *quota != Quota::Heap {
                add(Quota::Heap, heap);
            }
        }
        totals
    }
}

/// Amounts that a client holds, in the three scopes.
#[derive(Debug)]
struct Held {
    uid: u32,
    of_client: Sums,
    of_user: Arc<Sums>,
    of_all: Arc<Totals>,
}

impl Held {
    /// Changes a charge from one list of amounts to another.
    fn change(&self, from: &[(Quota, u64)], to: &[(Quota, u64)]) {
        let (from, to) = (self.of_all.with_heap(from), self.of_all.with_heap(to));
        for (kind, (from, to)) in from.into_iter().zip(to).enumerate() {
            if from != to {
                for sums in [&self.of_client, &self.of_user, &self.of_all.sums] {
                    sums.change(kind, from, to);
                }
            }
        }
        let heap = Quota::Heap as usize;
        let released = from[heap].saturating_sub(to[heap]);
        self.of_all
            .released_heap
            .fetch_add(released, Ordering::Relaxed);
    }
}

/// Account of one client.
#[derive(Debug)]
pub struct Account {
    held: Arc<Held>,
    is_operator: bool,
}

/// Heap of an account.
pub(in crate::control) const ACCOUNT: usize = size_of::<Held>() + size_of::<Sums>();

impl Account {
    /// Changes whether the client is an operator's, which may use the reserve.
    pub fn set_operator(&mut self, is_operator: bool) {
        self.is_operator = is_operator;
    }

    /// Returns true if the client is an operator's.
    pub fn is_operator(&self) -> bool {
        self.is_operator
    }

    /// User id of the process that connected.
    pub fn uid(&self) -> u32 {
        self.held.uid
    }

    /// Amount of a resource held by the client.
    pub fn amount(&self, quota: Quota) -> u64 {
        self.held.of_client.get(quota)
    }

    /// Charges what exists already, regardless of the limits.
    pub fn hold<const N: usize>(&self, amounts: [(Quota, u64); N]) -> Charge<N> {
        self.held.change(&[], &amounts);
        Charge {
            held: self.held.clone(),
            amounts,
        }
    }
}

/// Amounts charged to an account, which gets them back when this value is dropped, by any thread.
#[derive(Debug)]
#[must_use = "the account gets the amounts back when this is dropped"]
pub struct Charge<const N: usize> {
    held: Arc<Held>,
    amounts: [(Quota, u64); N],
}

impl<const N: usize> Charge<N> {
    /// Changes the amounts to those of what exists, regardless of the limits.
    pub fn set(&mut self, amounts: [(Quota, u64); N]) {
        if self.amounts != amounts {
            self.held.change(&self.amounts, &amounts);
            self.amounts = amounts;
        }
    }

    /// Adds the amounts of another charge of the same account and kinds.
    pub fn absorb(&mut self, other: Charge<N>) {
        let mut sums = self.amounts;
        for (sum, more) in sums.iter_mut().zip(&other.amounts) {
            debug_assert_eq!(sum.0, more.0);
            sum.1 = sum.1.saturating_add(more.1);
        }
        self.set(sums);
    }

    /// Binds the charge to the value that it was made for.
    pub fn of<T>(self, value: T) -> Charged<T, N> {
        Charged {
            value,
            charge: self,
        }
    }
}

impl<const N: usize> Drop for Charge<N> {
    fn drop(&mut self) {
        self.held.change(&self.amounts, &[]);
    }
}

/// A value and its charge, which ends after the value.
#[derive(Debug)]
pub struct Charged<T, const N: usize = 1> {
    value: T,
    charge: Charge<N>,
}

impl<T, const N: usize> Charged<T, N> {
    /// Separates the value from its charge.
    pub fn split(self) -> (T, Charge<N>) {
        (self.value, self.charge)
    }
}

impl<T, const N: usize> Deref for Charged<T, N> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T, const N: usize> DerefMut for Charged<T, N> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// Part of a sum over all clients for clients that are not operators', by the amount that their user
/// holds.
fn share_of(all: u64, of_user: u64) -> u64 {
    let reserve = all / RESERVE;
    match of_user <= (reserve / NEWCOMERS).max(1) {
        true => all - reserve / 2,
        false => all - reserve,
    }
}

/// Accounting of all users and clients.
#[derive(Debug)]
pub struct Ledger {
    limits: QuotaLimits,
    /// Those that hold something, and some that do no more.
    users: HashMap<u32, Arc<Sums>>,
    all: Arc<Totals>,
}

/// Minimum number of users of which those without accounts are removed.
const FEW_USERS: usize = 64;

impl Ledger {
    /// Creates an empty ledger.
    pub fn new(limits: QuotaLimits) -> Ledger {
        let all = Totals {
            sums: Sums::default(),
            heap_of_one: limits.heap_of_one,
            released_heap: AtomicU64::new(0),
        };
        Ledger {
            limits,
            users: HashMap::new(),
            all: Arc::new(all),
        }
    }

    /// Replaces the limits. Users that hold more than the new ones keep it, and get nothing further.
    pub fn set_limits(&mut self, limits: QuotaLimits) {
        self.limits = limits;
    }

    /// Opens the account of a client without resources.
    pub fn open_account(&mut self, uid: u32, is_operator: bool) -> Account {
        if self.users.len() == self.users.capacity() && self.users.len() >= FEW_USERS {
            self.users.retain(|_, sums| Arc::strong_count(sums) > 1);
        }
        let held = Held {
            uid,
            of_client: Sums::default(),
            of_user: self.users.entry(uid).or_default().clone(),
            of_all: self.all.clone(),
        };
        Account {
            held: Arc::new(held),
            is_operator,
        }
    }

    /// Checks that `amount` more stays within the limits.
    ///
    /// # Errors
    /// The narrowest limit that would be exceeded.
    pub fn check(&self, account: &Account, quota: Quota, amount: u64) -> Result<(), OverQuota> {
        self.check_all(account, &[(quota, amount)])
    }

    fn check_all(&self, account: &Account, amounts: &[(Quota, u64)]) -> Result<(), OverQuota> {
        let totals = self.all.with_heap(amounts);
        // The named quotas first: their limits tell the client more than that of memory.
        let named = amounts.iter().map(|(quota, _)| *quota);
        for quota in named.chain([Quota::Memory]) {
            self.check_total(account, quota, totals[quota as usize])?;
        }
        Ok(())
    }

    fn check_total(&self, account: &Account, quota: Quota, amount: u64) -> Result<(), OverQuota> {
        if amount == 0 {
            return Ok(());
        }
        let kind = quota as usize;
        let held = &account.held;
        let (of_user, of_all) = (held.of_user.get(quota), held.of_all.sums.get(quota));
        let all = self.limits.of_all[kind];
        let of_user_after = of_user.saturating_add(amount);
        let (unreserved, scope) = match account.is_operator || all == UNLIMITED {
            true => (all, QuotaScope::All),
            false => (share_of(all, of_user_after), QuotaScope::Reserve),
        };
        let scopes = [
            (
                account.amount(quota),
                self.limits.of_client[kind],
                QuotaScope::Client,
            ),
            (
                of_user,
                self.limits.of_user[kind],
                QuotaScope::User(held.uid),
            ),
            (of_all, all, QuotaScope::All),
            (of_all, unreserved, scope),
        ];
        for (held, limit, scope) in scopes {
            if held.saturating_add(amount) > limit {
                return Err(OverQuota {
                    quota,
                    limit,
                    scope,
                });
            }
        }
        Ok(())
    }

    /// Number of connections of one worker on one device, including those of others, beyond which a
    /// client gets no further one: the rest is a reserve, as of other sums.
    pub fn most_connections(&self, account: &Account) -> u64 {
        let of_user = account.held.of_user.get(Quota::Connections);
        match account.is_operator {
            true => self.limits.of_stack,
            false => share_of(self.limits.of_stack, of_user),
        }
    }

    /// Charges resources before their allocation: all of them, or none if a limit would be
    /// exceeded.
    ///
    /// # Errors
    /// The exceeded limit.
    pub fn charge<const N: usize>(
        &self,
        account: &Account,
        amounts: [(Quota, u64); N],
    ) -> Result<Charge<N>, OverQuota> {
        self.check_all(account, &amounts)?;
        Ok(account.hold(amounts))
    }

    /// Bytes of heap that all accounts have released since the start.
    pub fn released_heap(&self) -> u64 {
        self.all.released_heap.load(Ordering::Relaxed)
    }

    /// Users that hold resources.
    pub fn users(&self) -> impl Iterator<Item = u32> {
        let holding = self.users.iter().filter(|(_, sums)| !sums.is_empty());
        holding.map(|(uid, _)| *uid)
    }

    /// Resources held by a user.
    pub fn user_to_json(&self, uid: u32) -> Option<serde_json::Value> {
        let held = self.users.get(&uid).filter(|sums| !sums.is_empty())?;
        let rows = Quota::ALL
            .iter()
            .map(|quota| (quota.names().0.to_owned(), held.get(*quota).into()));
        Some(serde_json::Value::Object(rows.collect()))
    }

    /// Usage and limits of a client and of its user, by the names of the keys in `[limits]`.
    pub fn to_json(&self, account: &Account) -> serde_json::Value {
        let rows = Quota::ALL.iter().map(|quota| {
            let kind = *quota as usize;
            let limit = |limit: u64| (limit != UNLIMITED).then_some(limit);
            let row = serde_json::json!({
                "client": account.amount(*quota),
                "client_limit": limit(self.limits.of_client[kind]),
                "user": account.held.of_user.get(*quota),
                "user_limit": limit(self.limits.of_user[kind]),
            });
            (quota.names().0.to_owned(), row)
        });
        serde_json::Value::Object(rows.collect())
    }
}

#[cfg(test)]
pub(in crate::control) mod tests {
    use super::*;
    use crate::config::ByteSize;
    use crate::control::account::heap::heap_of_one;

    const HOST: HostCapacity = HostCapacity {
        memory: 1 << 40,
        hugepages: 100,
        descriptors: 50,
        memory_keys: 40,
        workers: 1,
        nic_arenas: Some(12),
    };

    fn ledger(change: impl FnOnce(&mut LimitsConfig)) -> Ledger {
        let mut limits = LimitsConfig::default();
        change(&mut limits);
        Ledger::new(QuotaLimits::new(&limits, &HOST, heap_of_one))
    }

    /// Account of a user without limits that matter.
    pub fn account() -> Account {
        ledger(|_| ()).open_account(1, false)
    }

    #[test]
    fn one_user_with_many_clients_leaves_the_rest_to_others() {
        let mut ledger = ledger(|limits| limits.descriptors_per_client = 10);
        let mut greedy = vec![];
        let refused = loop {
            let account = ledger.open_account(7, false);
            match ledger.charge(&account, [(Quota::Descriptors, 10)]) {
                Ok(charge) => greedy.push(charge),
                Err(refused) => break refused,
            }
        };
        assert_eq!((greedy.len(), refused.scope), (2, QuotaScope::User(7)));
        assert!(
            refused.to_string().contains("descriptors_per_user"),
            "{refused}"
        );
        let other = ledger.open_account(8, false);
        let _held = ledger.charge(&other, [(Quota::Descriptors, 10)]).unwrap();
        let refused = ledger
            .charge(&other, [(Quota::Descriptors, 1)])
            .unwrap_err();
        assert_eq!(refused.scope, QuotaScope::Client);
        drop(greedy.pop());
        let again = ledger.open_account(7, false);
        assert!(ledger.charge(&again, [(Quota::Descriptors, 10)]).is_ok());
    }

    #[test]
    fn arenas_for_nics_are_counted_against_what_can_be_mapped() {
        let mut ledger = ledger(|_| ());
        let account = ledger.open_account(1, true);
        let _first = ledger.charge(&account, [(Quota::NicArenas, 6)]).unwrap();
        let refused = ledger.charge(&account, [(Quota::NicArenas, 1)]);
        let refused = refused.unwrap_err().to_string();
        assert!(
            refused.starts_with("arenas that NICs read of this client: the limit is 6,")
                && refused.contains("fewer and larger arenas"),
            "{refused}"
        );
        let [same_user, other_user] = [1, 2].map(|uid| ledger.open_account(uid, true));
        let _second = ledger.charge(&same_user, [(Quota::NicArenas, 3)]).unwrap();
        ledger
            .charge(&same_user, [(Quota::NicArenas, 1)])
            .unwrap_err();
        let _third = ledger.charge(&other_user, [(Quota::NicArenas, 3)]).unwrap();
        let unlimited = HostCapacity {
            nic_arenas: None,
            ..HOST
        };
        let limits = QuotaLimits::new(&LimitsConfig::default(), &unlimited, heap_of_one);
        let mut ledger = Ledger::new(limits);
        let account = ledger.open_account(1, false);
        let many = ledger.charge(&account, [(Quota::NicArenas, 1_000_000)]);
        assert!(many.is_ok());
    }

    #[test]
    fn a_sum_over_all_clients_is_one_sum() {
        let mut ledger = ledger(|limits| {
            limits.memory = Some(ByteSize(1000));
            limits.memory_per_client.0 = 500;
        });
        let accounts = [0, 1, 2, 3].map(|uid| ledger.open_account(uid, true));
        let amounts = [400, 400, 200];
        let charge = |(account, amount)| ledger.charge(account, [(Quota::Memory, amount)]).unwrap();
        let mut charges: Vec<_> = accounts.iter().zip(amounts).map(charge).collect();
        let refused = ledger.check(&accounts[3], Quota::Memory, 1).unwrap_err();
        assert_eq!((refused.scope, refused.limit), (QuotaScope::All, 1000));
        charges[0].set([(Quota::Memory, 399)]);
        assert_eq!(ledger.check(&accounts[3], Quota::Memory, 1), Ok(()));
    }

    /// Two users that take all that they may leave the reserve: half of it to users that hold little,
    /// the rest to operators.
    #[test]
    fn a_reserve_is_left_for_operators_and_for_users_that_hold_little() {
        let limits = LimitsConfig {
            clients: 256,
            clients_per_user: 128,
            ..LimitsConfig::default()
        };
        let host = HostCapacity {
            memory: 1 << 40,
            descriptors: 1 << 20,
            ..HOST
        };
        let mut ledger = Ledger::new(QuotaLimits::new(&limits, &host, heap_of_one));
        let mut held = Vec::new();
        let mut connect = |uid: u32, is_operator: bool| {
            let account = ledger.open_account(uid, is_operator);
            held.push(ledger.charge(&account, [(Quota::Clients, 1)])?);
            Ok::<usize, OverQuota>(held.len())
        };
        let mut connected = 0;
        for uid in [1, 2] {
            while let Ok(count) = connect(uid, false) {
                connected = count;
            }
        }
        assert_eq!(connected, 224);
        // 16 of 32 places are for users with at most 2 clients.
        let refused = connect(2, false).unwrap_err();
        assert_eq!(refused.scope, QuotaScope::Reserve);
        assert!(
            refused.to_string().contains("kept for operators"),
            "{refused}"
        );
        for uid in 10..18 {
            for _ in 0..2 {
                connect(uid, false).unwrap();
            }
            connect(uid, false).unwrap_err();
        }
        connect(18, false).unwrap_err();
        for _ in 0..16 {
            connect(0, true).unwrap();
        }
        let refused = connect(0, true).unwrap_err();
        assert_eq!(refused.scope, QuotaScope::All);
    }

    #[test]
    fn heap_is_memory_of_the_client_and_goes_with_its_object() {
        let host = HostCapacity {
            memory: 1 << 40,
            memory_keys: 100,
            ..HOST
        };
        let limits = LimitsConfig::default();
        let mut ledger = Ledger::new(QuotaLimits::new(&limits, &host, heap_of_one));
        let account = ledger.open_account(1, false);
        let amounts = [(Quota::MemoryKeys, 3), (Quota::Heap, 1000)];
        let mut charge = ledger.charge(&account, amounts).unwrap();
        let of_keys = 3 * heap_of_one(Quota::MemoryKeys, 1);
        assert!(of_keys > 0);
        assert_eq!(account.amount(Quota::Heap), of_keys + 1000);
        assert_eq!(account.amount(Quota::Memory), of_keys + 1000);
        charge.set([(Quota::MemoryKeys, 0), (Quota::Heap, 1000)]);
        assert_eq!(account.amount(Quota::Memory), 1000);
        assert_eq!(ledger.released_heap(), of_keys);
        drop(charge);
        assert_eq!(ledger.users().count(), 0);
        let most = limits.memory_per_client.0;
        let refused = ledger.charge(&account, [(Quota::Heap, most + 1)]);
        assert!(
            refused
                .unwrap_err()
                .to_string()
                .contains("memory_per_client")
        );
        assert_eq!(ledger.users().count(), 0);
    }

    #[test]
    fn a_charge_that_is_refused_in_part_charges_nothing() {
        let mut ledger = ledger(|limits| limits.memory = Some(ByteSize(1000)));
        let account = ledger.open_account(1, false);
        let amounts = [(Quota::Memory, 5), (Quota::MemoryKeys, 41)];
        assert!(ledger.charge(&account, amounts).is_err());
        assert_eq!(ledger.users().count(), 0);
        assert_eq!(ledger.check(&account, Quota::Memory, 750), Ok(()));
        assert!(ledger.check(&account, Quota::Memory, 751).is_err());
        assert!(ledger.check(&account, Quota::Memory, u64::MAX).is_err());
    }

    /// Helpers free memory of clients, also after the account's owner is gone.
    #[test]
    fn a_charge_goes_after_its_value_in_any_thread() {
        struct Memory(Account);
        impl Drop for Memory {
            fn drop(&mut self) {
                assert_eq!(
                    self.0.amount(Quota::Memory),
                    7,
                    "released before it is freed"
                );
            }
        }
        let mut ledger = ledger(|_| ());
        let [account, seen] = [(); 2].map(|()| ledger.open_account(1, false));
        let seen = Account {
            held: account.held.clone(),
            ..seen
        };
        let charge = ledger.charge(&account, [(Quota::Memory, 7)]).unwrap();
        let memory = charge.of(Memory(seen));
        drop(account);
        assert!(ledger.user_to_json(1).is_some());
        std::thread::spawn(move || drop(memory)).join().unwrap();
        assert!(ledger.user_to_json(1).is_none());
    }

    #[test]
    fn an_absorbed_charge_goes_with_the_other_one() {
        let mut ledger = ledger(|_| ());
        let account = ledger.open_account(1, false);
        let mut charges = [3, 4].map(|amount| account.hold([(Quota::Listeners, amount)]));
        charges[1].set([(Quota::Listeners, 5)]);
        assert_eq!(account.amount(Quota::Listeners), 3 + 5);
        let [mut first, second] = charges;
        first.absorb(second);
        assert_eq!(account.amount(Quota::Listeners), 3 + 5);
        drop(first);
        assert_eq!(account.amount(Quota::Listeners), 0);
    }

    #[test]
    fn users_that_hold_nothing_are_forgotten() {
        let mut ledger = ledger(|limits| limits.clients = 1 << 20);
        let account = ledger.open_account(0, false);
        let held = ledger.charge(&account, [(Quota::Listeners, 1)]).unwrap();
        drop(account);
        for uid in 1..10_000 {
            drop(ledger.open_account(uid, false));
        }
        assert!(ledger.users.len() < 1000, "{}", ledger.users.len());
        assert_eq!(ledger.users().collect::<Vec<_>>(), [0]);
        drop(held);
        assert_eq!(ledger.users().count(), 0);
        assert!(ledger.all.sums.is_empty());
    }
}
