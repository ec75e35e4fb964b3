"""``reft demo``: trains over nodes of this machine, kills some of them, trains again undisturbed and without
reft, and compares every loss."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from reft.config import parse_block
from reft.env import ENV_EVENTS
from reft.errors import ConfigError
from reft.naming import BLOCK_NAME
from reft.node.report import describe_parts
from reft.refusal import Parser
from reft.tools.demo.nodes import Nodes

EXIT_INTERRUPTED = 130
LAYERS = 4  # Blocks of the model
_MOST_SECS = 600.0  # of both runs
_POLL_SECS = 0.01
_END_SECS = 15.0  # when the launcher of a node has failed, the others have so long to end, too
_MOST_STEP_LINES = 40
_LOG_LINES = 25
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MEMORY_DIR = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())

Say = Callable[[str, str], None]  # a line for people, and its style
Losses = dict[int, list[str]]  # by step, as ``float.hex``, of every time that it was computed


class Kill(NamedTuple):
    """One failure to make: node ``node`` is lost while step ``step + 1`` is computed."""

    step: int
    node: int


class Failure(NamedTuple):
    """One failure that was made: at a Unix time, when ``step`` was done and the next one was computed."""

    step: int
    node: int
    time: float


def main(argv: Sequence[str]) -> int:
    """Command line of ``reft demo``. Returns 0: training finished and not one bit differs; 1: not so; 130:
    told to stop. Raises ConfigError: the options do not fit together."""
    options = parse(argv)
    console = Console(stderr=options.json == "-", soft_wrap=True)
    for number in _STOPS:
        signal.signal(number, _stop)
    try:
        report = _run(options, console)
    except KeyboardInterrupt:
        console.print("stopped; all processes are killed and their memory is removed", style="yellow")
        return EXIT_INTERRUPTED
    return 0 if report["good"] else 1


# -- options --------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse, complete and check a command line: what the trainers would refuse is refused before anything is
    started. Raises SystemExit: argparse's own refusals, and ``--help``."""
    parser = Parser(
        prog="reft demo",
        allow_abbrev=False,
        description="Train a small transformer over several nodes on this machine, kill nodes in the "
        "middle of a step, watch the job continue from its peers' memory, and compare every "
        "loss, bit by bit, with an undisturbed run of the same job without reft. The exit code "
        "is 0 only if all losses are equal.",
    )
    for option, kind, default, metavar, says in (
        ("--pp", int, 2, "N", "pipeline stages"),
        ("--dp", int, 2, "N", "replicas; every trainer has a node of its own"),
        ("--steps", int, 24, "N", "optimizer steps"),
        ("--protection", str, "arc", "SCHEME", "as in the reft block: arc, aec, rs:K, ..., auto, none"),
        ("--memory-dir", Path, _MEMORY_DIR, "DIR", "where to make the nodes' memory directories"),
        ("--json", str, None, "FILE", "write the report to FILE; - is standard output"),
    ):
        derived = "" if default is None else " (default: %(default)s)"
        parser.add_argument(option, type=kind, default=default, metavar=metavar, help=says + derived)
    parser.add_argument(
        "--kill",
        metavar="STEP:NODE[,...]",
        help="failures: NODE is lost while the step after STEP is computed; several failures at one STEP "
        "happen together; 'none' for none (default: node 1 after three eighths of the steps)",
    )
    options = parser.parse_args(list(argv))
    for name in ("steps", "pp", "dp"):
        if (value := getattr(options, name)) <= 0:
            raise ConfigError(f"--{name} is {value}; write a positive number")
    if options.pp > LAYERS:
        raise ConfigError(
            f"the model has {LAYERS} layers, but --pp {options.pp} needs one per stage; lower --pp"
        )
    if not os.access(options.memory_dir, os.W_OK):
        raise ConfigError(f"--memory-dir {options.memory_dir} cannot be written; give another directory")
    config = parse_block(_block(options))
    if not config.chooses and config.scheme.parities:
        config.scheme.check_room(options.dp)
    options.kills = _kills(options.kill, options.steps, options.pp * options.dp)
    return options


def _kills(text: str | None, steps: int, nodes: int) -> tuple[Kill, ...]:
    """``"9:1,14:0"`` to failures, by step."""
    if text is None:
        return (Kill(max(1, steps * 3 // 8), min(1, nodes - 1)),) if steps > 1 else ()
    kills = []
    for part in text.split(",") if text.strip() != "none" else ():
        try:
            step, node = (int(number) for number in part.split(":"))
        except ValueError as error:
            raise ConfigError(
                f"--kill is {text!r}; expected STEP:NODE[,STEP:NODE...] such as 9:1,14:0, or none"
            ) from error
        if not (1 <= step < steps and 0 <= node < nodes):
            raise ConfigError(
                f"--kill {part}: expected a step from 1 to {steps - 1}, since a node fails while the step "
                f"after it is computed, and one of the nodes 0 to {nodes - 1}"
            )
        kills.append(Kill(step, node))
    if len(set(kills)) < len(kills):
        raise ConfigError(f"--kill is {text!r}: a node can fail only once in a step; remove the repetition")
    return tuple(sorted(kills))


def _block(options: argparse.Namespace) -> dict[str, Any]:
    return {"enabled": True, "protection": options.protection, "allow_unprotected": True}


def deepspeed_config(options: argparse.Namespace, *, protected: bool) -> dict[str, Any]:
    """The two runs differ in the block alone."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    return config | ({BLOCK_NAME: _block(options)} if protected else {})


# -- the runs ---------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run, compare and report. Memory and processes are gone afterwards, logs are kept if it failed."""
    began = time.monotonic()

    def say(text: str, style: str = "") -> None:
        stamp = f"[{time.monotonic() - began:6.1f} s] "
        console.print(Text(stamp, style="dim") + Text(text, style=style), highlight=False)

    kept, directory = False, Path(tempfile.mkdtemp(prefix="reft-demo-"))
    kills = ", ".join(f"node {k.node} in step {k.step + 1}" for k in options.kills) or "none"
    say(
        f"a small transformer over {options.pp * options.dp} nodes, PP{options.pp} x DP{options.dp}, "
        f"{options.steps} steps; failures: {kills}"
    )
    try:
        problem, jobs = None, dict[str, Job]()
        for name, what in (
            ("training", "training with reft"),
            ("reference", "the same job, undisturbed, without reft"),
        ):
            if problem is None:
                say(f"--- {what}")
                where = {"prefix": "reft-demo-", "dir": str(options.memory_dir)}
                with tempfile.TemporaryDirectory(**where, ignore_cleanup_errors=True) as memory:
                    job = Job(options, name, directory / name, Path(memory), say)
                    jobs[name], problem = job, job.run(began + _MOST_SECS)
        reference = jobs["reference"].losses if "reference" in jobs else {}
        report = {
            "layout": {key: getattr(options, key) for key in ("pp", "dp", "protection")},
            **jobs["training"].report(reference, problem),
            "total_secs": time.monotonic() - began,
        }
        _show(console, report)
        if not report["good"]:
            kept = True
            _show_log(console, [*jobs.values()][-1].nodes)
            console.print(f"logs and events: {directory}", highlight=False, markup=False)
        if options.json is not None:
            text = json.dumps(report, indent=2) + "\n"
            sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)
        return report
    finally:
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)


@dataclass
class Life:
    """One life of the job, from the start of its trainers to their end, as their events tell of it."""

    ranks: set[int] = field(default_factory=set)  # that are attached
    tolerance: int | None = None
    first: dict[int, float] = field(default_factory=dict)  # when each rank had made its first step
    last_step: int = 0
    restored: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rank
    recovered: list[dict[str, Any]] = field(default_factory=list)
    committed: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    counters: dict[int, dict[str, Any]] = field(default_factory=dict)  # the newest of every rank

    @property
    def origin(self) -> dict[str, Any]:
        """Source, version and the slowest rank's seconds of the restore (``none`` if nothing had been
        committed); bytes by where they came from, all ranks together."""
        first: dict[str, Any] = next(iter(self.restored.values()), {"source": "none", "version": 0})
        came = Counter[str]()
        for fields in self.restored.values():
            came.update(fields["bytes_from"])
        secs = max((float(fields["secs"]) for fields in self.restored.values()), default=0.0)
        return {
            "source": first["source"],
            "version": first["version"],
            "load_secs": secs,
            "bytes_from": dict(came),
        }

    def parts_since(self, failed_at: float) -> dict[str, float]:
        """Seconds from the failure to the first step in their parts, as the node saw it that took longest:
        ``detection`` (until its launcher saw that a trainer had failed) and those of
        :data:`reft.node.report.PARTS`. Empty: no node that saw the failure is left."""
        seen = [fields for fields in self.recovered if fields["failed_unix_secs"] is not None]
        if not seen:
            return {}
        last = max(seen, key=lambda fields: float(fields["time"]))
        return {"detection": max(0.0, last["failed_unix_secs"] - failed_at), **last["secs"]}


class Job:
    """One run over local nodes: ``training`` with reft and the failures, ``reference`` without either."""

    def __init__(
        self, options: argparse.Namespace, name: str, directory: Path, memory: Path, say: Say
    ) -> None:
        self.losses = Losses()
        self.lives: dict[int, Life] = {}  # by number: 1 for the first, 0 where reft is not attached
        self.failures: list[Failure] = []
        self._steps, self._say = options.steps, say
        self._pending = list(options.kills) if name == "training" else []
        self._failed_in = 0  # the life in which nodes were lost last
        self._number_of: dict[str, int] = {}  # lives, by event file
        self._offsets: dict[str, int] = {}
        self._events, self._temporary = directory / "events", directory / "tmp"
        self._temporary.mkdir(parents=True)  # launchers that are killed leave files there
        trained = {
            "steps": options.steps,
            "stages": options.pp,
            "layers": LAYERS,
            "save_dir": str(directory / "checkpoints"),
            "deepspeed": deepspeed_config(options, protected=name == "training"),
        }
        self.nodes = Nodes(
            ["-m", "reft.tools.demo.train", json.dumps(trained)],
            f"demo-{name}",
            options.pp * options.dp,
            directory=directory,
            memory=memory,
            env={ENV_EVENTS: str(self._events), "TMPDIR": str(self._temporary)},
        )

    def run(self, deadline: float) -> str | None:
        """Run it to its end, or until ``deadline`` of ``time.monotonic``; its logs and events alone are left
        afterwards. Returns why it could not finish; None: it did."""
        try:
            with self.nodes:
                problem = self._watch(deadline)
                self.take_in()
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)
        if problem is None and self._pending:
            left = ", ".join(f"{kill.step}:{kill.node}" for kill in self._pending)
            return f"the failures {left} could not be injected: the job had already ended"
        return problem

    @property
    def last_step(self) -> int:
        return max((life.last_step for life in self.lives.values()), default=0)

    def _watch(self, deadline: float) -> str | None:
        failed_at: float | None = None
        while True:
            self.take_in()
            self._lose_nodes()
            now = time.monotonic()
            codes = {node.name: node.process.poll() for node in self.nodes.current.values()}
            if any(codes.values()):
                failed_at = failed_at or now
            ended = all(code is not None for code in codes.values())
            if failed_at is not None and (ended or now - failed_at > _END_SECS):
                failed = ", ".join(f"{name} (exit code {code})" for name, code in codes.items() if code)
                return f"the run of {self.nodes.job_id} ended after step {self.last_step}: {failed}"
            if ended:
                return None
            if now > deadline:
                return (
                    f"the time is up ({_MOST_SECS:.0f} s); the run of {self.nodes.job_id} has reached step "
                    f"{self.last_step} of {self._steps}"
                )
            time.sleep(_POLL_SECS)

    def _lose_nodes(self) -> None:
        """Make the failures that are due, all of one step at once, and replace what was lost."""
        number = max(self.lives, default=0)
        if not self._pending or number <= self._failed_in:
            return
        step = self.lives[number].last_step
        due = [kill for kill in self._pending if kill.step == self._pending[0].step <= step]
        if not due:
            return
        del self._pending[: len(due)]
        self._failed_in = number
        for kill in due:
            self.failures.append(Failure(step, kill.node, time.time()))
            lost = self.nodes.lose(kill.node)
            self._say(f"{lost.name} is killed, its memory is gone, in step {step + 1}", "bold red")
        for kill in due:
            node = self.nodes.start(kill.node)
            self._say(f"{node.name} starts in its place, with empty memory", "yellow")

    def take_in(self) -> None:
        """The events since the last call, in the order of their times. A line that is not whole yet is left
        for later; a killed process may leave one for good."""
        found = []
        for path in self._events.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.setdefault(path.name, 0))
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._offsets[path.name] += len(whole) + 1
                found += [(path.name, json.loads(line)) for line in whole.split(b"\n")]
        for file_name, event in sorted(found, key=lambda pair: float(pair[1]["time"])):
            process = file_name.partition("-")[2]  # RANK-PID.jsonl: reft and the script write a file each
            if event.get("rank", -1) >= 0:
                if event["event"] == "attached":
                    self._number_of[process] = event["incarnation"]
                self._take(event, self._number_of.get(process, 0))

    def _take(self, event: dict[str, Any], number: int) -> None:
        life, kind, rank = self.lives.setdefault(number, Life()), event["event"], event["rank"]
        step = event.get("step", 0)
        if kind == "attached":
            life.ranks.add(rank)
            life.tolerance = event["tolerance"]
            if len(life.ranks) == self.nodes.count:
                self._say(f"all ranks are attached, start {number}", "")
        elif kind == "restored":
            life.restored[rank] = event
            if len(life.restored) == self.nodes.count:
                from_ = life.origin
                parts = ", ".join(f"{k} {n / 1e6:.2f} MB" for k, n in from_["bytes_from"].items() if n)
                said = f"state of step {from_['version']} restored from {from_['source']}"
                self._say(f"{said} in {from_['load_secs']:.2f} s ({parts})", "bold magenta")
        elif kind == "recovered":
            life.recovered.append(event)
        elif kind == "commit":
            life.committed.add(step)
        elif kind == "skip":
            life.skipped.add(step)
        elif kind == "step":
            life.first.setdefault(rank, event["time"])
            life.last_step = max(life.last_step, step)
            if rank == 0 and (step % -(-self._steps // _MOST_STEP_LINES) == 0 or step == self._steps):
                committed = f"  snapshot {max(life.committed)}" if life.committed else ""
                self._say(f"step {step}/{self._steps}  loss {event['loss']:.6f}{committed}", "")
            if "loss_hex" in event:
                self.losses.setdefault(step, []).append(event["loss_hex"])
        if "taken" in event:
            life.counters[rank] = event

    # -- the verdict -----------------------------------------------------------------------------------

    def report(self, reference: Losses, problem: str | None) -> dict[str, Any]:
        """What this run and an undisturbed one left behind, as plain values.

        ``losses`` are those of steps 1 to ``steps`` that stand at the end (None: never reached);
        ``max_abs_loss_difference`` is over all times that a step was computed, 0.0 only if equal to the last
        bit (None: some loss is missing); ``good``: training finished, and not one bit differs.
        """

        def standing(losses: Losses) -> list[float | None]:
            steps = range(1, self._steps + 1)
            return [float.fromhex(losses[step][-1]) if step in losses else None for step in steps]

        lives = [self.lives[number] for number in sorted(self.lives)]
        counters = [c for life in lives for c in life.counters.values()]
        stalls = [c["stall_secs_median"] or 0.0 for c in counters]
        difference = loss_difference(self.losses, reference, self._steps)
        return {
            "steps": self._steps,
            "tolerance": next((life.tolerance for life in lives if life.tolerance is not None), None),
            "failures": [failure._asdict() for failure in self.failures],
            "recoveries": [self._recovery(*pair) for pair in pairwise(life for life in lives if life.first)],
            "losses": standing(self.losses),
            "reference_losses": standing(reference),
            "max_abs_loss_difference": difference,
            # The restored state counts once more; bytes are those of the rank where they are most.
            "snapshots": {
                "committed": sum(len(life.committed) for life in lives),
                "skipped": sum(len(life.skipped) for life in lives),
                "bytes_per_rank": max((int(c["bytes_per_rank"]) for c in counters), default=0),
                "sent_bytes": max((sum(c["traffic"]["sent"].values()) for c in counters), default=0),
                "stall_secs_median": statistics.median(stalls) if stalls else None,
            },
            "problem": problem,
            "good": problem is None and difference == 0.0,
        }

    def _recovery(self, before: Life, life: Life) -> dict[str, Any]:
        """A failure during a recovery belongs to the recovery that succeeded in the end: it is counted from
        the first failure since the first step of the life before."""
        done = max(life.first.values())
        since = [f.time for f in self.failures if min(before.first.values()) <= f.time <= done]
        return {
            **life.origin,
            "lost_steps": before.last_step - life.origin["version"],
            "failure_to_step_secs": done - min(since) if since else None,
            "failure_to_step": life.parts_since(min(since)) if since else {},
        }


def loss_difference(losses: Losses, reference: Losses, steps: int) -> float | None:
    """Largest absolute difference over all steps; also between two computations of one step."""
    worst = 0.0
    for step in range(1, steps + 1):
        found, expected = set(losses.get(step, ())), set(reference.get(step, ()))
        if not found or not expected:
            return None
        for one, other in product(found, expected):
            if one != other:
                difference = abs(float.fromhex(one) - float.fromhex(other))
                # Unequal bits never count as equal: not NaN against a number, not 0.0 against -0.0.
                worst = max(worst, math.inf if math.isnan(difference) else difference or math.ulp(0.0))
    return worst


def _show_log(console: Console, nodes: Nodes) -> None:
    """The end of one log that tells most; a failure of all is told alike by all."""
    node = min(nodes.started, key=lambda n: (n not in nodes.current.values(), not n.process.poll()))
    console.print(f"\nthe end of {node.log}:", style="bold", highlight=False)
    lines = node.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    console.print("\n".join(lines), markup=False, highlight=False)


def _show(console: Console, report: dict[str, Any]) -> None:
    console.print()
    for recovery in report["recoveries"]:
        resumed = f"resumed from {recovery['source']} at step {recovery['version']}"
        if recovery["source"] == "none":
            resumed = "started again: nothing had been committed"
        after = "NO failure had been made"
        if (secs := recovery["failure_to_step_secs"]) is not None:
            after = f"the next step was done {secs:.1f} s after the failure"
        if parts := describe_parts(recovery["failure_to_step"]):
            after += f" ({parts})"
        lost, load_secs = recovery["lost_steps"], recovery["load_secs"]
        console.print(Text(f"recovery: {resumed}, {lost} step(s) lost, loaded in {load_secs:.2f} s; {after}"))
    s = report["snapshots"]
    stall = "" if s["stall_secs_median"] is None else f", {s['stall_secs_median'] * 1e3:.1f} ms each"
    console.print(
        f"snapshots: {s['committed']} committed, {s['skipped']} skipped{stall} of the training thread, "
        f"{s['bytes_per_rank'] / 2**20:.1f} MiB per rank and version, of which it sends "
        f"{s['sent_bytes'] / 2**20:.2f} to other nodes",
        highlight=False,
    )
    console.print(Text(_verdict(report), style="bold green" if report["good"] else "bold red"))


def _verdict(report: dict[str, Any]) -> str:
    difference = report["max_abs_loss_difference"]
    if report["problem"] is not None:
        return f"FAILED: {report['problem']}"
    if difference is None:
        return "FAILED: some losses are missing"
    if difference:
        pairs = enumerate(zip(report["losses"], report["reference_losses"], strict=True), 1)
        wrong = next((str(step) for step, (a, b) in pairs if a != b), "?")
        return f"FAILED: losses differ by up to {difference:.3g}; first at step {wrong}"
    return (
        f"all {report['steps']} losses equal those of the undisturbed run without reft, to the last bit "
        f"({len(report['failures'])} failure(s), {report['total_secs']:.0f} s in all)"
    )


def _stop(number: int, frame: FrameType | None) -> None:
    """The first signal to stop ends the demonstration; later ones do not disturb the tidying up."""
    for each in _STOPS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
