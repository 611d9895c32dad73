/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Connections of rdma_cm that begin in streaming mode (RFC 5044 section 7.1.3): TCP bytes first, RDMA from
 * an octet on that both programs agree on. For programs that run on siwd's librdmacm (siwrun); on another
 * librdmacm, setting the option fails with ENOSYS or EINVAL, and the calls fail with ENOSYS.
 *
 *   active side                                  passive side
 *   rdma_create_id, siw_set_streaming            rdma_create_id, siw_set_streaming
 *   rdma_resolve_addr, rdma_resolve_route        rdma_bind_addr, rdma_listen
 *   siw_stream_open                              RDMA_CM_EVENT_CONNECT_REQUEST: a TCP connection
 *   siw_stream_send, siw_stream_recv             siw_stream_recv, siw_stream_send
 *   rdma_create_qp, rdma_connect                 rdma_create_qp, rdma_accept
 *   RDMA_CM_EVENT_ESTABLISHED                    RDMA_CM_EVENT_ESTABLISHED
 *
 * rdma_connect turns the connection to RDMA as the MPA initiator, rdma_accept as the responder; either side
 * may be either. Bytes that were received and not read by then are MPA's. The MPA reply leaves while the
 * responder's program takes events (rdma_get_cm_event); its RDMA_CM_EVENT_ESTABLISHED has the private data of
 * the MPA request. rdma_reject resets a connection in streaming mode, rdma_disconnect
 * and rdma_destroy_id close it. One thread at a time may call these functions for an identifier.
 */
#ifndef SIW_RDMA_H
#define SIW_RDMA_H

#include <dlfcn.h>
#include <errno.h>
#include <rdma/rdma_cma.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Level of rdma_set_option(). */
#define SIW_OPTION 0x736977
/* Name: an int, not 0 for streaming mode. Before rdma_listen() or siw_stream_open(); else EINVAL. */
#define SIW_OPTION_STREAMING 1

/* 0, or -1 with errno. */
static inline int siw_set_streaming(struct rdma_cm_id *id)
{
    int on = 1;

    return rdma_set_option(id, SIW_OPTION, SIW_OPTION_STREAMING, &on, sizeof(on));
}

/* A function of the librdmacm in use, or NULL with errno ENOSYS. */
static inline void *siw_rdma_symbol(const char *name)
{
    void *symbol = dlsym(RTLD_DEFAULT, name);

    if (!symbol)
        errno = ENOSYS;
    return symbol;
}

/*
 * Opens the TCP connection of an identifier whose route is resolved; waits timeout_ms milliseconds, or
 * without limit if it is negative. 0, or -1 with errno: ECONNREFUSED, EHOSTUNREACH, ETIMEDOUT, EINVAL (no
 * option, no route), EISCONN, ENOBUFS (limit of the user). After EAGAIN (timeout_ms is 0), ETIMEDOUT of
 * timeout_ms, or EINTR, the attempt goes on, and the next call waits for it.
 */
static inline int siw_stream_open(struct rdma_cm_id *id, int timeout_ms)
{
    int (*call)(struct rdma_cm_id *, int);

    *(void **)&call = siw_rdma_symbol("siw_stream_open");
    return call ? call(id, timeout_ms) : -1;
}

/*
 * Sends bytes. Returns their number, fewer than length only if the call fails after some of them, or -1
 * with errno: EAGAIN (timeout_ms is 0), ETIMEDOUT, ENOTCONN, ECONNRESET.
 */
static inline ssize_t siw_stream_send(struct rdma_cm_id *id, const void *data, size_t length, int timeout_ms)
{
    ssize_t (*call)(struct rdma_cm_id *, const void *, size_t, int);

    *(void **)&call = siw_rdma_symbol("siw_stream_send");
    return call ? call(id, data, length, timeout_ms) : -1;
}

/*
 * Waits for bytes, and reads at most length (1 or more) of them. Returns their number, 0 if the peer has
 * closed its direction, or -1 with errno as siw_stream_send().
 */
static inline ssize_t siw_stream_recv(struct rdma_cm_id *id, void *data, size_t length, int timeout_ms)
{
    ssize_t (*call)(struct rdma_cm_id *, void *, size_t, int);

    *(void **)&call = siw_rdma_symbol("siw_stream_recv");
    return call ? call(id, data, length, timeout_ms) : -1;
}

#ifdef __cplusplus
}
#endif

#endif
