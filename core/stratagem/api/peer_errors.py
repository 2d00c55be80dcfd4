"""Recognize errors of a collective that another process caused."""

from __future__ import annotations

import dis
import re

#: Parts of messages of gloo, NCCL and the store about a lost peer. Whole words, so that "restore" does not match.
_ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|\bsocket|remote process exited|timed out waiting"
    r"|application timeout|operation timeout|\b(work)?nccl|recvvalue failed|\b(tcp|file|hash|prefix)?store\b"
)


def is_echo(error: BaseException) -> bool:
    """Whether `error` comes from a collective that failed because another process failed.

    gloo and the store raise a plain RuntimeError from C++. A RuntimeError that Python code outside torch.distributed
    and stratagem raised is never such an error, whatever its message. Nor is any OSError, such as a data loader's.
    """
    if isinstance(error, OSError):
        return False
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if kinds & {"PeerError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    return type(error) is RuntimeError and _ECHO.search(str(error).lower()) is not None and not _is_users(error)


def _is_users(error: BaseException) -> bool:
    """Whether a ``raise`` statement outside torch.distributed and stratagem raised `error`."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "")
    raised = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and not re.match(r"(torch\.distributed|stratagem\w*)(\.|$)", module)
