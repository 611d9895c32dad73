/* Headers of the drop-in libraries: see build.rs. */
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
