"""What a transport asks MPI for, seen from outside of it."""

from __future__ import annotations

from typing import Any


def refuse_pickling(mpi: Any) -> None:
    """From now on every call of mpi4py that would pickle raises in this process."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an object was pickled")

    mpi.pickle.__init__(refuse, refuse)
    try:
        mpi.COMM_SELF.bcast({})
    except AssertionError:
        return
    raise AssertionError("mpi4py pickles in another way")
