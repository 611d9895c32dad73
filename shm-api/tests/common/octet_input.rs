//! Reads numbers from the octets of a fuzzer.

/// Takes values from the front of the input; returns zeros after its end.
pub struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    pub fn u8(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    pub fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }

    /// Small, near the ends of its type, or anything.
    pub fn odd(&mut self) -> u64 {
        let value = u64::from(self.u16());
        match self.u8() % 4 {
            0 => value,
            1 => value << 12,
            2 => u64::MAX - value,
            _ => value << 48 | u64::from(self.u32()),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
