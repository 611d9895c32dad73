/* What the drop-in libraries implement: see build.rs. */
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
