"""``python -m reft.tools.profile FOLDER``: draws the profile that a job has left in its folder.

The job starts it as a process of its own: no training process imports what draws.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from reft.errors import ReftError
from reft.profile.result import PROFILE_FILE, ProfileResult
from reft.tools.profile.chrome import write_trace
from reft.tools.profile.figure import draw

TRACE_FILE = "trace.json"
FIGURE_FILE = "profile.png"


def main(argv: Sequence[str]) -> int:
    """Write the trace and, where matplotlib is installed, the figure; returns the exit code."""
    (folder,) = map(Path, argv)
    try:
        result = ProfileResult.load(folder / PROFILE_FILE)
        write_trace(result, folder / TRACE_FILE)
        draw(result, folder / FIGURE_FILE)
    except (ReftError, OSError) as error:
        print(f"reft profile: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
