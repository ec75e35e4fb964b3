"""One rank of an MPI job that goes through the contract; what came of each case is in a file of its own.

mpiexec -n 4 python -m tests.control.mpi_job DIRECTORY [CASE]...
"""

from __future__ import annotations

import faulthandler
import sys
import traceback
from pathlib import Path
from typing import Any

from reft_mpi.mpi import load_mpi, mpi_carrier

from .contract import CASES, Rank
from .ranks import DEADLINE_SECS


def main(directory: Path, names: list[str]) -> None:
    faulthandler.dump_traceback_later(DEADLINE_SECS, exit=True)
    mpi = load_mpi()
    refuse_pickling(mpi)
    world = mpi.COMM_WORLD
    connect = mpi_carrier(world.rank, world.size, f"node{world.rank // 2}", DEADLINE_SECS)
    for name in names or CASES:
        place = directory / name
        place.mkdir(exist_ok=True)
        open_next = lambda: connect(DEADLINE_SECS, lambda: True, lambda *_: None)  # noqa: E731
        me = Rank(world.rank, world.size, open_next, place)
        try:
            CASES[name](me)
            said = "well"
        except BaseException:
            said = traceback.format_exc()
        (place / f"result-{world.rank}").write_text(said)
        me.hear("result", range(world.size))
    print("the end", flush=True)


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


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
