"""A JSON file that a person names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reft.errors import ConfigError


def read_object(path: Path, what: str, expected: str) -> dict[str, Any]:
    """The object in a file.

    Raises:
        ConfigError: it cannot be read, is not JSON or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {what} {path}: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{what} {path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{what} {path} holds a {type(values).__name__}; expected {expected}")
    return values
