"""Text encoders whose layers two processes split give the states of a whole one, and each holds half of the weights."""

from __future__ import annotations

import pytest

from frameloom.config.loading.recipe import recipe_from_dict
from frameloom.core.errors import ConfigError
from frameloom.models.text.tensor_parallel import check_sizes
from tests.config.rules.test_parallel import recipe
from tests.distributed.jobs import Found
from tests.models.text.tiny import make_t5

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_layers_that_are_split_give_the_states_of_whole_ones(done, kind):
    for rank in Found(done.folder / "layers", 2).ranks:
        found = rank[kind]
        assert found["spread"] > 1e-3, "all captions look alike: the test proves nothing"
        assert len(found["differences"]) == 2 and max(found["differences"]) < 1e-5
        assert found["fingerprints"][0] == found["fingerprints"][1], "a cache would be refused"
        # Rounded weights are another matter: the tolerance above is not one that anything would pass.
        assert 1e-4 < found["of_half"][0] < 0.2


@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_each_process_holds_half_of_the_weights(done, kind):
    """Norms alone are held by both."""
    shares = [rank[kind]["share"] for rank in Found(done.folder / "layers", 2).ranks]
    assert all(0.5 <= share < 0.53 for share in shares)


@pytest.mark.parametrize("world", [2, 4])
def test_a_run_with_split_layers_learns_the_same(done, world):
    """Two processes; and two pairs, which also share clips and split the denoiser's weights."""
    ours, alone = done.found(f"layers {world}"), done.found("layers alone")
    assert ours.losses() == pytest.approx(alone.losses(), rel=1e-5)
    other = done.found("layers of another")
    assert abs(other.losses()[0] / alone.losses()[0] - 1) > 1e-4, "the denoiser does not listen to its text"


def test_heads_that_do_not_divide_are_told_with_the_arithmetic(tmp_path):
    with pytest.raises(
        ConfigError, match=r"parallel.tensor is 3, but the text encoder t5 has 64 .*64 / 3 leaves 1; set"
    ):
        check_sizes("t5", 3, num_heads=64, feed_forward=10240, key="parallel.tensor")
    folder = str(make_t5(tmp_path / "t5"))
    text = {"encoders": [{"name": "t5", "path": folder, "max_length": 16}]}
    with pytest.raises(
        ConfigError, match=r"tensor is 4, but text.encoders.0 has 2 attention heads and 32 inner.*1, 2$"
    ):
        recipe_from_dict(recipe(text=text, parallel={"encoders": "tensor", "tensor": 4}))
    recipe_from_dict(recipe(text=text, parallel={"encoders": "tensor", "tensor": 2}))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 2}, "parallel.tensor is 2, but parallel.encoders is each; it splits text encoders.* zero 3"),
        ({"encoders": "tensor"}, "parallel.tensor is 1, but parallel.encoders is tensor, so that nothing is split"),
        ({"encoders": "tensor", "tensor": 2}, "text.encoders are minilm; layers of t5 and mt5 are split: write each"),
    ],
)
def test_settings_that_split_nothing_are_refused(parallel, message):
    with pytest.raises(ConfigError, match=message):
        recipe_from_dict(recipe(parallel=parallel))
