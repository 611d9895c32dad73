//! A peer could write a value that is no `bool`.
#![forbid(unsafe_code)]

fn main() {
    let context = siw::Context::open(None).unwrap();
    let pd = context.alloc_pd().unwrap();
    let _ = pd.register(vec![true; 64], siw::Access::LOCAL_WRITE);
}
