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
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#define VERSION 2
#define LINE 8192
#define REGIONS 16
#define DEPTH 256
#define ELEMENTS 4
#define INLINE 64
#define PAGE 4096
/* Octets before and behind each region that have to stay as they are, and their value. */
#define GUARD 64
#define GUARD_OCTET 0xee

struct region {
    char name[16];
    /* The block is what was allocated; without one the memory is that of another region. */
    unsigned char *block, *memory;
    size_t size;
    struct ibv_mr *mr;
    struct ibv_mw *mw; /* A window: its memory is that of another region. */
};

/* A stream of the lab. */
struct stream {
    struct rdma_cm_id *request, *id;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
};

static FILE *answers;
static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener;
static struct stream streams[2], *stream = streams;
static struct ibv_pd *pd, *other_pd;
static struct ibv_srq *shared;
static struct region regions[REGIONS];
static uint16_t listening;
static void end_service(void);

/* Answers. */

/* The command has "try": a failure is an answer like any other, with "done":0. */
static int is_tried;

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(answers, is_tried ? "{\"ok\":true,\"done\":0,\"reason\":\"" : "{\"error\":\"");
    vfprintf(answers, format, arguments);
    fprintf(answers, "\"}\n");
    va_end(arguments);
}

/* A call has failed; the lab tells what the device does not have from what went wrong. */
static void failed(const char *what) {
    int number = errno;
    if (number != EOPNOTSUPP || is_tried) return fail("%s: %s", what, strerror(number));
    fprintf(answers, "{\"error\":\"%s: %s\",\"unsupported\":true}\n", what, strerror(number));
}

static void ok(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(answers, is_tried ? "{\"ok\":true,\"done\":1" : "{\"ok\":true");
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

static int64_t milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* The next event of the connection manager; NULL after `ms` without one. */
static struct rdma_cm_event *next_event(int ms) {
    struct pollfd ready = {.fd = channel->fd, .events = POLLIN};
    struct rdma_cm_event *event;
    int64_t end = milliseconds() + ms, left = ms;
    do {
        /* The descriptor may be ready for an event of an id that is gone. */
        if (poll(&ready, 1, left) == 1 && !rdma_get_cm_event(channel, &event)) return event;
        left = end - milliseconds();
    } while (left > 0);
    return NULL;
}

static struct region *find(const char *name) {
    for (int at = 0; at < REGIONS; at++)
        if (regions[at].memory && !strcmp(regions[at].name, name)) return &regions[at];
    return NULL;
}

static void drop_regions(void) {
    for (int at = 0; at < REGIONS; at++)
        if (regions[at].mw) {
            ibv_dealloc_mw(regions[at].mw);
            memset(&regions[at], 0, sizeof regions[at]);
        }
    for (int at = 0; at < REGIONS; at++) {
        if (regions[at].mr) ibv_dereg_mr(regions[at].mr);
        free(regions[at].block);
        memset(&regions[at], 0, sizeof regions[at]);
    }
}

/* Forgets the listener, the streams and everything that belongs to them. */
static void forget(void) {
    for (int at = 0; at < 2; at++) {
        struct stream *of = &streams[at];
        if (of->request) {
            rdma_reject(of->request, NULL, 0);
            rdma_destroy_id(of->request);
        }
        if (of->id && of->id->qp) {
            rdma_disconnect(of->id);
            rdma_destroy_qp(of->id);
        }
    }
    end_service();
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
    for (int at = 0; at < 2; at++) {
        struct stream *of = &streams[at];
        if (of->id) rdma_destroy_id(of->id);
        if (of->cq) ibv_destroy_cq(of->cq);
        if (of->channel) ibv_destroy_comp_channel(of->channel);
    }
    memset(streams, 0, sizeof streams);
    /* Linux siw 6.1 refuses everybody at a listener that many requests were left at. */
    if (listener) rdma_destroy_id(listener);
    listener = NULL;
    if (shared) ibv_destroy_srq(shared);
    shared = NULL;
    if (other_pd) ibv_dealloc_pd(other_pd);
    if (pd) ibv_dealloc_pd(pd);
    pd = other_pd = NULL;
}

/* Streaming mode: TCP octets before MPA. The option and the calls are siwd's (client-lib/include/siw_rdma.h). */
#define SIW_OPTION 0x736977
#define SIW_OPTION_STREAMING 1

/* Lets the connections of an id begin in streaming mode, if the command wants that. */
static int set_streaming(struct rdma_cm_id *id, const char *line) {
    int on = 1;
    if (!number(line, "streaming", 0)) return 0;
    if (!rdma_set_option(id, SIW_OPTION, SIW_OPTION_STREAMING, &on, sizeof on)) return 0;
    errno = EOPNOTSUPP;
    return -1;
}

static void do_listen(const char *line) {
    uint16_t port = number(line, "port", 0);
    if (listener && listening == port) return ok("");
    if (listener) rdma_destroy_id(listener);
    listener = NULL;
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(port)};
    if (rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP)) return failed("rdma_create_id");
    if (set_streaming(listener, line)) return failed("streaming mode");
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
        stream->request = event->id;
        char private_data[1200];
        hex(event->param.conn.private_data, event->param.conn.private_data_len, private_data);
        ok(",\"private\":\"%s\",\"ird\":%u,\"ord\":%u", private_data, event->param.conn.responder_resources,
           event->param.conn.initiator_depth);
        rdma_ack_cm_event(event);
        return;
    }
    fail("no request within %d ms", ms);
}

/* A protection domain: "" is that of the stream, "other" the second one. */
static struct ibv_pd *domain_of(const char *name, struct ibv_context *verbs) {
    struct ibv_pd **of = !strcmp(name, "other") ? &other_pd : &pd;
    if (!*name && stream->pd) return stream->pd;
    if (!*of) *of = ibv_alloc_pd(verbs);
    return *of;
}

/* Makes the queues; the completion queue has `depth` entries, and with `shared` the receives are those of all streams. */
static int make_queues(struct rdma_cm_id *of, const char *line) {
    char domain[16];
    text(line, "domain", domain, sizeof domain);
    int depth = number(line, "depth", 4 * DEPTH), shares = number(line, "shared", 0);
    struct ibv_qp_init_attr wanted = {
        .cap = {.max_send_wr = DEPTH,
                .max_recv_wr = DEPTH,
                .max_send_sge = ELEMENTS,
                .max_recv_sge = 1,
                .max_inline_data = INLINE},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    stream->pd = domain_of(domain, of->verbs);
    stream->channel = ibv_create_comp_channel(of->verbs);
    stream->cq = ibv_create_cq(of->verbs, depth, NULL, stream->channel, 0);
    if (!stream->pd || !stream->channel || !stream->cq) return -1;
    wanted.send_cq = wanted.recv_cq = stream->cq;
    struct ibv_srq_init_attr receives = {.attr = {.max_wr = DEPTH, .max_sge = 1}};
    if (shares && !shared && !(shared = ibv_create_srq(stream->pd, &receives))) return -1;
    if (shares) wanted.srq = shared;
    return rdma_create_qp(of, stream->pd, &wanted);
}

/* Makes the queue pair of the request, without accepting it yet: regions and receives come before. */
static void do_prepare(const char *line) {
    if (!stream->request) return fail("no request");
    if (make_queues(stream->request, line)) return failed("rdma_create_qp");
    stream->id = stream->request;
    stream->request = NULL;
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
    if (!stream->id) return fail("not prepared");
    if (rdma_accept(stream->id, &wanted)) return failed("rdma_accept");
    ok("");
}

static void do_reject(const char *line) {
    unsigned char private_data[255];
    size_t length = octets(line, "private", private_data, sizeof private_data);
    if (!stream->request) return fail("no request");
    if (rdma_reject(stream->request, private_data, length)) return failed("rdma_reject");
    rdma_destroy_id(stream->request);
    stream->request = NULL;
    ok("");
}

static void do_event(const char *line) {
    struct rdma_cm_event *event = next_event(number(line, "ms", 1000));
    if (!event) return ok(",\"event\":\"none\"");
    char private_data[1200];
    hex(event->param.conn.private_data, event->param.conn.private_data_len, private_data);
    ok(",\"event\":\"%s\",\"status\":%d,\"private\":\"%s\",\"ird\":%u,\"ord\":%u", rdma_event_str(event->event),
       event->status, private_data, event->param.conn.responder_resources, event->param.conn.initiator_depth);
    if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) stream->request = event->id;
    rdma_ack_cm_event(event);
}

static int next_is(enum rdma_cm_event_type wanted) {
    struct rdma_cm_event *event = next_event(3000);
    int right = event && event->event == wanted;
    if (event) rdma_ack_cm_event(event);
    if (!right) errno = EHOSTUNREACH;
    return right;
}

/* Makes a queue pair towards the lab, without connecting it yet: regions and receives come before. */
static void do_call(const char *line) {
    char address[64];
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(number(line, "port", 0))};
    text(line, "address", address, sizeof address);
    if (stream->id || inet_pton(AF_INET, address, &to.sin_addr) != 1) return fail("a connection exists, or no address");
    if (rdma_create_id(channel, &stream->id, NULL, RDMA_PS_TCP)) return failed("rdma_create_id");
    if (set_streaming(stream->id, line)) return failed("streaming mode");
    if (rdma_resolve_addr(stream->id, NULL, (struct sockaddr *)&to, 3000) || !next_is(RDMA_CM_EVENT_ADDR_RESOLVED))
        return failed("rdma_resolve_addr");
    if (rdma_resolve_route(stream->id, 3000) || !next_is(RDMA_CM_EVENT_ROUTE_RESOLVED))
        return failed("rdma_resolve_route");
    if (make_queues(stream->id, line)) return failed("rdma_create_qp");
    ok("");
}

static void do_connect(const char *line) {
    unsigned char private_data[512];
    struct rdma_conn_param wanted = parameters(line, private_data);
    if (!stream->id) return fail("not called");
    if (rdma_connect(stream->id, &wanted)) return failed("rdma_connect");
    ok("");
}

/* Begins to open the connection in streaming mode, and awaits it. */
static void do_open(const char *line) {
    int (*open)(struct rdma_cm_id *, int);
    *(void **)&open = dlsym(RTLD_DEFAULT, "siw_stream_open");
    if (!open || !stream->id) return fail("not called, or no streaming mode");
    int ms = number(line, "ms", 0);
    if (open(stream->id, ms) && (ms || errno != EAGAIN)) return failed("siw_stream_open");
    ok("");
}

/* Sends octets in streaming mode. */
static void do_give(const char *line) {
    ssize_t (*send)(struct rdma_cm_id *, const void *, size_t, int);
    unsigned char data[1024];
    size_t length = octets(line, "data", data, sizeof data);
    *(void **)&send = dlsym(RTLD_DEFAULT, "siw_stream_send");
    if (!send || !stream->id) return fail("not prepared, or no streaming mode");
    ssize_t count = send(stream->id, data, length, number(line, "ms", 2000));
    if (count < 0) return failed("siw_stream_send");
    ok(",\"count\":%zd", count);
}

/* Receives as many octets as "data" has, and tells whether they are the same; without it, awaits the end. */
static void do_take(const char *line) {
    ssize_t (*receive)(struct rdma_cm_id *, void *, size_t, int);
    unsigned char data[1024], got[1024];
    size_t length = octets(line, "data", data, sizeof data), filled = 0;
    size_t wanted = length ? length : 1;
    ssize_t count = 1;
    *(void **)&receive = dlsym(RTLD_DEFAULT, "siw_stream_recv");
    if (!receive || !stream->id) return fail("not prepared, or no streaming mode");
    while (filled < wanted && count > 0) {
        count = receive(stream->id, got + filled, wanted - filled, number(line, "ms", 2000));
        if (count > 0) filled += count;
    }
    if (count < 0 && errno != ECONNRESET) return failed("siw_stream_recv");
    ok(",\"same\":%d,\"event\":\"%s\"", filled == length && !memcmp(got, data, length),
       count > 0 ? "octets" : count ? "reset" : "closed");
}

/* Memory. */

static struct region *free_region(void) {
    for (int at = 0; at < REGIONS; at++)
        if (!regions[at].memory) return &regions[at];
    return NULL;
}

static int rights(const char *line) {
    char access[64];
    text(line, "access", access, sizeof access);
    return (strstr(access, "write") ? IBV_ACCESS_REMOTE_WRITE : 0) |
           (strstr(access, "read") ? IBV_ACCESS_REMOTE_READ : 0) |
           (strstr(access, "atomic") ? IBV_ACCESS_REMOTE_ATOMIC : 0) | (strstr(access, "bind") ? IBV_ACCESS_MW_BIND : 0);
}

/* Octets of a region from `at` on: "data", or "letters", the lab's len:N, or "octet" for all of them. */
static void fill(const char *line, struct region *region, size_t at) {
    unsigned char *to = region->memory + at;
    size_t room = region->size - at;
    if (field(line, "data"))
        octets(line, "data", to, room);
    else if (field(line, "pattern"))
        for (size_t n = 0; n < room; n++) to[n] = (at + n) % 251;
    else if (field(line, "letters"))
        for (size_t n = 0, first = number(line, "letters", 0); n < room; n++) to[n] = 'a' + (first + n) % 26;
    else
        memset(to, number(line, "octet", 0), room);
}

static void do_fill(const char *line, struct region *region) {
    size_t at = number(line, "at", 0);
    if (at > region->size) return fail("outside of the region");
    fill(line, region, at);
    ok("");
}

static void tell_region(const struct region *region) {
    ok(",\"stag\":%u,\"local\":%u,\"base\":%llu,\"size\":%zu", region->mw ? region->mw->rkey : region->mr->rkey,
       region->mw ? 0 : region->mr->lkey, (unsigned long long)(uintptr_t)region->memory, region->size);
}

/* Registers memory that begins `lead` octets into a page, between two guards; or, with `region`, the memory of another
 * region once more. `fixed` memory is not open for local writing either. */
static void do_reg(const char *line) {
    char name[16], of[16], domain[16];
    text(line, "name", name, sizeof name);
    text(line, "region", of, sizeof of);
    text(line, "domain", domain, sizeof domain);
    struct region *region = free_region(), *source = *of ? find(of) : NULL;
    if (!stream->id || find(name)) return fail("no queue pair, or region %s exists", name);
    if (!region || (*of && !source)) return fail("too many regions, or no region %s", of);
    struct ibv_pd *of_domain = domain_of(domain, stream->id->verbs);
    if (!of_domain) return failed("ibv_alloc_pd");
    region->size = source ? source->size : number(line, "size", 64);
    size_t lead = number(line, "lead", 0);
    if (source) {
        region->memory = source->memory;
    } else {
        if (posix_memalign((void **)&region->block, PAGE, PAGE + lead + region->size + PAGE)) return fail("no memory");
        region->memory = region->block + PAGE + lead;
        memset(region->memory - GUARD, GUARD_OCTET, region->size + 2 * GUARD);
        fill(line, region, 0);
    }
    int flags = rights(line) | (number(line, "fixed", 0) ? 0 : IBV_ACCESS_LOCAL_WRITE);
    region->mr = ibv_reg_mr(of_domain, region->memory, region->size, flags);
    if (!region->mr) {
        int reason = errno;
        free(region->block);
        memset(region, 0, sizeof *region);
        errno = reason;
        return failed("ibv_reg_mr");
    }
    snprintf(region->name, sizeof region->name, "%s", name);
    tell_region(region);
}

/* Changes the rights of a region. */
static void do_rereg(const char *line, struct region *region) {
    int flags = IBV_ACCESS_LOCAL_WRITE | rights(line);
    if (!region->mr || ibv_rereg_mr(region->mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, flags))
        return failed("ibv_rereg_mr");
    tell_region(region);
}

static void do_dereg(struct region *region) {
    if (region->mw) {
        if (ibv_dealloc_mw(region->mw)) return failed("ibv_dealloc_mw");
        memset(region, 0, sizeof *region);
        return ok("");
    }
    if (!region->mr || ibv_dereg_mr(region->mr)) return failed("ibv_dereg_mr");
    region->mr = NULL;
    ok("");
}

/* Awaits the completion of a work request of the agent's own. */
static int await_own(uint64_t own) {
    struct ibv_wc done;
    for (int tries = 0; tries < 4000; tries++) {
        if (ibv_poll_cq(stream->cq, 1, &done) == 1) return done.wr_id == own && done.status == IBV_WC_SUCCESS;
        usleep(500);
    }
    return 0;
}

/* Binds a window, made by its first bind, of type 2 or `kind` to a part of a region by the stream's queue pair; without
 * octets it unbinds it. */
static void do_bind(const char *line) {
    char name[16], of[16];
    text(line, "name", name, sizeof name);
    text(line, "region", of, sizeof of);
    struct region *region = find(of), *window = find(name);
    int kind = number(line, "kind", 2) == 1 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2;
    if (!stream->id || !region || !region->mr) return fail("no queue pair, or no region %s", of);
    if (!window) {
        if (!(window = free_region())) return fail("too many regions");
        if (!(window->mw = ibv_alloc_mw(stream->pd, kind))) return failed("ibv_alloc_mw");
        snprintf(window->name, sizeof window->name, "%s", name);
    }
    size_t at = number(line, "at", 0), size = number(line, "size", region->size - at);
    window->memory = region->memory + at;
    window->size = size;
    struct ibv_mw_bind_info info = {
        .mr = region->mr, .addr = (uintptr_t)window->memory, .length = size, .mw_access_flags = rights(line)};
    struct ibv_send_wr *bad, work = {.wr_id = UINT64_MAX, .send_flags = IBV_SEND_SIGNALED};
    uint32_t key = ibv_inc_rkey(window->mw->rkey);
    if (kind == IBV_MW_TYPE_1) {
        struct ibv_mw_bind bind = {.wr_id = UINT64_MAX, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};
        errno = ibv_bind_mw(stream->id->qp, window->mw, &bind);
    } else if (size) {
        work.opcode = IBV_WR_BIND_MW;
        work.bind_mw.mw = window->mw;
        work.bind_mw.rkey = key;
        work.bind_mw.bind_info = info;
        errno = ibv_post_send(stream->id->qp, &work, &bad);
    } else {
        work.opcode = IBV_WR_LOCAL_INV;
        work.invalidate_rkey = window->mw->rkey;
        errno = ibv_post_send(stream->id->qp, &work, &bad);
    }
    if (errno) return failed("bind");
    if (!await_own(UINT64_MAX)) return fail("the window is not bound");
    if (kind == IBV_MW_TYPE_2 && size) window->mw->rkey = key;
    tell_region(window);
}

/* Registers `count` regions, each freed before the next one unless `held`; tells their keys and the time it took. */
static void do_keys(const char *line) {
    static struct ibv_mr *all[1024];
    uint64_t count = number(line, "count", 1), held = number(line, "held", 0), size = number(line, "size", PAGE);
    unsigned char *memory;
    struct timespec from, to;
    if (!stream->id || (held && count > 1024)) return fail("no queue pair, or more than 1024 held");
    if (posix_memalign((void **)&memory, PAGE, size)) return fail("no memory");
    uint32_t *keys = calloc(count, sizeof *keys);
    uint64_t done = 0;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (; keys && done < count; done++) {
        struct ibv_mr *mr = ibv_reg_mr(stream->pd, memory, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        if (!mr) break;
        keys[done] = mr->rkey;
        if (held) all[done] = mr;
        else ibv_dereg_mr(mr);
    }
    clock_gettime(CLOCK_MONOTONIC, &to);
    for (uint64_t at = 0; held && at < done; at++) ibv_dereg_mr(all[at]);
    free(memory);
    if (done < count) {
        free(keys);
        return failed("ibv_reg_mr");
    }
    int64_t us = (to.tv_sec - from.tv_sec) * 1000000 + (to.tv_nsec - from.tv_nsec) / 1000;
    fprintf(answers, "{\"ok\":true,\"us\":%lld,\"keys\":[", (long long)us);
    for (uint64_t at = 0; at < done; at++) fprintf(answers, at ? ",%u" : "%u", keys[at]);
    fprintf(answers, "]}\n");
    free(keys);
}

static void do_peek(const char *line, struct region *region) {
    /* The guards may be looked at, too. */
    int64_t at = number(line, "at", 0), length = number(line, "size", region->size);
    if (length > 1024 || at < -GUARD || length < 0 || at + length > (int64_t)region->size + GUARD)
        return fail("outside of the region");
    char data[2049];
    hex(region->memory + at, length, data);
    ok(",\"data\":\"%s\"", data);
}

/* Work. */

static const struct {
    const char *name;
    enum ibv_wr_opcode opcode;
    int flags;
} operations[] = {
    {"send", IBV_WR_SEND, 0},
    {"send-se", IBV_WR_SEND, IBV_SEND_SOLICITED},
    {"send-inv", IBV_WR_SEND_WITH_INV, 0},
    {"send-se-inv", IBV_WR_SEND_WITH_INV, IBV_SEND_SOLICITED},
    {"write", IBV_WR_RDMA_WRITE, 0},
    {"write-imm", IBV_WR_RDMA_WRITE_WITH_IMM, 0},
    {"read", IBV_WR_RDMA_READ, 0},
    {"fetchadd", IBV_WR_ATOMIC_FETCH_AND_ADD, 0},
    {"cmpswap", IBV_WR_ATOMIC_CMP_AND_SWP, 0},
};

/* Posts a work request: "size" octets at "at", in "elements" elements "step" octets apart. */
static void do_post(const char *line, struct region *region) {
    char op[16];
    text(line, "op", op, sizeof op);
    size_t at = number(line, "at", 0), length = number(line, "size", region->size);
    unsigned count = number(line, "elements", length ? 1 : 0);
    if (!stream->id || !stream->id->qp || count > ELEMENTS) return fail("no queue pair, or too many elements");
    struct ibv_sge places[ELEMENTS];
    for (unsigned n = 0; n < count; n++)
        places[n] = (struct ibv_sge){
            .addr = (uintptr_t)region->memory + at + n * number(line, "step", 0),
            .length = length / count,
            .lkey = number(line, "lkey", region->mr ? region->mr->lkey : 0),
        };
    uint64_t number_of = number(line, "id", 0), times = number(line, "count", 1), stride = number(line, "stride", 0);
    if (!strcmp(op, "recv")) {
        struct ibv_recv_wr work = {.wr_id = number_of, .sg_list = places, .num_sge = count}, *bad;
        for (; times; times--, work.wr_id++, places[0].addr += stride)
            if ((errno = shared ? ibv_post_srq_recv(shared, &work, &bad) : ibv_post_recv(stream->id->qp, &work, &bad)))
                return failed("ibv_post_recv");
        return ok("");
    }
    struct ibv_send_wr work = {.wr_id = number_of, .sg_list = places, .num_sge = count}, *bad;
    size_t kind = 0;
    while (kind < sizeof operations / sizeof *operations && strcmp(op, operations[kind].name)) kind++;
    if (kind == sizeof operations / sizeof *operations) return fail("operation %s is unknown", op);
    work.opcode = operations[kind].opcode;
    work.send_flags = operations[kind].flags | (number(line, "fence", 0) ? IBV_SEND_FENCE : 0) |
                      (number(line, "inline", 0) ? IBV_SEND_INLINE : 0);
    uint32_t stag = number(line, "stag", 0);
    uint64_t to = number(line, "to", 0);
    if (work.opcode == IBV_WR_SEND_WITH_INV) {
        work.invalidate_rkey = stag;
    } else if (work.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || work.opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
        int adds = work.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
        work.wr.atomic.rkey = stag;
        work.wr.atomic.remote_addr = to;
        work.wr.atomic.compare_add = number(line, adds ? "add" : "compare", 0);
        work.wr.atomic.swap = number(line, "swap", 0);
    } else {
        if (work.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) work.imm_data = htonl(number(line, "imm", 0));
        work.wr.rdma.rkey = stag;
        work.wr.rdma.remote_addr = to;
    }
    for (; times; times--, work.wr_id++, places[0].addr += stride, work.wr.rdma.remote_addr += stride)
        if ((errno = ibv_post_send(stream->id->qp, &work, &bad))) return failed("ibv_post_send");
    ok("");
}

/* Asks for an event at the next completion, or at the next solicited one. */
static void do_arm(const char *line) {
    if (!stream->cq || ibv_req_notify_cq(stream->cq, number(line, "solicited", 0))) return failed("ibv_req_notify_cq");
    ok("");
}

/* Whether that event comes within the time. */
static void do_notified(const char *line) {
    if (!stream->channel) return fail("no completion channel");
    struct pollfd ready = {.fd = stream->channel->fd, .events = POLLIN};
    struct ibv_cq *of;
    void *context;
    int comes = poll(&ready, 1, number(line, "ms", 1000)) == 1 && !ibv_get_cq_event(stream->channel, &of, &context);
    if (comes) ibv_ack_cq_events(of, 1);
    ok(",\"notified\":%d", comes);
}

/* The next completion, or none within the time. */
static void do_poll(const char *line) {
    int64_t end = milliseconds() + (int64_t)number(line, "ms", 1000);
    struct ibv_wc done;
    if (!stream->cq) return fail("no completion queue");
    while (ibv_poll_cq(stream->cq, 1, &done) == 0) {
        if (milliseconds() >= end) return ok(",\"status\":\"none\"");
        usleep(500);
    }
    int good = done.status == IBV_WC_SUCCESS;
    char more[80] = "";
    if (good && done.wc_flags & IBV_WC_WITH_INV)
        snprintf(more, sizeof more, ",\"invalidated\":%u", done.invalidated_rkey);
    if (good && done.wc_flags & IBV_WC_WITH_IMM) snprintf(more, sizeof more, ",\"imm\":%u", ntohl(done.imm_data));
    ok(",\"id\":%llu,\"status\":\"%s\",\"size\":%u%s", (unsigned long long)done.wr_id,
       good ? "success" : done.status == IBV_WC_WR_FLUSH_ERR ? "flushed" : "error", good ? done.byte_len : 0, more);
}

/* Destroys the queue pair as it is, and everything that it used; tells the first object that could not go. */
static void do_destroy(void) {
    if (!stream->id || !stream->id->qp) return fail("no queue pair");
    rdma_destroy_qp(stream->id);
    if (stream->cq && (errno = ibv_destroy_cq(stream->cq))) return failed("ibv_destroy_cq");
    stream->cq = NULL;
    for (int at = 0; at < REGIONS; at++) {
        if (regions[at].mr && (errno = ibv_dereg_mr(regions[at].mr))) return failed("ibv_dereg_mr");
        regions[at].mr = NULL;
    }
    if (stream->pd && (errno = ibv_dealloc_pd(stream->pd))) return failed("ibv_dealloc_pd");
    if (stream->pd == pd) pd = NULL;
    else other_pd = NULL;
    ok("");
}

/* Asks for an event when fewer than `at` shared receives are left. */
static void do_limit(const char *line) {
    struct ibv_srq_attr limit = {.srq_limit = number(line, "at", 1)};
    if (!shared || (errno = ibv_modify_srq(shared, &limit, IBV_SRQ_LIMIT))) return failed("ibv_modify_srq");
    ok("");
}

/* Waits for the limit of the shared receives: "limit" or "none". Other asynchronous events are passed over: one of a
 * queue pair of an earlier case may come after its end. */
static void do_async(const char *line) {
    if (!stream->id) return fail("no queue pair");
    struct pollfd ready = {.fd = stream->id->verbs->async_fd, .events = POLLIN};
    struct ibv_async_event event;
    while (poll(&ready, 1, number(line, "ms", 2000)) == 1 && !ibv_get_async_event(stream->id->verbs, &event)) {
        int is_limit = event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED;
        ibv_ack_async_event(&event);
        if (is_limit) return ok(",\"event\":\"limit\"");
    }
    ok(",\"event\":\"none\"");
}

/* Traffic. */

/* Octet of a numbered message; the lab computes the same. */
static unsigned char pattern(uint64_t round, size_t at) {
    return at < 4 ? round >> (24 - 8 * at) : round * 31 + at * 7 + (at >> 8) * 13 + 5;
}

/* Of do_serve. The memory has a slot for each receive, and behind them one for each answer on its way. */
static struct {
    size_t size, depth;
    uint64_t count, received, served, bad, stag, to;
    int writes;
    unsigned char *memory;
    struct ibv_mr *mr;
    unsigned busy[DEPTH];
    const char *ended;
} service;

static void end_service(void) {
    if (service.mr) ibv_dereg_mr(service.mr);
    free(service.memory);
    memset(&service, 0, sizeof service);
}

static struct ibv_sge slot_place(size_t slot) {
    return (struct ibv_sge){
        .addr = (uintptr_t)service.memory + slot * service.size,
        .length = service.size,
        .lkey = service.mr->lkey,
    };
}

static int post_slot(size_t slot) {
    struct ibv_sge place = slot_place(slot);
    struct ibv_recv_wr work = {.wr_id = slot, .sg_list = &place, .num_sge = 1}, *bad;
    return ibv_post_recv(stream->id->qp, &work, &bad);
}

/* Sends the message of an answer's slot back, after a Write of it. */
static int answer(size_t slot) {
    struct ibv_sge place = slot_place(service.depth + slot);
    struct ibv_send_wr work = {.wr_id = DEPTH + slot, .sg_list = &place, .num_sge = 1}, *bad;
    if (service.writes) {
        work.opcode = IBV_WR_RDMA_WRITE;
        work.wr.rdma.rkey = service.stag;
        work.wr.rdma.remote_addr = service.to + service.served % service.depth * service.size;
        if (ibv_post_send(stream->id->qp, &work, &bad)) return -1;
        service.busy[slot]++;
    }
    work.opcode = IBV_WR_SEND;
    if (ibv_post_send(stream->id->qp, &work, &bad)) return -1;
    service.busy[slot]++;
    return 0;
}

/* Takes a completion, of which it returns the slot of a received message; -1: none. */
static int64_t next_message(void) {
    struct ibv_wc done;
    if (service.ended || ibv_poll_cq(stream->cq, 1, &done) != 1) return -1;
    if (done.status != IBV_WC_SUCCESS) {
        service.ended = ibv_wc_status_str(done.status);
        return -1;
    }
    if (done.wr_id >= DEPTH) {
        service.busy[done.wr_id - DEPTH]--;
        return -1;
    }
    const unsigned char *message = service.memory + done.wr_id * service.size;
    int bad = done.byte_len != service.size;
    for (size_t at = 0; at < service.size && !bad; at++) bad = message[at] != pattern(service.received, at);
    service.bad += bad;
    service.received++;
    return done.wr_id;
}

static int is_served(void) {
    unsigned busy = 0;
    for (size_t slot = 0; slot < 2 * service.depth; slot++) busy += service.busy[slot];
    return service.ended || (service.served >= service.count && !busy);
}

/* Receives `count` numbered messages, verifies them and sends each back. Two answers: the first one once the receives
 * are posted, the second one at the end. */
static void do_serve(const char *line) {
    if (!stream->id || !stream->id->qp || service.memory) return fail("no queue pair, or it was served already");
    service.size = number(line, "size", 64);
    service.depth = number(line, "depth", 4);
    service.count = number(line, "count", 1);
    service.stag = number(line, "stag", 0);
    service.to = number(line, "to", 0);
    service.writes = number(line, "writes", 1);
    size_t octets = 3 * service.depth * service.size;
    if (!octets || 4 * service.depth > DEPTH) return fail("size or depth out of range");
    if (posix_memalign((void **)&service.memory, PAGE, octets)) return fail("no memory");
    service.mr = ibv_reg_mr(stream->pd, service.memory, octets, IBV_ACCESS_LOCAL_WRITE);
    if (!service.mr) return failed("ibv_reg_mr");
    for (size_t slot = 0; slot < service.depth; slot++)
        if ((errno = post_slot(slot))) return failed("ibv_post_recv");
    ok("");
    fflush(answers);
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    int64_t end = time.tv_sec * 1000 + number(line, "ms", 60000);
    /* Received messages whose answer waits for a free slot, in order. */
    size_t waiting[DEPTH], first = 0, count = 0;
    while (!is_served() && time.tv_sec * 1000 < end) {
        int64_t got = next_message();
        if (got >= 0) waiting[(first + count++) % DEPTH] = got;
        size_t slot = service.served % (2 * service.depth);
        if (count && !service.busy[slot] && !service.ended) {
            size_t from = waiting[first];
            first = (first + 1) % DEPTH;
            count--;
            memcpy(service.memory + (service.depth + slot) * service.size, service.memory + from * service.size,
                   service.size);
            /* The receive is there again before the lab gets the answer and sends the next message. */
            if (post_slot(from) || answer(slot)) service.ended = "posting failed";
            service.served++;
        } else if (got < 0) {
            usleep(20);
        }
        clock_gettime(CLOCK_MONOTONIC, &time);
    }
    ok(",\"served\":%llu,\"bad\":%llu,\"ended\":\"%s\"", (unsigned long long)service.served,
       (unsigned long long)service.bad, service.ended ? service.ended : is_served() ? "" : "time is over");
}

static void do_caps(void) {
    int count = 0;
    struct ibv_context **all = rdma_get_devices(&count);
    ok(",\"version\":%d,\"little\":%d,\"devices\":%d,\"device\":\"%s\"", VERSION, htonl(1) != 1, count,
       count ? ibv_get_device_name(all[0]->device) : "");
    if (all) rdma_free_devices(all);
}

static void obey(const char *line) {
    char what[16], name[16];
    text(line, "do", what, sizeof what);
    is_tried = number(line, "try", 0);
    text(line, "name", name, sizeof name);
    stream = &streams[number(line, "on", 1) == 2];
    struct region *region = find(name);
    int needs_region = !strcmp(what, "dereg") || !strcmp(what, "fill") || !strcmp(what, "peek") || !strcmp(what, "post") ||
                       !strcmp(what, "rereg");
    if (needs_region && !region) return fail("no region %s", name);
    if (!strcmp(what, "caps")) return do_caps();
    if (!strcmp(what, "listen")) return do_listen(line);
    if (!strcmp(what, "await")) return do_await(line);
    if (!strcmp(what, "prepare")) return do_prepare(line);
    if (!strcmp(what, "accept")) return do_accept(line);
    if (!strcmp(what, "reject")) return do_reject(line);
    if (!strcmp(what, "event")) return do_event(line);
    if (!strcmp(what, "call")) return do_call(line);
    if (!strcmp(what, "connect")) return do_connect(line);
    if (!strcmp(what, "open")) return do_open(line);
    if (!strcmp(what, "give")) return do_give(line);
    if (!strcmp(what, "take")) return do_take(line);
    if (!strcmp(what, "reg")) return do_reg(line);
    if (!strcmp(what, "dereg")) return do_dereg(region);
    if (!strcmp(what, "peek")) return do_peek(line, region);
    if (!strcmp(what, "post")) return do_post(line, region);
    if (!strcmp(what, "poll")) return do_poll(line);
    if (!strcmp(what, "bind")) return do_bind(line);
    if (!strcmp(what, "arm")) return do_arm(line);
    if (!strcmp(what, "notified")) return do_notified(line);
    if (!strcmp(what, "fill")) return do_fill(line, region);
    if (!strcmp(what, "disconnect")) {
        if (!stream->id || rdma_disconnect(stream->id)) return failed("rdma_disconnect");
        return ok("");
    }
    if (!strcmp(what, "forget")) {
        forget();
        return ok("");
    }
    if (!strcmp(what, "rereg")) return do_rereg(line, region);
    if (!strcmp(what, "keys")) return do_keys(line);
    if (!strcmp(what, "destroy")) return do_destroy();
    if (!strcmp(what, "limit")) return do_limit(line);
    if (!strcmp(what, "async")) return do_async(line);
    if (!strcmp(what, "serve")) return do_serve(line);
    if (!strcmp(what, "kill")) raise(SIGKILL);
    fail("%s is unknown", what);
}

/* Obeys the labs that connect, one after the other. */
static int work(int server) {
    char line[LINE];
    channel = rdma_create_event_channel();
    if (!channel) {
        fprintf(stderr, "siw-lab-agent: rdma_create_event_channel: %s; is there an RDMA device?\n", strerror(errno));
        return 1;
    }
    fcntl(channel->fd, F_SETFL, O_NONBLOCK);
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

int main(int count, char **arguments) {
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
    printf("READY\n");
    fflush(stdout);
    /* The program that holds the device is a child, which "kill" ends and the parent starts again. */
    for (;;) {
        pid_t worker = fork();
        if (worker == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            return work(server);
        }
        int status = 0;
        if (worker < 0 || waitpid(worker, &status, 0) < 0) return 1;
        if (WIFEXITED(status)) return WEXITSTATUS(status);
    }
}
