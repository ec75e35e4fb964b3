"""`reft scale N`: a running job goes to another number of nodes at a step boundary, and loses no step."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from reft.cli import EXIT_NOT_WELL, EXIT_WELL, main
from reft.grid import Coordinate, Degrees
from reft.job.rendezvous import scaling
from reft.job.rendezvous.membership import (
    Agreement,
    Event,
    GrantedScale,
    JobRules,
    MembershipState,
    Role,
    step,
)
from reft.job.rendezvous.membership import Node as Member
from reft.job.rendezvous.scaling import Scaler, ScaleSituation, leave_next, refusal, shortfall
from reft.job.signals import StopSignals
from reft.memory.jobdir import write_json
from reft.memory.scale_request import (
    SIZE_FILE,
    ScaleAnswer,
    ScaleRequest,
    Size,
    read_answer,
    write_request,
)
from reft.node.history import read_history
from reft.protect.codes import Scheme
from reft.refusal import EX_REFUSED
from reft.relayout.sizes import Sizes, find_job_sizes

from .cluster import WatchedCluster, cluster, deepspeed_json

CONFIG = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
OPTIONS = (
    *("--nnodes", "2:3", "--max-restarts", "0"),
    *(
        "--rdzv-conf",
        "keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=5,join_timeout=120",
    ),
)


def last_step(job: WatchedCluster, replicas: int) -> int:
    return max((e["step"] for e in job.events("trained", replicas=replicas)), default=0)


def trains(job: WatchedCluster, replicas: int, beyond: int, lives: int) -> int:
    """Wait until that many replicas have trained on; the step at which they began."""
    job.wait_until(
        lambda: (
            len(job.events("begins", replicas=replicas)) >= replicas * lives
            and last_step(job, replicas) > beyond + 3
        ),
        300,
        f"steps of {replicas} replicas",
    )
    return max(e["step"] for e in job.events("begins", replicas=replicas))


def undisturbed(steps: int) -> list[float]:
    """The mean losses of the job's steps, in one process without DeepSpeed."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(steps):
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(number))
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_losses(job: WatchedCluster) -> None:
    """Degrees differ in rounding alone, which Adam's first steps amplify."""
    losses: dict[tuple[int, int], list[float]] = {}
    for event in job.events("trained"):
        at = event["replicas"], event["step"]
        losses.setdefault(at, []).extend(float.fromhex(loss) for loss in event["losses"])
    wanted = undisturbed(max(trained for _, trained in losses))
    for (_, trained), found in losses.items():
        if len(found) == 6:  # of the last steps before a failure not all ranks may tell
            assert sum(found) / 6 == pytest.approx(wanted[trained - 1], rel=2e-2)


@pytest.mark.integration
@pytest.mark.parametrize(
    "zero", [{"stage": 1}, {"stage": 3, "sub_group_size": 100}], ids=["zero1", "zero3"]
)
def test_p3_a_job_goes_on_with_fewer_nodes_and_grows_back(
    tmp_path: Path, zero: dict[str, int]
) -> None:
    settings = deepspeed_json(tmp_path, **CONFIG | {"zero_optimization": zero})
    with cluster(tmp_path, "resized.py", settings, nodes=3, options=OPTIONS) as job:
        assert trains(job, 3, 0, lives=1) == 0

        job.kill_node(1)
        trained = last_step(job, 3)
        began = trains(job, 2, trained, lives=1)
        # Not from its beginning: a version is committed behind training, within a step or two.
        assert began > 0

        job.start_node(1)
        grown = trains(job, 3, last_step(job, 2), lives=2)
        # Told to end, the trainers committed the step that they were in: no step that was made is lost.
        assert grown in (last_step(job, 2), last_step(job, 2) + 1)

        job.finish()
        assert job.wait(240) == {0: 0, 1: 0, 2: 0}
        job.wait_until(job.none_left, 240, "the end of all processes")
        check_losses(job)
        told = {(e["was"], e["now"]) for e in job.events("resized")}
        assert told == {(3, 2), (2, 3)}


def options(nodes: str, join_secs: int) -> tuple[str, ...]:
    conf = f"keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=1,join_timeout={join_secs}"
    return ("--no-daemon", "--nnodes", nodes, "--max-restarts", "0", "--rdzv-conf", conf)


@pytest.mark.integration
def test_p3_a_number_that_is_refused_is_free_and_the_job_starts_with_another(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, "light.py", "needs", "3", nodes=2, options=options("2:3", 200)) as job:
        refused = (
            "SizeError: 2 replicas cannot share the batch; 3 can; another number of nodes may fit"
        )
        job.wait_until(lambda: all(refused in job.log(n) for n in range(2)), 240, "the refusals")
        assert "uses no restart" in job.log(0)
        job.start_node(2)
        assert job.wait(240) == {0: 0, 1: 0, 2: 0}
        assert len(job.events("start")) == 5, "two trainers were refused, three were not"
        assert "restarts used: 0 of 0" in job.log(2)


@pytest.mark.process
def test_where_all_nodes_that_may_come_are_refused_the_job_ends_as_misconfigured(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, "light.py", "needs", "3", nodes=2, options=options("2:2", 200)) as job:
        assert job.wait(240) == {0: EX_REFUSED, 1: EX_REFUSED}
        assert any("a restart would be refused again" in job.log(node) for node in range(2))
        assert len(job.events("start")) == 2


@pytest.mark.integration
def test_a_node_that_has_waited_long_enough_ends_alone(tmp_path: Path) -> None:
    """It never took part; those that wait longer meet without it."""
    patient = options("3:3", 200)
    with cluster(tmp_path, "light.py", "end", nodes=1, options=patient) as job:
        job.options = options("3:3", 2)
        hasty = job.start_node(1)
        assert hasty.process.wait(240) == 1
        assert "3 nodes did not join in 2 s" in job.log(1)
        job.options = patient
        for node in (1, 2):
            job.start_node(node)
        assert job.wait(240) == {0: 0, 1: 0, 2: 0}


def scale(job: WatchedCluster, asked_on: int, *arguments: str) -> int:
    memory = str(job.current[asked_on].memory_dir)
    return main(["scale", *arguments, "--memory-dir", memory, "--job", job.job_id, "--wait", "240"])


def goes_to(job: WatchedCluster, replicas: int, before: int, lives: int) -> None:
    """The job trains on with so many replicas, and every step that was made with ``before`` of them counts."""
    began = trains(job, replicas, last_step(job, before), lives)
    # Told to stop, the trainers end within the last step, before the script says that it was made.
    assert began in (last_step(job, before), last_step(job, before) + 1)
    steps = [e["step"] for e in job.events("trained", rank=0)]
    assert len(set(steps)) == len(steps), "a step was made twice"


@pytest.mark.integration
def test_p3_a_job_goes_to_fewer_nodes_as_it_is_told(tmp_path: Path) -> None:
    with cluster(
        tmp_path, "resized.py", deepspeed_json(tmp_path, **CONFIG), nodes=3, options=OPTIONS
    ) as job:
        trains(job, 3, 0, lives=1)
        assert scale(job, 0, "2", "--without", "node1") == EXIT_WELL
        assert job.current[1].process.wait(120) == 0
        assert not job.job_dir(1).exists(), "its memory is needed no more"
        goes_to(job, 2, 3, lives=1)
        job.finish()
        assert job.wait(240) == {0: 0, 1: 0, 2: 0}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_p3_a_job_goes_to_fewer_nodes_and_back_as_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster(
        tmp_path, "resized.py", deepspeed_json(tmp_path, **CONFIG), nodes=3, options=OPTIONS
    ) as job:
        trains(job, 3, 0, lives=1)
        for wrong, why in [("1", "give a number from 2 to 3"), ("4", "give a number from 2 to 3")]:
            assert scale(job, 0, wrong) == EXIT_NOT_WELL
            assert why in capsys.readouterr().out
        assert scale(job, 0, "2", "--without", "node9") == EXIT_NOT_WELL
        assert "no node node9 trains" in capsys.readouterr().out
        assert not job.events("begins", replicas=2)

        assert scale(job, 0, "2", "--without", "node1") == EXIT_WELL
        assert "the job continues with 2 nodes" in capsys.readouterr().out
        assert job.current[1].process.wait(120) == 0
        assert not job.job_dir(1).exists(), "its memory is needed no more"
        goes_to(job, 2, 3, lives=1)
        last = read_history(job.job_dir(0))[-1]
        assert (last.left, last.lost) == (["node1"], [])

        assert scale(job, 0, "3") == EXIT_NOT_WELL
        assert "2 train and none wait" in capsys.readouterr().out
        job.start_node(1)
        job.wait_until(lambda: board_says_spare(job, "node1.1"), 120, "a node that waits")
        assert len(job.events("begins", replicas=3)) == 3, "it waits: two nodes were asked for"
        assert scale(job, 2, "3") == EXIT_WELL
        goes_to(job, 3, 2, lives=2)

        job.signal_node(0, signal.SIGUSR1)
        assert job.current[0].process.wait(120) == 0
        goes_to(job, 2, 3, lives=2)

        job.finish()
        assert job.wait(240) == {0: 0, 1: 0, 2: 0}
        job.wait_until(job.none_left, 240, "the end of all processes")


def board_says_spare(job: WatchedCluster, node: str) -> bool:
    path = job.job_dir(2) / "board.json"
    nodes: list[Any] = json.loads(path.read_text())["nodes"] if path.exists() else []
    return any(told["node"] == node and told["spare"] for told in nodes)


NOW = ScaleSituation(1, 6, tuple("abc"), spares=2, workers=2, tolerance=1, degrees=Degrees(2, 3, 1))


@pytest.mark.parametrize(
    ("nodes", "without", "now", "why"),
    [
        (2, (), NOW, ""),
        (5, (), NOW, ""),
        (3, (), NOW, ""),
        (1, ("b", "c"), NOW, ""),
        (7, (), NOW, "--nnodes 1:6"),
        (6, (), NOW, "3 train and 2 wait: start `reft launch` on 1 more"),
        (2, (), replace(NOW, tolerance=None), "nothing is committed"),
        (2, (), replace(NOW, tolerance=0), "survives the loss of none"),
        (2, (), replace(NOW, tolerance=-1), "survives the loss of none"),
        (4, (), replace(NOW, tolerance=0), ""),
        (3, ("a", "b"), replace(NOW, tolerance=2), ""),
        (2, ("d",), NOW, "no node d trains"),
        (2, ("a", "b"), NOW, "2 nodes were named to leave, but 1 leave"),
        (5, ("a",), NOW, "but 0 leave"),
        (3, ("a",), NOW, ""),
        (3, ("a",), replace(NOW, spares=0), "named to be replaced, and none wait"),
        (
            3,
            ("a", "b"),
            NOW,
            "named to be replaced at once, and now the job survives the loss of 1",
        ),
        (3, ("a",), replace(NOW, tolerance=0), "survives the loss of none"),
        (3, ("d",), NOW, "no node d trains"),
        (
            2,
            (),
            replace(NOW, workers=1),
            "2 trainers, which do not make whole replicas of 2 stages x 2 slices",
        ),
        (2, (), replace(NOW, size=Size("", 12, 2)), ""),
        (5, (), replace(NOW, size=Size("", 12, 2)), "5 replicas cannot share the 12 samples"),
        (
            2,
            (),
            replace(NOW, size=Size("because", 12, 2)),
            "keeps its data-parallel degree of 3: because",
        ),
        (3, (), replace(NOW, size=Size("because", 12, 2)), ""),
        (2, (), replace(NOW, parities=Scheme.parse("rs:2")), "at least 3 data-parallel members"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    nodes: int, without: tuple[str, ...], now: ScaleSituation, why: str
) -> None:
    if now.workers == 1:
        now = replace(now, degrees=Degrees(2, 3, 2))
    order = ScaleRequest(1, nodes, without)
    said = refusal(order, now) or shortfall(order, now)
    assert why in said
    assert bool(why) == bool(said)


def in_ring(number: int, *, batch: int, micro: int) -> ScaleSituation:
    """So many nodes of a replica each, each of which keeps a copy of the one before."""
    ranks = tuple(range(number))
    members = tuple(f"host{rank}/1/0" for rank in ranks)
    sizes = Sizes((), scheme="arc", members=members, domains=ranks, groups=(ranks,))
    nodes, degrees = tuple("abcdefgh"[:number]), Degrees(1, number, 1)
    return ScaleSituation(
        1, number, nodes, 0, 1, 1, degrees, size=Size("", batch, micro), sizes=sizes
    )


THREE = in_ring(3, batch=12, micro=4)  # Two replicas could not share the batch
FOUR = in_ring(4, batch=12, micro=3)  # Three could not


def test_a_number_that_does_not_fit_is_refused_with_those_that_do() -> None:
    said = refusal(ScaleRequest(1, 2), THREE)
    assert "2 replicas cannot share the 12 samples" in said
    assert said.endswith("What fits the layout and the batch: 3 nodes, as now; `reft scale 1`")
    assert refusal(ScaleRequest(1, 2), replace(THREE, min_nodes=2)).endswith(
        "No other number of --nnodes 2:3 fits the layout and the batch"
    )


def test_p3_a_number_to_which_too_many_would_leave_at_once_is_refused_at_once() -> None:
    order = ScaleRequest(1, 1)
    said = refusal(order, THREE)
    assert "2 would leave at once" in said
    assert "the job survives the loss of 1." in said
    assert "`reft protect arc:2` makes it survive that" in said
    # It never survives so many: there is nothing to wait for.
    assert refusal(order, replace(THREE, tolerance=0))
    more = replace(THREE, sizes=replace(THREE.sizes or Sizes(), scheme="arc:2"))
    assert not refusal(order, more)
    assert "2 nodes would leave at once" in shortfall(order, more), "one of them is not there now"
    assert not shortfall(order, replace(more, tolerance=2))


def test_p3_nodes_leave_at_once_down_to_a_number_that_fits() -> None:
    named = refusal(ScaleRequest(1, 2, ("c", "d")), FOUR)
    assert named.endswith(": without --without, d and b would leave")
    for wanted in (1, 2):
        assert not refusal(ScaleRequest(1, wanted), FOUR)
        assert not shortfall(ScaleRequest(1, wanted), FOUR)
    assert leave_next(2, (), FOUR) == (3, 1)
    assert leave_next(1, (), FOUR) == (3, 1), "two first, then one of them"
    assert leave_next(2, ("a", "c"), FOUR) == (2, 0)
    assert leave_next(2, ("c", "d"), FOUR) == (), "the one's copy is the other's"
    assert leave_next(2, (), replace(FOUR, tolerance=0)) == (), "one is lost"
    assert leave_next(2, (), replace(FOUR, sizes=None)) == ()
    anyhow = replace(FOUR, size=None)
    assert leave_next(1, (), anyhow) == (3,), "one by one, and the last, where every number fits"


class Node:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = MembershipState()
        self.state.complete = True
        self.answers = True
        self.tolerance: int | None = 1
        self.degrees: Degrees | None = None
        self.board = None
        self.holders: dict[Any, Any] = {}
        self.warnings: tuple[str, ...] = ()
        self.signals = StopSignals()
        config = SimpleNamespace(min_nodes=1, max_nodes=3, nproc_per_node=1)
        me: Any = self
        options: Any = SimpleNamespace(config=config, node="b")
        self.scaler = Scaler(me, options, path, me, self.signals)

    def is_closed(self) -> bool:
        if not self.answers:
            raise RendezvousConnectionError("the store does not answer")
        return False

    def submit(self, event: Event) -> None:
        self.state = step(self.state, event, 0.0, JobRules(1, 3, 10, 1, 5))

    def trains(self, names: str) -> None:
        workers = (1,) * len(names)
        self.state.agreement = Agreement(
            1, tuple(names), tuple(names), workers, restarts_used=0, known_step=1
        )
        self.state.nodes = dict.fromkeys(names, Member(Role.TRAINS))

    def tolerance_left(self, incarnation: int) -> int | None:
        return self.tolerance

    def warn(self, *warnings: str) -> None:
        self.warnings = warnings

    def look(self, nodes: str = "abc", group_rank: int = 1) -> ScaleAnswer | None:
        self.trains(nodes)
        assert self.state.agreement is not None
        self.scaler.poll(self.state.agreement, group_rank)
        return read_answer(self.path)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_an_order_is_followed_when_the_store_answers_again_and_one_by_a_clock_that_is_behind_refused(
    node: Node,
) -> None:
    node.answers = False
    order = write_request(node.path, 2, ())
    assert node.look() is None
    node.answers = True
    answer = node.look()
    assert answer is not None
    assert not answer.refused
    assert node.state.scaling == GrantedScale(order.number, 2, 3)
    order = write_request(node.path, 2, ())
    node.state.scaling = GrantedScale(order.number + 1, 3, 3)
    answer = node.look()
    assert answer is not None
    assert "synchronise the clocks" in answer.refused, (
        "it would not be followed: the newest one holds"
    )


@pytest.mark.parametrize("missing", [None, 0, -1])
@pytest.mark.parametrize("comes", [True, False])
def test_a_node_that_is_asked_to_leave_waits_until_the_others_survive_without_it_and_not_for_ever(
    node: Node, monkeypatch: pytest.MonkeyPatch, *, missing: int | None, comes: bool
) -> None:
    """A store that lost its leases has lost what the launchers told each other, until they tell it again."""
    node.tolerance = missing
    node.signals.asked_to_leave = True
    waits = node.look()
    assert node.state.scaling is None
    assert waits is not None
    assert (waits.refused, waits.done) == ("", False)
    assert "the request for 2 nodes waits" in waits.waits
    assert node.warnings == (waits.waits,), "reft status says it on every node"
    if comes:
        node.tolerance = 1
    else:
        monkeypatch.setattr(scaling, "TOLERANCE_SECS", 0.0)
    answer = node.look()
    assert answer is not None
    assert (answer.waits, node.warnings) == ("", ())
    granted = node.state.scaling
    assert (granted is not None) == comes
    if granted is not None:
        assert (granted.nodes, granted.without, answer.refused) == (2, ("b",), "")
        return
    assert "repeat the request" in answer.refused
    node.tolerance = 1
    node.look()
    assert node.state.scaling is None, "it was refused"


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("tolerance", [None, 0, -1])
def test_p3_nobody_is_told_to_leave_while_the_job_survives_no_loss(
    node: Node, *, tolerance: int | None, replaces: bool
) -> None:
    """-1: what the launchers know to be gone is more than the protection survives."""
    node.state.scaling = GrantedScale(1, 3 if replaces else 2, 3, ("c",), replaces=replaces)
    node.tolerance = tolerance
    node.look(group_rank=0)
    assert not node.state.leaving
    node.tolerance = 1
    node.look(group_rank=0)
    assert node.state.leaving == {"c"}


def test_an_order_that_went_half_way_and_can_go_no_further_is_answered(node: Node) -> None:
    """From six nodes to three, from which no way leads to one."""
    order = write_request(node.path, 1, ())
    node.look("abcdef")
    node.state.sizes = replace(THREE.sizes or Sizes(), members=tuple("abc"))
    node.degrees = Degrees(1, 3, 1)
    write_json(node.path / SIZE_FILE, {"why_not": "", "batch": 12, "micro": 4})
    answer = node.look()
    assert answer is not None
    assert answer.number == order.number
    assert "the job stays at 3 nodes" in answer.refused
    now = node.state.scaling
    assert now is not None
    assert (now.nodes, now.limit) == (3, 3)


EIGHT = Sizes(
    (1, 2, 4, 8),
    scheme="arc",
    members=tuple(f"host{i}/1/0" for i in range(8)),
    domains=tuple(range(8)),
    groups=(tuple(range(8)),),
)
GRID = replace(EIGHT, fitting=(2, 4, 6, 8), groups=((0, 2, 4, 6), (1, 3, 5, 7)))
"""Two stages, a node each, of four replicas."""


def staying(sizes: Sizes, lost: set[int], least: int = 1, new: int = 0) -> set[int] | None:
    """Ranks of the nodes that go on; -1 for those that are new."""
    there = [m for rank, m in enumerate(sizes.members) if rank not in lost]
    there += [f"new{i}/1/0" for i in range(new)]
    found = sizes.staying(there, least, 8)
    ranks = {m: rank for rank, m in enumerate(sizes.members)}
    return None if found is None else {ranks.get(m, -1) for m in found}


@pytest.mark.parametrize("lost", range(8))
def test_p3_every_second_of_eight_neighbours_stays_where_seven_cannot_share_the_batch(
    lost: int,
) -> None:
    assert staying(EIGHT, {lost}) == set(range(1 - lost % 2, 8, 2))


def test_p3_where_those_that_fit_could_not_recover_all_wait() -> None:
    assert staying(replace(EIGHT, fitting=(1, 2, 8)), {3}) is None
    assert staying(EIGHT, {3, 4}) == {0, 1, 2, 5}, "what is lost already is lost with any choice"
    assert staying(replace(EIGHT, scheme="arc:3", fitting=(2, 8)), {3}) is not None


def test_p3_whole_paths_stay() -> None:
    assert staying(GRID, {3}) == {0, 1, 4, 5, 6, 7}
    assert staying(replace(GRID, fitting=(2, 4, 8)), {3}) == {0, 1, 4, 5}
    assert staying(GRID, {2, 3}) == {0, 1, 4, 5, 6, 7}
    assert staying(GRID, {3}, new=1) == {0, 1, 2, 4, 5, 6, 7, -1}
    assert staying(GRID, {2, 7}) == {0, 1, 3, 4, 5, 6}


def test_p3_nodes_without_memory_are_those_that_wait() -> None:
    assert staying(GRID, {2, 3, 6, 7}, new=1) == {0, 1, 4, 5}
    assert staying(GRID, {2, 3, 6}, new=2) == {0, 1, 4, 5, 7, -1}


def test_p3_the_last_nodes_leave_where_the_others_can_do_without_them_and_else_others() -> None:
    assert EIGHT.leaving(1) == (7,)
    assert EIGHT.leaving(4) == (7, 5, 3, 1), "no two neighbours"
    assert EIGHT.leaving(4, first=(2,)) == (6, 4, 2, 0)
    assert EIGHT.leaving(2, first=(2, 3)) == ()
    assert EIGHT.leaving(6) == ()
    assert GRID.leaving(2) == (7, 6)
    assert Sizes((1, 2)).leaving(1) == (), "who holds what is not known"
    assert replace(EIGHT, scheme="of:another:release").leaving(1) == ()


def test_p4_what_a_placement_survives_while_nothing_is_lost() -> None:
    assert EIGHT.tolerance() == 1
    assert replace(EIGHT, scheme="arc:3").tolerance() == 3
    assert replace(EIGHT, domains=(0,) * 8).tolerance() == 0
    assert Sizes((1, 2)).tolerance() is None
    assert replace(EIGHT, scheme="of:another:release").tolerance() is None


def test_no_number_that_fits_has_come() -> None:
    assert staying(GRID, {0}, least=8) is None
    assert staying(GRID.refusing(6).refusing(4).refusing(2), {0}) is None


def test_before_the_first_version_any_number_fits_but_those_that_trainers_refused() -> None:
    assert Sizes().of(2, 4) == (2, 3, 4)
    assert Sizes().refusing(3).of(2, 4) == (2, 4)
    assert Sizes().refusing(3).largest(3, 2, 4) == 2


def test_what_a_version_tells_of_its_nodes() -> None:
    holders = {
        Coordinate(pp, dp, 0): (f"n{2 * dp + pp}", f"h{dp}") for pp in range(2) for dp in range(2)
    }
    nodes = ("n0", "n1", "n2", "n3")
    found = find_job_sizes((2, 4), nodes, holders, Degrees(2, 2, 1), "arc")
    assert found == Sizes((2, 4), scheme="arc", domains=(0, 0, 2, 2), groups=((0, 2), (1, 3)))
    assert find_job_sizes((2, 4), nodes[:3], holders, Degrees(2, 2, 1), "arc") == Sizes((2, 4)), (
        "one is gone"
    )


def test_a_degree_that_would_be_refused_does_not_fit_and_one_that_only_differs_does() -> None:
    def of(dp: int, pp: int = 1, size: Size | None = None) -> ScaleSituation:
        return ScaleSituation(1, 8, (), 0, 1, 0, Degrees(pp, dp, 1), size=size)

    assert "7 replicas cannot share the 512 samples" in of(8, size=Size("", 512, 4)).reason_against(
        7
    )
    assert not of(8, size=Size("", 512, 4)).reason_against(4)
    assert "3 trainers, which do not make whole" in of(2, pp=2).reason_against(3)
    assert not of(8, size=Size("because", 0, 4)).reason_against(7)
    assert "because" in of(8, size=Size("because", 0, 4)).reason_against(7, asked=True)
    assert "because" in of(8, size=Size("because", 0, 4, fixed=True)).reason_against(7)
