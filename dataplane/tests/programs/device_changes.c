/*
 * Devices that are removed and added while a program runs: rdma_get_devices(3) has those of now, identifiers of a
 * removed device get RDMA_CM_EVENT_DEVICE_REMOVAL (rdma_get_cm_event(3)), and a device that is back serves again.
 * The argument is the path of siwctl.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include "connect.h"

static const char *siwctl;

static void change(const char *arguments)
{
	char line[PATH_MAX + 128];

	snprintf(line, sizeof(line), "'%s' device %s >/dev/null", siwctl, arguments);
	expect(system(line) == 0, line);
}

/* The context of a device among those of rdma_get_devices(3). */
static struct ibv_context *find(const char *name)
{
	int count = 0;
	struct ibv_context **all = rdma_get_devices(&count), *found = NULL;

	expect(all != NULL, "rdma_get_devices");
	for (int i = 0; i < count; i++)
		if (!strcmp(all[i]->device->name, name))
			found = all[i];
	expect(all[count] == NULL, "the end of the list");
	rdma_free_devices(all);
	return found;
}

static struct rdma_cm_id *create(struct rdma_event_channel *channel)
{
	struct rdma_cm_id *id;

	expect(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "rdma_create_id");
	return id;
}

static struct rdma_cm_id *listen_at(struct rdma_event_channel *channel, const char *address, int port)
{
	struct rdma_cm_id *id = create(channel);
	struct sockaddr_in local = { .sin_family = AF_INET, .sin_port = htons(port) };

	inet_pton(AF_INET, address, &local.sin_addr);
	expect(!rdma_bind_addr(id, (struct sockaddr *)&local), "rdma_bind_addr");
	if (port)
		expect(!rdma_listen(id, 4), "rdma_listen");
	return id;
}

static struct rdma_cm_id *resolve(struct rdma_event_channel *channel, const char *address)
{
	struct rdma_cm_id *id = create(channel);
	struct sockaddr_in remote = { .sin_family = AF_INET, .sin_port = htons(7001) };
	struct rdma_cm_event *event;

	inet_pton(AF_INET, address, &remote.sin_addr);
	expect(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&remote, 2000), "rdma_resolve_addr");
	expect(!rdma_get_cm_event(channel, &event) && event->event == RDMA_CM_EVENT_ADDR_RESOLVED, "resolved");
	rdma_ack_cm_event(event);
	return id;
}

/* Takes one event of removal for each identifier. */
static void await_removal(struct rdma_event_channel *channel, struct rdma_cm_id **ids, int count)
{
	struct pollfd readable = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;
	int left = count;

	for (int taken = 0; taken < count; taken++) {
		expect(poll(&readable, 1, 60000) == 1 && !rdma_get_cm_event(channel, &event), "event");
		expect(event->event == RDMA_CM_EVENT_DEVICE_REMOVAL, rdma_event_str(event->event));
		for (int i = 0; i < count; i++)
			if (event->id == ids[i]) {
				struct rdma_cm_id *gone = ids[i];

				ids[i] = NULL;
				left--;
				rdma_ack_cm_event(event);
				expect(!rdma_destroy_id(gone), "rdma_destroy_id");
				break;
			}
		expect(left == count - taken - 1, "an identifier of the device, once");
	}
	expect(poll(&readable, 1, 0) == 0, "no event of other identifiers");
}

int main(int argc, char **argv)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct ibv_context *other = find("siw0"), *before = find("siw3"), *after;
	struct ibv_async_event event;
	struct rdma_cm_id *ids[3], *stays;

	expect(argc == 2 && channel && before, "start");
	siwctl = argv[1];
	expect(!fcntl(other->async_fd, F_SETFL, O_NONBLOCK), "O_NONBLOCK");
	ids[0] = listen_at(channel, "10.78.0.2", 7001);
	ids[1] = listen_at(channel, "10.78.0.2", 0);
	/* siw3 has the address itself. */
	ids[2] = resolve(channel, "10.78.0.2");
	stays = listen_at(channel, "10.77.0.1", 7001);

	change("del siw2 --force");
	change("del siw3 --force");
	await_removal(channel, ids, 3);
	expect(find("siw3") == NULL && find("siw0") == other, "devices without the removed ones");
	expect(ibv_get_async_event(other, &event) && errno == EAGAIN, "no event of another device");

	change("add siw2");
	change("add siw3");
	after = find("siw3");
	expect(after && after != before, "a device that is back has a new context");
	ids[0] = listen_at(channel, "10.78.0.2", 7001);
	ids[1] = resolve(channel, "10.78.0.2");
	expect(ids[0]->verbs == after && ids[1]->verbs == after, "identifiers of the device that is back");
	for (int i = 0; i < 2; i++)
		expect(!rdma_destroy_id(ids[i]), "rdma_destroy_id");
	expect(!rdma_destroy_id(stays), "rdma_destroy_id");
	puts("done");
	return 0;
}
