"""P6: every wait of the package has a bound and an owner; docs/waits.md lists them, and leaves none out."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.waiting import waits

ROOT = Path(__file__).parents[1]
ROW = re.compile(
    r"^\| `(?P<where>[^`]+)` \|(?P<what>[^|]+)\|(?P<bound>[^|]+)\|(?P<who>[^|]+)\| `(?P<test>[^`]+)` \|$"
)


def rows() -> dict[str, re.Match[str]]:
    lines = (ROOT / "docs" / "waits.md").read_text().splitlines()
    found = [match for line in lines if (match := ROW.match(line))]
    assert len(found) == sum(line.startswith("| `") for line in lines), "a row of docs/waits.md is malformed"
    count = Counter(match["where"] for match in found)
    assert max(count.values()) == 1, (
        f"twice in docs/waits.md: {[w for w, times in count.items() if times > 1]}"
    )
    return {match["where"]: match for match in found}


def test_p6_every_wait_is_listed_with_its_bound() -> None:
    known, found = rows(), waits(ROOT / "reft")
    new = [f"{where} waits (line {lines}); add a row to docs/waits.md" for where, lines in found.items()
           if where not in known]  # fmt: skip
    gone = [f"{where} does not wait any more; remove its row from docs/waits.md" for where in known
            if where not in found]  # fmt: skip
    assert not new + gone, "\n".join(new + gone)


def test_p6_every_row_says_what_bounds_it_who_waits_and_what_tests_it() -> None:
    for where, row in rows().items():
        assert row["what"].strip(), where
        assert row["who"].strip(), where
        assert row["bound"].strip() not in ("", "-", "none"), f"{where}: a bound of none needs its reason"
        assert (ROOT / row["test"]).is_file(), f"{where}: {row['test']} does not exist"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("done.wait()", True),
        ("self._thread.join()", True),
        ("thread.join(timeout_secs)", True),
        ("', '.join(names)", False),
        ("os.path.join(a, b)", False),
        ("store.get(key)", True),
        ("self._store.check([key])", True),
        ("store.add(key, 1)", True),
        ("store.set(key, value)", True),
        ("self._store.compare_set(key, held, value)", True),
        ("seen.add(key)", False),
        ("self._ended.set()", False),
        ("stored.get(image, {})", False),
        ("self._in_flight.acquire(timeout=secs)", True),
        ("fcntl.flock(fd, fcntl.LOCK_EX)", True),
        ("fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)", False),
        ("dist.all_reduce(value)", True),
        ("values.gather(-1, index)", False),
        ("listener.accept()", True),
        ("with lock:\n    pass", False),
    ],
)
def test_what_waits_is_known_by_its_name(tmp_path: Path, source: str, found: bool) -> None:
    package = tmp_path / "reft"
    package.mkdir()
    body = "\n".join(f"    {line}" for line in source.splitlines())
    (package / "module.py").write_text(f"def function():\n{body}\n")
    assert bool(waits(package)) is found
    if found:
        assert list(waits(package)) == ["reft/module.py:function"]
