"""Calls of ``load_checkpoint`` and ``save_checkpoint`` as DeepSpeed takes them: by position or by name.

The signature is the wrapped method's own, so that every release of DeepSpeed is called as it wants to be.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BASE_ONLY = (
    ("load_module_only", True),
    ("load_optimizer_states", False),
)
"""Options by which DeepSpeed loads less than a training state: the start of a job, never its resumption."""


def bind(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults left out.

    Raises:
        TypeError: ``original`` does not take them.
    """
    signature = inspect.signature(original)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def replace(where: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``wrapper(where.name)`` on an instance or a module; others and the class stay as they are."""
    original = getattr(where, name)
    setattr(where, name, functools.wraps(original)(wrapper(original)))


@dataclass(frozen=True)
class LoadCall:
    """One call of ``load_checkpoint``.

    Attributes:
        load_dir: as given.
        tag: the checkpoint that is asked for; None: the newest.
        options: everything else, by name.
    """

    load_dir: Any
    tag: Any
    options: dict[str, Any]

    @classmethod
    def of(cls, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LoadCall:
        """
        Raises:
            TypeError: DeepSpeed's method does not take these arguments.
        """
        named = bind(original, args, kwargs)
        return cls(named.pop("load_dir"), named.pop("tag", None), named)

    @property
    def directory(self) -> Path | None:
        return Path(self.load_dir) if self.load_dir else None

    @property
    def base_only(self) -> str | None:
        """The option by which this loads weights without the optimizer, as written; None: a whole state."""
        for name, value in _BASE_ONLY:
            if name in self.options and bool(self.options[name]) is value:
                return f"{name}={value}"
        return None

    def __str__(self) -> str:
        shown = [repr(str(self.load_dir))]
        if self.tag is not None:
            shown.append(f"tag={self.tag!r}")
        if self.base_only is not None:
            shown.append(self.base_only)
        return f"load_checkpoint({', '.join(shown)})"


def what_it_did(bases: Sequence[LoadCall], tagged: LoadCall | None, left_out: Sequence[str] = ()) -> str:
    """What a script did before its first step that resumes nothing, as errors and warnings say it.

    Args:
        bases: its loads of base weights.
        tagged: its load by tag.
        left_out: its loads that a condition has left out, in words.
    """
    if tagged is not None:
        return f"the script names the checkpoint that it resumes: {tagged}"
    if bases:
        calls = ", ".join(str(base) for base in bases)
        return f"the script has loaded base weights only ({calls}) and trains"
    why = f": {'; '.join(left_out)}" if left_out else ""
    return f"the script trains without calling engine.load_checkpoint(...){why}"


def what_to_write(bases: Sequence[LoadCall], tagged: LoadCall | None) -> str:
    """The line by which it resumes the newest state."""
    if "transformers.trainer" in sys.modules:
        return "Write trainer = reft.hf.resumable(trainer) before trainer.train()"
    calls = [tagged] if tagged is not None else bases
    behind = str(calls[-1]) if calls else "deepspeed.initialize"
    return (
        f"Write engine.load_checkpoint(save_dir), or reft.resume(engine), after {behind}, also at the first "
        f"start, and let the loop begin at engine.global_steps"
    )
