"""The default sampler passes the conformance kit, and the kit can fail: broken samplers do not."""

from __future__ import annotations

import broken_samplers as broken
import pytest

from framework.testing import SamplerConformance


class TestDefault(SamplerConformance):
    provider = "default"


class TestToy(SamplerConformance):
    draws = 1000

    def sampler(self) -> object:
        return broken.Toy()


# The kit can fail

SAMPLERS = {
    broken.AnswersWithNumbers: ["test_logit_bias"],
    broken.TakesTheLastOfEquals: ["test_greedy_takes_the_first_of_the_likeliest"],
    broken.TakesTheExecutorsWord: ["test_penalties_by_hand", "test_min_tokens"],
    broken.AllowsTheEnds: ["test_allowed_tokens"],
    broken.BansWhereverTheyWere: ["test_bad_tokens"],
    broken.LooksAtOneTokenBefore: ["test_bad_tokens"],
    broken.DrawsFromNothing: ["test_nothing_left"],
    broken.IgnoresTheSeed: ["test_seed_and_index_decide", "test_company_changes_nothing"],
    broken.DrawsFromTheGlobalGenerator: ["test_seed_and_index_decide"],
    broken.IgnoresTheIndex: ["test_seed_and_index_decide", "test_frequencies_over_indices"],
    broken.CutsSeedsInHalf: ["test_seed_and_index_decide"],
    broken.CountsItsOwnSteps: ["test_seed_and_index_decide", "test_company_changes_nothing"],
    broken.DrawsInTurn: ["test_company_changes_nothing"],
    broken.TakesRowsForRequests: ["test_owner_says_whose_row_it_is"],
    broken.KeepsOneMoreThanTopK: ["test_frequencies"],
    broken.KeepsNoMoreThan256: ["test_frequencies_of_many"],
    broken.KeepsOneMoreThanTopP: ["test_frequencies"],
    broken.NeverNormalisesTopP: ["test_frequencies"],
    broken.PenalisesThePrompt: ["test_penalties_by_hand", "test_penalties_follow_the_output"],
    broken.OnlyDivides: ["test_penalties_by_hand"],
    broken.EndsOneEarly: ["test_min_tokens"],
    broken.BansByALargeNumber: ["test_masked_tokens_are_never_drawn"],
    broken.KeepsTheFirstParameters: ["test_an_id_may_come_back", "test_forgets_who_left"],
    broken.KeepsWhoLeft: ["test_forgets_who_left"],
    broken.SortsTheOutput: ["test_leaves_what_it_is_shown_alone"],
}


@pytest.mark.parametrize("plugin", SAMPLERS, ids=lambda plugin: plugin.__name__)
def test_a_broken_sampler_fails(plugin: type) -> None:
    class Suite(SamplerConformance):
        draws = 1000

        def sampler(self) -> object:
            return plugin()

    for check in SAMPLERS[plugin]:
        with pytest.raises(AssertionError):
            getattr(Suite(), check)()
