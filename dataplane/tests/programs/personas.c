/*
 * personas NAME...: what a program sees of siw0 and siw1 under the named persona of each, in the answers of
 * libibverbs and in /sys, and connections of a queue pair with another one and with itself.
 */
#define _GNU_SOURCE
#include "connect.h"

#include <arpa/inet.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

/* Programs declare it themselves: the header of providers has it. */
int ibv_read_sysfs_file(const char *folder, const char *file, char *buffer, size_t size);

struct persona {
	const char *name, *node_text;
	int node_type, transport;
	const char *layer_text, *gid_text;
	int layer, gid_type, has_lid, flags, has_handles;
	uint32_t capabilities;
};

static const struct persona personas[] = {
	{ "iwarp", "4: RNIC", IBV_NODE_RNIC, IBV_TRANSPORT_IWARP,
	  "Ethernet", "RoCE v2", IBV_LINK_LAYER_ETHERNET, IBV_GID_TYPE_ROCE_V2, 0, 0, 0, 0 },
	{ "roce", "1: CA", IBV_NODE_CA, IBV_TRANSPORT_IB,
	  "Ethernet", "RoCE v2", IBV_LINK_LAYER_ETHERNET, IBV_GID_TYPE_ROCE_V2, 0, 1, 1, 0x10000 },
	{ "ib", "1: CA", IBV_NODE_CA, IBV_TRANSPORT_IB,
	  "InfiniBand", "IB/RoCE v1", IBV_LINK_LAYER_INFINIBAND, IBV_GID_TYPE_IB, 1, 0, 1, 0x10000 },
	{ "unspecified", "7: unspecified", IBV_NODE_UNSPECIFIED, IBV_TRANSPORT_UNSPECIFIED,
	  "Ethernet", "RoCE v2", IBV_LINK_LAYER_ETHERNET, IBV_GID_TYPE_ROCE_V2, 0, 1, 1, 0x10000 },
};

/* The struct of newer releases, with their last field. */
struct later_port_attr {
	struct ibv_port_attr attr;
	uint32_t active_speed_ex;
};
_Static_assert(offsetof(struct later_port_attr, active_speed_ex) == 52 ||
	       sizeof(struct ibv_port_attr) > 52, "layout");

static const struct persona *find_persona(const char *name)
{
	for (size_t n = 0; n < sizeof personas / sizeof *personas; n++)
		if (!strcmp(personas[n].name, name))
			return personas + n;
	expect(0, name);
	return NULL;
}

static void expect_line(const char *device, const char *file, const char *wanted)
{
	char path[256], line[256] = "";
	FILE *stream;

	snprintf(path, sizeof path, "/sys/class/infiniband/%s/%s", device, file);
	expect((stream = fopen(path, "r")) != NULL, path);
	expect(fgets(line, sizeof line, stream) != NULL, path);
	fclose(stream);
	line[strcspn(line, "\n")] = 0;
	if (strcmp(line, wanted)) {
		fprintf(stderr, "%s: %s instead of %s\n", path, line, wanted);
		exit(1);
	}
}

/* NCCL takes devices for ports of one card whose paths agree without these characters. */
static void read_card(const char *device, char card[PATH_MAX])
{
	char path[256];
	size_t length;

	snprintf(path, sizeof path, "/sys/class/infiniband/%s/device", device);
	expect(realpath(path, card) != NULL, path);
	length = strlen(card);
	card[length - 1] = card[length - 3] = card[length - 4] = '0';
}

static void check_device(const struct persona *persona, struct ibv_device *device)
{
	expect((int)device->node_type == persona->node_type, "node_type");
	expect((int)device->transport_type == persona->transport, "transport_type");
	expect_line(device->name, "node_type", persona->node_text);

	struct stat found;
	char path[sizeof device->ibdev_path + 16], read[64];
	snprintf(path, sizeof path, "%s/ports/1", device->ibdev_path);
	expect(!stat(path, &found) && S_ISDIR(found.st_mode), path);
	int length = ibv_read_sysfs_file(device->ibdev_path, "node_type", read, sizeof read);
	expect(length == (int)strlen(persona->node_text) && !memcmp(read, persona->node_text, length),
	       "ibv_read_sysfs_file");
}

static void check_port(const struct persona *persona, struct ibv_context *context, int last_octet)
{
	const char *device = ibv_get_device_name(context->device);
	struct later_port_attr later;
	struct ibv_port_attr *attr = &later.attr;
	struct ibv_device_attr attributes;
	uint16_t pkey = 0, lid = persona->has_lid ? last_octet : 0;
	char text[32];

	memset(&later, 0xff, sizeof later);
	struct verbs_context *extended = verbs_get_ctx_op(context, query_port);
	expect(extended && !extended->query_port(context, 1, attr, sizeof later), "query_port");
	expect(attr->state == IBV_PORT_ACTIVE && attr->link_layer == persona->layer, "link_layer");
	expect(attr->lid == lid && attr->sm_lid == lid, "lid");
	expect(attr->flags == persona->flags && attr->port_cap_flags == persona->capabilities, "flags");
	expect(attr->pkey_tbl_len == 1 && attr->gid_tbl_len == 3, "lengths of tables");
	/* Its offset within newer headers. */
	uint32_t speed;
	memcpy(&speed, (char *)&later + 52, sizeof speed);
	expect(speed == (persona->flags || persona->has_lid ? attr->active_speed : 0u), "speed");
	expect(!ibv_query_port(context, 1, attr) && attr->link_layer == persona->layer, "ibv_query_port");
	expect(!ibv_query_pkey(context, 1, 0, &pkey) && pkey == 0xffff, "ibv_query_pkey");
	expect(!ibv_query_device(context, &attributes), "ibv_query_device");
	expect(!!attributes.max_ah == persona->has_handles && attributes.phys_port_cnt == 1, "max_ah");
	expect(attributes.max_mcast_grp == 64 * persona->has_handles, "max_mcast_grp");
	expect(attributes.max_mcast_qp_attach == 256 * persona->has_handles, "max_mcast_qp_attach");
	expect(attributes.max_total_mcast_qp_attach == 256 * persona->has_handles, "max_total_mcast_qp_attach");
	expect(attributes.atomic_cap == (persona->has_handles ? IBV_ATOMIC_HCA : IBV_ATOMIC_GLOB), "atomics");

	expect_line(device, "ports/1/link_layer", persona->layer_text);
	expect_line(device, "ports/1/state", "4: ACTIVE");
	expect_line(device, "ports/1/pkeys/0", "0xffff");
	snprintf(text, sizeof text, "%#x", lid);
	expect_line(device, "ports/1/lid", lid ? text : "0x0");
	expect_line(device, "ports/1/sm_lid", lid ? text : "0x0");
	snprintf(text, sizeof text, "0x%08x", persona->capabilities);
	expect_line(device, "ports/1/cap_mask", text);
}

static void check_gids(const struct persona *persona, struct ibv_context *context)
{
	const char *device = ibv_get_device_name(context->device);
	struct ibv_gid_entry entry, table[8];
	union ibv_gid gid, none = { .raw = { 0 } };
	int shows_mac = !persona->has_handles;

	for (int index = 0; index < 2; index++) {
		char file[64], text[INET6_ADDRSTRLEN * 2];
		const uint8_t *raw = gid.raw;

		expect(!ibv_query_gid(context, 1, index, &gid), "ibv_query_gid");
		expect(!ibv_query_gid_ex(context, 1, index, &entry, 0), "ibv_query_gid_ex");
		expect(!memcmp(&entry.gid, &gid, sizeof gid), "the same GID");
		expect((int)entry.gid_type == persona->gid_type && entry.port_num == 1, "gid_type");
		snprintf(file, sizeof file, "ports/1/gid_attrs/types/%d", index);
		expect_line(device, file, persona->gid_text);
		for (int n = 0; n < 8; n++)
			sprintf(text + 5 * n, "%02x%02x:", raw[2 * n], raw[2 * n + 1]);
		text[39] = 0;
		snprintf(file, sizeof file, "ports/1/gids/%d", index);
		expect_line(device, file, text);
	}
	/* The GID of the Ethernet address. */
	expect(!ibv_query_gid(context, 1, 2, &gid), "ibv_query_gid");
	expect(!!memcmp(&gid, &none, sizeof gid) == shows_mac, "the GID of the Ethernet address");
	expect(!!ibv_query_gid_ex(context, 1, 2, &entry, 0) != shows_mac, "and its entry");
	expect(ibv_query_gid_table(context, table, 8, 0) == 2 + shows_mac, "ibv_query_gid_table");
}

static void check_handles(const struct persona *persona, struct ibv_context *context, struct ibv_cq *cq)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1 };
	struct ibv_ah *handle;

	expect(pd && !ibv_query_gid(context, 1, 0, &attr.grh.dgid), "a GID");
	errno = 0;
	handle = ibv_create_ah(pd, &attr);
	if (!persona->has_handles) {
		expect(!handle && errno == EOPNOTSUPP, "no handles");
	} else {
		expect(handle && handle->context == context && handle->pd == pd, "ibv_create_ah");
		expect(ibv_dealloc_pd(pd) == EBUSY, "a domain in use");
		expect(!ibv_destroy_ah(handle), "ibv_destroy_ah");
		/* No device reaches it. */
		inet_pton(AF_INET6, "::ffff:192.0.2.1", &attr.grh.dgid);
		expect(!ibv_create_ah(pd, &attr) && errno == EHOSTUNREACH, "an unreachable address");
		attr.grh.sgid_index = 7;
		expect(!ibv_create_ah(pd, &attr) && errno == EINVAL, "an unknown GID index");
		attr = (struct ibv_ah_attr){ .dlid = 2, .port_num = 1 };
		handle = ibv_create_ah(pd, &attr);
		expect(!!handle == persona->has_lid, "a LID");
		expect(!handle || !ibv_destroy_ah(handle), "ibv_destroy_ah");
		attr.port_num = 2;
		expect(!ibv_create_ah(pd, &attr) && errno == EINVAL, "an unknown port");
	}
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD,
					 .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	expect(persona->has_handles ? qp && !ibv_destroy_qp(qp) : !qp && errno == EOPNOTSUPP, "datagrams");
	expect(!ibv_dealloc_pd(pd), "ibv_dealloc_pd");
}

static void connect_by_lid(struct ibv_qp *qp, struct ibv_qp *peer, uint16_t lid)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
				    .dest_qp_num = peer->qp_num, .max_dest_rd_atomic = 1 };

	attr.ah_attr = (struct ibv_ah_attr){ .dlid = lid, .port_num = 1 };
	expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			      IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			      IBV_QP_MIN_RNR_TIMER), "to RTR by LID");
	attr.qp_state = IBV_QPS_RTS;
	expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			      IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "to RTS");
}

/* Connects a queue pair of the first device with one of the second, or with itself, and sends. */
static void exchange(const struct persona *persona, struct ibv_context *contexts[2])
{
	struct ibv_pd *pds[2];
	struct ibv_cq *cqs[2];
	struct ibv_qp *qps[2];
	struct ibv_mr *mrs[2];
	union ibv_gid gids[2];
	static char memory[2][4096];

	for (int n = 0; n < 2; n++) {
		expect((pds[n] = ibv_alloc_pd(contexts[n])) != NULL, "ibv_alloc_pd");
		expect((cqs[n] = ibv_create_cq(contexts[n], 8, NULL, NULL, 0)) != NULL, "ibv_create_cq");
		expect((mrs[n] = ibv_reg_mr(pds[n], memory[n], 4096, IBV_ACCESS_LOCAL_WRITE)) != NULL,
		       "ibv_reg_mr");
		struct ibv_qp_init_attr init = { .send_cq = cqs[n], .recv_cq = cqs[n],
						 .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
						 .cap = { 4, 4, 1, 1, 0 } };
		expect((qps[n] = ibv_create_qp(pds[n], &init)) != NULL, "ibv_create_qp");
		expect(!ibv_query_gid(contexts[n], 1, 0, gids + n), "ibv_query_gid");
		check_handles(persona, contexts[n], cqs[n]);
	}
	for (int to_itself = 0; to_itself < 2; to_itself++) {
		int peer = !to_itself;
		struct ibv_sge to = { (uintptr_t)memory[peer], 64, mrs[peer]->lkey };
		struct ibv_sge from = { (uintptr_t)memory[0] + 128, 64, mrs[0]->lkey };
		struct ibv_recv_wr receive = { .sg_list = &to, .num_sge = 1 }, *bad_receive;
		struct ibv_send_wr send = { .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

		for (int n = 0; n < 1 + peer; n++) {
			struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };

			expect(!ibv_modify_qp(qps[n], &attr, IBV_QP_STATE), "to RESET");
			attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 1 };
			expect(!ibv_modify_qp(qps[n], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX |
					      IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "to INIT");
		}
		expect(!ibv_post_recv(qps[peer], &receive, &bad_receive), "ibv_post_recv");
		for (int n = 0; n < 1 + peer; n++) {
			int other = peer ? !n : 0;

			if (persona->has_lid)
				connect_by_lid(qps[n], qps[other], other + 1);
			else
				connect_qp(qps[n], qps[other], gids[other]);
		}
		memset(memory[0] + 128, 'a' + to_itself, 64);
		expect(!ibv_post_send(qps[0], &send, &bad), "ibv_post_send");
		for (int got = 0; got < 2;) {
			for (int n = 0; n < 2; n++) {
				struct ibv_wc wc;
				if (ibv_poll_cq(cqs[n], 1, &wc) != 1)
					continue;
				expect(wc.status == IBV_WC_SUCCESS, ibv_wc_status_str(wc.status));
				got++;
			}
		}
		expect(memory[peer][0] == 'a' + to_itself, "the message");
	}
	for (int n = 0; n < 2; n++)
		expect(!ibv_destroy_qp(qps[n]) && !ibv_dereg_mr(mrs[n]) && !ibv_destroy_cq(cqs[n]) &&
		       !ibv_dealloc_pd(pds[n]), "the end");
}

int main(int count, char **names)
{
	int devices;
	struct ibv_device **list = ibv_get_device_list(&devices);
	struct ibv_context *contexts[2];
	char cards[2][PATH_MAX];

	expect(count == 3 && list && devices == 2, "two devices");
	for (int n = 0; n < 2; n++) {
		const struct persona *persona = find_persona(names[n + 1]);

		check_device(persona, list[n]);
		read_card(list[n]->name, cards[n]);
		expect((contexts[n] = ibv_open_device(list[n])) != NULL, "ibv_open_device");
		check_port(persona, contexts[n], n + 1);
		check_gids(persona, contexts[n]);
	}
	expect(strcmp(cards[0], cards[1]) != 0, "two cards");
	if (!strcmp(names[1], names[2]))
		exchange(find_persona(names[1]), contexts);
	for (int n = 0; n < 2; n++)
		expect(!ibv_close_device(contexts[n]), "ibv_close_device");
	ibv_free_device_list(list);
	printf("done\n");
	return 0;
}
