"""The releases of docs/support.md are those of :mod:`reft.checks.preflight`, and nothing else that names one says
otherwise; ``python -m tests.docs.test_releases`` writes the table anew."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from reft.checks.preflight import END, RELEASES, Releases, release, unloadable
from tests.matrix import ROWS
from tests.test_wheel import ROOT

PAGE, PATCHES = ROOT / "docs" / "support.md", ROOT / "megatron_patches"
HEAD = "| DeepSpeed from | torch | clusters' pages, not run | Megatron-DeepSpeed's patch | in bf16, it cannot load |\n"
CLUSTERS = {"frontier.md": ("frontier",), "llama.md": ("v100", "h100")}
"""The pages that install something, and whose configurations they start."""
CONSTRAINTS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)


def table() -> str:
    text = HEAD + "| --- | --- | --- | --- | --- |\n"
    for row in RELEASES:
        patch = f"`{row.patch.rpartition('/')[2]}`" if row.patch else "none"
        engines = re.sub(r'"\w+": "\w+"', r"`\g<0>`", ", ".join(row.unloadable))
        text += f"| {row.first} | {', '.join(row.torch)} | {', '.join(row.clusters)} | {patch} | {engines} |\n"
    return text


def row_of(deepspeed: str) -> Releases:
    found = release(deepspeed)
    assert found is not None, deepspeed
    return found


def minor(number: str) -> str:
    return ".".join(number.split(".")[:2])


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(), "write it anew: python -m tests.docs.test_releases"
    patches = {
        str(path.relative_to(PATCHES)): path.read_text() for path in PATCHES.glob("*/*.patch")
    }
    assert {row.patch for row in RELEASES if row.patch} <= patches.keys()
    for name, text in patches.items():
        assert text.startswith("Why: ")
        assert f"/{name}\n" in text, "the command that applies it"
        assert f"| `{Path(name).name}` |" in (ROOT / "docs" / "megatron.md").read_text()


def test_what_is_required_pinned_and_run_is_in_it() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = min(
        (torch for row in RELEASES for torch in row.torch), key=lambda torch: int(torch[2:])
    )
    assert {f"deepspeed>={minor(RELEASES[0].first)},<{END}", f"torch>={oldest}"} <= set(required)
    assert release(END) is release("0.16.9") is None
    megatron = (ROOT / "docs" / "megatron.md").read_text()
    run = [
        CONSTRAINTS["deepspeed"],
        *re.findall(r"^\| .* \| (0\.[\d.]+) \| ", megatron, re.MULTILINE),
    ]
    tried = [(deepspeed, CONSTRAINTS["torch"]) for deepspeed in run]
    for deepspeed, torch in tried + [
        (r.deepspeed, r.torch or CONSTRAINTS["torch"]) for r in ROWS.values()
    ]:
        assert minor(torch) in row_of(deepspeed).torch, deepspeed
        assert row_of(deepspeed).patch.rpartition("/")[2] in megatron


@pytest.mark.parametrize("page", CLUSTERS)
def test_what_a_page_installs_loads_what_its_configurations_save(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    (deepspeed,) = set(re.findall(r"deepspeed==([\d.]+)", text))
    (torch,) = set(re.findall(r"torch==([\d.]+)", text))
    (platform,) = set(re.findall(r"download.pytorch.org/whl/(\w+[\d.]+)", text))
    assert f"{minor(torch)}+{platform}" in row_of(deepspeed).clusters
    assert row_of(deepspeed).patch in text
    modules = re.findall(r"\brocm/(\d+\.\d+)", text)
    assert set(modules) <= {platform.removeprefix("rocm")}, "the module is the wheels'"
    for path in (ROOT / "configs" / "llama2").glob("*.json"):
        if path.name.startswith(CLUSTERS[page]):
            assert unloadable(json.loads(path.read_text()), deepspeed) is None, path.name


def test_an_offloaded_optimizer_is_not_the_one_that_old_releases_cannot_load() -> None:
    kept = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    on_host = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert unloadable({**kept, "zero_optimization": {"stage": 1}}, "0.17.6") is not None
    assert unloadable({**kept, "zero_optimization": on_host}, "0.17.6") is None


if __name__ == "__main__":
    begin, _, rest = PAGE.read_text().partition(HEAD)
    PAGE.write_text(begin + table() + rest[rest.index("\n\n") + 1 :])
