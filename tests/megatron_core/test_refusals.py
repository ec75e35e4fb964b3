"""P12: what reft does not know of a training on Megatron-core is refused by name, with what to change, before anything
is trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_patches.core import engine as support
from megatron_patches.core.attach import MegatronProtection, attach_megatron
from reft.config import parse_block
from reft.engine.capture import gradient_capture
from reft.errors import ConfigError, UnsupportedStateError


def of_class(path: str, **values: Any) -> Any:
    module, _, name = path.rpartition(".")
    made = type(name, (), {"__module__": module})()
    vars(made).update(values)
    return made


def training() -> tuple[Any, Any]:
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    chunk = of_class(support.DDP, config=SimpleNamespace(), ddp_config=SimpleNamespace())
    optimizer = of_class(
        support.DISTRIBUTED, optimizer=inner, config=SimpleNamespace(), is_stub_optimizer=False
    )
    return chunk, optimizer


def test_what_megatron_core_makes_is_taken() -> None:
    chunk, optimizer = training()
    support.check([chunk], of_class(support.CHAINED, chained_optimizers=[optimizer]))


@pytest.mark.parametrize(
    ("of", "name", "value", "words"),
    [
        ("model", "fp8", "hybrid", ("FP8 (hybrid)", "bf16")),
        (
            "model",
            "context_parallel_size",
            2,
            ("context parallel groups of 2", "set context_parallel_size"),
        ),
        (
            "model",
            "cuda_graph_impl",
            "local",
            ("CUDA graphs (local)", "set cuda_graph_impl to none"),
        ),
        ("model", "gtp_weight_remat_size", 2, ("weights in 2 shards", "set gtp_weight_remat_size")),
        (
            "model",
            "expert_gtp_weight_remat_size",
            2,
            ("weights in 2 shards", "set expert_gtp_weight"),
        ),
        ("buffers", "num_distributed_optimizer_instances", 2, ("2 instances", "to 1")),
        (
            "buffers",
            "reuse_grad_buf_for_mxfp8_param_ag",
            True,
            ("gradients' buffer", "train in bf16"),
        ),
        ("optimizer", "use_precision_aware_optimizer", True, ("aware of precision", "to False")),
        (
            "optimizer",
            "optimizer_cpu_offload",
            True,
            ("CPU offload", "set optimizer_cpu_offload to False"),
        ),
        (
            "optimizer",
            "overlap_param_gather_with_optimizer_step",
            True,
            ("its own step", "to False"),
        ),
        ("optimizer", "use_layer_wise_distributed_optimizer", True, ("layer-wise", "to False")),
        ("optimizer", "optimizer_cuda_graph", True, ("a CUDA graph", "set optimizer_cuda_graph")),
    ],
)
def test_a_setting_is_refused_by_name(
    of: str, name: str, value: Any, words: tuple[str, ...]
) -> None:
    chunk, optimizer = training()
    settings = {"model": chunk.config, "buffers": chunk.ddp_config, "optimizer": optimizer.config}
    setattr(settings[of], name, value)
    with pytest.raises(UnsupportedStateError) as refused:
        support.check([chunk], optimizer)
    assert all(word in str(refused.value) for word in words)


def test_other_classes_are_refused_by_name() -> None:
    chunk, optimizer = training()
    with pytest.raises(UnsupportedStateError, match=r"Float16Module, .*wrap the model in"):
        support.check([of_class("megatron.core.transformer.module.Float16Module")], optimizer)
    with pytest.raises(UnsupportedStateError, match=r"LayerWise, .*get_megatron_optimizer"):
        support.check([chunk], of_class("megatron.core.optimizer.LayerWise"))
    with pytest.raises(
        UnsupportedStateError, match=r"object has no state_dict and load_state_dict"
    ):
        support.check_scheduler(object())


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"persist": {"dir": "/tmp"}}, "persist.dir is /tmp.*remove it"),
        ({"enabled": False}, "leave the call"),
    ],
)
def test_a_block_that_asks_for_more_is_refused(
    block: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_patches.core.attach.check_release", lambda: None)
    with pytest.raises(ConfigError, match=words):
        attach_megatron([], None, config=block)


def test_recomputing_is_refused_for_optimizers_that_a_host_cannot_repeat() -> None:
    context = mock.Mock(config=parse_block({"protection": "arc+aor"}))
    with pytest.raises(UnsupportedStateError, match='write "protection": "arc"'):
        gradient_capture(context, mock.Mock(), mock.Mock())


def test_a_loop_that_calls_in_another_order_is_told() -> None:
    engine, session = mock.Mock(chunks=[mock.Mock()]), mock.Mock()
    engine.adapter.parts, session.context.topology.degrees.pp = [], 1
    protected = MegatronProtection(engine, session)
    with pytest.raises(ConfigError, match=r"load\(\) was called.*call it once"):
        protected.load()
    with pytest.raises(
        ConfigError, match=r"zero_grad_buffer\(\).*call it on every chunk when a step begins"
    ):
        engine.optimizer.step()
