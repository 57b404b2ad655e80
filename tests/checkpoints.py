"""Tiny checkpoints with random weights and real tokenizers, written as their ecosystems write them.

`tiny_checkpoint` is saved by transformers, `tiny_gguf` by the gguf package: what the tests open is real.
"""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The five boxing wizards jump quickly.",
    "def main(argv):\n    for i in range(10):\n        print(i, argv)\n    return 0\n",
    "Once upon a time there was a small engine that served many requests at the same time.",
    "In 1984 there were 12345 tokens, 3.14159 of them were not integers; 42 is the answer.",
    "Was ist das? Ein kleiner Test für Umlaute: äöüß. Où est la bibliothèque? ¿Qué tal?",
    "A request waits in the queue, is admitted, runs, and finishes. Nothing is lost.",
    "Emoji such as 🙂 and 漢字 are made of several bytes; 東京 too.",
    "I'm sure you're right, they'll say it's what we've done and he'd know.\n\n\tTabs   and    spaces  ",
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles') }}"
    "{% endif %}{% endfor %}"
)

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {"head_dim": 16}),
    "MistralForCausalLM": ("MistralConfig", {"head_dim": 16, "sliding_window": None}),
    "Qwen2ForCausalLM": ("Qwen2Config", {}),
    "Qwen3ForCausalLM": ("Qwen3Config", {"head_dim": 32}),
}


def tiny_checkpoint(
    dir: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    dtype: str = "float32",
    tie: bool = True,
    vocab: int | None = None,
    shards: int = 1,
    tokenizer: str = "bytelevel",
    seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Write a Hugging Face checkpoint into `dir` and return `dir`.

    `tokenizer`: bytelevel (as in GPT-2 and Qwen, ChatML, no BOS) or sentencepiece (as in Llama 2: metaspace,
    byte fallback, BOS added). `vocab`: rows of the embedding; default: the tokenizer's size. Every weight is
    random, biases and norms too, and scaled so that greedy output wanders.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    dir.mkdir(parents=True, exist_ok=True)
    size, special = write_tokenizer(dir, tokenizer)
    name, extra = _CONFIGS[architecture]
    config = getattr(transformers, name)(
        vocab_size=vocab or size, tie_word_embeddings=tie, **special, **{**_BASE, **extra, **config_overrides}
    )
    model = getattr(transformers, architecture)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if key.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif key.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:  # layers loud, embeddings quiet: otherwise a tied head repeats its input
                parameter.copy_(noise * (0.1 if "embed" in key or "lm_head" in key else 0.25))
    model = model.to(getattr(torch, dtype))
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[special["eos_token_id"]], bos_token_id=special["bos_token_id"]
    )
    model.save_pretrained(dir)
    if shards > 1:
        tensors = load_file(dir / "model.safetensors")
        (dir / "model.safetensors").unlink()
        names = sorted(tensors)
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            weight_map |= dict.fromkeys(names[i::shards], file)
            save_file({key: tensors[key] for key in names[i::shards]}, dir / file, {"format": "pt"})
        total = sum(t.nbytes for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (dir / "model.safetensors.index.json").write_text(json.dumps(index))
    return dir


def write_tokenizer(dir: Path, kind: str = "bytelevel") -> tuple[int, dict[str, int]]:
    """Write tokenizer.json and tokenizer_config.json; return (size, {bos_token_id, eos_token_id})."""
    if kind == "bytelevel":
        text = _bytelevel_json()
        config: dict[str, Any] = {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "chat_template": CHATML,
            "clean_up_tokenization_spaces": False,
        }
    else:
        text = _sentencepiece_json()
        (dir / "tokenizer.model").write_bytes(sentencepiece_model())
        config = {
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "legacy": True,
            "chat_template": LLAMA_CHAT,
            "clean_up_tokenization_spaces": False,
        }
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (dir / "tokenizer.json").write_text(text)
    (dir / "tokenizer_config.json").write_text(json.dumps(config))
    vocab = json.loads(text)["model"]["vocab"]
    size = max(max(vocab.values()), *(t["id"] for t in json.loads(text)["added_tokens"])) + 1
    ids = {t["content"]: t["id"] for t in json.loads(text)["added_tokens"]}
    return size, {"bos_token_id": ids[config["bos_token"]], "eos_token_id": ids[config["eos_token"]]}


@functools.cache
def _bytelevel_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


@functools.cache
def sentencepiece_model() -> bytes:
    """A BPE sentencepiece model with byte fallback, trained by sentencepiece itself."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 2),
        model_writer=out,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        minloglevel=2,
    )
    return out.getvalue()


@functools.cache
def pieces() -> list[tuple[str, float, int]]:
    """(piece, score, type) of `sentencepiece_model`; the types are those of GGUF's token_type."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())

    def kind(i: int) -> int:
        return 2 if model.IsUnknown(i) else 3 if model.IsControl(i) else 6 if model.IsByte(i) else 1

    return [(model.IdToPiece(i), model.GetScore(i), kind(i)) for i in range(model.GetPieceSize())]


@functools.cache
def _sentencepiece_json() -> str:
    """As transformers converts a Llama 2 tokenizer.model: merges recovered from the scores."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    vocab = {piece: i for i, (piece, _, _) in enumerate(pieces())}
    scores = {piece: score for piece, score, kind in pieces() if kind == 1}
    merges = [
        (piece[:i], piece[i:])
        for piece in sorted(scores, key=lambda p: -scores[p])
        for i in range(1, len(piece))
        if piece[:i] in scores and piece[i:] in scores
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return str(tokenizer.to_str())


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_gguf(
    dir: Path,
    source_checkpoint: Path,
    quant: str = "F32",
    *,
    kinds: Mapping[str, str] = MappingProxyType({}),
    pre: str | None = None,
) -> Path:
    """Convert a `tiny_checkpoint` as llama.cpp's converter does and return the file.

    `quant` is a GGMLQuantizationType that `ggml.quantize` knows; tensors whose rows do not divide into blocks, norms
    and biases stay F32. `kinds`: another one, for tensors whose last name before .weight this is. `pre` is
    tokenizer.ggml.pre (default: gpt-2).
    """
    import ggml
    import gguf
    import numpy as np
    from safetensors.torch import load_file

    config = json.loads((source_checkpoint / "config.json").read_text())
    arch = {"qwen2": "qwen2", "qwen3": "qwen3"}.get(config["model_type"], "llama")
    file = dir / f"{source_checkpoint.name}-{quant}.gguf"
    dir.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, arch)
    writer.add_name(source_checkpoint.name)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if arch != "qwen2":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _add_rope(writer, rope, head_dim)
    _add_tokenizer(writer, source_checkpoint, config["vocab_size"], pre)

    tensors = {}
    for shard in sorted(source_checkpoint.glob("*.safetensors")):
        tensors |= load_file(shard)
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        for projection, n in (("q_proj", heads), ("k_proj", kv_heads)):
            if arch == "llama" and projection in name:
                array = (
                    array.reshape(n, 2, array.shape[0] // n // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
                )
        part = _gguf_name(name).rpartition(".")[0].rpartition(".")[2]
        kind = gguf.GGMLQuantizationType[kinds.get(part, quant)]
        if array.ndim == 1 or array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(array, np.float32))
        else:
            packed = ggml.quantize(np.ascontiguousarray(array, np.float32), kind.name)
            writer.add_tensor(_gguf_name(name), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_GGUF_NAMES[stem]}.{suffix}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{suffix}"


def _add_rope(writer: Any, rope: dict[str, Any], head_dim: int) -> None:
    import gguf
    import numpy as np

    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind == "llama3":
        factors = []
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        for i in range(0, head_dim, 2):
            cycles = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (i / head_dim))
            smooth = min(1.0, max(0.0, (cycles - low) / (high - low)))
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def _add_tokenizer(writer: Any, source: Path, vocab_size: int, pre: str | None) -> None:
    config = json.loads((source / "tokenizer_config.json").read_text())
    data = json.loads((source / "tokenizer.json").read_text())
    added = {t["id"]: t for t in data["added_tokens"]}
    tokens = {i: piece for piece, i in data["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    texts = [tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    if data["model"].get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        known = pieces() + [("", -1000.0, 5)] * (vocab_size - len(pieces()))
        writer.add_token_scores([score for _, score, _ in known])
        writer.add_token_types([kind for _, _, kind in known])
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre or "gpt-2")
        writer.add_token_merges([" ".join(m) for m in data["model"]["merges"]])
        types = [5 if i not in tokens else 3 if i in added and added[i]["special"] else 4 if i in added else 1
                 for i in range(vocab_size)]  # fmt: skip
        writer.add_token_types(types)
        writer.add_add_bos_token(False)
    writer.add_token_list(texts)
    writer.add_bos_token_id(texts.index(config["bos_token"]))
    writer.add_eos_token_id(texts.index(config["eos_token"]))
    writer.add_chat_template(config["chat_template"])
