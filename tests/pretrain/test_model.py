"""The model's mathematics against a second implementation, and its parameter counts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig, load_model, model_names
from examples.llama.tensor_parallel import TensorParallel, cross_entropy, initial_weight
from reft.errors import ConfigError
from tests.pretrain import reference
from tests.pretrain.conftest import ROOT, environment

SMALL = LlamaConfig("small", 2, 32, 4, 2, 48, 64, 12)


def pipeline_names(model: Llama, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Weights under the names the pipeline module would give them."""
    names = {}
    for name, value in model.state_dict().items():
        where, rest = name.split(".", 1)
        if where == "blocks":
            index, rest = rest.split(".", 1)
            where = str(int(index) + 1)
        elif where == "embedding":
            where = "tied_modules.embedding" if config.tied else "0"
        else:
            where = str(config.layers + {"norm": 1, "head": 2}[where])
        names[f"{where}.{rest}"] = value.double()
    return names


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_and_loss_equal_an_independent_implementation(tied: bool, kv_heads: int) -> None:
    config = replace(SMALL, tied=tied, kv_heads=kv_heads, rope_theta=100.0, init_std=0.2)
    model = Llama(config)
    tokens = torch.randint(0, config.vocab_size, (2, 13), generator=torch.Generator().manual_seed(1))
    values = model(tokens[:, :-1])
    weights = pipeline_names(model, config)
    torch.testing.assert_close(
        values.double(), reference.logits(tokens[:, :-1], weights, config), rtol=1e-4, atol=1e-5
    )
    loss = cross_entropy(values, tokens[:, 1:], TensorParallel())
    torch.testing.assert_close(loss.double(), reference.loss(tokens, weights, config), rtol=1e-5, atol=1e-6)


def test_initial_weights_depend_on_seed_and_name_only_whatever_the_slices() -> None:
    whole = initial_weight("x.weight", (8, 6), 0.02, TensorParallel(seed=3), shard_dim=0)
    for dim, size in ((0, 2), (0, 4), (1, 3)):
        parts = [
            initial_weight("x.weight", (8, 6), 0.02, TensorParallel(None, rank, size, 3), dim)
            for rank in range(size)
        ]
        assert torch.equal(torch.cat([p.data for p in parts], dim=dim), whole.data)
    other = initial_weight("y.weight", (8, 6), 0.02, TensorParallel(seed=3), shard_dim=0)
    assert not torch.equal(other.data, whole.data)
    assert 0.01 < float(whole.data.std()) < 0.03


@pytest.mark.parametrize("name", ["tiny", "125m", "34b"])
@pytest.mark.parametrize("tied", [False, True])
def test_formula_equals_the_modules_own_count(name: str, tied: bool) -> None:
    config = replace(load_model(name), tied=tied)
    with torch.device("meta"):
        model = Llama(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters


def test_published_shapes() -> None:
    assert model_names() == ("tiny", "125m", "1.3b", "2.7b", "6.7b", "34b")
    billions = {name: load_model(name).parameters / 1e9 for name in model_names()}
    assert f"{billions['34b']:.2f}" == "33.74"
    assert load_model("34b").kv_size == 1024
    assert f"{billions['6.7b']:.2f}" == "6.74"
    assert f"{billions['2.7b']:.1f}" == "2.7"
    assert f"{billions['1.3b']:.1f}" == "1.3"


@pytest.mark.process
def test_parameters_of_34b_are_printed_without_torch() -> None:
    code = (
        "import sys; from examples.llama.pretrain import main; code = main(['--model', '34b', '--print-params']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "33,743,970,304 parameters (33.74B)" in done.stdout


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 30}, "not divisible by 4 heads"),
        ({"kv_heads": 3}, "--kv-heads must divide --heads"),
        ({"heads": 32, "kv_heads": 32}, "rotary"),
        ({"layers": 0}, "positive integer"),
        ({"dropout": 1.5}, "dropout"),
    ],
)
def test_impossible_shapes_are_refused(change: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(SMALL, **change)
