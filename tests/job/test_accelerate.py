"""P8, P12: loaders that Accelerate has prepared, in jobs of two processes under `accelerate launch`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .cluster import SCRIPTS
from .test_launchers import ACCELERATE, command, config, run

pytest.importorskip("accelerate", reason="needs accelerate: pip install 'reft-ckpt[hf]'")
pytestmark = pytest.mark.nightly
LOSS = re.compile(r"(rank \d step \d+) loss (\S+)")


def start(out: Path, *ways: str, reft: bool = True) -> tuple[int, str]:
    out.mkdir(exist_ok=True)
    path = Path(config(out))
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"reft": content["reft"] | {"enabled": reft}}))
    done = run(*command(ACCELERATE), str(SCRIPTS / "accelerated.py"), str(path), *ways, out=out)
    return done.returncode, done.stdout


def test_p8_a_killed_job_goes_on_in_the_pass_of_every_rank(tmp_path: Path) -> None:
    code, undisturbed = start(tmp_path / "undisturbed", "resumable", reft=False)
    assert code == 0, undisturbed[-4000:]
    code, first = start(tmp_path / "job", "resumable", "kill")
    assert code != 0, "a job that was killed has not ended well"
    code, second = start(tmp_path / "job", "resumable", "kill")
    assert code == 0, second[-4000:]
    assert len(re.findall(r"rank \d loaded memory:", second)) == 2, second[-4000:]
    assert "of the undisturbed run" not in second
    expected = dict(LOSS.findall(undisturbed))
    assert len(expected) == 2 * 14
    for said in (first, second):
        wrong = {at: loss for at, loss in LOSS.findall(said) if expected[at] != loss}
        assert wrong == {}
    assert {"rank 0 step 14", "rank 1 step 14"} <= dict(LOSS.findall(second)).keys()


def test_p12_a_loader_that_rank_0_reads_for_all_is_told_by_name(tmp_path: Path) -> None:
    code, log = start(tmp_path / "told", "dispatch")
    assert code == 0, log[-4000:]
    said = "trains from Accelerate's DataLoaderDispatcher"
    assert said in log, log[-4000:]
    assert "DataLoaderConfiguration(dispatch_batches=False)" in log
    assert log.index(said) < log.index("rank 0 step 2 ")

    code, log = start(tmp_path / "refused", "dispatch", "resumable")
    assert code != 0
    assert "reft: found Accelerate's DataLoaderDispatcher" in log, log[-4000:]
    assert 'accelerated.py", line' not in log, "no traceback of the script"
