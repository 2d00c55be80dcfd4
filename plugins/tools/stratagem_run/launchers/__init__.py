"""Launchers: programs that start the processes of a run now, one class for each."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.errors import ConfigError, nearest
from stratagem_run.launchers.base import Launcher
from stratagem_run.launchers.local import Local
from stratagem_run.launchers.mpirun import Mpirun
from stratagem_run.launchers.srun import Srun
from stratagem_run.launchers.torchrun import Torchrun
from stratagem_run.options import flag, refused

#: Under "auto" the first one that suits and has all given options is chosen.
LAUNCHERS: dict[str, type[Launcher]] = {"srun": Srun, "torchrun": Torchrun, "local": Local, "mpirun": Mpirun}


def choose(name: str, given: Mapping[str, object], variables: Mapping[str, str]) -> tuple[type[Launcher], str]:
    """Return the launcher, and why it was chosen.

    Args:
        name: as the user wrote it; "auto" chooses.
        given: the options of the command line, as text.
        variables: the environment of this process.

    Raises:
        ConfigError: there is no such launcher, or "auto" finds none that has all given options.
    """
    if name != "auto":
        if name not in LAUNCHERS:
            known = ("auto", *LAUNCHERS)
            raise ConfigError(f"--launcher is {name!r}", expected=", ".join(known), do=nearest(name, known))
        return LAUNCHERS[name], "--launcher"
    able = [cls for cls in LAUNCHERS.values() if not refused(given, cls)]
    for cls in able:
        if reason := cls.suits(given.get("nodes"), variables):
            return cls, reason
    if able:
        own = next((flag(each) for each in given if refused([each], Local)), "its options")
        return able[0], f"{own} is set"
    nobodys = [flag(name) for name in given if all(refused([name], cls) for cls in LAUNCHERS.values())]
    raise ConfigError(
        f"{', '.join(nobodys or map(flag, given))} {'is' if len(nobodys or given) == 1 else 'are'} set",
        expected="options of one launcher", do="add --submit" if nobodys else "choose one with --launcher",
    )  # fmt: skip
