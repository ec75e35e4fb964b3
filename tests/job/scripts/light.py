"""A trainer without torch, for what concerns launcher and signals alone.

ARGS: end | exit CODE | raise | lose | uneven | needs TRAINERS | wait graceful|stubborn|plain
"""

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


def train() -> None:
    if BEHAVIOUR == "exit":
        sys.exit(int(ARGS[0]))
    if BEHAVIOUR == "raise":
        raise ValueError("a bad sample")
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
