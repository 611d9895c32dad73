//! Connections that end by themselves and are evicted when the stack is full, each kind in order of
//! arrival: those in TIME-WAIT (RFC 9293 section 3.6), and orphans, whose owner released them
//! before the peer had acknowledged everything. Doubly linked lists in an array indexed by slot,
//! because a connection can be removed from any position: by its timer, or by a new connection with
//! the same addresses. A connection is in at most one of them.

/// Selects a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    TimeWait,
    Orphan,
}

impl Closing {
    /// The link value that marks the end of the list. Slot numbers are far below.
    const fn end(self) -> u32 {
        match self {
            Closing::TimeWait => u32::MAX,
            Closing::Orphan => u32::MAX - 1,
        }
    }

    /// Returns the list that ends with this link value.
    fn ending_with(link: u32) -> Closing {
        if link == Closing::TimeWait.end() {
            Closing::TimeWait
        } else {
            Closing::Orphan
        }
    }
}

#[derive(Clone, Copy)]
struct ClosingNode {
    /// The slot of the next older node, or the end of its list.
    older: u32,
    /// The slot of the next newer node, the end of its list, or the node's own index if it is in no
    /// list.
    newer: u32,
}

/// The oldest and the newest connection of a list.
struct ListEnds {
    oldest: u32,
    newest: u32,
}

pub(crate) struct ClosingLists {
    nodes: Vec<ClosingNode>,
    ends: [ListEnds; 2],
}

impl ClosingLists {
    /// Size of a connection's entry in bytes.
    pub(crate) const NODE: usize = size_of::<ClosingNode>();

    pub(crate) fn new() -> Self {
        ClosingLists {
            nodes: Vec::new(),
            ends: [Closing::TimeWait, Closing::Orphan].map(|list| ListEnds {
                oldest: list.end(),
                newest: list.end(),
            }),
        }
    }

    fn contains(&self, index: u32) -> bool {
        let node = self.nodes.get(index as usize);
        node.is_some_and(|node| node.newer != index)
    }

    /// Adds the connection to a list as its newest, unless it is already in one.
    pub(crate) fn push(&mut self, list: Closing, index: u32) {
        if self.contains(index) {
            return;
        }
        for i in self.nodes.len() as u32..=index {
            self.nodes.push(ClosingNode {
                older: list.end(),
                newer: i,
            });
        }
        let ends = &mut self.ends[list as usize];
        self.nodes[index as usize] = ClosingNode {
            older: ends.newest,
            newer: list.end(),
        };
        match self.nodes.get_mut(ends.newest as usize) {
            Some(last) => last.newer = index,
            None => ends.oldest = index,
        }
        ends.newest = index;
    }

    /// Removes the connection from its list, if it is in one.
    pub(crate) fn remove(&mut self, index: u32) {
        if !self.contains(index) {
            return;
        }
        let ClosingNode { older, newer } = self.nodes[index as usize];
        match self.nodes.get_mut(older as usize) {
            Some(node) => node.newer = newer,
            None => self.ends[Closing::ending_with(older) as usize].oldest = newer,
        }
        match self.nodes.get_mut(newer as usize) {
            Some(node) => node.older = older,
            None => self.ends[Closing::ending_with(newer) as usize].newest = older,
        }
        self.nodes[index as usize].newer = index;
    }

    pub(crate) fn oldest(&self, list: Closing) -> Option<u32> {
        let index = self.ends[list as usize].oldest;
        (index != list.end()).then_some(index)
    }

    pub(crate) fn pop_oldest(&mut self, list: Closing) -> Option<u32> {
        let index = self.oldest(list)?;
        self.remove(index);
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_come_first_whoever_left_in_between() {
        let mut lists = ClosingLists::new();
        let mut models: [Vec<u32>; 2] = [Vec::new(), Vec::new()];
        let kinds = [Closing::TimeWait, Closing::Orphan];
        let mut x = 7u32;
        for _ in 0..40_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let index = (x >> 8) % 64;
            let kind = kinds[(x >> 20) as usize & 1];
            let model = &mut models[kind as usize];
            match x >> 30 {
                0 => assert_eq!(
                    lists.pop_oldest(kind),
                    (!model.is_empty()).then(|| model.remove(0))
                ),
                1 => {
                    lists.remove(index);
                    models.iter_mut().for_each(|m| m.retain(|i| *i != index));
                }
                _ => {
                    lists.push(kind, index);
                    if !models.iter().any(|model| model.contains(&index)) {
                        models[kind as usize].push(index);
                    }
                }
            }
        }
        for kind in kinds {
            while let Some(i) = lists.pop_oldest(kind) {
                assert_eq!(i, models[kind as usize].remove(0));
            }
            assert!(models[kind as usize].is_empty());
        }
    }
}
