"""Reads the ``reft`` block, and explains what is wrong with it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from reft.config import NESTED, FaultConfig, ReftConfig
from reft.env import ENV_JOB_ID, ENV_MEMORY_DIR, ENV_PROFILE
from reft.errors import ConfigError
from reft.naming import BLOCK_NAME, name_of_run

logger = logging.getLogger(__name__)


def read_object(path: Path, what: str, expected: str) -> dict[str, Any]:
    """The object in a file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {what} {path}: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{what} {path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{what} {path} holds a {type(values).__name__}; expected {expected}")
    return values


def load_config(ds_config: Mapping[str, Any] | None) -> ReftConfig:
    """Read the ``reft`` block out of a DeepSpeed configuration and apply the environment. ``ds_config``: the
    DeepSpeed JSON as a mapping; the block may be absent. Returns the checked configuration; ``enabled`` is
    False where the block is absent."""
    block = (ds_config or {}).get(BLOCK_NAME, {})
    if not isinstance(block, Mapping):
        raise ConfigError(
            f'"{BLOCK_NAME}" is {block!r}; expected an object, for example '
            f'"{BLOCK_NAME}": {{"enabled": true}}'
        )
    return parse_block(dict(block), os.environ)


def read_block(path: Path) -> dict[str, Any]:
    """The ``reft`` block of a JSON file, unchecked. The file is a DeepSpeed JSON, or holds nothing else."""
    block = read_object(path, f"the {BLOCK_NAME} block's file", f'{{"{BLOCK_NAME}": {{...}}}}').get(
        BLOCK_NAME
    )
    if not isinstance(block, dict):
        raise ConfigError(
            f'{path} holds no "{BLOCK_NAME}" object; write {{"{BLOCK_NAME}": {{"enabled": true}}}} into it'
        )
    return block


def parse_block(block: dict[str, Any], environ: Mapping[str, str] | None = None) -> ReftConfig:
    """Check one ``reft`` block; REFT_MEMORY_DIR and REFT_JOB_ID in ``environ`` override it: the launcher
    and its daemon look where they say. So do the keys in REFT_PROFILE, which ``reft profile`` sets."""
    environ = environ or {}
    for name, key in ((ENV_MEMORY_DIR, "memory_dir"), (ENV_JOB_ID, "job_id")):
        if value := environ.get(name):
            if block.get(key) not in (None, value):
                logger.warning("reft.%s is %s, but %s=%s is used", key, block[key], name, value)
            block[key] = value
    if not block.get("job_id") and (run := name_of_run(environ)):
        block["job_id"] = run
    if asked := environ.get(ENV_PROFILE):
        # `reft profile` measures any job, with or without a block.
        block |= {"enabled": True, **json.loads(asked)}
    try:
        return ReftConfig.model_validate(block)
    except ValidationError as error:
        raise ConfigError(_explain_errors(error)) from error


def _explain_errors(error: ValidationError) -> str:
    lines = [f'the "{BLOCK_NAME}" block cannot be used:']
    other_kind = ""
    for item in error.errors():
        loc, message = item["loc"], item["msg"].removeprefix("Value error, ")
        last = str(loc[-1]) if loc else ""
        if last == "int" or last.startswith("constrained-"):  # of a key that takes "auto" too: said with that
            other_kind = message.partition(",")[0]
            continue
        if last.startswith("literal["):
            loc, message = loc[:-1], f'{other_kind} or "auto"'
        path = ".".join(str(p) for p in (BLOCK_NAME, *loc))
        if item["type"] == "extra_forbidden":
            known = _keys_at(loc[:-1])
            near = get_close_matches(last, known, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(known)}"
            lines.append(f"  {path}: unknown key; {hint}")
        else:
            of_part = not loc or loc[-1] in NESTED  # what was found is in the message
            found = "" if item["type"] == "value_error" and of_part else f" (found {item['input']!r})"
            lines.append(f"  {path}: {message}{found}")
    lines.append("  'reft config --explain' lists every key with its default and meaning")
    return "\n".join(lines)


def _keys_at(path: tuple[int | str, ...]) -> list[str]:
    models: dict[str, type[BaseModel]] = {**NESTED, "faults": FaultConfig}
    model: type[BaseModel] = next((models[str(name)] for name in path if name in models), ReftConfig)
    return [name for name in model.model_fields if name != "faults"]  # those are for tests


@dataclass(frozen=True)
class KeyDoc:
    """One line of ``reft config --explain``."""

    key: str
    type: str
    default: Any
    unit: str
    meaning: str


_UNITS = {"_bytes": "bytes", "_secs": "seconds", "_steps": "optimizer steps"}


def explain(model: type[BaseModel] = ReftConfig, prefix: str = "") -> Iterator[KeyDoc]:
    """Every key of the block with type, default, unit and meaning, in the order of definition."""
    for name, field in model.model_fields.items():
        key = prefix + name
        if name in NESTED:
            yield from explain(NESTED[name], key + ".")
        elif name != "faults":  # those are for tests
            default = field.get_default(call_default_factory=True)
            default = str(default) if isinstance(default, Path) else default
            meaning = " ".join((field.description or "").split())
            unit = next((u for suffix, u in _UNITS.items() if name.endswith(suffix)), "")
            yield KeyDoc(key, _type_name(field.annotation), default, unit, meaning)


def _type_name(annotation: Any) -> str:
    if (origin := get_origin(annotation)) is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin in (Union, UnionType, Literal):
        return " | ".join(map(_type_name, get_args(annotation)))
    if annotation is NoneType:
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return " | ".join(annotation)
    return annotation.__name__ if isinstance(annotation, type) and origin is None else str(annotation)
