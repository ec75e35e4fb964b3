"""What a script holds and no engine leads to is named by its line, with what to write; what it keeps is not (P12)."""

from __future__ import annotations

from textwrap import dedent

import pytest

from reft.checks.preflight import ScriptLook

LOOP = """
while engine.global_steps < 9:
    loss = engine(batch())
    engine.backward(loss)
    engine.step()
"""


def found(script: str) -> list[str]:
    return [f"{finding}" for finding in ScriptLook(dedent(script), "train.py").begins_anew()]


@pytest.mark.parametrize(
    ("made", "used", "words"),
    [
        ("g = torch.Generator().manual_seed(1)", "torch.rand(3, generator=g)", '{"g": g}'),
        ("a, b = 3, random.Random(5)", "b.random()", '{"b": b}'),
        ("rng = np.random.default_rng(seed)", "noise(x, rng)", '{"rng": rng}'),
        ("rng: object = np.random.RandomState(seed)", "rng.rand()", '{"rng": rng}'),
        ("ema = copy.deepcopy(model).eval()", "update_ema(ema, model)", '{"ema": ema}'),
        ("swa = AveragedModel(model)", "swa.update_parameters(model)", '{"swa": swa}'),
        (
            "model.zero_grad()",
            "model.phase += 1",
            'model.register_buffer("phase", torch.tensor(...))',
        ),
        ("model.zero_grad()", "model.book = 0.9 * model.book + x", "model.register_buffer"),
    ],
)
def test_p12_own_state_is_named_with_the_line_to_write(made: str, used: str, words: str) -> None:
    said = found(f"{made}\n{LOOP}    {used}\n")
    assert len(said) == 1
    assert words in said[0]
    assert said[0].startswith("line 7: " if "phase" in used or "book" in used else "line 1: ")


@pytest.mark.parametrize(
    "script",
    [
        # It draws the data set, before training.
        f"g = torch.Generator()\ndata = [torch.randn(3, generator=g) for _ in range(9)]\n{LOOP}",
        # It is made again in every step.
        f"{LOOP}    g = torch.Generator().manual_seed(engine.global_steps)\n    torch.rand(3, generator=g)\n",
        # It is given, directly, by a variable, or kept in the client state.
        f'g = random.Random(1)\nreft.resume(engine, state={{"g": g}})\n{LOOP}    g.random()\n',
        f'g = random.Random(1)\nheld = {{"g": g}}\nreft.attach(engine, state=held)\n{LOOP}    g.random()\n',
        "g = random.Random(1)\ndef keep():\n    return {'g': g.getstate()}\n"
        f"reft.attach(engine, client_state=keep)\n{LOOP}    g.random()\n",
        # A copy that stays as it is.
        f"teacher = copy.deepcopy(model).eval()\n{LOOP}    teacher(x)\n",
        # A value of the step alone.
        f"model.zero_grad()\n{LOOP}    model.phase = engine.global_steps // 3\n",
        # Samplers are followed with their loaders.
        "class Order(Sampler):\n    def __init__(self):\n        self.rng = random.Random(1)\n"
        f"    def __iter__(self):\n        return iter([self.rng.random()])\n{LOOP}",
    ],
)
def test_p12_what_is_kept_or_comes_back_by_itself_is_not_named(script: str) -> None:
    assert found(script) == []


def test_p12_functions_that_training_calls_are_part_of_it() -> None:
    said = found(
        """
        rng = random.Random(1)
        def noise(x):
            return x + rng.random()
        def train_step(x):
            engine.backward(engine(noise(x)))
            engine.step()
        class Net(nn.Module):
            def forward(self, x):
                self.calls += 1
                return x
        def main():
            while engine.global_steps < 9:
                train_step(batch())
        """
    )
    assert [line.partition(":")[0] for line in said] == ["line 2", "line 10"]


def test_advice_does_not_contradict_itself_batches_are_not_skipped_twice() -> None:
    skips = """
        loader = reft.resumable(DataLoader(data))
        for epoch in range(loader.epoch, 9):
            for i, x in enumerate(loader):
                if epoch == first and i < start:
                    continue
                engine.backward(engine(x))
                engine.step()
        """
    said = found(skips)
    assert len(said) == 1
    assert "line 4: `loader` is resumable, and the script skips batches of it as well" in said[0]
    cut = skips.replace("enumerate(loader)", "enumerate(itertools.islice(loader, start, None))")
    assert len(found(cut)) == 1
    assert found(skips.replace("reft.resumable(DataLoader(data))", "DataLoader(data)")) == []
    assert found(skips.replace("epoch == first and i < start", "loss < 3")) == []


def test_a_learning_rate_that_follows_from_the_step_is_known() -> None:
    look = ScriptLook(
        dedent(
            """
            rate = warmup(engine.global_steps)
            for group in optimizer.param_groups:
                group["lr"] = rate * 2
                group["lr"] *= 0.5
                group["betas"] = (0.9, beta)
            """
        ),
        "train.py",
    )
    assert list(look.group_writes("lr")) == [(4, True), (5, False)]
    assert list(look.group_writes("betas")) == [(6, False)]
