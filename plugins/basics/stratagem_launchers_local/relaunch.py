"""The command that runs the user's program again."""

from __future__ import annotations

import os
import re
import sys

from stratagem.errors import ConfigError


def relaunch_command() -> list[str]:
    """Return the command that runs the user's program again, whatever the current directory is now.

    Raises:
        ConfigError: there is no program to run again (a notebook, ``python -c``, a prompt).
    """
    main = sys.modules["__main__"]
    # The arguments of the interpreter: the program may have changed sys.argv.
    flags, program = _split_command(sys.orig_argv[1:])
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name != "__main__":
        name = spec.name.removesuffix(".__main__")
        arguments = program[2:] if program[:2] == ["-m", name] else sys.argv[1:]
        return [sys.executable, *flags, "-m", name, *arguments]
    if file is not None and spec is not None:  # a directory or an archive with a __main__.py
        file = os.path.dirname(file)
    if file is None or not os.path.exists(file):
        raise ConfigError(
            "this program has no file to run again in another process",
            expected="a script, or a module run with -m",
            do='pass launcher="fork", which copies this process and works with every strategy, or write a script',
        )
    # Under a debugger or a profiler (python -m pdb train.py) the program is that tool: run the script without it.
    same = bool(program) and os.path.basename(program[0].rstrip("/")) == os.path.basename(file)
    return [sys.executable, *flags, os.path.abspath(file), *(program[1:] if same else sys.argv[1:])]


def _split_command(words: list[str]) -> tuple[list[str], list[str]]:
    """Split what follows ``python`` into its flags and the program (a path, or ``-m`` and a name) with arguments."""
    at = 0
    while at < len(words) and re.match("-.", words[at]):
        valued = re.match(r"-(?!-)([^cmWX]*)([cmWX])(.*)", words[at])
        if valued and valued[2] in "cm":
            others = [f"-{valued[1]}"] if valued[1] else []
            name = [valued[3]] if valued[3] else []
            return words[:at] + others, [f"-{valued[2]}", *name, *words[at + 1 :]]
        at += 2 if words[at] == "--check-hash-based-pycs" or (valued and not valued[3]) else 1
    return words[:at], words[at:]
