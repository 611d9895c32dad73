//! Provisional stand-ins for the types of siw-shm.
#![allow(missing_docs, dead_code)]
pub struct Reader;
pub struct Mr;
#[derive(Clone)]
pub struct SendWqe;
#[derive(Clone)]
pub struct RecvWqe;
pub struct Cqe;
pub mod crc {
    #[inline]
    pub fn append(sum: u32, b: &[u8]) -> u32 {
        crc32c::crc32c_append(sum, b)
    }
}
