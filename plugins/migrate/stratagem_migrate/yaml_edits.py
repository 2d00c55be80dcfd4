"""Change entries of a YAML file as text, so that formatting and comments stay."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import yaml

from stratagem.errors import ConfigError
from stratagem_migrate.source import UNKNOWN, constant

_PLAIN: Final = re.compile(r"[A-Za-z_][\w./-]*( [\w./-]+)*")


class YamlEdits:
    """Replacements of spans of a text; they must not overlap."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._spans: list[tuple[int, int, str]] = []

    def replace(self, node: yaml.Node, new: str) -> None:
        """Replace a scalar; quotes stay."""
        old = self._text[node.start_mark.index : node.end_mark.index]
        quote = old[0] if old[:1] in ("'", '"') else ""
        self._span(node.start_mark.index, node.end_mark.index, f"{quote}{new}{quote}")

    def put(
        self, mapping: yaml.MappingNode, key: yaml.Node, value: yaml.Node, new: Sequence[tuple[str, str | None]]
    ) -> None:
        """Put `new` in the place of an entry: names and texts, None for the value as it is. No `new` removes it."""
        if not new:
            self._remove(mapping, key, value)
            return
        start, end = key.start_mark.index, _end(value)
        given = self._text[value.start_mark.index : end]
        between = ", " if mapping.flow_style else f"{self._newline()}{' ' * key.start_mark.column}"
        parts = [f"{name}: {given if text is None else text}" for name, text in new]
        self._span(start, end, between.join(parts))

    def inline(self, mapping: yaml.MappingNode, key: yaml.Node, value: yaml.MappingNode) -> bool:
        """Move the entries of `value` up into `mapping`, and drop `key`; return whether that is possible."""
        if mapping.flow_style and not value.flow_style:
            return False
        if not value.value:
            self._remove(mapping, key, value)
            return True
        if mapping.flow_style:
            self._span(key.start_mark.index, value.start_mark.index + 1, "")
            self._span(value.end_mark.index - 1, value.end_mark.index, "")
            return True
        if value.flow_style:
            parts = [self._text[each.start_mark.index : _end(inner)] for each, inner in value.value]
            indent = f"{self._newline()}{' ' * key.start_mark.column}"
            self._span(key.start_mark.index, _end(value), indent.join(parts))
            return True
        if key.start_mark.line == mapping.start_mark.line:
            return False
        shift = value.start_mark.column - key.start_mark.column
        first = self._line_start(key.start_mark.index)
        self._span(first, self._text.index("\n", first) + 1, "")
        index = self._line_start(value.start_mark.index)
        while index < _end(value):
            if self._text[index : index + shift] == " " * shift:
                self._span(index, index + shift, "")
            index = self._text.find("\n", index) + 1 or len(self._text)
        return True

    def _remove(self, mapping: yaml.MappingNode, key: yaml.Node, value: yaml.Node) -> None:
        keys = [each for each, _ in mapping.value]
        place = next(index for index, each in enumerate(keys) if each is key)
        begins_item = place == 0 and key.start_mark.line == mapping.start_mark.line
        if mapping.flow_style or begins_item:
            if place + 1 < len(keys):
                self._span(key.start_mark.index, keys[place + 1].start_mark.index, "")
            elif place > 0:
                self._span(_end(mapping.value[place - 1][1]), _end(value), "")
            else:
                self._span(key.start_mark.index, _end(value), "" if mapping.flow_style else "{}")
            return
        after = self._text.find("\n", _end(value))
        self._span(self._line_start(key.start_mark.index), after + 1 if after >= 0 else len(self._text), "")

    def _span(self, start: int, end: int, new: str) -> None:
        if any(start < other_end and other_start < end for other_start, other_end, _ in self._spans):
            line = self._text.count("\n", 0, start) + 1
            raise ConfigError(f"line {line} would have to be changed twice", do="change one of its parts by hand")
        self._spans.append((start, end, new))

    def _line_start(self, index: int) -> int:
        return self._text.rfind("\n", 0, index) + 1

    def _newline(self) -> str:
        return "\r\n" if "\r\n" in self._text else "\n"

    def apply(self) -> str:
        """Return the new text."""
        text = self._text
        for start, end, new in sorted(self._spans, reverse=True):
            text = text[:start] + new + text[end:]
        return text


def _end(node: Any) -> int:
    """Return where the text of a node ends; the mark of a block is at the next token."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style:
        return int(node.end_mark.index)
    last: Any = node.value[-1]
    return _end(last[1] if isinstance(last, tuple) else last)


def entries(mapping: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Yield the entries of a mapping whose keys are names."""
    if isinstance(mapping, yaml.MappingNode):
        yield from ((key, value) for key, value in mapping.value if isinstance(key, yaml.ScalarNode))


def entry(mapping: yaml.Node, name: str) -> Any:
    """Return the key and the value of an entry, or None."""
    return next((each for each in entries(mapping) if each[0].value == name), None)


def value_of(node: yaml.Node) -> Any:
    """Return the value of a node; `UNKNOWN` for what is computed, or built."""
    if isinstance(node, yaml.ScalarNode) and "${" in node.value:
        return UNKNOWN
    if any(entry(each, name) for each in _inside(node) for name in ("_target_", "class_path")):
        return UNKNOWN
    try:
        return yaml.SafeLoader("").construct_document(node)
    except yaml.YAMLError:
        return UNKNOWN


def _inside(node: yaml.Node) -> Iterator[yaml.Node]:
    yield node
    if isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            yield from _inside(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _inside(value)


def as_yaml(text: str) -> str | None:
    """Return the YAML of a constant written in Python; None if it is computed."""
    value = constant(ast.parse(text, mode="eval").body)
    if value is UNKNOWN:
        return None
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value not in ("null", "true", "false", "yes", "no"):
        return value
    return json.dumps(value)
