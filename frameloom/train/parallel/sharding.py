"""Weights, gradients and optimizer state split over processes (ZeRO 2 and 3), by PyTorch's FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only


def split_weights(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    keep_gathered: bool,
    gather_bf16: bool = False,
) -> None:
    """Split each block and what is left of the model; parameters keep their names and become sharded tensors.

    A mesh of two axes is (copies, parts): each group of parts holds the whole model. With `keep_gathered` (ZeRO 2) a
    block's weights stay whole from the forward to the backward pass. Inputs are not cast, because noise levels and
    positions lose their meaning in half precision; what is summed up is always float32.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if gather_bf16 else None,
        reduce_dtype=torch.float32 if gather_bf16 else None,
        cast_forward_inputs=False,
    )
    model.register_forward_hook(_own_output)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep_gathered, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keep_gathered, mp_policy=policy)


def _own_output(model: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A view as output would lose its gathering hook if someone changed it in place."""
    return output.clone() if output._is_view() else output


def add_up_by_block(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Add up gradients in the order of `split_weights`, where one process holds all weights.

    A tensor that several blocks are given, such as the vector of the noise level, has a gradient from each use. FSDP
    takes a block's inputs through one node, so uses add up inside each block first; without it they would be added to
    one running sum, which rounds otherwise.
    """
    for module in (*blocks, model):
        module.register_forward_pre_hook(_enter, with_kwargs=True)


def _enter(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return tree_map_only(Tensor, lambda given: given.view_as(given) if given.requires_grad else given, (args, options))


def expect_backward(model: nn.Module, *, is_last: bool, keep_gathered: bool) -> None:
    """Send gradients with the last backward pass of a step only; until then whole gradients add up here."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(is_last)
    if keep_gathered:
        # The next micro-batch would gather the same weights again.
        model.set_reshard_after_backward(is_last)
