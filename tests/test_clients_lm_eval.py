"""lm-eval against the server: what its scores say of the model is what transformers says of the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Running, running

from framework.settings import Settings

pytestmark = [pytest.mark.usefixtures("offline"), pytest.mark.slow]

QUESTIONS = [
    ("The quick brown fox", [" jumps over the lazy dog.", " waits in the queue.", "!"], 0),
    ("A request waits in the queue, is", [" 12345 tokens", " admitted, runs, and finishes", " a bibliothèque"], 1),
    ("Once upon a time there was", [" a small engine", " ein kleiner Test für Umlaute: äöüß"], 0),
    ("In 1984", [" there were", " 🙂 漢字", " 42"], 1),
    ("", ["The", "def main(argv):\n"], 1),
]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    settings = Settings(model=str(model), served_model_name="tiny", dtype="float32", kv_blocks=128, max_num_seqs=16)
    with running(settings) as found:
        yield found


class Oracle:
    """The checkpoint in transformers, a text at a time."""

    def __init__(self, path: Path) -> None:
        import transformers

        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    def loglikelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """(sum over the continuation, whether each of its tokens is the likeliest)."""
        import torch

        ids = [*context, *continuation]
        with torch.inference_mode():
            logprobs = self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)[len(context) - 1 : -1]
        wanted = torch.tensor(continuation)
        return float(logprobs.gather(1, wanted[:, None]).sum()), bool((logprobs.argmax(-1) == wanted).all())

    def greedy(self, text: str, count: int) -> str:
        import torch

        ids = torch.tensor([self.ids(text)])
        out = self.model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return self.tokenizer.decode(out[0, ids.shape[1] :])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


def evaluate(server: Running, folder: Path, docs: list[dict[str, Any]], task: dict[str, Any]) -> dict[str, Any]:
    """What lm-eval finds, with one sample for each document."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    file = folder / "docs.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    config = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        **task,
    }
    options = {
        "model": "tiny",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": "remote",
        "max_length": server.serving.inputs.info.max_model_len,
        "max_retries": 1,
        "timeout": 30,
        "num_concurrent": 4,
        "batch_size": 2,
    }
    result = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=options,
        tasks=[config],
        task_manager=TaskManager(include_defaults=False),  # reading thousands of tasks takes long
        bootstrap_iters=0,
        log_samples=True,
    )
    assert result is not None and len(result["samples"]["own"]) == len(docs)
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_llama_spm"], indirect=True)
def test_loglikelihoods(server: Running, oracle: Oracle, tmp_path: Path) -> None:
    docs = [{"query": query, "choices": choices, "gold": gold} for query, choices, gold in QUESTIONS]
    task = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    result = evaluate(server, tmp_path, docs, task)
    right = 0
    for sample in result["samples"]["own"]:
        doc = sample["doc"]
        sums = []
        for choice, ((told, greedy),) in zip(doc["choices"], sample["resps"], strict=True):
            context, whole = oracle.ids(doc["query"]), oracle.ids(doc["query"] + choice)
            if not context:  # nothing before it: the token that texts begin with
                context = [oracle.tokenizer.bos_token_id]
                whole = context + whole
            expected, is_greedy = oracle.loglikelihood(context, whole[len(context) :])
            assert told == pytest.approx(expected, abs=1e-3)
            assert greedy == is_greedy
            sums.append(expected)
        right += sums.index(max(sums)) == doc["gold"]
    assert result["results"]["own"]["acc,none"] == pytest.approx(right / len(docs))


@pytest.mark.parametrize("model", ["tiny_llama"], indirect=True)  # the other shows halves of characters in its own way
def test_generations(server: Running, oracle: Oracle, tmp_path: Path) -> None:
    queries = [query for query, _, _ in QUESTIONS if query]
    expected = [oracle.greedy(query, 12) for query in queries]
    expected[0] = "something else"
    stop = expected[1][1:3]  # in the middle of an answer
    docs = [
        {"query": query, "answer": answer.partition(stop)[0]} for query, answer in zip(queries, expected, strict=True)
    ]
    task = {
        "output_type": "generate_until",
        "doc_to_text": "{{query}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "generation_kwargs": {"until": [stop], "max_gen_toks": 12, "temperature": 0, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    result = evaluate(server, tmp_path, docs, task)
    told = {sample["doc"]["query"]: sample["resps"][0][0] for sample in result["samples"]["own"]}
    for doc in docs[1:]:
        assert told[doc["query"]] == doc["answer"]
    assert result["results"]["own"]["exact_match,none"] == pytest.approx(1 - 1 / len(docs))
