//! librdmacm: rdma_cm and rsockets.
