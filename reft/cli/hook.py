"""``reft hook``: makes the ``reft`` block effective in every script of a Python environment.

With the hook, ``import deepspeed`` imports reft first, whatever launcher starts the script.
"""

from __future__ import annotations

import sys
import sysconfig
from enum import StrEnum
from pathlib import Path
from typing import Annotated

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
"""Line in a .pth file, which Python runs at every start. It imports nothing until the script
imports deepspeed."""


class HookAction(StrEnum):
    INSTALL = "install"
    REMOVE = "remove"
    STATUS = "status"


def hook_command(
    action: Annotated[
        HookAction, typer.Argument(help="status: exit code 1 if it is not installed")
    ],
) -> None:
    """Make the reft block effective under any launcher, in this Python environment: `import
    deepspeed` imports reft in every script.
    """
    path = Path(sysconfig.get_path("purelib")) / FILE_NAME
    existed = path.exists()
    try:
        if action is HookAction.INSTALL:
            path.write_text(LINE.strip().replace("\n", r"\n") + "\n")
        elif action is HookAction.REMOVE:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ReftError(
            f"{path} cannot be changed ({error.strerror}): run this as its owner, in a virtual "
            "environment of your own, or write `import reft` into the script before it imports "
            "deepspeed"
        ) from error
    if action is HookAction.INSTALL:
        typer.echo(
            f"installed: {path}. Scripts in {sys.prefix} use the reft block under any launcher; "
            "only `reft launch` starts the node daemon and replaces nodes"
        )
    elif existed:
        typer.echo(f"{'removed' if action is HookAction.REMOVE else 'installed'}: {path}")
    else:
        typer.echo(f"not installed: there is no {path}")
        if action is HookAction.STATUS:
            raise typer.Exit(1)
