//! A long text in pieces of one size: it grows without moving what it has.

/// Bytes of a piece: less than what the allocator takes from the system for itself.
const PIECE: usize = 16 << 10;

/// A text that may reach megabytes. A `String` of that length would be moved as a whole when it grows,
/// which takes milliseconds.
#[derive(Debug, Default)]
pub(in crate::control) struct PiecedText {
    /// All full but the last one.
    pieces: Vec<Vec<u8>>,
}

impl PiecedText {
    /// Appends `text`.
    pub fn push_str(&mut self, text: &str) {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            if self.pieces.last().is_none_or(|last| last.len() == PIECE) {
                self.pieces.push(Vec::with_capacity(PIECE));
            }
            if let Some(last) = self.pieces.last_mut() {
                let (now, later) = rest.split_at(rest.len().min(PIECE - last.len()));
                last.extend_from_slice(now);
                rest = later;
            }
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        let last = self.pieces.last();
        last.map_or(0, |last| (self.pieces.len() - 1) * PIECE + last.len())
    }

    /// The last byte.
    pub fn last_byte(&self) -> Option<u8> {
        self.pieces.last()?.last().copied()
    }

    /// Copies the bytes from `offset` on into `part`; returns their number.
    pub fn copy_from(&self, offset: usize, part: &mut [u8]) -> usize {
        let mut copied = 0;
        while copied < part.len() {
            let at = offset + copied;
            let piece = self.pieces.get(at / PIECE);
            let rest = piece.and_then(|piece| piece.get(at % PIECE..));
            let Some(rest) = rest.filter(|rest| !rest.is_empty()) else {
                break;
            };
            let len = rest.len().min(part.len() - copied);
            part[copied..copied + len].copy_from_slice(&rest[..len]);
            copied += len;
        }
        copied
    }

    /// Bytes of heap.
    pub fn heap_bytes(&self) -> usize {
        self.pieces.len() * PIECE + self.pieces.capacity() * size_of::<Vec<u8>>()
    }
}

impl From<&str> for PiecedText {
    fn from(text: &str) -> PiecedText {
        let mut pieced = PiecedText::default();
        pieced.push_str(text);
        pieced
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_long_text_is_read() {
        let text: String = (0..20_000).map(|number| format!("{number},")).collect();
        let mut pieced = PiecedText::default();
        for part in text.as_bytes().chunks(77) {
            pieced.push_str(std::str::from_utf8(part).unwrap());
        }
        assert_eq!(pieced.len(), text.len());
        assert_eq!(pieced.last_byte(), Some(b','));
        assert!(pieced.heap_bytes() < text.len() + 2 * PIECE);
        let mut read = Vec::new();
        let mut part = [0; 4096];
        loop {
            match pieced.copy_from(read.len(), &mut part) {
                0 => break,
                len => read.extend_from_slice(&part[..len]),
            }
        }
        assert!(read == text.as_bytes());
    }

    #[test]
    fn nothing_follows_the_end() {
        assert_eq!(PiecedText::default().len(), 0);
        assert_eq!(PiecedText::default().last_byte(), None);
        let full = PiecedText::from("x".repeat(PIECE).as_str());
        for offset in [PIECE, PIECE + 1, 9 * PIECE, usize::MAX / 2] {
            assert_eq!(full.copy_from(offset, &mut [0; 8]), 0);
        }
        assert_eq!(full.copy_from(PIECE - 3, &mut [0; 8]), 3);
    }
}
