//! Gives the shared library its name: programs that are linked to it load this version of its ABI.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libsiw.so.0");
}
