"""The attacks of the storm: each strikes a live job once, within what the job is promised to survive."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.attack.jobs import asked
from tests.attack.storm_job import BrokenPromiseError, StormJob, StormSetup, step_of
from tests.faults.job import exchange, fill_up

_PAUSE_SECS = (0.5, 9.0)
_BACK_SECS = (0.0, 3.0)
_ENDING_SECS = 180.0
_FILLED_STEPS = 6
_COMMITS_AFTER_DAMAGE = 4


@dataclass
class Strike:
    job: StormJob  # under attack
    rng: Random  # decides what the seed decides
    fillable: bool  # a file system of their own holds the nodes' memory
    said: list[str] = field(default_factory=list)  # what was done, for the report

    def say(self, text: str) -> None:
        self.said.append(text)

    def node(self) -> int:
        return self.rng.choice(sorted(self.job.cluster.current))

    def another(self, index: int) -> int:
        return self.rng.choice([i for i in sorted(self.job.cluster.current) if i != index])

    def pause(self, span: tuple[float, float] = _BACK_SECS) -> None:
        time.sleep(self.rng.uniform(*span))


@dataclass(frozen=True)
class Attack:
    name: str  # for ``--kinds`` and the report
    strike: Callable[
        [Strike], None
    ]  # does it; what it starts is over when a later version is committed
    # whether it makes sense for a setup whose memory may be filled up, or not
    fits: Callable[[StormSetup, bool], bool] = lambda setup, fillable: True
    any_time: bool = (
        False  # also before the job has recovered from the one before: it costs no memory
    )


def trainer_gets(number: signal.Signals) -> Callable[[Strike], None]:
    """One trainer is killed, or stands still and nobody lets it run on: the job has to find the hang."""

    def strike(s: Strike) -> None:
        index = s.node()
        trainers = s.job.cluster.trainers(index)
        if trainers:
            with suppress(OSError):
                os.kill(s.rng.choice(trainers).pid, number)
        s.say(f"of node {index}" if trainers else f"node {index} had no trainer")

    return strike


kill_trainer = trainer_gets(signal.SIGKILL)


def kill_launcher(s: Strike) -> None:
    index = s.node()
    process = s.job.cluster.current[index].process
    process.kill()
    process.wait()
    s.pause()
    s.job.cluster.restart_node(index)
    s.say(f"of node {index}, which came back")


def kill_nodes(s: Strike) -> None:
    number = s.rng.randint(1, s.job.setup.tolerance)
    lost = s.rng.sample(sorted(s.job.cluster.current), number)
    for index in lost:
        s.job.cluster.kill_node(index)
    s.pause()
    for index in lost:
        s.job.cluster.start_node(index)
    s.say(f"{lost}, with their memory; replaced")


def spare_takeover(s: Strike) -> None:
    index, seat = s.node(), len(s.job.cluster.current)
    spare = s.job.cluster.start_node(seat)
    try:
        if not s.job.wait(lambda: _is_spare(s.job, index, spare.node_id), "a spare that waits"):
            return
        s.job.cluster.kill_node(index)
    finally:
        del s.job.cluster.current[seat]
    s.job.cluster.current[index] = spare
    s.say(f"of node {index} by {spare.node_id}")


def _is_spare(job: StormJob, index: int, node_id: str) -> bool:
    said = asked("status", [job.cluster.current[index].memory_dir], job.cluster.job_id)
    return any(node["node"] == node_id and node["spare"] for node in said.get("nodes", ()))


def kill_daemon(s: Strike) -> None:
    index = s.node()
    daemon = s.job.cluster.status(index)
    with suppress(ProcessLookupError):
        if daemon is not None:
            os.kill(int(daemon["pid"]), signal.SIGKILL)
    s.say(f"of node {index}" if daemon else f"node {index} had none")


def kill_rendezvous(s: Strike) -> None:
    s.job.cluster.kill_rendezvous()
    s.pause()
    s.job.cluster.start_rendezvous(s.job.cluster.port)
    s.say("served again")


def cut_power(s: Strike) -> None:
    too = s.rng.random() < 0.5
    s.job.cluster.cut_power(rendezvous=too)
    s.say("of all nodes and the rendezvous" if too else "of all nodes")
    s.job.cluster.come_back()


def tell_to_stop(job: StormJob, number: signal.Signals) -> list[int | None]:
    for node in job.cluster.history:  # those that were replaced and ran on, too
        if node.running:
            node.process.send_signal(number)
    deadline = time.monotonic() + _ENDING_SECS
    while not job.ended:
        if time.monotonic() > deadline:
            raise BrokenPromiseError(
                f"{_ENDING_SECS:.0f} s after {number.name}: launchers {job.codes()}"
            )
        time.sleep(0.1)
    codes = job.codes()
    if not set(codes) <= {0, 128 + number}:
        raise BrokenPromiseError(
            f"after {number.name} the launchers ended with {codes}, not {128 + number}"
        )
    return codes


def stop_job(s: Strike) -> None:
    number = s.rng.choice([signal.SIGTERM, signal.SIGINT])
    codes = tell_to_stop(s.job, number)
    s.say(f"by {number.name}: launchers ended with {codes}")
    if any(codes):
        s.job.cluster.kill_rendezvous()  # its rendezvous is closed, a new run takes a new one
        s.job.cluster.come_back()


def pause_node(s: Strike) -> None:
    node = s.job.cluster.current[s.node()]
    s.job.cluster.signal_all(node.node_id, signal.SIGSTOP)
    secs = s.rng.uniform(*_PAUSE_SECS)
    time.sleep(secs)
    s.job.cluster.signal_all(node.node_id, signal.SIGCONT)
    s.say(f"{node.node_id} for {secs:.1f} s")


def pause_rendezvous(s: Strike) -> None:
    process = s.job.cluster.rendezvous
    process.send_signal(signal.SIGSTOP)
    secs = s.rng.uniform(*_PAUSE_SECS)
    time.sleep(secs)
    process.send_signal(signal.SIGCONT)
    s.say(f"for {secs:.1f} s")


def freeze_node(s: Strike) -> None:
    """A host that hangs is replaced, and then goes on as if nothing had been."""
    index = s.node()
    node = s.job.cluster.current[index]
    s.job.cluster.signal_all(node.node_id, signal.SIGSTOP)
    after = s.job.under_way()
    s.job.cluster.start_node(index)
    s.say(f"{node.node_id}, replaced")
    s.job.wait_until_safe(after)
    if s.rng.random() < 0.5:
        s.job.cluster.signal_all(node.node_id, signal.SIGCONT)
        s.say("and then ran on")
    else:
        s.job.cluster.kill_all(node.node_id)
        s.say("and then died")


def flip_bits(job_dir: Path, rng: Random) -> str:
    arenas = _arenas(job_dir)
    for path in arenas:
        for _ in range(8):
            flip(path, rng)
    return f"flipped bits in {len(arenas)} arenas"


def tear_headers(job_dir: Path, rng: Random) -> str:
    arenas = _arenas(job_dir)
    for path in arenas:
        with path.open("r+b") as file:
            file.write(b"\xff" * 8192)
    return f"tore the headers of {len(arenas)} arenas"


def truncate(job_dir: Path, rng: Random) -> str:
    arenas = _arenas(job_dir)
    for path in arenas:
        os.truncate(path, rng.choice([0, 4096, path.stat().st_size // 2]))
    return f"truncated {len(arenas)} arenas"


def swap(job_dir: Path, rng: Random) -> str:
    arenas = _arenas(job_dir)
    if len(arenas) < 2:
        return "found less than two arenas to swap"
    one, other = rng.sample(arenas, 2)
    exchange(one, other)
    return f"swapped {one.name} and {other.name}"


def remove_arenas(job_dir: Path, rng: Random) -> str:
    arenas = _arenas(job_dir)
    for path in arenas:
        path.unlink(missing_ok=True)
    return f"removed {len(arenas)} arenas"


def remove_job_dir(job_dir: Path, rng: Random) -> str:
    shutil.rmtree(job_dir, ignore_errors=True)
    return "removed the job's directory"


def remove_root(job_dir: Path, rng: Random) -> str:
    shutil.rmtree(job_dir.parent, ignore_errors=True)
    return "removed the memory directory"


def _arenas(job_dir: Path) -> list[Path]:
    return sorted(job_dir.glob("*.arena"))


def flip(path: Path, rng: Random) -> None:
    at = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


Damage = Callable[[Path, Random], str]


def damaged_in_the_dark(damage: Damage) -> Callable[[Strike], None]:
    def strike(s: Strike) -> None:
        index = s.node()
        s.job.cluster.cut_power(rendezvous=s.rng.random() < 0.5)
        s.say(f"node {index}: {damage(s.job.cluster.job_dir(index), s.rng)} while all was dead")
        s.job.cluster.come_back()

    return strike


def damaged_alive(damage: Damage) -> Callable[[Strike], None]:
    """One node's memory is damaged while the job trains. It goes on; what it says is committed afterwards
    survives the loss of another node."""

    def strike(s: Strike) -> None:
        index = s.node()
        s.say(f"node {index}: {damage(s.job.cluster.job_dir(index), s.rng)} while it trained")
        if not s.job.wait_until_safe(s.job.under_way() + _COMMITS_AFTER_DAMAGE):
            return
        other = s.another(index)
        s.job.cluster.kill_node(other)
        s.job.cluster.start_node(other)
        s.say(f"then node {other} was lost")

    return strike


def fill_memory(s: Strike) -> None:
    root = s.job.cluster.memory_root
    assert root is not None
    filler = fill_up(root)
    try:
        if s.rng.random() < 0.5:
            kill_trainer(s)
        wanted = s.job.poll().last_step + _FILLED_STEPS
        life = s.job.live.current.number
        s.job.wait(
            lambda: s.job.poll().last_step >= wanted or s.job.live.current.number > life + 1,
            f"step {wanted} with a full tmpfs",
        )
    finally:
        filler.unlink(missing_ok=True)
    s.say("full, then not")


def lose_all_memory(s: Strike) -> None:
    if not s.job.wait(lambda: len(s.job.persisted()) >= 2, "two checkpoints on disk"):
        return
    s.job.cluster.cut_power(rendezvous=False)
    checkpoints = s.job.persisted()
    newest = checkpoints[-1]
    if s.rng.random() < 0.6:
        s.say(f"{newest.name}: {_damage_checkpoint(newest, s.rng)}")
        checkpoints.remove(newest)
    for index in s.job.cluster.current:
        shutil.rmtree(s.job.cluster.current[index].memory_dir, ignore_errors=True)
    expected = step_of(checkpoints[-1])
    s.job.new_chapter(expected)
    s.say(f"of all nodes; {expected} is the newest step on disk that is whole")
    s.job.cluster.come_back()


def _damage_checkpoint(checkpoint: Path, rng: Random) -> str:
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.suffix != ".json")
    path = rng.choice(files)
    how = rng.choice(["flip", "truncate", "remove"])
    if how == "remove":
        path.unlink()
    elif how == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    else:
        content = bytearray(path.read_bytes())
        content[-200] ^= 1 << rng.randrange(
            8
        )  # of the last block: nothing lies in what pads an arena
        path.write_bytes(content)
    return f"{how} {path.name}"


def stranger(s: Strike) -> None:
    kept = []
    for _ in range(s.rng.randint(1, 8)):
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", s.job.cluster.port), timeout=5)
            connection.sendall(s.rng.randbytes(s.rng.choice([1, 4, 100, 5000])))
            kept.append(connection)
    s.pause()
    for connection in kept:
        connection.close()
    s.say(f"{len(kept)} connections with random bytes")


def _damages(alive: bool, *damages: Damage) -> list[Attack]:
    wrap = damaged_alive if alive else damaged_in_the_dark
    return [
        Attack(f"{d.__name__.replace('_', '-')}-{'live' if alive else 'dark'}", wrap(d))
        for d in damages
    ]


ATTACKS = {
    attack.name: attack
    for attack in (
        Attack("kill-trainer", kill_trainer, any_time=True),
        Attack("kill-launcher", kill_launcher, any_time=True),
        Attack("kill-nodes", kill_nodes),
        Attack("spare-takeover", spare_takeover),
        Attack("kill-daemon", kill_daemon, any_time=True),
        Attack("kill-rendezvous", kill_rendezvous, any_time=True),
        Attack("cut-power", cut_power, any_time=True),
        Attack("stop-job", stop_job),
        Attack("pause-node", pause_node, any_time=True),
        Attack("pause-rendezvous", pause_rendezvous, any_time=True),
        Attack("stop-trainer", trainer_gets(signal.SIGSTOP)),
        Attack("freeze-node", freeze_node),
        *_damages(False, flip_bits, tear_headers, truncate, swap, remove_arenas, remove_root),
        *_damages(True, truncate, swap, remove_arenas, remove_job_dir, remove_root),
        Attack("fill-memory", fill_memory, fits=lambda setup, fillable: fillable),
        Attack(
            "lose-all-memory", lose_all_memory, fits=lambda setup, fillable: setup.persist_steps > 0
        ),
        Attack("stranger", stranger, any_time=True),
    )
}
