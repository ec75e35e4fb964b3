"""``reft demo``: trains on nodes of this machine, kills some of them, and compares every loss.

The losses are compared with those of a second, undisturbed run without reft. A node is a launcher
with its own memory directory and one trainer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from reft.config import parse_block
from reft.env import ENV_EVENTS
from reft.errors import ConfigError
from reft.job.local import LocalNode, LocalNodes, handle_stop_signals
from reft.job.rendezvous.server import RendezvousServer
from reft.naming import BLOCK_NAME
from reft.node.history import describe_parts
from reft.node.report import WAITING
from reft.refusal import Parser

EXIT_INTERRUPTED = 130
LAYERS = 4  # Number of blocks of the model
_MOST_SECS = 600.0  # Time limit of both runs together
_POLL_SECS = 0.01
_END_SECS = 15.0  # Time for the other launchers to end after one has failed
_MOST_STEP_LINES = 40
_SILENT_SECS = 5.0  # Time without output after which the job's activity is printed
_SOURCES = {
    "local": "the nodes' own memory",
    "peer": "peers",
    "copy": "peers",
    "parity": "peers' parities",
    "disk": "disk",
}
_LOG_LINES = 25
_MEMORY_DIR = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())

Say = Callable[[str, str], None]  # Function that prints a line in a style
Losses = dict[int, list[str]]  # Losses of each step as ``float.hex``, one for each time it ran


class NodeFailure(NamedTuple):
    """The loss of a node during the step that follows ``step``."""

    step: int
    node: int  # Index of the node
    time: float = 0.0  # Time of the loss in Unix seconds; 0: not yet


def main(argv: Sequence[str]) -> int:
    """Run the command ``reft demo``.

    Returns:
        The exit code: 0: training finished and all losses are equal to the last bit; 1: otherwise;
        130: stopped by a signal.

    Raises:
        ConfigError: the options contradict each other.
    """
    options = parse(argv)
    console = Console(stderr=options.json == "-", soft_wrap=True)
    handle_stop_signals()
    try:
        report = _run(options, console)
    except KeyboardInterrupt:
        console.print(
            "stopped; all processes are killed and their memory is removed", style="yellow"
        )
        return EXIT_INTERRUPTED
    return 0 if report["good"] else 1


# -- options ---------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line of ``reft demo``, and fill in defaults.

    Options that trainers would refuse later are refused here, before any process is started.

    Raises:
        ConfigError: the options contradict each other.
        SystemExit: argparse refuses an option, or ``--help`` is given.
    """
    parser = Parser(
        prog="reft demo",
        allow_abbrev=False,
        description="Train a small transformer over several nodes on this machine, kill nodes in "
        "the middle of a step, watch the job continue from its peers' memory, and compare every "
        "loss, bit by bit, with an undisturbed run of the same job without reft. The exit code is "
        "0 only if all losses are equal.",
    )
    for option, kind, default, metavar, says in (
        ("--pp", int, 2, "N", "pipeline stages"),
        ("--dp", int, 2, "N", "replicas; every trainer has a node of its own"),
        ("--steps", int, 24, "N", "optimizer steps"),
        (
            "--protection",
            str,
            "arc",
            "SCHEME",
            "as in the reft block: arc, aec, rs:K, ..., auto, none",
        ),
        ("--memory-dir", Path, _MEMORY_DIR, "DIR", "where to make the nodes' memory directories"),
        ("--json", str, None, "FILE", "write the report to FILE; - is standard output"),
    ):
        derived = "" if default is None else " (default: %(default)s)"
        parser.add_argument(
            option, type=kind, default=default, metavar=metavar, help=says + derived
        )
    parser.add_argument(
        "--kill",
        metavar="STEP:NODE[,...]",
        help="failures: NODE is lost while the step after STEP is computed; several failures at "
        "one STEP "
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
        raise ConfigError(
            f"--memory-dir {options.memory_dir} cannot be written; give another directory"
        )
    config = parse_block(_block(options))
    if not config.chooses and config.scheme.parities:
        config.scheme.check_room(options.dp)
    options.kills = _kills(options.kill, options.steps, options.pp * options.dp)
    return options


def _kills(text: str | None, steps: int, nodes: int) -> tuple[NodeFailure, ...]:
    """Parse failures such as ``"9:1,14:0"``; return them in the order of steps."""
    if text is None:
        return (NodeFailure(max(1, steps * 3 // 8), min(1, nodes - 1)),) if steps > 1 else ()
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
                f"--kill {part}: expected a step from 1 to {steps - 1}, since a node fails while "
                f"the step after it is computed, and one of the nodes 0 to {nodes - 1}"
            )
        kills.append(NodeFailure(step, node))
    if len(set(kills)) < len(kills):
        raise ConfigError(
            f"--kill is {text!r}: a node can fail only once in a step; remove the repetition"
        )
    return tuple(sorted(kills))


def _block(options: argparse.Namespace) -> dict[str, Any]:
    return {"enabled": True, "protection": options.protection, "allow_unprotected": True}


def deepspeed_config(options: argparse.Namespace, *, protected: bool) -> dict[str, Any]:
    """Make DeepSpeed's configuration, with the ``reft`` block if ``protected``."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    return config | ({BLOCK_NAME: _block(options)} if protected else {})


# -- the runs --------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run both trainings, compare them, and print the result; return the report.

    All memory and processes are removed; logs are kept only if the result is bad.
    """
    began = time.monotonic()

    def say(text: str, style: str = "") -> None:
        stamp = f"[{time.monotonic() - began:6.1f} s] "
        console.print(Text(stamp, style="dim") + Text(text, style=style), highlight=False)

    kept, directory = False, Path(tempfile.mkdtemp(prefix="reft-demo-"))
    kills = ", ".join(f"node {k.node} in step {k.step + 1}" for k in options.kills) or "none"
    say(
        f"a small transformer over {options.pp * options.dp} nodes, PP{options.pp} x "
        f"DP{options.dp}, {options.steps} steps; failures: {kills}"
    )
    try:
        problem, jobs = None, dict[str, DemoJob]()
        for name, what in (
            ("training", "training with reft"),
            ("reference", "the same job, undisturbed, without reft"),
        ):
            if problem is None:
                say(f"--- {what}")
                where = {"prefix": "reft-demo-", "dir": str(options.memory_dir)}
                with tempfile.TemporaryDirectory(**where, ignore_cleanup_errors=True) as memory:
                    job = DemoJob(options, name, directory / name, Path(memory), say)
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
            _show_log(console, [*jobs.values()][-1])
            console.print(f"logs and events: {directory}", highlight=False, markup=False)
        if options.json is not None:
            text = json.dumps(report, indent=2) + "\n"
            sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)
        return report
    finally:
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)


class DemoJob:
    """One of the two trainings, on nodes of this machine.

    The training named "training" runs with reft and with failures, the one named "reference"
    without both.

    Attributes:
        losses: losses of every step so far.
        failures: nodes that were killed.
        tolerance: number of node losses that the protection survives; None if unknown.
        current: the node that now has each index, which may be a replacement.
    """

    def __init__(
        self, options: argparse.Namespace, name: str, directory: Path, memory: Path, say: Say
    ) -> None:
        self.losses = Losses()
        self.failures: list[NodeFailure] = []
        self.tolerance: int | None = None
        self.current: dict[int, LocalNode] = {}
        self._name, self._count = f"demo-{name}", options.pp * options.dp
        # Events that nodes write after the first step of each start, about the recovery before it
        self._recovered: list[dict[str, Any]] = []
        # Steps of which a version was committed, as rank 0 reports them
        self._committed = set[int]()
        self._skipped = 0  # Number of skipped versions, as rank 0 reports it
        # Events in which ranks report what they have restored since the last failure
        self._restored: list[dict[str, Any]] = []
        self._states: dict[str, str] = {}  # States of the launchers, by node
        self._steps, self._say_now, self._said_at = options.steps, say, time.monotonic()
        self._pending = list(options.kills) if name == "training" else []
        # Number of the job's newest start, and of the start in which nodes were last lost
        self._start = self._failed_in = 0
        self._step = 0  # Last step of the newest start
        self._offsets: dict[str, int] = {}
        self._directory, self._memory = directory, memory
        self._events = directory / "events"
        directory.mkdir()
        # Killed launchers leave temporary files behind, so give them a directory of their own. Keep
        # its path short: DataLoader socket paths inside it have a length limit.
        (temporary := memory / "tmp").mkdir()
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment |= {ENV_EVENTS: str(self._events), "TMPDIR": str(temporary)}
        # The training script is a module of reft and needs no module of the working directory.
        environment |= {"PYTHONSAFEPATH": "1"}
        self.nodes = LocalNodes(environment)
        trained = {
            "steps": options.steps,
            "stages": options.pp,
            "layers": LAYERS,
            "save_dir": str(directory / "checkpoints"),
            "deepspeed": deepspeed_config(options, protected=name == "training"),
        }
        self._command = ["-m", "reft.tools.demo.train", json.dumps(trained)]

    def run(self, deadline: float) -> str | None:
        """Run to the end, or until ``deadline`` on the monotonic clock.

        Afterwards all processes are killed; logs and events remain.

        Returns:
            Why the run did not finish; None if it did.
        """
        # Serve the store in this process, so that even a SIGKILL leaves no store behind.
        with closing(RendezvousServer("127.0.0.1", 0)) as store:
            self._endpoint = store.endpoint
            try:
                for index in range(self._count):
                    self._start_node(index)
                problem = self._watch(deadline)
            finally:
                self.nodes.kill(*self.nodes.started)
        self.take_in()
        if problem is None and self._pending:
            left = ", ".join(f"{kill.step}:{kill.node}" for kill in self._pending)
            return f"the failures {left} could not be injected: the job had already ended"
        return problem

    # -- nodes -------------------------------------------------------------------------------------

    def _say(self, text: str, style: str = "") -> None:
        self._said_at = time.monotonic()
        self._say_now(text, style)

    def doing(self) -> str:
        """Describe what the job is doing while no step is completed."""
        names = [node.name for node in self.current.values()] or list(self._states)
        states = {self._states.get(name) for name in names}
        if not states - {None}:
            return "launchers start"
        if None in states or WAITING in states:
            return "nodes import torch and DeepSpeed before they fork trainers, and meet"
        if self._step:
            return (
                f"step {self._step + 1} is computed" if self._step < self._steps else "trainers end"
            )
        return "trainers build the model, and meet"

    def _start_node(self, index: int) -> LocalNode:
        """Start a launcher as node ``index``; if there was one before, as its replacement."""
        before = sum(node.name.partition(".")[0] == f"node{index}" for node in self.nodes.started)
        name = f"node{index}.{before}" if before else f"node{index}"
        arguments = [
            *("--nnodes", str(self._count), "--nproc-per-node", "1"),
            *(
                "--rdzv-endpoint",
                self._endpoint,
                "--rdzv-id",
                self._name,
                "--local-addr",
                "127.0.0.1",
            ),
            *("--node-id", name, "--rank-order", "across-nodes"),
            *("--max-restarts", "0"),  # A lost node does not count as a restart
        ]
        log = self._directory / f"{name}.log"
        node = self.nodes.start(name, self._memory / name, log, arguments, self._command)
        self.current[index] = node
        return node

    def _watch(self, deadline: float) -> str | None:
        failed_at: float | None = None
        while True:
            self.take_in()
            self._lose_nodes()
            now = time.monotonic()
            if now - self._said_at > _SILENT_SECS:
                self._say(f"... {self.doing()}", "dim")
            codes = {node.name: node.process.poll() for node in self.current.values()}
            if any(codes.values()):
                failed_at = failed_at or now
            ended = all(code is not None for code in codes.values())
            if failed_at is not None and (ended or now - failed_at > _END_SECS):
                failed = ", ".join(
                    f"{name} (exit code {code})" for name, code in codes.items() if code
                )
                return f"the run of {self._name} ended after step {self._step}: {failed}"
            if ended:
                return None
            if now > deadline:
                return (
                    f"the time is up ({_MOST_SECS:.0f} s); the run of {self._name} has reached "
                    f"step {self._step} of {self._steps}"
                )
            time.sleep(_POLL_SECS)

    def _lose_nodes(self) -> None:
        """Kill all nodes whose failure is due in the present step, and start their replacements."""
        due = [kill for kill in self._pending if kill.step == self._pending[0].step <= self._step]
        if not due or self._start <= self._failed_in:
            return
        del self._pending[: len(due)]
        self._failed_in = self._start
        self._restored.clear()
        for kill in due:
            self.failures.append(NodeFailure(self._step, kill.node, time.time()))
            lost = self.current[kill.node]
            self.nodes.lose(lost)
            self._say(
                f"{lost.name} is killed, its memory is gone, in step {self._step + 1}", "bold red"
            )
        for kill in due:
            node = self._start_node(kill.node)
            said = (
                "with empty memory, and cold: its launcher and its trainer import torch and "
                "DeepSpeed first"
            )
            self._say(
                f"{node.name} starts in its place, {said}. A spare node would have done so",
                "yellow",
            )

    def take_in(self) -> None:
        """Process the events that were written since the last call, in the order of their times.

        An incomplete line is left for the next call. A killed process may never complete its line.
        """
        found: list[dict[str, Any]] = []
        for path in self._events.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.setdefault(path.name, 0))
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._offsets[path.name] += len(whole) + 1
                found += map(json.loads, whole.split(b"\n"))
        for event in sorted(found, key=lambda event: float(event["time"])):
            if event.get("rank", -1) >= 0:
                self._take(event)
            elif event["event"] == "launcher":
                self._states[event["node"]] = event["state"]
                if event["state"] == WAITING:
                    # The job is about to restart, so the step of the previous run no longer counts
                    self._step = 0

    def _take(self, event: dict[str, Any]) -> None:
        kind, step, first = event["event"], event.get("step", 0), event["rank"] == 0
        if kind == "recovered":
            self._recovered.append(event)
        elif kind == "restored":
            self._restored.append(event)
            if len(self._restored) == self._count:
                self._say_restored()
        elif kind == "step":
            self.losses.setdefault(step, []).append(event["loss_hex"])
        if not first:
            return
        if kind == "commit":
            self._committed.add(step)
        elif kind == "skip":
            self._skipped += 1
        elif kind == "attached":
            self._start, self._step, self.tolerance = event["incarnation"], 0, event["tolerance"]
            self._say(f"reft is attached, start {self._start}", "")
        elif kind == "step":
            self._step = step
            if step % -(-self._steps // _MOST_STEP_LINES) == 0 or step == self._steps:
                self._say(f"step {step}/{self._steps}  loss {event['loss']:.6f}", "")

    def _say_restored(self) -> None:
        """Print a summary once all ranks have restored the same version."""
        events, self._restored = self._restored, []
        found = Counter[str]()
        for event in events:
            for source, nbytes in event["bytes_from"].items():
                found[_SOURCES.get(source, source)] += nbytes
        parts = ", ".join(
            f"{nbytes / 1e6:.2f} MB from {source}" for source, nbytes in found.items() if nbytes
        )
        secs = max(event["secs"] for event in events)
        version, source = events[0]["version"], events[0]["source"]
        text = f"state of step {version} restored from {source} in {secs:.2f} s: {parts}"
        self._say(text, "bold magenta")

    # -- the verdict -------------------------------------------------------------------------------

    def report(self, reference: Losses, problem: str | None) -> dict[str, Any]:
        """Compare this run with the undisturbed one.

        Args:
            reference: losses of the undisturbed run.
            problem: why a run did not finish; None if both did.

        Returns:
            A JSON object. ``losses``: the loss of each step as last computed, None if the step was
            never reached. ``max_abs_loss_difference``: over all steps and all their computations;
            0.0 only if all are equal to the last bit, None if a loss is missing. ``good``: whether
            both runs finished and no bit differs.
        """

        def standing(losses: Losses) -> list[float | None]:
            steps = range(1, self._steps + 1)
            return [float.fromhex(losses[step][-1]) if step in losses else None for step in steps]

        difference = loss_difference(self.losses, reference, self._steps)
        return {
            "steps": self._steps,
            "tolerance": self.tolerance,
            "failures": [failure._asdict() for failure in self.failures],
            "recoveries": list(self._recoveries()),
            "losses": standing(self.losses),
            "reference_losses": standing(reference),
            "max_abs_loss_difference": difference,
            "snapshots": {"committed": len(self._committed), "skipped": self._skipped},
            "problem": problem,
            "good": problem is None and difference == 0.0,
        }

    def _recoveries(self) -> Iterator[dict[str, Any]]:
        """Describe each recovery: at which step the job resumed, and how long that took.

        The seconds are those from the failure to the first completed step, as reported by the node
        that was last to complete it, among the nodes that observed the failure. They are divided
        into ``detection``, until the launcher saw that a trainer had failed, and the parts in
        :data:`reft.node.history.PARTS`.
        """
        after_failure = [event for event in self._recovered if event["failures"] or event["lost"]]
        for number in sorted({event["round"] for event in after_failure}):
            events = [event for event in after_failure if event["round"] == number]
            last = max(
                events, key=lambda event: (event["failed_unix_secs"] is not None, event["time"])
            )
            seen_at, step = last["failed_unix_secs"], last["resumed_step"] or 0
            made = [
                failure.time for failure in self.failures if seen_at and failure.time <= seen_at
            ]
            yield {
                "source": (last["resumed_from"] or "none").partition(",")[0],
                "version": step,
                "lost_steps": max(0, last["newest_step"] - step),
                "failure_to_step_secs": last["time"] - made[-1] if made else None,
                "failure_to_step": {"detection": seen_at - made[-1], **last["secs"]}
                if made
                else {},
            }


def loss_difference(losses: Losses, reference: Losses, steps: int) -> float | None:
    """Return the largest absolute difference over all steps and all computations of each step.

    None: a step has no loss in one of the runs.
    """
    worst = 0.0
    for step in range(1, steps + 1):
        found, expected = set(losses.get(step, ())), set(reference.get(step, ()))
        if not found or not expected:
            return None
        for one, other in product(found, expected):
            if one != other:
                difference = abs(float.fromhex(one) - float.fromhex(other))
                # Unequal bits must not give 0: count NaN as infinite, 0.0 against -0.0 as tiny.
                worst = max(
                    worst, math.inf if math.isnan(difference) else difference or math.ulp(0.0)
                )
    return worst


def _show_log(console: Console, job: DemoJob) -> None:
    """Print the end of the most informative log: preferably that of a running node that failed."""
    node = min(
        job.nodes.started, key=lambda n: (n not in job.current.values(), not n.process.poll())
    )
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
        console.print(
            Text(f"recovery: {resumed}, {recovery['lost_steps']} committed step(s) lost; {after}")
        )
    versions = report["snapshots"]
    console.print(
        f"snapshots: {versions['committed']} of {report['steps']} steps committed, "
        f"{versions['skipped']} skipped",
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
        f"all {report['steps']} losses equal those of the undisturbed run without reft, to the "
        f"last bit ({len(report['failures'])} failure(s), {report['total_secs']:.0f} s in all)"
    )
