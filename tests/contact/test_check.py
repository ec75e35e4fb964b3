"""``reft config --check`` and ``--script``: what can be told before a job is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import command

ON = {"enabled": True}
DEEPSPEED = {"train_micro_batch_size_per_gpu": 1}
HOST = {"device": "cpu"}
AOR: dict[str, Any] = {"reft": {**ON, "protection": "arc+aor"}, "zero_optimization": {"stage": 1}}
BF16_FP32: dict[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
KEEPS_ALL = {"reduce_scatter": False, "contiguous_gradients": False}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def check(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    path = directory / "ds.json"
    path.write_text(json.dumps({"reft": ON, **config}))
    found: dict[str, Any] = command("config", "--check", path, "--json").json
    return found


def look(directory: Path, script: str) -> list[str]:
    path = directory / "train.py"
    path.write_text(script)
    found = command("config", "--script", path, "--json").json
    assert found["refused"] == []
    return list(found["warned"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stage": 4}}, "write 2"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.device\" is 'nvme'",
        ),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": HOST}},
            "is on at stage 0",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": HOST | {"ratio": 0.5}}},
            "write 1.0",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_param": {"device": "nvme"}}},
            "offload_param.device",
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, 'write "AdamW"'),
        ({"optimizer": {"type": "Muon"}}, 'write "AdamW"'),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast"),
        ({"amp": {"enabled": True}}, '"fp16" or "bf16"'),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled"),
        ({"compression_training": {"layer_reduction": {"enabled": True}}}, "compression_training"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"reft": {**ON, "tolerance": 2}}, 'write "protection": "auto", or "tolerance": 1'),
        ({"reft": {**ON, "tolerance": 1, "protection": "none"}}, "survives 0 lost node(s)"),
        (
            {**AOR, "fp16": {"enabled": True}},
            '"reduce_scatter": false, "contiguous_gradients": false',
        ),
        ({**AOR, "bf16": {"enabled": True}}, '"data_types": {"grad_accum_dtype": "fp32"}'),
        (
            {
                **AOR,
                **BF16_FP32,
                "zero_optimization": {"stage": 1, "offload_optimizer": HOST, **KEEPS_ALL},
            },
            'leave "+aor" out of "protection", or remove offload_optimizer',
        ),
        ({**AOR, **BF16_FP32, "optimizer": {"type": "Lamb"}}, "\"optimizer.type\" is 'lamb'"),
    ],
)
def test_what_the_job_will_be_refused_for(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    [refused] = check(tmp_path, config)["refused"]
    assert said in refused


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": HOST}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": HOST | {"ratio": 1.0}}},
        {"zero_optimization": {"stage": 3}},
        {"bf16": {"enabled": True}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "amp": {"enabled": False}},
        {"compression_training": {"layer_reduction": {"enabled": False}}},
        {"reft": {**ON, "protection": "none"}},
        {"reft": {**ON, "protection": "auto", "tolerance": 3}},
        {"reft": {**ON, "tolerance": 2, "allow_unprotected": True}},
        {**AOR, **BF16_FP32},
        {**AOR, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1, **KEEPS_ALL}},
        {**AOR, "fp16": {"enabled": True}, "zero_optimization": {"stage": 0}},
        {
            **AOR,
            "fp16": {"enabled": True},
            "reft": {**ON, "variant": "none", "protection": "arc+aor"},
        },
    ],
)
def test_what_is_taken_is_not_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    assert check(tmp_path, config)["refused"] == []


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"enabled": False}, "reft has no effect"),
        ({**ON, "variant": "none"}, "no versions are taken"),
        ({**ON, "protection": "none"}, '"protection" is "none"'),
        (ON, "reft writes nothing to storage"),
        ({**ON, "faults": [{"point": "during_step", "step": 1}]}, '"faults" makes ranks fail'),
    ],
)
def test_what_the_job_will_be_warned_of(tmp_path: Path, block: dict[str, Any], said: str) -> None:
    found = check(tmp_path, {**DEEPSPEED, "reft": block})["warned"]
    assert any(said in warned for warned in found)


def test_a_file_of_the_block_alone_is_megatrons_which_saves_itself(tmp_path: Path) -> None:
    found = check(tmp_path, {"reft": ON})
    assert (found["refused"], found["warned"], found["noted"]) == ([], [], [])
    found = check(tmp_path, {"reft": {**ON, "persist": {"dir": str(tmp_path)}}})
    assert "save with --save" in found["refused"][0]


def test_values_that_a_trainer_fills_in_are_named(tmp_path: Path) -> None:
    config = {"bf16": {"enabled": "auto"}, "reft": {**ON, "interval_steps": "auto"}}
    [note] = [text for text in check(tmp_path, config)["noted"] if "auto" in text]
    assert note.endswith(": bf16.enabled")


@pytest.mark.parametrize("where", ["file/below", "not/mounted", "/proc/reft"])
def test_a_persist_directory_that_cannot_be_written_is_told(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    directory = tmp_path / where
    block = {**ON, "persist": {"dir": str(directory)}}
    warned = check(tmp_path, {**DEEPSPEED, "reft": block})["warned"]
    (said,) = (text for text in warned if "cannot be written to persist.dir" in text)
    assert str(directory) in said
    assert not directory.exists()


def test_a_persist_directory_that_the_job_can_make_is_not_made(tmp_path: Path) -> None:
    block = {**ON, "persist": {"dir": str(tmp_path / "new")}}
    assert check(tmp_path, {**DEEPSPEED, "reft": block})["warned"] == []
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("deepspeed", "kind", "said"),
    [
        ("0.18.4", "warned", "resumes from memory only; install DeepSpeed 0.18.5 or later"),
        ("0.18.9+cu126", "noted", "loads its own checkpoints of this configuration"),
        ("0.19.8", "noted", "loads its own checkpoints of this configuration"),
        ("0.20.0", "warned", "is not known; install 0.17.0 or later, below 0.20"),
    ],
)
def test_what_the_installed_deepspeed_loads(
    deepspeed: str, kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "deepspeed.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Name: deepspeed\nVersion: {deepspeed}\n")
    monkeypatch.syspath_prepend(tmp_path)
    bf16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    found = check(tmp_path, {**bf16, "zero_optimization": {"stage": 1}})
    assert any(text.endswith(said) for text in found[kind])


PLAIN = """
import torch
torch.manual_seed(1)
engine = deepspeed.initialize(model=model)[0]
{load}
{loop}
    engine.backward(engine(batch(step)))
    engine.step()
"""
PASSES = "engine.load_checkpoint(save_dir)\nloader = reft.resumable(DataLoader(data))"
OWN = "engine.load_checkpoint(save_dir)\nloader = reft.data.loader(data, 4)"
LOAD, LOOP = "engine.load_checkpoint(save_dir)", "while engine.global_steps < steps:"


@pytest.mark.parametrize(
    ("load", "loop", "said"),
    [
        ("", LOOP, "neither engine.load_checkpoint nor reft.resume"),
        (
            f"if os.path.exists(latest): {LOAD}",
            LOOP,
            "5: `engine.load_checkpoint(save_dir)` is called only",
        ),
        (
            f"if Path(save_dir).is_dir():\n    {LOAD}",
            LOOP,
            "finds nothing before the script has saved",
        ),
        (f"if args.resume: {LOAD}", LOOP, "is called only if `args.resume`"),
        (f"args.resume and {LOAD}", LOOP, "is called only if `args.resume`"),
        ("class Trainer: pass\nTrainer()", LOOP, "neither engine.load_checkpoint nor reft.resume"),
        (LOAD, "for step in range(steps):", "write for step in range(engine.global_steps, steps)"),
        (LOAD, "for step in range(0, 10):", "begins at 0 after every restart"),
        (f"{LOAD}\nloader = DataLoader(data)", LOOP, "loader = reft.resumable(loader)"),
        (f"_, state = {LOAD}\nstart = state['i'] + 1", LOOP, "client_state=lambda: {'i': ...}"),
        (f"path, state = {LOAD}\nif path: best = state.get('best', 0)", LOOP, "does not have it"),
        (
            PASSES,
            "for epoch in range(3):\n  for x in loader:",
            "write for epoch in range(loader.epoch, 3)",
        ),
        (
            OWN,
            "for epoch in range(3):\n  for x in loader:",
            "write for epoch in range(loader.epoch, 3)",
        ),
        (
            PASSES,
            "for e in range(args.epochs):\n  for i, x in enumerate(loader):",
            "train N passes too many",
        ),
        (
            PASSES,
            "for x in itertools.cycle(loader):",
            "keeps the batches that it reads from `loader`",
        ),
        (
            f"reft.attach(engine, client_state=lambda: {{'at': at}})\n{LOAD}",
            f"{LOOP}\n    at += 1",
            "begin_step",
        ),
    ],
)
def test_what_a_script_lacks_is_told_by_its_line(
    tmp_path: Path, load: str, loop: str, said: str
) -> None:
    [finding] = look(tmp_path, PLAIN.format(load=load, loop=loop))
    assert said in finding


@pytest.mark.parametrize(
    ("load", "loop"),
    [
        (LOAD, LOOP),
        ("reft.resume(engine)", "for step in range(engine.global_steps, steps):"),
        (f"{LOAD}\nif x: engine.load_checkpoint(other)", LOOP),
        (f"if __name__ == '__main__': {LOAD}", LOOP),
        (f"def load():\n    {LOAD}\nif x: y()", LOOP),
        (f"{LOAD}\nloader = reft.resumable(DataLoader(data, num_workers=4))", LOOP),
        (LOAD, "for step in range(start, steps):"),
        (LOAD, "for step in range(steps):\n    if step < engine.global_steps: continue"),
        (LOAD, "for epoch in range(2):\n  for step in range(3):"),
        (LOAD, "for _ in range(2):"),
        (LOAD, "for step in range(steps - engine.global_steps):"),
        (LOAD, "for step in range(steps):\n    if engine.global_steps >= steps: break"),
        (LOAD, "for step in range(steps):\n  if step >= start:"),
        (
            LOAD,
            "def epoch():\n  for step in range(9):\n    engine.train_batch()\nwhile 1:\n    epoch()",
        ),
        (PASSES, "for epoch in range(loader.epoch, 3):\n  for x in loader:"),
        (OWN, "for epoch in range(loader.epoch, 3):\n  for x in loader:"),
        (f"{LOAD}\nloader = reft.data.loader(data)\nevaluation = DataLoader(data)", LOOP),
        (PASSES, "while loader.epoch < 3:\n  for x in loader:"),
        (PASSES, "for epoch in range(3):\n  if epoch < loader.epoch: continue\n  for x in loader:"),
        (PASSES, "for x in loader:"),
        (
            f"reft.attach(engine, client_state=keep)\n_, state = {LOAD}\nstart = state['i'] + 1",
            LOOP,
        ),
        (f"path, _ = {LOAD}\nstate = {{}}\nstate.get('i')", LOOP),
        (f"if args.tag: engine.load_checkpoint(d, args.tag)\nelse: {LOAD}", LOOP),
        (f"class Trainer:\n  def load(self): {LOAD}\nTrainer().load()", LOOP),
        (
            f"reft.attach(engine, client_state=lambda: {{'at': at}})\n{LOAD}",
            f"{LOOP}\n  for x in y:\n    at += 1",
        ),
    ],
)
def test_what_is_right_is_not_found(tmp_path: Path, load: str, loop: str) -> None:
    assert look(tmp_path, PLAIN.format(load=load, loop=loop)) == []


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_examples_lack_nothing(tmp_path: Path, example: Path) -> None:
    assert look(tmp_path, example.read_text()) == []


def test_megatrons_training_loads_and_seeds_by_itself(tmp_path: Path) -> None:
    script = "from megatron.training import get_args, pretrain\npretrain(data, model, forward_step)"
    assert look(tmp_path, script) == []
    assert look(tmp_path, "from somewhere import pretrain\npretrain()") != []


def test_a_trainer_that_is_not_resumable_is_told(tmp_path: Path) -> None:
    [finding] = look(tmp_path, "trainer = Trainer(model, options)\ntrainer.train()")
    assert "reft.hf.resumable(trainer)" in finding


def test_the_command_says_it_and_its_code_says_whether_the_job_is_taken(tmp_path: Path) -> None:
    path, script = tmp_path / "ds.json", tmp_path / "train.py"
    script.write_text("import torch\ntorch.manual_seed(1)\n")
    for config, words, code, said in (
        ({**DEEPSPEED, "reft": ON}, (), 0, "WARNING: reft writes nothing to storage"),
        (
            {"reft": ON, "zero_optimization": {"stage": 4}},
            (),
            1,
            'REFUSED: "zero_optimization.stage" is 4',
        ),
        ({"reft": ON}, ("--script", script), 0, f"WARNING: {script}: the script calls neither"),
        ({"train_batch_size": 8}, (), 2, 'write "reft"'),
    ):
        path.write_text(json.dumps(config))
        answer = command("config", "--check", path, *words)
        assert (answer.code, said in answer.out + answer.err) == (code, True), answer
    path.write_text(json.dumps({**DEEPSPEED, "reft": {**ON, "strict": True}}))
    answer = command("config", "--check", path, "--script", script, "--json")
    told = answer.json
    assert (answer.code, told["well"], told["refused"], len(told["warned"])) == (1, False, [], 2)
    assert told["block"]["strict"] is True
