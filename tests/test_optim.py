"""ExactAdam gives the same bits as its formula, whoever computes it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import reft
from reft import optim
from reft.optim import ExactAdam

STEPS = 120
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.05}
COUNT = 2 * optim.HOST_ELEMENTS + 1037  # Some whole slices and a rest that no vector width divides

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, Array, Array]


def numbers(seed: int, count: int = COUNT) -> torch.Tensor:
    """Numbers of all sizes, denormals and zeros too, as gradients never are but may be."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator)
    exponents = torch.randint(-44, 3, (count,), generator=generator).double()
    values = (values.double() * 10**exponents).float()
    values[:2000] = 1e-39 * torch.randn(2000, generator=generator)
    values[2000:4000] = 1e-20 * torch.randn(2000, generator=generator)
    values[::97] = 0.0
    return values


def weights() -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(0))


def run(
    make: Any, steps: int = STEPS, device: str = "cpu", start: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Weights and moments after some steps with a learning rate that changes."""
    first = weights() if start is None else start
    param = torch.nn.Parameter(first.to(device, copy=True))
    optimizer = make([param])
    for step in range(1, steps + 1):
        param.grad = numbers(step, first.numel()).reshape(first.shape).to(device)
        optimizer.param_groups[0]["lr"] = OPTIONS["lr"] * min(1.0, step / 20)
        optimizer.step()
    state = optimizer.state[param]
    assert float(state["step"]) == steps
    return [t.detach().cpu() for t in (param, state["exp_avg"], state["exp_avg_sq"])]


def exact(params: Any, **options: Any) -> ExactAdam:
    return ExactAdam(params, **{**OPTIONS, **options})


def numpy_step(step: int, arrays: Arrays, grad: Array, *, lr: float, decoupled: bool) -> Arrays:
    """The published formula, every operation rounded to fp32 once."""
    p, m, v = arrays
    kind = np.float32
    (beta1, beta2), decay = OPTIONS["betas"], OPTIONS["weight_decay"]
    if decoupled:
        p = p * kind(1 - lr * decay)
    else:
        grad = p * kind(decay) + grad
    m = m * kind(beta1) + grad * kind(1 - beta1)
    v = v * kind(beta2) + grad * grad * kind(1 - beta2)
    denominator = np.sqrt(v) * kind(1 / math.sqrt(1 - beta2**step)) + kind(OPTIONS["eps"])
    return p - m / denominator * kind(lr / (1 - beta1**step)), m, v


def numpy_run(decoupled: bool) -> Arrays:
    arrays: Arrays = (weights().numpy(), *(np.zeros(COUNT, np.float32) for _ in range(2)))
    with np.errstate(under="ignore"):
        for step in range(1, STEPS + 1):
            lr = OPTIONS["lr"] * min(1.0, step / 20)
            arrays = numpy_step(step, arrays, numbers(step).numpy(), lr=lr, decoupled=decoupled)
    return arrays


def same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_numpy_gives_the_same_bits(decoupled: bool) -> None:
    found = run(lambda params: exact(params, decoupled_weight_decay=decoupled))
    assert same_bits(found, [torch.from_numpy(a) for a in numpy_run(decoupled)])
    # With weight decay in the gradient none is small.
    assert all(0 < float(t.abs()[t != 0].min()) < 1e-38 for t in found[1:] if decoupled), (
        "no denormals"
    )


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_torchs_adam_goes_the_same_way(decoupled: bool) -> None:
    ours = run(lambda params: exact(params, decoupled_weight_decay=decoupled))
    theirs = run(
        lambda params: (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, **OPTIONS)
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


class Operations(TorchDispatchMode):
    """Every operation on vectors, with its scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.scalars: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.dim()]
        if tensors and name not in ("view", "slice", "detach", "zeros_like", "fill", "zero"):
            numbers = [float(a) for a in args if isinstance(a, int | float)]
            assert "alpha" not in (kwargs or {})
            assert all(t.dtype == torch.float32 for t in tensors)
            assert name != "div" or not numbers, (
                "CUDA kernels multiply by the reciprocal of a scalar"
            )
            self.seen.add(name)
            self.scalars += numbers
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_every_kernel_makes_one_correctly_rounded_operation(
    decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that a compiler could contract (addcmul, addcdiv, lerp, a fused step), and no scalar that a
    kernel would have to round."""
    monkeypatch.setattr(
        optim, "square_root", lambda v, out: torch.sqrt(v, out=out)
    )  # as on a device
    param = torch.nn.Parameter(weights())
    optimizer = exact([param], decoupled_weight_decay=decoupled)
    for step in range(3):
        param.grad = numbers(step)
        with Operations() as operations:
            optimizer.step()
        assert operations.seen == {"add", "sub", "mul", "div", "sqrt"}
        assert operations.scalars
        assert all(float(np.float32(s)) == s for s in operations.scalars)


def check_rounding(device: str) -> None:
    """Against fp64, which has more than twice the digits of fp32 and two: rounding its result once more gives
    the nearest fp32 number to the true one."""
    a, b = numbers(1), numbers(2)
    b[b == 0] = 1.0
    live_a, live_b = a.to(device), b.to(device)
    root = live_a.abs()
    optim.square_root(live_a.abs(), root)
    scalar = float(np.float32(0.1))
    found = {
        "add": live_a + live_b,
        "subtract": live_a - live_b,
        "multiply": live_a * live_b,
        "divide": live_a / live_b,
        "root": root,
        "multiply by a scalar": live_a * scalar,
        "add a scalar": live_a + scalar,
    }
    x, y = a.double().numpy(), b.double().numpy()
    true = (x + y, x - y, x * y, x / y, np.sqrt(np.abs(x)), x * scalar, x + scalar)
    for (name, tensor), expected in zip(found.items(), true, strict=True):
        with np.errstate(over="ignore", under="ignore"):
            nearest = torch.from_numpy(expected.astype(np.float32))
        assert same_bits([tensor.cpu()], [nearest]), f"{name} is not correctly rounded on {device}"


def test_operations_on_the_host_are_correctly_rounded() -> None:
    check_rounding("cpu")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_bits_do_not_depend_on_slices_threads_or_strides(
    monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    expected = run(exact, 20)
    for elements in (1000, 10**9):
        monkeypatch.setattr(optim, "HOST_ELEMENTS", elements)
        torch.set_num_threads(4 if elements > COUNT else 1)
        assert same_bits(run(exact, 20), expected)
    matrix = weights()[: 128 * 256].reshape(128, 256)
    plain, turned = run(exact, 20, start=matrix), run(exact, 20, start=matrix.t())
    assert not same_bits([plain[0]], [turned[0].t()]), "the gradients lie the other way round"
    assert same_bits(run(exact, 20, start=matrix.t().contiguous()), turned)


def test_its_state_is_saved_and_loaded_as_any_optimizers() -> None:
    half = torch.nn.Parameter(weights())
    optimizer = exact([half])
    half.grad = numbers(1)
    optimizer.step()
    other = torch.nn.Parameter(half.detach().clone())
    loaded = exact([other], lr=1.0)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, made in ((half, optimizer), (other, loaded)):
        param.grad = numbers(2)
        made.step()
    assert same_bits([half.detach()], [other.detach()])
    assert reft.ExactAdam is ExactAdam


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": math.nan}]
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected a number in \[0, "):
        exact([torch.nn.Parameter(torch.zeros(3))], **options)


def test_sixteen_bit_parameters_are_refused_with_what_to_do() -> None:
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    with pytest.raises(
        TypeError, match=r"found a parameter of torch\.bfloat16 .* keep fp32 masters"
    ):
        exact([param]).step()


@pytest.mark.gpu
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_a_device_gives_the_same_bits_as_the_host(decoupled: bool) -> None:
    """The contract that AOR on a device rests on."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm device; torch finds none")
    check_rounding("cuda")
    on_device = run(lambda params: exact(params, decoupled_weight_decay=decoupled), device="cuda")
    assert same_bits(on_device, run(lambda params: exact(params, decoupled_weight_decay=decoupled)))
