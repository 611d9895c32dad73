//! A region that is forgotten would outlive the borrow of its buffer.
#![forbid(unsafe_code)]

fn main() {
    let context = siw::Context::open(None).unwrap();
    let pd = context.alloc_pd().unwrap();
    let mut bytes = [0u8; 64];
    let region = pd.register(&mut bytes[..], siw::Access::LOCAL_WRITE).unwrap();
    std::mem::forget(region);
    println!("{bytes:?}");
}
