//! The bodies of the fuzz targets (`tcp/fuzz`) on random input instead of the coverage-guided input of
//! the fuzzer, which needs nightly.

use siw_tcp_sim::Rng;

fn random(rng: &mut Rng, max: u64) -> Vec<u8> {
    (0..rng.below(max)).map(|_| rng.next_u64() as u8).collect()
}

fn on(body: fn(&[u8]), seeds: u64, max: u64) {
    for seed in 0..seeds {
        let data = random(&mut Rng::new(seed), max);
        let result = std::panic::catch_unwind(|| body(&data));
        if let Err(events) = result {
            println!("seed {seed}, input {data:?}");
            std::panic::resume_unwind(events);
        }
    }
}

#[test]
fn any_frames_leave_the_stack_whole_and_bounded() {
    on(crate::common::fuzz::frames, 3_000, 1_000);
}

#[test]
fn any_segments_keep_sequence_space_and_memory() {
    on(crate::common::fuzz::engine, 6_000, 600);
}
