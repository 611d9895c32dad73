/*
 * The GID table of an open context follows the addresses of its device: IBV_EVENT_GID_CHANGE
 * (ibv_get_async_event(3)), and an index that an entry keeps for its life. The argument is the path of siwctl.
 */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <poll.h>
#include "connect.h"

/* Of <infiniband/driver.h>, which is not installed everywhere. */
int ibv_read_sysfs_file(const char *dir, const char *file, char *buffer, size_t size);

static const char *siwctl;

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = NULL;

	for (int i = 0; list && list[i] && !context; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			context = ibv_open_device(list[i]);
	ibv_free_device_list(list);
	expect(context != NULL, "device");
	return context;
}

/* Changes the addresses of siw0. */
static void change(const char *action, const char *address)
{
	char line[PATH_MAX + 128];

	snprintf(line, sizeof(line), "'%s' addr %s %s --device siw0 >/dev/null", siwctl, action, address);
	expect(system(line) == 0, line);
}

static union ibv_gid to_gid(const char *address)
{
	union ibv_gid gid = { .raw = { [10] = 0xff, [11] = 0xff } };

	if (strchr(address, ':'))
		inet_pton(AF_INET6, address, &gid);
	else
		inet_pton(AF_INET, address, gid.raw + 12);
	return gid;
}

/* Index of an address, by each of the three calls; -1 if it is not in the table. */
static int find(struct ibv_context *context, const char *address)
{
	union ibv_gid wanted = to_gid(address), gid;
	struct ibv_gid_entry entry, table[32];
	struct ibv_port_attr port;
	int index = -1;
	ssize_t count = ibv_query_gid_table(context, table, 32, 0);

	expect(!ibv_query_port(context, 1, &port) && count > 0, "port");
	for (int i = 0; i < port.gid_tbl_len; i++) {
		expect(!ibv_query_gid(context, 1, i, &gid), "ibv_query_gid");
		if (!memcmp(&gid, &wanted, sizeof(gid)))
			index = i;
	}
	for (ssize_t i = 0; i < count; i++)
		if (!memcmp(&table[i].gid, &wanted, sizeof(gid)))
			expect((int)table[i].gid_index == index, "ibv_query_gid_table");
	if (index >= 0) {
		expect(!ibv_query_gid_ex(context, 1, index, &entry, 0), "ibv_query_gid_ex");
		expect(!memcmp(&entry.gid, &wanted, sizeof(gid)) && (int)entry.gid_index == index, "entry");
	}
	return index;
}

static void await_change(struct ibv_context *context)
{
	struct pollfd readable = { .fd = context->async_fd, .events = POLLIN };
	struct ibv_async_event event;

	expect(poll(&readable, 1, 60000) == 1 && !ibv_get_async_event(context, &event), "event");
	expect(event.event_type == IBV_EVENT_GID_CHANGE && event.element.port_num == 1, "IBV_EVENT_GID_CHANGE");
	ibv_ack_async_event(&event);
}

int main(int argc, char **argv)
{
	struct ibv_context *context = open_device("siw0"), *other = open_device("siw1"), *later;
	struct pollfd elsewhere = { .fd = other->async_fd, .events = POLLIN };
	struct ibv_gid_entry entry;
	union ibv_gid gid, zero = { .raw = { 0 } };
	char type[16], path[PATH_MAX];
	int v4, v6, added;

	expect(argc == 2, "the path of siwctl");
	siwctl = argv[1];
	v4 = find(context, "10.77.0.1");
	v6 = find(context, "fd77::1");
	expect(v4 >= 0 && v6 >= 0, "the first addresses");

	change("add", "10.77.0.9/24");
	await_change(context);
	added = find(context, "10.77.0.9");
	expect(added >= 0 && added != v4 && added != v6, "an added address");
	expect(find(context, "10.77.0.1") == v4 && find(context, "fd77::1") == v6, "the others stay");

	change("del", "10.77.0.1");
	await_change(context);
	expect(find(context, "10.77.0.1") < 0, "a removed address");
	later = open_device("siw0");
	expect(find(context, "10.77.0.9") == added && find(later, "10.77.0.9") == added, "a later context");
	expect(find(later, "fd77::1") == v6, "a later context");

	/* As with rdma-core: a GID of zeros, ENODATA, and files in /sys that agree. */
	expect(!ibv_query_gid(context, 1, v4, &gid) && !memcmp(&gid, &zero, sizeof(gid)), "the GID of a hole");
	expect(ibv_query_gid_ex(context, 1, v4, &entry, 0) == ENODATA, "a hole");
	expect(ibv_query_gid_ex(context, 1, 200, &entry, 0) == EINVAL, "an index beyond the table");
	expect(ibv_query_gid(context, 1, 200, &gid) == -1, "an index beyond the table");
	snprintf(path, sizeof(path), "ports/1/gids/%d", v4);
	expect(ibv_read_sysfs_file(context->device->ibdev_path, path, type, sizeof(type)) > 0, "the file of a hole");
	expect(!strncmp(type, "0000:0000:0000:", 15), "the file of a hole");
	snprintf(path, sizeof(path), "ports/1/gid_attrs/types/%d", v4);
	expect(ibv_read_sysfs_file(context->device->ibdev_path, path, type, sizeof(type)) < 0, "the type of a hole");
	snprintf(path, sizeof(path), "ports/1/gid_attrs/types/%d", added);
	expect(ibv_read_sysfs_file(context->device->ibdev_path, path, type, sizeof(type)) > 0, "a type");
	expect(!strncmp(type, "RoCE v2", 7), "a type");

	change("add", "10.77.0.1/24");
	await_change(context);
	expect(find(context, "10.77.0.1") == v4, "the first hole is filled");
	change("del", "10.77.0.9");
	await_change(context);
	await_change(later);
	expect(find(context, "fd77::1") == v6, "the others stay");
	expect(poll(&elsewhere, 1, 0) == 0, "no event of another device");
	puts("done");
	return 0;
}
