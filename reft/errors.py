"""Exceptions of reft. Every message says what was found, what was expected and what to change."""

from __future__ import annotations


class ReftError(Exception):
    """Base class of every error that reft raises on purpose."""


class ConfigError(ReftError, ValueError):
    """The ``reft`` block, a command line or an environment variable is invalid."""


class JobInUseError(ConfigError):
    """A live job holds the memory directory; the message says which job, and since when."""


class LayoutError(ReftError, RuntimeError):
    """A stored version does not fit the running job (other parallel degrees, shapes or dtypes)."""


class SizeError(ConfigError, LayoutError):
    """The job cannot train on this number of nodes; other numbers may be possible."""


class FingerprintError(LayoutError):
    """Stored state belongs to another job, or to this job with other settings.

    The message lists what differs.
    """


class UnsupportedStateError(ReftError, TypeError):
    """The engine holds state of a class that reft does not support; the message names the class."""


class UnrecoverableError(ReftError, RuntimeError):
    """The job made progress, but neither memory nor disk holds a complete version of it."""


class CorruptionError(ReftError, RuntimeError):
    """The training state is corrupt; the job will restart from its newest version."""


class CorruptJobError(CorruptionError, UnrecoverableError):
    """The training state is corrupt, and a restart would lead to the same state; the job ends."""


class NotResumedError(UnrecoverableError):
    """Memory holds a version of the job, but the script trains from the beginning.

    The message says what to write into the script.
    """


class StaleReplicaError(ReftError, RuntimeError):
    """A peer's recomputed copy of an optimizer partition is no longer equal to the owner's.

    The partition must be copied from the owner again.
    """


class ArenaError(ReftError, RuntimeError):
    """An arena file is missing, incomplete or too small, or belongs to another job."""


class OutOfMemoryError(ArenaError, MemoryError):
    """The arenas do not fit into the memory directory or the configured limit."""


class StagingMemoryError(ReftError, MemoryError):
    """The device has too little free memory for a staging copy of the state."""


class CopyError(ReftError, ValueError):
    """A copy engine received tensors that it cannot copy byte by byte."""


class CopyOrderError(ReftError, RuntimeError):
    """A copy engine was not called in the order begin, copy, fence, synchronize."""


class TransferError(ReftError, ConnectionError):
    """Bytes between hosts were lost, refused or did not match their checksum."""


class PeerLostError(TransferError):
    """A rank died, left or is silent; the connections among the ranks can no longer be used."""


class AuthenticationError(ReftError, PermissionError):
    """A message or file was not authenticated with the job's secret."""


class PersistError(ReftError, OSError):
    """A checkpoint could not be written to or read from the persist directory."""


class OvertakenError(PersistError):
    """A version was overwritten in memory by a newer one before it was written to storage."""


class FencedError(PersistError):
    """A newer start of the job has taken over; this process or node was cut off and replaced.

    Args:
        message: the message.
        newest: number (incarnation) of the newer start; 0 if unknown.
    """

    def __init__(self, message: str, newest: int = 0) -> None:
        super().__init__(message)
        self.newest = newest
