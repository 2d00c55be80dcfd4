"""Change the arguments of a call in place: each function takes and returns the libcst node of the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst

from stratagem_migrate.rewriting.edits import expression


def find(call: Any, name: str) -> Any:
    """Return the argument with that name, or None."""
    return next((each for each in call.args if each.keyword is not None and each.keyword.value == name), None)


def rename(call: Any, old: str, new: str) -> Any:
    """Rename a keyword."""
    argument = find(call, old)
    assert argument is not None
    changed = argument.with_changes(keyword=argument.keyword.with_changes(value=new))
    return call.with_changes(args=[changed if each is argument else each for each in call.args])


def name_positional(call: Any, names: Sequence[str], first: int = 0) -> Any:
    """Give each positional argument from `first` on its name."""
    arguments = list(call.args)
    for index, name in enumerate(names, start=first):
        arguments[index] = arguments[index].with_changes(keyword=cst.Name(name), equal=_equal())
    return call.with_changes(args=arguments)


def put(call: Any, old: str, new: Sequence[tuple[str, str | None]]) -> Any:
    """Put `new` in the place of argument `old`: names and texts; None stands for the value of `old`.

    An argument of `new` that the call has already replaces that one. No `new` removes the argument.
    """
    argument = find(call, old)
    assert argument is not None
    made = [_argument(name, argument.value if text is None else expression(text)) for name, text in new]
    if not made:
        return _without(call, argument)
    gap = _gap_around(call, argument)
    made = [each.with_changes(comma=gap) for each in made[:-1]] + [
        made[-1].with_changes(comma=argument.comma, whitespace_after_arg=argument.whitespace_after_arg)
    ]
    arguments: list[Any] = []
    for each in call.args:
        arguments += made if each is argument else [each]
    return call.with_changes(args=arguments)


def remove(call: Any, name: str) -> Any:
    """Remove an argument."""
    return put(call, name, [])


def append(call: Any, name: str, text: str) -> Any:
    """Add an argument at the end."""
    new = _argument(name, expression(text))
    if not call.args:
        return call.with_changes(args=[new])
    *before, last = call.args
    has_comma = isinstance(last.comma, cst.Comma)
    gap = _gap(before[-1].comma if before else last.comma if has_comma else cst.MaybeSentinel.DEFAULT)
    if has_comma and not before:  # f(\n    a,\n)
        gap = cst.Comma(whitespace_after=call.whitespace_before_args)
    new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    last = last.with_changes(comma=gap, whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*before, last, new])


def append_to_list(call: Any, name: str, text: str) -> Any:
    """Add an element to the list of an argument; make one of a single value, and of none at all."""
    argument = find(call, name)
    if argument is None:
        return append(call, name, f"[{text}]")
    value, new = argument.value, cst.Element(expression(text))
    if isinstance(value, cst.List):
        elements = list(value.elements)
        if elements:
            last = elements[-1]
            gap = _gap(elements[0].comma) if len(elements) > 1 else cst.Comma(whitespace_after=_space())
            if len(elements) == 1 and isinstance(last.comma, cst.Comma):
                gap = cst.Comma(whitespace_after=value.lbracket.whitespace_after)
            new = new.with_changes(comma=last.comma)
            elements[-1] = last.with_changes(comma=gap)
        value = value.with_changes(elements=[*elements, new])
    elif isinstance(value, cst.Name) and value.value == "None":
        value = cst.List([new])
    else:
        value = cst.List([cst.Element(value, comma=cst.Comma(whitespace_after=_space())), new])
    changed = argument.with_changes(value=value)
    return call.with_changes(args=[changed if each is argument else each for each in call.args])


def _without(call: Any, argument: Any) -> Any:
    arguments = list(call.args)
    index = arguments.index(argument)
    if index == len(arguments) - 1 and index > 0:  # the one before is the last now
        arguments[index - 1] = arguments[index - 1].with_changes(
            comma=argument.comma, whitespace_after_arg=argument.whitespace_after_arg
        )
    del arguments[index]
    changed = call.with_changes(args=arguments)
    return changed if arguments else changed.with_changes(whitespace_before_args=cst.SimpleWhitespace(""))


def _argument(name: str, value: Any) -> cst.Arg:
    return cst.Arg(value, keyword=cst.Name(name), equal=_equal())


def _equal() -> cst.AssignEqual:
    none = cst.SimpleWhitespace("")
    return cst.AssignEqual(whitespace_before=none, whitespace_after=none)


def _gap(comma: Any) -> cst.Comma:
    """Return a comma with the whitespace of `comma`, but not its comment."""
    whitespace: Any = comma.whitespace_after if isinstance(comma, cst.Comma) else _space()
    if isinstance(whitespace, cst.ParenthesizedWhitespace):
        first = whitespace.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace(""))
        whitespace = whitespace.with_changes(first_line=first, empty_lines=[])
    elif not whitespace.value:
        whitespace = _space()
    return cst.Comma(whitespace_after=whitespace)


def _gap_around(call: Any, argument: Any) -> cst.Comma:
    """Return the comma between `argument` and others; the one behind the last argument stands before the bracket."""
    index = list(call.args).index(argument)
    if index < len(call.args) - 1:
        return _gap(argument.comma)
    if index > 0:
        return _gap(call.args[index - 1].comma)
    return _gap(cst.Comma(whitespace_after=call.whitespace_before_args))


def _space() -> cst.SimpleWhitespace:
    return cst.SimpleWhitespace(" ")
