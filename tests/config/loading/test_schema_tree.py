from __future__ import annotations

import pytest

from frameloom.config.loading.schema_tree import SYNONYMS, explain_unknown, kind_at


def test_names_of_other_trainers_point_to_keys_that_exist() -> None:
    assert [name for name, home in SYNONYMS.items() if kind_at(tuple(home.split("."))) is None] == []


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("lr", "the recipe has no key 'lr'; 'lr' belongs to optim: optim.lr"),
        ("train.lr", "train has no key 'lr'; 'lr' belongs to optim: optim.lr"),
        ("optim.leraning_rate", "optim has no key 'leraning_rate'; did you mean 'lr'?"),
        ("optim.warmup_steps", "'warmup_steps' belongs to optim.schedule: optim.schedule.warmup_steps"),
        ("train.ema_decay", "did you mean train.ema.decay?"),
        ("sample.num_steps", "did you mean 'steps'?"),
        ("data.batch_size", "did you mean 'buckets'?"),
        ("text.encoders.0.maxlen", "did you mean 'max_length'?"),
        ("steps", "'steps' belongs to train or sample: train.steps or sample.steps"),
        ("optim.zzz", "known keys: name, lr, betas"),
    ],
)
def test_an_unknown_key_is_told_where_it_belongs(key: str, answer: str) -> None:
    assert answer in explain_unknown(tuple(key.split(".")))[0]
