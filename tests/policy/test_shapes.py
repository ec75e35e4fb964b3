"""Models that reft does not train itself: the parameters of their ``config.json`` are those that were published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.llama.model_config import load_model
from reft.cli import EXIT_WELL, EXIT_WRONG_USE
from reft.errors import ConfigError
from reft.tools.planning.model import CLUSTERS, SHAPES, PlannedShape, Training, load_shape, shape_of
from tests.commands import command

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def config(kind: str, *sizes: int, **values: Any) -> dict[str, Any]:
    return {"model_type": kind, **dict(zip(SIZES, sizes, strict=False)), **values}


SHARED, TIED = {"num_key_value_heads": 8}, {"tie_word_embeddings": True}
PUBLISHED = {
    "Llama-2-7b": (6_738_415_616, config("llama", 4096, 32, 32, 11008, 32000)),
    "Llama-3-8B": (
        8_030_261_248,
        config("llama", 4096, 32, 32, 14336, 128256, **SHARED, max_position_embeddings=8192),
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        config("llama", 2048, 16, 32, 8192, 128256, **SHARED, **TIED, head_dim=64),
    ),
    "Mistral-Nemo": (12_247_782_400, config("mistral", 5120, 40, 32, 14336, 131072, **SHARED, head_dim=128)),
    "Qwen2-0.5B": (494_032_768, config("qwen2", 896, 24, 14, 4864, 151936, **TIED, num_key_value_heads=2)),
    "Qwen3-8B": (8_190_735_360, config("qwen3", 4096, 36, 32, 12288, 151936, **SHARED, head_dim=128)),
}
"""Numbers of parameters as the safetensors of these models have them."""


def write(folder: Path, values: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder / "config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_of_a_config_are_those_that_were_published(tmp_path: Path, name: str) -> None:
    published, values = PUBLISHED[name]
    shape, note = load_shape(write(tmp_path / name, values), None)
    assert isinstance(shape, PlannedShape)
    assert (shape.name, shape.parameters) == (name, published)
    assert f"{published:,} parameters" in note
    assert load_shape(str(tmp_path / name), None)[0] == shape, "its folder will do"
    # One device holds all of it; on more a tied matrix is there twice, as in DeepSpeed.
    alone = Training(name, CLUSTERS["h100"], 1, 1, 1, 1, given=shape)
    assert alone.stage_parameters(0) == published
    stages = Training(name, CLUSTERS["h100"], 1, 4, 1, 4, given=shape)
    twice = shape.vocab_size * shape.hidden_size if shape.tied else 0
    assert sum(map(stages.stage_parameters, range(4))) == published + twice


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_is_that_of_the_example(name: str) -> None:
    fields = ("layers", "hidden_size", "heads", "block_parameters", "parameters", "seq_length")
    shape, example = load_shape(f"llama2-{name}", None)[0], load_model(name)
    assert [getattr(shape, field) for field in fields] == [getattr(example, field) for field in fields]


@pytest.mark.parametrize("parameters", [1e6, 1.3e9, 7e9, 70e9, 1e12])
def test_a_number_of_parameters_is_a_shape_of_about_that_size(parameters: float) -> None:
    shape, _ = shape_of(parameters, 8, None)
    assert shape.heads % 8 == 0
    if parameters > 1e9:
        blocks = shape.layers * shape.block_parameters
        assert 0.7 * parameters < blocks < 1.4 * parameters


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model_type": "mixtral"}, "known: llama, mistral, qwen2, qwen3. Leave --model out"),
        ({"num_hidden_layers": 3}, "model_type is None"),
        ({"model_type": "llama"}, "hidden_size is None; expected a positive integer"),
        (config("llama", hidden_size=64, num_attention_heads=0), "num_attention_heads is 0"),
        (
            config("llama", hidden_size=64, num_attention_heads=2, num_key_value_heads="two"),
            "num_key_value_heads is 'two'",
        ),
    ],
)
def test_another_model_file_is_refused(tmp_path: Path, values: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        load_shape(write(tmp_path / "m", values), None)


def test_a_plan_of_a_hugging_face_model(tmp_path: Path) -> None:
    ds, path = tmp_path / "ds.json", write(tmp_path / "Llama-3-8B", PUBLISHED["Llama-3-8B"][1])
    ds.write_text(json.dumps({"bf16": {"enabled": True}, "gradient_accumulation_steps": 4}))
    parallel = ("--rank-order", "auto", "--pp", "2", "--tp", "4", "--nodes", "4", "--json")
    for model, name, parameters in (
        (("--model", path), "Llama-3-8B", 8_030_261_248),
        (("--parameters", "7e9"), "7B", 7e9),
    ):
        answer = command("plan", ds, *model, *parallel)
        found = answer.json
        assert (answer.code, found["job"]["model"], found["job"]["dp"]) == (EXIT_WELL, name, 4)
        assert found["full_bytes"] == pytest.approx(14 * parameters / 8, rel=0.02)
    answer = command("plan", ds, "--model", path, "--tp", "5", "--nodes", "5")
    assert answer.code == EXIT_WRONG_USE
    assert "not divisible by --tp 5" in " ".join(answer.err.split())
