from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from frameloom.config.schema.training import EMASection
from frameloom.core.errors import CheckpointError
from frameloom.core.random import stream
from frameloom.training.optim.ema import EMA

GOLDEN = Path(__file__).parents[2] / "goldens" / "open-sora-v2" / "ema_update.safetensors"


def make_model(purpose: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fill(model, purpose)
    return model.to(dtype)


@torch.no_grad()
def fill(model: nn.Module, purpose: str) -> None:
    generator = stream(8, purpose)
    for param in model.parameters():
        param.copy_(torch.randn(param.shape, generator=generator))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_average_follows_its_formula_over_many_updates():
    model = make_model("first")
    ema = EMA(dict(model.named_parameters()), EMASection(decay=0.9, warmup=False))
    expected = {name: value.double() for name, value in values(model).items()}
    for step in range(1, 6):
        fill(model, f"step {step}")
        ema.update(step)
        for name, value in values(model).items():
            expected[name] = 0.9 * expected[name] + 0.1 * value.double()
    for name, value in ema.state_dict().items():
        torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=1e-6)


def test_warmup_is_the_rule_of_diffusers():
    """An average of a weight that is 1 from the first update on, and was 0 before it."""
    for step, decay in ((1, 0.0), (2, 2 / 11), (3, 3 / 12), (100, 100 / 109), (10**6, 0.9999)):
        weight = torch.zeros(1)
        ema = EMA({"weight": weight}, EMASection(decay=0.9999, warmup=True))
        weight.fill_(1.0)
        ema.update(step)
        assert ema.state_dict()["weight"].item() == pytest.approx(1 - decay)


def test_first_update_with_warmup_copies_the_weights():
    model = make_model("first")
    ema = EMA(dict(model.named_parameters()), EMASection(decay=0.9999, warmup=True))
    fill(model, "second")
    ema.update(1)
    assert are_equal(ema.state_dict(), values(model))
    fill(model, "third")
    ema.update(2)
    assert not are_equal(ema.state_dict(), values(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_applied_swaps_in_the_average_and_gives_all_back(dtype):
    model = make_model("first", dtype)
    ema = EMA(dict(model.named_parameters()), EMASection(decay=0.5, warmup=False))
    fill(model, "second")
    ema.update(1)
    own = values(model)
    average = {name: value.clone() for name, value in ema.state_dict().items()}
    addresses = [param.data_ptr() for param in model.parameters()]
    with ema.applied(model):
        inside = values(model)
        assert are_equal(inside, {name: value.to(dtype) for name, value in average.items()})
        assert not are_equal(inside, own)
        assert [param.data_ptr() for param in model.parameters()] == addresses
    assert are_equal(values(model), own)
    assert are_equal(ema.state_dict(), average)
    assert {value.dtype for value in average.values()} == {torch.float32}


def test_applied_gives_the_weights_back_after_an_error():
    model = make_model("first")
    ema = EMA(dict(model.named_parameters()), EMASection(decay=0.5, warmup=False))
    fill(model, "second")
    own, average = values(model), {name: value.clone() for name, value in ema.state_dict().items()}
    with pytest.raises(ZeroDivisionError), ema.applied(model):
        raise ZeroDivisionError
    assert are_equal(values(model), own)
    assert are_equal(ema.state_dict(), average)


def test_average_cannot_be_read_or_moved_while_it_is_in_the_model():
    model = make_model("first")
    ema = EMA(dict(model.named_parameters()), EMASection(decay=0.5, warmup=False))
    with ema.applied(model):
        for action in (lambda: ema.update(1), ema.state_dict, lambda: ema.load_state_dict({})):
            with pytest.raises(RuntimeError, match="leave the block first"):
                action()
    ema.update(1)


def test_bfloat16_weights_have_a_float32_average_that_sees_small_steps():
    model = make_model("first", torch.bfloat16)
    ema = EMA(dict(model.named_parameters()), EMASection(decay=0.9999, warmup=False))
    before = {name: value.clone() for name, value in ema.state_dict().items()}
    fill(model, "second")
    ema.update(1)
    after = ema.state_dict()
    assert not are_equal(after, before)
    assert are_equal({n: v.bfloat16() for n, v in after.items()}, {n: v.bfloat16() for n, v in before.items()})


def test_resumed_average_continues_to_the_bit():
    def continue_from(state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        model = make_model("second")
        ema = EMA(dict(model.named_parameters()), EMASection(decay=0.9, warmup=True))
        if state is not None:
            ema.load_state_dict(state)
        fill(model, "third")
        ema.update(7)
        return ema.state_dict()

    model = make_model("first")
    ema = EMA(dict(model.named_parameters()), EMASection(decay=0.9, warmup=True))
    fill(model, "second")
    ema.update(6)
    saved = {name: value.clone() for name, value in ema.state_dict().items()}
    fill(model, "third")
    ema.update(7)
    assert are_equal(continue_from(saved), ema.state_dict())
    assert not are_equal(continue_from(None), ema.state_dict())


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_applied_to_a_sharded_model_reaches_its_forward_and_leaves_no_trace():
    model, plain = make_model("first"), make_model("first")
    fully_shard(model)
    ema = EMA(dict(model.named_parameters()), EMASection(decay=0.5, warmup=False))
    data = torch.randn(2, 3, generator=stream(8, "data"))
    averaged = plain(data)
    for name, param in model.named_parameters():
        with torch.no_grad():
            param.mul_(2)
            plain.get_parameter(name).mul_(2)
    own = plain(data)
    assert torch.equal(model(data), own)
    with ema.applied(model):
        assert torch.equal(model(data), averaged)
    assert torch.equal(model(data), own)
    assert not torch.equal(own, averaged)


def test_state_of_another_model_is_refused():
    ema = EMA(dict(make_model("first").named_parameters()), EMASection(decay=0.9, warmup=False))
    state = {name: value.clone() for name, value in ema.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"1 weights are missing.*'0.bias'"):
        ema.load_state_dict({name: value for name, value in state.items() if name != "0.bias"})
    with pytest.raises(CheckpointError, match=r"'0.weight' is \(1, 3\)"):
        ema.load_state_dict(state | {"0.weight": state["0.weight"][:1]})
    with pytest.raises(CheckpointError, match="missing"), ema.applied(nn.Linear(3, 4)):
        pass


def test_rare_updates_make_up_for_the_steps_between_them() -> None:
    """With weights that stand still between updates, both averages are equal; the control moves at each step."""
    for moves_each_step in (False, True):
        model = make_model("rare")
        often, rare = (EMA(dict(model.named_parameters()), EMASection(decay=0.9, every=every)) for every in (1, 5))
        generator = stream(0, "rare updates")
        for step in range(1, 31):
            if moves_each_step or step % 5 == 1:
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(torch.randn(param.shape, generator=generator))
            often.update(step)
            rare.update(step)
        distance = max(
            float((a - b).abs().max())
            for a, b in zip(often.state_dict().values(), rare.state_dict().values(), strict=True)
        )
        assert (distance < 1e-5) != moves_each_step


def test_an_average_in_host_memory_is_the_same():
    plain, hosted = make_model("first"), make_model("first")
    averages = [
        EMA(dict(model.named_parameters()), EMASection(decay=0.9, warmup=False, on_cpu=flag))
        for model, flag in ((plain, False), (hosted, True))
    ]
    before = {name: value.clone() for name, value in averages[1].state_dict().items()}
    for model, ema in zip((plain, hosted), averages, strict=True):
        fill(model, "second")
        ema.update(1)
    assert are_equal(averages[0].state_dict(), averages[1].state_dict())
    assert not are_equal(averages[1].state_dict(), before)
    assert {value.device.type for value in averages[1].state_dict().values()} == {"cpu"}
