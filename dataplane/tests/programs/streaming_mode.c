/* Connections in streaming mode by siw_rdma.h: bytes, then rdma_connect and rdma_accept on the same
 * connection, and the errors of wrong orders. Both ends are in this process. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../../../client-lib/include/siw_rdma.h"

#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)
#define FAILS(errnum, call) do { errno = 0; long failed = (call); \
    if (failed != -1 || errno != (errnum)) { \
        fprintf(stderr, "line %d: %s is %ld with errno %d, not %s\n", __LINE__, #call, failed, errno, \
                #errnum); \
        exit(1); } } while (0)

enum { PATIENCE = 60000 };

static struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
static struct rdma_event_channel *active, *passive;

static struct rdma_cm_id *await_event(struct rdma_event_channel *channel, int kind, const char *data)
{
    struct rdma_cm_event *event;
    struct rdma_cm_id *id;

    CHECK(rdma_get_cm_event(channel, &event) == 0);
    if ((int)event->event != kind)
        fprintf(stderr, "%s\n", rdma_event_str(event->event));
    CHECK((int)event->event == kind);
    if (data)
        CHECK(event->param.conn.private_data_len >= strlen(data) &&
              memcmp(event->param.conn.private_data, data, strlen(data)) == 0);
    id = event->id;
    CHECK(rdma_ack_cm_event(event) == 0);
    return id;
}

static void receive_all(struct rdma_cm_id *id, const char *expected)
{
    size_t length = strlen(expected), filled = 0;
    char bytes[64];

    while (filled < length) {
        ssize_t count = siw_stream_recv(id, bytes + filled, length - filled, PATIENCE);
        CHECK(count > 0);
        filled += count;
    }
    CHECK(memcmp(bytes, expected, length) == 0);
}

static struct rdma_cm_id *resolved(struct sockaddr_in *to)
{
    struct rdma_cm_id *id;

    CHECK(rdma_create_id(active, &id, NULL, RDMA_PS_TCP) == 0);
    FAILS(EINVAL, siw_stream_open(id, PATIENCE));
    CHECK(siw_set_streaming(id) == 0);
    FAILS(EINVAL, siw_stream_open(id, PATIENCE));
    CHECK(rdma_resolve_addr(id, NULL, (void *)to, PATIENCE) == 0);
    await_event(active, RDMA_CM_EVENT_ADDR_RESOLVED, NULL);
    CHECK(rdma_resolve_route(id, PATIENCE) == 0);
    await_event(active, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL);
    return id;
}

static void *open_later(void *id)
{
    CHECK(siw_stream_open(id, PATIENCE) == 0);
    return NULL;
}

int main(void)
{
    struct sockaddr_in at = { .sin_family = AF_INET };
    struct rdma_conn_param hello = { .private_data = "hello", .private_data_len = 5 };
    struct rdma_conn_param ready = { .private_data = "ready", .private_data_len = 5 };
    struct rdma_cm_id *listener, *near, *far;
    int on = 1, unknown = 7;
    pthread_t opener;
    char byte;

    CHECK(inet_pton(AF_INET, "10.77.0.2", &at.sin_addr) == 1);
    active = rdma_create_event_channel();
    passive = rdma_create_event_channel();
    CHECK(active && passive);
    CHECK(rdma_create_id(passive, &listener, NULL, RDMA_PS_TCP) == 0);
    FAILS(ENOSYS, rdma_set_option(listener, SIW_OPTION, unknown, &on, sizeof(on)));
    FAILS(ENOSYS, rdma_set_option(listener, unknown, SIW_OPTION_STREAMING, &on, sizeof(on)));
    FAILS(EINVAL, rdma_set_option(listener, SIW_OPTION, SIW_OPTION_STREAMING, &on, 1));
    CHECK(siw_set_streaming(listener) == 0);
    CHECK(rdma_bind_addr(listener, (void *)&at) == 0);
    CHECK(rdma_listen(listener, 8) == 0);
    FAILS(EINVAL, siw_set_streaming(listener));
    at.sin_port = rdma_get_src_port(listener);

    /* The active side is the initiator. */
    near = resolved(&at);
    CHECK(rdma_create_qp(near, NULL, &init) == 0);
    FAILS(EINVAL, rdma_connect(near, &hello));
    FAILS(ENOTCONN, siw_stream_send(near, "x", 1, PATIENCE));
    CHECK(pthread_create(&opener, NULL, open_later, near) == 0);
    far = await_event(passive, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
    CHECK(pthread_join(opener, NULL) == 0);
    FAILS(EISCONN, siw_stream_open(near, PATIENCE));
    FAILS(EAGAIN, siw_stream_recv(far, &byte, 1, 0));
    FAILS(ETIMEDOUT, siw_stream_recv(far, &byte, 1, 50));
    FAILS(EINVAL, siw_stream_recv(far, &byte, 0, 0));
    CHECK(siw_stream_send(near, "login", 5, PATIENCE) == 5);
    receive_all(far, "login");
    CHECK(siw_stream_send(far, "welcome", 7, PATIENCE) == 7);
    receive_all(near, "welcome");
    CHECK(siw_stream_send(near, "last", 4, PATIENCE) == 4);
    CHECK(rdma_connect(near, &hello) == 0);
    FAILS(ENOTCONN, siw_stream_send(near, "x", 1, PATIENCE));
    receive_all(far, "last");
    CHECK(rdma_create_qp(far, NULL, &init) == 0);
    CHECK(rdma_accept(far, &ready) == 0);
    await_event(passive, RDMA_CM_EVENT_ESTABLISHED, "hello");
    await_event(active, RDMA_CM_EVENT_ESTABLISHED, "ready");
    CHECK(rdma_disconnect(near) == 0);
    await_event(passive, RDMA_CM_EVENT_DISCONNECTED, NULL);
    await_event(active, RDMA_CM_EVENT_DISCONNECTED, NULL);
    rdma_destroy_qp(near);
    rdma_destroy_qp(far);
    CHECK(rdma_destroy_id(near) == 0 && rdma_destroy_id(far) == 0);

    /* It is the responder. */
    near = resolved(&at);
    if (siw_stream_open(near, 0) != 0) {
        CHECK(errno == EAGAIN);
        CHECK(siw_stream_open(near, PATIENCE) == 0);
    }
    far = await_event(passive, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
    CHECK(rdma_create_qp(near, NULL, &init) == 0);
    CHECK(rdma_create_qp(far, NULL, &init) == 0);
    CHECK(rdma_accept(near, &ready) == 0);
    CHECK(rdma_connect(far, &hello) == 0);
    await_event(active, RDMA_CM_EVENT_ESTABLISHED, "hello");
    await_event(passive, RDMA_CM_EVENT_ESTABLISHED, "ready");
    rdma_destroy_qp(near);
    rdma_destroy_qp(far);
    CHECK(rdma_destroy_id(near) == 0 && rdma_destroy_id(far) == 0);

    /* A connection that does not turn ends by a close or a reset. */
    near = resolved(&at);
    CHECK(siw_stream_open(near, PATIENCE) == 0);
    far = await_event(passive, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
    CHECK(rdma_disconnect(near) == 0);
    CHECK(siw_stream_recv(far, &byte, 1, PATIENCE) == 0);
    CHECK(rdma_destroy_id(near) == 0);
    CHECK(rdma_reject(far, NULL, 0) == 0);
    CHECK(rdma_destroy_id(far) == 0);
    near = resolved(&at);
    CHECK(siw_stream_open(near, PATIENCE) == 0);
    far = await_event(passive, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
    CHECK(rdma_reject(far, NULL, 0) == 0);
    FAILS(ECONNRESET, siw_stream_recv(near, &byte, 1, PATIENCE));
    CHECK(rdma_destroy_id(near) == 0 && rdma_destroy_id(far) == 0);

    CHECK(rdma_destroy_id(listener) == 0);
    near = resolved(&at);
    FAILS(ECONNREFUSED, siw_stream_open(near, PATIENCE));
    CHECK(rdma_destroy_id(near) == 0);
    rdma_destroy_event_channel(active);
    rdma_destroy_event_channel(passive);
    puts("done");
    return 0;
}
