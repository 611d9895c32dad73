/* The part of DPDK that the bindings see: functions that DPDK has as static inlines or macros,
 * plain versions of structures whose layout differs between DPDK versions, and flag macros as
 * constants. */
#ifndef SIW_DPDK_SHIM_H
#define SIW_DPDK_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_eth_ring.h>
#include <rte_ethdev.h>
#include <rte_lcore.h>
#include <rte_log.h>
#include <rte_mbuf.h>
#include <rte_mempool.h>
#include <rte_ring.h>
#include <rte_version.h>

/* Per packet and per burst. */
uint16_t siw_rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **pkts, uint16_t n);
uint16_t siw_tx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **pkts, uint16_t n);
uint16_t siw_tx_prepare(uint16_t port, uint16_t queue, struct rte_mbuf **pkts, uint16_t n);
int siw_mempool_get_bulk(struct rte_mempool *mp, struct rte_mbuf **objs, unsigned int n);
void siw_mempool_put_bulk(struct rte_mempool *mp, struct rte_mbuf *const *objs, unsigned int n);

/* General path: correct for every kind of mbuf, but slower. */
struct rte_mbuf *siw_pktmbuf_alloc(struct rte_mempool *mp);
void siw_pktmbuf_free(struct rte_mbuf *m);
void siw_pktmbuf_free_seg(struct rte_mbuf *m);
/* A copy in one buffer or several; NULL when the pool is exhausted. */
struct rte_mbuf *siw_pktmbuf_copy(struct rte_mbuf *m, struct rte_mempool *mp);
struct rte_mbuf *siw_pktmbuf_clone(struct rte_mbuf *m, struct rte_mempool *mp);
void siw_pktmbuf_attach_extbuf(struct rte_mbuf *m, void *buf, uint64_t iova, uint16_t len,
			       struct rte_mbuf_ext_shared_info *shinfo);

uint64_t siw_mempool_virt2iova(const void *obj);
uint16_t siw_pool_data_room(struct rte_mempool *mp);
uint16_t siw_pool_priv_size(struct rte_mempool *mp);
/* Returns the number of memory chunks of a pool; if it is 1, start and bytes describe it. */
uint32_t siw_pool_memory(struct rte_mempool *mp, void **start, size_t *bytes);
unsigned int siw_ring_dequeue_burst(struct rte_ring *r, void **objs, unsigned int n);
unsigned int siw_ring_count(const struct rte_ring *r);

int siw_errno(void);
void siw_errno_clear(void);
unsigned int siw_lcore_id(void);

/* EAL log lines go to the callback as (level, text, length), from any thread. Returns 0, or -1
 * if the stream cannot be created. */
typedef void (*siw_log_fn)(uint32_t level, const char *text, size_t len);
int siw_log_capture(siw_log_fn fn);

struct siw_port_info {
	uint64_t rx_offload_capa;
	uint64_t tx_offload_capa;
	uint64_t rss_types;
	struct rte_device *device;
	const char *driver;
	uint32_t min_mtu;
	uint32_t max_mtu;
	uint32_t min_rx_bufsize;
	uint32_t max_rx_pktlen;
	uint32_t max_lro_pkt_size;
	uint16_t max_rx_queues;
	uint16_t max_tx_queues;
	uint16_t reta_size;
	uint16_t hash_key_size;
	uint16_t rx_desc_min, rx_desc_max, rx_desc_align;
	uint16_t tx_desc_min, tx_desc_max, tx_desc_align;
	uint16_t tx_seg_max, tx_mtu_seg_max;
};
int siw_port_info_get(uint16_t port, struct siw_port_info *out);

struct siw_port_conf {
	uint64_t rx_offloads;
	uint64_t tx_offloads;
	uint64_t rss_types; /* 0: no RSS */
	uint8_t *rss_key;   /* NULL: the driver's */
	uint32_t mtu;	    /* 0: the driver's */
	uint32_t max_lro_pkt_size;
	uint16_t rx_queues;
	uint16_t tx_queues;
	uint8_t rss_key_len;
	bool rx_interrupt;
};
int siw_port_configure(uint16_t port, const struct siw_port_conf *conf);
int siw_port_adjust_desc(uint16_t port, uint16_t *rx, uint16_t *tx);
/* free_thresh 0: the driver's default. */
int siw_port_rx_queue(uint16_t port, uint16_t queue, uint16_t desc, uint64_t offloads,
		      uint16_t free_thresh, struct rte_mempool *mp);
int siw_port_tx_queue(uint16_t port, uint16_t queue, uint16_t desc, uint64_t offloads,
		      uint16_t free_thresh);

struct siw_port_stats {
	uint64_t ipackets, opackets, ibytes, obytes;
	uint64_t imissed, ierrors, oerrors, rx_nombuf;
};
int siw_port_stats_get(uint16_t port, struct siw_port_stats *out);
int siw_port_link(uint16_t port, bool *up, uint32_t *mbps);

/* 0 if a driver or a bus accepts these devargs, whose device is not touched. */
int siw_devargs_check(const char *text);
/* Starts recording removal and reset events of the device; the callbacks run in DPDK's interrupt
 * thread. name: the device's, or NULL if its bus reports no removal. */
int siw_port_watch(uint16_t port, const char *name);
void siw_port_unwatch(uint16_t port, const char *name);
/* Events since the last call: SIW_PORT_REMOVED, SIW_PORT_RESET. */
uint8_t siw_port_take_events(uint16_t port);
/* Reads the RSS key back, at most len bytes; stores its length in len. */
int siw_port_rss_key_get(uint16_t port, uint8_t *key, uint8_t *len);
/* Sets the RSS indirection table: entry i goes to queue table[i]. */
int siw_port_reta_set(uint16_t port, const uint16_t *table, uint16_t n);

/* Memseg lists in use, out of RTE_MAX_MEMSEG_LISTS: each external memory region takes one. */
uint32_t siw_memseg_lists_used(void);
/* Mappings that vfio can still create for devices behind its IOMMU; -1 if it does not report
 * them. */
int64_t siw_vfio_maps_left(void);

#define SIW_PORT_REMOVED 1
#define SIW_PORT_RESET 2
static const uint8_t K_SIW_PORT_REMOVED = SIW_PORT_REMOVED;
static const uint8_t K_SIW_PORT_RESET = SIW_PORT_RESET;

#define K64(name) static const uint64_t K_##name = name;
K64(RTE_MBUF_F_RX_VLAN)
K64(RTE_MBUF_F_RX_VLAN_STRIPPED)
K64(RTE_MBUF_F_RX_RSS_HASH)
K64(RTE_MBUF_F_RX_LRO)
K64(RTE_MBUF_F_RX_IP_CKSUM_MASK)
K64(RTE_MBUF_F_RX_IP_CKSUM_UNKNOWN)
K64(RTE_MBUF_F_RX_IP_CKSUM_BAD)
K64(RTE_MBUF_F_RX_IP_CKSUM_GOOD)
K64(RTE_MBUF_F_RX_IP_CKSUM_NONE)
K64(RTE_MBUF_F_RX_L4_CKSUM_MASK)
K64(RTE_MBUF_F_RX_L4_CKSUM_UNKNOWN)
K64(RTE_MBUF_F_RX_L4_CKSUM_BAD)
K64(RTE_MBUF_F_RX_L4_CKSUM_GOOD)
K64(RTE_MBUF_F_RX_L4_CKSUM_NONE)
K64(RTE_MBUF_F_TX_TCP_SEG)
K64(RTE_MBUF_F_TX_TCP_CKSUM)
K64(RTE_MBUF_F_TX_UDP_CKSUM)
K64(RTE_MBUF_F_TX_L4_MASK)
K64(RTE_MBUF_F_TX_IP_CKSUM)
K64(RTE_MBUF_F_TX_IPV4)
K64(RTE_MBUF_F_TX_IPV6)
K64(RTE_MBUF_F_TX_VLAN)
K64(RTE_MBUF_F_EXTERNAL)
K64(RTE_MBUF_F_INDIRECT)
K64(RTE_MBUF_L2_LEN_BITS)
K64(RTE_MBUF_L3_LEN_BITS)
K64(RTE_MBUF_L4_LEN_BITS)
K64(RTE_MBUF_TSO_SEGSZ_BITS)
K64(RTE_MBUF_L3_LEN_OFS)
K64(RTE_MBUF_L4_LEN_OFS)
K64(RTE_MBUF_TSO_SEGSZ_OFS)
K64(RTE_PKTMBUF_HEADROOM)
K64(RTE_MEMPOOL_CACHE_MAX_SIZE)
K64(RTE_MEMPOOL_NAMESIZE)
K64(RTE_ETH_NAME_MAX_LEN)
K64(RTE_MAX_ETHPORTS)
K64(RTE_RING_NAMESIZE)
K64(RTE_ETH_RX_OFFLOAD_VLAN_STRIP)
K64(RTE_ETH_RX_OFFLOAD_VLAN_FILTER)
K64(RTE_ETH_RX_OFFLOAD_IPV4_CKSUM)
K64(RTE_ETH_RX_OFFLOAD_TCP_CKSUM)
K64(RTE_ETH_RX_OFFLOAD_UDP_CKSUM)
K64(RTE_ETH_RX_OFFLOAD_TCP_LRO)
K64(RTE_ETH_RX_OFFLOAD_SCATTER)
K64(RTE_ETH_RX_OFFLOAD_RSS_HASH)
K64(RTE_ETH_TX_OFFLOAD_VLAN_INSERT)
K64(RTE_ETH_TX_OFFLOAD_IPV4_CKSUM)
K64(RTE_ETH_TX_OFFLOAD_UDP_CKSUM)
K64(RTE_ETH_TX_OFFLOAD_TCP_CKSUM)
K64(RTE_ETH_TX_OFFLOAD_TCP_TSO)
K64(RTE_ETH_TX_OFFLOAD_MULTI_SEGS)
K64(RTE_ETH_RSS_IPV4)
K64(RTE_ETH_RSS_IPV6)
K64(RTE_ETH_RSS_NONFRAG_IPV4_TCP)
K64(RTE_ETH_RSS_NONFRAG_IPV6_TCP)

static const uint32_t K_RTE_IOVA_MODE_VA = RTE_IOVA_VA;
static const uint32_t K_RTE_MAX_MEMSEG_LISTS = RTE_MAX_MEMSEG_LISTS;
static const int32_t K_SOCKET_ID_ANY = SOCKET_ID_ANY;
static const uint32_t K_RING_F_SP_ENQ = RING_F_SP_ENQ;
static const uint32_t K_RING_F_SC_DEQ = RING_F_SC_DEQ;

#endif
