/* siw.h - RDMA verbs for applications of siwd (C API of libsiw).
 *
 * Calls return 0 or a positive errno unless documented otherwise; siw_last_error()
 * then has the reason as text. All objects may be used from several threads.
 * Destroy objects before those that they were created from; destroy functions
 * accept NULL. An object must not be used by any thread, also not by one that waits in a call, when
 * it is destroyed: end its calls first (use a timeout, or wait for its descriptor and one of your own
 * with poll(2)). Objects of another siw_open() are refused with EINVAL.
 * A libsiw that is built with debug assertions (cargo build without --release) also refuses objects
 * that were destroyed or are of another type, and aborts the program at a second destruction; others
 * do not check that.
 *
 * Signal handlers do not end calls that wait; each has a timeout. No call is a cancellation point: a
 * cancellation of a thread in one stays pending until it returns (pthread_cancel(3)).
 *
 * Names and meanings follow libibverbs and librdmacm: see ibv_post_send(3),
 * ibv_poll_cq(3), ibv_req_notify_cq(3), rdma_cm(7).
 */
#ifndef SIW_H
#define SIW_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

/* Version of this header; siw_version() is that of the library. */
#define SIW_VERSION_MAJOR 0
#define SIW_VERSION_MINOR 2
#define SIW_VERSION_PATCH 0
#define SIW_VERSION (SIW_VERSION_MAJOR << 16 | SIW_VERSION_MINOR << 8 | SIW_VERSION_PATCH)

/* Unions without a name are older than C11 in GNU C and Clang. */
#ifdef __GNUC__
#define SIW_UNNAMED __extension__
#else
#define SIW_UNNAMED
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct siw_context siw_context;   /* connection to the daemon */
typedef struct siw_pd siw_pd;             /* protection domain */
typedef struct siw_arena siw_arena;       /* memory whose parts can be registered */
typedef struct siw_mr siw_mr;             /* registered memory */
typedef struct siw_fast_mr siw_fast_mr;   /* pages registered by work requests */
typedef struct siw_mw siw_mw;             /* memory window */
typedef struct siw_channel siw_channel;   /* completion channel */
typedef struct siw_cq siw_cq;             /* completion queue */
typedef struct siw_srq siw_srq;           /* shared receive queue */
typedef struct siw_qp siw_qp;             /* queue pair */
typedef struct siw_ah siw_ah;             /* address handle, the destination of datagrams */
typedef struct siw_cm_channel siw_cm_channel; /* connection events */
typedef struct siw_listener siw_listener;
typedef struct siw_request siw_request;   /* connection request of a peer */
typedef struct siw_search siw_search;     /* search for a datagram service */
typedef struct siw_service_request siw_service_request; /* request of a peer to a datagram service */

/* Access of memory regions; local reads are always allowed. */
enum {
	SIW_ACCESS_LOCAL_WRITE = 1,
	SIW_ACCESS_REMOTE_WRITE = 2,
	SIW_ACCESS_REMOTE_READ = 4,
	SIW_ACCESS_REMOTE_ATOMIC = 8,
	SIW_ACCESS_MW_BIND = 16,
	SIW_ACCESS_ZERO_BASED = 32,
	SIW_ACCESS_RELAXED_ORDERING = 1 << 20
};

enum siw_opcode {
	SIW_WR_RDMA_WRITE = 1,
	SIW_WR_RDMA_READ = 2,
	SIW_WR_SEND = 3,
	SIW_WR_SEND_WITH_INV = 4,
	SIW_WR_RDMA_WRITE_WITH_IMM = 5,
	SIW_WR_SEND_WITH_IMM = 6,
	SIW_WR_ATOMIC_FETCH_AND_ADD = 7,
	SIW_WR_ATOMIC_CMP_AND_SWP = 8,
	SIW_WR_LOCAL_INV = 9,
	SIW_WR_REG_MR = 10,
	SIW_WR_BIND_MW = 11,
	SIW_WR_RDMA_READ_WITH_INV = 12
};

/* Flags of send work requests. */
enum {
	SIW_SEND_SIGNALED = 1,
	SIW_SEND_SOLICITED = 2,
	SIW_SEND_FENCE = 4,
	SIW_SEND_INLINE = 8, /* data is copied from addr during the call; lkey unused */
	SIW_SEND_TO_AH = 256 /* a datagram: SEND or SEND_WITH_IMM to siw_send_wr.ud */
};

enum siw_wc_opcode {
	SIW_WC_SEND = 0,
	SIW_WC_RDMA_WRITE = 1,
	SIW_WC_RDMA_READ = 2,
	SIW_WC_COMP_SWAP = 3,
	SIW_WC_FETCH_ADD = 4,
	SIW_WC_BIND_MW = 5,
	SIW_WC_LOCAL_INV = 6, /* also for REG_MR */
	SIW_WC_RECV = 128,
	SIW_WC_RECV_RDMA_WITH_IMM = 129
};

enum siw_wc_status {
	SIW_WC_SUCCESS = 0,
	SIW_WC_LOC_LEN_ERR = 1,
	SIW_WC_LOC_QP_OP_ERR = 2,
	SIW_WC_LOC_PROT_ERR = 4,
	SIW_WC_WR_FLUSH_ERR = 5,
	SIW_WC_MW_BIND_ERR = 6, /* BIND_MW or REG_MR refused */
	SIW_WC_BAD_RESP_ERR = 7,
	SIW_WC_LOC_ACCESS_ERR = 8,
	SIW_WC_REM_INV_REQ_ERR = 9,
	SIW_WC_REM_ACCESS_ERR = 10,
	SIW_WC_REM_OP_ERR = 11,
	SIW_WC_FATAL_ERR = 19,
	SIW_WC_GENERAL_ERR = 21
};

enum {
	SIW_WC_GRH = 1, /* a datagram: the buffer begins with SIW_GRH_LEN bytes */
	SIW_WC_WITH_IMM = 2,
	SIW_WC_WITH_INV = 8,
	SIW_WC_SOLICITED = 0x100,
	SIW_WC_IPV4 = 0x200 /* a datagram that came by IPv4 */
};

enum siw_qp_state {
	SIW_QPS_IDLE = 0,
	SIW_QPS_RTR = 1,
	SIW_QPS_RTS = 2,
	SIW_QPS_CLOSING = 3,
	SIW_QPS_TERMINATE = 4,
	SIW_QPS_ERROR = 5,
	SIW_QPS_SQD = 6 /* RTS, but no further work request is started */
};

struct siw_sge {
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;
};

/* Binding of a memory window; length 0 unbinds it (ibv_bind_mw(3)). */
struct siw_mw_bind {
	uint64_t addr; /* in the region */
	uint64_t length;
	uint32_t lkey; /* of a region with SIW_ACCESS_MW_BIND */
	uint32_t access; /* SIW_ACCESS_REMOTE_*, SIW_ACCESS_ZERO_BASED */
};

/* Operates on the 8-byte aligned word at remote_addr; the old value is placed in sg_list. Zero
 * masks: the plain operation (RFC 7306 section 5.2). */
struct siw_atomic {
	uint64_t compare_add; /* FETCH_AND_ADD: the addend */
	uint64_t swap;
	uint64_t compare_add_mask;
	uint64_t swap_mask;
};

struct siw_bind_mw_wr {
	siw_mw *mw;
	struct siw_mw_bind info;
	uint32_t rkey; /* new key: siw_inc_rkey(siw_mw_rkey(mw)) */
	uint32_t reserved;
};

/* Registers the ranges of siw_map_fast_mr, addressed from iova on. */
struct siw_reg_mr_wr {
	siw_fast_mr *mr;
	uint64_t iova;
	uint32_t key; /* new key: siw_inc_rkey(siw_fast_mr_key(mr)) */
	uint32_t access;
};

/* Destination of a datagram (SIW_SEND_TO_AH). */
struct siw_ud {
	const siw_ah *ah;
	uint32_t remote_qpn;  /* SIW_MULTICAST_QPN with a handle of a group */
	uint32_t remote_qkey; /* with its highest bit set: the Q_Key of the sending queue pair */
};

struct siw_send_wr {
	uint64_t wr_id;
	const struct siw_sge *sg_list;
	uint32_t num_sge;
	uint32_t opcode;      /* enum siw_opcode */
	uint32_t flags;       /* SIW_SEND_* */
	SIW_UNNAMED union {
		uint32_t inv_rkey; /* SEND_WITH_INV: a key of the peer; LOCAL_INV: of this side */
		uint32_t imm_data; /* RDMA_WRITE_WITH_IMM, SEND_WITH_IMM */
	};
	uint64_t remote_addr; /* RDMA_WRITE*, RDMA_READ*, ATOMIC_* */
	uint32_t rkey;
	uint32_t reserved;
	SIW_UNNAMED union {
		struct siw_atomic atomic;
		struct siw_bind_mw_wr bind_mw;
		struct siw_reg_mr_wr reg_mr;
		struct siw_ud ud;
	};
};

struct siw_recv_wr {
	uint64_t wr_id;
	const struct siw_sge *sg_list;
	uint32_t num_sge;
	uint32_t reserved;
};

struct siw_wc {
	uint64_t wr_id;
	uint32_t status;  /* enum siw_wc_status */
	uint32_t opcode;  /* enum siw_wc_opcode */
	uint32_t qp_num;
	uint32_t byte_len;
	uint32_t flags;
	SIW_UNNAMED union {
		uint32_t invalidated_rkey; /* SIW_WC_WITH_INV */
		uint32_t imm_data;         /* SIW_WC_WITH_IMM */
	};
	uint32_t vendor_err;
	uint32_t src_qp; /* SIW_WC_GRH: the sending queue pair */
};

struct siw_qp_init_attr {
	uint32_t size; /* sizeof(struct siw_qp_init_attr) */
	uint32_t sq_sig_all;
	siw_cq *send_cq;
	siw_cq *recv_cq;
	uint32_t max_send_wr;
	uint32_t max_recv_wr;
	uint32_t max_send_sge;
	uint32_t max_recv_sge;
	uint32_t max_inline_data;
	uint32_t reserved;
	siw_srq *srq; /* NULL: a receive queue of its own, with max_recv_wr and max_recv_sge */
};

/* ibv_query_qp(3) */
struct siw_qp_attr {
	uint32_t state;       /* enum siw_qp_state, from the daemon */
	uint32_t verbs_state; /* enum ibv_qp_state: INIT 1, RTR 2, RTS 3, SQD 4, SQE 5, ERR 6 */
	uint32_t sq_draining; /* in SQD: 1 until all started requests have completed */
	uint32_t mulpdu;      /* largest ULPDU of an FPDU, 0 without a connection */
	uint32_t initiator_depth;
	uint32_t responder_resources;
	uint32_t max_send_wr;
	uint32_t max_recv_wr;
	uint32_t max_send_sge;
	uint32_t max_recv_sge;
	uint32_t max_inline_data;
	uint32_t reserved;
	struct sockaddr_storage local;
	struct sockaddr_storage peer;
};

/* Zero-initialise, then set size, for every call. */
struct siw_srq_attr {
	uint32_t size;      /* sizeof(struct siw_srq_attr) */
	uint32_t max_wr;    /* requests that no queue pair has taken yet */
	uint32_t max_sge;
	uint32_t srq_limit; /* one SRQ_LIMIT_REACHED event below it; 0: not armed */
	uint32_t posted;    /* siw_query_srq */
	/* siw_create_srq: maximum number of requests that one queue pair may hold, being filled
	 * or completed and not polled; a queue pair that needs more ends for lack of a buffer
	 * (RFC 5042 section 6.4.3.1). 0: no limit. */
	uint32_t max_share;
};

/* Mask bits of siw_modify_srq. */
enum { SIW_SRQ_MAX_WR = 1, SIW_SRQ_LIMIT = 2 };

/* Limits of this client; if devices differ, the larger value. */
struct siw_limits {
	uint32_t max_qp;
	uint32_t max_qp_wr;
	uint32_t max_sge;
	uint32_t max_sge_rd;
	uint32_t max_inline_data;
	uint32_t max_cq;
	uint32_t max_cqe;
	uint32_t max_mr;
	uint32_t max_pd;
	uint32_t max_srq;
	uint32_t max_srq_wr;
	uint32_t max_srq_sge;
	uint32_t max_initiator_depth;
	uint32_t max_responder_resources;
	uint32_t max_private_data;
	uint32_t max_mw; /* windows and regions together: max_mr */
	uint32_t max_fast_pages;
	uint32_t reserved;
	uint64_t max_msg;
	uint64_t max_mr_size;
};

/* Capabilities beyond WRITE, READ and SEND. */
enum {
	SIW_CAP_IMMEDIATE = 1,
	SIW_CAP_ATOMIC = 2,
	SIW_CAP_MARKERS = 4,
	SIW_CAP_LOCAL_INV = 8,
	SIW_CAP_MEM_WINDOW = 16,
	SIW_CAP_FAST_REG = 32
};

struct siw_device_attr {
	char name[32];
	uint8_t mac[8]; /* 6 used */
	uint32_t index;
	uint32_t mtu;
	uint32_t active;
	uint32_t num_addrs;
	uint64_t capabilities; /* SIW_CAP_* */
	struct sockaddr_storage addrs[8];
};

/* SIW_ANY_DEVICE routes by address. */
#define SIW_ANY_DEVICE UINT32_MAX

/* Zero-initialise, then set size and the fields that are needed. */
struct siw_conn_param {
	uint32_t size; /* sizeof(struct siw_conn_param) */
	uint32_t private_data_len;
	const void *private_data; /* up to 512 bytes */
	uint32_t initiator_depth;     /* ORD; 0: 16 */
	uint32_t responder_resources; /* IRD; 0: 16 */
	uint32_t timeout_ms;          /* connect; 0: the daemon's default */
	int32_t crc;     /* connect: 0: the device's setting, 1: on, -1: off (EPERM if it has crc = "required") */
	int32_t mpa_rev; /* 0: the device's setting, 1, 2 */
	uint8_t refusals; /* connect: number of retries while the peer refuses */
	uint8_t wait_for_receives; /* 1: SENDs of the peer wait for a receive request */
	uint16_t reserved;
	uint32_t source_len; /* size of source */
	const struct sockaddr *source; /* connect: local address; NULL: the daemon chooses */
	uint64_t cookie; /* returned in the connection's events */
};

enum siw_cm_event_type {
	SIW_CM_CONNECT_REQUEST = 1,
	SIW_CM_ESTABLISHED = 2,
	SIW_CM_REJECTED = 3,
	SIW_CM_UNREACHABLE = 4,
	SIW_CM_CONNECT_ERROR = 5,
	SIW_CM_DISCONNECTED = 6,
	SIW_CM_REQUEST_CANCELLED = 7,
	SIW_CM_DEVICE_REMOVAL = 8
};

struct siw_cm_event {
	uint32_t type; /* enum siw_cm_event_type */
	int32_t err;   /* errno, 0 for success */
	uint64_t cookie;
	siw_request *request; /* CONNECT_REQUEST: pass to siw_accept or siw_reject */
	uint32_t qp_num;
	uint32_t request_id;  /* also in REQUEST_CANCELLED */
	uint32_t device;
	uint32_t initiator_depth;
	uint32_t responder_resources;
	uint32_t crc;
	uint32_t mpa_rev;
	uint32_t private_data_len;
	struct sockaddr_storage local;
	struct sockaddr_storage peer;
	char reason[128];
	uint8_t private_data[512];
};

enum siw_async_event_type {
	SIW_EVENT_CQ_ERR = 0,
	SIW_EVENT_QP_FATAL = 1,
	SIW_EVENT_QP_REQ_ERR = 2,
	SIW_EVENT_QP_ACCESS_ERR = 3,
	SIW_EVENT_SQ_DRAINED = 5,
	SIW_EVENT_DEVICE_FATAL = 8,
	SIW_EVENT_PORT_ACTIVE = 9,
	SIW_EVENT_PORT_ERR = 10,
	SIW_EVENT_SRQ_LIMIT_REACHED = 15,
	SIW_EVENT_QP_LAST_WQE_REACHED = 16,
	SIW_EVENT_GID_CHANGE = 18 /* the addresses of a device have changed */
};

struct siw_async_event {
	uint32_t type; /* enum siw_async_event_type, or a kind unknown to this header */
	uint32_t object; /* QP, CQ or SRQ number, or device index */
	char reason[128];
};

/* SIW_VERSION of the library in use. */
uint32_t siw_version(void);
/* Reason of the last failed call of the calling thread, as text; never NULL. */
const char *siw_last_error(void);
const char *siw_wc_status_str(uint32_t status);

/* Connects to the daemon. socket_path NULL: $SIWD_SOCKET, else $XDG_RUNTIME_DIR/siwd/siwd.sock if an
 * ordinary user has that socket, else /run/siwd/siwd.sock. */
int siw_open(const char *socket_path, siw_context **out);
void siw_close(siw_context *ctx);
/* Sets the time within which the daemon has to answer a call, 60000 ms by default. A call that takes
 * longer fails with ETIMEDOUT and ends the context: further calls return ENODEV at once, and the
 * daemon frees the objects of this client. */
int siw_set_call_timeout(siw_context *ctx, uint32_t timeout_ms);
/* Waits until the daemon has freed the objects that were destroyed so far: destroy functions do not
 * wait. */
int siw_await_releases(siw_context *ctx);
/* 1 while the daemon runs, 0 after it has ended. */
int siw_is_alive(siw_context *ctx);
/* Writes the daemon's statistics, JSON text, to out: at most room bytes with the terminating zero.
 * Returns the length of the whole text, or a negative errno. */
ptrdiff_t siw_read_stats(siw_context *ctx, char *out, size_t room);
/* Fills at most n elements. Returns the number of all devices, or a negative errno. */
int siw_query_devices(siw_context *ctx, struct siw_device_attr *out, uint32_t n);
/* Readable when an event is pending or the daemon has ended. */
int siw_async_fd(siw_context *ctx);
/* Waits for the next asynchronous event; timeout_ms < 0: without a timeout. ETIMEDOUT when none
 * came in time; ENODEV after the last event when the daemon has ended. */
int siw_get_async_event(siw_context *ctx, struct siw_async_event *out, int timeout_ms);

int siw_alloc_pd(siw_context *ctx, siw_pd **out);
void siw_dealloc_pd(siw_pd *pd);

/* Allocates zeroed memory and registers it. The daemon sends from it and places data into it
 * without further copies. It is aligned to a page or, if shorter, to its length rounded up to a
 * power of two, at least 64. siw_free_mr() frees it: deregister other registrations of the same
 * memory first. */
int siw_alloc_mr(siw_pd *pd, size_t len, uint32_t access, siw_mr **out);
/* Registers memory of the program: malloc, mmap, static data, a stack. Work requests and peers
 * address it by its address. It must stay mapped, at its place, until siw_dereg_mr() has returned 0.
 * EFAULT: not mapped, or read-only with SIW_ACCESS_LOCAL_WRITE. */
int siw_reg_memory(siw_pd *pd, void *addr, size_t len, uint32_t access, siw_mr **out);
/* Deregisters the region. When it returns 0, neither the daemon nor a peer accesses the memory any
 * more. EBUSY, and the region stays, while memory windows are bound to it.
 * Memory of siw_reg_memory() becomes private again; no I/O of the kernel or of a device into it may be
 * under way (AIO, io_uring, O_DIRECT). Other data of the program in its first and last page stays
 * shared with the daemon, with these pages, in a process that can have such I/O. */
int siw_dereg_mr(siw_mr *mr);
/* As siw_dereg_mr; windows that are bound to the region are unbound. Memory of siw_alloc_mr is freed
 * without waiting. For memory of siw_reg_memory it waits; if the daemon does not answer, which only
 * siw_dereg_mr reports, peers may still have access. */
void siw_free_mr(siw_mr *mr);

/* Allocates zeroed memory, from hugepages if available and huge is not 0. The memory exists until
 * the arena and all its registrations are freed. */
int siw_alloc_arena(siw_context *ctx, size_t len, int huge, siw_arena **out);
void siw_free_arena(siw_arena *arena);
void *siw_arena_ptr(const siw_arena *arena);
size_t siw_arena_len(const siw_arena *arena);
/* Registers len bytes at offset of an arena. Work requests and peers address them by their
 * address in this process. */
int siw_reg_mr(siw_pd *pd, siw_arena *arena, size_t offset, size_t len, uint32_t access,
	       siw_mr **out);
/* As siw_reg_mr, but work requests and peers address it from iova on. */
int siw_reg_mr_iova(siw_pd *pd, siw_arena *arena, size_t offset, size_t len, uint64_t iova,
		    uint32_t access, siw_mr **out);
/* Deregisters the region and registers it again with the changes selected by flags; it gets
 * new keys. EBUSY while windows are bound. No other thread may use mr meanwhile
 * (ibv_rereg_mr(3)). */
enum { SIW_REREG_TRANSLATION = 1, SIW_REREG_PD = 2, SIW_REREG_ACCESS = 4 };
int siw_rereg_mr(siw_mr *mr, uint32_t flags, siw_pd *pd, siw_arena *arena, size_t offset,
		 size_t len, uint32_t access);

/* Allocates a region of up to max_pages pages of an arena, which SIW_WR_REG_MR registers under
 * one key. */
int siw_alloc_fast_mr(siw_pd *pd, siw_arena *arena, uint32_t max_pages, siw_fast_mr **out);
void siw_free_fast_mr(siw_fast_mr *mr);
/* lkey and rkey, as of the last posted SIW_WR_REG_MR. */
uint32_t siw_fast_mr_key(const siw_fast_mr *mr);
struct siw_range {
	size_t offset; /* in the arena */
	size_t length;
};
/* Sets the ranges that the next SIW_WR_REG_MR registers. Only the first range may start, and
 * only the last one may end, inside a page of 2^page_shift bytes. Returns the number of
 * ranges that fit, or a negative errno. Must not be called while a SIW_WR_REG_MR is
 * outstanding, nor from two threads concurrently. */
int siw_map_fast_mr(siw_fast_mr *mr, const struct siw_range *ranges, uint32_t n,
		    uint32_t page_shift);

/* Type 1 works on every queue pair of the protection domain; type 2 on the queue pair that it is
 * bound through, until it is invalidated (2B). */
int siw_alloc_mw(siw_pd *pd, uint32_t type, siw_mw **out);
void siw_dealloc_mw(siw_mw *mw);
/* The key as of the last posted bind. */
uint32_t siw_mw_rkey(const siw_mw *mw);
/* Posts SIW_WR_BIND_MW under the next key. */
int siw_bind_mw(siw_qp *qp, siw_mw *mw, uint64_t wr_id, uint32_t flags,
		const struct siw_mw_bind *info);
static inline uint32_t siw_inc_rkey(uint32_t rkey)
{
	return (rkey & 0xffffff00u) | ((rkey + 1) & 0xffu);
}
void *siw_mr_ptr(const siw_mr *mr);
uint64_t siw_mr_addr(const siw_mr *mr); /* for work requests and the peer */
size_t siw_mr_len(const siw_mr *mr);
uint32_t siw_mr_lkey(const siw_mr *mr);
uint32_t siw_mr_rkey(const siw_mr *mr);

int siw_create_channel(siw_context *ctx, siw_channel **out);
void siw_destroy_channel(siw_channel *ch);
int siw_channel_fd(const siw_channel *ch);
/* Waits for an event of an armed queue; stores the cookie of the queue. */
int siw_get_cq_event(siw_channel *ch, uint64_t *cookie, int timeout_ms);

/* ch may be NULL. */
int siw_create_cq(siw_context *ctx, uint32_t cqe, siw_channel *ch, uint64_t cookie, siw_cq **out);
void siw_destroy_cq(siw_cq *cq);
/* Returns the number of completions, or a negative errno (-ENODEV: the daemon has ended). */
int siw_poll_cq(siw_cq *cq, uint32_t n, struct siw_wc *out);
/* Spins, then blocks on the queue's own channel. Returns as siw_poll_cq, or -ETIMEDOUT. */
int siw_wait_cq(siw_cq *cq, uint32_t n, struct siw_wc *out, int timeout_ms);
int siw_req_notify_cq(siw_cq *cq, int solicited_only);
uint32_t siw_cq_num(const siw_cq *cq);
uint32_t siw_cq_capacity(const siw_cq *cq);
/* Makes the queue larger or smaller. Pending completions stay, in order; EINVAL when there are
 * more of them than the new size. */
int siw_resize_cq(siw_cq *cq, uint32_t cqe);
/* Event moderation: an armed queue raises its event after count completions, or period_us after
 * the first of them; zeroes end the moderation (ibv_modify_cq(3)). */
int siw_modify_cq(siw_cq *cq, uint16_t count, uint16_t period_us);

int siw_query_limits(siw_context *ctx, struct siw_limits *out);

/* Creates a receive queue for several queue pairs of the protection domain (siw_qp_init_attr). */
int siw_create_srq(siw_pd *pd, const struct siw_srq_attr *attr, siw_srq **out);
void siw_destroy_srq(siw_srq *srq);
uint32_t siw_srq_num(const siw_srq *srq);
/* SIW_SRQ_MAX_WR resizes the queue; EINVAL when more requests are posted than the new size.
 * SIW_SRQ_LIMIT arms one SRQ_LIMIT_REACHED event, which is raised at once if fewer requests
 * are already posted. */
int siw_modify_srq(siw_srq *srq, const struct siw_srq_attr *attr, uint32_t mask);
int siw_query_srq(siw_srq *srq, struct siw_srq_attr *out);
/* As siw_post_recv. */
int siw_post_srq_recv(siw_srq *srq, const struct siw_recv_wr *wr, uint32_t n, uint32_t *bad);

int siw_create_qp(siw_pd *pd, const struct siw_qp_init_attr *attr, siw_qp **out);
/* Its unpolled completions are discarded. */
void siw_destroy_qp(siw_qp *qp);
uint32_t siw_qp_num(const siw_qp *qp);
/* enum siw_qp_state as the daemon last published it (SQD and RTR show as RTS), or a
 * negative errno. No system call. */
int siw_qp_state(const siw_qp *qp);
int siw_qp_set_error(siw_qp *qp);
/* Changes the state (enum siw_qp_state). IDLE is RESET of verbs: unpolled completions
 * are dropped, and the queue pair can be connected again. SQD stops sending, and
 * SQ_DRAINED follows; RTS resumes. CLOSING disconnects. TERMINATE sends a Terminate message.
 * ERROR flushes all work requests. */
int siw_modify_qp(siw_qp *qp, uint32_t state);
int siw_query_qp(siw_qp *qp, struct siw_qp_attr *out);
/* Both move the queue pair to ERROR and return when all posted requests have completed. The
 * completions, and those of other queue pairs polled meanwhile, go to seen (may be NULL). They
 * post a marker with wr_id UINT64_MAX. With an SRQ there is no receive queue to drain: wait for
 * QP_LAST_WQE_REACHED and poll the completion queue empty. */
int siw_drain_sq(siw_qp *qp, void (*seen)(const struct siw_wc *wc, void *arg), void *arg,
		 int timeout_ms);
int siw_drain_rq(siw_qp *qp, void (*seen)(const struct siw_wc *wc, void *arg), void *arg,
		 int timeout_ms);
/* Posts wr[0..n]; on failure *bad (may be NULL) is the index of the first one that
 * was not posted. ENOMEM: the queue is full; a request that completes visibly
 * occupies its slot until its completion is polled. EINVAL: the request is invalid. */
int siw_post_send(siw_qp *qp, const struct siw_send_wr *wr, uint32_t n, uint32_t *bad);
int siw_post_recv(siw_qp *qp, const struct siw_recv_wr *wr, uint32_t n, uint32_t *bad);

/* Unreliable datagrams (UD over RoCEv2). A queue pair without a connection sends to address handles and
 * receives from any host; a datagram holds up to 1024 bytes at an MTU of 1500, and is lost without notice
 * if the network or the receiver has no room. */
#define SIW_GRH_LEN 40 /* bytes before the payload in the receive buffer; the IP header is at their end */
#define SIW_MULTICAST_QPN 0xffffffu
/* Zero-initialise, then set size, device and remote. */
struct siw_ah_attr {
	uint32_t size;   /* sizeof(struct siw_ah_attr) */
	uint32_t device; /* index of the device that sends */
	const struct sockaddr *remote; /* a host or a multicast group; the port is ignored */
	const struct sockaddr *local;  /* an address of the device; NULL: the daemon chooses */
	uint32_t remote_len; /* size of remote */
	uint32_t local_len;  /* size of local */
	uint8_t hop_limit;   /* 0: 64 */
	uint8_t traffic_class;
	uint16_t reserved;
	uint32_t flow_label; /* IPv6, 20 bits */
	uint32_t timeout_ms; /* time for the answer of the next host on the way; 0: 1000 */
	uint32_t reserved2;
};
/* Waits for the answer of the next host on the way. EHOSTUNREACH: no route; ETIMEDOUT: no answer;
 * EADDRNOTAVAIL: the device does not have local; EADDRINUSE: the kernel has it, too. */
int siw_create_ah(siw_context *ctx, const struct siw_ah_attr *attr, siw_ah **out);
/* Requests that name it and are not sent yet fail: destroy it after their completions. */
void siw_destroy_ah(siw_ah *ah);
/* Makes a queue pair without a connection one of datagrams, in RTS; again: changes its Q_Key.
 * siw_modify_qp to IDLE ends it. EPERM: the highest bit of qkey is for operators. */
int siw_start_datagrams(siw_qp *qp, uint32_t device, uint32_t qkey);
/* Membership of a multicast group: the queue pair receives what any host, this one included, sends to it.
 * EINVAL: no group, no queue pair of datagrams, or (detach) no member. EOPNOTSUPP: the device uses
 * AF_XDP. */
int siw_attach_group(siw_qp *qp, const struct sockaddr *group, socklen_t len);
int siw_detach_group(siw_qp *qp, const struct sockaddr *group, socklen_t len);

int siw_create_cm_channel(siw_context *ctx, siw_cm_channel **out);
void siw_destroy_cm_channel(siw_cm_channel *ch);
int siw_cm_channel_fd(const siw_cm_channel *ch);
int siw_get_cm_event(siw_cm_channel *ch, struct siw_cm_event *out, int timeout_ms);

/* Returns at once; ESTABLISHED, REJECTED, UNREACHABLE or CONNECT_ERROR follows on
 * ch. param may be NULL. */
int siw_connect(siw_qp *qp, siw_cm_channel *ch, uint32_t device, const struct sockaddr *dst,
		socklen_t dst_len, const struct siw_conn_param *param);
int siw_disconnect(siw_qp *qp);
/* With port 0 the daemon chooses a port: see siw_listener_addr. */
int siw_listen(siw_cm_channel *ch, uint32_t device, const struct sockaddr *addr,
	       socklen_t addr_len, uint32_t backlog, uint64_t cookie, siw_listener **out);
#define SIW_BY_DEVICE 0xff
/* Settings of a listener that override those of its device. */
struct siw_mpa_options {
	uint32_t size;		     /* sizeof(struct siw_mpa_options) */
	uint8_t crc;		     /* 0 off (EPERM if a device has crc = "required"), 1 on, SIW_BY_DEVICE */
	uint8_t mpa_rev;	     /* highest: 1, 2, SIW_BY_DEVICE */
	uint8_t markers;	     /* 0 never, 1 accept, 2 request, SIW_BY_DEVICE */
	uint8_t rtr;		     /* 1 Send, 2 Write, 4 Read OR-ed, SIW_BY_DEVICE */
	uint16_t max_ird, max_ord;   /* UINT16_MAX: by device */
	uint32_t request_timeout_ms; /* 0: by device */
	uint32_t accept_timeout_ms;  /* 0: by device */
	uint16_t private_data;	     /* maximum length from a peer, up to 512; UINT16_MAX: by device */
	uint8_t terminate;	     /* first octet of Terminates: 0 as the RFC, 1 as Linux siw, SIW_BY_DEVICE */
	uint8_t out_of_order;	     /* placement: 0 off, 1 with markers, 2 if aligned, SIW_BY_DEVICE */
};
/* As siw_listen, with mpa (may be NULL). */
int siw_listen_mpa(siw_cm_channel *ch, uint32_t device, const struct sockaddr *addr,
		   socklen_t addr_len, uint32_t backlog, uint64_t cookie,
		   const struct siw_mpa_options *mpa, siw_listener **out);
int siw_listener_addr(const siw_listener *l, struct sockaddr_storage *out);
void siw_destroy_listener(siw_listener *l);
/* Both answer a connection request and free it, even on errors. ESTABLISHED follows on ch, or on
 * the listener's channel when ch is NULL. param may be NULL. */
int siw_accept(siw_request *req, siw_qp *qp, siw_cm_channel *ch, const struct siw_conn_param *param);
int siw_reject(siw_request *req, const void *private_data, uint32_t len);

/* Datagram services (RDMA_PS_UDP of rdma_cm(7)): a peer asks a listener at a port for the queue pair and the
 * Q_Key to which it then sends datagrams, by the service ID resolution of InfiniBand (SIDR). There is no
 * connection, and the ports are not those of connections. Channels of services are for their events alone:
 * siw_get_service_event drops other events, and siw_get_cm_event drops these. */
#define SIW_SERVICE_QKEY 0x01234567u /* Q_Key of services whose program names none (RDMA_UDP_QKEY) */

enum siw_service_event_type {
	SIW_SERVICE_REQUEST = 1, /* a peer asks a listener of this program */
	SIW_SERVICE_REPLY = 2    /* outcome of a search */
};

struct siw_service_event {
	uint32_t type; /* enum siw_service_event_type */
	int32_t err;   /* REPLY: 0; ECONNREFUSED, ETIMEDOUT or another errno without a queue pair */
	uint64_t cookie; /* of the listener, or of the search */
	siw_service_request *request; /* REQUEST: pass to siw_accept_service or siw_reject_service */
	uint32_t device;
	uint32_t sidr_status; /* REPLY with ECONNREFUSED: 1 no service at that port, 2 rejected, others as by
			       * the InfiniBand specification */
	uint32_t qp_num; /* REPLY: queue pair of the service */
	uint32_t qkey;   /* REPLY: its Q_Key */
	uint32_t private_data_len; /* REQUEST: 180, REPLY: 136, filled up with zeroes; 0 without an answer */
	uint32_t reserved;
	struct sockaddr_storage local;
	struct sockaddr_storage peer; /* REPLY: for siw_create_ah */
	char reason[128];
	uint8_t private_data[256];
};

/* Zero-initialise, then set size and the fields that are needed. */
struct siw_search_param {
	uint32_t size; /* sizeof(struct siw_search_param) */
	uint32_t private_data_len;
	const void *private_data; /* up to 180 bytes */
	const struct sockaddr *source; /* an address of the device; NULL: the daemon chooses */
	uint32_t source_len; /* size of source */
	uint32_t timeout_ms; /* time for the answer; 0: 68700. The request is repeated meanwhile */
	uint64_t cookie;     /* returned in the event */
};

/* As siw_listen: at most backlog requests wait for their answer, and further ones until they are repeated.
 * siw_listener_addr and siw_destroy_listener work on it. EOPNOTSUPP: the daemon is older than services. */
int siw_listen_service(siw_cm_channel *ch, uint32_t device, const struct sockaddr *addr, socklen_t addr_len,
		       uint32_t backlog, uint64_t cookie, siw_listener **out);
/* Asks the service at dst. Returns at once; REPLY follows on ch. device: SIW_ANY_DEVICE or an index. param may be
 * NULL. EHOSTUNREACH: no route; EADDRNOTAVAIL: no device has source; ENOBUFS: 4096 searches are in progress. */
int siw_find_service(siw_cm_channel *ch, uint32_t device, const struct sockaddr *dst, socklen_t dst_len,
		     const struct siw_search_param *param, siw_search **out);
/* Frees a search, before or after its REPLY. None follows after siw_await_releases, unless it is pending. */
void siw_end_search(siw_search *search);
/* ETIMEDOUT: no event came in time. */
int siw_get_service_event(siw_cm_channel *ch, struct siw_service_event *out, int timeout_ms);
/* Both answer a request and free it, even on errors: without an answer, it is rejected. private_data: up to 136
 * bytes. */
int siw_accept_service(siw_service_request *req, siw_qp *qp, uint32_t qkey, const void *private_data,
		       uint32_t len);
int siw_reject_service(siw_service_request *req, const void *private_data, uint32_t len);

#ifdef __cplusplus
}
#endif
#endif
