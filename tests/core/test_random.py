import numpy as np
import torch

from frameloom.core.random import key, numpy_stream, stream, uniform_at


def test_a_stream_depends_on_seed_purpose_and_every_counter():
    keys = {
        key(1, "noise", 2, 3),
        key(2, "noise", 2, 3),
        key(1, "crop", 2, 3),
        key(1, "noise", 3, 3),
        key(1, "noise", 23),
    }
    assert len(keys) == 5


def test_a_stream_gives_the_same_numbers_again_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    first = torch.randn(4, generator=stream(7, "noise", 1))
    torch.rand(3, generator=stream(8, "other"))
    assert torch.equal(first, torch.randn(4, generator=stream(7, "noise", 1)))
    assert not torch.equal(first, torch.randn(4, generator=stream(7, "noise", 2)))
    assert torch.equal(before, torch.random.get_rng_state())


def test_numpy_streams_repeat():
    assert numpy_stream(1, "order").integers(1 << 30) == numpy_stream(1, "order").integers(1 << 30)
    assert numpy_stream(1, "order").integers(1 << 30) != numpy_stream(2, "order").integers(1 << 30)


def test_a_row_gets_the_same_number_alone_or_among_many():
    base = key(3, "bucket", 0)
    many = uniform_at(base, np.arange(10_000))
    assert uniform_at(base, np.array([4321]))[0] == many[4321]
    assert many.min() >= 0 and many.max() < 1
    assert abs(many.mean() - 0.5) < 0.01 and abs(many.var() - 1 / 12) < 0.002
    assert not np.array_equal(many, uniform_at(key(4, "bucket", 0), np.arange(10_000)))
