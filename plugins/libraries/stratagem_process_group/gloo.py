"""The variables that gloo reads."""

from __future__ import annotations

import re
from typing import Final

from stratagem_process_group.rules import SWITCH, TEXT, TIMEOUT_HINT, Library, one_of

GLOO: Final = Library(
    name="gloo",
    title="gloo",
    prefix="GLOO_",
    rules={
        "device_transport": one_of("TCP", "TCP_TLS", "IBVERBS", "UV"),
        "lazy_init": SWITCH,
        "log_level": one_of("DEBUG", "INFO", "WARN", "ERROR"),
        "socket_ifname": TEXT,
    },
    named={"lazy_init": "TORCH_GLOO_LAZY_INIT"},
    reread=frozenset({"socket_ifname"}),
    instead={"timeout": TIMEOUT_HINT},
    undocumented=re.compile(
        "device_transport_tcp_tls_[a-z_]+|disable_connection_retries|enable_rank_as_sequence_number|enable_store_v2_api"
    ),
)
