"""Finds packages that extend reft: support for training programs, rendezvous and transports.

An integration is a module named by an entry point of the group ``reft.integrations``, such as this
one in the ``pyproject.toml`` of the package::

    [project.entry-points."reft.integrations"]
    megatron = "megatron_patches"

Importing the module must be cheap: it is imported before the training script. It may hold any of

- ``ON_IMPORT``: name of a module of the program -> ``"module:function"``, called with the module
  right after it was imported, where ``REFT_CONFIG`` names a block;
- ``PROGRAMS``: name of a module of the program -> ``"module:function"``, called with an engine of a
  program that has imported it; returns a :class:`~reft.engine.attach.Program`, or None if the
  engine does not belong to the program;
- ``FOLLOWERS``: any name -> ``"module:function"``, called with the session's
  :class:`~reft.engine.context.JobContext` and a function that returns the objects which the script
  has given; returns the :class:`~reft.engine.host_state.HostState` objects that follow the state of
  the script;
- ``NAMES``: public name, found in ``reft`` -> module that holds it;
- ``COMMANDS``: name of a sub-command of ``reft`` -> ``"module:function"``, called with its
  arguments, and a line of help;
- ``RENDEZVOUS``: name of a ``--rdzv-backend`` -> ``"module:class"``, a subclass of
  :class:`~reft.job.rendezvous.backend.RendezvousBackend`;
- ``TRANSPORTS``: a ``"transport"`` of the block -> ``"module:function"``, which returns a function
  that opens a :class:`~reft.control.transport.Transport`.

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
    """Pairs of one table, such as ``"ON_IMPORT"``, in all integrations."""
    for own in OWN:
        yield from getattr(import_module(own), table, {}).items()
    for integration in entry_points(group=GROUP):
        yield from getattr(integration.load(), table, {}).items()


def load(target: str) -> Any:
    """The object that ``"module:name"`` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def find(table: str, name: str) -> Any:
    """The object that an integration registers in ``table`` as ``name``.

    Raises:
        ConfigError: no installed package registers it.
    """
    targets = dict(entries(table))
    if name not in targets:
        known = ", ".join(targets) or "none"
        raise ConfigError(
            f"no installed package brings {name!r} ({table}; found: {known}). reft's own are part "
            f"of its wheel and found by their entry points: install reft again"
        )
    return load(targets[name])
