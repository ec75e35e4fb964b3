"""What is not known of a rank's parameters and buffers is never taken up silently in another layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch

from megatron_patches.deepspeed import warn_attention
from reft.engine.deepspeed import DeepSpeedEngine
from reft.errors import LayoutError, UnsupportedStateError
from reft.grid import Coordinate, Degrees
from reft.relayout.element_map import Parameter, RankContents, RankLayout
from reft.relayout.layouts import check_stages, describe_layouts, find_splits, same_on_stages
from reft.relayout.restore import Relayout, other_layout
from reft.state.codec import encode


class Attention(torch.nn.Module):
    """One slice, by the names that Megatron-DeepSpeed gives: four heads of two, two of keys and values."""

    num_attention_heads_per_partition, num_key_value_heads_per_partition = 4, 2
    hidden_size_per_attention_head = 2

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = torch.nn.Linear(4, 16, bias=False)
        vars(self.query_key_value.weight)["partition_dim"] = 0


class OneBehindTheOther(Attention):
    def forward(self, mixed_x_layer: torch.Tensor) -> torch.Tensor:
        each_hidden_size = mixed_x_layer.shape[-1] // 3
        return mixed_x_layer[:, :, :each_hidden_size]


class HeadByHead(Attention):
    def forward(self, mixed_x_layer: torch.Tensor) -> Any:
        return self.split_tensor(mixed_x_layer)


class Unknown(Attention):
    def forward(self, mixed_x_layer: torch.Tensor) -> torch.Tensor:
        return mixed_x_layer


@pytest.mark.parametrize(
    ("attention", "known"),
    [(OneBehindTheOther, (0, (8, 4, 4))), (HeadByHead, (0, ())), (Unknown, (None, ()))],
)
def test_p7_megatrons_queries_keys_and_values_are_told_by_its_code(
    attention: type[Attention], known: Any
) -> None:
    model = torch.nn.Sequential(attention())
    warn_attention(model)
    assert find_splits(model) == {"0.query_key_value.weight": known}


BOTH = r"^\d+.both.weight$"


def mlp(first: str, second: str, outer: int) -> torch.nn.Module:
    """One slice, by the names and attributes that Megatron gives."""
    module = torch.nn.ModuleDict({first: torch.nn.Linear(4, outer), second: torch.nn.Linear(8, 4)})
    for part, dimension in (
        (module[first].weight, 0),
        (module[first].bias, 0),
        (module[second].weight, 1),
    ):
        part.partition_dim, part.partition_stride = dimension, 1
    module[second].bias.partition_dim = -1
    return torch.nn.Sequential(torch.nn.ModuleDict({"mlp": module}))


@pytest.mark.parametrize(
    ("first", "second"), [("dense_h_to_4h", "dense_4h_to_h"), ("linear_fc1", "linear_fc2")]
)
def test_a_gated_mlp_has_two_matrices_whatever_its_stride_says(first: str, second: str) -> None:
    head = "0.mlp."
    plain, gated = find_splits(mlp(first, second, 8)), find_splits(mlp(first, second, 16))
    assert plain == {
        f"{head}{first}.weight": (0, ()),
        f"{head}{first}.bias": (0, ()),
        f"{head}{second}.weight": (1, ()),
        f"{head}{second}.bias": (-1, ()),
    }
    two = {f"{head}{first}.weight", f"{head}{first}.bias"}
    assert gated == {name: (0, (8, 8)) if name in two else split for name, split in plain.items()}


@pytest.mark.parametrize(
    ("declared", "known"),
    [(None, (None, ())), ((4, 2, 2), (0, (4, 2, 2))), ((8,), (0, ())), ((4,), (None, ()))],
)
@pytest.mark.parametrize("name", ["query_key_value", "gate_up_proj"])
def test_p7_fused_matrices_are_not_guessed(name: str, declared: Any, known: Any) -> None:
    """A slice may have queries, keys and values head by head, or one behind the other."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 8, bias=False)})
    weight: Any = model[name].weight
    weight.partition_dim = 0
    if declared is not None:
        weight.partition_blocks = declared
    assert find_splits(model) == {f"{name}.weight": known}


@pytest.mark.parametrize(
    ("info", "known"),
    [
        ({"parameter_with_2_sub_params_cat_dim_0": [BOTH]}, (0, (4, 4))),
        (
            {"parameter_with_sub_params": [{"patterns": [BOTH], "shape": [[8, 4, 4], -1]}]},
            (0, (4, 2, 2)),
        ),
        (
            {"parameter_with_sub_params": [{"patterns": [BOTH], "shape": [4, -1]}]},
            (0, (2, 2, 2, 2)),
        ),
        (
            {"parameter_with_sub_params": [{"patterns": [BOTH], "shape": [[9, 4, 3], -1]}]},
            (None, ()),
        ),
        ({"parameter_with_sub_params": [{"patterns": [BOTH], "shape": []}]}, (None, ())),
        ({"parameter_with_sub_params": [Namespace(patterns=[BOTH])]}, (None, ())),
        (
            {
                "parameter_with_sub_params": [
                    {"patterns": [BOTH], "shape": [-1, [2, 2]], "partition_dim": 1}
                ]
            },
            (None, ()),
        ),
    ],
)
def test_what_a_model_says_for_universal_checkpoints_is_heard(
    info: dict[str, Any], known: Any
) -> None:
    model = torch.nn.Sequential(
        torch.nn.ModuleDict({n: torch.nn.Linear(4, 8, False) for n in ("both", "one")})
    )
    for p in model.parameters():
        p.partition_dim, p.partition_stride = 0, 1  # type: ignore[attr-defined]
    assert find_splits(model) == {"0.both.weight": (0, ()), "0.one.weight": (0, ())}
    model.universal_checkpoint_info = lambda: info  # type: ignore[assignment]
    assert find_splits(model) == {"0.both.weight": known, "0.one.weight": (0, ())}


@pytest.mark.parametrize("info", [None, 3, {"parameter_with_2_sub_params_cat_dim_0": ["("]}])
def test_p6_a_model_that_cannot_be_described_is_snapshotted_without(info: Any) -> None:
    """A version of it is as good as any in its own layout."""

    class Model(torch.nn.Linear):
        def universal_checkpoint_info(self) -> Any:
            if info is None:
                raise AttributeError("not initialized")
            return info

    model = Model(2, 2)
    model.weight.partition_dim = 0  # type: ignore[assignment]
    state = Namespace(params=lambda: [], optimizer=Namespace(state={}))
    adapter: Any = Namespace(
        signature=lambda: 1,
        grouped=lambda: [list(model.parameters())],
        state=state,
        owned=False,
        flat=False,
    )
    told = describe_layouts(Namespace(module=model), adapter)
    assert isinstance(told, bytes if info == 3 else str)
    if info is None:
        assert told == "AttributeError: not initialized"


def test_p12_what_deepspeeds_configuration_alone_tells_is_refused_at_the_start() -> None:
    module = torch.nn.Linear(1, 1)
    engine = Namespace(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), 0.1),
        lr_scheduler=None,
        _config=Namespace(_param_dict={"quantize_training": {"enabled": True}}),
    )
    with pytest.raises(UnsupportedStateError, match="quantize_training"):
        DeepSpeedEngine(engine)


def test_a_job_of_many_replicas_is_told_what_layout_wrote_a_checkpoint(tmp_path: Path) -> None:
    for dp in range(300):
        (tmp_path / f"reft_host-pp0.dp{dp}.tp0.msgpack").touch()
    control: Any = Namespace(rank=0, gather_bytes=lambda mine: [mine])
    topology: Any = Namespace(degrees=Degrees(1, 300, 1), coordinates=[Coordinate(0, 0, 0)])
    assert other_layout(control, topology, tmp_path) is None
    topology.degrees = Degrees(2, 150, 1)
    assert other_layout(control, topology, tmp_path) == Degrees(1, 300, 1)


def test_files_that_lie_on_the_node_of_their_ranks_are_not_those_of_a_smaller_job(
    tmp_path: Path,
) -> None:
    """Rank 0's node has its own alone: this is rank 1's."""
    sees: Any = [1, 1, 1]

    def gather(mine: bytes) -> list[bytes]:
        return [encode(sees) if mine == encode(None) else b"", mine]

    control: Any = Namespace(rank=1, gather_bytes=gather)
    topology: Any = Namespace(
        degrees=Degrees(1, 2, 1), coordinates=[Coordinate(0, 0, 0), Coordinate(0, 1, 0)]
    )
    assert other_layout(control, topology, tmp_path) == Degrees(1, 1, 1)
    (tmp_path / "reft_host-pp0.dp1.tp0.msgpack").touch()
    assert other_layout(control, topology, tmp_path) is None


def relayout(was: Degrees, now: Degrees, buffers: Sequence[dict[str, torch.Tensor]]) -> Relayout:
    """Of slice 0; ``buffers`` are those of all slices of either job that has several."""
    from reft.relayout import restore as module

    model = torch.nn.Module()
    for name, value in buffers[0].items():
        model.register_buffer(name, value.clone())
    told = [encode(module.compute_digests(b)) for b in buffers]
    control: Any = Namespace(rank=0, gather_bytes=lambda mine: told if mine else [b""] * len(told))
    topology: Any = Namespace(
        degrees=now, coordinates=[Coordinate(0, 0, tp) for tp in range(now.tp)]
    )
    change: Any = Namespace(engine=Namespace(module=model))
    source: Any = Namespace(degrees=was, host_state=lambda at: {"buffers": buffers[at.tp]})
    return Relayout(control, topology, change, source)


class Embedding(torch.nn.Module):
    """As Megatron's: what is tied is a property, and the last stage has positions that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.scale = (
            torch.nn.Linear(1, 1, bias=False) for _ in range(3)
        )

    @property
    def words_weight(self) -> torch.Tensor:
        return self.words.weight


def test_p7_what_stages_do_not_keep_equal_stays_on_them_or_is_refused_by_name() -> None:
    module = torch.nn.Module()
    module.tied_modules = torch.nn.ModuleDict({"embed": Embedding()})
    spec: Any = Namespace(key="embed", tied_weight_attr=["words_weight"])
    vars(module)["_layer_specs"] = [spec, abs, spec]
    module.universal_checkpoint_info = {  # type: ignore[assignment]
        "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.positions"]
    }
    words, positions, scale = (
        f"tied_modules.embed.{name}.weight" for name in ("words", "positions", "scale")
    )
    assert same_on_stages(module) == {words, positions}

    held = RankContents(
        tuple(Parameter(n, (1, 1), None) for n in (words, positions, scale)), (), (), False
    )
    none = RankContents((), (), (), False)

    def layout(stages: int) -> RankLayout:
        ends = {0, stages - 1}
        return RankLayout(
            Degrees(stages, 1, 1), {(pp, 0): held if pp in ends else none for pp in range(stages)}
        )

    def check(was: int, now: int) -> None:
        check_stages(module, layout(was), layout(now), Coordinate(0, 0, 0))

    check(2, 2)
    check(1, 2)
    for was, now in ((2, 1), (2, 3), (3, 2)):
        with pytest.raises(
            LayoutError, match=r"a different copy of tied_modules\.embed\.scale\.weight: "
        ):
            check(was, now)


def test_buffers_that_follow_from_the_slice_are_refused_by_name() -> None:
    one, two = Degrees(1, 1, 1), Degrees(1, 1, 2)
    same = [{"rope": torch.ones(2)}, {"rope": torch.ones(2)}]
    first = [{"rope": torch.ones(2), "first_row": torch.tensor(i)} for i in (0, 4)]
    merged = relayout(two, one, same)
    assert torch.equal(merged.buffers()["rope"], torch.ones(2))
    relayout(one, two, same).check_live_buffers()
    said = r"the buffers \['first_row'\] are not equal on all tensor slices"
    with pytest.raises(LayoutError, match=said):
        relayout(two, one, first).buffers()
    with pytest.raises(LayoutError, match=said):
        relayout(one, two, first).check_live_buffers()
    # Slices that stay what they are keep their own.
    kept = relayout(two, Degrees(2, 1, 2), first)
    kept.check_live_buffers()
    assert kept.buffers()["first_row"] == 0
