/* Errors of rdma_cm calls and of ibv_modify_qp: the call, its precondition, and the errno of the manual
 * page or of Linux. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)
/* A row of the table. */
#define FAILS(errnum, call) do { errno = 0; int failed = (call); int got = errno; \
    if (failed != -1 || got != (errnum)) { \
        fprintf(stderr, "line %d: %s is %d with errno %d, not %s\n", __LINE__, #call, failed, got, \
                #errnum); \
        failures++; } } while (0)
#define REFUSED(errnum, call) do { int got = (call); if (got != (errnum)) { \
        fprintf(stderr, "line %d: %s is %d, not %s\n", __LINE__, #call, got, #errnum); \
        failures++; } } while (0)

static int failures;
static struct rdma_event_channel *channel;
static struct sockaddr_in there = { .sin_family = AF_INET }, free_port = { .sin_family = AF_INET };
static struct sockaddr strange = { .sa_family = AF_UNIX };

static void *addr(struct sockaddr_in *of) { return of; }

static void acknowledge(int kind)
{
    struct rdma_cm_event *event;
    CHECK(rdma_get_cm_event(channel, &event) == 0);
    if ((int)event->event != kind)
        fprintf(stderr, "%s\n", rdma_event_str(event->event));
    CHECK((int)event->event == kind && rdma_ack_cm_event(event) == 0);
}

static struct rdma_cm_id *new_id(void)
{
    struct rdma_cm_id *id;
    CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
    return id;
}

static void *acknowledge_later(void *event)
{
    /* The other thread waits in rdma_migrate_id; if it did not, the order is another, not the result. */
    usleep(20000);
    CHECK(rdma_ack_cm_event(event) == 0);
    return NULL;
}

static void identifiers(void)
{
    struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
    struct rdma_conn_param parameters = { 0 };
    struct rdma_cm_id *id = new_id(), *listener = new_id(), *other = new_id();
    int number = 1;
    char byte = 0;

    FAILS(EINVAL, rdma_destroy_id(NULL));
    FAILS(EINVAL, rdma_get_cm_event(channel, NULL));
    FAILS(EINVAL, rdma_ack_cm_event(NULL));
    FAILS(EINVAL, rdma_bind_addr(id, NULL));
    FAILS(EINVAL, rdma_bind_addr(id, &strange));
    FAILS(EINVAL, rdma_resolve_addr(id, NULL, NULL, 1000));
    FAILS(EINVAL, rdma_resolve_addr(id, &strange, addr(&there), 1000));
    FAILS(EINVAL, rdma_resolve_route(id, 1000));
    FAILS(EINVAL, rdma_create_qp(id, NULL, &init));
    FAILS(EINVAL, rdma_connect(id, &parameters));
    FAILS(EINVAL, rdma_accept(id, &parameters));
    FAILS(EINVAL, rdma_reject(id, NULL, 0));
    FAILS(EINVAL, rdma_disconnect(id));
    FAILS(EINVAL, rdma_establish(id));
    FAILS(EINVAL, rdma_get_request(id, &other));
    FAILS(ENOSYS, rdma_set_option(id, 77, 0, &number, sizeof number));
    FAILS(ENOSYS, rdma_set_option(id, RDMA_OPTION_ID, 77, &number, sizeof number));
    FAILS(EINVAL, rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &byte, 1));
    FAILS(EOPNOTSUPP, rdma_join_multicast(id, addr(&there), NULL));
    FAILS(EADDRNOTAVAIL, rdma_leave_multicast(id, addr(&there)));

    /* Listeners. */
    inet_pton(AF_INET, "192.0.2.1", &free_port.sin_addr);
    FAILS(EADDRNOTAVAIL, rdma_bind_addr(listener, addr(&free_port)));
    struct rdma_cm_id *mapped = new_id();
    struct sockaddr_in6 of_ipv4 = { .sin6_family = AF_INET6 };
    of_ipv4.sin6_addr.s6_addr[10] = of_ipv4.sin6_addr.s6_addr[11] = 0xff;
    memcpy(&of_ipv4.sin6_addr.s6_addr[12], &there.sin_addr, 4);
    CHECK(rdma_bind_addr(mapped, (void *)&of_ipv4) == 0);
    CHECK(rdma_get_local_addr(mapped)->sa_family == AF_INET && rdma_destroy_id(mapped) == 0);
    CHECK(rdma_bind_addr(listener, addr(&there)) == 0);
    there.sin_port = rdma_get_src_port(listener);
    FAILS(EINVAL, rdma_bind_addr(listener, addr(&there)));
    FAILS(EADDRINUSE, rdma_bind_addr(other, addr(&there)));
    CHECK(rdma_listen(listener, 4) == 0);
    FAILS(EINVAL, rdma_listen(listener, 4));
    FAILS(EINVAL, rdma_resolve_addr(listener, NULL, addr(&there), 1000));
    FAILS(EINVAL, rdma_connect(listener, &parameters));

    /* Resolution. */
    CHECK(rdma_resolve_addr(id, NULL, addr(&there), 1000) == 0);
    acknowledge(RDMA_CM_EVENT_ADDR_RESOLVED);
    FAILS(EINVAL, rdma_resolve_addr(id, NULL, addr(&there), 1000));
    FAILS(EINVAL, rdma_bind_addr(id, addr(&there)));
    FAILS(EINVAL, rdma_listen(id, 1));
    CHECK(rdma_create_qp(id, NULL, &init) == 0);
    FAILS(EINVAL, rdma_create_qp(id, NULL, &init));
    FAILS(EINVAL, rdma_connect(id, &parameters));
    CHECK(rdma_resolve_route(id, 1000) == 0);
    acknowledge(RDMA_CM_EVENT_ROUTE_RESOLVED);
    FAILS(EINVAL, rdma_resolve_route(id, 1000));
    FAILS(EINVAL, rdma_establish(id));
    FAILS(EINVAL, rdma_accept(id, &parameters));
    parameters.responder_resources = 254;
    FAILS(EINVAL, rdma_connect(id, &parameters));
    parameters.responder_resources = 0;

    /* A client that leaves before its request is answered. */
    struct rdma_cm_event *request;
    CHECK(rdma_connect(id, &parameters) == 0);
    CHECK(rdma_get_cm_event(channel, &request) == 0);
    CHECK(request->event == RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *server = request->id;
    memset(&init, 0, sizeof init);
    init = (struct ibv_qp_init_attr){ .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
    CHECK(rdma_create_qp(server, NULL, &init) == 0);
    rdma_destroy_qp(id);
    CHECK(rdma_destroy_id(id) == 0);
    /* Moving the listener waits for the acknowledgement of its event. */
    struct rdma_event_channel *second = rdma_create_event_channel();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, acknowledge_later, request) == 0);
    CHECK(rdma_migrate_id(listener, second) == 0);
    CHECK(pthread_join(thread, NULL) == 0 && listener->channel == second);
    int accepted;
    while ((accepted = rdma_accept(server, &parameters)) == 0) {
        /* The daemon had not heard of it: the connection fails. */
        struct rdma_cm_event *event;
        CHECK(rdma_get_cm_event(channel, &event) == 0 && event->status != 0);
        CHECK(rdma_ack_cm_event(event) == 0);
        accepted = -1;
        errno = ECONNRESET;
        break;
    }
    CHECK(accepted == -1 && errno == ECONNRESET);
    rdma_destroy_qp(server);
    CHECK(rdma_destroy_id(server) == 0 && rdma_destroy_id(other) == 0);
    CHECK(rdma_destroy_id(listener) == 0);
    rdma_destroy_event_channel(second);
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

/* Waits for an event on a channel, and returns its status. */
static int status_of(struct rdma_event_channel *on, int kind)
{
    struct rdma_cm_event *event;
    CHECK(rdma_get_cm_event(on, &event) == 0);
    int status = event->status;
    CHECK((int)event->event == kind && rdma_ack_cm_event(event) == 0);
    return status;
}

/* Resolution of an address that no host has, and the source port. */
static void resolution(void)
{
    struct sockaddr_in nobody = there;
    struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
    struct rdma_conn_param parameters = { 0 };
    struct rdma_cm_id *id = new_id(), *listener = new_id();
    inet_pton(AF_INET, "10.77.0.77", &nobody.sin_addr);
    nobody.sin_port = htons(7000);
    there.sin_port = 0;
    CHECK(rdma_bind_addr(listener, addr(&there)) == 0 && rdma_listen(listener, 4) == 0);
    there.sin_port = rdma_get_src_port(listener);

    double begin = seconds();
    CHECK(rdma_resolve_addr(id, NULL, addr(&nobody), 200) == 0);
    FAILS(EINVAL, rdma_resolve_addr(id, NULL, addr(&there), 1000));
    FAILS(EINVAL, rdma_bind_addr(id, addr(&there)));
    FAILS(EINVAL, rdma_listen(id, 1));
    FAILS(EINVAL, rdma_resolve_route(id, 1000));
    CHECK(status_of(channel, RDMA_CM_EVENT_ADDR_ERROR) == -ETIMEDOUT);
    CHECK(seconds() - begin >= 0.15);
    FAILS(EINVAL, rdma_resolve_route(id, 1000));
    FAILS(EINVAL, rdma_connect(id, &parameters));
    /* The identifier can resolve another address. */
    CHECK(rdma_resolve_addr(id, NULL, addr(&there), 5000) == 0);
    CHECK(status_of(channel, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
    int port = rdma_get_src_port(id);
    CHECK(port != 0 && rdma_get_dst_port(id) == there.sin_port);
    CHECK(rdma_resolve_route(id, 1000) == 0);
    acknowledge(RDMA_CM_EVENT_ROUTE_RESOLVED);
    CHECK(rdma_create_qp(id, NULL, &init) == 0 && rdma_connect(id, &parameters) == 0);
    struct rdma_cm_event *request;
    CHECK(rdma_get_cm_event(channel, &request) == 0);
    CHECK(request->event == RDMA_CM_EVENT_CONNECT_REQUEST);
    CHECK(rdma_get_dst_port(request->id) == port && rdma_get_src_port(id) == port);
    struct rdma_cm_id *server = request->id;
    CHECK(rdma_ack_cm_event(request) == 0 && rdma_reject(server, NULL, 0) == 0);
    CHECK(rdma_destroy_id(server) == 0);
    CHECK(status_of(channel, RDMA_CM_EVENT_REJECTED) != 0);
    rdma_destroy_qp(id);
    CHECK(rdma_destroy_id(id) == 0);

    /* A bound port is that of the connection. */
    struct sockaddr_in here = there;
    inet_pton(AF_INET, "10.77.0.1", &here.sin_addr);
    here.sin_port = 0;
    id = new_id();
    CHECK(rdma_bind_addr(id, addr(&here)) == 0);
    port = rdma_get_src_port(id);
    CHECK(port != 0 && rdma_resolve_addr(id, NULL, addr(&there), 5000) == 0);
    CHECK(status_of(channel, RDMA_CM_EVENT_ADDR_RESOLVED) == 0);
    CHECK(rdma_get_src_port(id) == port && rdma_destroy_id(id) == 0);

    /* No event of an identifier that is destroyed meanwhile: the channel stays unreadable. */
    id = new_id();
    CHECK(rdma_resolve_addr(id, NULL, addr(&nobody), 50) == 0 && rdma_destroy_id(id) == 0);
    struct pollfd readable = { .fd = channel->fd, .events = POLLIN };
    CHECK(poll(&readable, 1, 200) == 0);

    /* The event comes to the channel that the identifier was moved to. */
    struct rdma_event_channel *second = rdma_create_event_channel();
    id = new_id();
    begin = seconds();
    CHECK(rdma_resolve_addr(id, NULL, addr(&nobody), 300) == 0);
    CHECK(rdma_migrate_id(id, second) == 0);
    CHECK(status_of(second, RDMA_CM_EVENT_ADDR_ERROR) == -ETIMEDOUT);
    CHECK(seconds() - begin >= 0.25 && poll(&readable, 1, 0) == 0);
    CHECK(rdma_destroy_id(id) == 0);
    rdma_destroy_event_channel(second);

    /* A synchronous identifier waits. */
    CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
    FAILS(ETIMEDOUT, rdma_resolve_addr(id, NULL, addr(&nobody), 50));
    CHECK(rdma_resolve_addr(id, NULL, addr(&there), 5000) == 0 && rdma_get_src_port(id) != 0);
    CHECK(rdma_destroy_id(id) == 0 && rdma_destroy_id(listener) == 0);

    /* Many at once, with one of each kind. */
    struct rdma_cm_id *many[200];
    for (int i = 0; i < 200; i++) {
        many[i] = new_id();
        CHECK(rdma_resolve_addr(many[i], NULL, addr(i % 2 ? &nobody : &there), 100) == 0);
    }
    int resolved = 0, failed = 0;
    for (int i = 0; i < 200; i++) {
        struct rdma_cm_event *event;
        CHECK(rdma_get_cm_event(channel, &event) == 0);
        resolved += event->event == RDMA_CM_EVENT_ADDR_RESOLVED;
        failed += event->event == RDMA_CM_EVENT_ADDR_ERROR && event->status == -ETIMEDOUT;
        CHECK(rdma_ack_cm_event(event) == 0);
    }
    CHECK(resolved == 100 && failed == 100);
    for (int i = 0; i < 200; i++)
        CHECK(rdma_destroy_id(many[i]) == 0);
}

static void queue_pairs(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = ibv_open_device(list[0]);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                     .cap = { 4, 4, 1, 1, 0 } };
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    CHECK(qp);
    const int to_init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    const int to_rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 3 };
    REFUSED(EINVAL, ibv_modify_qp(qp, &attr, to_init));
    attr.port_num = 0;
    REFUSED(EINVAL, ibv_modify_qp(qp, &attr, to_init));
    attr.port_num = 1;
    CHECK(ibv_modify_qp(qp, &attr, to_init) == 0);
    attr.qp_state = IBV_QPS_RTS;
    REFUSED(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_STATE));
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    CHECK(ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid) == 0);
    /* Each required attribute. */
    for (int bit = 1; bit <= IBV_QP_DEST_QPN; bit <<= 1)
        if ((to_rtr & bit) && bit != IBV_QP_STATE)
            REFUSED(EINVAL, ibv_modify_qp(qp, &attr, to_rtr & ~bit));
    attr.path_mtu = 0;
    REFUSED(EINVAL, ibv_modify_qp(qp, &attr, to_rtr));
    attr.path_mtu = IBV_MTU_4096 + 1;
    REFUSED(EINVAL, ibv_modify_qp(qp, &attr, to_rtr));
    attr.path_mtu = IBV_MTU_1024;
    attr.ah_attr.port_num = 2;
    REFUSED(EINVAL, ibv_modify_qp(qp, &attr, to_rtr));
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.sgid_index = 200;
    REFUSED(EINVAL, ibv_modify_qp(qp, &attr, to_rtr));
    attr.ah_attr.is_global = 0;
    REFUSED(EINVAL, ibv_modify_qp(qp, &attr, to_rtr));
    struct ibv_qp_init_attr queried;
    CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &queried) == 0 && attr.qp_state == IBV_QPS_INIT);
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0);
    CHECK(ibv_close_device(context) == 0);
    ibv_free_device_list(list);
}

/* A request posted after the move to ERROR is flushed also if a connection was being set up. */
static void an_error_while_connecting(void)
{
    struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1, .cap = { 4, 4, 1, 1, 0 } };
    struct rdma_conn_param parameters = { 0 };
    struct ibv_qp_attr to_error = { .qp_state = IBV_QPS_ERR };
    struct ibv_send_wr send = { .wr_id = 7, .opcode = IBV_WR_SEND }, *bad;
    struct ibv_wc completion = { 0 };
    struct rdma_cm_id *id = new_id(), *listener = new_id();
    struct sockaddr_in at = there;
    struct rdma_cm_event *event;
    at.sin_port = 0;
    CHECK(rdma_bind_addr(listener, addr(&at)) == 0 && rdma_listen(listener, 4) == 0);
    at.sin_port = rdma_get_src_port(listener);
    CHECK(rdma_resolve_addr(id, NULL, addr(&at), 2000) == 0);
    acknowledge(RDMA_CM_EVENT_ADDR_RESOLVED);
    CHECK(rdma_resolve_route(id, 2000) == 0);
    acknowledge(RDMA_CM_EVENT_ROUTE_RESOLVED);
    CHECK(rdma_create_qp(id, NULL, &init) == 0 && rdma_connect(id, &parameters) == 0);
    CHECK(rdma_get_cm_event(channel, &event) == 0);
    CHECK(event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *server = event->id;
    CHECK(rdma_ack_cm_event(event) == 0);
    CHECK(ibv_modify_qp(id->qp, &to_error, IBV_QP_STATE) == 0);
    CHECK(ibv_post_send(id->qp, &send, &bad) == 0);
    for (double end = seconds() + 20; seconds() < end && !ibv_poll_cq(id->send_cq, 1, &completion);)
        ;
    CHECK(completion.wr_id == 7 && completion.status == IBV_WC_WR_FLUSH_ERR);
    acknowledge(RDMA_CM_EVENT_CONNECT_ERROR);
    rdma_destroy_qp(id);
    CHECK(rdma_destroy_id(id) == 0 && rdma_destroy_id(server) == 0 && rdma_destroy_id(listener) == 0);
}

int main(void)
{
    inet_pton(AF_INET, "10.77.0.2", &there.sin_addr);
    channel = rdma_create_event_channel();
    CHECK(channel);
    identifiers();
    resolution();
    an_error_while_connecting();
    queue_pairs();
    rdma_destroy_event_channel(channel);
    puts(failures ? "failed" : "done");
    return failures != 0;
}
