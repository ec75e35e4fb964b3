"""Training programs with a state of their own beside the engine's, of which an engine may be one's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

from reft import integrations

if TYPE_CHECKING:
    from reft.engine.session import Session


class Program(Protocol):
    """What is asked of the program that has made an engine.

    Attributes:
        data_is_bound: why its data are others at another data-parallel degree, and what to write; "" where
            they are not.
    """

    data_is_bound: str

    def client_state(self) -> dict[str, Any]:
        """What its own checkpoint of the engine's step would hold beside the engine's files."""

    def join(self, session: Session) -> None:
        """Called once on all ranks, before the program loads."""


def running_program(engine: Any) -> Program | None:
    """The program that has made the engine; None for a script of nobody's.

    Raises:
        ConfigError: it was started with an option that reft cannot resume.
    """
    for module, function in integrations.found("PROGRAMS"):
        if module in sys.modules:
            program: Program | None = integrations.load(function)(engine)
            if program is not None:
                return program
    return None
