"""Who this process is, where no scheduler says so: from the variables of a launch, or from torchrun's."""

from __future__ import annotations

import os
from collections.abc import Mapping

from attrs import define

from stratagem import Environment, World, hookimpl
from stratagem.errors import ConfigError
from stratagem.launch import STORE_HOSTED_VARIABLE


@define(eq=False, kw_only=True)
class LocalEnvironment(Environment):
    """This machine, or machines that were each told MASTER_ADDR, MASTER_PORT and NODE_RANK.

    LOCAL_RANK present means that somebody started all processes of this node; otherwise a launcher does.
    """

    precedence = 0

    def detect(self):
        return "nothing else was found"

    def processes_exist(self):
        return "LOCAL_RANK" in os.environ

    @hookimpl
    def setup_environment(self, run):
        return local_world(os.environ, run.num_processes, run.settings.num_nodes)


def local_world(variables: Mapping[str, str], local_size: int, num_nodes: int) -> World:
    """Read `variables`; the sizes are what the run asks for."""
    local_rank = _number(variables, "LOCAL_RANK", 0)
    node_rank = _number(variables, "NODE_RANK", _number(variables, "GROUP_RANK", 0))
    world_size = local_size * num_nodes
    if num_nodes > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in variables]
        if "GROUP_RANK" in variables and "NODE_RANK" in missing:
            missing.remove("NODE_RANK")
        if missing:
            raise ConfigError(
                f"num_nodes is {num_nodes} and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
                expected="the address and port of node 0, and this node's number, on every node",
                do="export them, or start the nodes with torchrun",
            )
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(f"NODE_RANK is {node_rank} and num_nodes is {num_nodes}", expected=f"0 to {num_nodes - 1}")
    if local_rank >= local_size:
        raise ConfigError(
            f"LOCAL_RANK is {local_rank} and the run has {local_size} processes on this node",
            expected=f"0 to {local_size - 1}",
            do="give every Trainer of a script the devices it was launched with",
        )
    if "LOCAL_RANK" in variables and "MASTER_PORT" not in variables and world_size > 1:
        raise ConfigError(
            f"LOCAL_RANK is set, as if all {world_size} processes existed, and MASTER_PORT is not",
            expected="both, or neither",
            do="unset LOCAL_RANK to have the processes started for you, or tell all of them where to meet",
        )
    told = _number(variables, "WORLD_SIZE", world_size)
    if told != world_size:
        raise ConfigError(
            f"WORLD_SIZE is {told} and devices x num_nodes is {local_size} x {num_nodes}",
            expected="the same number",
            do="unset WORLD_SIZE, or change devices or num_nodes",
        )
    return World(
        rank=node_rank * local_size + local_rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=local_size,
        num_nodes=num_nodes,
        main_address=variables.get("MASTER_ADDR", "127.0.0.1"),
        main_port=_number(variables, "MASTER_PORT", None),
        store_hosted=variables.get(STORE_HOSTED_VARIABLE) == "1",
    )


@define(eq=False, kw_only=True)
class TorchElasticEnvironment(Environment):
    """Started by torchrun, which says who everybody is and starts them again after a failure.

    A scheduler's variables are often present too, since torchrun was started by it: torchrun decides.
    """

    precedence = 100

    def detect(self):
        return "TORCHELASTIC_RUN_ID is set" if "TORCHELASTIC_RUN_ID" in os.environ else None

    def local_processes(self):
        return _number(os.environ, "LOCAL_WORLD_SIZE", None)

    @hookimpl
    def setup_environment(self, run):
        asked = run.num_processes * run.settings.num_nodes if run.devices_given else None
        world = elastic_world(os.environ, asked)
        # 1 is what num_nodes is when nobody says anything.
        if run.settings.num_nodes not in (1, world.num_nodes):
            raise ConfigError(
                f"num_nodes is {run.settings.num_nodes} and torchrun has {world.num_nodes}",
                expected="the same number",
                do="leave num_nodes out: torchrun decides",
            )
        return world


def elastic_world(variables: Mapping[str, str], asked: int | None) -> World:
    """Read torchrun's `variables`; `asked` is devices x num_nodes if the user said so.

    Processes that were started again must not read the addresses of dead ones from the agent's store. With one agent
    the restart count tells attempts apart; with several it may differ between agents, and the way out is
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives every round a port, and rank 0 the store.
    """
    missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in variables]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set", expected="all variables of torchrun", do="start with torchrun"
        )
    world_size = _number(variables, "WORLD_SIZE", 1)
    if asked is not None and asked != world_size:
        raise ConfigError(
            f"devices x num_nodes is {asked} and torchrun started {world_size} processes",
            expected="the same number",
            do='leave devices at "auto": torchrun decides',
        )
    local_size = _number(variables, "LOCAL_WORLD_SIZE", 1)
    one_agent = local_size == world_size
    return World(
        rank=_number(variables, "RANK", 0),
        local_rank=_number(variables, "LOCAL_RANK", 0),
        node_rank=_number(variables, "GROUP_RANK", 0),
        world_size=world_size,
        local_world_size=local_size,
        # Nodes may have different numbers of processes, so a division is the second-best answer.
        num_nodes=_number(variables, "GROUP_WORLD_SIZE", max(1, world_size // local_size)),
        main_address=variables["MASTER_ADDR"],
        main_port=_number(variables, "MASTER_PORT", 29500),
        store_hosted=variables.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
        generation=variables.get("TORCHELASTIC_RESTART_COUNT", "0") if one_agent else "0",
    )


def _number(variables: Mapping[str, str], name: str, default: int | None) -> int | None:
    text = variables.get(name)
    if text is None:
        return default
    if not text.strip().isdecimal():
        raise ConfigError(f"{name} is {text!r}", expected="a whole number")
    return int(text)
