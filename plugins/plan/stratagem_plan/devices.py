"""The catalogue of devices: one TOML file each in ``devices/``, with units in the names of keys.

A figure that was not read in any source is absent, and what needs it raises a ConfigError: nothing is guessed.
"""

from __future__ import annotations

import os
import tomllib
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import cattrs
from attrs import Factory, frozen
from cattrs.v import format_exception

from stratagem.errors import ConfigError, nearest

#: A folder of files that add devices, or replace keys of one: ``h100-sxm-80gb.toml``.
FOLDER_VARIABLE = "STRATAGEM_PLAN_DEVICES"
#: Devices without measurements use those of this one.
MEASURED = "h200-sxm-141gb"


@frozen(kw_only=True)
class Rates:
    """A rate that was measured at sizes in ascending order; between them it is interpolated in logarithms."""

    size: list[float]
    per_s: list[float]


@frozen(kw_only=True)
class Link:
    """The way from one device to others, as the device's data sheet has it."""

    bytes_per_s_per_direction: float
    #: Of one hop of a ring; None if no source tells.
    latency_s: float | None = None
    #: What was measured, by collective: bytes/s of a call over its bytes, with `latency_s` for a call at least.
    measured: dict[str, Rates] = Factory(dict)


@frozen(kw_only=True)
class Curve:
    """What was measured on the device itself."""

    source: str
    measured_on: date
    torch: str
    #: By key of `Device.flops`: FLOP/s over the harmonic mean of a multiplication's three sizes.
    matmul: dict[str, Rates]
    #: FLOP/s over the FLOPs of one call, by phase.
    attention: dict[str, Rates]
    #: Bytes/s over the bytes that an elementwise operation reads and writes.
    vector: Rates
    #: The shortest time between two kernels.
    kernel_s: float
    #: Time of the host for one operation, in phases without and with autograd's backward; 0 if the host computes.
    host_forward_s: float
    host_backward_s: float


@frozen(kw_only=True)
class Device:
    """One device; FLOP/s are without sparsity, bytes and bytes/s are powers of ten."""

    name: str
    source: str
    read_on: date
    #: Whether the figures were read on the vendor's own page.
    vendor: bool
    memory_bytes: float | None = None
    memory_bytes_per_s: float | None = None
    #: FLOP/s by number format: ``bf16_dense``, ``fp16_dense``, ``fp8_dense``, ``tf32_dense``, ``fp32_dense``.
    flops: dict[str, float] = Factory(dict)
    #: Devices of one node.
    intra: Link | None = None
    #: Devices of other nodes; the share of one device.
    inter: Link | None = None
    curve: Curve | None = None
    #: What a reader of other sources may stumble over.
    warning: str = ""

    def need(self, figure: str) -> Any:
        """Return the figure with this name, such as ``memory_bytes_per_s`` or ``flops.bf16_dense``.

        Raises:
            ConfigError: it is absent.
        """
        part, _, key = figure.partition(".")
        value = getattr(self, part)
        value = value.get(key) if key else value
        if value is None:
            raise ConfigError(
                f"device '{self.name}' has no {figure}: no source was found for it",
                do=f"pass --device-file FILE.toml with {figure} of your device",
            )
        return value


_CONVERTER = cattrs.Converter(forbid_extra_keys=True)
_CONVERTER.register_structure_hook(
    date, lambda value, _: value if isinstance(value, date) else date.fromisoformat(value)
)


def find(name: str, file: Path | None = None) -> Device:
    """Return the device with this name; keys of `file` replace those of the catalogue's, or add the device.

    Raises:
        ConfigError: no file has this name, or its file has a wrong key or value.
    """
    tables = catalogue()
    if file is not None:
        tables = tables | {name: {**tables.get(name, {}), **_read(file)}}
    if name not in tables:
        raise ConfigError(f"device '{name}' is unknown", expected=", ".join(sorted(tables)), do=nearest(name, tables))
    try:
        return _CONVERTER.structure({"name": name, **tables[name]}, Device)
    except cattrs.BaseValidationError as error:
        raise ConfigError(f"the file of device '{name}' has a wrong value: {reasons(error)}") from None


def check_counts(prefix: str, **counts: int) -> None:
    """Refuse a cluster of no devices; `prefix` begins names of options."""
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{prefix}{name} is {count}", expected="at least 1")


def reasons(error: cattrs.BaseValidationError) -> str:
    """Return what is wrong with a tree, and where: up to three places."""

    def text(each: BaseException, kind: type | None) -> str:
        return str(each) if type(each) is ValueError else format_exception(each, kind)

    return "; ".join(cattrs.transform_error(error, format_exception=text)[:3])


def catalogue() -> dict[str, dict[str, Any]]:
    """Return the tables of all devices by name: those of this package, then those of the user's folder."""
    folder = os.environ.get(FOLDER_VARIABLE)
    tables = dict(_tables(Path(__file__).with_suffix("")))
    for name, table in _tables(Path(folder)).items() if folder else ():
        tables[name] = {**tables.get(name, {}), **table}
    return tables


@cache
def _tables(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: _read(path) for path in sorted(folder.glob("*.toml"))}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"device file '{path}' cannot be read: {error}") from None
