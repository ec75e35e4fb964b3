"""Lost blocks come back from parity: real arenas of every scheme, every loss within the tolerance and beyond."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import combinations

import numpy as np
import pytest

from reft.grid import STATE_SECTIONS, Degrees, Section
from reft.protect.placement import tolerance
from reft.recover.decide import plan_verified
from reft.recover.inventory import Place
from reft.recover.plan import NotRecoverable, RecoveryPlan
from reft.recover.rebuild import rebuild_offline

from .fleet import JOB, NEW, SECRET, Fleet, falsify_parities, opened, place, read_image, without

SCHEMES = [(2, 0, 1), (3, 0, 1), (4, 0, 1), (5, 0, 1), (3, 0, 2), (5, 0, 2), (3, 1, 1), (4, 1, 1), (5, 1, 1)]


def written(tmp_path, dp, copies, parities, **options):
    fleet = Fleet(place(Degrees(1, dp, 1), "single"), copies=copies, parities=parities, **options)
    fleet.write(tmp_path, NEW)
    return fleet


def recovered(fleet, root, lost, scratch):
    scratch.mkdir(parents=True)
    nodes = [n for n in fleet.topology.nodes if n not in lost]
    topology = without(fleet.topology, lost)
    with opened(root, nodes) as (found, arenas), ExitStack() as stack:
        plan, bad = plan_verified(found, topology, arenas, job_id=JOB)
        first = plan
        while isinstance(plan, RecoveryPlan) and plan.rebuilds:
            folder = scratch / f"round{len(found)}"
            folder.mkdir()
            decoded = Place(folder, folder.name, SECRET)
            refused = rebuild_offline(plan, arenas, decoded)
            found.append(decoded.inventory())
            arenas.update(stack.enter_context(decoded.opened(found[-1])))
            bad |= refused
            plan, bad = plan_verified(found, topology, arenas, job_id=JOB, bad=bad)
        if isinstance(plan, NotRecoverable):
            return plan, None, bad
        images = {}
        for at in topology.coordinates:
            for section in STATE_SECTIONS:
                images[at, section] = read_image(plan, arenas, at, section)
        return first, images, bad


@pytest.mark.parametrize(("dp", "copies", "parities"), SCHEMES)
@pytest.mark.parametrize("block_bytes", [128, 4096])
def test_every_loss_within_the_tolerance_is_restored_bit_for_bit(tmp_path, dp, copies, parities, block_bytes):
    """Odd sizes: sub-blocks end within a block, the last ones are short or empty."""
    fleet = written(tmp_path, dp, copies, parities, block_bytes=block_bytes, scale=3)
    survives = tolerance(fleet.topology, copies, parities)
    assert survives == copies + parities
    fatal = 0
    for count in range(1, min(survives + 1, dp - 1) + 1):
        for lost in combinations(fleet.topology.nodes, count):
            plan, images, _ = recovered(fleet, tmp_path, lost, tmp_path / f"scratch-{lost}")
            if images is None:
                assert count > survives
                fatal += 1
                continue
            assert isinstance(plan, RecoveryPlan)
            for (at, section), image in images.items():
                np.testing.assert_array_equal(image, fleet.image(at, section, NEW))
    assert fatal or survives + 1 >= dp, "no loss beyond the tolerance was fatal: it is not tight"


def test_p5_what_is_decoded_from_other_data_is_never_restored(tmp_path):
    """Every block matches its checksum, and yet the result is wrong: the version falls down the ladder."""
    fleet = written(tmp_path, 3, 0, 1)
    for node in ("n0", "n2"):
        falsify_parities(tmp_path / node / "rank0-slot0.arena")
    plan, images, bad = recovered(fleet, tmp_path, ("n1",), tmp_path / "scratch")
    assert images is None
    assert isinstance(plan, NotRecoverable)
    assert {source.key.section for source in bad} == {Section.PARITY}
