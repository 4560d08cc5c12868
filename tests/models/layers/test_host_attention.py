"""Our kernel for attention on the processor: numbers and gradients of the formula, and when it is left to torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from frameloom.core.random import stream
from frameloom.models.layers import native
from frameloom.models.layers.attention import attend
from frameloom.models.layers.host_attention import attend_on_host
from tests.models.layers.fused_kernels import Seen

# Few of both, which has a way of its own, less than a block, one and more, and several spans of keys.
LENGTHS = [(1, 1), (3, 4), (8, 8), (64, 70), (96, 96), (97, 103), (300, 97), (100, 800)]

needs_compiler = pytest.mark.skipif(native.load_kernels() is None, reason="no C++ compiler here")


@pytest.fixture
def is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor."""
    monkeypatch.setattr(native, "_HAS_PRODUCTS", True)


def draw_heads(queries: int, keys: int, *, batch: int = 2, heads: int = 3, width: int = 40) -> list[Tensor]:
    """Queries, keys and values [B, H, tokens, D], whose tokens lie in one piece as projections give them."""
    drawn = []
    for seed, count in enumerate((queries, keys, keys)):
        part = torch.randn(batch, count, heads, width, generator=stream(seed, "test host attention"))
        drawn.append(part.transpose(1, 2).requires_grad_())
    return drawn


def find_gradients(made: Tensor, heads: list[Tensor]) -> tuple[Tensor, ...]:
    push = torch.randn(made.shape, generator=stream(3, "test host attention"), dtype=torch.float64)
    return torch.autograd.grad(made, heads, push.to(made.dtype))


def make_exact(heads: list[Tensor]) -> list[Tensor]:
    return [part.detach().double().requires_grad_() for part in heads]


@needs_compiler
@pytest.mark.parametrize("width", [3, 16, 24, 40, 72, 96, 128, 160])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_it_is_the_attention_of_the_formula(is_faster: None, queries: int, keys: int, width: int) -> None:
    heads = draw_heads(queries, keys, width=width)
    exact = make_exact(heads)
    with Seen() as seen:
        made = attend(*heads)
        found = find_gradients(made, heads)
    expected = F.scaled_dot_product_attention(*exact)
    assert seen.count == 0
    assert made.transpose(1, 2).is_contiguous()
    assert (made - expected).abs().max() < 2e-6
    for one, other in zip(found, find_gradients(expected, exact), strict=True):
        assert (one - other).abs().max() < 1e-5


@needs_compiler
@pytest.mark.parametrize("scale", [0.0, 0.03, 1.0])
def test_scores_are_scaled_as_asked(is_faster: None, scale: float) -> None:
    heads = draw_heads(100, 110)
    exact = make_exact(heads)
    made, expected = attend(*heads, scale=scale), F.scaled_dot_product_attention(*exact, scale=scale)
    assert (made - expected).abs().max() < 1e-5
    for one, other in zip(find_gradients(made, heads), find_gradients(expected, exact), strict=True):
        assert (one - other).abs().max() < 1e-4


@needs_compiler
def test_scores_of_any_size_are_told_apart(is_faster: None) -> None:
    """Highest scores that grow from span to span, and far beyond the largest power of two."""
    q, k, v = draw_heads(100, 900)
    k = (k.detach() * torch.linspace(0, 100, 900)[:, None]).requires_grad_()
    exact = make_exact([q, k, v])
    made, expected = attend(q, k, v), F.scaled_dot_product_attention(*exact)
    assert (made - expected).abs().max() < 1e-4
    for one, other in zip(find_gradients(made, [q, k, v]), find_gradients(expected, exact), strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


@needs_compiler
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(4, 5), (70, 64), (64, 500)])
def test_a_bias_of_keys_is_added_to_their_scores(is_faster: None, queries: int, keys: int, is_shared: bool) -> None:
    heads = draw_heads(queries, keys)
    bias = torch.randn(1 if is_shared else 2, 1, 1, keys, generator=stream(5, "test host attention"))
    bias[..., keys // 2 + 1 :] = -1e4
    bias[..., 0] = -torch.inf
    exact = make_exact(heads)
    with Seen() as seen:
        made = attend(*heads, bias)
        found = find_gradients(made, heads)
    assert seen.count == 0
    expected = F.scaled_dot_product_attention(*exact, attn_mask=bias.double())
    assert (made - expected).abs().max() < 2e-6
    for one, other in zip(found, find_gradients(expected, exact), strict=True):
        assert (one - other).abs().max() < 1e-5
    assert (made - attend(*heads)).abs().max() > 1e-2


@needs_compiler
@pytest.mark.parametrize(("queries", "keys"), [(4, 5), (70, 500)])
def test_who_may_see_nothing_gets_zeros(is_faster: None, queries: int, keys: int) -> None:
    heads, bias = draw_heads(queries, keys), torch.zeros(2, 1, 1, keys)
    bias[1] = -torch.inf
    made = attend(*heads, bias)
    assert not made[1].any() and torch.equal(made[0], attend(*(part[:1] for part in heads))[0])
    assert all(not grad[1].abs().max() > 1e-30 and grad[0].any() for grad in find_gradients(made, heads))


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_hidden(is_faster: None, value: float) -> None:
    q, k, v = draw_heads(100, 900)
    k.data[0, 0, 850, 2] = value
    made = attend(q, k, v)
    assert made[0, 0].isnan().any(dim=-1).sum() >= 20
    assert made[0, 1:].isfinite().all() and made[1].isfinite().all()
    assert find_gradients(made, [q, k, v])[0][0, 0].isnan().any()


@needs_compiler
@pytest.mark.parametrize(("queries", "keys"), [(200, 130), (4, 7)])
def test_bits_depend_neither_on_the_batch_nor_on_threads_nor_on_the_layout(
    is_faster: None, queries: int, keys: int
) -> None:
    heads = draw_heads(queries, keys, batch=3)
    expected = [attend(*heads), *find_gradients(attend(*heads), heads)]
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found = [attend(*heads), *find_gradients(attend(*heads), heads)]
            assert all(map(torch.equal, found, expected))
            assert torch.equal(attend(*(part[1:2] for part in heads)), expected[0][1:2])
    finally:
        torch.set_num_threads(before)
    packed = [part.detach().contiguous() for part in heads]
    widened = [torch.stack([part.detach(), part.detach()], dim=-1)[..., 0] for part in heads]  # every second number
    assert torch.equal(attend(*packed), expected[0])
    assert torch.equal(attend(*widened), expected[0])


@needs_compiler
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("threads", [(1, 4), (4, 1)])
def test_the_way_back_may_have_other_threads(is_faster: None, threads: tuple[int, int], has_bias: bool) -> None:
    """Three heads are for one thread, and not for four."""
    heads = draw_heads(70, 90)
    bias = torch.randn(2, 1, 1, 90, generator=stream(5, "test host attention")) if has_bias else None
    exact = make_exact(heads)
    expected = F.scaled_dot_product_attention(*exact, attn_mask=None if bias is None else bias.double())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads[0])
        made = attend_on_host(*heads, bias)
        torch.set_num_threads(threads[1])
        found = find_gradients(made, heads)
    finally:
        torch.set_num_threads(before)
    assert (made - expected).abs().max() < 2e-6
    for one, other in zip(found, find_gradients(expected, exact), strict=True):
        assert (one - other).abs().max() < 1e-5


@needs_compiler
def test_gradients_may_come_in_any_layout(is_faster: None) -> None:
    heads = draw_heads(100, 120)
    push = torch.randn(2, 3, 40, 100, generator=stream(4, "test host attention")).mT
    found = torch.autograd.grad(attend(*heads), heads, push)
    expected = torch.autograd.grad(attend(*heads), heads, push.contiguous())
    assert all(map(torch.equal, found, expected))
    summed = torch.autograd.grad(attend(*heads).sum(), heads)
    ones = torch.autograd.grad(attend(*heads), heads, torch.ones(2, 3, 100, 40))
    assert all(map(torch.equal, summed, ones))


@needs_compiler
def test_compiled_code_takes_it_for_lengths_for_which_it_pays(is_faster: None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries, keys in ((70, 90), (4, 4), (30, 20), (200, 64)):
        heads = draw_heads(queries, keys)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            made = compiled(*heads)
        found = find_gradients(made, heads)
        names = [event.name for event in seen.events()]
        assert "frameloom::attend" in names
        assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in names) == (queries == 30)
        expected = attend(*heads)
        assert torch.equal(made, expected)
        for one, other in zip(found, find_gradients(expected, heads), strict=True):
            assert (one - other).abs().max() <= (1e-6 if queries == 30 else 0)
    torch.compiler.reset()


@pytest.mark.parametrize(
    "why",
    ["not so many", "a mask of pairs", "half precision", "autocast", "another processor", "no compiler", "few heads"],
)
def test_all_else_is_left_to_torch(is_faster: None, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    heads, mask = draw_heads(96, 63 if why == "not so many" else 96), None
    if why == "few heads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    if why == "half precision":
        heads = [part.bfloat16() for part in heads]
    if why == "another processor":
        monkeypatch.setattr(native, "_HAS_PRODUCTS", False)
    if why == "no compiler":
        monkeypatch.setattr(native, "load_kernels", lambda: None)
    if why == "a mask of pairs":
        mask = torch.ones(1, 1, 96, 96, dtype=torch.bool)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"), Seen() as seen:
        made = attend(*heads, mask)
    assert seen.count == 1
    assert made.shape == heads[0].shape


def test_a_mask_that_learns_gets_its_gradient(is_faster: None) -> None:
    heads, mask = draw_heads(96, 96), torch.zeros(1, 1, 1, 96, requires_grad=True)
    attend(*heads, mask).square().sum().backward()
    assert mask.grad is not None and mask.grad.any()


def test_who_forbids_fused_kernels_gets_none(is_faster: None) -> None:
    with sdpa_kernel(SDPBackend.MATH), Seen() as seen:
        made = attend(*draw_heads(96, 96))
    assert seen.count == 0 and "HostAttention" not in str(made.grad_fn)


def test_an_empty_batch_is_attended_to(is_faster: None) -> None:
    assert attend(*draw_heads(96, 96, batch=0)).shape == (0, 3, 96, 40)
