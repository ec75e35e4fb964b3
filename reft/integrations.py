"""Finds packages that extend reft: support for training programs, rendezvous and transports.

An integration is a module that an entry point of the group ``reft.integrations`` names, such as
this one in the ``pyproject.toml`` of a package::

    [project.entry-points."reft.integrations"]
    megatron = "megatron_patches"

The module is imported before the training script, so its import must be cheap. It may contain any
of these tables (dicts):

- ``ON_IMPORT``: name of a module of a training program -> ``"module:function"``. If ``REFT_CONFIG``
  names a file with a ``reft`` block, the function is called with that module right after its
  import.
- ``PROGRAMS``: name of a module of a training program -> ``"module:function"``. If the process has
  imported that module, the function is called with the training engine. It returns a
  :class:`~reft.engine.attach.Program`, or None if the engine does not belong to the program.
- ``FOLLOWERS``: any name -> ``"module:function"``. The function is called with the
  :class:`~reft.engine.context.JobContext` and a function that returns the objects which the script
  has passed to reft. It returns :class:`~reft.engine.host_state.HostState` objects, which capture
  and restore state of the script.
- ``NAMES``: public name in ``reft`` -> name of the module that defines it.
- ``COMMANDS``: name of a sub-command of ``reft`` -> ``"module:function"``, which is called with the
  arguments, and a line of help.
- ``RENDEZVOUS``: value of ``--rdzv-backend`` -> ``"module:class"``, a subclass of
  :class:`~reft.job.rendezvous.backend.RendezvousBackend`.
- ``TRANSPORTS``: value of ``"transport"`` in the ``reft`` block -> ``"module:function"``, which
  returns a function that opens a :class:`~reft.control.transport.Transport`.

Features of reft itself that the core does not import (:data:`OWN`) are found in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from reft.errors import ConfigError

GROUP = "reft.integrations"
OWN = ("reft.follow",)


def entries(table: str) -> Iterator[tuple[str, Any]]:
    """Yield the (key, value) pairs of one table, such as ``"ON_IMPORT"``, of all integrations."""
    for own in OWN:
        yield from getattr(import_module(own), table, {}).items()
    for integration in entry_points(group=GROUP):
        yield from getattr(integration.load(), table, {}).items()


def load(target: str) -> Any:
    """Import and return the object that ``"module:name"`` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def find(table: str, name: str) -> Any:
    """Import and return the object that an integration registers in ``table`` under ``name``.

    Raises:
        ConfigError: no installed package registers that name.
    """
    targets = dict(entries(table))
    if name not in targets:
        known = ", ".join(targets) or "none"
        raise ConfigError(
            f"no installed package brings {name!r} ({table}; found: {known}). reft's own are part "
            f"of its wheel and found by their entry points: install reft again"
        )
    return load(targets[name])
