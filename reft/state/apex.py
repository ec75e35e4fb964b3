"""apex of NVIDIA, and AMD's copy: which of its optimizers keep all in ``state`` and ``param_groups``.

apex is told by module and attributes, and never imported. PyPI's package of that name is something else, has
no optimizers, and is not meant. ``FusedAdam`` and ``FusedLAMB`` keep Adam's moments in ``state`` and one
step count per group in ``param_groups``, so that every adapter takes them as it takes torch's Adam. The
others keep more elsewhere, and so does ``FusedAdam`` with ``master_weights`` or ``capturable``. apex's
``amp`` keeps loss scales and masters beside the optimizer that it was given.
"""

from __future__ import annotations

from typing import Any

from reft.errors import UnsupportedStateError

PREFIX = "apex."
FUSED_ADAM = "apex.optimizers.fused_adam.FusedAdam"
_FUSED_LAMB = "apex.optimizers.fused_lamb.FusedLAMB"
_ATTRIBUTES = {
    FUSED_ADAM: ("adam_w_mode", "set_grad_none", "multi_tensor_adam"),
    _FUSED_LAMB: ("adam_w_mode", "set_grad_none", "use_nvlamb", "multi_tensor_lamb"),
}
"""What NVIDIA's classes have, by their path."""
_ELSEWHERE = {
    "master_weights": "keeps fp32 masters in an attribute of its own",
    "capturable": "keeps its step count and learning rate on the device",
}
_AMP = "_amp_stash"
"""Where ``amp.initialize`` keeps masters of an optimizer, of whatever class."""


def check_apex(optimizer: Any) -> None:
    """Refuse what apex keeps outside ``state`` and ``param_groups``. Nothing is said of other optimizers.

    Raises:
        UnsupportedStateError: names the class and what to change.
    """
    attributes = vars(optimizer)
    if _AMP in attributes:
        raise refuse(
            f"{_found(optimizer)}, which apex's amp.initialize has taken over",
            'leave amp out, and write "fp16" or "bf16" into the DeepSpeed JSON',
        )
    paths = [f"{c.__module__}.{c.__qualname__}" for c in type(optimizer).__mro__]
    ours = [path for path in paths if path.startswith(PREFIX)]
    if not ours:
        return
    known = next((path for path in ours if path in _ATTRIBUTES), None)
    if known is None:
        raise refuse(f"{_found(optimizer)} of apex", "use apex's FusedAdam, or torch's AdamW")
    if missing := [name for name in _ATTRIBUTES[known] if name not in attributes]:
        raise refuse(
            f"{_found(optimizer)} without {', '.join(missing)}, which NVIDIA's has",
            "use NVIDIA's or AMD's apex, which is not PyPI's package of that name, or torch's AdamW",
        )
    for name, what in _ELSEWHERE.items():
        if attributes.get(name):
            raise refuse(
                f"{_found(optimizer)} with {name}=True, which {what}",
                f"write {name}=False: DeepSpeed keeps fp32 masters of 16-bit weights itself",
            )


def _found(optimizer: Any) -> str:
    return f"the optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__}"


def refuse(found: str, change: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"found {found}, whose state reft does not know; of apex expected FusedAdam or FusedLAMB: {change}"
    )
