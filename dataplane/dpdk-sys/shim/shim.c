#define _GNU_SOURCE
/* For rte_dev_event_callback_register, which has been experimental since 2018. */
#define ALLOW_EXPERIMENTAL_API
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>

#include <linux/vfio.h>
#include <rte_vfio.h>

#include "shim.h"

/* The layouts that lib.rs declares by hand. */
_Static_assert(sizeof(struct rte_mbuf) == 128, "struct rte_mbuf is not 128 bytes");
#define AT(field, offset) \
	_Static_assert(offsetof(struct rte_mbuf, field) == offset, "rte_mbuf." #field " moved")
AT(buf_addr, 0);
AT(buf_iova, 8); /* a DPDK built without IOVA in mbufs is not supported */
AT(data_off, 16);
AT(refcnt, 18);
AT(nb_segs, 20);
AT(port, 22);
AT(ol_flags, 24);
AT(packet_type, 32);
AT(pkt_len, 36);
AT(data_len, 40);
AT(vlan_tci, 42);
AT(hash.rss, 44);
AT(vlan_tci_outer, 52);
AT(buf_len, 54);
AT(pool, 56);
AT(next, 64);
AT(tx_offload, 72);
AT(shinfo, 80);
AT(priv_size, 88);
AT(timesync, 90);
AT(dynfield1, 92);
_Static_assert(sizeof(struct rte_mbuf_ext_shared_info) == 24, "ext_shared_info changed size");
_Static_assert(offsetof(struct rte_mbuf_ext_shared_info, fcb_opaque) == 8, "fcb_opaque moved");
_Static_assert(offsetof(struct rte_mbuf_ext_shared_info, refcnt) == 16, "refcnt moved");
_Static_assert(sizeof(((struct rte_mbuf_ext_shared_info *)0)->refcnt) == 2, "refcnt changed size");

uint16_t siw_rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **pkts, uint16_t n)
{
	return rte_eth_rx_burst(port, queue, pkts, n);
}

uint16_t siw_tx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **pkts, uint16_t n)
{
	return rte_eth_tx_burst(port, queue, pkts, n);
}

uint16_t siw_tx_prepare(uint16_t port, uint16_t queue, struct rte_mbuf **pkts, uint16_t n)
{
	return rte_eth_tx_prepare(port, queue, pkts, n);
}

int siw_mempool_get_bulk(struct rte_mempool *mp, struct rte_mbuf **objs, unsigned int n)
{
	return rte_mempool_get_bulk(mp, (void **)objs, n);
}

void siw_mempool_put_bulk(struct rte_mempool *mp, struct rte_mbuf *const *objs, unsigned int n)
{
	rte_mempool_put_bulk(mp, (void *const *)objs, n);
}

struct rte_mbuf *siw_pktmbuf_alloc(struct rte_mempool *mp)
{
	return rte_pktmbuf_alloc(mp);
}

void siw_pktmbuf_free(struct rte_mbuf *m)
{
	rte_pktmbuf_free(m);
}

void siw_pktmbuf_free_seg(struct rte_mbuf *m)
{
	rte_pktmbuf_free_seg(m);
}

struct rte_mbuf *siw_pktmbuf_copy(struct rte_mbuf *m, struct rte_mempool *mp)
{
	return rte_pktmbuf_copy(m, mp, 0, UINT32_MAX);
}

struct rte_mbuf *siw_pktmbuf_clone(struct rte_mbuf *m, struct rte_mempool *mp)
{
	return rte_pktmbuf_clone(m, mp);
}

void siw_pktmbuf_attach_extbuf(struct rte_mbuf *m, void *buf, uint64_t iova, uint16_t len,
			       struct rte_mbuf_ext_shared_info *shinfo)
{
	rte_pktmbuf_attach_extbuf(m, buf, iova, len, shinfo);
}

uint64_t siw_mempool_virt2iova(const void *obj)
{
	return rte_mempool_virt2iova(obj);
}

uint16_t siw_pool_data_room(struct rte_mempool *mp)
{
	return rte_pktmbuf_data_room_size(mp);
}

uint32_t siw_pool_memory(struct rte_mempool *mp, void **start, size_t *bytes)
{
	struct rte_mempool_memhdr *piece;
	uintptr_t first = UINTPTR_MAX, end = 0;
	size_t sum = 0;

	STAILQ_FOREACH(piece, &mp->mem_list, next) {
		uintptr_t at = (uintptr_t)piece->addr;

		first = RTE_MIN(first, at);
		end = RTE_MAX(end, at + piece->len);
		sum += piece->len;
	}
	if (sum == 0 || end - first != sum)
		return mp->nb_mem_chunks;
	*start = (void *)first;
	*bytes = sum;
	return 1;
}

uint16_t siw_pool_priv_size(struct rte_mempool *mp)
{
	return rte_pktmbuf_priv_size(mp);
}

unsigned int siw_ring_dequeue_burst(struct rte_ring *r, void **objs, unsigned int n)
{
	return rte_ring_dequeue_burst(r, objs, n, NULL);
}

unsigned int siw_ring_count(const struct rte_ring *r)
{
	return rte_ring_count(r);
}

int siw_errno(void)
{
	return rte_errno;
}

void siw_errno_clear(void)
{
	rte_errno = 0;
}

unsigned int siw_lcore_id(void)
{
	return rte_lcore_id();
}

static ssize_t log_write(void *cookie, const char *text, size_t len)
{
	/* A function pointer does not portably fit into a void *, but its address does. */
	siw_log_fn *fn = cookie;
	(*fn)((uint32_t)rte_log_cur_msg_loglevel(), text, len);
	return (ssize_t)len;
}

int siw_log_capture(siw_log_fn fn)
{
	static siw_log_fn sink;
	cookie_io_functions_t io = {.write = log_write};
	FILE *f;

	sink = fn;
	f = fopencookie(&sink, "w", io);
	if (f == NULL)
		return -1;
	setvbuf(f, NULL, _IOLBF, 1024);
	return rte_openlog_stream(f);
}

int siw_port_info_get(uint16_t port, struct siw_port_info *out)
{
	struct rte_eth_dev_info i;
	int rc = rte_eth_dev_info_get(port, &i);

	if (rc != 0)
		return rc;
	*out = (struct siw_port_info){
		.rx_offload_capa = i.rx_offload_capa,
		.tx_offload_capa = i.tx_offload_capa,
		.rss_types = i.flow_type_rss_offloads,
		.device = i.device,
		.driver = i.driver_name,
		.min_mtu = i.min_mtu,
		.max_mtu = i.max_mtu,
		.min_rx_bufsize = i.min_rx_bufsize,
		.max_rx_pktlen = i.max_rx_pktlen,
		.max_lro_pkt_size = i.max_lro_pkt_size,
		.max_rx_queues = i.max_rx_queues,
		.max_tx_queues = i.max_tx_queues,
		.reta_size = i.reta_size,
		.hash_key_size = i.hash_key_size,
		.rx_desc_min = i.rx_desc_lim.nb_min,
		.rx_desc_max = i.rx_desc_lim.nb_max,
		.rx_desc_align = i.rx_desc_lim.nb_align,
		.tx_desc_min = i.tx_desc_lim.nb_min,
		.tx_desc_max = i.tx_desc_lim.nb_max,
		.tx_desc_align = i.tx_desc_lim.nb_align,
		.tx_seg_max = i.tx_desc_lim.nb_seg_max,
		.tx_mtu_seg_max = i.tx_desc_lim.nb_mtu_seg_max,
	};
	return 0;
}

int siw_port_configure(uint16_t port, const struct siw_port_conf *c)
{
	struct rte_eth_conf conf;

	memset(&conf, 0, sizeof(conf));
	conf.rxmode.offloads = c->rx_offloads;
	conf.rxmode.mtu = c->mtu;
	conf.rxmode.max_lro_pkt_size = c->max_lro_pkt_size;
	conf.txmode.offloads = c->tx_offloads;
	conf.txmode.mq_mode = RTE_ETH_MQ_TX_NONE;
	if (c->rss_types != 0) {
		conf.rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;
		conf.rx_adv_conf.rss_conf.rss_hf = c->rss_types;
		conf.rx_adv_conf.rss_conf.rss_key = c->rss_key;
		conf.rx_adv_conf.rss_conf.rss_key_len = c->rss_key_len;
	}
	conf.intr_conf.rxq = c->rx_interrupt;
	return rte_eth_dev_configure(port, c->rx_queues, c->tx_queues, &conf);
}

int siw_port_adjust_desc(uint16_t port, uint16_t *rx, uint16_t *tx)
{
	return rte_eth_dev_adjust_nb_rx_tx_desc(port, rx, tx);
}

int siw_port_rx_queue(uint16_t port, uint16_t queue, uint16_t desc, uint64_t offloads,
		      uint16_t free_thresh, struct rte_mempool *mp)
{
	struct rte_eth_dev_info i;
	struct rte_eth_rxconf conf;
	int rc = rte_eth_dev_info_get(port, &i);

	if (rc != 0)
		return rc;
	conf = i.default_rxconf;
	if (free_thresh != 0)
		conf.rx_free_thresh = free_thresh;
	conf.offloads = offloads;
	return rte_eth_rx_queue_setup(port, queue, desc, SOCKET_ID_ANY, &conf, mp);
}

int siw_port_tx_queue(uint16_t port, uint16_t queue, uint16_t desc, uint64_t offloads,
		      uint16_t free_thresh)
{
	struct rte_eth_dev_info i;
	struct rte_eth_txconf conf;
	int rc = rte_eth_dev_info_get(port, &i);

	if (rc != 0)
		return rc;
	conf = i.default_txconf;
	if (free_thresh != 0)
		conf.tx_free_thresh = free_thresh;
	conf.offloads = offloads;
	return rte_eth_tx_queue_setup(port, queue, desc, SOCKET_ID_ANY, &conf);
}

int siw_port_stats_get(uint16_t port, struct siw_port_stats *out)
{
	struct rte_eth_stats s;
	int rc = rte_eth_stats_get(port, &s);

	if (rc != 0)
		return rc;
	*out = (struct siw_port_stats){
		.ipackets = s.ipackets,
		.opackets = s.opackets,
		.ibytes = s.ibytes,
		.obytes = s.obytes,
		.imissed = s.imissed,
		.ierrors = s.ierrors,
		.oerrors = s.oerrors,
		.rx_nombuf = s.rx_nombuf,
	};
	return 0;
}

int siw_port_link(uint16_t port, bool *up, uint32_t *mbps)
{
	struct rte_eth_link link;
	int rc;

	memset(&link, 0, sizeof(link));
	rc = rte_eth_link_get_nowait(port, &link);
	if (rc != 0)
		return rc;
	*up = link.link_status == RTE_ETH_LINK_UP;
	*mbps = link.link_speed;
	return 0;
}

int siw_devargs_check(const char *text)
{
	struct rte_devargs devargs;
	int rc;

	memset(&devargs, 0, sizeof(devargs));
	rc = rte_devargs_parse(&devargs, text);
	if (rc == 0)
		rte_devargs_reset(&devargs);
	return rc;
}

static _Atomic uint8_t port_events[RTE_MAX_ETHPORTS];

static int on_port_event(uint16_t port, enum rte_eth_event_type type, void *arg, void *ret)
{
	(void)arg;
	(void)ret;
	atomic_fetch_or(&port_events[port],
			type == RTE_ETH_EVENT_INTR_RMV ? SIW_PORT_REMOVED : SIW_PORT_RESET);
	return 0;
}

/* vfio waits for this callback: the kernel delays the removal until the device is closed. */
static void on_device_event(const char *name, enum rte_dev_event_type type, void *arg)
{
	(void)name;
	if (type == RTE_DEV_EVENT_REMOVE)
		atomic_fetch_or((_Atomic uint8_t *)arg, SIW_PORT_REMOVED);
}

int siw_port_watch(uint16_t port, const char *name)
{
	int rc;

	if (port >= RTE_MAX_ETHPORTS)
		return -EINVAL;
	atomic_store(&port_events[port], 0);
	rc = rte_eth_dev_callback_register(port, RTE_ETH_EVENT_INTR_RMV, on_port_event, NULL);
	if (rc == 0)
		rc = rte_eth_dev_callback_register(port, RTE_ETH_EVENT_INTR_RESET, on_port_event,
						   NULL);
	if (rc == 0 && name != NULL)
		rc = rte_dev_event_callback_register(name, on_device_event, &port_events[port]);
	return rc;
}

void siw_port_unwatch(uint16_t port, const char *name)
{
	/* Both return -EAGAIN while the callback runs. */
	while (name != NULL && rte_dev_event_callback_unregister(name, on_device_event,
								 &port_events[port]) == -EAGAIN)
		sched_yield();
	while (rte_eth_dev_callback_unregister(port, RTE_ETH_EVENT_INTR_RMV, on_port_event, NULL) ==
	       -EAGAIN)
		sched_yield();
	while (rte_eth_dev_callback_unregister(port, RTE_ETH_EVENT_INTR_RESET, on_port_event,
					       NULL) == -EAGAIN)
		sched_yield();
}

uint8_t siw_port_take_events(uint16_t port)
{
	return port < RTE_MAX_ETHPORTS ? atomic_exchange(&port_events[port], 0) : 0;
}

int siw_port_rss_key_get(uint16_t port, uint8_t *key, uint8_t *len)
{
	struct rte_eth_rss_conf conf = {.rss_key = key, .rss_key_len = *len};
	int rc = rte_eth_dev_rss_hash_conf_get(port, &conf);

	/* A driver that does not know its key leaves the length unset. */
	*len = conf.rss_key_len;
	return rc;
}

int siw_port_reta_set(uint16_t port, const uint16_t *table, uint16_t n)
{
	struct rte_eth_rss_reta_entry64 reta[RTE_ETH_RSS_RETA_SIZE_512 / RTE_ETH_RETA_GROUP_SIZE];
	uint16_t i;

	if (n > RTE_ETH_RSS_RETA_SIZE_512 || n % RTE_ETH_RETA_GROUP_SIZE != 0)
		return -EINVAL;
	memset(reta, 0, sizeof(reta));
	for (i = 0; i < n; i++) {
		reta[i / RTE_ETH_RETA_GROUP_SIZE].mask |=
			UINT64_C(1) << (i % RTE_ETH_RETA_GROUP_SIZE);
		reta[i / RTE_ETH_RETA_GROUP_SIZE].reta[i % RTE_ETH_RETA_GROUP_SIZE] = table[i];
	}
	return rte_eth_dev_rss_reta_update(port, reta, n);
}

static int count_list(const struct rte_memseg_list *list, void *count)
{
	(void)list;
	++*(uint32_t *)count;
	return 0;
}

uint32_t siw_memseg_lists_used(void)
{
	uint32_t count = 0;

	rte_memseg_list_walk(count_list, &count);
	return count;
}

int64_t siw_vfio_maps_left(void)
{
	/* The capabilities follow the structure. */
	union {
		struct vfio_iommu_type1_info info;
		uint8_t bytes[4096];
	} reply = {.info = {.argsz = sizeof(reply)}};
	struct vfio_iommu_type1_info_dma_avail left;
	uint32_t offset;
	int container = rte_vfio_get_container_fd();

	if (container < 0 || ioctl(container, VFIO_IOMMU_GET_INFO, &reply) != 0 ||
	    !(reply.info.flags & VFIO_IOMMU_INFO_CAPS) || reply.info.argsz > sizeof(reply))
		return -1;
	for (offset = reply.info.cap_offset; offset != 0 && offset <= sizeof(reply) - sizeof(left);
	     offset = left.header.next) {
		memcpy(&left, reply.bytes + offset, sizeof(left));
		if (left.header.id == VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL)
			return left.avail;
	}
	return -1;
}
