"""Optimizer state in host memory: the same numbers, with a part of the state on the device at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from frameloom.config.schema.optim import OptimSection
from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.training.memory import optimizer_offload
from frameloom.training.memory.optimizer_offload import HostState, Part, PinnedArena, apply_offload, offload_state
from frameloom.training.optim.optimizer import (
    allocate_state,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    trained_names,
)

CPU = torch.device("cpu")


class MeasuredArena(PinnedArena):
    def __init__(self, *, pin_memory: bool) -> None:
        super().__init__(pin_memory=pin_memory)
        self.blocks: dict[int, int] = {}

    @property
    def held_bytes(self) -> int:
        return sum(self.blocks.values())

    def allocate_like(self, tensor: Tensor) -> Tensor:
        place = super().allocate_like(tensor)
        block = place.untyped_storage()
        self.blocks[block.data_ptr()] = block.nbytes()
        return place


class MeasuredState(HostState):
    """`peak_bytes` is the most that was on the device at once."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, part_bytes: int) -> None:
        super().__init__(optimizer, device, part_bytes)
        self.arena: MeasuredArena = MeasuredArena(pin_memory=False)
        self.here: dict[str, int] = {}
        self.peak_bytes = 0

    def _bring(self, part: Part) -> Sequence[Tensor]:
        brought = super()._bring(part)
        self.here[part.names[0]] = sum(tensor.nbytes for tensor in brought)
        self.peak_bytes = max(self.peak_bytes, sum(self.here.values()))
        return brought

    def _send(self, part: Part) -> None:
        super()._send(part)
        self.here.pop(part.names[0], None)


@pytest.fixture(autouse=True)
def measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_offload, "HostState", MeasuredState)


NAMES = ["adamw", "lion", "came", "adafactor", "muon"]
SIZES = (("blocks.0.weight", 48), ("blocks.1.weight", 40), ("blocks.2.weight", 33))


def make_params() -> dict[str, nn.Parameter]:
    params = {}
    for name, size in SIZES:
        params[name] = nn.Parameter(torch.randn(size, size, generator=stream(1, name)))
        params[name.replace("weight", "bias")] = nn.Parameter(torch.zeros(size))
    return params


def make_optimizer(params: dict[str, nn.Parameter], name: str) -> torch.optim.Optimizer:
    return build_optimizer(params.items(), OptimSection(name=name, lr=1e-2), [key for key, _ in SIZES])


def take_steps(params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for number, param in enumerate(params.values()):
            param.grad = torch.randn(param.shape, generator=stream(2, "gradient", step, number))
        if step == 1:
            params["blocks.1.weight"].grad = None  # not used in this step: its state rests
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_state_at_home_gives_the_same_weights_to_the_bit(name: str) -> None:
    found = {}
    for part_bytes in (None, 10_000, 1 << 30):
        params = make_params()
        optimizer = make_optimizer(params, name)
        hooks: list[str] = []
        optimizer.register_step_post_hook(lambda *_, hooks=hooks: hooks.append("called"))
        if part_bytes is None:
            allocate_state(optimizer)
        else:
            host = offload_state(optimizer, CPU, part_bytes)
        hooks.clear()
        take_steps(params, optimizer, range(4))
        assert len(hooks) == 4
        state = optimizer_tensors(optimizer, trained_names(optimizer))
        found[part_bytes] = {**{key: param.detach() for key, param in params.items()}, **state}
    for part_bytes in (10_000, 1 << 30):
        assert found[part_bytes].keys() == found[None].keys()
        assert all(torch.equal(tensor, found[part_bytes][key]) for key, tensor in found[None].items())
    assert not torch.equal(found[None]["blocks.0.weight"], make_params()["blocks.0.weight"])
    if name == "adamw":
        assert isinstance(host, MeasuredState) and host.peak_bytes > 0


def test_only_parts_of_the_state_are_on_the_device() -> None:
    params = make_params()
    optimizer = make_optimizer(params, "adamw")
    host = offload_state(optimizer, CPU, 10_000)
    take_steps(params, optimizer, range(2))
    whole = sum(2 * param.nbytes for param in params.values())
    # The part that is moved and the next one, of three.
    assert isinstance(host, MeasuredState)
    assert 0 < host.peak_bytes <= 2 * (48 * 48 + 40 * 40) * 4 < whole
    assert host.arena.held_bytes >= 2 * sum(size * size * 4 for _, size in SIZES)


def test_state_at_home_keeps_its_places() -> None:
    params = make_params()
    optimizer = make_optimizer(params, "adamw")
    offload_state(optimizer, CPU, 10_000)
    places = {
        key: tensor.data_ptr() for key, tensor in optimizer_tensors(optimizer, params).items() if tensor.ndim == 2
    }
    take_steps(params, optimizer, range(2))
    after = optimizer_tensors(optimizer, params)
    assert len(places) == 6 and all(after[key].data_ptr() == place for key, place in places.items())


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_checkpoint_moves_between_runs_with_and_without(name: str) -> None:
    params = make_params()
    optimizer = make_optimizer(params, name)
    offload_state(optimizer, CPU, 10_000)
    take_steps(params, optimizer, range(2))
    saved = {key: tensor.clone() for key, tensor in optimizer_tensors(optimizer, params).items()}
    others = {key: nn.Parameter(param.detach().clone()) for key, param in params.items()}
    plain = make_optimizer(others, name)
    load_optimizer_tensors(plain, trained_names(plain), saved)
    back = {key: nn.Parameter(param.detach().clone()) for key, param in params.items()}
    again = make_optimizer(back, name)
    offload_state(again, CPU, 10_000)
    load_optimizer_tensors(again, trained_names(again), saved)
    for own, chosen in ((params, optimizer), (others, plain), (back, again)):
        take_steps(own, chosen, range(2, 4))
    assert all(torch.equal(params[key], others[key]) and torch.equal(params[key], back[key]) for key in params)


def test_tensors_on_a_arena_do_not_overlap() -> None:
    arena = PinnedArena(pin_memory=False)
    places = [arena.allocate_like(torch.empty(size, dtype=torch.bfloat16)) for size in (300, 5, 700)]
    for number, place in enumerate(places):
        place.fill_(number)
    assert [set(place.tolist()) for place in places] == [{0.0}, {1.0}, {2.0}]


def test_on_the_cpu_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optim\.offload is true, but the run computes on the CPU"):
        apply_offload(make_optimizer(make_params(), "adamw"), CPU)
