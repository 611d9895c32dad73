/* Calls every symbol of the drop-in library by its name, as programs do that load it themselves, with
 * output buffers full of marks: a call that succeeds writes all of its struct and nothing behind it.
 * Prints the name of each called symbol. The arguments are symbols that only provider libraries call, as
 * NAME@NODE: each fails with EOPNOTSUPP, except for those that rdma-core's programs and pyverbs call, too. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)

/* Symbols that the headers hide behind macros or do not declare. */
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova
int repoll_create(int flags);
int repoll_ctl(int number, int operation, int fd, struct epoll_event *event);
int repoll_wait(int number, struct epoll_event *events, int most, int timeout_ms);
ssize_t _ibv_query_gid_table(struct ibv_context *, struct ibv_gid_entry *, size_t, uint32_t, size_t);
int _ibv_query_gid_ex(struct ibv_context *, uint32_t, uint32_t, struct ibv_gid_entry *, uint32_t,
                      size_t);
int rdma_create_srq(struct rdma_cm_id *, struct ibv_pd *, struct ibv_srq_init_attr *);
int rdma_create_srq_ex(struct rdma_cm_id *, struct ibv_srq_init_attr_ex *);
void rdma_destroy_srq(struct rdma_cm_id *);
typedef int any_function(void *, ...);

static void *library;

static void *find(const char *name)
{
    void *found = dlsym(library, name);
    if (!found)
        fprintf(stderr, "%s is missing\n", name);
    CHECK(found);
    printf("called %s\n", name);
    fflush(stdout);
    return found;
}

/* Of a function that returns an object. */
typedef void *any_maker(void *, ...);

static any_maker *find_object(const char *name)
{
    return (any_maker *)find(name);
}

#define FN(name) ((__typeof__(&name))find(#name))
#define UNDECLARED(name) ((any_function *)find(#name))

/* Two rooms with different marks. */
static _Alignas(16) unsigned char room[2][4096];
static const unsigned char marks[2] = { 0x77, 0x88 };

static void *mark(int which)
{
    memset(room[which], marks[which], sizeof room[which]);
    return room[which];
}

/* All `size` bytes were written, the same in both rooms, and no other. */
static int is_filled(size_t size)
{
    for (size_t at = 0; at < sizeof room[0]; at++) {
        int is_same = room[0][at] == room[1][at];
        int is_marked = room[0][at] == marks[0] && room[1][at] == marks[1];
        if (at < size ? !is_same : !is_marked) {
            fprintf(stderr, "byte %zu of %zu: %#x %#x\n", at, size, room[0][at], room[1][at]);
            return 0;
        }
    }
    return 1;
}

/* `call` is an expression of `out`. */
#define FILLS(size, call) do { \
    for (int which = 0; which < 2; which++) { void *out = mark(which); CHECK(call); } \
    CHECK(is_filled(size)); } while (0)
#define FAILS_WITH(errnum, call) do { errno = 0; CHECK(call); CHECK(errno == (errnum)); } while (0)

static char memory[8192] __attribute__((aligned(4096)));
static struct sockaddr_in any = { .sin_family = AF_INET }, there = { .sin_family = AF_INET };

static void call_libibverbs(void)
{
    int count;
    struct ibv_device **list = FN(ibv_get_device_list)(&count);
    CHECK(list && count == 2 && !list[2]);
    CHECK(strcmp(FN(ibv_get_device_name)(list[0]), "siw0") == 0);
    CHECK(FN(ibv_get_device_guid)(list[0]) != 0);
    CHECK(FN(ibv_get_device_index)(list[1]) == 1);
    struct ibv_context *context = FN(ibv_open_device)(list[0]);
    CHECK(context);
    FN(ibv_free_device_list)(list);

    FILLS(sizeof(struct ibv_device_attr), FN(ibv_query_device)(context, out) == 0);
    /* The struct of the symbol ends before the fields that were added in 2017. */
    FILLS(48, FN(ibv_query_port)(context, 1, out) == 0);
    struct ibv_port_attr *port = (void *)room[0];
    CHECK(port->state == IBV_PORT_ACTIVE && port->link_layer == IBV_LINK_LAYER_ETHERNET);
    CHECK(port->gid_tbl_len > 0 && port->max_msg_sz > 0);
    CHECK(FN(ibv_query_port)(context, 2, mark(0)) == EINVAL && room[0][0] == marks[0]);
    FILLS(sizeof(union ibv_gid), FN(ibv_query_gid)(context, 1, 0, out) == 0);
    FAILS_WITH(EINVAL, FN(ibv_query_gid)(context, 1, 99, mark(0)) == -1);
    FILLS(sizeof(uint16_t), FN(ibv_query_pkey)(context, 1, 0, out) == 0);
    CHECK(FN(ibv_get_pkey_index)(context, 1, 0xffff) == 0);
    FILLS(sizeof(struct ibv_gid_entry),
          FN(_ibv_query_gid_ex)(context, 1, 0, out, 0, sizeof(struct ibv_gid_entry)) == 0);
    int gids = port->gid_tbl_len;
    FILLS(sizeof(struct ibv_gid_entry) * (size_t)gids,
          (gids = FN(_ibv_query_gid_table)(context, out, 16, 0, sizeof(struct ibv_gid_entry))) > 1);

    struct ibv_pd *pd = FN(ibv_alloc_pd)(context);
    struct ibv_mr *mr = FN(ibv_reg_mr)(pd, memory, sizeof memory, 7);
    CHECK(pd && mr && mr->lkey && mr->length == sizeof memory);
    CHECK(FN(ibv_rereg_mr)(mr, IBV_REREG_MR_CHANGE_ACCESS, pd, 0, 0, 1) == 0);
    CHECK(FN(ibv_dereg_mr)(mr) == 0);
    mr = FN(ibv_reg_mr_iova)(pd, memory, sizeof memory, 4096, 7);
    CHECK(mr && FN(ibv_dereg_mr)(mr) == 0);
    mr = FN(ibv_reg_mr_iova2)(pd, memory, sizeof memory, 4096, 7);
    CHECK(mr && FN(ibv_dereg_mr)(mr) == 0);
    struct ibv_comp_channel *channel = FN(ibv_create_comp_channel)(context);
    CHECK(channel && channel->fd >= 0);
    struct ibv_cq *cq = FN(ibv_create_cq)(context, 16, &count, channel, 0);
    CHECK(cq && cq->cq_context == &count && FN(ibv_resize_cq)(cq, 32) == 0 && cq->cqe >= 32);

    struct ibv_srq_init_attr shared = { .attr = { .max_wr = 4, .max_sge = 1 } };
    struct ibv_srq *srq = FN(ibv_create_srq)(pd, &shared);
    CHECK(srq && shared.attr.max_wr >= 4);
    shared.attr.srq_limit = 1;
    CHECK(FN(ibv_modify_srq)(srq, &shared.attr, IBV_SRQ_LIMIT) == 0);
    FILLS(sizeof(struct ibv_srq_attr), FN(ibv_query_srq)(srq, out) == 0);

    struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                     .cap = { 4, 4, 1, 1, 0 } };
    struct ibv_qp *qp = FN(ibv_create_qp)(pd, &init);
    CHECK(qp && qp->qp_num && qp->state == IBV_QPS_RESET);
    CHECK(FN(ibv_qp_to_qp_ex)(qp) == NULL);
    struct ibv_qp_init_attr queried;
    FILLS(sizeof(struct ibv_qp_attr), FN(ibv_query_qp)(qp, out, IBV_QP_STATE, &queried) == 0);
    /* Without the padding at its end. */
    FILLS(offsetof(struct ibv_qp_init_attr, sq_sig_all) + sizeof(int),
          FN(ibv_query_qp)(qp, &(struct ibv_qp_attr){ 0 }, IBV_QP_STATE, out) == 0);
    struct ibv_qp_attr moved = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
    CHECK(FN(ibv_modify_qp)(qp, &moved, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT
                                            | IBV_QP_ACCESS_FLAGS) == 0);
    CHECK(FN(ibv_query_qp_data_in_order)(qp, IBV_WR_SEND, 0) == 0);
    CHECK(FN(ibv_set_ece)(qp, (void *)room[0]) == EOPNOTSUPP);
    CHECK(FN(ibv_query_ece)(qp, mark(0)) == EOPNOTSUPP && room[0][0] == marks[0]);

    /* An event of the channel: the queue pair flushes a request. */
    struct ibv_recv_wr receive = { .wr_id = 7 }, *bad;
    moved.qp_state = IBV_QPS_ERR;
    CHECK(ibv_post_recv(qp, &receive, &bad) == 0 && ibv_req_notify_cq(cq, 0) == 0);
    CHECK(FN(ibv_modify_qp)(qp, &moved, IBV_QP_STATE) == 0);
    struct ibv_cq *of_event = NULL;
    void *of_context = NULL;
    CHECK(FN(ibv_get_cq_event)(channel, &of_event, &of_context) == 0);
    CHECK(of_event == cq && of_context == &count);
    FN(ibv_ack_cq_events)(cq, 1);
    struct ibv_wc completion[2];
    memset(completion, marks[0], sizeof completion);
    CHECK(ibv_poll_cq(cq, 2, completion) == 1 && completion[0].wr_id == 7);
    CHECK(completion[0].status == IBV_WC_WR_FLUSH_ERR && completion[0].qp_num == qp->qp_num);

    /* The shared receive queue holds fewer requests than its limit; nothing else has happened. */
    struct ibv_async_event event;
    CHECK(FN(ibv_get_async_event)(context, &event) == 0);
    CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq);
    FN(ibv_ack_async_event)(&event);
    int flags = fcntl(context->async_fd, F_GETFL);
    CHECK(fcntl(context->async_fd, F_SETFL, flags | O_NONBLOCK) == 0);
    FAILS_WITH(EAGAIN, FN(ibv_get_async_event)(context, mark(0)) == -1);
    CHECK(room[0][0] == marks[0]);

    FAILS_WITH(EOPNOTSUPP, FN(ibv_create_ah)(pd, (void *)room[0]) == NULL);
    FAILS_WITH(EOPNOTSUPP, FN(ibv_create_ah_from_wc)(pd, completion, NULL, 1) == NULL);
    FAILS_WITH(EOPNOTSUPP, FN(ibv_init_ah_from_wc)(context, 1, completion, NULL, mark(0)) == -1);
    CHECK(FN(ibv_destroy_ah)(NULL) != 0);
    CHECK(FN(ibv_attach_mcast)(qp, (void *)room[0], 0) == EOPNOTSUPP);
    CHECK(FN(ibv_detach_mcast)(qp, (void *)room[0], 0) == EOPNOTSUPP);
    CHECK(FN(ibv_resolve_eth_l2_from_gid)(context, (void *)room[0], mark(1), NULL) != 0);
    UNDECLARED(ibv_copy_ah_attr_from_kern)(room[0], room[1]);
    UNDECLARED(ibv_copy_qp_attr_from_kern)(room[0], room[1]);
    UNDECLARED(ibv_copy_path_rec_from_kern)(room[0], room[1]);
    UNDECLARED(ibv_copy_path_rec_to_kern)(room[0], room[1]);
    UNDECLARED(ibv_register_driver)(NULL);
    FAILS_WITH(EOPNOTSUPP, FN(ibv_import_device)(0) == NULL);
    FAILS_WITH(EOPNOTSUPP, FN(ibv_import_pd)(context, 0) == NULL);
    FAILS_WITH(EOPNOTSUPP, FN(ibv_import_mr)(pd, 0) == NULL);
    FAILS_WITH(EOPNOTSUPP, FN(ibv_import_dm)(context, 0) == NULL);
    FN(ibv_unimport_pd)(NULL);
    FN(ibv_unimport_mr)(NULL);
    FN(ibv_unimport_dm)(NULL);
    FAILS_WITH(EOPNOTSUPP, FN(ibv_reg_dmabuf_mr)(pd, 0, 4096, 0, 0, 0) == NULL);

    /* The newest ones are not in every header; newest_verbs.c uses those that work. */
    FILLS(8, UNDECLARED(ibv_query_port_speed)(context, 1, out) == 0);
    FAILS_WITH(EOPNOTSUPP, !find_object("ibv_reg_mr_ex")(pd, (uint64_t[9]){ 0, 0, 4 }));
    FAILS_WITH(EOPNOTSUPP, !find_object("ibv_alloc_dmah")(context, room[0]));
    void *buffer = NULL, *start = find_object("ibv_alloc_buf")(pd, (size_t)4096, &buffer);
    CHECK(start && buffer && !((uintptr_t)start & 4095));
    mr = find_object("ibv_reg_buf_mr")(pd, buffer, start, (size_t)4096, 1);
    CHECK(mr && mr->addr == start && ibv_dereg_mr(mr) == 0);
    FAILS_WITH(EINVAL, !find_object("ibv_reg_buf_mr")(pd, buffer, start, (size_t)4097, 1));
    CHECK(UNDECLARED(ibv_dealloc_dmah)(room[0]) == EOPNOTSUPP);
    FAILS_WITH(EOPNOTSUPP, UNDECLARED(ibv_dm_export_dmabuf_fd)(room[0]) == -1);
    FAILS_WITH(ENODATA, UNDECLARED(ibv_export_buf_dmabuf_fd)(buffer) == -1);
    UNDECLARED(ibv_free_buf)(buffer);
    FILLS(16, UNDECLARED(_ibv_query_comp_cntr_caps)(context, out, (size_t)16) == 0);
    void *counter = find_object("ibv_create_comp_cntr")(context, (uint32_t[3]){ 0 });
    CHECK(counter && UNDECLARED(ibv_set_comp_cntr)(counter, (uint64_t)5) == 0);
    CHECK(UNDECLARED(ibv_set_err_comp_cntr)(counter, (uint64_t)6) == 0);
    CHECK(UNDECLARED(ibv_inc_comp_cntr)(counter, (uint64_t)1) == 0);
    CHECK(UNDECLARED(ibv_inc_err_comp_cntr)(counter, (uint64_t)1) == 0);
    FILLS(8, UNDECLARED(ibv_read_comp_cntr)(counter, out) == 0);
    FILLS(8, UNDECLARED(ibv_read_err_comp_cntr)(counter, out) == 0);
    CHECK(*(uint64_t *)room[0] == 7);
    CHECK(UNDECLARED(ibv_qp_attach_comp_cntr)(qp, counter, (uint32_t[2]){ 0, 1 }) == EINVAL);
    CHECK(UNDECLARED(ibv_destroy_comp_cntr)(counter) == 0);

    CHECK(FN(ibv_destroy_qp)(qp) == 0 && FN(ibv_destroy_srq)(srq) == 0);
    CHECK(FN(ibv_destroy_cq)(cq) == 0 && FN(ibv_destroy_comp_channel)(channel) == 0);
    CHECK(FN(ibv_dealloc_pd)(pd) == 0 && FN(ibv_close_device)(context) == 0);

    CHECK(FN(ibv_fork_init)() == 0);
    CHECK(FN(ibv_is_fork_initialized)() == IBV_FORK_UNNEEDED);
    CHECK(((any_function *)find("ibv_dontfork_range"))(memory, (size_t)4096) == 0);
    CHECK(((any_function *)find("ibv_dofork_range"))(memory, (size_t)4096) == 0);
    CHECK(*FN(ibv_node_type_str)(IBV_NODE_RNIC) && *FN(ibv_port_state_str)(IBV_PORT_ACTIVE));
    CHECK(*FN(ibv_event_type_str)(IBV_EVENT_CQ_ERR) && *FN(ibv_wc_status_str)(IBV_WC_SUCCESS));
    CHECK(FN(ibv_rate_to_mult)(IBV_RATE_10_GBPS) == 4 && FN(mult_to_ibv_rate)(4) == IBV_RATE_10_GBPS);
    CHECK(FN(ibv_rate_to_mbps)(IBV_RATE_10_GBPS) == 10000);
    CHECK(FN(mbps_to_ibv_rate)(10000) == IBV_RATE_10_GBPS);
    const char *(*sysfs)(void) = find("ibv_get_sysfs_path");
    int (*read_file)(const char *, const char *, char *, size_t) = find("ibv_read_sysfs_file");
    CHECK(sysfs());
    char folder[4096];
    snprintf(folder, sizeof folder, "%s/class/infiniband/siw0", sysfs());
    CHECK(read_file(folder, "node_type", mark(0), 64) > 0 && room[0][64] == marks[0]);
    CHECK(read_file(folder, "no such file", mark(0), 64) < 0);
}

static struct rdma_cm_event *next_event(struct rdma_event_channel *channel, int kind)
{
    struct rdma_cm_event *event = NULL;
    CHECK(FN(rdma_get_cm_event)(channel, &event) == 0);
    CHECK(*FN(rdma_event_str)(event->event));
    if ((int)event->event != kind)
        fprintf(stderr, "%s\n", FN(rdma_event_str)(event->event));
    CHECK((int)event->event == kind);
    return event;
}

static void acknowledge(struct rdma_event_channel *channel, int kind)
{
    CHECK(FN(rdma_ack_cm_event)(next_event(channel, kind)) == 0);
}

static void resolve(struct rdma_event_channel *channel, struct rdma_cm_id *id)
{
    CHECK(FN(rdma_resolve_addr)(id, NULL, (void *)&there, 2000) == 0);
    acknowledge(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
    CHECK(FN(rdma_resolve_route)(id, 2000) == 0);
    acknowledge(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

static void call_librdmacm(void)
{
    struct rdma_event_channel *channel = FN(rdma_create_event_channel)();
    struct rdma_event_channel *other = FN(rdma_create_event_channel)();
    struct rdma_cm_id *listener, *client, *server;
    int count = 0, one = 1;
    CHECK(channel && other);
    struct ibv_context **devices = FN(rdma_get_devices)(&count);
    CHECK(devices && count == 2 && devices[0] && !devices[2]);
    FN(rdma_free_devices)(devices);

    CHECK(FN(rdma_create_id)(channel, &listener, &one, RDMA_PS_TCP) == 0);
    CHECK(listener->context == &one && listener->channel == channel);
    CHECK(FN(rdma_set_option)(listener, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &one, 4) == 0);
    CHECK(FN(rdma_bind_addr)(listener, (void *)&any) == 0);
    there.sin_port = FN(rdma_get_src_port)(listener);
    CHECK(there.sin_port && FN(rdma_get_dst_port)(listener) == 0);
    CHECK(FN(rdma_listen)(listener, 4) == 0 && FN(rdma_migrate_id)(listener, other) == 0);

    struct rdma_conn_param parameters = { .responder_resources = 1, .initiator_depth = 1 };
    for (int way = 0; way < 3; way++) {
        struct ibv_qp_init_attr init = { .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
        CHECK(FN(rdma_create_id)(channel, &client, NULL, RDMA_PS_TCP) == 0);
        resolve(channel, client);
        CHECK(FN(rdma_get_dst_port)(client) == there.sin_port);
        CHECK(FN(rdma_create_qp)(client, NULL, &init) == 0 && client->qp);
        int mask = 0;
        struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
        CHECK(FN(rdma_init_qp_attr)(client, &attr, &mask) == 0 && mask && attr.port_num == 1);
        CHECK(FN(rdma_connect)(client, &parameters) == 0);
        struct rdma_cm_event *request = next_event(other, RDMA_CM_EVENT_CONNECT_REQUEST);
        CHECK(request->listen_id == listener && request->param.conn.private_data_len == 0);
        server = request->id;
        if (way == 0) {
            CHECK(FN(rdma_reject)(server, "no", 2) == 0);
        } else if (way == 1) {
            CHECK(FN(rdma_reject_ece)(server, "no", 2) == 0);
        } else {
            struct ibv_srq_init_attr shared = { .attr = { .max_wr = 4, .max_sge = 1 } };
            CHECK(FN(rdma_create_srq)(server, NULL, &shared) == 0 && server->srq);
            struct ibv_qp_init_attr_ex extended = {
                .cap = init.cap, .qp_type = IBV_QPT_RC, .comp_mask = IBV_QP_INIT_ATTR_PD,
                .pd = server->pd };
            CHECK(FN(rdma_create_qp_ex)(server, &extended) == 0 && server->qp);
            CHECK(FN(rdma_accept)(server, &parameters) == 0);
        }
        CHECK(FN(rdma_ack_cm_event)(request) == 0);
        if (way < 2) {
            acknowledge(channel, RDMA_CM_EVENT_REJECTED);
        } else {
            acknowledge(channel, RDMA_CM_EVENT_ESTABLISHED);
            acknowledge(other, RDMA_CM_EVENT_ESTABLISHED);
            CHECK(FN(rdma_establish)(client) == 0);
            CHECK(FN(rdma_notify)(client, IBV_EVENT_COMM_EST) == 0);
            FAILS_WITH(EOPNOTSUPP, FN(rdma_set_local_ece)(client, (void *)room[0]) == -1);
            FAILS_WITH(EOPNOTSUPP, FN(rdma_get_remote_ece)(client, mark(0)) == -1);
            FAILS_WITH(EOPNOTSUPP, FN(rdma_join_multicast)(client, (void *)&there, NULL) == -1);
            FAILS_WITH(EOPNOTSUPP, FN(rdma_join_multicast_ex)(client, (void *)room[0], NULL) == -1);
            FAILS_WITH(EADDRNOTAVAIL, FN(rdma_leave_multicast)(client, (void *)&there) == -1);
            CHECK(FN(rdma_disconnect)(client) == 0);
            acknowledge(channel, RDMA_CM_EVENT_DISCONNECTED);
            acknowledge(other, RDMA_CM_EVENT_DISCONNECTED);
            FN(rdma_destroy_qp)(server);
            FN(rdma_destroy_srq)(server);
        }
        FN(rdma_destroy_qp)(client);
        CHECK(!client->qp && FN(rdma_destroy_id)(client) == 0 && FN(rdma_destroy_id)(server) == 0);
    }
    struct ibv_srq_init_attr_ex shared = { .attr = { .max_wr = 4, .max_sge = 1 } };
    CHECK(FN(rdma_create_id)(channel, &client, NULL, RDMA_PS_TCP) == 0);
    resolve(channel, client);
    CHECK(FN(rdma_create_srq_ex)(client, &shared) == 0 && client->srq);
    FN(rdma_destroy_srq)(client);
    CHECK(FN(rdma_destroy_id)(client) == 0 && FN(rdma_destroy_id)(listener) == 0);
    FN(rdma_destroy_event_channel)(channel);
    FN(rdma_destroy_event_channel)(other);

    struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE | RAI_NUMERICHOST,
                                   .ai_port_space = RDMA_PS_TCP }, *found = NULL;
    CHECK(FN(rdma_getaddrinfo)("10.77.0.2", NULL, &hints, &found) == 0 && found->ai_src_len);
    CHECK(FN(rdma_create_ep)(&listener, found, NULL, NULL) == 0);
    CHECK(fcntl(listener->channel->fd, F_SETFL, O_NONBLOCK) == 0);
    CHECK(FN(rdma_listen)(listener, 1) == 0);
    FAILS_WITH(EAGAIN, FN(rdma_get_request)(listener, &server) == -1);
    FN(rdma_freeaddrinfo)(found);
    FN(rdma_destroy_ep)(listener);
}

/* Functions and events that older headers lack. */
static void call_newest_librdmacm(void)
{
    enum { ADDRINFO_RESOLVED = 16, USER = 18 };
    int (*resolve)(struct rdma_cm_id *, const char *, const char *, const struct rdma_addrinfo *) =
        find("rdma_resolve_addrinfo");
    int (*query)(struct rdma_cm_id *, struct rdma_addrinfo **) = find("rdma_query_addrinfo");
    int (*write_event)(struct rdma_cm_id *, int, int, uint64_t) = find("rdma_write_cm_event");
    struct rdma_event_channel *channel = FN(rdma_create_event_channel)();
    struct rdma_addrinfo hints = { .ai_flags = RAI_NUMERICHOST }, *found = NULL;
    struct rdma_addrinfo subnet = { .ai_flags = 0x10 };
    struct rdma_cm_event *event;
    struct rdma_cm_id *id;
    CHECK(FN(rdma_create_id)(channel, &id, NULL, RDMA_PS_TCP) == 0);
    /* Those of siw_rdma.h; streaming_mode.c has connections. */
    int (*open)(struct rdma_cm_id *, int) = find("siw_stream_open");
    ssize_t (*send)(struct rdma_cm_id *, const void *, size_t, int) = find("siw_stream_send");
    ssize_t (*receive)(struct rdma_cm_id *, void *, size_t, int) = find("siw_stream_recv");
    char byte = 0;
    FAILS_WITH(EINVAL, open(id, 0) == -1);
    FAILS_WITH(ENOTCONN, send(id, &byte, 1, 0) == -1);
    FAILS_WITH(ENOTCONN, receive(id, &byte, 1, 0) == -1);
    FAILS_WITH(ENOENT, query(id, &found) == -1);
    FAILS_WITH(EOPNOTSUPP, resolve(id, NULL, "7174", &subnet) == -1);
    FAILS_WITH(ENODATA, resolve(id, "no address", "7174", &hints) == -1);
    CHECK(resolve(id, "10.77.0.2", "7174", &hints) == 0);
    FAILS_WITH(EBUSY, resolve(id, "10.77.0.2", "7174", &hints) == -1);
    event = next_event(channel, ADDRINFO_RESOLVED);
    CHECK(event->id == id && event->status == 0 && FN(rdma_ack_cm_event)(event) == 0);
    CHECK(query(id, &found) == 0 && ((struct sockaddr_in *)found->ai_dst_addr)->sin_port == htons(7174));
    FN(rdma_freeaddrinfo)(found);
    FAILS_WITH(ENOENT, query(id, &found) == -1);

    FAILS_WITH(EINVAL, write_event(id, RDMA_CM_EVENT_ESTABLISHED, 0, 0) == -1);
    CHECK(write_event(id, USER, -7, 1ull << 40 | 5) == 0);
    event = next_event(channel, USER);
    CHECK(event->id == id && event->status == -7);
    CHECK(*(uint64_t *)&event->param == (1ull << 40 | 5) && FN(rdma_ack_cm_event)(event) == 0);
    /* A result that nobody took goes with its identifier. */
    CHECK(resolve(id, "10.77.0.2", NULL, &hints) == 0);
    acknowledge(channel, ADDRINFO_RESOLVED);
    CHECK(FN(rdma_destroy_id)(id) == 0);
    FN(rdma_destroy_event_channel)(channel);
}

static void call_rsockets(void)
{
    socklen_t length = sizeof there;
    int one = 1, value;
    there.sin_port = 0;
    int listener = FN(rsocket)(AF_INET, SOCK_STREAM, 0);
    CHECK(listener >= 0);
    CHECK(FN(rsetsockopt)(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
    CHECK(FN(rbind)(listener, (void *)&there, length) == 0 && FN(rlisten)(listener, 4) == 0);
    CHECK(FN(rgetsockname)(listener, (void *)&there, &length) == 0 && there.sin_port);
    int client = FN(rsocket)(AF_INET, SOCK_STREAM, 0);
    CHECK(FN(rconnect)(client, (void *)&there, length) == 0);
    /* Connected before it is accepted. */
    FILLS(sizeof there, (length = sizeof room[0]) && FN(rgetpeername)(client, out, &length) == 0);
    CHECK(length == sizeof there && memcmp(room[0], &there, 8) == 0);
    int server = FN(raccept)(listener, mark(0), &length);
    CHECK(server >= 0 && length == sizeof there);
    length = sizeof value;
    CHECK(FN(rgetsockopt)(server, SOL_SOCKET, SO_TYPE, &value, &length) == 0);
    CHECK(value == SOCK_STREAM && FN(rfcntl)(server, F_GETFL, 0) == O_RDWR);

    struct iovec part = { "ab", 2 }, into = { room[0], 2 };
    struct msghdr out = { .msg_iov = &part, .msg_iovlen = 1 };
    struct msghdr in = { .msg_iov = &into, .msg_iovlen = 1 };
    CHECK(FN(rsend)(client, "ab", 2, 0) == 2 && FN(rwrite)(client, "ab", 2) == 2);
    CHECK(FN(rwritev)(client, &part, 1) == 2 && FN(rsendmsg)(client, &out, 0) == 2);
    CHECK(FN(rsendto)(client, "ab", 2, 0, NULL, 0) == 2);
    struct pollfd readable = { .fd = server, .events = POLLIN };
    CHECK(FN(rpoll)(&readable, 1, 20000) == 1);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(server, &set);
    CHECK(FN(rselect)(server + 1, &set, NULL, NULL, NULL) == 1 && FD_ISSET(server, &set));
    int instance = FN(repoll_create)(0);
    struct epoll_event event = { .events = EPOLLIN, .data.u64 = 5 }, got;
    CHECK(FN(repoll_ctl)(instance, EPOLL_CTL_ADD, server, &event) == 0);
    CHECK(FN(repoll_wait)(instance, &got, 1, 20000) == 1 && got.data.u64 == 5);
    close(instance);
    FILLS(1, FN(rrecv)(server, out, 1, MSG_WAITALL) == 1 && (((char *)out)[0] = 'x'));
    CHECK(FN(rread)(server, mark(0), 2) == 2 && room[0][0] == 'a' && room[0][2] == marks[0]);
    CHECK(FN(rreadv)(server, &into, 1) == 2 && FN(rrecvmsg)(server, &in, 0) == 2);
    length = sizeof there;
    CHECK(FN(rrecvfrom)(server, mark(0), 2, 0, NULL, NULL) == 2);
    FAILS_WITH(EAGAIN, FN(rrecv)(server, mark(0), 2, MSG_DONTWAIT) == -1);
    CHECK(room[0][0] == marks[0]);
    FAILS_WITH(EINVAL, FN(riomap)(server, memory, 4096, PROT_READ, 0, -1) == -1);
    FAILS_WITH(EINVAL, FN(riounmap)(server, memory, 4096) == -1);
    /* Nothing is mapped. */
    CHECK(FN(riowrite)(client, memory, 1, 0, MSG_DONTWAIT) == 0);
    CHECK(FN(rshutdown)(client, SHUT_RDWR) == 0);
    CHECK(FN(rclose)(client) == 0 && FN(rclose)(server) == 0 && FN(rclose)(listener) == 0);
}

/* Without a result. */
static int is_void(const char *name)
{
    const char *names[] = { "__verbs_log", "verbs_init_cq", "verbs_set_ops", "verbs_uninit_context",
                            "ibv_dmabuf_heap_destroy", "ibv_dmabuf_heap_free" };
    for (size_t at = 0; at < sizeof names / sizeof *names; at++)
        if (strcmp(name, names[at]) == 0)
            return 1;
    return strncmp(name, "verbs_register_driver_", 22) == 0;
}

static void call_private(struct ibv_context *context, const char *name, const char *node)
{
    void *found = dlvsym(library, name, node);
    if (!found)
        fprintf(stderr, "%s@%s is missing\n", name, node);
    CHECK(found);
    if (strcmp(name, "verbs_allow_disassociate_destroy") == 0) {
        CHECK(*(char *)found == 0);
    } else if (strcmp(name, "ibv_query_gid_type") == 0) {
        int (*query)(struct ibv_context *, uint8_t, unsigned, void *) = found;
        FILLS(sizeof(uint32_t), query(context, 1, 0, out) == 0);
        FAILS_WITH(EINVAL, query(context, 1, 99, mark(0)) == -1);
        FAILS_WITH(EINVAL, query(context, 2, 0, mark(0)) == -1);
    } else if (strcmp(name, "ibv_wr_opcode_str") == 0) {
        const char *(*name_of)(int) = found;
        CHECK(strcmp(name_of(IBV_WR_SEND_WITH_INV), "send-with-inv") == 0);
        CHECK(strcmp(name_of(14), "unknown") == 0 && strcmp(name_of(-1), "unknown") == 0);
    } else if (strcmp(name, "ibv_read_ibdev_sysfs_file") == 0) {
        FAILS_WITH(ENOENT, ((any_function *)found)(mark(0), (size_t)64, NULL, "node_type") == -1);
    } else if (is_void(name)) {
        ((any_function *)found)(NULL);
    } else {
        int result;
        FAILS_WITH(EOPNOTSUPP, ((result = ((any_function *)found)(NULL)), 1));
        CHECK(result == EOPNOTSUPP || result == 0);
    }
    printf("called %s@%s\n", name, node);
}

static void call_private_ones(char **symbols)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = ibv_open_device(list[0]);
    CHECK(context);
    for (; *symbols; symbols++) {
        char *node = strchr(*symbols, '@');
        CHECK(node);
        *node = 0;
        call_private(context, *symbols, node + 1);
    }
    CHECK(ibv_close_device(context) == 0);
    ibv_free_device_list(list);
}

int main(int count, char **arguments)
{
    inet_pton(AF_INET, "10.77.0.2", &there.sin_addr);
    library = dlopen("librdmacm.so.1", RTLD_NOW);
    CHECK(library);
    call_libibverbs();
    call_librdmacm();
    call_newest_librdmacm();
    call_rsockets();
    if (count > 1)
        call_private_ones(arguments + 1);
    return 0;
}
