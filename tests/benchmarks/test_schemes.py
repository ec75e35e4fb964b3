"""benchmarks/schemes.py runs as anyone would run it and says consistent things. Never a time: machines differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.test_benchmarks import check_estimate, check_head, run

pytestmark = pytest.mark.nightly
BASES = {"none": "plain", "arc": "none", "aec": "none", "arc+aec": "none", "rs:2": "none", "aec+aor": "aec"}


def test_schemes_are_compared_in_pairs_within_one_run(tmp_path: Path) -> None:
    result = run("schemes.py", folder=tmp_path)
    check_head(result, "schemes")
    assert result["layout"]["dp"] == 3
    schemes = result["schemes"]
    assert {name: s["compared_with"] for name, s in schemes.items()} == BASES
    check_estimate(result["plain_step_secs"])
    for name, scheme in schemes.items():
        for key in ("overhead", "extra_secs", "extra_cpu_secs_per_rank", "over_plain", "stall_secs"):
            check_estimate(scheme[key])
            # Schemes that stand between the same units share these.
            assert scheme[key]["samples"] == result["rounds"]
        assert 0 <= scheme["committed_part"] <= 1
        recomputes = name.endswith("+aor")
        assert (scheme["recompute"] is not None) == recomputes
        assert recomputes or not (scheme["recomputed_partitions"] or scheme["partitions_sent_anew"])
    kept = {name: s["bytes_per_rank"] for name, s in schemes.items()}
    assert kept["none"] < kept["aec"] <= kept["arc"] < kept["rs:2"] <= kept["arc+aec"]
    assert schemes["none"]["received_bytes_per_version"] == 0 < schemes["arc"]["received_bytes_per_version"]


def test_recomputing_is_measured_beside_the_memory(tmp_path: Path) -> None:
    result = run("schemes.py", "--schemes", "arc+aor", "--dp", "2", folder=tmp_path)
    assert set(result["schemes"]) == {"none", "arc+aor"}
    found = result["schemes"]["arc+aor"]
    assert found["compared_with"] == "arc"
    assert found["recomputed_partitions"] + found["partitions_sent_anew"] > 0
    recompute = found["recompute"]
    assert recompute["partition_elements"] > 0
    for clock in ("secs", "cpu_secs"):
        for key in ("per_version", "per_million_parameters", "of_step"):
            check_estimate(recompute[clock][key])
            assert recompute[clock][key]["median"] > 0
    adam = result["host_adam"]
    for key in ("elements_per_sec", "bound_elements_per_sec", "of_bound"):
        check_estimate(adam[key])
