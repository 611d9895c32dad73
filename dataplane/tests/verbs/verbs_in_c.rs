//! Behavior of the drop-in library seen by C programs, in cases that the tests with the
//! distribution's programs reach only occasionally.

use crate::common::Daemon;
use crate::common::c_programs::{can_compile, compile};
use crate::common::programs::{Program, start_listening};

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

/// The sequence of libfabric: polls find nothing, the peer's message and disconnect arrive, then it
/// requests notification and destroys the queue pair.
const DISCONNECT_BEHIND_A_MESSAGE: &str = r#"
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

static void run(int polls)
{
    struct rdma_event_channel *here = rdma_create_event_channel();
    struct rdma_event_channel *there = rdma_create_event_channel();
    struct rdma_cm_id *listener, *server, *client;
    struct ibv_cq *server_cq, *client_cq;
    struct sockaddr_in address = { .sin_family = AF_INET };
    CHECK(inet_pton(AF_INET, "10.77.0.2", &address.sin_addr) == 1);
    CHECK(here && there);
    CHECK(rdma_create_id(here, &listener, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(listener, (struct sockaddr *)&address) == 0);
    CHECK(rdma_listen(listener, 1) == 0);
    address.sin_port = rdma_get_src_port(listener);
    CHECK(rdma_create_id(there, &client, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_resolve_addr(client, NULL, (struct sockaddr *)&address, 1000) == 0);
    await(there, RDMA_CM_EVENT_ADDR_RESOLVED, NULL);
    CHECK(rdma_resolve_route(client, 1000) == 0);
    await(there, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL);
    add_queue_pair(client, &client_cq);
    struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
    CHECK(rdma_connect(client, &param) == 0);
    await(here, RDMA_CM_EVENT_CONNECT_REQUEST, &server);
    add_queue_pair(server, &server_cq);
    static char buffer[8];
    struct ibv_mr *mr = ibv_reg_mr(server->pd, buffer, sizeof buffer, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr);
    struct ibv_sge sge = { (uintptr_t)buffer, sizeof buffer, mr->lkey };
    struct ibv_recv_wr receive = { .wr_id = 7, .sg_list = &sge, .num_sge = 1 }, *bad_receive;
    CHECK(ibv_post_recv(server->qp, &receive, &bad_receive) == 0);
    CHECK(rdma_accept(server, &param) == 0);
    await(here, RDMA_CM_EVENT_ESTABLISHED, NULL);
    await(there, RDMA_CM_EVENT_ESTABLISHED, NULL);

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

    struct pollfd readable = { .fd = here->fd, .events = POLLIN };
    CHECK(poll(&readable, 1, 20000) == 1);
    if (polls)
        CHECK(fcntl(here->fd, F_SETFL, O_NONBLOCK) == 0);
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
    CHECK(rdma_destroy_id(listener) == 0);
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
        run_c(&Daemon::loopback(), "", DISCONNECT_BEHIND_A_MESSAGE);
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
const STOP_AT_ONCE: &str = r#"
struct end {
    struct ibv_context *context;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    union ibv_gid gid;
};

static void open_end(struct end *end, struct ibv_device *device)
{
    end->context = ibv_open_device(device);
    CHECK(end->context);
    end->cq = ibv_create_cq(end->context, 8, NULL, NULL, 0);
    struct ibv_pd *pd = ibv_alloc_pd(end->context);
    CHECK(end->cq && pd);
    struct ibv_qp_init_attr init = { .send_cq = end->cq, .recv_cq = end->cq, .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
    end->qp = ibv_create_qp(pd, &init);
    CHECK(end->qp && ibv_query_gid(end->context, 1, 0, &end->gid) == 0);
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
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
        run_c(&Daemon::loopback(), "", STOP_AT_ONCE);
    }
}

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
    /* Tells the test that the program is ready. */
    struct rdma_cm_id *id;
    struct sockaddr_in address = { .sin_family = AF_INET };
    CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(id, (struct sockaddr *)&address) == 0 && rdma_listen(id, 1) == 0);
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

#[test]
fn descriptors_rest_when_the_daemon_is_gone() {
    if !can_compile() {
        return;
    }
    for source in [
        POLL_WHEN_THE_DAEMON_IS_GONE,
        POLL_VERBS_WHEN_THE_DAEMON_IS_GONE,
    ] {
        let mut daemon = Daemon::loopback();
        let line = compile_c(&daemon, "", source);
        let program = start_listening(&daemon, &line);
        daemon.kill();
        program.succeed();
    }
}
