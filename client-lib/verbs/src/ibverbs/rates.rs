//! Rates of links (ibv_rate_to_mbps(3), ibv_rate_to_mult(3)): numbers of the InfiniBand
//! specification that programs convert; iWARP does not use them.

use crate::abi::ibv_rate;
use std::ffi::c_int;

/// Enumerator, multiple of 2.5 Gb/s if defined, rate in Mb/s.
const RATES: [(ibv_rate, Option<c_int>, c_int); 23] = [
    (2, Some(1), 2_500),
    (5, Some(2), 5_000),
    (3, Some(4), 10_000),
    (6, Some(8), 20_000),
    (4, Some(12), 30_000),
    (7, Some(16), 40_000),
    (8, Some(24), 60_000),
    (9, Some(32), 80_000),
    (10, Some(48), 120_000),
    (11, None, 14_062),
    (12, None, 56_250),
    (13, None, 112_500),
    (14, None, 168_750),
    (15, None, 25_781),
    (16, None, 103_125),
    (17, None, 206_250),
    (18, None, 309_375),
    (19, Some(11), 28_125),
    (20, Some(20), 53_125),
    (21, Some(160), 425_000),
    (22, Some(240), 637_500),
    (23, Some(320), 850_000),
    (24, Some(480), 1_275_000),
];

const RATE_MAX: ibv_rate = 0;

/// ibv_rate_to_mult(3)
pub unsafe fn to_mult(rate: ibv_rate) -> c_int {
    let found = RATES.iter().find(|(number, ..)| *number == rate);
    found.and_then(|(_, mult, _)| *mult).unwrap_or(-1)
}

/// mult_to_ibv_rate(3)
pub unsafe fn from_mult(mult: c_int) -> ibv_rate {
    let found = RATES.iter().find(|(_, known, _)| *known == Some(mult));
    found.map_or(RATE_MAX, |(number, ..)| *number)
}

/// ibv_rate_to_mbps(3)
pub unsafe fn to_mbps(rate: ibv_rate) -> c_int {
    let found = RATES.iter().find(|(number, ..)| *number == rate);
    found.map_or(-1, |(_, _, mbps)| *mbps)
}

/// mbps_to_ibv_rate(3)
pub unsafe fn from_mbps(mbps: c_int) -> ibv_rate {
    let found = RATES.iter().find(|(_, _, known)| *known == mbps);
    found.map_or(RATE_MAX, |(number, ..)| *number)
}
