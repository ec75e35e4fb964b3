"""The keys of the ``reft`` block with defaults and meanings, as ``reft config --explain`` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from reft.config import NESTED, FaultConfig, ReftConfig


@dataclass(frozen=True)
class KeyDoc:
    """One line of ``reft config --explain``."""

    key: str
    type: str
    default: Any
    unit: str
    meaning: str


_UNITS = {"_bytes": "bytes", "_secs": "seconds", "_steps": "optimizer steps"}


def explain() -> Iterator[KeyDoc]:
    """Every key of the block with type, default, unit and meaning, in the order of definition."""
    yield from _explain_model(ReftConfig, "")


def _explain_model(model: type[BaseModel], prefix: str) -> Iterator[KeyDoc]:
    for name, field in model.model_fields.items():
        key = prefix + name
        if name in NESTED:
            yield from _explain_model(NESTED[name], key + ".")
        elif name == "faults":
            yield KeyDoc(key, "list", [], "", field.description or "")
            yield from _explain_model(FaultConfig, key + "[].")
        else:
            unit = next((u for suffix, u in _UNITS.items() if name.endswith(suffix)), "")
            yield KeyDoc(key, _type_name(field.annotation), _default_of(field), unit, field.description or "")


def _type_name(annotation: Any) -> str:
    if (origin := get_origin(annotation)) is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin in (Union, UnionType, Literal):
        return " | ".join(map(_type_name, get_args(annotation)))
    if annotation is NoneType:
        return "null"
    return annotation.__name__ if isinstance(annotation, type) and origin is None else str(annotation)


def _default_of(field: FieldInfo) -> Any:
    if field.is_required():
        return "(required)"
    default = field.get_default(call_default_factory=True)
    return str(default) if isinstance(default, Path) else default
