"""Each seed of the fuzzers, once, as `make fuzz` judges what it finds: broker, twin and msgspec agree."""

from __future__ import annotations

import random

import pytest

from tests.fuzz import differential

SEEDS = [
    (target, file)
    for target in differential.CHECKS
    for file in sorted((differential.HERE / "corpus" / target).iterdir())
]


@pytest.mark.parametrize(("target", "file"), SEEDS, ids=lambda part: getattr(part, "name", part))
def test_broker_twin_and_msgspec_agree_on_a_seed(target, file):
    differential.CHECKS[target](file.read_bytes())


@pytest.mark.parametrize("target", differential.CHECKS)
def test_they_agree_on_mixtures_of_seeds(target):
    rng = random.Random(0)
    texts, words = [file.read_bytes() for name, file in SEEDS if name == target], differential.words()
    for _ in range(150):
        differential.CHECKS[target](differential.mixed(rng, texts, words))
