//! Exported functions that always fail; they exist because programs are linked with them.

/// A group of functions, the reason why they fail, and advice for programs.
pub struct Unsupported {
    pub names: &'static [&'static str],
    pub why: &'static str,
    pub advice: &'static str,
}

/// Functions that fail with EOPNOTSUPP at each call on a device with the default persona.
pub const UNSUPPORTED: &[Unsupported] = &[
    Unsupported {
        names: &[
            "ibv_create_ah",
            "ibv_create_ah_from_wc",
            "ibv_init_ah_from_wc",
        ],
        why: "an iWARP device has no datagrams (UD) and no address handles",
        advice: "siwrun --persona roce shows devices that have them, or use reliable connections (RC)",
    },
    Unsupported {
        names: &["ibv_resolve_eth_l2_from_gid"],
        why: "siwd does not tell programs the Ethernet addresses of its peers",
        advice: "leave the address to ibv_create_ah, which resolves it",
    },
    Unsupported {
        names: &["ibv_attach_mcast", "ibv_detach_mcast"],
        why: "an iWARP device has no datagrams (UD), and so no multicast",
        advice: "siwrun --persona roce shows devices that have them",
    },
    Unsupported {
        names: &["rdma_join_multicast", "rdma_join_multicast_ex"],
        why: "an iWARP device has no datagrams (UD), and so no multicast",
        advice: "siwrun --persona roce shows devices that have them",
    },
    Unsupported {
        names: &[
            "ibv_reg_dmabuf_mr",
            "ibv_dm_export_dmabuf_fd",
            "ibv_export_buf_dmabuf_fd",
        ],
        why: "device memory can be neither registered nor exported by dma-buf",
        advice: "use host memory",
    },
    Unsupported {
        names: &[
            "ibv_import_device",
            "ibv_import_pd",
            "ibv_import_mr",
            "ibv_import_dm",
        ],
        why: "objects of one process cannot be imported by another",
        advice: "have each process open the device by itself",
    },
];

/// A program that refuses iWARP devices.
pub struct Refusing {
    /// Texts in its files, such as the names of libraries that they need.
    pub marks: &'static [&'static str],
    pub name: &'static str,
    pub why: &'static str,
    pub advice: &'static str,
}

/// Programs that need a persona.
pub const REFUSING: &[Refusing] = &[
    Refusing {
        marks: &["libuct.so", "libucp.so"],
        name: "UCX",
        why: "UCX uses only devices whose transport is InfiniBand, RoCE included, or unspecified",
        advice: "siwrun --persona roce",
    },
    Refusing {
        marks: &["NON InfiniBand device"],
        name: "GASNet's conduit ibv",
        why: "GASNet uses only devices with InfiniBand's link layer and LIDs",
        advice: "siwrun --persona ib",
    },
];

/// Failing functions that programs can do without: reported as a note.
pub const OPTIONAL: &[&str] = &[
    "ibv_query_ece",
    "ibv_set_ece",
    "ibv_alloc_dmah",
    "rdma_set_local_ece",
    "rdma_get_remote_ece",
];

/// Prefix of the version nodes of the interface between libibverbs and its provider libraries.
pub const PRIVATE_NODES: &str = "IBVERBS_PRIVATE_";

/// Functions of those nodes that work, for rdma-core's programs and pyverbs.
pub const PRIVATE_BUT_WORKING: &[&str] = &["ibv_query_gid_type", "ibv_wr_opcode_str"];

/// Prefixes of the version nodes of NIC libraries, with the library.
pub const PROVIDERS: &[(&str, &str)] = &[
    ("MLX5_", "libmlx5"),
    ("MLX4_", "libmlx4"),
    ("EFA_", "libefa"),
    ("HNS_", "libhns"),
    ("MANA_", "libmana"),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The functions of an export table that belong to the `unsupported` modules.
    fn refused_exports(table: &str) -> Vec<&str> {
        let statements = table.split(';').filter(|text| text.contains("= not::"));
        statements
            .filter_map(|text| text.rsplit("fn ").next()?.split('(').next())
            .collect()
    }

    #[test]
    fn the_table_has_every_function_that_is_refused() {
        let tables = [
            include_str!("../../../ibverbs/exports.rs"),
            include_str!("../../../rdmacm/exports.rs"),
        ];
        // These do nothing, give a correct answer, or fail because no object can exist.
        let harmless = [
            "_kern",
            "unimport_",
            "register_driver",
            "query_qp_data_in_order",
            "ibv_dealloc_dmah",
            "ibv_free_buf",
            "rdma_leave_multicast",
        ];
        let listed: Vec<_> = UNSUPPORTED.iter().flat_map(|row| row.names).collect();
        let mut count = 0;
        for name in tables.into_iter().flat_map(refused_exports) {
            let is_harmless = harmless.iter().any(|part| name.contains(part));
            let is_listed = listed.contains(&&name) || OPTIONAL.contains(&name);
            assert!(is_harmless != is_listed, "{name}");
            count += 1;
        }
        assert!(count > 15, "{count}");
        for name in listed {
            assert!(
                tables
                    .iter()
                    .any(|table| table.contains(&format!("fn {name}("))),
                "{name}"
            );
        }
    }
}
