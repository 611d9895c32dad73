/* Calls of the drop-in library where thread-local variables of languages no longer exist, and in children
 * of fork(2). Usage: program exit|thread|fork */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); _exit(1); } } while (0)

static struct sockaddr_in there = { .sin_family = AF_INET };
static char memory[8192] __attribute__((aligned(4096)));

/* One object of each kind. */
struct objects {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    struct ibv_mw *mw;
    struct ibv_comp_channel *completions;
    struct ibv_cq *cq;
    struct ibv_srq *srq;
    struct ibv_qp *qp;
    struct rdma_event_channel *channel;
    struct rdma_cm_id *listener, *id;
    int socket;
};

static struct objects all;

static void create(struct objects *o)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && (o->context = ibv_open_device(list[0])));
    ibv_free_device_list(list);
    CHECK((o->pd = ibv_alloc_pd(o->context)));
    CHECK((o->mr = ibv_reg_mr(o->pd, memory, sizeof memory, 7)));
    CHECK((o->mw = ibv_alloc_mw(o->pd, IBV_MW_TYPE_1)));
    CHECK((o->completions = ibv_create_comp_channel(o->context)));
    CHECK((o->cq = ibv_create_cq(o->context, 16, NULL, o->completions, 0)));
    struct ibv_srq_init_attr shared = { .attr = { .max_wr = 4, .max_sge = 1 } };
    CHECK((o->srq = ibv_create_srq(o->pd, &shared)));
    struct ibv_qp_init_attr init = { .send_cq = o->cq, .recv_cq = o->cq, .srq = o->srq,
                                     .qp_type = IBV_QPT_RC, .cap = { 4, 0, 1, 0, 0 } };
    CHECK((o->qp = ibv_create_qp(o->pd, &init)));
    CHECK((o->channel = rdma_create_event_channel()));
    CHECK(rdma_create_id(o->channel, &o->listener, NULL, RDMA_PS_TCP) == 0);
    there.sin_port = 0;
    CHECK(rdma_bind_addr(o->listener, (void *)&there) == 0 && rdma_listen(o->listener, 4) == 0);
    there.sin_port = rdma_get_src_port(o->listener);
    CHECK(rdma_create_id(o->channel, &o->id, NULL, RDMA_PS_TCP) == 0);
    CHECK((o->socket = rsocket(AF_INET, SOCK_STREAM, 0)) >= 0);
}

/* Uses each object once; true if all calls succeed. */
static void use(struct objects *o)
{
    struct ibv_port_attr port;
    struct ibv_srq_attr limits;
    struct rdma_cm_event *event;
    CHECK(ibv_query_port(o->context, 1, &port) == 0 && port.state == IBV_PORT_ACTIVE);
    CHECK(ibv_query_srq(o->srq, &limits) == 0 && ibv_req_notify_cq(o->cq, 0) == 0);
    CHECK(ibv_poll_cq(o->cq, 1, &(struct ibv_wc){ 0 }) == 0);
    CHECK(rdma_resolve_addr(o->id, NULL, (void *)&there, 2000) == 0);
    CHECK(rdma_get_cm_event(o->channel, &event) == 0);
    CHECK(event->event == RDMA_CM_EVENT_ADDR_RESOLVED && rdma_ack_cm_event(event) == 0);
    CHECK(*rdma_event_str(RDMA_CM_EVENT_REJECTED) && *ibv_wc_status_str(IBV_WC_SUCCESS));
    CHECK(rconnect(o->socket, NULL, 0) == -1);
}

static void destroy(struct objects *o)
{
    CHECK(rclose(o->socket) == 0);
    CHECK(rdma_destroy_id(o->id) == 0 && rdma_destroy_id(o->listener) == 0);
    rdma_destroy_event_channel(o->channel);
    CHECK(ibv_destroy_qp(o->qp) == 0 && ibv_destroy_srq(o->srq) == 0);
    CHECK(ibv_destroy_cq(o->cq) == 0 && ibv_destroy_comp_channel(o->completions) == 0);
    CHECK(ibv_dealloc_mw(o->mw) == 0 && ibv_dereg_mr(o->mr) == 0);
    CHECK(ibv_dealloc_pd(o->pd) == 0 && ibv_close_device(o->context) == 0);
}

static void create_use_and_destroy(void)
{
    struct objects own;
    create(&own);
    use(&own);
    destroy(&own);
}

static void use_and_destroy_all(void)
{
    use(&all);
    destroy(&all);
    create_use_and_destroy();
    write(1, "done\n", 5);
}

/* Runs after the destructors of thread-local variables. */
static void at_thread_end(void *unused)
{
    (void)unused;
    use_and_destroy_all();
}

static void *end_with_calls(void *key)
{
    create(&all);
    CHECK(pthread_setspecific(*(pthread_key_t *)key, memory) == 0);
    return NULL;
}

static void await_child(pid_t child)
{
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (status)
        fprintf(stderr, "the child ended with %#x\n", status);
    CHECK(status == 0);
}

/* The descriptors of the parent, which the child shares, are as quiet as before. */
static void check_quiet(struct objects *o)
{
    struct pollfd fds[] = { { o->channel->fd, POLLIN, 0 }, { o->completions->fd, POLLIN, 0 },
                            { o->context->async_fd, POLLIN, 0 } };
    CHECK(poll(fds, 3, 0) == 0);
}

static void destroy_in_child(void)
{
    destroy(&all);
}

/* Forks after `before`: the child creates its own objects, and cannot harm those of its parent. */
static void fork_after(const char *name, void (*before)(void))
{
    before();
    pid_t child = fork();
    if (child == 0) {
        create_use_and_destroy();
        _exit(0);
    }
    await_child(child);
    printf("forked after %s\n", name);
}

static void list_devices(void) { ibv_free_device_list(ibv_get_device_list(NULL)); }
static void list_contexts(void) { rdma_free_devices(rdma_get_devices(NULL)); }
static void create_channel(void) { rdma_destroy_event_channel(rdma_create_event_channel()); }
static void create_socket(void) { CHECK(rclose(rsocket(AF_INET, SOCK_STREAM, 0)) == 0); }
static void create_objects(void) { create(&all); }

static void fork_often(void)
{
    fork_after("ibv_get_device_list", list_devices);
    fork_after("rdma_get_devices", list_contexts);
    fork_after("rdma_create_event_channel", create_channel);
    fork_after("rsocket", create_socket);
    fork_after("all objects", create_objects);
    check_quiet(&all);
    /* A child that frees what it inherited, in atexit functions too. */
    pid_t child = fork();
    if (child == 0) {
        struct rdma_cm_event *event;
        CHECK(rdma_get_cm_event(all.channel, &event) == -1);
        struct ibv_cq *cq;
        void *context;
        CHECK(ibv_get_cq_event(all.completions, &cq, &context) == -1);
        CHECK(ibv_alloc_pd(all.context) == NULL);
        close(all.socket);
        all.socket = rsocket(AF_INET, SOCK_STREAM, 0);
        CHECK(all.socket >= 0 && atexit(destroy_in_child) == 0);
        exit(0);
    }
    await_child(child);
    check_quiet(&all);
    use(&all);
    destroy(&all);
    write(1, "done\n", 5);
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    inet_pton(AF_INET, "10.77.0.2", &there.sin_addr);
    if (strcmp(arguments[1], "exit") == 0) {
        CHECK(atexit(use_and_destroy_all) == 0);
        create(&all);
        return 0;
    }
    if (strcmp(arguments[1], "thread") == 0) {
        pthread_key_t key;
        pthread_t thread;
        CHECK(pthread_key_create(&key, at_thread_end) == 0);
        CHECK(pthread_create(&thread, NULL, end_with_calls, &key) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
        return 0;
    }
    CHECK(strcmp(arguments[1], "fork") == 0);
    fork_often();
    return 0;
}
