"""What a transport asks MPI for, seen from outside of it."""

from __future__ import annotations

from collections import Counter
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


class Counted:
    """A communicator that counts the bytes of messages between pairs.

    Attributes:
        bytes: by call.
    """

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi, self._comm = mpi, communicator
        self.bytes: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Issend(self, data: memoryview, peer: int, tag: int) -> Any:  # noqa: N802
        self.bytes["Issend"] += len(data)
        return self._comm.Issend(data, peer, tag)

    def Improbe(self, source: int, tag: int, status: Any) -> Any:  # noqa: N802
        message = self._comm.Improbe(source, tag, status)
        if message is not None:
            self.bytes["Improbe"] += status.Get_count(self._mpi.BYTE)
        return message
