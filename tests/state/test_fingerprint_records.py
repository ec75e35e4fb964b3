"""Records of several nodes, one of them back with old memory (P7)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reft.engine.identity import Identity
from reft.errors import FingerprintError
from reft.memory.jobdir import JobDir, record_fingerprint
from reft.naming import Label
from reft.state.fingerprint import Fingerprint

OLD, NEW = Fingerprint({"seed": 1}), Fingerprint({"seed": 2})


@pytest.fixture
def check(tmp_path: Path) -> Any:
    """Compare the version of an incarnation with what two nodes have recorded."""
    here, back = (JobDir.open_or_create(tmp_path / n, "job", n) for n in ("here", "back"))
    for directory, known in ((here, {1: OLD, 3: NEW}), (back, {1: OLD})):
        for incarnation, fingerprint in known.items():
            record_fingerprint(directory.path, incarnation, fingerprint)
    config: Any = SimpleNamespace(job_id="job", accept_changes=[])
    control: Any = SimpleNamespace(rank=0)
    job = Identity(NEW, config, control, restarted=False)

    def compare(incarnation: int) -> None:
        told: list[bytes] = []

        def gather(mine: bytes) -> list[bytes]:
            told.append(mine)
            return list(told)

        control.gather_bytes = gather
        label = Label(incarnation, 9)
        try:
            job.check_memory(back.path, label, reads=True)
        except FingerprintError:
            assert len(told) == 1  # alone with its old record
        job.check_memory(here.path, label, reads=True)

    return compare


def test_p7_the_newest_record_that_is_not_newer_than_the_version_counts(check: Any) -> None:
    check(5)
    check(3)


def test_p7_a_version_of_other_settings_is_still_refused(check: Any) -> None:
    with pytest.raises(FingerprintError, match="seed: was 1, is 2"):
        check(2)
