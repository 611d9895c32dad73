/* A descriptor of events is readable exactly while its call returns an event, and never writable. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)

static struct sockaddr_in there = { .sin_family = AF_INET };
static struct rdma_event_channel *servers, *clients;
static struct rdma_cm_id *listener;
static char memory[4096] __attribute__((aligned(4096)));

static int is_readable(int fd, int timeout_ms)
{
    struct pollfd readable = { .fd = fd, .events = POLLIN };
    return poll(&readable, 1, timeout_ms);
}

/* Waits until the channel is readable, and takes its event without waiting. */
static struct rdma_cm_event *take(struct rdma_event_channel *channel, int kind)
{
    struct rdma_cm_event *event;
    CHECK(is_readable(channel->fd, 20000) == 1);
    CHECK(rdma_get_cm_event(channel, &event) == 0);
    if ((int)event->event != kind)
        fprintf(stderr, "%s\n", rdma_event_str(event->event));
    CHECK((int)event->event == kind);
    return event;
}

static struct rdma_cm_id *await(struct rdma_event_channel *channel, int kind)
{
    struct rdma_cm_event *event = take(channel, kind);
    struct rdma_cm_id *id = event->id;
    CHECK(rdma_ack_cm_event(event) == 0);
    return id;
}

static struct rdma_event_channel *create_channel(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    CHECK(channel && fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
    return channel;
}

static void listen_on(struct rdma_event_channel *channel)
{
    there.sin_port = 0;
    CHECK(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(listener, (void *)&there) == 0 && rdma_listen(listener, 16) == 0);
    there.sin_port = rdma_get_src_port(listener);
}

static void create_qp(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
                                     .cap = { 4, 4, 1, 1, 0 } };
    CHECK(rdma_create_qp(id, NULL, &init) == 0);
}

/* Connects without waiting for the answer. */
static struct rdma_cm_id *start_connecting(void)
{
    struct rdma_cm_id *id;
    struct rdma_conn_param parameters = { 0 };
    CHECK(rdma_create_id(clients, &id, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_resolve_addr(id, NULL, (void *)&there, 2000) == 0);
    await(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
    CHECK(rdma_resolve_route(id, 2000) == 0);
    await(clients, RDMA_CM_EVENT_ROUTE_RESOLVED);
    create_qp(id);
    CHECK(rdma_connect(id, &parameters) == 0);
    return id;
}

static void destroy(struct rdma_cm_id *id)
{
    rdma_destroy_qp(id);
    CHECK(rdma_destroy_id(id) == 0);
}

static void accept_request(struct rdma_cm_id *id)
{
    struct rdma_conn_param parameters = { 0 };
    CHECK(rdma_accept(id, &parameters) == 0);
    await(servers, RDMA_CM_EVENT_ESTABLISHED);
    await(clients, RDMA_CM_EVENT_ESTABLISHED);
}

static void a_client_that_left(void)
{
    struct rdma_conn_param parameters = { 0 };
    struct rdma_cm_id *client = start_connecting();
    struct rdma_cm_id *server = await(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
    create_qp(server);
    destroy(client);
    /* The next event is that of the next client. */
    client = start_connecting();
    struct rdma_cm_id *next = await(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
    CHECK(next != server && is_readable(servers->fd, 0) == 0);
    CHECK(rdma_accept(server, &parameters) == -1 && errno == ECONNRESET);
    destroy(server);
    CHECK(rdma_reject(next, NULL, 0) == 0);
    await(clients, RDMA_CM_EVENT_REJECTED);
    destroy(client);
    CHECK(rdma_destroy_id(next) == 0 && is_readable(servers->fd, 0) == 0);
}

static void requests_that_nobody_takes(void)
{
    struct rdma_event_channel *own = create_channel();
    struct rdma_cm_id *kept = listener;
    for (int way = 0; way < 2; way++) {
        listen_on(own);
        struct rdma_cm_id *client = start_connecting();
        CHECK(is_readable(own->fd, 20000) == 1);
        if (way == 0) {
            CHECK(rdma_destroy_id(listener) == 0);
            CHECK(is_readable(own->fd, 0) == 0);
        } else {
            /* Wrong, but what programs do that end. */
            rdma_destroy_event_channel(own);
        }
        time_t start = time(NULL);
        await(clients, RDMA_CM_EVENT_REJECTED);
        CHECK(time(NULL) - start < 5);
        destroy(client);
    }
    listener = kept;
    there.sin_port = rdma_get_src_port(listener);
}

static void a_disconnect_before_unpolled_completions(void)
{
    struct rdma_cm_id *client = start_connecting();
    struct rdma_cm_id *server = await(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
    struct ibv_wc completion;
    create_qp(server);
    struct ibv_mr *mr = ibv_reg_mr(server->pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_sge part = { (uintptr_t)memory, 64, mr->lkey };
    struct ibv_recv_wr receive = { .sg_list = &part, .num_sge = 1 }, *bad_receive;
    struct ibv_send_wr send = { .opcode = IBV_WR_SEND }, *bad_send;
    CHECK(ibv_post_recv(server->qp, &receive, &bad_receive) == 0);
    accept_request(server);
    int edges = epoll_create1(0);
    struct epoll_event event = { .events = EPOLLIN | EPOLLET };
    CHECK(epoll_ctl(edges, EPOLL_CTL_ADD, servers->fd, &event) == 0);
    CHECK(ibv_post_send(client->qp, &send, &bad_send) == 0);
    while (ibv_poll_cq(client->send_cq, 1, &completion) == 0)
        ;
    CHECK(completion.status == IBV_WC_SUCCESS && rdma_disconnect(client) == 0);
    await(clients, RDMA_CM_EVENT_DISCONNECTED);
    /* One edge, one event: the completion of the receive is not polled. */
    CHECK(epoll_wait(edges, &event, 1, 20000) == 1);
    await(servers, RDMA_CM_EVENT_DISCONNECTED);
    CHECK(is_readable(servers->fd, 0) == 0);
    CHECK(ibv_poll_cq(server->recv_cq, 1, &completion) == 1);
    CHECK(completion.status == IBV_WC_SUCCESS);
    close(edges);
    CHECK(ibv_dereg_mr(mr) == 0);
    destroy(client);
    destroy(server);
}

static void events_of_a_destroyed_identifier(void)
{
    struct rdma_cm_id *client = start_connecting();
    struct rdma_cm_id *server = await(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_conn_param parameters = { 0 };
    struct ibv_cq *cq = ibv_create_cq(server->verbs, 16, NULL, NULL, 0);
    struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                     .cap = { 4, 4, 1, 1, 0 } };
    struct ibv_qp *qp = ibv_create_qp(server->pd, &init);
    CHECK(cq && qp);
    parameters.qp_num = qp->qp_num;
    CHECK(rdma_accept(server, &parameters) == 0);
    await(servers, RDMA_CM_EVENT_ESTABLISHED);
    await(clients, RDMA_CM_EVENT_ESTABLISHED);
    CHECK(rdma_destroy_id(server) == 0);
    await(clients, RDMA_CM_EVENT_DISCONNECTED);
    destroy(client);
    /* Its end has been reported nowhere when the next request comes. */
    client = start_connecting();
    server = await(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
    CHECK(is_readable(servers->fd, 0) == 0);
    CHECK(rdma_destroy_id(server) == 0);
    await(clients, RDMA_CM_EVENT_REJECTED);
    destroy(client);
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
}

/* Flushes a request of a queue pair, which raises an event of its completion queue. */
static void raise_event(struct ibv_pd *pd, struct ibv_cq *cq)
{
    struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                     .cap = { 4, 4, 1, 1, 0 } };
    struct ibv_qp_attr to_error = { .qp_state = IBV_QPS_ERR };
    struct ibv_recv_wr receive = { .wr_id = 7 }, *bad;
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    struct ibv_wc completion;
    CHECK(qp && ibv_req_notify_cq(cq, 0) == 0 && ibv_post_recv(qp, &receive, &bad) == 0);
    CHECK(ibv_modify_qp(qp, &to_error, IBV_QP_STATE) == 0);
    while (ibv_poll_cq(cq, 1, &completion) == 0)
        ;
    CHECK(ibv_destroy_qp(qp) == 0);
}

static void events_of_a_destroyed_completion_queue(void)
{
    struct ibv_context *context = listener->verbs;
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    CHECK(pd && channel && fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
    struct ibv_cq *of_event, *queues[3];
    void *of_context;
    for (int i = 0; i < 3; i++) {
        CHECK((queues[i] = ibv_create_cq(context, 16, NULL, channel, 0)));
        raise_event(pd, queues[i]);
        CHECK(is_readable(channel->fd, 20000) == 1);
    }
    /* The first and the last: the event between them is left. */
    CHECK(ibv_destroy_cq(queues[0]) == 0 && ibv_destroy_cq(queues[2]) == 0);
    CHECK(is_readable(channel->fd, 0) == 1);
    CHECK(ibv_get_cq_event(channel, &of_event, &of_context) == 0 && of_event == queues[1]);
    CHECK(is_readable(channel->fd, 0) == 0);
    CHECK(ibv_get_cq_event(channel, &of_event, &of_context) == -1 && errno == EAGAIN);
    raise_event(pd, queues[1]);
    CHECK(is_readable(channel->fd, 20000) == 1);
    ibv_ack_cq_events(queues[1], 1);
    CHECK(ibv_destroy_cq(queues[1]) == 0 && is_readable(channel->fd, 0) == 0);
    CHECK(ibv_destroy_comp_channel(channel) == 0 && ibv_dealloc_pd(pd) == 0);
}

/* Programs that wait for both, as users of libuv do, must not spin. */
static void descriptors_are_never_writable(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    struct ibv_context *context = ibv_open_device(devices[0]);
    CHECK(context);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    CHECK(channel);
    int fds[] = { channel->fd, context->async_fd, listener->verbs->async_fd, servers->fd };
    for (int i = 0; i < 4; i++) {
        struct pollfd both = { .fd = fds[i], .events = POLLIN | POLLOUT };
        CHECK(poll(&both, 1, 0) == 0);
    }
    CHECK(ibv_destroy_comp_channel(channel) == 0 && ibv_close_device(context) == 0);
    ibv_free_device_list(devices);
}

int main(void)
{
    inet_pton(AF_INET, "10.77.0.2", &there.sin_addr);
    servers = create_channel();
    clients = create_channel();
    listen_on(servers);
    a_client_that_left();
    requests_that_nobody_takes();
    for (int i = 0; i < 20; i++)
        a_disconnect_before_unpolled_completions();
    events_of_a_destroyed_identifier();
    events_of_a_destroyed_completion_queue();
    descriptors_are_never_writable();
    CHECK(rdma_destroy_id(listener) == 0);
    rdma_destroy_event_channel(servers);
    rdma_destroy_event_channel(clients);
    puts("done");
    return 0;
}
