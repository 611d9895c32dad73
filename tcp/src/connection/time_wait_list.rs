//! Connections in TIME-WAIT (RFC 9293 section 3.6) in the order in which they entered it: the oldest
//! is evicted when the stack is full. A doubly linked list in an array indexed by slot, since a
//! connection can leave from any place: by its timer, or for a new connection with its addresses.

const NIL: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct TimeWaitNode {
    older: u32,
    /// The node's own index when it is not in the list.
    newer: u32,
}

pub(crate) struct TimeWaitList {
    nodes: Vec<TimeWaitNode>,
    oldest: u32,
    newest: u32,
}

impl TimeWaitList {
    /// Bytes of a connection's entry.
    pub(crate) const NODE: usize = size_of::<TimeWaitNode>();

    pub(crate) fn new() -> Self {
        TimeWaitList {
            nodes: Vec::new(),
            oldest: NIL,
            newest: NIL,
        }
    }

    fn contains(&self, index: u32) -> bool {
        let node = self.nodes.get(index as usize);
        node.is_some_and(|node| node.newer != index)
    }

    /// Adds the connection as the newest, unless it is in the list already.
    pub(crate) fn push(&mut self, index: u32) {
        if self.contains(index) {
            return;
        }
        for i in self.nodes.len() as u32..=index {
            self.nodes.push(TimeWaitNode {
                older: NIL,
                newer: i,
            });
        }
        self.nodes[index as usize] = TimeWaitNode {
            older: self.newest,
            newer: NIL,
        };
        match self.nodes.get_mut(self.newest as usize) {
            Some(last) => last.newer = index,
            None => self.oldest = index,
        }
        self.newest = index;
    }

    /// Does nothing for one that is not in the list.
    pub(crate) fn remove(&mut self, index: u32) {
        if !self.contains(index) {
            return;
        }
        let TimeWaitNode { older, newer } = self.nodes[index as usize];
        match self.nodes.get_mut(older as usize) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
        match self.nodes.get_mut(newer as usize) {
            Some(node) => node.older = older,
            None => self.newest = older,
        }
        self.nodes[index as usize].newer = index;
    }

    pub(crate) fn pop_oldest(&mut self) -> Option<u32> {
        let index = self.oldest;
        self.remove(index);
        (index != NIL).then_some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_come_first_whoever_left_in_between() {
        let mut list = TimeWaitList::new();
        let mut model: Vec<u32> = Vec::new();
        let mut x = 7u32;
        for _ in 0..20_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let index = (x >> 8) % 64;
            match x >> 30 {
                0 => assert_eq!(
                    list.pop_oldest(),
                    (!model.is_empty()).then(|| model.remove(0))
                ),
                1 => {
                    list.remove(index);
                    model.retain(|i| *i != index);
                }
                _ => {
                    list.push(index);
                    if !model.contains(&index) {
                        model.push(index);
                    }
                }
            }
        }
        while let Some(i) = list.pop_oldest() {
            assert_eq!(i, model.remove(0));
        }
        assert!(model.is_empty());
    }
}
