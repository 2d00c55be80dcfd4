"""`Notebook`: the code cells of a notebook as one script, and the file with the cells of the rewritten script."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from stratagem.errors import ConfigError
from stratagem_migrate.findings import CHECK, Finding
from stratagem_migrate.magics import Magics
from stratagem_migrate.source import ALONE, Elsewhere, Source, parse

_DECODER: Final = json.JSONDecoder()
_LOGS: Final = re.compile(r"\blightning_logs\b")
_PACKAGE: Final = re.compile(r"\b(pytorch[-_])?lightning(\[[\w,]+\])?([=<>~!]=?[\w.]+)?")
_BOUNDARY: Final = re.compile(r"^_stratagem_cell_\d+_\n", re.MULTILINE)


@frozen
class _Cell:
    """A code cell: its number among all cells, its lines, and where the file has them."""

    number: int
    #: The cell as Python.
    python: str
    start: int
    end: int


class Notebook(Source):
    """A notebook of Jupyter. Names that one cell imports or defines count in the other ones."""

    def __init__(self, path: Path, content: bytes, elsewhere: Elsewhere = ALONE) -> None:
        self.magics = Magics()
        try:
            self.file = content.decode()
            cells = json.loads(self.file)["cells"]
            self._cells = [
                _Cell(number, self.magics.hide("".join(cells[number - 1]["source"])), *span)
                for number, span in _code_cells(self.file)
            ]
            script = "".join(self._lines_of(index) for index in range(len(self._cells))).encode()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path} is not a notebook ({reason})", expected="version 4, in UTF-8") from error
        for cell in self._cells:
            parse(f"{path}:cell {cell.number}", cell.python.encode())
        super().__init__(path, script, elsewhere)

    def _lines_of(self, index: int) -> str:
        """Return a cell as a part of the script, which begins with the name of the cell."""
        boundary = f"_stratagem_cell_{index}_\n" if index else ""
        return f"{boundary}{self._cells[index].python}\n"

    def seen_with(self, elsewhere: Elsewhere) -> Notebook:
        return Notebook(self.path, self.file.encode(), elsewhere)

    @property
    def parts(self) -> list[str]:
        return [cell.python for cell in self._cells]

    def with_text(self, text: str) -> Notebook:
        return Notebook(self.path, self.in_file(text).encode(), self.elsewhere)

    def in_file(self, text: str) -> str:
        """Return the file with the cells of the script `text`; all else stays as it is, to the byte."""
        parts = _BOUNDARY.split(text) if self._cells else []
        assert len(parts) == len(self._cells)
        file = self.file
        for cell, part in reversed(list(zip(self._cells, parts, strict=True))):
            new = part.removesuffix("\n")
            if new != cell.python:
                old = file[cell.start : cell.end]
                file = file[: cell.start] + _as_json(self.magics.restore(new), old, file.isascii()) + file[cell.end :]
        return file

    def placed(self, finding: Finding) -> Finding:
        """Return a finding about the script with the number of the cell, and the line there."""
        first = 0
        for index, cell in enumerate(self._cells):
            lines = self._lines_of(index).count("\n")
            if finding.line <= first + lines:
                return evolve(finding, line=finding.line - first - (index > 0), cell=cell.number)
            first += lines
        return finding


def about_magics(source: Source) -> Iterator[Finding]:
    """Find magics and shell commands that name Lightning, such as ``!pip install lightning``."""
    if not isinstance(source, Notebook):
        return
    texts = [node.value for node in source.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    is_own_folder = any("lightning_logs" in text for text in texts)
    for node in source.nodes:
        lines = source.magics.lines_of(node.id) if isinstance(node, ast.Name) else ()
        for line in lines:
            about = _LOGS.sub("", line) if is_own_folder else line
            if "lightning" in about.lower():
                new = _LOGS.sub("stratagem_logs", line)
                new = _PACKAGE.sub("stratagem", new) if "install" in line else new
                advice = "" if new == line else new.strip()
                yield source.finding(node, CHECK, line.strip(), advice, "magics and shell commands stay as they are")


def _code_cells(file: str) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the number of each code cell, and where its source is in the file."""
    (cells,) = (start for key, start, _ in _values(file, file.index("{")) if key == "cells")
    for number, (_, start, _) in enumerate(_values(file, cells), 1):
        places = {key: (first, end) for key, first, end in _values(file, start)}
        if json.loads(file[slice(*places["cell_type"])]) == "code":
            yield number, places["source"]


def _values(text: str, start: int) -> Iterator[tuple[Any, int, int]]:
    """Yield the key, or None, and the place of each value in the object or array of JSON that begins at `start`."""
    index = _skip(text, start + 1)
    while text[index] not in "]}":
        key = None
        if text[start] == "{":
            key, index = _DECODER.raw_decode(text, index)
            index = _skip(text, _skip(text, index) + 1)  # the colon
        _, end = _DECODER.raw_decode(text, index)
        yield key, index, end
        index = _skip(text, end)
        if text[index] == ",":
            index = _skip(text, index + 1)


def _skip(text: str, index: int) -> int:
    while text[index].isspace():
        index += 1
    return index


def _as_json(new: str, old: str, is_ascii: bool) -> str:
    """Return the source of a cell in the form of `old`: a string, or a list of lines."""
    if old[0] == '"':
        return json.dumps(new, ensure_ascii=is_ascii)
    lines = [json.dumps(line, ensure_ascii=is_ascii) for line in new.splitlines(keepends=True)]
    places = [(start, end) for _, start, end in _values(old, 0)]
    before, after = old[1 : places[0][0]], old[places[-1][1] : -1]
    between = old[places[0][1] : places[1][0]] if len(places) > 1 else f",{before or ' '}"
    return f"[{before}{between.join(lines)}{after}]" if lines else "[]"
