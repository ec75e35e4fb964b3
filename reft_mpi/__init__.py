"""Integration of MPI: ``reft mpi-run`` under ``mpiexec`` or ``srun``, and ``"transport": "mpi"``.

:mod:`reft.integrations` describes integrations. This one needs reft's optional dependencies
``mpi``.
"""

COMMANDS = {
    "mpi-run": ("reft_mpi.mpi_run:main", "run a training process under mpiexec or srun"),
}
TRANSPORTS = {"mpi": "reft_mpi.mpi:mpi_carrier"}
