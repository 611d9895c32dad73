//! What waits in a connection: to be sent or acknowledged, to be read, for a hole to be filled.

pub(crate) mod out_of_order_queue;
pub(crate) mod receive_queue;
pub(crate) mod send_queue;
