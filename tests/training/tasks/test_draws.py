import numpy as np
import pytest
import torch

from frameloom.data.buckets.policy import Bucket
from frameloom.data.loading.batch import Batch
from frameloom.training.tasks.noising import draw_normal, draw_uniform


def batch(ordinals: list[int], epoch: int = 0) -> Batch:
    bucket = Bucket(0, "64px", 9, "1:1", 64, 64, 4)
    return Batch(epoch, 0, bucket, np.array(ordinals), np.array(ordinals), [""] * len(ordinals))


@pytest.mark.parametrize("draw", [draw_uniform, lambda *key: draw_normal(*key, (2, 3), torch.device("cpu"))])
def test_a_sample_draws_the_same_alone_or_in_any_batch(draw):
    whole = draw(5, "noise", batch([3, 4, 5, 6]))
    halves = torch.cat([draw(5, "noise", batch([3, 4])), draw(5, "noise", batch([5, 6]))])
    assert torch.equal(whole, halves)
    for other in (draw(6, "noise", batch([3, 4, 5, 6])), draw(5, "crop", batch([3, 4, 5, 6]))):
        assert not torch.equal(whole, other)
    assert not torch.equal(whole, draw(5, "noise", batch([3, 4, 5, 6], epoch=1)))


def test_draws_have_their_distribution():
    many = batch(list(range(4000)))
    uniform = draw_uniform(0, "timestep", many)
    assert abs(float(uniform.mean()) - 0.5) < 0.02 and float(uniform.min()) >= 0 and float(uniform.max()) < 1
    normal = draw_normal(0, "noise", many, (4,), torch.device("cpu"))
    assert abs(float(normal.mean())) < 0.03 and abs(float(normal.std()) - 1) < 0.03
