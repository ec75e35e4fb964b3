"""What of reft is compiled when it is installed. Calls by ctypes let go of the interpreter."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from typing import Any


def compiled(module: str, name: str) -> Any:
    """The C function ``name`` of an extension, its argument types still to be set.

    Raises:
        OSError: it was not built, or cannot be loaded here.
    """
    found = find_spec(module)
    if found is None or found.origin is None:
        raise OSError("it was not built when reft was installed; that takes a C++ compiler")
    try:
        return getattr(ctypes.CDLL(found.origin), name)
    except AttributeError as error:
        raise OSError(f"{found.origin} is of another version of reft: {error}") from error
