import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.packing import Packing, best_fit_decreasing


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.integers(1, 80))
    return draw(st.lists(st.integers(1, capacity), max_size=150)), capacity


def textbook_spaces(lengths: list[int], capacity: int) -> list[int]:
    """What best-fit decreasing, done one document at a time, leaves free in each row."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(space, row) for row, space in enumerate(spaces) if space >= length]
        if fitting:
            spaces[min(fitting)[1]] -= length
        else:
            spaces.append(capacity - length)
    return sorted(spaces)


def spaces_of(packing: Packing, lengths: list[int], capacity: int) -> list[int]:
    array = np.array(lengths, np.int64)
    return sorted(capacity - int(array[packing.pack(p)].sum()) for p in range(packing.num_packs))


@given(problems())
def test_packs_exactly_as_the_textbook_algorithm(problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    packing = best_fit_decreasing(np.array(lengths, np.int64), capacity)
    assert spaces_of(packing, lengths, capacity) == textbook_spaces(lengths, capacity)


@given(problems())
def test_every_document_is_in_exactly_one_pack_and_no_pack_overflows(problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    packing = best_fit_decreasing(np.array(lengths, np.int64), capacity)
    assert sorted(packing.documents.tolist()) == list(range(len(lengths)))
    assert all(space >= 0 for space in spaces_of(packing, lengths, capacity))
    assert all(len(packing.pack(p)) for p in range(packing.num_packs))


@given(problems())
def test_two_rows_are_never_both_at_most_half_full(problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    packing = best_fit_decreasing(np.array(lengths, np.int64), capacity)
    half_empty = [space for space in spaces_of(packing, lengths, capacity) if 2 * space >= capacity and space]
    assert len([space for space in half_empty if 2 * (capacity - space) <= capacity]) <= 1


@given(problems(), st.randoms(use_true_random=False))
def test_reordering_keeps_every_pack_whole(problem: tuple[list[int], int], random) -> None:
    lengths, capacity = problem
    packing = best_fit_decreasing(np.array(lengths, np.int64), capacity)
    order = list(range(packing.num_packs))
    random.shuffle(order)
    reordered = packing.reordered(np.array(order, np.int64))
    assert [reordered.pack(p).tolist() for p in range(packing.num_packs)] == [
        packing.pack(p).tolist() for p in order
    ]


def test_same_lengths_same_packing() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 5000)
    first, second = best_fit_decreasing(lengths, 512), best_fit_decreasing(lengths.copy(), 512)
    assert np.array_equal(first.documents, second.documents)
    assert np.array_equal(first.offsets, second.offsets)


def test_fills_rows_of_many_short_documents() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 20_000), 1, 2048).astype(np.int64)
    packing = best_fit_decreasing(lengths, 2048)
    assert lengths.sum() / (packing.num_packs * 2048) > 0.99


@pytest.mark.parametrize("lengths", [[0, 3], [3, 11]])
def test_refuses_lengths_that_no_row_can_hold(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"lengths must lie in 1\.\.10; found"):
        best_fit_decreasing(np.array(lengths, np.int64), 10)
