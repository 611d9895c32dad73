//! Behavior of the drop-in library seen by C programs, in cases that the tests with the
//! distribution's programs reach only occasionally.

use crate::common::c_programs::{can_compile, compile};
use crate::common::programs::{Program, start_listening};
use crate::common::{Daemon, LOOPBACK};

/// Common beginning of all programs.
const PROLOGUE: &str = r#"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)
"#;

/// Compiles a program. Returns the command line that runs it by `siwrun` with `options`.
fn compile_c(daemon: &Daemon, options: &str, source: &str) -> String {
    let file = daemon.dir.path().join("program.c");
    std::fs::write(&file, format!("{PROLOGUE}{source}")).unwrap();
    let (program, _) = compile(daemon, &file);
    format!("{options} {}", program.display())
}

/// Runs a program to its end; returns its output.
fn run_c(daemon: &Daemon, options: &str, source: &str) -> String {
    Program::start(daemon, &compile_c(daemon, options, source)).succeed()
}

/// Events and queue pairs of rdma_cm.
const CONNECTION_STEPS: &str = r#"
static void await(struct rdma_event_channel *channel, enum rdma_cm_event_type kind,
                  struct rdma_cm_id **id)
{
    struct rdma_cm_event *event;
    CHECK(rdma_get_cm_event(channel, &event) == 0);
    CHECK(event->event == kind);
    if (id)
        *id = event->id;
    CHECK(rdma_ack_cm_event(event) == 0);
}

static void add_queue_pair(struct rdma_cm_id *id, struct ibv_cq **cq)
{
    *cq = ibv_create_cq(id->verbs, 8, NULL, NULL, 0);
    CHECK(*cq);
    struct ibv_qp_init_attr init = { .send_cq = *cq, .recv_cq = *cq, .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1,
                 .max_inline_data = 8 } };
    CHECK(rdma_create_qp(id, NULL, &init) == 0);
}

/* Two ends in one process. */
struct connection {
    struct rdma_event_channel *here, *there;
    struct rdma_cm_id *listener, *server, *client;
    struct ibv_cq *server_cq, *client_cq;
};

static void listen_at(struct connection *ends, struct sockaddr *address)
{
    ends->here = rdma_create_event_channel();
    ends->there = rdma_create_event_channel();
    CHECK(ends->here && ends->there);
    CHECK(rdma_create_id(ends->here, &ends->listener, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(ends->listener, address) == 0);
    CHECK(rdma_listen(ends->listener, 1) == 0);
}

/* Connects to the listener, up to a server that has not accepted. */
static void request_connection(struct connection *ends, struct sockaddr *address,
                               struct rdma_conn_param *param)
{
    CHECK(rdma_create_id(ends->there, &ends->client, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_resolve_addr(ends->client, NULL, address, 1000) == 0);
    await(ends->there, RDMA_CM_EVENT_ADDR_RESOLVED, NULL);
    CHECK(rdma_resolve_route(ends->client, 1000) == 0);
    await(ends->there, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL);
    add_queue_pair(ends->client, &ends->client_cq);
    CHECK(rdma_connect(ends->client, param) == 0);
    await(ends->here, RDMA_CM_EVENT_CONNECT_REQUEST, &ends->server);
    add_queue_pair(ends->server, &ends->server_cq);
}

/* As both of them, over IPv4. */
static inline void request_by_ipv4(struct connection *ends, struct rdma_conn_param *param)
{
    struct sockaddr_in address = { .sin_family = AF_INET };
    CHECK(inet_pton(AF_INET, "10.77.0.2", &address.sin_addr) == 1);
    listen_at(ends, (struct sockaddr *)&address);
    address.sin_port = rdma_get_src_port(ends->listener);
    request_connection(ends, (struct sockaddr *)&address, param);
}

static void accept_connection(struct connection *ends, struct rdma_conn_param *param)
{
    CHECK(rdma_accept(ends->server, param) == 0);
    await(ends->here, RDMA_CM_EVENT_ESTABLISHED, NULL);
    await(ends->there, RDMA_CM_EVENT_ESTABLISHED, NULL);
}
"#;

/// The sequence of libfabric: polls find nothing, the peer's message and disconnect arrive, then it
/// requests notification and destroys the queue pair.
const DISCONNECT_BEHIND_A_MESSAGE: &str = r#"
static void run(int polls)
{
    struct connection ends;
    struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
    request_by_ipv4(&ends, &param);
    struct rdma_event_channel *here = ends.here, *there = ends.there;
    struct rdma_cm_id *server = ends.server, *client = ends.client;
    struct ibv_cq *server_cq = ends.server_cq, *client_cq = ends.client_cq;
    static char buffer[8];
    struct ibv_mr *mr = ibv_reg_mr(server->pd, buffer, sizeof buffer, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr);
    struct ibv_sge sge = { (uintptr_t)buffer, sizeof buffer, mr->lkey };
    struct ibv_recv_wr receive = { .wr_id = 7, .sg_list = &sge, .num_sge = 1 }, *bad_receive;
    CHECK(ibv_post_recv(server->qp, &receive, &bad_receive) == 0);
    accept_connection(&ends, &param);

    struct ibv_wc wc;
    CHECK(ibv_poll_cq(server_cq, 1, &wc) == 0);
    char text[8] = "message";
    struct ibv_sge text_sge = { (uintptr_t)text, sizeof text, 0 };
    struct ibv_send_wr send = { .sg_list = &text_sge, .num_sge = 1, .opcode = IBV_WR_SEND,
        .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE }, *bad_send;
    CHECK(ibv_post_send(client->qp, &send, &bad_send) == 0);
    int polled;
    while ((polled = ibv_poll_cq(client_cq, 1, &wc)) == 0) {}
    CHECK(polled == 1 && wc.status == IBV_WC_SUCCESS);
    CHECK(rdma_disconnect(client) == 0);
    await(there, RDMA_CM_EVENT_DISCONNECTED, NULL);

    /* The descriptor is readable only when the event can be taken. */
    struct pollfd readable = { .fd = here->fd, .events = POLLIN };
    if (polls)
        CHECK(fcntl(here->fd, F_SETFL, O_NONBLOCK) == 0);
    else
        CHECK(poll(&readable, 1, 20000) == 1);
    struct rdma_cm_event *event;
    int received = 0;
    while (rdma_get_cm_event(here, &event)) {
        CHECK(errno == EAGAIN);
        received += ibv_poll_cq(server_cq, 1, &wc) == 1 && wc.status == IBV_WC_SUCCESS;
    }
    CHECK(event->event == RDMA_CM_EVENT_DISCONNECTED && event->id == server);
    CHECK(rdma_ack_cm_event(event) == 0);
    rdma_destroy_qp(server);
    CHECK(received == polls);
    rdma_destroy_qp(client);
    ibv_dereg_mr(mr);
    CHECK(rdma_destroy_id(server) == 0 && rdma_destroy_id(client) == 0);
    CHECK(rdma_destroy_id(ends.listener) == 0);
    CHECK(ibv_destroy_cq(server_cq) == 0 && ibv_destroy_cq(client_cq) == 0);
    rdma_destroy_event_channel(here);
    rdma_destroy_event_channel(there);
}

int main(void)
{
    for (int round = 0; round < 20; round++)
        run(1);
    /* Without polling the event arrives a little later. */
    run(0);
    return 0;
}
"#;

#[test]
fn a_disconnect_is_reported_behind_what_came_before() {
    if can_compile() {
        let source = format!("{CONNECTION_STEPS}{DISCONNECT_BEHIND_A_MESSAGE}");
        run_c(&Daemon::loopback(), "", &source);
    }
}

/// No request ever completes.
const SLEEP_FOR_EVENTS: &str = r#"
int main(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0]);
    struct ibv_context *context = ibv_open_device(list[0]);
    CHECK(context);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    CHECK(channel);
    struct ibv_cq *cqs[2], *cq, *last = NULL;
    for (int i = 0; i < 2; i++) {
        cqs[i] = ibv_create_cq(context, 4, NULL, channel, 0);
        CHECK(cqs[i] && ibv_req_notify_cq(cqs[i], 0) == 0);
    }
    void *cookie;
    for (int i = 0; i < 6; i++) {
        struct ibv_wc wc;
        CHECK(ibv_get_cq_event(channel, &cq, &cookie) == 0);
        CHECK(cq != last && (cq == cqs[0] || cq == cqs[1]));
        CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
        ibv_ack_cq_events(cq, 1);
        last = cq;
    }
    CHECK(fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
    CHECK(ibv_get_cq_event(channel, &cq, &cookie) == -1 && errno == EAGAIN);
    CHECK(ibv_destroy_cq(cqs[0]) == 0 && ibv_destroy_cq(cqs[1]) == 0);
    CHECK(ibv_destroy_comp_channel(channel) == 0);
    CHECK(ibv_close_device(context) == 0);
    return 0;
}
"#;

#[test]
fn a_program_can_be_woken_without_an_event() {
    if can_compile() {
        run_c(&Daemon::loopback(), "--wake-after 2", SLEEP_FOR_EVENTS);
    }
}

/// Both ends in one process, without rdma_cm.
const TWO_ENDS: &str = r#"
struct end {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_pd *pd;
    struct ibv_qp *qp;
    union ibv_gid gid;
};

static void open_end(struct end *end, struct ibv_device *device)
{
    end->context = ibv_open_device(device);
    CHECK(end->context);
    end->channel = ibv_create_comp_channel(end->context);
    end->cq = ibv_create_cq(end->context, 8, NULL, end->channel, 0);
    end->pd = ibv_alloc_pd(end->context);
    CHECK(end->channel && end->cq && end->pd);
    struct ibv_qp_init_attr init = { .send_cq = end->cq, .recv_cq = end->cq, .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
    end->qp = ibv_create_qp(end->pd, &init);
    CHECK(end->qp && ibv_query_gid(end->context, 1, 0, &end->gid) == 0);
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
    CHECK(ibv_modify_qp(end->qp, &attr,
        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
}

static void lead_to_rts(struct end *end, struct end *peer)
{
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
        .dest_qp_num = peer->qp->qp_num, .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
        .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = peer->gid, .hop_limit = 1 } } };
    CHECK(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
    memset(&attr, 0, sizeof attr);
    attr.qp_state = IBV_QPS_RTS;
    attr.max_rd_atomic = 1;
    CHECK(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}
"#;

const STOP_AT_ONCE: &str = r#"
static int move(struct end *end, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = { .qp_state = state };
    return ibv_modify_qp(end->qp, &attr, IBV_QP_STATE);
}

int main(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0] && list[1]);
    for (int round = 0; round < 20; round++) {
        struct end here, there;
        open_end(&here, list[0]);
        open_end(&there, list[1]);
        lead_to_rts(&here, &there);
        lead_to_rts(&there, &here);
        CHECK(move(&here, IBV_QPS_SQD) == 0);
        CHECK(move(&here, IBV_QPS_RTS) == 0);
        struct ibv_send_wr write = { .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED };
        struct ibv_send_wr *bad;
        CHECK(ibv_post_send(here.qp, &write, &bad) == 0);
        struct ibv_wc wc;
        int polled;
        while ((polled = ibv_poll_cq(here.cq, 1, &wc)) == 0) {}
        CHECK(polled == 1 && wc.status == IBV_WC_SUCCESS);
        CHECK(ibv_destroy_qp(here.qp) == 0 && ibv_destroy_qp(there.qp) == 0);
    }
    return 0;
}
"#;

#[test]
fn a_queue_pair_can_be_stopped_right_after_rts() {
    if can_compile() {
        let source = format!("{TWO_ENDS}{STOP_AT_ONCE}");
        run_c(&Daemon::loopback(), "", &source);
    }
}

/// Tells the test that the program is ready.
const READINESS: &str = r#"
static inline void start_listening(void)
{
    struct rdma_cm_id *id;
    struct sockaddr_in address = { .sin_family = AF_INET };
    CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(id, (struct sockaddr *)&address) == 0 && rdma_listen(id, 1) == 0);
}
"#;

const POLL_WHEN_THE_DAEMON_IS_GONE: &str = r#"
int main(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id;
    struct sockaddr_in address = { .sin_family = AF_INET };
    CHECK(channel && rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
    CHECK(fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
    CHECK(rdma_bind_addr(id, (struct sockaddr *)&address) == 0 && rdma_listen(id, 1) == 0);
    struct pollfd readable = { .fd = channel->fd, .events = POLLIN };
    CHECK(poll(&readable, 1, 20000) == 1);
    struct rdma_cm_event *event;
    while (rdma_get_cm_event(channel, &event) == 0)
        CHECK(rdma_ack_cm_event(event) == 0);
    CHECK(errno == ENODEV);
    /* A loop around poll(2) would go on for ever. */
    CHECK(poll(&readable, 1, 0) == 0);
    CHECK(rdma_get_cm_event(channel, &event) == -1 && errno == ENODEV);
    return 0;
}
"#;

/// The same for completions and asynchronous events: each queue gets one event and DEVICE_FATAL is
/// raised; then both descriptors behave like those of a device that the kernel has removed.
const POLL_VERBS_WHEN_THE_DAEMON_IS_GONE: &str = r#"
#include <sys/epoll.h>
int main(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    CHECK(context);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    CHECK(channel && pd);
    struct ibv_cq *queues[2], *queue;
    for (int i = 0; i < 2; i++) {
        queues[i] = ibv_create_cq(context, 4, NULL, channel, 0);
        CHECK(queues[i] && ibv_req_notify_cq(queues[i], 0) == 0);
    }
    start_listening();
    CHECK(fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
    CHECK(fcntl(context->async_fd, F_SETFL, O_NONBLOCK) == 0);
    struct pollfd readable[2] = { { .fd = channel->fd, .events = POLLIN },
                                  { .fd = context->async_fd, .events = POLLIN } };
    int watch = epoll_create1(0);
    for (int i = 0; i < 2; i++) {
        struct epoll_event wanted = { .events = EPOLLIN };
        CHECK(epoll_ctl(watch, EPOLL_CTL_ADD, readable[i].fd, &wanted) == 0);
    }
    for (int i = 0; i < 2; i++)
        CHECK(poll(&readable[i], 1, 20000) == 1);
    void *user;
    int count = 0;
    while (ibv_get_cq_event(channel, &queue, &user) == 0) {
        ibv_ack_cq_events(queue, 1);
        count++;
    }
    CHECK(count == 2 && errno == EIO);
    struct ibv_async_event event;
    for (count = 0; ibv_get_async_event(context, &event) == 0; count++) {
        CHECK(event.event_type == IBV_EVENT_DEVICE_FATAL);
        ibv_ack_async_event(&event);
    }
    CHECK(count == 1 && errno == EIO);
    /* A loop around poll(2) or epoll_wait(2) would go on for ever. */
    struct epoll_event found;
    CHECK(poll(readable, 2, 0) == 0 && epoll_wait(watch, &found, 1, 0) == 0);
    CHECK(fcntl(channel->fd, F_GETFL) & O_NONBLOCK);
    CHECK(ibv_get_cq_event(channel, &queue, &user) == -1 && errno == EIO);
    CHECK(fcntl(channel->fd, F_SETFL, 0) == 0 && fcntl(context->async_fd, F_SETFL, 0) == 0);
    CHECK(ibv_get_cq_event(channel, &queue, &user) == -1 && errno == EIO);
    CHECK(ibv_get_async_event(context, &event) == -1 && errno == EIO);
    /* Everything can be freed. */
    for (int i = 0; i < 2; i++)
        ibv_destroy_cq(queues[i]);
    ibv_destroy_comp_channel(channel);
    return 0;
}
"#;

/// Completions that the daemon left, and flushed requests: as long as there are some, a program that
/// arms the queue, polls one and waits gets an event.
const WAIT_WHEN_THE_DAEMON_IS_GONE: &str = r#"
static void take(struct end *end, enum ibv_wc_status status)
{
    struct pollfd readable = { .fd = end->channel->fd, .events = POLLIN };
    struct ibv_cq *queue;
    struct ibv_wc wc;
    void *user;
    CHECK(poll(&readable, 1, 20000) == 1);
    CHECK(ibv_get_cq_event(end->channel, &queue, &user) == 0 && queue == end->cq);
    ibv_ack_cq_events(queue, 1);
    CHECK(ibv_req_notify_cq(queue, 0) == 0);
    CHECK(ibv_poll_cq(queue, 1, &wc) == 1 && wc.status == status);
}

int main(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0] && list[1]);
    struct end here, there;
    open_end(&here, list[0]);
    open_end(&there, list[1]);
    struct ibv_recv_wr receive = { .wr_id = 1 }, *bad_receive;
    for (int i = 0; i < 4; i++)
        CHECK(ibv_post_recv(there.qp, &receive, &bad_receive) == 0);
    lead_to_rts(&here, &there);
    lead_to_rts(&there, &here);
    struct ibv_send_wr send = { .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
    struct ibv_wc wc;
    for (int i = 0; i < 2; i++) {
        CHECK(ibv_post_send(here.qp, &send, &bad) == 0);
        while (ibv_poll_cq(here.cq, 1, &wc) == 0) {}
        CHECK(wc.status == IBV_WC_SUCCESS);
    }
    /* Both messages have arrived, without events: the queue is not armed. */
    struct pollfd readable = { .fd = there.channel->fd, .events = POLLIN };
    CHECK(poll(&readable, 1, 0) == 0);
    start_listening();
    take(&there, IBV_WC_SUCCESS);
    take(&there, IBV_WC_SUCCESS);
    take(&there, IBV_WC_WR_FLUSH_ERR);
    take(&there, IBV_WC_WR_FLUSH_ERR);
    /* The queue is armed and empty. */
    struct ibv_cq *queue;
    void *user;
    CHECK(ibv_get_cq_event(there.channel, &queue, &user) == -1 && errno == EIO);
    CHECK(poll(&readable, 1, 0) == 0);
    return 0;
}
"#;

/// A thread that waits for the events of a closed device wakes when the daemon ends.
const WAIT_ON_A_CLOSED_DEVICE: &str = r#"
#include <pthread.h>
static void *wait_for_event(void *context)
{
    struct ibv_async_event event;
    CHECK(ibv_get_async_event(context, &event) == -1 && errno == EIO);
    return NULL;
}

int main(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    CHECK(context);
    pthread_t waiter;
    CHECK(pthread_create(&waiter, NULL, wait_for_event, context) == 0);
    /* Nothing shows when the thread has begun to wait. */
    poll(NULL, 0, 100);
    CHECK(ibv_close_device(context) == 0);
    /* The memory of the context is used again. */
    for (size_t size = 16; size < 4096; size += 16) {
        void *block = malloc(size);
        CHECK(block);
        memset(block, -1, size);
    }
    start_listening();
    CHECK(pthread_join(waiter, NULL) == 0);
    return 0;
}
"#;

#[test]
fn descriptors_rest_when_the_daemon_is_gone() {
    if !can_compile() {
        return;
    }
    for source in [
        POLL_WHEN_THE_DAEMON_IS_GONE,
        POLL_VERBS_WHEN_THE_DAEMON_IS_GONE,
        WAIT_ON_A_CLOSED_DEVICE,
        &format!("{TWO_ENDS}{WAIT_WHEN_THE_DAEMON_IS_GONE}"),
    ] {
        let mut daemon = Daemon::loopback();
        let line = compile_c(&daemon, "", &format!("{READINESS}{source}"));
        let program = start_listening(&daemon, &line);
        daemon.kill();
        let said = program.succeed();
        assert!(!said.contains("panicked"), "{said}");
    }
}

/// Both contexts share a connection, and each has the events of its own objects.
const EVENTS_OF_TWO_CONTEXTS: &str = r#"
#include <sys/epoll.h>
static void raise_limit_event(struct ibv_context *context, struct ibv_srq **srq)
{
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_srq_init_attr init = { .attr = { .max_wr = 16, .max_sge = 1 } };
    CHECK(pd && (*srq = ibv_create_srq(pd, &init)));
    struct ibv_srq_attr attr = { .srq_limit = 4 };
    CHECK(ibv_modify_srq(*srq, &attr, IBV_SRQ_LIMIT) == 0);
}

int main(void)
{
    int count = 0;
    struct ibv_context **list = rdma_get_devices(&count);
    CHECK(list && count >= 2 && list[0]->async_fd != list[1]->async_fd);
    int watch = epoll_create1(0);
    for (int i = 0; i < 2; i++) {
        struct epoll_event wanted = { .events = EPOLLIN, .data.u32 = i };
        CHECK(epoll_ctl(watch, EPOLL_CTL_ADD, list[i]->async_fd, &wanted) == 0);
        CHECK(fcntl(list[i]->async_fd, F_SETFL, O_NONBLOCK) == 0);
    }
    struct ibv_async_event event;
    for (int round = 0; round < 4; round++) {
        struct ibv_context *own = list[round & 1], *other = list[!(round & 1)];
        struct ibv_srq *srq;
        raise_limit_event(own, &srq);
        struct pollfd readable = { .fd = own->async_fd, .events = POLLIN };
        CHECK(poll(&readable, 1, 20000) == 1);
        if (round < 2)
            CHECK(ibv_get_async_event(other, &event) == -1 && errno == EAGAIN);
        CHECK(poll(&readable, 1, 20000) == 1);
        CHECK(ibv_get_async_event(own, &event) == 0);
        CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq);
        ibv_ack_async_event(&event);
        CHECK(ibv_get_async_event(own, &event) == -1 && errno == EAGAIN);
        CHECK(ibv_get_async_event(other, &event) == -1 && errno == EAGAIN);
        CHECK(poll(&readable, 1, 0) == 0);
        CHECK(ibv_destroy_srq(srq) == 0);
    }
    return 0;
}
"#;

#[test]
fn each_context_of_rdma_cm_gets_its_own_events() {
    if can_compile() {
        run_c(&Daemon::loopback(), "", EVENTS_OF_TWO_CONTEXTS);
    }
}

const DOMAIN_OF_AN_IDENTIFIER: &str = r#"
#include <rdma/rdma_verbs.h>
int main(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id, *bound;
    struct rdma_cm_event *event;
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(7000) };
    CHECK(inet_pton(AF_INET, "10.77.0.2", &address.sin_addr) == 1);
    CHECK(channel && rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000) == 0);
    CHECK(rdma_get_cm_event(channel, &event) == 0 && rdma_ack_cm_event(event) == 0);
    static char buffer[4096];
    CHECK(id->verbs && id->pd && id->pd->context == id->verbs);
    struct ibv_mr *mr = rdma_reg_msgs(id, buffer, sizeof buffer);
    CHECK(mr && rdma_dereg_mr(mr) == 0);
    CHECK(rdma_create_id(channel, &bound, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(bound, (struct sockaddr *)&address) == 0 && bound->pd);
    return 0;
}
"#;

#[test]
fn an_identifier_with_a_device_has_a_protection_domain() {
    if can_compile() {
        run_c(&Daemon::loopback(), "", DOMAIN_OF_AN_IDENTIFIER);
    }
}

const RDMA_CM_IN_A_CHILD: &str = r#"
#include <rdma/rsocket.h>
#include <sys/wait.h>
int main(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    CHECK(channel && rsocket(AF_INET, SOCK_STREAM, 0) >= 0);
    pid_t child = fork();
    if (child == 0) {
        struct rdma_event_channel *own = rdma_create_event_channel();
        struct rdma_cm_id *id;
        struct sockaddr_in address = { .sin_family = AF_INET };
        CHECK(own && rdma_create_id(own, &id, NULL, RDMA_PS_TCP) == 0);
        CHECK(rdma_bind_addr(id, (struct sockaddr *)&address) == 0 && rdma_listen(id, 1) == 0);
        int count = 0;
        struct ibv_context **list = rdma_get_devices(&count);
        CHECK(list && count > 0 && ibv_alloc_pd(list[0]));
        CHECK(rsocket(AF_INET, SOCK_STREAM, 0) >= 0);
        CHECK(rdma_destroy_id(id) == 0);
        rdma_destroy_event_channel(own);
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    struct rdma_cm_id *id;
    CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0 && rdma_destroy_id(id) == 0);
    return 0;
}
"#;

#[test]
fn a_child_of_fork_can_use_rdma_cm() {
    if can_compile() {
        run_c(&Daemon::loopback(), "", RDMA_CM_IN_A_CHILD);
    }
}

const LINK_LOCAL_ADDRESSES: &str = r#"
#include <net/if.h>
static struct sockaddr_in6 address_of(const char *text, unsigned interface)
{
    struct sockaddr_in6 address = { .sin6_family = AF_INET6, .sin6_scope_id = interface };
    CHECK(inet_pton(AF_INET6, text, &address.sin6_addr) == 1);
    return address;
}

static struct rdma_cm_id *create(struct rdma_event_channel *channel)
{
    struct rdma_cm_id *id;
    CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
    return id;
}

/* Error of rdma_bind_addr, or the device. */
static int bind_to(const char *text, unsigned interface, const char **device)
{
    struct sockaddr_in6 address = address_of(text, interface);
    struct rdma_cm_id *id = create(rdma_create_event_channel());
    int error = rdma_bind_addr(id, (struct sockaddr *)&address) ? errno : 0;
    *device = error ? "" : ibv_get_device_name(id->verbs->device);
    return error;
}

/* The same of rdma_resolve_addr. Nobody has the address that ends in 77. */
static int resolve(const char *text, unsigned interface, const char **device)
{
    struct sockaddr_in6 address = address_of(text, interface), *local;
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id = create(channel);
    struct rdma_cm_event *event;
    int error = rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000) ? errno : 0;
    *device = error ? "" : ibv_get_device_name(id->verbs->device);
    if (error)
        return error;
    CHECK(rdma_get_cm_event(channel, &event) == 0);
    int is_found = event->event == RDMA_CM_EVENT_ADDR_RESOLVED;
    CHECK(is_found || event->event == RDMA_CM_EVENT_ADDR_ERROR);
    CHECK(is_found == !!strcmp(text, "fe80::77"));
    CHECK(rdma_ack_cm_event(event) == 0);
    local = (struct sockaddr_in6 *)rdma_get_local_addr(id);
    CHECK(!is_found
          || (IN6_IS_ADDR_LINKLOCAL(&local->sin6_addr) && local->sin6_scope_id == interface));
    return 0;
}

int main(void)
{
    unsigned first = if_nametoindex("siw0"), second = if_nametoindex("siw1");
    const char *device;
    CHECK(first && second && first != second);
    CHECK(bind_to("fe80::1", first, &device) == 0 && !strcmp(device, "siw0"));
    CHECK(bind_to("fe80::2", second, &device) == 0 && !strcmp(device, "siw1"));
    CHECK(bind_to("fe80::1", second, &device) == EADDRNOTAVAIL);
    CHECK(bind_to("fe80::1", 0, &device) == EINVAL);
    CHECK(bind_to("fe80::1", 0x70000000, &device) == ENODEV);
    CHECK(resolve("fe80::2", first, &device) == 0 && !strcmp(device, "siw0"));
    CHECK(resolve("fe80::2", second, &device) == 0 && !strcmp(device, "siw1"));
    CHECK(resolve("fe80::77", second, &device) == 0 && !strcmp(device, "siw1"));
    CHECK(resolve("fe80::2", 0, &device) == EINVAL);
    CHECK(resolve("fe80::2", 0x70000000, &device) == ENODEV);

    struct sockaddr_in6 address = address_of("fe80::2", second);
    struct connection ends;
    listen_at(&ends, (struct sockaddr *)&address);
    address.sin6_port = rdma_get_src_port(ends.listener);
    address.sin6_scope_id = first;
    struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
    request_connection(&ends, (struct sockaddr *)&address, &param);
    accept_connection(&ends, &param);
    return 0;
}
"#;

#[test]
fn the_interface_of_a_link_local_address_selects_the_device() {
    if can_compile() {
        let config = LOOPBACK
            .replace("\"fd77::1/64\"", "\"fe80::1/64\"")
            .replace("\"fd77::2/64\"", "\"fe80::2/64\"");
        let source = format!("{CONNECTION_STEPS}{LINK_LOCAL_ADDRESSES}");
        run_c(&Daemon::start(&config, &[]), "", &source);
    }
}

/// The peer writes to the same address before and after the change of another attribute.
const CHANGED_REGION: &str = r#"
static int write_to(struct end *end, uint64_t address, uint32_t key)
{
    char text[8] = "written";
    struct ibv_sge sge = { (uintptr_t)text, sizeof text, 0 };
    struct ibv_send_wr write = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
        .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
        .wr.rdma = { .remote_addr = address, .rkey = key } }, *bad;
    CHECK(ibv_post_send(end->qp, &write, &bad) == 0);
    struct ibv_wc wc;
    int polled;
    while ((polled = ibv_poll_cq(end->cq, 1, &wc)) == 0) {}
    CHECK(polled == 1);
    return wc.status;
}

int main(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0] && list[1]);
    struct end here, there;
    open_end(&here, list[0]);
    open_end(&there, list[1]);
    CHECK(!ibv_create_cq(here.context, 4, NULL, NULL, -1) && errno == EINVAL);
    CHECK(!ibv_create_cq(here.context, 4, NULL, NULL, here.context->num_comp_vectors));
    lead_to_rts(&here, &there);
    lead_to_rts(&there, &here);
    static char memory[4096];
    const uint64_t iova = 0x5000;
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    struct ibv_mr *mr = ibv_reg_mr_iova(there.pd, memory, sizeof memory, iova, access);
    CHECK(mr && write_to(&here, iova + 64, mr->rkey) == IBV_WC_SUCCESS);
    CHECK(strcmp(memory + 64, "written") == 0);
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS, there.pd, NULL, 0,
                       access | IBV_ACCESS_REMOTE_READ) == 0);
    CHECK(write_to(&here, iova + 128, mr->rkey) == IBV_WC_SUCCESS);
    CHECK(strcmp(memory + 128, "written") == 0);
    return 0;
}
"#;

#[test]
fn a_changed_region_keeps_its_iova() {
    if can_compile() {
        let source = format!("{TWO_ENDS}{CHANGED_REGION}");
        run_c(&Daemon::loopback(), "", &source);
    }
}

/// Files get the numbers of the descriptors of this library; its doorbells must not be written into
/// them.
const ALL_DESCRIPTORS_CLOSED: &str = r#"
#include <sys/stat.h>
int main(int count, char **arguments)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(count == 1 && list && list[0] && list[1]);
    struct end here, there;
    open_end(&here, list[0]);
    open_end(&there, list[1]);
    lead_to_rts(&here, &there);
    lead_to_rts(&there, &here);
    for (int fd = 3; fd < 4096; fd++)
        close(fd);
    char path[4096];
    int files[64];
    for (int i = 0; i < 64; i++) {
        snprintf(path, sizeof path, "%s.%d", arguments[0], i);
        files[i] = open(path, O_CREAT | O_RDWR, 0600);
        CHECK(files[i] >= 0);
    }
    for (int round = 0; round < 8; round++) {
        struct ibv_send_wr write = { .opcode = IBV_WR_RDMA_WRITE }, *bad;
        ibv_post_send(here.qp, &write, &bad);
        struct ibv_srq_init_attr init = { .attr = { .max_wr = 16, .max_sge = 1 } };
        ibv_create_srq(here.pd, &init);
        /* The worker falls asleep, so that the next request rings. */
        poll(NULL, 0, 20);
    }
    for (int i = 0; i < 64; i++) {
        struct stat status;
        CHECK(fstat(files[i], &status) == 0 && status.st_size == 0);
    }
    _exit(0);
}
"#;

#[test]
fn nothing_is_written_to_numbers_that_the_program_has_closed() {
    if can_compile() {
        let source = format!("{TWO_ENDS}{ALL_DESCRIPTORS_CLOSED}");
        run_c(&Daemon::loopback(), "", &source);
    }
}

/// One thread listens, connects and accepts.
const RSOCKETS_OF_ONE_THREAD: &str = r#"
#include <rdma/rsocket.h>
int main(void)
{
    struct sockaddr_in address = { .sin_family = AF_INET }, name[2];
    socklen_t length = sizeof address;
    char text[8];
    CHECK(inet_pton(AF_INET, "10.77.0.2", &address.sin_addr) == 1);
    int listener = rsocket(AF_INET, SOCK_STREAM, 0);
    CHECK(rbind(listener, (void *)&address, length) == 0 && rlisten(listener, 5) == 0);
    CHECK(rgetsockname(listener, (void *)&address, &length) == 0);
    int made[2], accepted[2];
    for (int i = 0; i < 2; i++) {
        made[i] = rsocket(AF_INET, SOCK_STREAM, 0);
        CHECK(rconnect(made[i], (void *)&address, length) == 0);
        CHECK(rgetsockname(made[i], (void *)&name[i], &length) == 0);
        CHECK(rsend(made[i], &"01"[i], 1, 0) == 1);
    }
    struct pollfd readable = { .fd = listener, .events = POLLIN };
    for (int i = 0; i < 2; i++) {
        struct sockaddr_in peer;
        CHECK(rpoll(&readable, 1, 20000) == 1 && readable.revents == POLLIN);
        accepted[i] = raccept(listener, (void *)&peer, &length);
        CHECK(accepted[i] >= 0 && peer.sin_port == name[i].sin_port);
        CHECK(rrecv(accepted[i], text, sizeof text, 0) == 1 && text[0] == "01"[i]);
    }
    CHECK(rpoll(&readable, 1, 0) == 0);
    return 0;
}
"#;

#[test]
fn one_thread_connects_to_its_own_listener() {
    if can_compile() {
        run_c(&Daemon::loopback(), "", RSOCKETS_OF_ONE_THREAD);
    }
}

/// With `rnr_retry_count` of 7 a message waits for its receive work request.
const MESSAGE_BEFORE_ITS_RECEIVE: &str = r#"
int main(void)
{
    struct connection ends;
    struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1,
        .rnr_retry_count = 7 };
    request_by_ipv4(&ends, &param);
    accept_connection(&ends, &param);
    struct { struct rdma_cm_id *from, *to; struct ibv_cq *sent, *received; } ways[2] = {
        { ends.client, ends.server, ends.client_cq, ends.server_cq },
        { ends.server, ends.client, ends.server_cq, ends.client_cq } };
    for (int i = 0; i < 2; i++) {
        char text[8] = "message";
        struct ibv_sge out = { (uintptr_t)text, sizeof text, 0 };
        struct ibv_send_wr send = { .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND,
            .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE }, *bad_send;
        CHECK(ibv_post_send(ways[i].from->qp, &send, &bad_send) == 0);
        struct ibv_wc wc;
        int polled;
        while ((polled = ibv_poll_cq(ways[i].sent, 1, &wc)) == 0) {}
        CHECK(polled == 1 && wc.status == IBV_WC_SUCCESS);
        CHECK(poll(NULL, 0, 50) == 0);
        static char buffer[8];
        struct ibv_mr *mr = ibv_reg_mr(ways[i].to->pd, buffer, 8, IBV_ACCESS_LOCAL_WRITE);
        CHECK(mr);
        struct ibv_sge in = { (uintptr_t)buffer, sizeof buffer, mr->lkey };
        struct ibv_recv_wr receive = { .sg_list = &in, .num_sge = 1 }, *bad_receive;
        CHECK(ibv_post_recv(ways[i].to->qp, &receive, &bad_receive) == 0);
        while ((polled = ibv_poll_cq(ways[i].received, 1, &wc)) == 0) {}
        CHECK(polled == 1 && wc.status == IBV_WC_SUCCESS && strcmp(buffer, "message") == 0);
    }
    return 0;
}
"#;

#[test]
fn a_message_waits_for_its_receive_if_the_program_asks() {
    if can_compile() {
        let source = format!("{CONNECTION_STEPS}{MESSAGE_BEFORE_ITS_RECEIVE}");
        run_c(&Daemon::loopback(), "", &source);
    }
}
