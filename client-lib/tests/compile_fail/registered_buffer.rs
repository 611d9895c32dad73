//! The buffer belongs to the region until it is deregistered.
#![forbid(unsafe_code)]

fn main() {
    let context = siw::Context::open(None).unwrap();
    let pd = context.alloc_pd().unwrap();
    let bytes = vec![0u8; 64];
    let region = pd.register(bytes, siw::Access::LOCAL_WRITE).unwrap();
    println!("{}", bytes[0]);
    println!("{}", region[0]);
}
