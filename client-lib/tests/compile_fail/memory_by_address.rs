//! Memory at an address may be borrowed, freed, or anything else.
#![forbid(unsafe_code)]

fn register(pd: &siw::Pd, bytes: &[u8]) -> Result<siw::AppMr, siw::Error> {
    pd.reg_memory(bytes.as_ptr().cast_mut(), bytes.len(), siw::Access::LOCAL_WRITE)
}

fn main() {}
