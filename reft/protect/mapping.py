"""A protection as a mapping: ``{"scheme": "rs", "parities": 2, "recompute": true}`` for ``rs:2+aor``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

SCHEMES = ("none", "auto", "arc", "aec", "rs", "arc+aec", "arc+rs")
KEYS = ("scheme", "copies", "parities", "recompute")
_MOST = 99
"""Copies or parities that the short form has digits for."""


def short_form(protection: Any) -> Any:
    """The short form of a protection that is a mapping; anything else as it is.

    Args:
        protection: ``scheme`` is one of :data:`SCHEMES`; ``copies`` of every shard (default 1) go with
            ``arc``, ``parities`` of every stripe with ``rs``; ``recompute``: whether ring peers recompute
            ZeRO partitions (``+aor``).

    Raises:
        ValueError: says what was found and what to write.
    """
    if not isinstance(protection, Mapping):
        return protection
    mapping: Mapping[str, Any] = protection
    for key in mapping:
        if key not in KEYS:
            near = get_close_matches(str(key), KEYS, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(KEYS)}"
            raise ValueError(f'unknown key "{key}"; {hint}')
    scheme = mapping.get("scheme")
    if scheme not in SCHEMES:
        found = f'"scheme" is {scheme!r}' if "scheme" in mapping else '"scheme" is missing'
        known = ", ".join(SCHEMES)
        raise ValueError(f'{found}; write one of {known}, with "copies" and "parities" beside it')
    recompute = mapping.get("recompute", False)
    if not isinstance(recompute, bool):
        raise ValueError(f'"recompute" is {recompute!r}; write true or false')
    parts = [_part(part, mapping) for part in str(scheme).split("+")]
    for key, part in (("copies", "arc"), ("parities", "rs")):
        if key in mapping and part not in str(scheme).split("+"):
            raise ValueError(
                f'"{key}" belongs to a scheme with "{part}", found "{scheme}"; {_instead(key, scheme)}'
            )
    return "+".join(parts) + ("+aor" if recompute else "")


def _part(part: str, mapping: Mapping[str, Any]) -> str:
    if part == "arc":
        # Number and all, so that "copies" beside it is seen to contradict.
        return f"arc:{_count(mapping, 'copies', 1)}" if "copies" in mapping else part
    return f"rs:{_count(mapping, 'parities', None)}" if part == "rs" else part


def _count(mapping: Mapping[str, Any], key: str, default: int | None) -> int:
    count = mapping.get(key, default)
    if count is None:
        raise ValueError(f'"scheme": "{mapping["scheme"]}" needs "{key}": how many, for example "{key}": 2')
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST:
        raise ValueError(f'"{key}" is {count!r}; write a whole number from 1 to {_MOST}')
    return count


def _instead(key: str, scheme: Any) -> str:
    if scheme == "auto":
        return 'remove it, and write "tolerance" beside "protection": the node losses to survive'
    others = {("parities", "aec"): "rs", ("parities", "arc+aec"): "arc+rs", ("copies", "aec"): "arc+aec"}
    other = others.get((key, scheme), {"copies": "arc", "parities": "rs"}[key])
    return f'remove it, or write "scheme": "{other}"'
