"""The histogram against exact percentiles."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.bench.histogram import Histogram, Wire

NUMBERS = st.lists(st.integers(0, 2**50) | st.integers(0, 1000) | st.integers(10_000, 90_000), min_size=1, max_size=100)
PERCENTS = (0.0, 1.0, 50.0, 90.0, 99.0, 99.9, 100.0)


def of(numbers: list[int]) -> Histogram:
    histogram = Histogram()
    for number in numbers:
        histogram.record(number)
    return histogram


def same(a: Histogram, b: Histogram) -> bool:
    return a.wire() == b.wire()


@given(NUMBERS)
def test_a_percentile_is_less_than_half_a_percent_off(numbers):
    histogram = of(numbers)
    assert (histogram.count, histogram.min, histogram.max) == (len(numbers), min(numbers), max(numbers))
    assert histogram.sum == sum(numbers)
    for percent in PERCENTS:
        exact = sorted(numbers)[max(1, math.ceil(len(numbers) * percent / 100 - 1e-9)) - 1]
        assert abs(histogram.percentile(percent) - exact) <= exact * 0.004, percent


@given(NUMBERS, NUMBERS)
def test_two_that_are_merged_are_as_one_that_has_seen_all(one, other):
    merged = of(one)
    merged.merge(of(other))
    merged.merge(Histogram())
    assert same(merged, of(one + other))
    empty = Histogram()
    empty.merge(of(one))
    assert same(empty, of(one))


@given(NUMBERS)
def test_written_and_read_it_is_the_same(numbers):
    histogram = of(numbers)
    text = msgspec.json.encode(histogram.wire())
    again = Histogram.read(msgspec.json.decode(text, type=Wire))
    assert same(again, histogram)
    assert [again.percentile(percent) for percent in PERCENTS] == [histogram.percentile(p) for p in PERCENTS]


@given(NUMBERS, st.integers(1, 9))
def test_many_at_once_are_as_many_one_by_one(numbers, times):
    histogram = Histogram()
    for number in numbers:
        histogram.record(number, times)
    assert same(histogram, of(numbers * times))


@given(NUMBERS)
def test_its_steps_rise_to_all(numbers):
    steps = list(of(numbers).steps())
    assert steps == sorted(steps)
    assert steps[-1][0] == pytest.approx(100)
    assert steps[-1][1] <= max(numbers)


def test_nothing_has_no_percentiles_and_a_clock_that_steps_back_does_no_harm():
    assert (Histogram().count, Histogram().percentile(99), Histogram().mean) == (0, 0, 0.0)
    assert of([-5]).percentile(50) == 0


def test_numbers_that_contradict_each_other_are_refused():
    wire = of([1, 2, 3]).wire()
    for broken in (
        msgspec.structs.replace(wire, count=7),
        msgspec.structs.replace(wire, buckets=[(1, 0)]),
        msgspec.structs.replace(wire, bits=3),
    ):
        with pytest.raises(ValueError, match=r"bucket"):
            Histogram.read(broken)
