"""``reft hook``: the block becomes effective in every script of a Python environment, under any launcher."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import typer

from reft.errors import ReftError

FILE_NAME = "reft_hook.pth"
LINE = r"""import sys; exec("class Reft:
 def find_spec(self, name, path=None, target=None):
  if name != 'deepspeed': return None
  sys.meta_path.remove(self)
  try: import reft
  except ImportError: return None
  import importlib.util
  return importlib.util.find_spec(name)
sys.meta_path.insert(0, Reft())", {"sys": sys})
"""
"""What Python carries out when it starts: it imports nothing, and ``import deepspeed`` imports reft first."""

hook_app = typer.Typer(help="Make the reft block effective under any launcher, in this Python environment.")


@hook_app.command("install")
def install_command() -> None:
    """Make `import deepspeed` import reft in every script of this Python environment."""
    path = place()
    try:
        path.write_text(LINE.strip().replace("\n", r"\n") + "\n")
    except OSError as error:
        raise ReftError(
            f"{path} cannot be written ({error.strerror}): run this in a virtual environment of your own, or "
            f"write `import reft` into the script before it imports deepspeed"
        ) from error
    typer.echo(
        f"installed: {path}. Scripts in {sys.prefix} use the reft block under any launcher; only `reft "
        "launch` starts the node daemon and replaces nodes"
    )


@hook_app.command("remove")
def remove_command() -> None:
    """Undo `reft hook install`."""
    path = place()
    try:
        path.unlink()
    except FileNotFoundError:
        typer.echo(f"not installed: there is no {path}")
    except OSError as error:
        raise ReftError(f"{path} cannot be removed ({error.strerror}): remove it as its owner") from error
    else:
        typer.echo(f"removed: {path}")


@hook_app.command("status")
def status_command() -> None:
    """Print whether the hook is installed; exit code 1 if not."""
    path = place()
    if not path.exists():
        typer.echo(f"not installed: there is no {path}")
        raise typer.Exit(1)
    typer.echo(f"installed: {path}")


def place() -> Path:
    return Path(sysconfig.get_path("purelib")) / FILE_NAME
