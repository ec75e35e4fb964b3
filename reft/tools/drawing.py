"""What all figures have in common. matplotlib is the optional extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reft.errors import ConfigError


def check_folder(option: str, path: Path) -> None:
    """Before long work: the folder of a file to be written has to be there, none is made.

    Raises:
        ConfigError: it is not.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it, or give another path")


def check_figure(option: str, path: Path) -> None:
    """Before long work: whether a figure can be drawn into a file.

    Raises:
        ConfigError: matplotlib or the folder is missing, or the suffix names no format.
    """
    check_folder(option, path)
    formats = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigError(
            f"{option} {path}: the suffix is {path.suffix!r}; expected one of {', '.join(sorted(formats))}"
        )


def new_figure(width: float, height: float, dpi: int = 120) -> Any:
    """An empty figure, in inches.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing a figure needs matplotlib, which is not installed: pip install 'reft-ckpt[plot]'"
        ) from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write it; the suffix chooses the format.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw into {path}: {error}") from error
