"""The joint norm of gradients, by each way of finding it on a processor."""

from collections.abc import Callable, Sequence

import pytest
import torch
from frameloom.models.layers.native import load_kernels
from frameloom.train.gradient_norm import measure_in_products, measure_natively
from torch import Tensor, nn

from frameloom.core.random import stream
from frameloom.train.optimizer import measure_gradients

Way = Callable[[Sequence[Tensor]], Tensor]

needs_compiler = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler")
WAYS = [measure_in_products, pytest.param(measure_natively, marks=needs_compiler)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=stream(seed, "gradient"))


def norm_in_doubles(grads: Sequence[Tensor]) -> float:
    return torch.cat([grad.flatten() for grad in grads]).double().norm().item()


@pytest.mark.parametrize("measure", WAYS)
def test_norm_of_a_large_gradient_is_that_of_doubles(measure: Way) -> None:
    """Added up one by one in float32, four million squares are off by nearly one in ten thousand."""
    grads = [draw(2048, 2048), draw(2048, seed=1)]
    assert measure(grads).item() == pytest.approx(norm_in_doubles(grads), rel=2e-5)


@pytest.mark.parametrize("measure", WAYS)
def test_every_number_counts_whatever_its_tensor_looks_like(measure: Way) -> None:
    """Odd lengths, several pieces, strides, single numbers and tensors without any."""
    for shape in ((1,), (0,), (7,), (63,), (3, 5, 11), (16384,), (16385,), (301, 173)):
        grads = [torch.zeros(shape), draw(40, 30).t(), draw(9)[::2]]
        for place in {0, torch.tensor(shape).prod().item() // 2, torch.tensor(shape).prod().item() - 1} - {-1}:
            grads[0].flatten()[place : place + 1] = 100.0
            found = measure(grads)
            assert found.dtype == torch.float32 and found.shape == ()
            assert found.item() == pytest.approx(norm_in_doubles(grads), rel=1e-6)


@pytest.mark.parametrize("measure", WAYS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_shows(measure: Way, bad: float) -> None:
    grads = [draw(300, 70), draw(5)]
    assert measure(grads).isfinite()
    grads[0][299, 69] = bad
    assert not measure(grads).isfinite()


@needs_compiler
def test_bits_do_not_depend_on_threads() -> None:
    grads = [draw(517, 333), draw(64, seed=1)]
    before = torch.get_num_threads()
    found = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(measure_natively(grads).item())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    assert measure_natively([grads[0] * (1 + 1e-5), grads[1]]).item() not in found


def test_parameters_without_gradients_are_left_out() -> None:
    layer = nn.Linear(6, 4)
    assert measure_gradients(list(layer.parameters())).item() == 0
    layer.bias.grad = torch.tensor([0.0, 3.0, 0.0, 4.0])
    assert measure_gradients(list(layer.parameters())).item() == 5
