"""Objects with tensors arrive whole, and no descriptor stays open."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest
import torch

from frameloom.data.loading.shm_transport import receive_object, send_object


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.bool, torch.int64])
def test_parcels_carry_any_tensor(dtype: torch.dtype) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = {
            "a": torch.arange(24).reshape(2, 3, 4).to(dtype),
            "b": [torch.zeros((0, 3), dtype=dtype), torch.tensor(1).to(dtype)],
            "c": np.arange(3),
        }
        before = len(os.listdir("/proc/self/fd"))
        send_object(ours, sent)
        send_object(ours, "second")
        got = receive_object(theirs)
        assert torch.equal(got["a"], sent["a"]) and got["a"].dtype == dtype
        assert [part.shape for part in got["b"]] == [(0, 3), ()]
        assert got["b"][1] == sent["b"][1]
        assert got["c"].tolist() == [0, 1, 2]
        got["a"].fill_(0)
        assert receive_object(theirs) == "second"
        assert len(os.listdir("/proc/self/fd")) == before
        ours.close()
        with pytest.raises(EOFError):
            receive_object(theirs)
