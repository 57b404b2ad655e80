"""The comparisons refuse wrong tokens, at near-ties too, and wrong log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from oracle import CLOSE, NEAR, TOP, Reference, assert_drawn, assert_equal, assert_same

from framework import Logprobs

FAR = {1: -0.5, 2: -1.5, 3: -2.0}
TIE = {1: -0.7, 2: -0.7 - NEAR / 2, 3: -3.0}
COUNT = 400  # one near-tie may pass


def entry(token: int, top: dict[int, float], off: float = 0.0) -> Logprobs:
    best = sorted(top.items(), key=lambda item: -item[1])[:2]
    return Logprobs(token, top[token] + off, 1, tuple((id, value + off) for id, value in best))


def compare(tops: list[dict[int, float]], output: Sequence[Logprobs], again: int = 1) -> int:
    """The number of near-ties; a continuation chooses `again` everywhere."""
    ref = Reference([9], [1] * len(tops), tops)

    def rest(prompt: list[int], count: int) -> list[Logprobs]:
        assert prompt == [9] + [1] * (len(tops) - count)
        return [entry(again, top) for top in tops[-count:]]

    return assert_equal([ref], [output], rest)


def test_equal_outputs() -> None:
    tops = [FAR, TIE, FAR]
    assert compare(tops, [entry(1, top, CLOSE / 2) for top in tops]) == 0


@pytest.mark.parametrize("at", [0, 7, COUNT - 1])
def test_a_near_tie_admits_the_second_best_alone(at: int) -> None:
    tops = [TIE if i == at else FAR for i in range(COUNT)]
    output = [entry(1, top) for top in tops[:at]] + [entry(2, TIE)] + [entry(3, FAR)] * (COUNT - at - 1)
    assert compare(tops, output) == 1
    output[at] = entry(3, TIE)
    with pytest.raises(AssertionError, match=f"token {at} is 3, 2.3 behind the best"):
        compare(tops, output)


def test_what_follows_a_near_tie_is_compared_too() -> None:
    tops = [TIE, *[FAR] * COUNT]
    with pytest.raises(AssertionError, match="token 1 is 2, 1 behind"):
        compare(tops, [entry(2, TIE)] * (COUNT + 1), again=2)


def test_near_ties_are_bounded() -> None:
    tops = [TIE, TIE, *[FAR] * 100]
    with pytest.raises(AssertionError, match="1 near-ties in 102 positions"):
        compare(tops, [entry(2, TIE)] * 102)


def test_log_probabilities_and_their_order() -> None:
    with pytest.raises(AssertionError, match=r"log-probability .* of 1, not -0.5"):
        compare([FAR], [entry(1, FAR, 2 * CLOSE)])
    with pytest.raises(AssertionError, match="3 is listed before a likelier one"):
        compare([FAR], [Logprobs(1, -0.5, 1, ((1, -0.5), (3, -2.0)))])
    with pytest.raises(AssertionError, match="7 is listed, and none of"):
        compare([FAR], [Logprobs(1, -0.5, 1, ((1, -0.5), (7, -1.5)))])
    swapped = Logprobs(1, -0.7, 1, ((2, -0.7 - NEAR / 2), (1, -0.7)))
    assert compare([TIE], [swapped]) == 0


def drawn(token: int) -> Logprobs:
    """One of TOP that are as likely as one another."""
    return Logprobs(token, -2.0, 1, tuple((10 * i, -2.0) for i in range(TOP)))


def test_a_draw_is_the_seed_s() -> None:
    right = [token for token in range(0, 10 * TOP, 10) if _passes(token)]
    assert len(right) == 1


def test_equals_at_the_end_may_be_so_by_rounding() -> None:
    """One of the nine is left out, or none; what is less likely takes no part."""
    at = [*map(_passes, range(0, 10 * TOP, 10))].index(True)
    tokens = [*range(1, 10 * TOP, 10)]
    for last in (0, 1000):
        nine = sorted([*tokens, last])
        for value, right in ((-2.0, nine[at : at + 2]), (-2.0 - CLOSE, [tokens[at]])):
            top = (*((token, -2.0) for token in tokens), (last, value))
            assert {token for token in tokens if _passes(token, top)} == {*right} - {last}


def _passes(token: int, top: tuple[tuple[int, float], ...] = drawn(0).top) -> bool:
    try:
        assert_drawn([[Logprobs(token, -2.0, 1, top)]], [7], 0.9)
    except AssertionError:
        return False
    return True


def test_drawn_outputs_differ_in_few() -> None:
    expected = [[drawn(10)] * 20] * 20  # two near-ties may pass
    for wrong, passes in ((0, True), (2, True), (3, False)):
        outputs = [[drawn(20)] + [drawn(30)] * 19] * wrong + expected[wrong:]
        if passes:
            assert_same(expected, outputs)
        else:
            with pytest.raises(AssertionError, match="3 of 20"):
                assert_same(expected, outputs)
    with pytest.raises(AssertionError):
        assert_same([[drawn(10)]], [[Logprobs(10, -2.0 + 2 * CLOSE, 1)]])
