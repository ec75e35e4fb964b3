"""Typed errors. Every message says what was found, what was expected and what to change."""

from __future__ import annotations


class ReftError(Exception):
    """Base class of every error reft raises on purpose."""


class ConfigError(ReftError, ValueError):
    """The ``reft`` block, a command line or an environment variable cannot be honoured."""


class JobInUseError(ConfigError):
    """A live job holds the memory; the message says who and since when."""


class LayoutError(ReftError, RuntimeError):
    """A snapshot does not fit the running job (other parallel degrees, shapes or dtypes)."""


class SizeError(ConfigError, LayoutError):
    """The job cannot train on this number of nodes; other numbers may be possible."""


class FingerprintError(LayoutError):
    """Stored state belongs to another job, or to this one with other settings; lists what
    differs."""


class UnsupportedStateError(ReftError, TypeError):
    """The engine holds state reft does not know; the message names the class."""


class UnrecoverableError(ReftError, RuntimeError):
    """The job made progress, but neither memory nor disk holds a complete version of it."""


class CorruptionError(ReftError, RuntimeError):
    """The training state is corrupt; the job restarts from its newest version."""


class CorruptJobError(CorruptionError, UnrecoverableError):
    """The training state is corrupt, and a restart would reproduce it."""


class NotResumedError(UnrecoverableError):
    """Memory holds a version of the job, but its script trains from the beginning; the message says
    what to write."""


class StaleReplicaError(ReftError, RuntimeError):
    """A replica of an optimizer partition no longer follows its owner and must be copied again."""


class ArenaError(ReftError, RuntimeError):
    """A memory file is missing, foreign, torn or too small."""


class OutOfMemoryError(ArenaError, MemoryError):
    """The memory directory or the configured limit cannot hold the arenas."""


class StagingMemoryError(ReftError, MemoryError):
    """The device has no room for a staging copy in addition to training's memory."""


class CopyError(ReftError, ValueError):
    """A copy engine was given tensors that it cannot copy byte by byte."""


class CopyOrderError(ReftError, RuntimeError):
    """A copy engine was not called in the order begin, copy, fence, synchronize."""


class TransferError(ReftError, ConnectionError):
    """Bytes between hosts were lost, refused or did not match their checksum."""


class PeerLostError(TransferError):
    """A rank died, left or is silent; these connections can no longer be used."""


class AuthenticationError(ReftError, PermissionError):
    """A message or file does not carry the job's secret."""


class PersistError(ReftError, OSError):
    """A checkpoint could not be written to or read from the persist directory."""


class OvertakenError(PersistError):
    """Memory moved to newer versions before this one was read from it."""


class FencedError(PersistError):
    """A newer start of the job has taken over: this process, or this node, was cut off and
    replaced.

    Args:
        message: the message.
        newest: incarnation of that start; 0 if unknown.
    """

    def __init__(self, message: str, newest: int = 0) -> None:
        super().__init__(message)
        self.newest = newest
