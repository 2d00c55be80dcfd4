"""The variables that NCCL reads, by release."""

from __future__ import annotations

from typing import Final

from stratagem_process_group.rules import (
    ANY_INTEGER,
    SWITCH,
    TEXT,
    TIMEOUT_HINT,
    Library,
    integer,
    one_of,
    same_rule,
    words,
)

_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")

_NCCL_RULES: Final = {
    **same_rule(
        "alloc_p2p_net_ll_buffers check_pointers collnet_enable comm_blocking cumem_enable cumem_host_enable "
        "dmabuf_enable graph_mixing_support graph_register ib_adaptive_routing ib_data_direct ib_disable ib_ece_enable "
        "ib_merge_nics ib_return_async_events ib_split_data_on_qps ib_warn_rail_local ignore_cpu_affinity "
        "ignore_disabled_p2p launch_race_fatal legacy_cuda_register local_register net_disable_intra net_force_flush "
        "net_gdr_c2c net_gdr_read net_shared_buffers net_shared_comms nvb_disable nvtx_disable oob_net_enable "
        "p2p_direct_disable p2p_disable p2p_use_cuda_memcpy pxn_c2c pxn_disable ras_enable runtime_connect "
        "set_stack_size set_thread_name shm_disable single_proc_mem_reg_enable win_enable",
        SWITCH,
    ),
    **same_rule(
        "algo conf_file debug_file debug_subsys debug_timestamp_format debug_timestamp_levels env_plugin graph_file "
        "hostid ib_addr_range ib_hca mnnvl_uuid net net_plugin netdevs_policy oob_net_ifname profiler_plugin proto "
        "ras_addr socket_ifname topo_dump_file topo_file tuner_plugin",
        TEXT,
    ),
    **same_rule(
        "buffsize collnet_node_threshold ib_ar_threshold ib_fifo_tc ib_gid_index ib_pkey "
        "ib_prepost_receive_work_requests ll128_buffsize ll_buffsize max_ctas max_nchannels max_p2p_nchannels "
        "min_ctas min_nchannels min_p2p_nchannels mnnvl_clique_id nchannels_per_net_peer nvls_chunksize "
        "nvls_nchannels p2p_ll_threshold p2p_net_chunksize p2p_nvl_chunksize p2p_pci_chunksize ras_timeout_factor "
        "socket_poll_timeout_msec socket_rcvbuf socket_retry_cnt socket_retry_sleep_msec socket_sndbuf "
        "uid_stagger_rate uid_stagger_threshold work_args_bytes work_fifo_bytes",
        ANY_INTEGER,
    ),
    **same_rule("cross_nic cta_policy ib_pci_relaxed_ordering mnnvl_enable nvls_enable p2p_pxn_level", integer(0, 2)),
    **same_rule("nsocks_perthread socket_nthreads", integer(1, 16)),
    "cga_cluster_size": integer(0, 8),
    "debug": one_of("VERSION", "WARN", "INFO", "TRACE"),
    "ib_addr_family": one_of("AF_INET", "AF_INET6"),
    "ib_qps_per_connection": integer(1, 128),
    "ib_retry_cnt": integer(0, 7),
    "ib_roce_version_num": integer(1, 2),
    "ib_sl": integer(0, 15),
    "ib_tc": integer(0, 255),
    "ib_timeout": integer(1, 31),
    "launch_mode": one_of("PARALLEL", "GROUP"),
    "launch_order_implicit": integer(0, 1),
    "mem_sync_domain": integer(0, 3),
    "net_gdr_level": one_of(*_LEVELS),
    "nthreads": one_of(64, 128, 256, 512),
    "p2p_level": one_of("LOC", "NVL", *_LEVELS[1:]),
    "socket_family": one_of("AF_INET", "AF_INET6"),
}

#: What torch itself reads under the prefix TORCH_NCCL_, beside the library.
TORCH_NAMES: Final = words(
    "ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BCAST_UNIQUEID BLOCKING_WAIT COORD_CHECK_MILSEC CUDA_EVENT_CACHE "
    "DEBUG_INFO_PIPE_FILE DEBUG_INFO_TEMP_FILE DESYNC_DEBUG DUMP_ON_TIMEOUT ENABLE_MONITORING ENABLE_TIMING "
    "EXTRA_DUMP_ON_EXEC HEARTBEAT_TIMEOUT_SEC HIGH_PRIORITY LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NAN_CHECK "
    "PROPAGATE_ERROR RANKS_PER_ROOT RETHROW_CUDA_ERRORS SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING TRACE_BUFFER_SIZE "
    "TRACE_CPP_STACK USE_COMM_NONBLOCKING NONBLOCKING_TIMEOUT USE_TENSOR_REGISTER_ALLOCATOR_HOOK "
    "WAIT_TIMEOUT_DUMP_MILSEC"
)
#: Those that torch also reads under the prefix NCCL_.
TORCH_OLD_NAMES: Final = (
    "ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING", "USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)  # fmt: skip

#: The first release that reads an option; every release reads what 2.27 reads.
_NCCL_SINCE: Final = {
    option: release
    for release, options in {
        (2, 28): "netdevs_policy nvtx_disable set_cpu_stack_size single_proc_mem_reg_enable",
        (2, 28, 7): "env_plugin",
        (2, 29): "allgatherv_enable enable_version_check multi_segment_register num_rma_ctx socket_poll_timeout_msec",
        (2, 30): "check_mode disable_mem_manager elastic_buffer_register ib_device_pci_order ib_ooo_rq "
        "ib_prepost_receive_work_requests ib_receiver_side_matching_scheme ibverbs_lib ignore_collnet_mismatch "
        "ignore_net_mismatch ipc_use_abstract_socket lsa_team_size multi_rank_gpu_enable no_cache param_dump_all",
        (2, 31): "dev_api_jit enqueue_rearch_enable graph_stream_ordering ib_pkey_value ib_query_port_speed "
        "ib_subnet_aware_routing ib_subnet_prefix_len num_rma_int_ctx pat_ndims run_diagnostics run_ras_diagnostics "
        "topo_split_mlopart",
        (2, 32): "ib_mlx_vendor_id ib_rail_policy ib_sort_merge_nics",
    }.items()
    for option in words(options)
}


def _installed_nccl() -> tuple[int, ...] | None:
    """Return the release of the library that is loaded; torch only knows with which one it was built."""
    import ctypes

    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        release: tuple[int, ...] = torch.cuda.nccl.version()[:3]
        return release
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


NCCL: Final = Library(
    name="nccl",
    title="NCCL",
    prefix="NCCL_",
    rules=_NCCL_RULES,
    since=_NCCL_SINCE,
    installed=lambda: _installed_nccl(),
    instead={
        "timeout": TIMEOUT_HINT,
        "comm_timeout": TIMEOUT_HINT,
        "checks_disable": "it was dropped; there is check_pointers",
        "ib_cuda_support": "it was dropped for net_gdr_level",
        "ib_gdr_level": "it was dropped for net_gdr_level",
        "ll_threshold": "it was dropped for algo and proto",
        "single_ring_threshold": "it was dropped for algo and proto",
        "tree_threshold": "it was dropped for algo and proto",
        **{
            name.lower(): f"it is torch's: set TORCH_NCCL_{name} in the environment"
            for name in (*TORCH_OLD_NAMES, "HEARTBEAT_TIMEOUT_SEC", "TRACE_BUFFER_SIZE", "DUMP_ON_TIMEOUT", "NAN_CHECK")
        },
    },
)
