"""The variables that gloo reads."""

from __future__ import annotations

from typing import Final

from stratagem_process_group.rules import SWITCH, TEXT, TIMEOUT_HINT, Library, one_of, words

GLOO: Final = Library(
    name="gloo",
    title="gloo",
    prefix="GLOO_",
    rules={
        "device_transport": one_of("TCP", "TCP_TLS", "IBVERBS", "UV"),
        **{f"device_transport_tcp_tls_{each}": TEXT for each in words("ca_file ca_path cert pkey")},
        "lazy_init": SWITCH,
        "log_level": one_of("DEBUG", "INFO", "WARN", "ERROR"),
        "socket_ifname": TEXT,
    },
    named={"lazy_init": "TORCH_GLOO_LAZY_INIT"},
    reread=frozenset({"socket_ifname"}),
    instead={"timeout": TIMEOUT_HINT},
)
