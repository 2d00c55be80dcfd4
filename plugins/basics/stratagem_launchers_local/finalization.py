"""Shorten the end of the interpreter: it would visit the hundreds of thousands of objects of torch's modules.

[Note: finalization]
At its end the interpreter clears all modules and collects reference cycles several times. With torch and torch._dynamo
imported this takes a second of CPU time, and a launcher waits for one process after the other. Frozen objects
(`gc.freeze`) are not visited. They are freed as usual when their last reference goes, but cycles of them are not. So
nothing is frozen if a cycle could hold an object whose end a user could notice: one with ``__del__``, a suspended
generator (``finally``), a file that is open for writing, or one that cannot be asked. Handlers of `atexit` and
`weakref.finalize` run either way.
"""

from __future__ import annotations

import atexit
import gc
import io
import sys
from types import AsyncGeneratorType, CoroutineType, GeneratorType, WrapperDescriptorType
from typing import Any

#: Whose ``__del__`` does nothing that matters at the end: it keeps a process's exit code, and frees memory.
_HARMLESS = {("subprocess", "Popen"), ("torch.multiprocessing.reductions", "StorageWeakRef")}
#: The attribute of each kind of generator that tells whether it is suspended; Python 3.11 cannot tell of some.
_SUSPENDED = {GeneratorType: "gi_suspended", CoroutineType: "cr_suspended", AsyncGeneratorType: "ag_frame"}
#: Flag of classes whose objects the collector tracks (Py_TPFLAGS_HAVE_GC).
_TRACKED = 1 << 14

_registered = False


def shorten_finalization() -> None:
    """Freeze objects when this process ends, after the handlers of `atexit` that are registered from now on."""
    global _registered
    if not _registered:
        _registered = True
        atexit.register(_freeze)


def _freeze() -> None:
    try:
        noticed = has_finalizers()
    except (Exception, KeyboardInterrupt):  # noqa: BLE001 - a file of a class of the user's may raise anything
        noticed = True
    if not noticed:
        gc.freeze()


def has_finalizers() -> bool:
    """Whether objects exist whose end a user could notice; see [Note: finalization]."""
    objects = gc.get_objects()
    classes = set(map(type, objects))
    if any(_finalizes(cls) for cls in classes):
        return True
    files = {cls for cls in classes if issubclass(cls, io.IOBase)}
    known = {*files, *_SUSPENDED, *(cls for cls in classes if issubclass(cls, type))}
    return any(_matters(each) for each in objects if type(each) in known)


def _finalizes(cls: type[Any]) -> bool:
    try:
        method = type.__getattribute__(cls, "__del__")  # not `getattr`: a metaclass may raise, or import something
    except AttributeError:
        return False
    if isinstance(method, WrapperDescriptorType):  # in C: those of Python itself close what they hold
        return method.__objclass__.__module__ not in sys.stdlib_module_names
    return (cls.__module__, cls.__qualname__) not in _HARMLESS


def _matters(value: Any) -> bool:
    cls = type(value)
    if cls in _SUSPENDED:
        return bool(getattr(value, _SUSPENDED[cls]))
    if issubclass(cls, type):  # the collector does not list objects of this class
        return not type.__getattribute__(value, "__flags__") & _TRACKED and _finalizes(value)
    return cls not in (io.BytesIO, io.StringIO) and _is_written(value)


def _is_written(file: Any) -> bool:
    """Whether `file` is open for writing; not for standard output and error, which the interpreter flushes itself."""
    if type(file).__module__ != "_io":  # `fileno` may do anything, such as write the file to a disk
        return not file.closed and bool(file.writable())
    try:
        return not file.closed and file.writable() and file.fileno() not in (0, 1, 2)
    except io.UnsupportedOperation:  # it has no number: it writes to a file of another class
        return True
    except ValueError:  # it has no file any more (`detach`)
        return False
