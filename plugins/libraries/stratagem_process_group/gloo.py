"""The variables that gloo reads."""

from __future__ import annotations

from typing import Final

from stratagem_process_group.rules import SWITCH, TEXT, TIMEOUT_HINT, Library, one_of, same_rule

GLOO: Final = Library(
    name="gloo",
    title="gloo",
    prefix="GLOO_",
    rules=same_rule(
        "device_transport_tcp_tls_ca_file device_transport_tcp_tls_ca_path device_transport_tcp_tls_cert "
        "device_transport_tcp_tls_pkey socket_ifname",
        TEXT,
    )
    | {
        "device_transport": one_of("TCP", "TCP_TLS", "IBVERBS", "UV"),
        "lazy_init": SWITCH,
        "log_level": one_of("DEBUG", "INFO", "WARN", "ERROR"),
    },
    named={"lazy_init": "TORCH_GLOO_LAZY_INIT"},
    reread=frozenset({"socket_ifname"}),
    instead={"timeout": TIMEOUT_HINT},
)
