"""Jobs under ``mpiexec`` or ``srun``: ``reft mpi-run``, and ``"transport": "mpi"`` in the block.

An integration as :mod:`reft.integrations` describes them. It needs the extra ``mpi``.
"""

COMMANDS = {
    "mpi-run": ("reft_mpi.mpi_run:main", "run a training process under mpiexec or srun"),
}
TRANSPORTS = {"mpi": "reft_mpi.mpi:mpi_carrier"}
