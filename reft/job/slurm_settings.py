"""Settings of Slurm under which the loss of one node, or of one process, ends the nodes that are left.

Slurm does not tell a task how its ``srun`` was called: the options are read where srun runs, if that is this
host, and the rest is asked of the controller, by the first node alone.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

logger = logging.getLogger(__name__)

_ASK_SECS = 20.0
_SHORT_WITH_VALUE = frozenset("ABCDFGJLMNPRSTUWbcdeimnopqrtwx")
_LONG_WITHOUT_VALUE = frozenset(
    """contiguous disable-status exact exclusive help hold ignore-pbs immediate interactive kill-on-bad-exit
    label multi-prog no-allocate no-kill overcommit overlap preserve-env pty quiet quit-on-interrupt reboot
    send-libs spread-job test-only unbuffered usage use-min-nodes verbose version whole""".split()  # noqa: SIM905
)
"""srun's options (``man srun``, 22.05): what else there is takes a value, with ``=`` or as the next word."""
_SCRIPT_NO_KILL = re.compile(
    r"^#SBATCH\s+(?:[^#\n]*\s)?(?:--no-kill(?!=off)(?=\s|=|$)|-[A-Za-z]*k(?=\s|$))", re.M
)


@dataclass(frozen=True)
class SrunOptions:
    """How srun was called, as far as it says what ends a step.

    Attributes:
        kill_on_bad_exit: ``--kill-on-bad-exit``; None: not given.
        no_kill: ``--no-kill``.
        wait_secs: ``--wait``; None: not given.
    """

    kill_on_bad_exit: bool | None
    no_kill: bool
    wait_secs: int | None


def parse_srun(words: Sequence[str], environ: Mapping[str, str]) -> SrunOptions:
    """srun's arguments, which win, and its environment."""
    given = environ.get("SLURM_KILL_BAD_EXIT")
    bad = None if given is None else given != "0"
    no_kill = "SLURM_NO_KILL" in environ
    wait = environ.get("SLURM_WAIT", "")
    for name, value in _options(words):
        if name in ("K", "kill-on-bad-exit"):
            bad = value != "0"
        elif name in ("k", "no-kill"):
            no_kill = value != "off"
        elif name in ("W", "wait"):
            wait = value
    return SrunOptions(bad, no_kill, int(wait) if wait.isdecimal() else None)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """srun's own options, without those of the program that it starts."""
    waiting = iter(words)
    for word in waiting:
        if word == "--" or not word.startswith("-"):
            return
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            yield name, value if given or name in _LONG_WITHOUT_VALUE else next(waiting, "")
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in _SHORT_WITH_VALUE or letter == "K":
                rest = word[place:]
                yield letter, rest if rest or letter == "K" else next(waiting, "")
                break
            yield letter, ""


def deadly_settings(job: str, step: str, environ: Mapping[str, str]) -> list[str]:
    """What would end the nodes that are left when one is lost, each with what to write instead.

    Args:
        job: Slurm's number of the job.
        step: number of the step.
        environ: of a task of the step.
    """
    site, srun = _ask("show", "config"), _srun_of(job, step)
    options = srun or parse_srun((), environ)
    found = []
    by_site = re.search(r"^KillOnBadExit\s*=\s*1", site, re.M) is not None
    if options.kill_on_bad_exit or (options.kill_on_bad_exit is None and by_site):
        whose = "srun was told so" if options.kill_on_bad_exit else "the site's slurm.conf says so"
        found.append(
            f"Slurm ends all nodes of this step when one launcher fails (KillOnBadExit: {whose}), and none "
            f"is left to go on: write srun --kill-on-bad-exit=0"
        )
    wait = options.wait_secs
    if wait is None:
        by_config = re.search(r"^WaitTime\s*=\s*(\d+)", site, re.M)
        wait = int(by_config[1]) if by_config else 0
    if wait:
        found.append(
            f"Slurm ends all nodes of this step {wait} s after the first launcher has ended (WaitTime): "
            f"write srun --wait=0"
        )
    if srun is not None and not srun.no_kill:
        found.append(
            "Slurm ends this step when one of its nodes fails, and none is left to go on: write "
            "srun --no-kill"
        )
    script = _ask("write", "batch_script", job, "-")
    if script and "SBATCH_NO_KILL" not in environ and not _SCRIPT_NO_KILL.search(script):
        found.append(
            "Slurm ends this job when one of its nodes fails, unless it was submitted with sbatch --no-kill, "
            "which its script does not say: write #SBATCH --no-kill"
        )
    return found


def _srun_of(job: str, step: str) -> SrunOptions | None:
    """How the srun of this step was called; None if it runs on another host."""
    where = re.search(r"SrunHost:Pid=([^\s:]+):(\d+)", _ask("show", "step", f"{job}.{step}"))
    names = (socket.gethostname(), socket.gethostname().partition(".")[0], os.environ.get("SLURMD_NODENAME"))
    if where is None or where[1] not in names:
        return None
    try:
        srun = psutil.Process(int(where[2]))
        words = srun.cmdline()
        return parse_srun(words[1:], srun.environ()) if "srun" in words[0] else None
    except (psutil.Error, OSError, IndexError) as error:
        logger.debug("srun's options cannot be read: %s", error)
        return None


def _ask(*words: str) -> str:
    """What scontrol answers; nothing if it does not, which costs a warning, not the job."""
    try:
        done = subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, check=True, timeout=_ASK_SECS
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("scontrol %s: %s", " ".join(words), error)
        return ""
    return done.stdout
