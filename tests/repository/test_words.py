"""Words that this project does not use: not in code, its docstrings and messages, tests, examples or docs.

The code is read by engineers who work with PyTorch every day, most of them not native speakers of English. It uses the
words of torch, NCCL and Kubernetes, in short plain sentences. What a regular expression can tell stands here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = (
    "README.md",
    "Dockerfile",
    "Makefile",
    "mkdocs.yml",
    "benchmarks",
    "conda",
    "contrib",
    "core",
    "docs",
    "examples",
    "plugins",
    "scripts",
    "tests",
)
SUFFIXES = {"", ".css", ".html", ".js", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}

#: Regular expressions for whole words, without regard to case, and what to write instead. An underscore separates
#: words; a space matches a line break, too.
OLD_FASHIONED = {
    r"for ever": "forever",
    r"anew": "again",
    r"in (its|their|his|her) stead": "instead",
    r"be they|be it": "whether",
    r"without a word|no word about": "without an error message",
    r"mend(s|ed|ing)?": "fix",
    r"owe|owed|owes|owing|debts?": "residual, remaining, missing",
    r"likewise": "also",
    r"fares? alike": "is treated the same",
    r"thereof|hence|whence|thither|hither|lest|nought|ought to|albeit|amongst|whilst": "a plain modern word",
    r"by itself|by themselves": "automatically, alone, separately",
}
GRAMMAR = {
    r"(?<!here )(?<!here_)(is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|other\b|different\b|better\b|worse\b)[a-z]+": (
        "is not a, has no"
    ),
    r"""say (?=["'`]|[a-z_.]+=)""": "use, pass, set",
    r"(?<!people )(?<!person )(?<!users )(?<!user )(?<!authors )(?<!author )(?<!readers )(?<!engineers )"
    r"who (?!in\b)[a-z]+": "which, that or what for a program; who follows a word for people only",
}
FIGURES_OF_SPEECH = {
    r"knock(s|ed|ing)?|doors?": "probe, endpoint",
    r"journeys?": "bucket in flight",
    r"rooms?": "module, free space",
    r"companions?": "local worker, child process",
    r"homecomings?|far from home": "worker result, is_worker",
    r"conversations?": "collective operations",
    r"compares? notes": "all-reduce a flag",
    r"rehears(e|es|ed|al|als)": "trial steps",
    r"in a sentence": "with an error message",
    r"lets? go": "release",
}
WORDS = OLD_FASHIONED | GRAMMAR | FIGURES_OF_SPEECH

#: Ends a line whose words are not ours to choose: a name in another library, or a key in files that exist.
NOT_OURS = "# a name that stays"

#: Files and folders that still have such words. Remove an entry once its text is rewritten; add none.
NOT_YET: tuple[str, ...] = ()


@pytest.mark.slow
def test_forbidden_words_are_not_used():
    """One list of all of them: file, line, what was found and what to write instead."""
    patterns = {as_pattern(words): instead for words, instead in WORDS.items()}

    found = [violation for path in files() for violation in violations(path, patterns)]

    assert not found, "\n" + "\n".join(found)


def test_exceptions_exist():
    assert [path for path in NOT_YET if not (ROOT / path).exists()] == []


def test_patterns_match_whole_words():
    forever, itself, not_a = (
        as_pattern(words) for words in ("for ever", "by itself|by themselves", next(iter(GRAMMAR)))
    )

    assert forever.search("waits for\n    # ever.")
    assert itself.search("def test_ends_by_itself():")
    assert not_a.search("which is no folder")
    assert not forever.search("for every rank")
    assert not not_a.search("is no longer there")
    assert not not_a.search("there is no folder")


def as_pattern(words: str) -> re.Pattern[str]:
    """Return the pattern for `words`, whatever separates them; spaces in lookarounds stay as they are."""
    between = r"(?:\\s+(?:#:?\\s+)?|_)"
    parts = re.split(r"(\(\?<?[!=][^()]*\))", words)
    spaced = [part if part.startswith(("(?!", "(?=", "(?<")) else re.sub(" ", between, part) for part in parts]
    return re.compile(rf"(?<![A-Za-z])(?:{''.join(spaced)})(?![A-Za-z])", re.IGNORECASE)


def files() -> list[Path]:
    """Return the files to read: text, except hidden files, build outputs and this one."""
    found = []
    for place in PLACES:
        start = ROOT / place
        for path in sorted([start] if start.is_file() else start.rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            hidden = any(
                part.startswith((".", "__pycache__")) or part.endswith(".egg-info") for part in name.split("/")
            )
            skipped = hidden or path == Path(__file__) or name.startswith(NOT_YET)
            if path.is_file() and path.suffix in SUFFIXES and not skipped:
                found.append(path)
    return found


def violations(path: Path, patterns: dict[re.Pattern[str], str]) -> list[str]:
    """Return a line for every match of `patterns` in the file at `path`."""
    text = re.sub(rf".*{NOT_OURS}$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = [
        (text.count("\n", 0, match.start()) + 1, " ".join(match.group().split()), instead)
        for pattern, instead in patterns.items()
        for match in pattern.finditer(text)
    ]
    name = path.relative_to(ROOT).as_posix()
    return [f"{name}:{line}: {word!r}; write: {instead}" for line, word, instead in sorted(found)]
