"""The releases of docs/support.md are those of :mod:`reft.engine.checks.releases`, and nothing else that names one says
otherwise; ``python -m tests.docs.test_releases`` writes the table anew."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from reft.engine.checks.releases import END, RELEASES, Releases, release, unloadable
from tests.matrix import ROWS
from tests.wheel import ROOT

PAGE = ROOT / "docs" / "support.md"
HEAD = "| DeepSpeed from | torch | clusters' pages, not run | Megatron-DeepSpeed 4efb479 | in bf16, it cannot load |\n"
CLUSTERS = {"frontier.md": ("frontier",), "llama.md": ("v100", "h100")}
"""The pages that install something, and whose configurations they start."""
CONSTRAINTS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)


def table() -> str:
    return HEAD + "| --- | --- | --- | --- | --- |\n" + "".join(map(row, RELEASES))


def row(found: Releases) -> str:
    patch = f"`{found.patch.rpartition('/')[2]}`" if found.patch else "unmodified"
    engines = ", ".join(re.sub(r'".+"', lambda words: f"`{words[0]}`", e) for e in found.unloadable)
    cells = (found.first, ", ".join(found.torch), ", ".join(found.clusters), patch, engines)
    return f"| {' | '.join(cells)} |\n"


def minor(number: str) -> str:
    return ".".join(number.split(".")[:2])


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(), "write it anew: python -m tests.docs.test_releases"
    assert all(not r.patch or (ROOT / "megatron_patches" / r.patch).is_file() for r in RELEASES)


def test_what_is_required_and_pinned_is_in_it() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"deepspeed>={minor(RELEASES[0].first)},<{END}" in required
    assert f"torch>={min((t for r in RELEASES for t in r.torch), key=lambda t: int(t[2:]))}" in required
    tried = [(CONSTRAINTS["deepspeed"], CONSTRAINTS["torch"])]
    tried += [(r.deepspeed, r.torch or CONSTRAINTS["torch"]) for r in ROWS.values()]
    for deepspeed, torch in tried:
        found = release(deepspeed)
        assert found is not None
        assert minor(torch) in found.torch, deepspeed
    assert release(END) is release("0.16.9") is None


@pytest.mark.parametrize("page", CLUSTERS)
def test_what_a_page_installs_loads_what_its_configurations_save(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    (deepspeed,) = set(re.findall(r"deepspeed==([\d.]+)", text))
    (torch,) = set(re.findall(r"torch==([\d.]+)", text))
    (platform,) = set(re.findall(r"download.pytorch.org/whl/(\w+[\d.]+)", text))
    found = release(deepspeed)
    assert found is not None
    assert f"{minor(torch)}+{platform}" in found.clusters
    assert found.patch in text
    modules = re.findall(r"\brocm/(\d+\.\d+)", text)
    assert set(modules) <= {platform.removeprefix("rocm")}, "the module is the wheels'"
    configs = (ROOT / "configs" / "llama2").glob("*.json")
    for path in (path for path in configs if path.name.startswith(CLUSTERS[page])):
        assert unloadable(json.loads(path.read_text()), deepspeed) is None, path.name


def test_what_megatron_was_run_with_is_in_it() -> None:
    text = (ROOT / "docs" / "megatron.md").read_text()
    tried = re.findall(r"^\| .* \| (0\.[\d.]+) \| ", text, re.MULTILINE)
    assert len(tried) >= 3
    for found in map(release, tried):
        assert found is not None
        assert minor(CONSTRAINTS["torch"]) in found.torch
        assert found.patch.rpartition("/")[2] in text


if __name__ == "__main__":
    begin, _, rest = PAGE.read_text().partition(HEAD)
    PAGE.write_text(begin + table() + rest[rest.index("\n\n") + 1 :])
