"""Options for what NCCL and gloo read from the environment: named, typed, set before ranks connect, given back after.

[Note: read once]
A communication library reads most of its variables once in the life of a process, when it first needs them, and keeps
what it read. So a value that comes after the first process group has no effect, whatever the environment says: it is
refused. The exceptions are a library's `reread` options.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from stratagem.distributed.backends import with_gloo
from stratagem.errors import ConfigError, nearest

if TYPE_CHECKING:
    from stratagem.api.context import RunContext
    from stratagem.api.kinds import Strategy


@frozen
class Rule:
    """What a variable takes, for people and for us."""

    expected: str
    holds: Callable[[Any], bool]


@frozen(kw_only=True)
class Library:
    """A communication library, and what it reads from the environment."""

    #: Of the options that hold its variables, and of torch.distributed's backend.
    name: str
    #: As people write it.
    title: str
    prefix: str
    #: What each option takes; an option is its variable in lower case, without the prefix.
    rules: Mapping[str, Rule]
    #: Variables whose names do not follow the pattern, by option.
    named: Mapping[str, str] = field(factory=dict)
    #: Options that count for every process group; see [Note: read once].
    reread: frozenset[str] = frozenset()
    #: What to do instead of setting an option that sounds right and does not exist.
    instead: Mapping[str, str] = field(factory=dict)
    #: The first release that reads an option, of those that are younger than the oldest one in use.
    since: Mapping[str, tuple[int, ...]] = field(factory=dict)
    #: Return the release that this process uses; None if it has none.
    installed: Callable[[], tuple[int, ...] | None] = lambda: None
    #: Other variables that it reads and whose values are not known here.
    undocumented: re.Pattern[str] = re.compile(r"(?!)")

    def variable(self, option: str) -> str:
        """Return the variable that stands for `option`."""
        return self.named.get(option, self.prefix + option.upper())

    def reads(self, option: str) -> bool:
        """Whether the library knows `option`, documented or not."""
        return option in self.rules or self.undocumented.fullmatch(option) is not None

    def too_old_for(self, option: str) -> tuple[str, str] | None:
        """Return the release that is installed and the first that reads `option`; None if the installed one may."""
        since, installed = self.since.get(option), self.installed() if option in self.since else None
        if since is None or installed is None or installed >= since:
            return None
        return ".".join(map(str, installed)), ".".join(map(str, since))


@frozen(kw_only=True)
class Remark:
    """What is odd about a variable that is set."""

    text: str
    #: A slip of the pen, rather than something that only another program may understand.
    is_mistake: bool


# --- Before any process starts -----------------------------------------------------------------------------------


def nccl_options(instance: Any, attribute: Any, value: Any) -> None:
    """Accept a mapping from NCCL's options to values that they take; the validator of a field."""
    _check_options(NCCL, f"{type(instance).__name__}.{attribute.name}", value)
    if isinstance(value, Mapping):
        _check_limits(f"{type(instance).__name__}.{attribute.name}", value)


def gloo_options(instance: Any, attribute: Any, value: Any) -> None:
    """Accept a mapping from gloo's options to values that they take; the validator of a field."""
    _check_options(GLOO, f"{type(instance).__name__}.{attribute.name}", value)


def _check_options(library: Library, path: str, options: Any) -> None:
    if not isinstance(options, Mapping):
        return  # None, or a value for the type check to refuse
    for option, value in options.items():
        if not isinstance(option, str) or not library.reads(option):
            raise _unknown(library, path, str(option))
        rule = library.rules.get(option, _ANYTHING)
        if not rule.holds(value):
            raise ConfigError(f"{path}.{option} is {value!r}", expected=rule.expected)


def _unknown(library: Library, path: str, option: str) -> ConfigError:
    return ConfigError(
        f"{path}.{option} is unknown",
        expected=f"a variable of {library.title}, in lower case and without {library.prefix}",
        do=_advice(library, option.lower().removeprefix(library.prefix.lower())) or "see docs/tuning.md",
    )


def _advice(library: Library, option: str) -> str:
    """Return what to do about an option that does not exist; an empty string if nobody knows."""
    if option in library.instead:
        return library.instead[option]
    if library.reads(option):
        return f"did you mean {option!r}"
    return nearest(option, library.rules)


def _check_limits(path: str, options: Mapping[str, Any]) -> None:
    """Refuse NCCL options that do not fit together."""
    low, high = options.get("min_nchannels"), options.get("max_nchannels")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{path}.min_nchannels is {low}", expected=f"at most max_nchannels, which is {high}")
    threads, sockets = options.get("socket_nthreads", 1), options.get("nsocks_perthread", 1)
    if threads * sockets > _MAX_SOCKETS:
        raise ConfigError(
            f"{path} asks for {threads} socket_nthreads of {sockets} nsocks_perthread",
            expected=f"a product of at most {_MAX_SOCKETS}, NCCL's limit for a connection",
        )


# --- While a run is connected ------------------------------------------------------------------------------------


@frozen(kw_only=True)
class _Wish:
    """A variable that an option asks for."""

    path: str
    option: str
    value: Any
    library: Library

    @property
    def variable(self) -> str:
        return self.library.variable(self.option)

    @property
    def origin(self) -> str:
        return f"{self.path}.{self.option}"

    def __str__(self) -> str:
        return f"{self.origin} is {self.value!r}"

    @property
    def text(self) -> str:
        return str(int(self.value)) if isinstance(self.value, bool) else str(self.value)


#: The variables that each connected run has set: those that were not set before.
_set: weakref.WeakKeyDictionary[RunContext, list[str]] = weakref.WeakKeyDictionary()
#: The options that variables in force come from.
_origins: dict[str, str] = {}
#: What the environment said when a library first read it in this process; see [Note: read once].
_first: dict[str, dict[str, str | None]] = {}


@contextlib.contextmanager
def in_force(strategy: Strategy, run: RunContext, backend: str) -> Iterator[None]:
    """Set what the options `nccl` and `gloo` of `strategy` ask for; ranks connect within, over `backend`.

    The variables stay until `take_back`; if connecting fails, not even so long.

    Raises:
        ConfigError: a value that could have no effect, or that contradicts the environment.
    """
    backend = with_gloo(backend, run.device)
    wishes = _wishes(strategy, run)
    for wish in wishes:
        _check_effect(wish, backend)
    new = {wish.variable: wish for wish in wishes if wish.variable not in os.environ}
    _set[run] = list(new)
    for name, wish in new.items():
        os.environ[name], _origins[name] = wish.text, wish.origin
    try:
        yield
    except BaseException:
        take_back(run)
        raise
    _remember(backend)


def take_back(run: RunContext) -> None:
    """Unset the variables that `run` set. Safe to call twice."""
    for name in _set.pop(run, []):
        os.environ.pop(name, None)
        _origins.pop(name, None)


def _wishes(strategy: Strategy, run: RunContext) -> list[_Wish]:
    name = run.name_of(strategy)
    return [
        _Wish(path=f"strategy.{name}.{library.name}", option=option, value=value, library=library)
        for library in LIBRARIES
        for option, value in (getattr(strategy, library.name) or {}).items()
    ]


def _check_effect(wish: _Wish, backend: str) -> None:
    """Refuse a value that nobody would read, or that another one contradicts."""
    # gloo's have an effect beside other backends, too: objects and decisions travel over it.
    if wish.library is NCCL and NCCL.name not in backend:
        raise ConfigError(
            f"{wish.path} is set and the process group's backend is {backend!r}", expected="NCCL",
            do="drop it, or train on CUDA devices",
        )  # fmt: skip
    if (releases := wish.library.too_old_for(wish.option)) is not None:
        raise ConfigError(
            f"{wish} and {wish.library.title} is of release {releases[0]}, which does not read it",
            expected=f"{releases[1]} or later", do="drop it, or install a torch that comes with a later release",
        )  # fmt: skip
    _check_environment(wish)
    _check_first_reading(wish)
    if wish.option == "socket_ifname":
        _check_interfaces(wish)


def _check_environment(wish: _Wish) -> None:
    import torch.distributed as dist

    name, found = wish.variable, os.environ.get(wish.variable)
    if found is None and dist.is_available() and dist.is_initialized():
        raise ConfigError(
            f"{wish} and this process already belongs to a process group", expected="none yet",
            do="close the earlier run first (trainer.close())",
        )  # fmt: skip
    if found is not None and found != wish.text:
        where = f"by {_origins[name]} of a run that is still open" if name in _origins else "in the environment"
        raise ConfigError(
            f"{wish} and {name} was set to {found!r} {where}", expected="one value", do="drop one of the two"
        )


def _check_first_reading(wish: _Wish) -> None:
    first = _first.get(wish.library.name)
    if first is None or wish.option in wish.library.reread or first.get(wish.variable) == wish.text:
        return
    read = first.get(wish.variable)
    then = "there was none" if read is None else f"it was {read!r}"
    raise ConfigError(
        f"{wish} and {then} when this process first connected, which "
        f"{wish.library.title} goes by",
        expected="the same value", do="give it from the first run on, or start a new process",
    )  # fmt: skip


def _check_interfaces(wish: _Wish) -> None:
    """Refuse names of network interfaces that this machine does not have: the library would give up, or wait."""
    here = [name for _, name in socket.if_nameindex()]
    excludes = wish.library is NCCL and wish.text.startswith("^")
    wanted = [name.strip() for name in wish.text.removeprefix("=").split(",")]
    fits = str.startswith if wish.library is NCCL and not wish.text.startswith("=") else str.__eq__
    missing = [name for name in wanted if not any(fits(each, name) for each in here)]
    # NCCL's are patterns, of which one has to fit; gloo's are names.
    if not excludes and missing and (wish.library is GLOO or len(missing) == len(wanted)):
        raise ConfigError(
            f"{wish} and {socket.gethostname()} has the network interfaces {', '.join(here)}",
            expected="one of those",
        )


def _remember(backend: str) -> None:
    """Note what the libraries of `backend` have read, if they had not read it before."""
    for library in LIBRARIES:
        if library.name in backend and library.name not in _first:
            variables = map(library.variable, library.rules)
            asked = (name for name in _origins if name.startswith(library.prefix))
            _first[library.name] = {name: os.environ.get(name) for name in (*variables, *asked)}


# --- For people who set variables themselves ---------------------------------------------------------------------


def remarks(variables: Iterable[str]) -> dict[str, Remark]:
    """Return what is odd about those of `variables` that look like a communication library's."""
    found = {name: _remark(name) for name in sorted(variables)}
    return {name: remark for name, remark in found.items() if remark is not None}


def _remark(name: str) -> Remark | None:
    for prefix, known in (("TORCH_NCCL_", _TORCHS), ("TORCH_GLOO_", ("LAZY_INIT",))):
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return None if rest in known else _stranger("torch", prefix, nearest(rest, known))
    for library in LIBRARIES:
        if name.startswith(library.prefix):
            option = name.removeprefix(library.prefix).lower()
            if (releases := library.too_old_for(option)) is not None:
                text = f"{library.title} {releases[0]} does not read it; {releases[1]} is the first that does"
                return Remark(text=text, is_mistake=True)
            if library.reads(option) or option.upper() in _TORCHS_OLD_NAMES:
                return None
            is_a_guests = library is NCCL and option.startswith(_GUESTS)
            return _stranger(library.title, library.prefix, "" if is_a_guests else _advice(library, option))
    return None


def _stranger(reader: str, prefix: str, advice: str) -> Remark:
    """Return a remark about a name that `reader` does not read."""
    advice = re.sub(r"did you mean '(\w+)'", lambda match: f"did you mean {prefix}{match[1].upper()}", advice)
    if advice:
        return Remark(text=f"{reader} does not read it; {advice}", is_mistake=True)
    return Remark(text=f"{reader} does not read it; a network plugin may", is_mistake=False)


# --- The tables --------------------------------------------------------------------------------------------------


def _choice(*words: Any) -> Rule:
    return Rule(" or ".join(map(repr, words)), lambda value: type(value) in (str, int) and value in words)


def _number(low: int, high: int) -> Rule:
    return Rule(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(_words(names), rule)


_WHOLE = Rule("a whole number", lambda value: type(value) is int)
_TEXT = Rule("text", lambda value: isinstance(value, str) and value.strip() != "")
_SWITCH = Rule("true or false", lambda value: isinstance(value, bool) or (type(value) is int and value in (0, 1)))
_ANYTHING = Rule("text, a number, or true or false", lambda value: isinstance(value, bool | int) or _TEXT.holds(value))
_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")

#: Sockets that NCCL opens at most for one connection.
_MAX_SOCKETS: Final = 64

_NCCL_RULES: Final = {
    **_each(
        "alloc_p2p_net_ll_buffers check_pointers collnet_enable comm_blocking cumem_enable cumem_host_enable "
        "dmabuf_enable graph_mixing_support graph_register ib_adaptive_routing ib_data_direct ib_disable ib_ece_enable "
        "ib_merge_nics ib_return_async_events ib_split_data_on_qps ib_warn_rail_local ignore_cpu_affinity "
        "ignore_disabled_p2p launch_race_fatal legacy_cuda_register local_register net_disable_intra net_force_flush "
        "net_gdr_c2c net_gdr_read net_shared_buffers net_shared_comms nvb_disable nvtx_disable oob_net_enable "
        "p2p_direct_disable p2p_disable p2p_use_cuda_memcpy pxn_c2c pxn_disable ras_enable runtime_connect "
        "set_stack_size set_thread_name shm_disable single_proc_mem_reg_enable win_enable",
        _SWITCH,
    ),
    **_each(
        "algo conf_file debug_file debug_subsys debug_timestamp_format debug_timestamp_levels env_plugin graph_file "
        "hostid ib_addr_range ib_hca mnnvl_uuid net net_plugin netdevs_policy oob_net_ifname profiler_plugin proto "
        "ras_addr socket_ifname topo_dump_file topo_file tuner_plugin",
        _TEXT,
    ),
    **_each(
        "buffsize collnet_node_threshold ib_ar_threshold ib_fifo_tc ib_gid_index ib_pkey "
        "ib_prepost_receive_work_requests ll128_buffsize ll_buffsize max_ctas max_nchannels max_p2p_nchannels "
        "min_ctas min_nchannels min_p2p_nchannels mnnvl_clique_id nchannels_per_net_peer nvls_chunksize "
        "nvls_nchannels p2p_ll_threshold p2p_net_chunksize p2p_nvl_chunksize p2p_pci_chunksize ras_timeout_factor "
        "socket_poll_timeout_msec socket_rcvbuf socket_retry_cnt socket_retry_sleep_msec socket_sndbuf "
        "uid_stagger_rate uid_stagger_threshold work_args_bytes work_fifo_bytes",
        _WHOLE,
    ),
    **_each("cross_nic cta_policy ib_pci_relaxed_ordering mnnvl_enable nvls_enable p2p_pxn_level", _number(0, 2)),
    **_each("nsocks_perthread socket_nthreads", _number(1, 16)),
    "cga_cluster_size": _number(0, 8),
    "debug": _choice("VERSION", "WARN", "INFO", "TRACE"),
    "ib_addr_family": _choice("AF_INET", "AF_INET6"),
    "ib_qps_per_connection": _number(1, 128),
    "ib_retry_cnt": _number(0, 7),
    "ib_roce_version_num": _number(1, 2),
    "ib_sl": _number(0, 15),
    "ib_tc": _number(0, 255),
    "ib_timeout": _number(1, 31),
    "launch_mode": _choice("PARALLEL", "GROUP"),
    "launch_order_implicit": _number(0, 1),
    "mem_sync_domain": _number(0, 3),
    "net_gdr_level": _choice(*_LEVELS),
    "nthreads": _choice(64, 128, 256, 512),
    "p2p_level": _choice("LOC", "NVL", *_LEVELS[1:]),
    "socket_family": _choice("AF_INET", "AF_INET6"),
}

#: What torch itself reads under these names, beside the library.
_TORCHS: Final = _words(
    "ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BCAST_UNIQUEID BLOCKING_WAIT COORD_CHECK_MILSEC CUDA_EVENT_CACHE "
    "DEBUG_INFO_PIPE_FILE DEBUG_INFO_TEMP_FILE DESYNC_DEBUG DUMP_ON_TIMEOUT ENABLE_MONITORING ENABLE_TIMING "
    "EXTRA_DUMP_ON_EXEC HEARTBEAT_TIMEOUT_SEC HIGH_PRIORITY LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NAN_CHECK "
    "PROPAGATE_ERROR RANKS_PER_ROOT RETHROW_CUDA_ERRORS SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING TRACE_BUFFER_SIZE "
    "TRACE_CPP_STACK USE_COMM_NONBLOCKING NONBLOCKING_TIMEOUT USE_TENSOR_REGISTER_ALLOCATOR_HOOK "
    "WAIT_TIMEOUT_DUMP_MILSEC"
)
_TORCHS_OLD_NAMES: Final = (
    "ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING", "USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)  # fmt: skip

#: How variables of NCCL's plugins, and of its relatives, begin after the prefix.
_GUESTS: Final = ("fastrak_", "gpudirecttcpx_", "ibext_", "mscclpp_", "msccl_", "ofi_", "shimnet_", "tuner_")

_TIMEOUT: Final = "how long ranks wait for each other is the strategy's option `timeout`"

#: Found in the libraries of these releases, and not in those before; all read what 2.27 reads.
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
    for option in _words(options)
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
        "timeout": _TIMEOUT,
        "comm_timeout": _TIMEOUT,
        "checks_disable": "it was dropped; there is check_pointers",
        "ib_cuda_support": "it was dropped for net_gdr_level",
        "ib_gdr_level": "it was dropped for net_gdr_level",
        "ll_threshold": "it was dropped for algo and proto",
        "single_ring_threshold": "it was dropped for algo and proto",
        "tree_threshold": "it was dropped for algo and proto",
        **{
            name.lower(): f"it is torch's: set TORCH_NCCL_{name} in the environment"
            for name in (
                *_TORCHS_OLD_NAMES,
                "HEARTBEAT_TIMEOUT_SEC",
                "TRACE_BUFFER_SIZE",
                "DUMP_ON_TIMEOUT",
                "NAN_CHECK",
            )
        },
    },
    # As found in the library of release 2.32.
    undocumented=re.compile(
        "(?:ce|cft|diagnostics|gdrcopy|gin|hier|ib_event|ib_mqp|ib_resiliency|ib_vr|ib_wqe|mnnvl|net_merge|nvls|p2p|"
        "progress|proxy|rma|shadow|sym)_[a-z0-9_]+|"
        "allgatherv_enable|bootstrap|check_mode|chunk_size|comm_id|comm_(?:shrink|split)_share_resources|"
        "connect_round_max_peers|dev_api_jit|disable_mem_manager|elastic_buffer_register|enable_version_check|"
        "enqueue_rearch_enable|gdr_flush_disable|graph_dump_file|graph_dump_file_rank|graph_helper_disable|"
        "graph_stream_ordering|group_cuda_stream|ibverbs_lib|ib_device_pci_order|ib_merge_vfs|ib_mlx_vendor_id|"
        "ib_ooo_rq|ib_pkey_value|ib_query_port_speed|ib_rail_policy|ib_receiver_side_matching_scheme|"
        "ib_routable_flid_gid_index|ib_sort_merge_nics|ib_subnet_aware_routing|ib_subnet_prefix_len|ib_use_inline|"
        "ignore_collnet_mismatch|ignore_net_mismatch|ipc_use_abstract_socket|l1_shared_memory_carveout|ll128_c2c|"
        "ll128_nthreads|lsa_team_size|max_nrings|min_nrings|multi_rank_gpu_enable|multi_segment_register|net_force_merge|"
        "net_optional_recv_completion|net_overhead|no_cache|num_rma_(?:int_)?ctx|nvlink_util_centric_sched_enable|"
        "nvb_preconnect|nvlstree_max_chunksize|param_dump_all|pat_ndims|report_connect_progress|"
        "run_(?:ras_)?diagnostics|set_cpu_stack_size|shm_locality|socket_inline|socket_min_tasksize|thread_thresholds|"
        "topo_dump_file_rank|topo_split_mlopart|unpack_double_nchannels|warn_enable_debug_info|win_stride"
    ),
)

GLOO: Final = Library(
    name="gloo",
    title="gloo",
    prefix="GLOO_",
    rules={
        "device_transport": _choice("TCP", "TCP_TLS", "IBVERBS", "UV"),
        "lazy_init": _SWITCH,
        "log_level": _choice("DEBUG", "INFO", "WARN", "ERROR"),
        "socket_ifname": _TEXT,
    },
    named={"lazy_init": "TORCH_GLOO_LAZY_INIT"},
    reread=frozenset({"socket_ifname"}),
    instead={"timeout": _TIMEOUT},
    undocumented=re.compile(
        "device_transport_tcp_tls_[a-z_]+|disable_connection_retries|enable_rank_as_sequence_number|enable_store_v2_api"
    ),
)

LIBRARIES: Final = (NCCL, GLOO)
