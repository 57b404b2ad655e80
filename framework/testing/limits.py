"""What every sampler must make of requests that may not generate everything; a part of `SamplerConformance`."""

from __future__ import annotations

from typing import Any

import torch

from ..types import SamplingParams
from .sampling import Sampling, random_logits

GREEDY = SamplingParams(temperature=0)


class Limits:
    """Allowed and bad tokens."""

    def _sampling(self) -> Sampling:
        raise NotImplementedError

    def test_allowed_tokens(self) -> None:
        """Nothing else, however likely it is; EOS is one of them or none."""
        logits = torch.full((1, 50), -20.0)
        logits[0, [10, 11, 12]] = torch.tensor([30.0, 20.0, 10.0])
        for temperature in (0.0, 1.0):
            given: dict[str, Any] = {"temperature": temperature, "eos_token_ids": (10,)}
            sampling = self._sampling()
            sampling.add("free", SamplingParams(**given))
            sampling.add("some", SamplingParams(allowed_token_ids=(11, 12), **given))
            sampling.add(
                "biased", SamplingParams(allowed_token_ids=(11, 12), logit_bias={10: 100.0, 12: 20.0}, **given)
            )
            sampling.add("ends", SamplingParams(allowed_token_ids=(10, 12), min_tokens=2, **given))
            sampling.add("only ends", SamplingParams(allowed_token_ids=(10,), min_tokens=2, **given))
            found = [sampling.sample(logits.expand(5, -1)) for _ in range(3)]
            assert found == [[10, 11, 12, 12, 10], [10, 11, 12, 12, 10], [10, 11, 12, 10, 10]]

    def test_bad_tokens(self) -> None:
        """The last of a sequence may not follow the others in the output, of which the prompt is no part: alone, after
        a return, and where one sequence ends as another begins."""
        logits = torch.full((1, 50), -20.0)
        logits[0, [10, 11, 12, 13]] = torch.tensor([30.0, 20.0, 10.0, 0.0])
        bad: list[tuple[tuple[tuple[int, ...], ...], list[int]]] = [
            (((10,),), [11, 11, 11, 11, 11]),
            (((10, 10),), [10, 11, 10, 11, 10]),
            (((10, 10), (10, 11)), [10, 12, 10, 12, 10]),
            (((10, 10, 10), (10, 10, 11)), [10, 10, 12, 10, 10]),
            (((10, 10), (11, 10), (10, 11, 11)), [10, 11, 12, 10, 11]),
            (((10, 11, 10, 11, 10), (10, 10)), [10, 11, 10, 11, 11]),
        ]
        for temperature in (0.0, 1.0):
            for sequences, expected in bad:
                params = SamplingParams(temperature=temperature, bad_token_ids=sequences)
                for known in range(5):
                    sampling = self._sampling()
                    sampling.add("free", GREEDY, prompt=(10, 10))
                    sampling.add("r", params, prompt=(10, 10), output=expected[:known])
                    found = [sampling.sample(logits.expand(2, -1))[1] for _ in range(5 - known)]
                    assert found == expected[known:], f"{sequences}, after {expected[:known]}: {found}"

    def test_nothing_left(self) -> None:
        """Told by `Sampled.empty`, of the request alone; `min_tokens` and the like give way before that."""
        logits = random_logits(6, seed=3)
        logits[4, :] = -torch.inf
        logits[4, [5, 6]] = 0.0
        only = {"stop_token_ids": (3,), "allowed_token_ids": (3,)}
        for temperature in (0.0, 1.0):
            sampling = self._sampling()
            for id, given in {
                "free": {},
                "empty": {"allowed_token_ids": (3, 4), "bad_token_ids": ((3,), (4,))},
                "one": {"allowed_token_ids": (3, 4), "bad_token_ids": ((3,),)},
                "ends": {"min_tokens": 5, **only},
                "masked": {"allowed_token_ids": (7, 8)},  # by a grammar, which wants another
                "after": {"allowed_token_ids": (3,), "bad_token_ids": ((3, 3),)},
            }.items():
                sampling.add(id, SamplingParams(temperature=temperature, **given), 7)  # type: ignore[arg-type]
            batch = sampling.batch()
            tokens = sampling.answer(logits, batch)
            assert sampling.empty == [id in ("empty", "masked") for id in batch.ids]
            assert [tokens[2], tokens[3], tokens[5]] == [4, 3, 3]
            alone = self._sampling()
            alone.add("free", SamplingParams(temperature=temperature), 7)
            assert alone.sample(logits[:1]) == tokens[:1] and not any(alone.empty)
            sampling.sample(logits)
            sampling.sample(logits)
            assert sampling.empty == [id in ("empty", "masked", "after") for id in batch.ids]
