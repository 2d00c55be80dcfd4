"""Examine and rewrite YAML files: those of LightningCLI, and of hydra (``_target_: lightning.pytorch.Trainer``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml
from attrs import evolve, frozen

from stratagem.errors import ConfigError
from stratagem_migrate import installed
from stratagem_migrate.files import ProjectFile
from stratagem_migrate.findings import CHANGE, Finding
from stratagem_migrate.names import NAMES
from stratagem_migrate.source import UNKNOWN, Source, within_lightning
from stratagem_migrate.yaml_edits import YamlEdits, as_yaml, entries, entry, value_of

if TYPE_CHECKING:
    from stratagem_migrate.translations import Given, New

#: Keys of hydra that are not arguments.
_OF_HYDRA: Final = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
#: Sections of LightningCLI that the commands of stratagem do not have.
_SECTIONS: Final = {
    "optimizer": "an argument of the model, optimizer: {class_path: ...}, which is annotated Callable[..., Optimizer]",
    "lr_scheduler": "configure_optimizers of the model",
}
_TRAINER: Final = "lightning.pytorch.Trainer"


@frozen(eq=False)
class Built:
    """A mapping that builds an object: the class, and the arguments."""

    name: str
    #: The node with the name; of a Trainer of LightningCLI, its key.
    name_node: yaml.Node
    mapping: yaml.MappingNode
    #: The mapping with the arguments, which LightningCLI has below ``init_args``.
    arguments: yaml.Node | None
    #: Whether LightningCLI builds it.
    is_cli: bool

    def items(self) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        if self.arguments is not None:
            yield from (each for each in entries(self.arguments) if each[0].value not in _OF_HYDRA)


class YamlFile(ProjectFile):
    """A parsed YAML file."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self.encoding = "utf-8-sig" if content.startswith(b"\xef\xbb\xbf") else "utf-8"
        try:
            self.text = content.decode(self.encoding)
            self.root: Any = yaml.compose(self.text, yaml.SafeLoader)
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            if b"lightning" in content or b"trainer:" in content:
                reason = " ".join(str(error).split())
                raise ConfigError(f"{path} is not YAML ({reason})", expected="one document of YAML in UTF-8") from error
            self.text, self.root, self.encoding = content.decode("latin-1"), None, "latin-1"
        self.built = list(_built(self.root)) if self.root is not None else []

    def with_text(self, text: str) -> YamlFile:
        return YamlFile(self.path, text.encode(self.encoding))

    @property
    def is_of_cli(self) -> bool:
        """Whether LightningCLI reads it; files of hydra have sections with the same names."""
        names = {key.value for key, _ in entries(self.root)} if self.root is not None else set()
        is_of_hydra = "defaults" in names or "# @package" in self.text
        return "trainer" in names and not is_of_hydra and bool(names & {"seed_everything", "model", "data"})


def _built(node: yaml.Node) -> Iterator[Built]:
    """Yield what a file builds, outermost first."""
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _built(each)
    if not isinstance(node, yaml.MappingNode):
        return
    target, path = entry(node, "_target_"), entry(node, "class_path")
    if target is not None:
        yield Built(str(target[1].value), target[1], node, node, is_cli=False)
    elif path is not None:
        inner = entry(node, "init_args")
        yield Built(str(path[1].value), path[1], node, inner[1] if inner else None, is_cli=True)
    for _, value in node.value:
        yield from _built(value)


# --- Findings ----------------------------------------------------------------------------------------------------


def examine(file: YamlFile, rules: Callable[[Source], list[Finding]]) -> list[Finding]:
    """Return the findings about a file: those about calls with the same arguments, and about sections."""
    found = [each for built in file.built for each in _about_call(file, built, rules)]
    if file.is_of_cli:
        found += _about_sections(file, rules)
    return sorted(set(found))


def _about_call(file: YamlFile, built: Built, rules: Callable[[Source], list[Finding]]) -> Iterator[Finding]:
    """Write the call as a script, an argument on each line, and yield what the rules say about it."""
    if within_lightning(built.name) is None and not built.name.startswith("stratagem."):
        return
    nodes = [built.name_node, *(key for key, _ in built.items())]
    lines = ["import lightning, pytorch_lightning, lightning_fabric, stratagem", f"{built.name}("]
    lines += [f"{key.value}={_as_python(value_of(value))}," for key, value in built.items()]
    try:
        script = Source(file.path, "\n".join([*lines, ")"]).encode())
    except ConfigError:  # an argument that is not a name
        return
    for finding in rules(script):
        if 2 <= finding.line < len(nodes) + 2:
            mark = nodes[finding.line - 2].start_mark
            yield evolve(finding, line=mark.line + 1, column=mark.column + 1)


def _as_python(value: Any) -> str:
    return "value" if value is UNKNOWN else repr(value)


def _about_sections(file: YamlFile, rules: Callable[[Source], list[Finding]]) -> Iterator[Finding]:
    trainer = entry(file.root, "trainer")
    if isinstance(trainer[1], yaml.MappingNode):
        built = Built(_TRAINER, trainer[0], trainer[1], trainer[1], is_cli=True)
        yield from (each for each in _about_call(file, built, rules) if each.line != trainer[0].start_mark.line + 1)
    for key, value in entries(file.root):
        place = (str(file.path), key.start_mark.line + 1, key.start_mark.column + 1, CHANGE)
        if key.value == "seed_everything":
            yield Finding(*place, "seed_everything:", "seed:")
        elif key.value in _SECTIONS:
            yield Finding(*place, f"{key.value}:", _SECTIONS[key.value])
        elif key.value in ("model", "data") and isinstance(value, yaml.MappingNode) and not entry(value, "class_path"):
            yield Finding(
                *place, f"{key.value}: without class_path", "class_path: and init_args:", "a run file names the class"
            )


# --- Rewriting ---------------------------------------------------------------------------------------------------


def rewrite(file: YamlFile) -> str:
    """Return the text with every change that is certain.

    Raises:
        ConfigError: the changes contradict each other.
    """
    try:
        with_new_options = _apply(file, _rewrite_values)
        return _apply(with_new_options, _rewrite_plugins).text
    except ConfigError as error:
        raise ConfigError(f"{file.path} cannot be rewritten: {error.found}", do=error.do) from error


def _apply(file: YamlFile, change: Callable[[YamlFile, YamlEdits], None]) -> YamlFile:
    if file.root is None:
        return file
    edits = YamlEdits(file.text)
    change(file, edits)
    return file.with_text(edits.apply())


def _rewrite_values(file: YamlFile, edits: YamlEdits) -> None:
    """Rewrite classes that stay classes, arguments and options."""
    in_trainer = _plugins_of_trainer(file)
    for built in file.built:
        if within_lightning(built.name) is None:
            continue
        if any(each is built.mapping for each in in_trainer):
            _rewrite_options(edits, built, built.name.rpartition(".")[2])
        else:
            _rewrite_target(edits, built)
    if file.is_of_cli:
        _rewrite_sections(file, edits)


def _rewrite_plugins(file: YamlFile, edits: YamlEdits) -> None:
    """Rewrite ``class_path`` in the ``trainer:`` of LightningCLI to names of plugins."""
    in_trainer = _plugins_of_trainer(file)
    for built in file.built:
        if any(each is built.mapping for each in in_trainer):
            _rewrite_plugin(edits, built)


def _plugins_of_trainer(file: YamlFile) -> list[yaml.Node]:
    """Return the mappings of callbacks, loggers and a strategy in the ``trainer:`` of LightningCLI."""
    if not file.is_of_cli:
        return []
    found: list[yaml.Node] = []
    for key, value in entries(entry(file.root, "trainer")[1]):
        if key.value in ("callbacks", "logger", "strategy"):
            found += value.value if isinstance(value, yaml.SequenceNode) else [value]
    return found


def _rewrite_target(edits: YamlEdits, built: Built) -> None:
    """Rewrite a class that stays a class: hydra builds it."""
    from stratagem_migrate.rewriting.references import target_of
    from stratagem_migrate.translations import as_in_lightning

    target = target_of(within_lightning(built.name) or "")
    if target is None:
        return
    theirs = built.name.rpartition(".")[2]
    edits.replace(built.name_node, f"{target.module}.{target.name}")
    if theirs == "Trainer" and isinstance(built.arguments, yaml.MappingNode):
        _rewrite_arguments(edits, built.arguments, as_in_lightning)
    else:
        _rewrite_options(edits, built, theirs)


def _rewrite_arguments(edits: YamlEdits, mapping: yaml.MappingNode, translate: Callable[[Given], New | None]) -> None:
    """Rewrite the arguments of a Trainer."""
    from stratagem_migrate.translations import CALLBACKS, Given

    values = {key.value: value_of(value) for key, value in entries(mapping) if key.value not in _OF_HYDRA}
    result: dict[str, str | None] = dict.fromkeys(values)
    for key, value in list(entries(mapping)):
        if key.value in _OF_HYDRA:
            continue
        new = translate(Given(key.value, values[key.value], None, values))
        if new is None or any(name == CALLBACKS for name, _ in new):
            continue
        texts = [(name, None if text is None else as_yaml(text)) for name, text in new]
        computed = any(text is not None and made is None for (_, text), (_, made) in zip(new, texts, strict=True))
        others = result.keys() - {key.value}
        if computed or any(name in others and result[name] != text for name, text in texts):
            continue
        texts = [(name, text) for name, text in texts if name not in others]
        result.pop(key.value)
        result |= dict(texts)
        edits.put(mapping, key, value, texts)


def _rewrite_options(edits: YamlEdits, built: Built, theirs: str) -> None:
    """Rename and drop options of a callback, a logger or a strategy."""
    if not isinstance(built.arguments, yaml.MappingNode):
        return
    for key, value, new in _options(built, theirs):
        if new is not None and new != key.value:
            edits.put(built.arguments, key, value, [(new, None)] if new else [])


def _options(built: Built, theirs: str) -> list[tuple[yaml.ScalarNode, yaml.Node, str | None]]:
    """Return each option with its name here: an empty string if it goes, None if that cannot be told."""
    from stratagem_migrate.rewriting.plugin_calls import option_instead

    plugin = NAMES[theirs].plugin if theirs in NAMES else None
    known = installed.plugin_options(*plugin) if plugin is not None else None
    if known is None:
        return []
    return [
        (key, value, key.value if key.value in known else option_instead(theirs, key.value, value_of(value), known))
        for key, value in built.items()
    ]


def _rewrite_plugin(edits: YamlEdits, built: Built) -> None:
    """Rewrite ``class_path`` and ``init_args`` of a plugin: its name, with the options beside it."""
    from stratagem_migrate.names import DROP_IN

    theirs = built.name.rpartition(".")[2]
    plugin = NAMES[theirs].plugin if theirs in DROP_IN and theirs in NAMES else None
    if within_lightning(built.name) is None or plugin is None or NAMES[theirs].is_missing:
        return
    options = _options(built, theirs)
    if any(new != key.value for key, _, new in options) or len(options) < len(list(built.items())):
        return
    path, inner = entry(built.mapping, "class_path"), entry(built.mapping, "init_args")
    stays = any(key.value == "name" for key, _, _ in options)  # beside them `name` chooses the plugin
    if inner is not None and not (
        stays or (isinstance(inner[1], yaml.MappingNode) and edits.inline(built.mapping, *inner))
    ):
        return
    edits.replace(path[0], "name")
    edits.replace(path[1], plugin[1])


def _rewrite_sections(file: YamlFile, edits: YamlEdits) -> None:
    from stratagem_migrate.translations import translated

    trainer, seed = entry(file.root, "trainer"), entry(file.root, "seed_everything")
    if isinstance(trainer[1], yaml.MappingNode):
        _rewrite_arguments(edits, trainer[1], translated)
    if seed is not None:
        value = value_of(seed[1])
        if value is None or value is False:
            edits.put(file.root, seed[0], seed[1], [])
        elif isinstance(value, int) and value is not True:
            edits.replace(seed[0], "seed")
