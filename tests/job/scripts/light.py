"""A trainer without torch, for what concerns launcher and signals alone.

ARGS: end | exit CODE | raise | lose | uneven | needs TRAINERS | broken NODE | wait graceful|stubborn|plain
"""

import glob
import json
import os
import signal
import subprocess
import sys
import time

BEHAVIOUR, *ARGS = sys.argv[1:]


def record(event: str, **fields: object) -> None:
    path = os.path.join(os.environ["TEST_EVENTS"], f"worker-{os.getpid()}.jsonl")
    kept = {k: v for k, v in os.environ.items() if k.startswith(("REFT_", "TORCHELASTIC_RESTART"))}
    fields |= {"event": event, "pid": os.getpid(), "time": time.time(), "env": kept}
    fields["devices"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    with open(path, "a") as file:
        file.write(json.dumps(fields) + "\n")


def stop(number: int, _: object) -> None:
    record("signal", number=number)
    if ARGS == ["graceful"]:
        time.sleep(0.3)  # the last commit
        record("flushed")
        sys.exit(128 + number)


def train_without(node: str) -> None:
    """End well in a round without this node. In one with it, its second trainer fails, once the test says so, and
    takes the others along."""
    this_round = os.path.join(os.environ["TEST_EVENTS"], os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["REFT_NODE_ID"] != node:
        open(f"{this_round}-trains-{os.environ['RANK']}", "w").close()
    elif os.environ["LOCAL_RANK"] == "1":
        while not os.path.exists(os.path.join(os.environ["TEST_EVENTS"], "finish")):
            time.sleep(0.05)
        open(f"{this_round}-failed", "w").close()
        os._exit(1)
    while len(glob.glob(f"{this_round}-trains-*")) < int(os.environ["WORLD_SIZE"]):
        if os.path.exists(f"{this_round}-failed"):
            time.sleep(2.0)  # The launcher sees the other end first
            raise RuntimeError("[pair.cc:534] Connection closed by peer [10.0.0.1]:1234")
        time.sleep(0.05)


def train() -> None:
    if BEHAVIOUR == "exit":
        sys.exit(int(ARGS[0]))
    if BEHAVIOUR == "raise":
        raise ValueError("a bad sample")
    if BEHAVIOUR == "broken":
        train_without(*ARGS)
    if BEHAVIOUR == "uneven":
        ended = os.path.join(
            os.environ["TEST_EVENTS"], "ended-" + os.environ["TORCHELASTIC_RESTART_COUNT"]
        )
        if os.environ["RANK"] == "0":
            open(ended, "w").close()
            return
        while not os.path.exists(ended):  # until then it has its peer
            time.sleep(0.05)
        time.sleep(0.5)
    if BEHAVIOUR in ("lose", "uneven"):
        raise RuntimeError("[pair.cc:534] Connection closed by peer [10.0.0.1]:1234")
    if BEHAVIOUR == "needs" and os.environ["WORLD_SIZE"] != ARGS[0]:
        from reft.errors import SizeError

        raise SizeError(
            f"{os.environ['WORLD_SIZE']} replicas cannot share the batch; {ARGS[0]} can"
        )
    if BEHAVIOUR == "wait":
        # A loader's process, which nobody but its process group knows.
        subprocess.Popen(["sh", "-c", "trap '' TERM INT; sleep 300"])
        if ARGS != ["plain"]:
            signal.signal(signal.SIGTERM, stop)
            signal.signal(signal.SIGINT, stop)
        record("ready")
        while True:
            time.sleep(0.05)


record("start")
train()
