/*
 * siw-lab-agent: the lab's hand on the target. It does what the lab says with libibverbs and librdmacm, and
 * decides nothing by itself.
 *
 *   cc -O2 -o siw-lab-agent siw-lab-agent.c -libverbs -lrdmacm
 *   siw-lab-agent PORT          (on an address that is not the device under test's)
 *
 * The lab sends a JSON object a line, {"do":"reg","name":"r","size":64,"access":"write"}, and gets one back:
 * {"ok":true,...} or {"error":"..."}. README.md lists the commands. Objects are flat; strings have no escapes.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#define VERSION 1
#define LINE 8192
#define REGIONS 16
#define DEPTH 64

struct region {
    char name[16];
    unsigned char *memory;
    size_t size;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
};

static FILE *answers;
static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener, *request, *id;
static struct ibv_pd *pd, *other_pd;
static struct ibv_cq *cq;
static struct region regions[REGIONS];
static uint16_t listening;

/* Answers. */

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(answers, "{\"error\":\"");
    vfprintf(answers, format, arguments);
    fprintf(answers, "\"}\n");
    va_end(arguments);
}

static void failed(const char *what) { fail("%s: %s", what, strerror(errno)); }

static void ok(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(answers, "{\"ok\":true");
    vfprintf(answers, format, arguments);
    fprintf(answers, "}\n");
    va_end(arguments);
}

/* Fields of a command. */

static const char *field(const char *line, const char *name) {
    char key[40];
    snprintf(key, sizeof key, "\"%s\":", name);
    const char *at = strstr(line, key);
    return at ? at + strlen(key) : NULL;
}

static void text(const char *line, const char *name, char *out, size_t size) {
    const char *at = field(line, name);
    size_t length = 0;
    if (at && *at == '"')
        for (at++; *at && *at != '"' && length + 1 < size; at++) out[length++] = *at;
    out[length] = 0;
}

static uint64_t number(const char *line, const char *name, uint64_t otherwise) {
    const char *at = field(line, name);
    return at ? strtoull(at, NULL, 10) : otherwise;
}

static size_t octets(const char *line, const char *name, unsigned char *out, size_t size) {
    char hex[2048];
    text(line, name, hex, sizeof hex);
    size_t count = strlen(hex) / 2;
    if (count > size) count = size;
    for (size_t at = 0; at < count; at++) {
        unsigned value = 0;
        sscanf(hex + 2 * at, "%2x", &value);
        out[at] = value;
    }
    return count;
}

static void hex(const unsigned char *from, size_t length, char *out) {
    for (size_t at = 0; at < length; at++) sprintf(out + 2 * at, "%02x", from[at]);
    out[2 * length] = 0;
}

/* Connections. */

/* The next event of the connection manager; NULL after `ms` without one. */
static struct rdma_cm_event *next_event(int ms) {
    struct pollfd ready = {.fd = channel->fd, .events = POLLIN};
    struct rdma_cm_event *event;
    if (poll(&ready, 1, ms) != 1 || rdma_get_cm_event(channel, &event)) return NULL;
    return event;
}

static struct region *find(const char *name) {
    for (int at = 0; at < REGIONS; at++)
        if (regions[at].memory && !strcmp(regions[at].name, name)) return &regions[at];
    return NULL;
}

static void drop_regions(void) {
    for (int at = 0; at < REGIONS; at++) {
        if (regions[at].mr) ibv_dereg_mr(regions[at].mr);
        free(regions[at].memory);
        memset(&regions[at], 0, sizeof regions[at]);
    }
}

/* Forgets the connection and everything that belongs to it; the listener stays. */
static void forget(void) {
    if (request) {
        rdma_reject(request, NULL, 0);
        rdma_destroy_id(request);
    }
    if (id) {
        if (id->qp) {
            rdma_disconnect(id);
            rdma_destroy_qp(id);
        }
    }
    drop_regions();
    /* An event has to be acknowledged before its id goes. */
    struct rdma_cm_event *event;
    while ((event = next_event(0))) {
        struct rdma_cm_id *late = event->event == RDMA_CM_EVENT_CONNECT_REQUEST ? event->id : NULL;
        rdma_ack_cm_event(event);
        if (late) {
            rdma_reject(late, NULL, 0);
            rdma_destroy_id(late);
        }
    }
    if (id) rdma_destroy_id(id);
    if (cq) ibv_destroy_cq(cq);
    if (other_pd) ibv_dealloc_pd(other_pd);
    if (pd) ibv_dealloc_pd(pd);
    request = id = NULL;
    cq = NULL;
    pd = other_pd = NULL;
}

static void do_listen(const char *line) {
    uint16_t port = number(line, "port", 0);
    if (listener && listening == port) return ok("");
    if (listener) rdma_destroy_id(listener);
    listener = NULL;
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(port)};
    if (rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP)) return failed("rdma_create_id");
    if (rdma_bind_addr(listener, (struct sockaddr *)&any) || rdma_listen(listener, 64)) return failed("rdma_listen");
    listening = port;
    ok("");
}

/* Awaits a request. */
static void do_await(const char *line) {
    int ms = number(line, "ms", 5000);
    struct rdma_cm_event *event;
    while ((event = next_event(ms))) {
        if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST) {
            rdma_ack_cm_event(event);
            continue;
        }
        request = event->id;
        char private_data[1200];
        hex(event->param.conn.private_data, event->param.conn.private_data_len, private_data);
        ok(",\"private\":\"%s\",\"ird\":%u,\"ord\":%u", private_data, event->param.conn.responder_resources,
           event->param.conn.initiator_depth);
        rdma_ack_cm_event(event);
        return;
    }
    fail("no request within %d ms", ms);
}

static int make_queues(struct rdma_cm_id *of) {
    struct ibv_qp_init_attr wanted = {
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    pd = ibv_alloc_pd(of->verbs);
    cq = ibv_create_cq(of->verbs, 4 * DEPTH, NULL, NULL, 0);
    if (!pd || !cq) return -1;
    wanted.send_cq = wanted.recv_cq = cq;
    return rdma_create_qp(of, pd, &wanted);
}

/* Makes the queue pair of the request, without accepting it yet: regions and receives come before. */
static void do_prepare(void) {
    if (!request) return fail("no request");
    if (make_queues(request)) return failed("rdma_create_qp");
    id = request;
    request = NULL;
    ok("");
}

static struct rdma_conn_param parameters(const char *line, unsigned char *private_data) {
    struct rdma_conn_param wanted = {0};
    wanted.private_data = private_data;
    wanted.private_data_len = octets(line, "private", private_data, 512);
    wanted.responder_resources = number(line, "ird", 1);
    wanted.initiator_depth = number(line, "ord", 1);
    return wanted;
}

static void do_accept(const char *line) {
    unsigned char private_data[512];
    struct rdma_conn_param wanted = parameters(line, private_data);
    if (!id) return fail("not prepared");
    if (rdma_accept(id, &wanted)) return failed("rdma_accept");
    ok("");
}

static void do_reject(const char *line) {
    unsigned char private_data[255];
    size_t length = octets(line, "private", private_data, sizeof private_data);
    if (!request) return fail("no request");
    if (rdma_reject(request, private_data, length)) return failed("rdma_reject");
    rdma_destroy_id(request);
    request = NULL;
    ok("");
}

static void do_event(const char *line) {
    struct rdma_cm_event *event = next_event(number(line, "ms", 1000));
    if (!event) return ok(",\"event\":\"none\"");
    ok(",\"event\":\"%s\",\"status\":%d", rdma_event_str(event->event), event->status);
    rdma_ack_cm_event(event);
}

/* Memory. */

static void do_reg(const char *line) {
    char name[16], access[64], domain[16];
    text(line, "name", name, sizeof name);
    text(line, "access", access, sizeof access);
    text(line, "domain", domain, sizeof domain);
    if (!id || find(name)) return fail("no queue pair, or region %s exists", name);
    struct region *region = NULL;
    for (int at = 0; at < REGIONS && !region; at++)
        if (!regions[at].memory) region = &regions[at];
    if (!region) return fail("too many regions");
    if (!strcmp(domain, "other") && !other_pd && !(other_pd = ibv_alloc_pd(id->verbs))) return failed("ibv_alloc_pd");
    int flags = IBV_ACCESS_LOCAL_WRITE;
    if (strstr(access, "write")) flags |= IBV_ACCESS_REMOTE_WRITE;
    if (strstr(access, "read")) flags |= IBV_ACCESS_REMOTE_READ;
    region->size = number(line, "size", 64);
    if (posix_memalign((void **)&region->memory, 4096, region->size + 1)) return fail("no memory");
    memset(region->memory, number(line, "octet", 0), region->size);
    region->mr = ibv_reg_mr(strcmp(domain, "other") ? pd : other_pd, region->memory, region->size, flags);
    if (!region->mr) {
        free(region->memory);
        region->memory = NULL;
        return failed("ibv_reg_mr");
    }
    snprintf(region->name, sizeof region->name, "%s", name);
    ok(",\"stag\":%u,\"base\":%llu,\"size\":%zu", region->mr->rkey, (unsigned long long)(uintptr_t)region->memory,
       region->size);
}

static void do_dereg(struct region *region) {
    if (!region->mr || ibv_dereg_mr(region->mr)) return failed("ibv_dereg_mr");
    region->mr = NULL;
    ok("");
}

static void do_peek(const char *line, struct region *region) {
    size_t at = number(line, "at", 0), length = number(line, "size", region->size);
    if (length > 1024 || at > region->size || length > region->size - at) return fail("outside of the region");
    char data[2049];
    hex(region->memory + at, length, data);
    ok(",\"data\":\"%s\"", data);
}

/* Work. */

static void do_post(const char *line, struct region *region) {
    char op[16];
    text(line, "op", op, sizeof op);
    size_t at = number(line, "at", 0), length = number(line, "size", region->size);
    if (!id || !id->qp) return fail("no queue pair");
    struct ibv_sge place = {
        .addr = (uintptr_t)region->memory + at,
        .length = length,
        .lkey = region->mr ? region->mr->lkey : 0,
    };
    uint64_t number_of = number(line, "id", 0);
    if (!strcmp(op, "recv")) {
        struct ibv_recv_wr work = {.wr_id = number_of, .sg_list = &place, .num_sge = length ? 1 : 0}, *bad;
        errno = ibv_post_recv(id->qp, &work, &bad);
        return errno ? failed("ibv_post_recv") : ok("");
    }
    struct ibv_send_wr work = {.wr_id = number_of, .sg_list = &place, .num_sge = length ? 1 : 0}, *bad;
    work.opcode = !strcmp(op, "write") ? IBV_WR_RDMA_WRITE : !strcmp(op, "read") ? IBV_WR_RDMA_READ : IBV_WR_SEND;
    work.wr.rdma.rkey = number(line, "stag", 0);
    work.wr.rdma.remote_addr = number(line, "to", 0);
    errno = ibv_post_send(id->qp, &work, &bad);
    errno ? failed("ibv_post_send") : ok("");
}

/* The next completion, or none within the time. */
static void do_poll(const char *line) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t ms = number(line, "ms", 1000), end = now.tv_sec * 1000 + now.tv_nsec / 1000000 + ms;
    struct ibv_wc done;
    if (!cq) return fail("no completion queue");
    while (ibv_poll_cq(cq, 1, &done) == 0) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec * 1000 + now.tv_nsec / 1000000 >= end) return ok(",\"status\":\"none\"");
        usleep(500);
    }
    ok(",\"id\":%llu,\"status\":\"%s\",\"size\":%u", (unsigned long long)done.wr_id,
       done.status == IBV_WC_SUCCESS ? "success" : done.status == IBV_WC_WR_FLUSH_ERR ? "flushed" : "error",
       done.status == IBV_WC_SUCCESS ? done.byte_len : 0);
}

static void do_caps(void) {
    int count = 0;
    struct ibv_context **all = rdma_get_devices(&count);
    ok(",\"version\":%d,\"devices\":%d,\"device\":\"%s\"", VERSION, count,
       count ? ibv_get_device_name(all[0]->device) : "");
    if (all) rdma_free_devices(all);
}

static void obey(const char *line) {
    char what[16], name[16];
    text(line, "do", what, sizeof what);
    text(line, "name", name, sizeof name);
    struct region *region = find(name);
    int needs_region = !strcmp(what, "dereg") || !strcmp(what, "fill") || !strcmp(what, "peek") || !strcmp(what, "post");
    if (needs_region && !region) return fail("no region %s", name);
    if (!strcmp(what, "caps")) return do_caps();
    if (!strcmp(what, "listen")) return do_listen(line);
    if (!strcmp(what, "await")) return do_await(line);
    if (!strcmp(what, "prepare")) return do_prepare();
    if (!strcmp(what, "accept")) return do_accept(line);
    if (!strcmp(what, "reject")) return do_reject(line);
    if (!strcmp(what, "event")) return do_event(line);
    if (!strcmp(what, "reg")) return do_reg(line);
    if (!strcmp(what, "dereg")) return do_dereg(region);
    if (!strcmp(what, "peek")) return do_peek(line, region);
    if (!strcmp(what, "post")) return do_post(line, region);
    if (!strcmp(what, "poll")) return do_poll(line);
    if (!strcmp(what, "fill")) {
        memset(region->memory, number(line, "octet", 0), region->size);
        return ok("");
    }
    if (!strcmp(what, "disconnect")) {
        if (!id || rdma_disconnect(id)) return failed("rdma_disconnect");
        return ok("");
    }
    if (!strcmp(what, "forget")) {
        forget();
        return ok("");
    }
    fail("%s is unknown", what);
}

int main(int count, char **arguments) {
    char line[LINE];
    int one = 1;
    if (count != 2 || atoi(arguments[1]) <= 0) {
        fprintf(stderr, "usage: siw-lab-agent PORT\n");
        return 2;
    }
    int server = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(atoi(arguments[1]))};
    setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (server < 0 || bind(server, (struct sockaddr *)&any, sizeof any) || listen(server, 1)) {
        fprintf(stderr, "siw-lab-agent: port %s: %s\n", arguments[1], strerror(errno));
        return 1;
    }
    channel = rdma_create_event_channel();
    if (!channel) {
        fprintf(stderr, "siw-lab-agent: rdma_create_event_channel: %s; is there an RDMA device?\n", strerror(errno));
        return 1;
    }
    printf("READY\n");
    fflush(stdout);
    for (;;) {
        int lab = accept(server, NULL, NULL);
        if (lab < 0) continue;
        FILE *commands = fdopen(lab, "r");
        answers = fdopen(dup(lab), "w");
        while (fgets(line, sizeof line, commands)) {
            obey(line);
            fflush(answers);
        }
        fclose(commands);
        fclose(answers);
        forget();
    }
}
