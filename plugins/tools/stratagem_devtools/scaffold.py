"""Create a plugin: write a folder with a small working package, for its author to change.

The files of `templates` are filled in with `string.Template`; `<kind>.py.txt` is the plugin, `other.py.txt` that of a
kind which another package adds.
"""

from __future__ import annotations

import keyword
import os
import re
import tempfile
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from string import Template

from stratagem.discovery import registry
from stratagem.errors import ConfigError, nearest

#: Valid names of plugins; a name is also part of the module name and, with hyphens, of the distribution name.
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def write(kind: str, name: str, into: Path) -> Path:
    """Write the package of a new plugin into a new folder below `into`, atomically; return that folder.

    Raises:
        ConfigError: the kind or the name is invalid, the name is taken, or the folder cannot be created.
    """
    content = render(kind, name)
    distribution = _distribution(name)
    _check_free(kind, name, distribution)
    folder = into / distribution
    _check_folder(into, folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".staged-", dir=into) as temporary:
            staging = Path(temporary, distribution)
            for path, text in content.items():
                (staging / path).parent.mkdir(parents=True, exist_ok=True)
                (staging / path).write_text(text, encoding="utf-8")
            staging.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} could not be written ({error.strerror or error})",
            expected="a writable folder with enough free space",
            do="choose another one with --into",
        ) from error
    return folder


def render(kind: str, name: str) -> dict[str, str]:
    """Return the files of the package of a new plugin: text by path.

    Raises:
        ConfigError: the kind or the name is invalid.
    """
    _check_kind(kind)
    _check_name(kind, name)
    plugin = _template(_source(kind))
    module = f"stratagem_{name}"
    values = {"kind": kind, "name": name, "VARIABLE": name.upper(), "module": module, **_about(kind, name, module)}
    values |= {
        "distribution": _distribution(name),
        "imported": "".join(f', "{each}"' for each in _requirements(plugin.template, kind)),
        "summary": Template(plugin.template.partition("\n")[0].strip('"')).substitute(values),
    }
    templates = {
        ".github/workflows/test.yml": _template("workflow.yml"),
        ".gitignore": _template("gitignore"),
        "README.md": _template("README.md"),
        "pyproject.toml": _template("pyproject.toml"),
        f"{module}/__init__.py": plugin,
        f"test_{name}.py": _template("command_test.py" if kind == "command" else "test.py"),
    }
    if kind != "command":
        own = "environment_conformance.py" if kind == "environment" else "conformance.py"
        templates[f"{module}/conformance.py"] = _template(own)
    return {path: template.substitute(values) for path, template in templates.items()}


def _source(kind: str) -> str:
    """Return the template of a plugin of `kind`: that of a kind which another package adds has no methods."""
    own = f"{kind}.py"
    return own if files(__package__).joinpath("templates", f"{own}.txt").is_file() else "other.py"


def _about(kind: str, name: str, module: str) -> dict[str, str]:
    """Return what differs between a command, which is started, and plugins of a run, which the kit checks."""
    if kind == "command":
        return {
            "words": "command", "Class": f"{_camel(name)}Command", "language": "shell", "use": f"stratagem {name}",
            "tests": "its tests", "test_requirement": '"pytest>=8", "stratagem-tools>=0.1,<0.2"',
            "conformance_row": "", "conformance_entry": "",
        }  # fmt: skip
    base = registry.kinds()[kind].base
    kit, _, conformance = registry.kinds()[kind].conformance.partition(":")
    words, camel = _words(base.__name__), _camel(name)
    suffix = "" if camel.endswith(base.__name__) and camel != base.__name__ else base.__name__
    checks = module + "/conformance.py` | what the conformance kit checks"
    return {
        "words": words,
        "Class": camel + suffix,
        "Base": base.__name__,
        "base_module": base.__module__,
        "kit": kit,
        "Conformance": conformance,
        "language": "python",
        "use": f'trainer = stratagem.Trainer({registry.argument_of(kind)}="{name}")',
        "tests": f"the checks for every {words}, as tests",
        "test_requirement": '"stratagem-testing>=0.1,<0.2"',
        "conformance_row": f"| `{checks}: change its attributes where your plugin needs others |\n",
        "conformance_entry": '\n[project.entry-points."stratagem_testing.conformance"]\n'
        f'"{kind}.{name}" = "{module}.conformance:{camel}{suffix}Conformance"\n',
    }


def _requirements(source: str, kind: str) -> list[str]:
    """Return what `source` imports beside the core, as a pyproject.toml requires it."""
    known = {
        "attrs": "attrs>=24.1", "torch": "torch", "stratagem_launchers_local": "stratagem-basics>=0.1,<0.2",
        "stratagem_trainer": "stratagem-trainer>=0.1,<0.2", "stratagem_buckets": "stratagem-libraries>=0.1,<0.2",
    }  # fmt: skip
    found = [known[module] for module in known if re.search(rf"(import|from) {module}\b", source)]
    if "$base_module" in source:
        found += [each.dist.name for each in entry_points(group="stratagem.kind", name=kind) if each.dist is not None]
    return found


# --- Names -------------------------------------------------------------------------------------------------------


def _distribution(name: str) -> str:
    return f"stratagem-{name.replace('_', '-')}"


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def _template(name: str) -> Template:
    return Template(files(__package__).joinpath("templates", f"{name}.txt").read_text(encoding="utf-8"))


# --- Checks ------------------------------------------------------------------------------------------------------


def _check_kind(kind: str) -> None:
    known = [*registry.kinds(), "command"]
    if kind not in known:
        raise ConfigError(f"kind {kind!r} is unknown", expected=", ".join(known), do=nearest(kind, known))


def _check_name(kind: str, name: str) -> None:
    if _is_name(name):
        return
    fixed = _fixed(name, kind)
    raise ConfigError(
        f"the name {name!r} is not valid for a new {kind}",
        expected="lower-case letters, digits and single underscores, a letter first, and not a keyword of Python",
        do=f"write {fixed!r}" if _is_name(fixed) else "choose another name",
    )


def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and not keyword.iskeyword(name)


def _fixed(name: str, kind: str) -> str:
    """Return the valid name closest to `name`, if there is one."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    plain = re.sub(r"[^a-z0-9]+", "_", snake.lower()).strip("_").lstrip("0123456789_")
    return f"{plain}_{kind}" if keyword.iskeyword(plain) else plain


def _check_free(kind: str, name: str, distribution: str) -> None:
    """Refuse a name that an installed plugin or package already has."""
    for entry in registry.entries():
        if (entry.kind, entry.name.lower()) == (kind, name):
            raise ConfigError(
                f"{kind} {name!r} is installed already, by {entry.distribution}",
                expected="a name that no installed plugin has",
                do="choose another name, or uninstall that package",
            )
        if re.sub(r"[-_.]+", "-", entry.distribution).lower() == distribution:
            raise ConfigError(
                f"a package {distribution} is installed already, with {entry.kind} {entry.name!r}",
                expected="a name whose package is not installed",
                do="choose another name, or uninstall that package",
            )


def _check_folder(into: Path, folder: Path) -> None:
    if not into.is_dir():
        raise ConfigError(
            f"{into} {'is a file' if into.exists() else 'does not exist'}",
            expected="a folder to write the package into",
            do="create it first" if not into.exists() else "choose another one with --into",
        )
    if os.path.lexists(folder):
        raise ConfigError(
            f"{folder} exists already",
            expected="a new folder",
            do="choose another name, or another folder with --into; nothing was written",
        )
