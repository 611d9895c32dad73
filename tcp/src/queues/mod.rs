//! The queues of a connection: records to be sent and segments to be acknowledged (`send_buffer`),
//! bytes to be read (`receive_queue`), and segments beyond a hole (`out_of_order_queue`).

pub(crate) mod out_of_order_queue;
pub(crate) mod receive_queue;
pub(crate) mod send_buffer;
