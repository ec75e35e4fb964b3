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


def test_file_beats_defaults_and_given_options_beat_the_file(tmp_path: Path) -> None:
    path = file(
        tmp_path, {"gradient_clipping": 0.5, "zero_optimization": {"stage": 1, "round_robin_gradients": True}}
    )
    result = config("--deepspeed-config", path)
    assert result["gradient_clipping"] == 0.5
    result = config("--deepspeed-config", path, "--clip", "2", "--zero", "0")
    assert result["gradient_clipping"] == 2.0
    assert result["zero_optimization"] == {"stage": 0, "round_robin_gradients": True}


def test_blocks_of_another_optimizer_do_not_mix(tmp_path: Path) -> None:
    path = file(tmp_path, {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "scheduler": None})
    result = config("--deepspeed-config", path)
    assert result["optimizer"] == {"type": "SGD", "params": {"lr": 1.0}}
    assert "scheduler" not in result
    result = config("--deepspeed-config", path, "--optimizer", "adam", "--warmup", "7")
    assert result["optimizer"]["params"]["adam_w_mode"] is False
    assert result["optimizer"]["params"]["lr"] == 3e-3
    assert result["scheduler"]["params"]["warmup_num_steps"] == 7


def test_batch_sizes_must_agree(tmp_path: Path) -> None:
    path = file(tmp_path, {"train_batch_size": 48})
    assert config("--deepspeed-config", path)["gradient_accumulation_steps"] == 6
    with pytest.raises(ConfigError, match="48, not divisible by 5 samples"):
        config("--deepspeed-config", path, "--micro-batch", 5)
    with pytest.raises(ConfigError, match="needs 6 micro-batches"):
        config("--deepspeed-config", path, "--micro-batches", 3)
    with pytest.raises(ConfigError, match="positive integer"):
        config("--micro-batch", 0)


def test_bf16_accumulates_in_what_deepspeed_can() -> None:
    assert config("--dtype", "bf16")["data_types"] == {"grad_accum_dtype": "bf16"}
    assert config("--dtype", "bf16", "--zero", 1)["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config("--dtype", "fp16")["fp16"] == {"enabled": True}
    with pytest.raises(ConfigError, match="--zero 1, or --grad-accum-dtype bf16"):
        config("--dtype", "bf16", "--grad-accum-dtype", "fp32")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        config("--dtype", "bf16", "--save-interval", 5)


def test_the_reft_block_is_passed_on(tmp_path: Path) -> None:
    assert config("--reft", '{"enabled": true}')["reft"] == {"enabled": True}
    path = file(tmp_path, {"reft": {"enabled": True, "copies": 2}})
    assert config("--deepspeed-config", path)["reft"] == {"enabled": True, "copies": 2}
    assert config("--reft", file(tmp_path, {"enabled": False}))["reft"] == {"enabled": False}
    for bad, says in (("{", "not JSON"), ("[]", "cannot read"), (str(tmp_path / "no"), "cannot read")):
        with pytest.raises(ConfigError, match=says):
            config("--reft", bad)


def test_model_overrides() -> None:
    model = parse(["--model", "125m", "--heads", "6", "--seq", "32", "--tied"]).model_config()
    assert (model.heads, model.kv_heads, model.seq_length, model.tied) == (6, 6, 32, True)
    assert parse(["--heads", "8"]).model_config().kv_heads == 2


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.stem)
def test_the_example_configurations_are_valid(path: Path) -> None:
    result = config("--deepspeed-config", path)
    assert (
        result["train_micro_batch_size_per_gpu"]
        == json.loads(path.read_text())["train_micro_batch_size_per_gpu"]
    )
    assert load_config(result).enabled
