"""A call of ``engine.load_checkpoint``, and its description in messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reft.wrapping import bind

_BASE_ONLY = (("load_module_only", True), ("load_optimizer_states", False))
"""Options with which DeepSpeed loads less than a complete training state: a job can start from
the result, but not resume from it."""


@dataclass(frozen=True)
class LoadCall:
    """A call of ``load_checkpoint``.

    Attributes:
        original: DeepSpeed's method.
        load_dir: first argument of the call; None for :func:`reft.resume`.
        tag: the checkpoint that the script names; None for the newest.
        options: the remaining arguments of the call, by name.
    """

    original: Callable[..., tuple[Any, Any]]
    load_dir: Any
    tag: Any
    options: dict[str, Any]

    @classmethod
    def of(
        cls, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LoadCall:
        named = bind(original, args, kwargs)
        return cls(original, named.pop("load_dir"), named.pop("tag", None), named)

    @property
    def directory(self) -> Path | None:
        return Path(self.load_dir) if self.load_dir else None

    @property
    def base_only(self) -> str | None:
        """The option that leaves out the optimizer, as written in the call; None if a complete
        state is loaded."""
        for name, value in _BASE_ONLY:
            if name in self.options and bool(self.options[name]) is value:
                return f"{name}={value}"
        return None

    def by_deepspeed(self) -> tuple[Any, Any]:
        """Let DeepSpeed load. Return DeepSpeed's path and client state, or ``(None, None)``."""
        return self.original(self.load_dir, tag=self.tag, **self.options)

    def __str__(self) -> str:
        shown = [repr(str(self.load_dir))]
        if self.tag is not None:
            shown.append(f"tag={self.tag!r}")
        if self.base_only is not None:
            shown.append(self.base_only)
        return f"load_checkpoint({', '.join(shown)})"


def describe_restore(
    bases: Sequence[LoadCall], tagged: LoadCall | None, left_out: Sequence[str] = ()
) -> str:
    """Describe what a script that has not resumed did before its first step, for messages.

    Args:
        bases: the script's loads of base weights.
        tagged: the script's load of a checkpoint by its tag; None if there was none.
        left_out: descriptions of loads in the script that were skipped by a condition such as
            ``if``.
    """
    if tagged is not None:
        return f"the script names the checkpoint that it resumes: {tagged}"
    if bases:
        calls = ", ".join(str(base) for base in bases)
        return f"the script has loaded base weights only ({calls}) and trains"
    why = f": {'; '.join(left_out)}" if left_out else ""
    return f"the script trains without calling engine.load_checkpoint(...){why}"


def describe_resume_lines(bases: Sequence[LoadCall], tagged: LoadCall | None) -> str:
    """Return advice on the line that makes the script resume the newest state."""
    if "transformers.trainer" in sys.modules:
        return "Write trainer = reft.hf.resumable(trainer) before trainer.train()"
    calls = [tagged] if tagged is not None else bases
    last = str(calls[-1]) if calls else "deepspeed.initialize"
    return (
        f"Write engine.load_checkpoint(save_dir), or reft.resume(engine), after {last}, also at "
        f"the first start, and let the loop begin at engine.global_steps"
    )
