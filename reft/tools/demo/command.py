"""``reft demo``: the two runs, the verdict and what is left behind."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from reft.config_read import parse_block
from reft.env import ENV_EVENTS
from reft.errors import ConfigError
from reft.naming import BLOCK_NAME
from reft.node.history import describe_parts
from reft.refusal import Parser
from reft.tools.demo.cluster import KillKind, LocalCluster
from reft.tools.demo.history import History
from reft.tools.demo.job import Job, Kill, make_report

EXIT_INTERRUPTED = 130
LAYERS = 4  # Blocks of the model
_LOG_LINES = 25
_MEMORY_DIR = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def main(argv: Sequence[str]) -> int:
    """Command line of ``reft demo``. Returns 0: training finished and not one bit differs; 1: not so; 130:
    told to stop. Raises ConfigError: the options do not fit together."""
    options = parse(argv)
    console = Console(stderr=options.json == "-", soft_wrap=True)
    with _interruptible():
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
    options = _parser().parse_args(list(argv))
    for name in ("steps", "pp", "dp", "nodes", "timeout"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name} is {value}; write a positive number")
    world = options.pp * options.dp
    options.nodes = options.nodes or world
    if world % options.nodes:
        raise ConfigError(
            f"--pp {options.pp} x --dp {options.dp} = {world} trainers cannot be spread evenly over "
            f"{options.nodes} node(s); change one of them"
        )
    if options.pp > LAYERS:
        raise ConfigError(
            f"the model has {LAYERS} layers, but --pp {options.pp} needs one per stage; lower --pp"
        )
    if not os.access(options.memory_dir, os.W_OK):
        raise ConfigError(f"--memory-dir {options.memory_dir} cannot be written; give another directory")
    config = parse_block(reft_block(options))
    if not config.chooses and config.scheme.parities:
        config.scheme.check_room(options.dp)
    options.kills = _kills(options.kill, options.steps, options.nodes)
    options.kill_kind = KillKind(options.kill_kind)
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


def reft_block(options: argparse.Namespace) -> dict[str, Any]:
    return {"enabled": True, "protection": options.protection, "allow_unprotected": True}


def deepspeed_config(options: argparse.Namespace, *, protected: bool) -> dict[str, Any]:
    """The two runs differ in the block alone."""
    zero: dict[str, Any] = {"stage": options.zero}
    if options.zero and options.protection.endswith("+aor"):
        # What stage 1 needs to keep the gradients of other ranks' partitions; both runs do it so.
        zero |= {"reduce_scatter": False, "contiguous_gradients": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    if options.dtype != "fp32":
        config[options.dtype] = {"enabled": True}
    if options.dtype == "bf16":
        config["data_types"] = {"grad_accum_dtype": "fp32" if options.zero else "bf16"}
    return config | ({BLOCK_NAME: reft_block(options)} if protected else {})


def _parser() -> argparse.ArgumentParser:
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
        ("--dp", int, 2, "N", "replicas"),
        ("--nodes", int, None, "N", "nodes (default: one per trainer)"),
        ("--steps", int, 24, "N", "optimizer steps"),
        ("--protection", str, "arc", "SCHEME", "as in the reft block: arc, aec, rs:K, ..., auto, none"),
        ("--memory-dir", Path, _MEMORY_DIR, "DIR", "where to make the nodes' memory directories"),
        ("--json", str, None, "FILE", "write the report to FILE; - is standard output"),
        ("--keep-logs", Path, None, "DIR", "keep logs and events in DIR"),
        ("--timeout", float, 600.0, "SECS", "seconds for the whole demo"),
    ):
        derived = "" if default is None else " (default: %(default)s)"
        parser.add_argument(option, type=kind, default=default, metavar=metavar, help=says + derived)
    parser.add_argument("--zero", type=int, default=0, choices=(0, 1), help="ZeRO stage (default: 0)")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "fp16", "bf16"), help="default: fp32")
    parser.add_argument(
        "--kill",
        metavar="STEP:NODE[,...]",
        help="failures: NODE fails while the step after STEP is computed; several failures at one STEP "
        "happen together; 'none' for none (default: node 1 after three eighths of the steps)",
    )
    parser.add_argument(
        "--kill-kind",
        choices=[str(kind) for kind in KillKind],
        default=str(KillKind.NODE),
        help="node: all its processes are killed and its memory is removed; process: one trainer is killed; "
        "stop: all its processes are stopped, and continue once the node has been replaced (default: "
        "node)",
    )
    return parser


# -- the runs ---------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run, compare and report. Memory and processes are gone afterwards, logs are kept if it failed or if
    that was asked for."""
    began = time.monotonic()

    def say(text: str, style: str = "") -> None:
        stamp = f"[{time.monotonic() - began:6.1f} s] "
        console.print(Text(stamp, style="dim") + Text(text, style=style), highlight=False)

    kept, directory = options.keep_logs is not None, _log_directory(options.keep_logs)
    kills = ", ".join(f"node {k.node} in step {k.step + 1}" for k in options.kills) or "none"
    say(
        f"a small transformer over {options.nodes} nodes, PP{options.pp} x DP{options.dp}, ZeRO-"
        f"{options.zero}, {options.dtype}, {options.steps} steps; failures ({options.kill_kind}): {kills}"
    )
    try:
        problem, jobs = None, dict[str, Job]()
        for name, what in (
            ("training", "training with reft"),
            ("reference", "the same job, undisturbed, without reft"),
        ):
            if problem is None:
                say(f"--- {what}")
                memory = Path(tempfile.mkdtemp(prefix="reft-demo-", dir=options.memory_dir))
                try:
                    cluster = _cluster(options, name, directory / name, memory)
                    kills_here = options.kills if name == "training" else ()
                    deadline, kind = began + options.timeout, options.kill_kind
                    job = Job(cluster, options.steps, deadline, say, kills=kills_here, kind=kind)
                    jobs[name], problem = job, job.run()
                finally:
                    shutil.rmtree(memory, ignore_errors=True)
        report = {
            "layout": {
                key: getattr(options, key) for key in ("nodes", "pp", "dp", "zero", "dtype", "protection")
            },
            **make_report(
                options.steps,
                History.of(directory / "training" / "events"),
                History.of(directory / "reference" / "events"),
                jobs["training"].failures,
                problem,
            ),
            "total_secs": time.monotonic() - began,
        }
        _show(console, report)
        if not report["good"]:
            kept = True
            _show_log(console, [*jobs.values()][-1])
        if kept:
            console.print(f"logs and events: {directory}", highlight=False, markup=False)
        if options.json is not None:
            text = json.dumps(_finite(report), indent=2, allow_nan=False) + "\n"
            sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)
        return report
    finally:
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)


def _finite(value: Any) -> Any:
    """Numbers that JSON does not know are null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _log_directory(wanted: Path | None) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="reft-demo-"))
    directory = wanted.absolute()
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"--keep-logs {directory} is not empty; give a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _cluster(options: argparse.Namespace, name: str, directory: Path, memory: Path) -> LocalCluster:
    """The nodes of a run; the training has reft, the reference has not."""
    protected = name == "training"
    trained = {
        "steps": options.steps,
        "stages": options.pp,
        "layers": LAYERS,
        "save_dir": str(directory / "checkpoints"),
        "deepspeed": deepspeed_config(options, protected=protected),
    }
    # A trainer that dies by itself uses up a restart; a lost node uses none.
    own = len({k.step for k in options.kills}) if options.kill_kind is KillKind.PROCESS else 0
    restarts = str(own if protected else 0)
    return LocalCluster(
        command=["-m", "reft.tools.demo.train", json.dumps(trained)],
        directory=directory,
        nodes=options.nodes,
        procs_per_node=options.pp * options.dp // options.nodes,
        options=("--max-restarts", restarts, "--rank-order", "across-nodes"),
        env={ENV_EVENTS: str(directory / "events"), "TMPDIR": str(directory / "tmp")},
        job_id=f"demo-{name}",
        memory_root=memory,
    )


def _show_log(console: Console, job: Job) -> None:
    """The end of one log that tells most; a failure of all is told alike by all."""
    nodes = sorted(job.cluster.history, key=lambda node: (node.killed, not node.process.poll()))
    for path in [node.log_path for node in nodes][:1]:
        console.print(f"\nthe end of {path}:", style="bold", highlight=False)
        lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        console.print("\n".join(lines), markup=False, highlight=False)


def _show(console: Console, report: dict[str, Any]) -> None:
    console.print()
    for recovery in report["recoveries"]:
        console.print(Text(_recovery_text(recovery)))
    s = report["snapshots"]
    stall = "" if s["stall_secs_median"] is None else f", {s['stall_secs_median'] * 1e3:.1f} ms each"
    console.print(
        f"snapshots: {s['committed']} committed, {s['skipped']} skipped{stall} of the training thread, "
        f"{s['bytes_per_rank'] / 2**20:.1f} MiB per rank and version, of which it sends "
        f"{s['sent_bytes'] / 2**20:.2f} to other nodes",
        highlight=False,
    )
    console.print(Text(_verdict(report), style="bold green" if report["good"] else "bold red"))


def _recovery_text(recovery: dict[str, Any]) -> str:
    resumed = f"resumed from {recovery['source']} at step {recovery['version']}"
    if recovery["source"] == "none":
        resumed = "started again: nothing had been committed"
    after = "NO failure had been made"
    if recovery["failure_to_step_secs"] is not None:
        after = f"the next step was done {recovery['failure_to_step_secs']:.1f} s after the failure"
    parts = f" ({describe_parts(recovery['failure_to_step'])})" if recovery["failure_to_step"] else ""
    return (
        f"recovery: {resumed}, {recovery['lost_steps']} step(s) lost, "
        f"loaded in {recovery['load_secs']:.2f} s; {after}{parts}"
    )


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


@contextmanager
def _interruptible() -> Iterator[None]:
    """The first signal to stop ends the demonstration; later ones do not disturb the tidying up."""
    stopped = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
