//! Resource quotas: of each client, of each user (the uid of the process that connected), and of
//! all clients together.
//!
//! A resource is charged to the client's account before it is allocated, and released when it is
//! freed. The account of a departed client is closed only when the last of its memory is freed, so
//! that a reconnect cannot exceed the limits.
//!
//! The daemon's own memory (heap) for a client's objects is part of the client's memory: each unit
//! of a quota is charged with the heap that it needs (`heap`), and whatever varies in
//! length is charged as [`Quota::Heap`].
//!
//! The last eighth of each sum over all clients is a reserve: half of it for users that hold little,
//! and half of it for operators alone. The connections of one worker on one device are such a sum,
//! which the worker checks.

use std::collections::HashMap;

use nix::libc;

use super::refusal::Refusal;
use crate::config::LimitsConfig;

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
            Quota::ProtectionDomains => Ok(()),
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

/// Resources held by one client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    uid: u32,
    is_operator: bool,
    held: Amounts,
}

impl Account {
    /// Creates the account of a client without resources.
    pub fn new(uid: u32) -> Account {
        Account {
            uid,
            is_operator: false,
            held: [0; KINDS],
        }
    }

    /// Gives an operator's client the reserve.
    pub fn with_reserve(self, is_operator: bool) -> Account {
        Account {
            is_operator,
            ..self
        }
    }

    /// Changes whether the client is an operator's.
    pub fn set_operator(&mut self, is_operator: bool) {
        self.is_operator = is_operator;
    }

    /// Returns true if the client is an operator's.
    pub fn is_operator(&self) -> bool {
        self.is_operator
    }

    /// User id of the process that connected.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Amount of a resource held by the client.
    pub fn amount(&self, quota: Quota) -> u64 {
        self.held[quota as usize]
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
    users: HashMap<u32, Amounts>,
    all: Amounts,
    /// Bytes of heap that were released since the start.
    released_heap: u64,
}

impl Ledger {
    /// Creates an empty ledger.
    pub fn new(limits: QuotaLimits) -> Ledger {
        Ledger {
            limits,
            users: HashMap::new(),
            all: [0; KINDS],
            released_heap: 0,
        }
    }

    /// Replaces the limits. Users that hold more than the new ones keep it, and get nothing further.
    pub fn set_limits(&mut self, limits: QuotaLimits) {
        self.limits = limits;
    }

    /// Sums of these amounts, with the heap that they need.
    fn totals(&self, amounts: &[(Quota, u64)]) -> Amounts {
        let mut totals: Amounts = [0; KINDS];
        let mut add = |quota: Quota, amount: u64| {
            let total = &mut totals[quota as usize];
            *total = total.saturating_add(amount);
        };
        for (quota, amount) in amounts {
            add(*quota, *amount);
            let heap = self.limits.heap_of_one[*quota as usize].saturating_mul(*amount);
            add(Quota::Memory, heap);
            if *quota != Quota::Heap {
                add(Quota::Heap, heap);
            }
        }
        totals
    }

    /// Checks that `amount` more stays within the limits.
    ///
    /// # Errors
    /// The narrowest limit that would be exceeded.
    pub fn check(&self, account: &Account, quota: Quota, amount: u64) -> Result<(), OverQuota> {
        self.check_all(account, &[(quota, amount)])
    }

    fn check_all(&self, account: &Account, amounts: &[(Quota, u64)]) -> Result<(), OverQuota> {
        let totals = self.totals(amounts);
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
        let of_user = self.users.get(&account.uid).map_or(0, |held| held[kind]);
        let all = self.limits.of_all[kind];
        let of_user_after = of_user.saturating_add(amount);
        let (unreserved, scope) = match account.is_operator || all == UNLIMITED {
            true => (all, QuotaScope::All),
            false => (share_of(all, of_user_after), QuotaScope::Reserve),
        };
        let scopes = [
            (
                account.held[kind],
                self.limits.of_client[kind],
                QuotaScope::Client,
            ),
            (
                of_user,
                self.limits.of_user[kind],
                QuotaScope::User(account.uid),
            ),
            (self.all[kind], all, QuotaScope::All),
            (self.all[kind], unreserved, scope),
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
        let held = self.users.get(&account.uid);
        let of_user = held.map_or(0, |held| held[Quota::Connections as usize]);
        match account.is_operator {
            true => self.limits.of_stack,
            false => share_of(self.limits.of_stack, of_user),
        }
    }

    /// Adds a resource that exists already, regardless of the limits.
    pub fn add(&mut self, account: &mut Account, quota: Quota, amount: u64) {
        if amount == 0 {
            return;
        }
        let totals = self.totals(&[(quota, amount)]);
        let of_user = self.users.entry(account.uid).or_insert([0; KINDS]);
        for (kind, amount) in totals.into_iter().enumerate() {
            for held in [
                &mut account.held[kind],
                &mut of_user[kind],
                &mut self.all[kind],
            ] {
                *held = held.saturating_add(amount);
            }
        }
    }

    /// Charges resources before their allocation: all of them, or none if a limit would be
    /// exceeded.
    ///
    /// # Errors
    /// The exceeded limit.
    pub fn charge(
        &mut self,
        account: &mut Account,
        amounts: &[(Quota, u64)],
    ) -> Result<(), OverQuota> {
        self.check_all(account, amounts)?;
        for (quota, amount) in amounts {
            self.add(account, *quota, *amount);
        }
        Ok(())
    }

    /// Releases a resource, with the heap that it needed.
    pub fn release(&mut self, account: &mut Account, quota: Quota, amount: u64) {
        let amount = amount.min(account.held[quota as usize]);
        let totals = self.totals(&[(quota, amount)]);
        self.release_totals(account, &totals);
    }

    fn release_totals(&mut self, account: &mut Account, totals: &Amounts) {
        let mut of_user = self.users.get_mut(&account.uid);
        for (kind, total) in totals.iter().enumerate() {
            let amount = (*total).min(account.held[kind]);
            account.held[kind] -= amount;
            self.all[kind] = self.all[kind].saturating_sub(amount);
            if let Some(of_user) = &mut of_user {
                of_user[kind] = of_user[kind].saturating_sub(amount);
            }
        }
        if of_user.is_some_and(|held| held.iter().all(|held| *held == 0)) {
            self.users.remove(&account.uid);
        }
        self.released_heap += totals[Quota::Heap as usize];
    }

    /// Bytes of heap that all accounts have released since the start.
    pub fn released_heap(&self) -> u64 {
        self.released_heap
    }

    /// Releases everything in an account.
    pub fn close(&mut self, mut account: Account) {
        let held = account.held;
        self.release_totals(&mut account, &held);
    }

    /// Users that hold resources.
    pub fn users(&self) -> impl Iterator<Item = u32> {
        self.users.keys().copied()
    }

    /// Resources held by a user.
    pub fn user_to_json(&self, uid: u32) -> Option<serde_json::Value> {
        let held = self.users.get(&uid)?;
        let rows = Quota::ALL.iter().map(|quota| {
            let amount = held[*quota as usize];
            (quota.names().0.to_owned(), amount.into())
        });
        Some(serde_json::Value::Object(rows.collect()))
    }

    /// Usage and limits of a client and of its user, by the names of the keys in `[limits]`.
    pub fn to_json(&self, account: &Account) -> serde_json::Value {
        let of_user = self.users.get(&account.uid).copied().unwrap_or_default();
        let rows = Quota::ALL.iter().map(|quota| {
            let kind = *quota as usize;
            let limit = |limit: u64| (limit != UNLIMITED).then_some(limit);
            let row = serde_json::json!({
                "client": account.held[kind],
                "client_limit": limit(self.limits.of_client[kind]),
                "user": of_user[kind],
                "user_limit": limit(self.limits.of_user[kind]),
            });
            (quota.names().0.to_owned(), row)
        });
        serde_json::Value::Object(rows.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ByteSize;
    use crate::control::heap::heap_of_one;

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

    #[test]
    fn one_user_with_many_clients_leaves_the_rest_to_others() {
        let mut ledger = ledger(|limits| limits.descriptors_per_client = 10);
        let mut greedy = vec![];
        let refused = loop {
            let mut account = Account::new(7);
            match ledger.charge(&mut account, &[(Quota::Descriptors, 10)]) {
                Ok(()) => greedy.push(account),
                Err(refused) => break refused,
            }
        };
        assert_eq!((greedy.len(), refused.scope), (2, QuotaScope::User(7)));
        assert!(
            refused.to_string().contains("descriptors_per_user"),
            "{refused}"
        );
        let mut other = Account::new(8);
        ledger
            .charge(&mut other, &[(Quota::Descriptors, 10)])
            .unwrap();
        let refused = ledger
            .charge(&mut other, &[(Quota::Descriptors, 1)])
            .unwrap_err();
        assert_eq!(refused.scope, QuotaScope::Client);
        ledger.close(greedy.pop().unwrap());
        let mut again = Account::new(7);
        assert_eq!(
            ledger.charge(&mut again, &[(Quota::Descriptors, 10)]),
            Ok(())
        );
    }

    #[test]
    fn arenas_for_nics_are_counted_against_what_can_be_mapped() {
        let mut ledger = ledger(|_| ());
        let operator = |uid| Account::new(uid).with_reserve(true);
        let mut account = operator(1);
        ledger
            .charge(&mut account, &[(Quota::NicArenas, 6)])
            .unwrap();
        let refused = ledger.charge(&mut account, &[(Quota::NicArenas, 1)]);
        let refused = refused.unwrap_err().to_string();
        assert!(
            refused.starts_with("arenas that NICs read of this client: the limit is 6,")
                && refused.contains("fewer and larger arenas"),
            "{refused}"
        );
        let mut more = [1, 2].map(operator);
        let [same_user, other_user] = &mut more;
        ledger.charge(same_user, &[(Quota::NicArenas, 3)]).unwrap();
        ledger
            .charge(same_user, &[(Quota::NicArenas, 1)])
            .unwrap_err();
        ledger.charge(other_user, &[(Quota::NicArenas, 3)]).unwrap();
        let unlimited = HostCapacity {
            nic_arenas: None,
            ..HOST
        };
        let limits = QuotaLimits::new(&LimitsConfig::default(), &unlimited, heap_of_one);
        let mut ledger = Ledger::new(limits);
        let many = [(Quota::NicArenas, 1_000_000)];
        ledger.charge(&mut Account::new(1), &many).unwrap();
    }

    #[test]
    fn a_sum_over_all_clients_is_one_sum() {
        let mut ledger = ledger(|limits| {
            limits.memory = Some(ByteSize(1000));
            limits.memory_per_client.0 = 500;
        });
        let operator = |uid| Account::new(uid).with_reserve(true);
        let mut accounts: Vec<_> = (0..4).map(operator).collect();
        let amounts = [400, 400, 200];
        for (account, amount) in accounts.iter_mut().zip(amounts) {
            ledger.charge(account, &[(Quota::Memory, amount)]).unwrap();
        }
        let refused = ledger.check(&accounts[3], Quota::Memory, 1).unwrap_err();
        assert_eq!((refused.scope, refused.limit), (QuotaScope::All, 1000));
        ledger.release(&mut accounts[0], Quota::Memory, 1);
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
        let mut connect = |ledger: &mut Ledger, mut account: Account| {
            ledger.charge(&mut account, &[(Quota::Clients, 1)])?;
            held.push(account);
            Ok::<(), OverQuota>(())
        };
        for uid in [1, 2] {
            while connect(&mut ledger, Account::new(uid)).is_ok() {}
        }
        assert_eq!(ledger.all[Quota::Clients as usize], 224);
        // 16 of 32 places are for users with at most 2 clients.
        let refused = connect(&mut ledger, Account::new(2)).unwrap_err();
        assert_eq!(refused.scope, QuotaScope::Reserve);
        assert!(
            refused.to_string().contains("kept for operators"),
            "{refused}"
        );
        for uid in 10..18 {
            for _ in 0..2 {
                connect(&mut ledger, Account::new(uid)).unwrap();
            }
            connect(&mut ledger, Account::new(uid)).unwrap_err();
        }
        connect(&mut ledger, Account::new(18)).unwrap_err();
        for _ in 0..16 {
            connect(&mut ledger, Account::new(0).with_reserve(true)).unwrap();
        }
        let refused = connect(&mut ledger, Account::new(0).with_reserve(true)).unwrap_err();
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
        let mut account = Account::new(1);
        let amounts = [(Quota::MemoryKeys, 3), (Quota::Heap, 1000)];
        ledger.charge(&mut account, &amounts).unwrap();
        let of_keys = 3 * heap_of_one(Quota::MemoryKeys, 1);
        assert!(of_keys > 0);
        assert_eq!(account.amount(Quota::Heap), of_keys + 1000);
        assert_eq!(account.amount(Quota::Memory), of_keys + 1000);
        ledger.release(&mut account, Quota::MemoryKeys, 3);
        assert_eq!(account.amount(Quota::Memory), 1000);
        ledger.release(&mut account, Quota::Heap, 5000);
        assert_eq!(account, Account::new(1));
        let most = limits.memory_per_client.0;
        let refused = ledger.charge(&mut account, &[(Quota::Heap, most + 1)]);
        assert!(
            refused
                .unwrap_err()
                .to_string()
                .contains("memory_per_client")
        );
        assert_eq!(account, Account::new(1));
    }

    #[test]
    fn a_charge_that_is_refused_in_part_charges_nothing() {
        let mut ledger = ledger(|limits| limits.memory = Some(ByteSize(1000)));
        let mut account = Account::new(1);
        let amounts = [(Quota::Memory, 5), (Quota::MemoryKeys, 41)];
        assert!(ledger.charge(&mut account, &amounts).is_err());
        assert_eq!(account, Account::new(1));
        assert_eq!(ledger.check(&account, Quota::Memory, 750), Ok(()));
        assert!(ledger.check(&account, Quota::Memory, 751).is_err());
        assert!(ledger.check(&account, Quota::Memory, u64::MAX).is_err());
    }

    #[test]
    fn a_closed_account_leaves_nothing() {
        let mut ledger = ledger(|_| ());
        let mut account = Account::new(1);
        for quota in Quota::ALL {
            ledger.charge(&mut account, &[(quota, 3)]).unwrap();
        }
        ledger.release(&mut account, Quota::Clients, 99);
        assert_eq!(account.amount(Quota::Clients), 0);
        ledger.close(account);
        assert!(ledger.users.is_empty());
        assert_eq!(ledger.all, [0; KINDS]);
    }
}
