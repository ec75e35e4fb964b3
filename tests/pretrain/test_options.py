"""From the command line to the DeepSpeed configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.llama.options import deepspeed_config, parse
from reft.config_read import load_config
from reft.errors import ConfigError
from tests.pretrain.conftest import ROOT


def config(*argv: object, dp: int = 2) -> dict[str, Any]:
    return deepspeed_config(parse([str(a) for a in argv]), dp, torch_adam=True)


def file(tmp_path: Path, content: dict[str, Any]) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return path


def test_defaults_are_a_whole_configuration() -> None:
    result = config()
    assert result["train_micro_batch_size_per_gpu"] == 4
    assert result["zero_optimization"] == {"stage": 0}
    assert result["optimizer"]["params"]["torch_adam"] is True
    assert result["scheduler"]["params"]["total_num_steps"] == 100
    assert not {"fp16", "bf16", "reft", "train_batch_size"} & result.keys()


def test_the_reft_block_is_passed_on(tmp_path: Path) -> None:
    assert config("--reft", '{"enabled": true}')["reft"] == {"enabled": True}
    path = file(tmp_path, {"reft": {"enabled": True, "copies": 2}})
    assert config("--deepspeed-config", path)["reft"] == {"enabled": True, "copies": 2}
    assert config("--reft", file(tmp_path, {"enabled": False}))["reft"] == {"enabled": False}
    for bad, says in (("{", "not JSON"), ("[]", "cannot read"), (str(tmp_path / "no"), "cannot read")):
        with pytest.raises(ConfigError, match=says):
            config("--reft", bad)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.stem)
def test_the_example_configurations_are_valid(path: Path) -> None:
    result = config("--deepspeed-config", path)
    assert (
        result["train_micro_batch_size_per_gpu"]
        == json.loads(path.read_text())["train_micro_batch_size_per_gpu"]
    )
    assert load_config(result).enabled
