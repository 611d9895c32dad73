//! Gives the shared library its name, which is also the version of its functions: programs that are
//! linked to it need this version of its ABI.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libsiw.so.0");
    // rustc passes a version script of its own, with which no other linker combines further versions.
    println!("cargo:rustc-cdylib-link-arg=-fuse-ld=bfd");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--default-symver");
}
