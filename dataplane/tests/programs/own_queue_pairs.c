/*
 * Connects queue pairs that the program creates and moves itself (rdma_init_qp_attr(3), rdma_establish(3)), with
 * identifiers that have none, as rdma_get_cm_event(3) has it. Devices of InfiniBand and RoCE report the end of
 * TIMEWAIT after a disconnection.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)

struct side {
    struct rdma_cm_id *id;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    char memory[64];
};

static struct rdma_cm_event *next_event(struct rdma_event_channel *channel, int kind)
{
    struct rdma_cm_event *event;
    CHECK(rdma_get_cm_event(channel, &event) == 0);
    if ((int)event->event != kind)
        fprintf(stderr, "%s\n", rdma_event_str(event->event));
    CHECK((int)event->event == kind && event->status == 0);
    return event;
}

static void acknowledge(struct rdma_event_channel *channel, int kind)
{
    CHECK(rdma_ack_cm_event(next_event(channel, kind)) == 0);
}

static void move(struct side *side, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = { .qp_state = state };
    int mask;
    CHECK(rdma_init_qp_attr(side->id, &attr, &mask) == 0 && ibv_modify_qp(side->qp, &attr, mask) == 0);
    /* Devices of InfiniBand and RoCE have all attributes that ibv_modify_qp(3) requires. */
    if (side->id->verbs->device->transport_type == IBV_TRANSPORT_IWARP)
        return;
    int required[IBV_QPS_RTS + 1] = {
        [IBV_QPS_INIT] = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        [IBV_QPS_RTR] = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC
                        | IBV_QP_MIN_RNR_TIMER,
        [IBV_QPS_RTS] = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN
                        | IBV_QP_MAX_QP_RD_ATOMIC };
    CHECK(mask == (IBV_QP_STATE | required[state]));
    if (state == IBV_QPS_RTR)
        CHECK(attr.ah_attr.is_global && attr.ah_attr.port_num == 1 && attr.ah_attr.grh.dgid.raw[15] > 0);
}

static void open_side(struct side *side, struct rdma_cm_id *id)
{
    side->id = id;
    CHECK((side->pd = ibv_alloc_pd(id->verbs)) && (side->cq = ibv_create_cq(id->verbs, 8, NULL, NULL, 0)));
    struct ibv_qp_init_attr init = { .send_cq = side->cq, .recv_cq = side->cq, .qp_type = IBV_QPT_RC,
                                     .sq_sig_all = 1, .cap = { 4, 4, 1, 1, 0 } };
    CHECK((side->qp = ibv_create_qp(side->pd, &init)) && !id->qp);
    CHECK((side->mr = ibv_reg_mr(side->pd, side->memory, sizeof side->memory, IBV_ACCESS_LOCAL_WRITE)));
    move(side, IBV_QPS_INIT);
}

static void close_side(struct side *side)
{
    CHECK(ibv_destroy_qp(side->qp) == 0 && rdma_destroy_id(side->id) == 0);
    CHECK(ibv_dereg_mr(side->mr) == 0 && ibv_destroy_cq(side->cq) == 0 && ibv_dealloc_pd(side->pd) == 0);
}

static void complete(struct side *side)
{
    struct ibv_wc completion;
    int count;
    while ((count = ibv_poll_cq(side->cq, 1, &completion)) == 0)
        ;
    CHECK(count == 1 && completion.status == IBV_WC_SUCCESS);
}

/* Number of channels with an event within a second. */
static int readable_channels(struct rdma_event_channel *first, struct rdma_event_channel *second)
{
    struct pollfd channels[2] = { { .fd = first->fd, .events = POLLIN }, { .fd = second->fd, .events = POLLIN } };
    return poll(channels, 2, 1000);
}

/* `waits`: until both connections have left TIMEWAIT. */
static void connect_once(struct rdma_event_channel *servers, struct rdma_event_channel *clients,
                         struct sockaddr_in there, int waits)
{
    static struct side client, server;
    struct rdma_cm_id *id;
    int is_iwarp;

    CHECK(rdma_create_id(clients, &id, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_resolve_addr(id, NULL, (void *)&there, 2000) == 0);
    acknowledge(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
    CHECK(rdma_resolve_route(id, 2000) == 0);
    acknowledge(clients, RDMA_CM_EVENT_ROUTE_RESOLVED);
    open_side(&client, id);
    struct rdma_conn_param parameters = { .rnr_retry_count = 7, .qp_num = client.qp->qp_num };
    CHECK(rdma_establish(id) == -1 && errno == EINVAL);
    CHECK(rdma_connect(id, &parameters) == 0);

    struct rdma_cm_event *request = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
    open_side(&server, request->id);
    CHECK(rdma_ack_cm_event(request) == 0);
    move(&server, IBV_QPS_RTR);
    move(&server, IBV_QPS_RTS);
    parameters.qp_num = server.qp->qp_num;
    CHECK(rdma_accept(server.id, &parameters) == 0);

    struct rdma_cm_event *response = next_event(clients, RDMA_CM_EVENT_CONNECT_RESPONSE);
    CHECK(response->id == id && rdma_ack_cm_event(response) == 0);
    move(&client, IBV_QPS_RTR);
    move(&client, IBV_QPS_RTS);
    CHECK(rdma_establish(id) == 0);
    acknowledge(servers, RDMA_CM_EVENT_ESTABLISHED);

    strcpy(client.memory, "hello");
    struct ibv_sge from = { (uintptr_t)client.memory, 6, client.mr->lkey };
    struct ibv_sge to = { (uintptr_t)server.memory, 6, server.mr->lkey };
    struct ibv_send_wr send = { .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad_send;
    struct ibv_recv_wr receive = { .sg_list = &to, .num_sge = 1 }, *bad_receive;
    CHECK(ibv_post_send(client.qp, &send, &bad_send) == 0);
    CHECK(ibv_post_recv(server.qp, &receive, &bad_receive) == 0);
    complete(&client);
    complete(&server);
    CHECK(strcmp(server.memory, "hello") == 0);

    CHECK(rdma_disconnect(id) == 0);
    acknowledge(clients, RDMA_CM_EVENT_DISCONNECTED);
    acknowledge(servers, RDMA_CM_EVENT_DISCONNECTED);
    is_iwarp = id->verbs->device->transport_type == IBV_TRANSPORT_IWARP;
    if (waits && is_iwarp)
        CHECK(readable_channels(servers, clients) == 0);
    if (waits && !is_iwarp) {
        acknowledge(clients, RDMA_CM_EVENT_TIMEWAIT_EXIT);
        acknowledge(servers, RDMA_CM_EVENT_TIMEWAIT_EXIT);
    }
    close_side(&client);
    close_side(&server);
    CHECK(waits || readable_channels(servers, clients) == 0);
}

int main(void)
{
    struct sockaddr_in there = { .sin_family = AF_INET };
    struct rdma_event_channel *servers = rdma_create_event_channel(), *clients = rdma_create_event_channel();
    struct rdma_cm_id *listener;
    CHECK(servers && clients);
    inet_pton(AF_INET, "10.77.0.2", &there.sin_addr);
    CHECK(rdma_create_id(servers, &listener, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(listener, (void *)&there) == 0 && rdma_listen(listener, 4) == 0);
    there.sin_port = rdma_get_src_port(listener);
    connect_once(servers, clients, there, 1);
    connect_once(servers, clients, there, 0);
    CHECK(rdma_destroy_id(listener) == 0);
    rdma_destroy_event_channel(servers);
    rdma_destroy_event_channel(clients);
    puts("done");
    return 0;
}
