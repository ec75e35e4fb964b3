"""The command line of ``reft demo``: what is not given is derived, what is impossible is refused.

argparse, not typer as in :mod:`reft.cli`: the parser only collects what was given; degrees and nodes are
derived from each other afterwards, which no parser of annotated functions does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reft.config_read import parse_block
from reft.errors import ConfigError
from reft.grid import Degrees
from reft.naming import BLOCK_NAME
from reft.refusal import Parser
from reft.tools.demo.cluster import KillKind

_STEPS = 24
LAYERS = 4
"""Blocks of the model."""
_NODES = 4


@dataclass(frozen=True, order=True)
class Kill:
    """One failure to make: node ``node`` fails while step ``step + 1`` is computed."""

    step: int
    node: int


@dataclass(frozen=True)
class DemoOptions:
    """One complete command line.

    Attributes:
        nodes: launchers, each with a memory directory of its own.
        procs_per_node: trainers per node.
        degrees: of parallelism; their product is ``nodes * procs_per_node``.
        steps: optimizer steps.
        kills: failures, by step; those of one step happen at once.
        kill_kind: how a node fails.
        persist_interval: steps between checkpoints on disk; 0: none.
        memory_dir: where the nodes' memory directories are made.
        json: where the report goes; ``-`` is standard output.
        keep_logs: where logs and events are kept.
        timeout_secs: for all of it.
    """

    nodes: int
    procs_per_node: int
    degrees: Degrees
    steps: int
    kills: tuple[Kill, ...]
    kill_kind: KillKind
    zero: int
    dtype: str
    protection: str
    copies: int | None
    interval: int
    persist_interval: int
    dropout: float
    seed: int
    memory_dir: Path
    json: str | None
    keep_logs: Path | None
    timeout_secs: float

    def reft_block(self, persist_dir: Path) -> dict[str, Any]:
        """The ``reft`` block of the disturbed run."""
        block: dict[str, Any] = {
            "enabled": True,
            "interval_steps": self.interval,
            "protection": self.protection,
            "allow_unprotected": True,
        }
        if self.copies is not None:
            block["copies"] = self.copies
        if self.persist_interval:
            block["persist"] = {"dir": str(persist_dir), "interval_steps": self.persist_interval}
        return block

    def trainer_options(self, save_dir: Path, block: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What :func:`reft.tools.demo.train.train` takes; the two runs differ in the block alone."""
        zero: dict[str, Any] = {"stage": self.zero}
        if self.zero and self.protection.endswith("+aor"):
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
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        if self.dtype == "bf16":
            config["data_types"] = {"grad_accum_dtype": "fp32" if self.zero else "bf16"}
        if block is not None:
            config[BLOCK_NAME] = dict(block)
        return {
            "steps": self.steps,
            "seed": self.seed,
            "dropout": self.dropout,
            "stages": self.degrees.pp,
            "save_dir": str(save_dir),
            "deepspeed": config,
        }


def parse(argv: Sequence[str]) -> DemoOptions:
    """Parse, complete and check a command line.

    Raises:
        ConfigError: something does not fit together; says what to write.
        SystemExit: argparse's own refusals, and ``--help``.
    """
    args = _parser().parse_args(list(argv))
    if args.steps < 1:
        raise ConfigError(f"--steps is {args.steps}; write a positive number of optimizer steps")
    nodes, procs, degrees = derive_layout(args.nodes, args.procs_per_node, args.pp, args.dp)
    options = DemoOptions(
        nodes=nodes,
        procs_per_node=procs,
        degrees=degrees,
        steps=args.steps,
        kills=_kills(args.kill, args.steps, nodes),
        kill_kind=KillKind(args.kill_kind),
        zero=args.zero,
        dtype=args.dtype,
        protection=args.protection,
        copies=args.copies,
        interval=args.interval,
        persist_interval=args.persist_interval,
        dropout=args.dropout,
        seed=args.seed,
        memory_dir=args.memory_dir,
        json=args.json,
        keep_logs=args.keep_logs,
        timeout_secs=args.timeout,
    )
    _check(options)
    return options


def derive_layout(
    nodes: int | None, procs: int | None, pp: int | None, dp: int | None
) -> tuple[int, int, Degrees]:
    """Complete nodes, processes per node and degrees so that the products agree.

    Raises:
        ConfigError: they cannot; says what was found and what to change.
    """
    given = {"--nodes": nodes, "--procs-per-node": procs, "--pp": pp, "--dp": dp}
    for name, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; write a positive integer")
    if pp is not None and dp is not None:
        nodes, procs = _derive_nodes(nodes, procs, pp * dp)
    nodes, procs = nodes or _NODES, procs or 1
    world = nodes * procs
    if pp is None and dp is not None:
        pp = max(1, world // dp)
    elif pp is None:
        # Two replicas at least: without them nothing in memory survives a lost node.
        pp = 2 if world % 2 == 0 and world >= 4 else 1
    dp = dp if dp is not None else max(1, world // pp)
    if pp * dp != world:
        raise ConfigError(
            f"found {nodes} node(s) x {procs} process(es) = {world} trainers; --pp {pp} x --dp {dp} "
            f"needs {pp * dp}. Change the degrees, --nodes or --procs-per-node, or leave some of "
            f"them out: they are derived"
        )
    return nodes, procs, Degrees(pp, dp, 1)


def _derive_nodes(nodes: int | None, procs: int | None, world: int) -> tuple[int, int]:
    """Nodes and processes per node for ``world`` trainers; those that are given stand."""
    if nodes is None:
        procs = procs or 1
        return max(1, world // procs), procs
    return nodes, procs if procs is not None else max(1, world // nodes)


def _kills(text: str | None, steps: int, nodes: int) -> tuple[Kill, ...]:
    """``"9:1,14:0"`` to failures, by step."""
    if text is None:
        return (Kill(max(1, steps * 3 // 8), min(1, nodes - 1)),) if steps > 1 else ()
    if text.strip() == "none":
        return ()
    kills = []
    for part in text.split(","):
        try:
            step, node = (int(number) for number in part.split(":"))
        except ValueError as error:
            raise ConfigError(
                f"--kill is {text!r}; expected STEP:NODE[,STEP:NODE...] such as 9:1,14:0, or none"
            ) from error
        if not 1 <= step < steps:
            raise ConfigError(
                f"--kill {part} is at step {step}; expected a step from 1 to {steps - 1}, since a node fails "
                f"while the step after it is computed and --steps is {steps}. Change the step, or --steps"
            )
        if not 0 <= node < nodes:
            raise ConfigError(f"--kill {part} names node {node}; there are nodes 0 to {nodes - 1}")
        kills.append(Kill(step, node))
    if len(set(kills)) < len(kills):
        raise ConfigError(f"--kill is {text!r}: a node can fail only once in a step; remove the repetition")
    return tuple(sorted(kills))


def _check(options: DemoOptions) -> None:
    """What the trainers would refuse is refused here, before anything is started."""
    for name, value in (("--interval", options.interval), ("--timeout", options.timeout_secs)):
        if value <= 0:
            raise ConfigError(f"{name} is {value}; write a positive number")
    if options.persist_interval < 0:
        raise ConfigError(f"--persist-interval is {options.persist_interval}; write 0 for none, or more")
    if not 0 <= options.dropout < 1:
        raise ConfigError(f"--dropout is {options.dropout}; write a number from 0 to below 1")
    if options.degrees.pp > LAYERS:
        raise ConfigError(
            f"the model has {LAYERS} layers, but --pp {options.degrees.pp} needs one per stage; lower --pp"
        )
    if not os.access(options.memory_dir, os.W_OK):
        raise ConfigError(f"--memory-dir {options.memory_dir} cannot be written; give another directory")
    config = parse_block(options.reft_block(Path("persist")))
    if not config.chooses and config.scheme.parities:
        config.scheme.check_room(options.degrees.dp)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="reft demo",
        allow_abbrev=False,
        description="Train a small transformer over several nodes on this machine, let nodes fail in "
        "mid-step, watch the job go on from its peers' memory, and compare every loss, bit by bit, with the "
        "same job run undisturbed and without reft. Exit code 0 only if all of them are equal.",
    )
    _add_layout(parser.add_argument_group("layout; what is left out is derived"))
    _add_failures(parser.add_argument_group("failures"))
    _add_training(parser.add_argument_group("training"))
    _add_protection(parser.add_argument_group("protection"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_layout(group: Any) -> None:
    group.add_argument("--nodes", type=int, metavar="N", help=f"nodes (default: {_NODES})")
    group.add_argument("--procs-per-node", type=int, metavar="N", help="trainers per node (default: 1)")
    group.add_argument("--pp", type=int, metavar="N", help="pipeline stages (default: 2)")
    group.add_argument("--dp", type=int, metavar="N", help="replicas (default: 2)")


def _add_failures(group: Any) -> None:
    group.add_argument(
        "--kill",
        metavar="STEP:NODE[,...]",
        help="failures: the node fails while the step after STEP is computed; several at one STEP happen at "
        "once; 'none' for none (default: node 1 after three eighths of the steps)",
    )
    group.add_argument(
        "--kill-kind",
        choices=[str(kind) for kind in KillKind],
        default=str(KillKind.NODE),
        help="node: all its processes are killed and its memory is removed; process: one trainer is killed; "
        "stop: all its processes stand still, and run on once the node has been replaced (default: node)",
    )


def _add_training(group: Any) -> None:
    group.add_argument("--steps", type=int, default=_STEPS, metavar="N", help=f"default: {_STEPS}")
    group.add_argument("--zero", type=int, default=0, choices=(0, 1), help="ZeRO stage (default: 0)")
    group.add_argument("--dtype", default="fp32", choices=("fp32", "fp16", "bf16"), help="default: fp32")
    group.add_argument(
        "--dropout", type=float, default=0.1, metavar="P", help="so that random states matter (default: 0.1)"
    )
    group.add_argument("--seed", type=int, default=1234, metavar="N", help="default: 1234")


def _add_protection(group: Any) -> None:
    group.add_argument(
        "--protection",
        default="arc",
        help="arc, aec, rs:K, arc+aec, arc:A+rs:K, none, or auto, which chooses; with +aor peers recompute "
        "ZeRO-1 partitions (%(default)s)",
    )
    group.add_argument("--copies", type=int, metavar="K", help="redundant copies (default: 1)")
    group.add_argument(
        "--interval", type=int, default=1, metavar="N", help="steps between snapshots (default: 1)"
    )
    group.add_argument(
        "--persist-interval",
        type=int,
        default=0,
        metavar="N",
        help="steps between checkpoints on disk; failures wait for the first; 0 for none (default: 0)",
    )
    group.add_argument(
        "--memory-dir",
        type=Path,
        default=Path("/dev/shm")
        if os.access("/dev/shm", os.W_OK)
        else Path(os.environ.get("TMPDIR", "/tmp")),
        metavar="DIR",
        help="where the nodes' memory directories are made (default: %(default)s)",
    )


def _add_output(group: Any) -> None:
    group.add_argument("--json", metavar="FILE", help="write the report there; - is standard output")
    group.add_argument("--keep-logs", type=Path, metavar="DIR", help="keep logs and events there")
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECS", help="for all of it (default: 600)"
    )
