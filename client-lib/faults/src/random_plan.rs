//! Random plans, and simpler plans of a plan, for `siwrun --fuzz`.

use crate::kind::{AsyncEvent, CmEvent, Kind, Object, Operation, Side};
use crate::plan::{Aim, Fault, Plan, Trigger};
use crate::random::Random;
use std::time::Duration;

/// Most faults of a random plan.
const MAX_FAULTS: u64 = 3;

/// Errno values of posts and creations.
const ERRNOS: [i32; 3] = [libc::ENOMEM, libc::EAGAIN, libc::EINVAL];
/// Statuses of completions that an RNIC reports.
const STATUSES: [u8; 10] = [1, 2, 4, 6, 8, 9, 10, 11, 12, 13];

fn choose<T: Copy>(random: &mut Random, list: &[T]) -> T {
    list[random.below(list.len() as u64) as usize]
}

fn draw_ms(random: &mut Random, most: u64) -> Duration {
    Duration::from_millis(random.below(most) + 1)
}

fn draw_kind(random: &mut Random) -> Kind {
    let operations = [None, Some(Operation::Send), Some(Operation::Receive)];
    match choose(random, &Kind::NAMES) {
        "post_send" => Kind::PostSend {
            errno: choose(random, &ERRNOS),
        },
        "post_receive" => Kind::PostReceive {
            errno: choose(random, &ERRNOS),
        },
        "completion" => Kind::Completion {
            status: choose(random, &STATUSES),
            operation: choose(random, &operations),
        },
        "delay" => Kind::Delay {
            delay: draw_ms(random, 20),
            jitter: draw_ms(random, 20),
        },
        "reorder" => Kind::Reorder {
            delay: draw_ms(random, 20),
        },
        "withhold" => Kind::Withhold {
            delay: Some(draw_ms(random, 200)),
        },
        "cq_overrun" => Kind::CqOverrun,
        "disconnect" => Kind::Disconnect,
        "create" => Kind::Create {
            object: choose(
                random,
                &[
                    Object::Pd,
                    Object::Mr,
                    Object::Mw,
                    Object::Cq,
                    Object::Qp,
                    Object::Srq,
                    Object::Ah,
                ],
            ),
            errno: choose(random, &ERRNOS),
        },
        "event" => Kind::Event(choose(
            random,
            &[
                AsyncEvent::QpFatal,
                AsyncEvent::DeviceFatal,
                AsyncEvent::PortActive,
                AsyncEvent::PortErr,
                AsyncEvent::GidChange,
            ],
        )),
        "addr_error" => Kind::AddrError {
            errno: libc::EHOSTUNREACH,
        },
        "route_error" => Kind::RouteError {
            errno: libc::ENETUNREACH,
        },
        "connect_error" => Kind::ConnectError {
            errno: libc::ECONNRESET,
        },
        "reject" => Kind::Reject {
            side: choose(random, &[Side::Active, Side::Passive]),
            private_data: Vec::new(),
        },
        "unreachable" => Kind::Unreachable {
            errno: libc::EHOSTUNREACH,
            delay: draw_ms(random, 200),
        },
        "connect_timeout" => Kind::ConnectTimeout {
            delay: draw_ms(random, 500),
        },
        "cm_storm" => Kind::Storm {
            event: choose(random, &[CmEvent::AddrChange, CmEvent::TimewaitExit]),
            burst: random.below(200) as u32 + 1,
        },
        _ => Kind::DeviceRemoval {
            delay: draw_ms(random, 500),
        },
    }
}

fn draw_trigger(random: &mut Random, kind: &Kind) -> Trigger {
    // Calls that set up connections are few.
    let is_frequent = matches!(
        kind.name(),
        "post_send"
            | "post_receive"
            | "completion"
            | "delay"
            | "reorder"
            | "withhold"
            | "cq_overrun"
            | "disconnect"
    );
    // Short programs make few calls, long ones many: small numbers are as likely as large ones.
    let bits = random.below(if is_frequent { 9 } else { 3 });
    let is_event = matches!(kind, Kind::Event(_));
    Trigger {
        after: match is_event {
            true => draw_ms(random, 1000),
            false => Duration::ZERO,
        },
        after_calls: match is_event {
            true => 0,
            false => random.below(1 << bits),
        },
        count: Some(random.below(3) + 1),
        probability: choose(random, &[1.0, 0.5, 0.1]),
        ..Trigger::default()
    }
}

/// The random plan of a seed.
pub fn random_plan(seed: u64) -> Plan {
    let mut random = Random::derive(seed, &[]);
    let count = random.below(MAX_FAULTS) + 1;
    let faults = (0..count).map(|_| {
        let kind = draw_kind(&mut random);
        let trigger = draw_trigger(&mut random, &kind);
        Fault {
            name: None,
            kind,
            aim: Aim::default(),
            trigger,
        }
    });
    Plan {
        // Plans have seeds that their files can hold.
        seed: seed & i64::MAX as u64,
        faults: faults.collect(),
    }
}

/// Plans that are simpler than `plan` by one step, the simplest first: without a fault, or with a fault that
/// happens once, or surely.
pub fn simpler_plans(plan: &Plan) -> Vec<Plan> {
    let mut simpler = Vec::new();
    let count = plan.faults.len();
    if count > 1 {
        for left in 0..count {
            let mut without = plan.clone();
            without.faults.remove(left);
            simpler.push(without);
        }
    }
    for index in 0..count {
        let mut with = |change: fn(&mut Trigger)| {
            let mut changed = plan.clone();
            change(&mut changed.faults[index].trigger);
            if changed != *plan {
                simpler.push(changed);
            }
        };
        with(|trigger| trigger.probability = 1.0);
        with(|trigger| trigger.after_calls = 0);
        with(|trigger| trigger.after_calls /= 2);
        with(|trigger| trigger.count = Some(1));
    }
    simpler
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::Place;
    use std::collections::HashSet;
    use std::path::Path;

    #[test]
    fn random_plans_are_valid_and_have_every_kind() {
        let mut kinds = HashSet::new();
        for seed in 0..500 {
            let plan = random_plan(seed);
            assert_eq!(plan, random_plan(seed));
            let text = plan.to_toml();
            let read = Plan::parse(Path::new("plan.toml"), &text, Place::Program);
            assert_eq!(read.unwrap(), plan, "{text}");
            kinds.extend(plan.faults.iter().map(|fault| fault.kind.name()));
        }
        assert_eq!(kinds.len(), Kind::NAMES.len());
    }

    #[test]
    fn every_plan_leads_to_one_that_has_no_simpler_one() {
        for seed in 0..50 {
            let mut plan = random_plan(seed);
            let mut steps = 0;
            while let Some(simpler) = simpler_plans(&plan).pop() {
                plan = simpler;
                steps += 1;
                assert!(steps < 100, "{plan:?}");
            }
            assert_eq!(plan.faults.len(), 1);
        }
    }
}
