/* Walks the structs that the drop-in library hands to a program, as the headers lay them out that the program is
 * compiled with; RELEASE is theirs. Each function pointer is one of the library's functions, or NULL where siwd
 * lacks the operation, up to the end of the struct in that release. Structs that the program hands over are
 * filled up to their end, and not beyond. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <malloc.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(what)                                                                           \
    do {                                                                                      \
        if (!(what)) {                                                                        \
            fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno);               \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

static void *library;

static void *base_of(void *function)
{
    Dl_info info;
    return dladdr(function, &info) ? info.dli_fbase : NULL;
}

/* Checks the pointers in octets `from` to `to`: those at the listed offsets are functions of the library. */
static void walk(const char *what, const void *object, size_t from, size_t to, const size_t *listed, size_t count)
{
    for (size_t at = from; at < to; at += sizeof(void *)) {
        void *found;
        int is_listed = 0;
        memcpy(&found, (const char *)object + at, sizeof found);
        for (size_t index = 0; index < count; index++)
            is_listed |= listed[index] == at;
        if (is_listed ? !found || base_of(found) != library : !!found) {
            fprintf(stderr, "%s: %p at offset %zu of %zu\n", what, found, at, to);
            exit(1);
        }
    }
}

#define MEMBERS(type, object, from, to, ...)                                                  \
    do {                                                                                      \
        const size_t listed[] = {__VA_ARGS__};                                                \
        walk(#type, object, from, to, listed, sizeof listed / sizeof *listed);                \
    } while (0)

/* Freed memory that is not zero, where the objects are made. */
static void use_heap(void)
{
    void *blocks[512];
    for (int at = 0; at < 512; at++) {
        CHECK((blocks[at] = malloc(16 + at * 8)));
        memset(blocks[at], 0x41, 16 + at * 8);
    }
    for (int at = 0; at < 512; at++)
        free(blocks[at]);
}

#define IS_WHOLE(object) CHECK((object) && malloc_usable_size(object) >= sizeof *(object))

static void walk_context(struct ibv_context *context)
{
#define OP(name) offsetof(struct ibv_context_ops, name)
    MEMBERS(ibv_context_ops, &context->ops, 0, sizeof context->ops, OP(alloc_mw), OP(bind_mw), OP(dealloc_mw),
            OP(poll_cq), OP(req_notify_cq), OP(post_srq_recv), OP(post_send), OP(post_recv));
#define SLOT(name) offsetof(struct verbs_context, name)
    struct verbs_context *all = verbs_get_ctx(context);
    CHECK(all && all->sz >= sizeof *all);
    MEMBERS(verbs_context, all, 0, offsetof(struct verbs_context, sz), SLOT(query_port), SLOT(advise_mr),
            SLOT(create_cq_ex), SLOT(modify_cq), SLOT(query_device_ex), SLOT(create_qp_ex),
            SLOT(create_srq_ex), SLOT(get_srq_num));
}

static void walk_qp(struct ibv_qp *made)
{
#define WR(name) offsetof(struct ibv_qp_ex, wr_##name)
    struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(made);
    IS_WHOLE(qp);
    MEMBERS(ibv_qp_ex, qp, WR(atomic_cmp_swp), sizeof *qp, WR(atomic_cmp_swp), WR(atomic_fetch_add), WR(bind_mw),
            WR(local_inv), WR(rdma_read), WR(rdma_write), WR(rdma_write_imm), WR(send), WR(send_imm),
            WR(send_inv), WR(set_inline_data), WR(set_inline_data_list), WR(set_sge), WR(set_sge_list),
            WR(start), WR(complete), WR(abort));
    CHECK(!qp->comp_mask && !qp->wr_atomic_write && !qp->wr_send_tso);
#if RELEASE >= 56
    CHECK(!qp->wr_flush);
#endif
}

static void walk_cq(struct ibv_cq_ex *cq)
{
#define CQ(name) offsetof(struct ibv_cq_ex, name)
    IS_WHOLE(cq);
    MEMBERS(ibv_cq_ex, cq, CQ(start_poll), sizeof *cq, CQ(start_poll), CQ(next_poll), CQ(end_poll),
            CQ(read_opcode), CQ(read_vendor_err), CQ(read_byte_len), CQ(read_imm_data), CQ(read_qp_num),
            CQ(read_src_qp), CQ(read_wc_flags), CQ(read_slid), CQ(read_sl), CQ(read_dlid_path_bits));
}

/* Two rooms with different marks. */
static _Alignas(16) unsigned char room[2][4096];

static int is_filled(size_t size)
{
    for (size_t at = 0; at < sizeof room[0]; at++) {
        int is_marked = room[0][at] == 0x77 && room[1][at] == 0x88;
        if (at < size ? room[0][at] != room[1][at] : !is_marked) {
            fprintf(stderr, "octet %zu of %zu: %#x %#x\n", at, size, room[0][at], room[1][at]);
            return 0;
        }
    }
    return 1;
}

/* `call` is an expression of `out`. */
#define FILLS(type, call)                                                                     \
    do {                                                                                      \
        memset(room[0], 0x77, sizeof room[0]);                                                \
        memset(room[1], 0x88, sizeof room[1]);                                                \
        for (int which = 0; which < 2; which++) {                                             \
            type *out = (void *)room[which];                                                  \
            CHECK(call);                                                                      \
        }                                                                                     \
        CHECK(is_filled(sizeof(type)));                                                       \
    } while (0)

static void fill_structs(struct ibv_context *context)
{
    FILLS(struct ibv_device_attr_ex, !ibv_query_device_ex(context, NULL, out));
    FILLS(struct ibv_port_attr, !ibv_query_port(context, 1, out));
    FILLS(struct ibv_gid_entry, !ibv_query_gid_ex(context, 1, 0, out, 0));
#if RELEASE >= 65
    FILLS(struct ibv_comp_cntr_caps, !ibv_query_comp_cntr_caps(context, out));
    uint64_t speed = 0;
    CHECK(!ibv_query_port_speed(context, 1, &speed) && speed);
#endif
}

static void use_newest(struct ibv_pd *pd)
{
    (void)pd;
#if RELEASE >= 65
    struct ibv_buf *buffer = NULL;
    char *start = ibv_alloc_buf(pd, 10000, &buffer);
    CHECK(start && buffer && !((size_t)start & 4095));
    memset(start, 1, 10000);
    struct ibv_mr *mr = ibv_reg_buf_mr(pd, buffer, start + 8, 9992, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr && mr->addr == start + 8 && mr->length == 9992 && !ibv_dereg_mr(mr));
    errno = 0;
    CHECK(!ibv_reg_buf_mr(pd, buffer, start + 8, 9993, 1) && errno == EINVAL);
    struct ibv_mr_init_attr init = {.length = 10000, .access = 1, .addr = start, .buf = buffer,
                                    .comp_mask = IBV_REG_MR_MASK_ADDR | IBV_REG_MR_MASK_BUF};
    CHECK((mr = ibv_reg_mr_ex(pd, &init)) && !ibv_dereg_mr(mr));
    struct ibv_pd *other = ibv_alloc_pd(pd->context);
    errno = 0;
    CHECK(other && !ibv_reg_mr_ex(other, &init) && errno == EINVAL && !ibv_dealloc_pd(other));
    CHECK(ibv_export_buf_dmabuf_fd(buffer) == -1 && errno == ENODATA);
    ibv_free_buf(buffer);
    struct ibv_comp_cntr_init_attr counted = {.type = IBV_COMP_CNTR_TYPE_WRS};
    struct ibv_comp_cntr *counter = ibv_create_comp_cntr(pd->context, &counted);
    IS_WHOLE(counter);
    CHECK(counter->context == pd->context && !ibv_destroy_comp_cntr(counter));
    int instance = repoll_create(0);
    struct epoll_event event;
    CHECK(instance >= 0 && repoll_wait(instance, &event, 1, 0) == 0 && !close(instance));
#endif
}

static void walk_rdmacm(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = inet_addr("10.77.0.2")};
    struct rdma_cm_id *id;
    struct rdma_cm_event *event;
    struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP}, *info;
    IS_WHOLE(channel);
    CHECK(!rdma_create_id(channel, &id, &to, RDMA_PS_TCP));
    IS_WHOLE(id);
    CHECK(id->channel == channel && id->context == &to && id->ps == RDMA_PS_TCP && !id->qp && !id->event);
    CHECK(!id->send_cq && !id->recv_cq && !id->srq && !id->pd && id->qp_type == IBV_QPT_RC);
    CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 5000) && !rdma_get_cm_event(channel, &event));
    IS_WHOLE(event);
    CHECK(event->event == RDMA_CM_EVENT_ADDR_RESOLVED && event->id == id && !event->listen_id && !event->status);
    CHECK(!rdma_ack_cm_event(event) && id->verbs && id->port_num == 1);
#if RELEASE >= 65
    CHECK(!rdma_write_cm_event(id, RDMA_CM_EVENT_USER, 3, 0x123456789) && !rdma_get_cm_event(channel, &event));
    CHECK(event->event == RDMA_CM_EVENT_USER && event->status == 3 && event->param.arg == 0x123456789);
    CHECK(!rdma_ack_cm_event(event));
#endif
    CHECK(!rdma_getaddrinfo("10.77.0.2", "7", &hints, &info));
    IS_WHOLE(info);
    CHECK(info->ai_dst_addr && info->ai_dst_len == sizeof to && !info->ai_next);
    rdma_freeaddrinfo(info);
    CHECK(!rdma_destroy_id(id));
    rdma_destroy_event_channel(channel);
}

int main(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    library = base_of(dlsym(RTLD_DEFAULT, "ibv_get_device_list"));
    CHECK(list && list[0] && library && !strcmp(list[0]->name, "siw0"));
    CHECK(list[0]->node_type == IBV_NODE_RNIC && list[0]->transport_type == IBV_TRANSPORT_IWARP);
    use_heap();
    struct ibv_context *context = ibv_open_device(list[0]);
    CHECK(context && context->device == list[0] && context->num_comp_vectors == 1);
    walk_context(context);
    fill_structs(context);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    IS_WHOLE(pd);
    struct ibv_mr *mr = ibv_reg_mr(pd, room, sizeof room, IBV_ACCESS_LOCAL_WRITE);
    IS_WHOLE(mr);
    struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    IS_WHOLE(mw);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    IS_WHOLE(channel);
    for (int round = 0; round < 16; round++) {
        use_heap();
        struct ibv_cq_init_attr_ex queue = {.cqe = 16, .channel = channel};
        struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &queue);
        walk_cq(cq);
        struct ibv_srq_init_attr shared = {.attr = {4, 1, 0}};
        struct ibv_srq *srq = ibv_create_srq(pd, &shared);
        IS_WHOLE(srq);
        struct ibv_qp_init_attr_ex init = {
            .send_cq = ibv_cq_ex_to_cq(cq), .recv_cq = ibv_cq_ex_to_cq(cq), .cap = {8, 8, 1, 1, 0},
            .qp_type = IBV_QPT_RC, .pd = pd, .send_ops_flags = IBV_QP_EX_WITH_SEND,
            .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS};
        use_heap();
        struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
        CHECK(qp && qp->context == context && qp->pd == pd && qp->state == IBV_QPS_RESET && !qp->srq);
        walk_qp(qp);
        CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_srq(srq) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
    }
    use_newest(pd);
    CHECK(!ibv_destroy_comp_channel(channel) && !ibv_dealloc_mw(mw) && !ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd));
    walk_rdmacm();
    CHECK(!ibv_close_device(context));
    ibv_free_device_list(list);
    puts("done");
    return 0;
}
