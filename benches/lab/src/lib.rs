//! siw-lab judges iWARP targets from outside: a scripted peer with its own codec and its own TCP.

#![forbid(unsafe_code)]

pub mod agent;
pub mod capture;
pub mod case;
pub mod catalogue;
pub mod conformance;
pub mod crc;
pub mod expect;
pub mod impair;
pub mod link;
pub mod mapper;
pub mod mutants;
pub mod mutate;
pub mod record;
pub mod reference;
pub mod report;
pub mod rules;
pub mod script;
pub mod stream;
pub mod suite;
pub mod tcp;
pub mod via;
pub mod wire;
