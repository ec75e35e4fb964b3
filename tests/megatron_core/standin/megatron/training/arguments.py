"""The arguments, in which the loop counts."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

_args: list[Namespace] = []


def parse_args() -> Namespace:
    parser = ArgumentParser()
    for name, value in (
        *(
            ("micro-batch-size", 2),
            ("global-batch-size", 8),
            ("train-iters", 9),
            ("log-interval", 1),
        ),
        *(("eval-interval", 4), ("eval-iters", 2), ("exit-interval", 0), ("save-interval", 0)),
        *(("non-persistent-save-interval", 0), ("replication-jump", 0), ("replication-factor", 2)),
        ("samples", 512),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("save", "load", "non-persistent-ckpt-type", "non-persistent-local-ckpt-dir"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--rampup-batch-size", type=int, nargs=3)
    parser.add_argument("--dataloader-type", default="single")
    for name in (
        "finetune",
        "bf16",
        "use-distributed-optimizer",
        "replication",
        "perform-rl-step",
        "inprocess-restart",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    args.rank = int(os.environ.get("RANK", "0"))
    return args


def validate_args(args: Namespace) -> Namespace:
    if args.non_persistent_ckpt_type == "local":
        raise RuntimeError("nvidia_resiliency_ext is required for local checkpointing")
    args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
    _args[:] = [args]
    return args


def get_args() -> Namespace:
    return _args[0]
