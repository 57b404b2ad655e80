"""GGUF files against the checkpoints they were made from, the gguf package and transformers."""

from __future__ import annotations

import json
import logging
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from checkpoints import tiny_checkpoint, tiny_gguf
from safetensors.torch import load_file
from test_tokenizer import TEXTS

from framework import LLM, Checkpoint, ModelError, Tokenizer
from framework.checkpoint import open_checkpoint
from framework.registry import load_plugins
from framework.settings import Settings

ARCHITECTURES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


def load(path: Path, **overrides: Any) -> Checkpoint:
    options = Settings(model=str(path), **overrides)
    return open_checkpoint(options, load_plugins())


@pytest.fixture(scope="module", params=ARCHITECTURES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / request.param
    return tiny_checkpoint(path, request.param, tie=request.param == "Qwen3ForCausalLM", num_hidden_layers=2)


class TestWeights:
    @pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
    def test_tensors_are_the_sources(self, source: Path, tmp_path: Path, quant: str) -> None:
        checkpoint = load(tiny_gguf(tmp_path, source, quant))
        kind = gguf.GGMLQuantizationType[quant]
        expected = load_file(source / "model.safetensors")
        got = dict(checkpoint.tensors())
        assert got.keys() == expected.keys()
        assert checkpoint.num_tensors == len(got)
        for name, tensor in expected.items():
            original = tensor.numpy()
            if tensor.ndim == 2:  # rows are quantised one by one, so permuting them changes no value
                original = gguf.dequantize(gguf.quantize(original, kind), kind)
            assert got[name].dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(
                quant if tensor.ndim == 2 else "F32", torch.float32
            )
            np.testing.assert_array_equal(got[name].float().numpy(), original, err_msg=name)

    @pytest.mark.parametrize("quant", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
    def test_k_quants(self, tmp_path: Path, quant: str) -> None:
        """The gguf package only unpacks these: any bytes are a valid block, save for scales that are not finite."""
        source = tiny_checkpoint(
            tmp_path / "wide", hidden_size=256, intermediate_size=256, num_hidden_layers=1, head_dim=64
        )
        kind, random = gguf.GGMLQuantizationType[quant], np.random.default_rng(0)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        path = tmp_path / "k.gguf"
        reader = gguf.GGUFReader(tiny_gguf(tmp_path, source))
        writer = gguf.GGUFWriter(path, "llama")
        expected = {}
        for field in reader.fields.values():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                sub = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub)
        for tensor in reader.tensors:
            shape = [int(n) for n in reversed(tensor.shape)]
            if len(shape) == 1:
                writer.add_tensor(tensor.name, tensor.data)
                continue
            packed = random.integers(0, 60, (shape[0], shape[1] // block * size), dtype=np.uint8)
            expected[tensor.name] = gguf.dequantize(packed, kind)
            writer.add_tensor(tensor.name, packed, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        got = dict(load(path).tensors())
        np.testing.assert_array_equal(got["model.embed_tokens.weight"], expected["token_embd.weight"])
        np.testing.assert_array_equal(got["model.layers.0.mlp.down_proj.weight"], expected["blk.0.ffn_down.weight"])
        # llama.cpp keeps the pairs that rotate together side by side; here they are half a head apart
        k = expected["blk.0.attn_k.weight"].reshape(2, 32, 2, 256)
        np.testing.assert_array_equal(
            got["model.layers.0.self_attn.k_proj.weight"], np.concatenate([k[:, :, 0], k[:, :, 1]], 1).reshape(128, 256)
        )

    def test_logits_equal_transformers(self, source: Path, tmp_path: Path) -> None:
        """Config and tensors make the same model: loaded into transformers' own class they compute the same."""
        checkpoint = load(tiny_gguf(tmp_path, source))
        config = checkpoint.config
        reference = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
        kind = type(reference.config)
        model = type(reference)(kind(**{k: v for k, v in config.items() if k != "architectures"})).eval()
        state = dict(checkpoint.tensors())
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"} and bool(missing) == config["tie_word_embeddings"]
        model.tie_weights()
        ids = torch.arange(5, 45)[None]
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, reference(ids).logits, atol=1e-5, rtol=1e-5)

    def test_loading_leaves_the_file_alone(self, tiny_llama_gguf: Path) -> None:
        before = tiny_llama_gguf.read_bytes()
        for _, tensor in load(tiny_llama_gguf).tensors():
            tensor.zero_()
        assert tiny_llama_gguf.read_bytes() == before


class TestConfig:
    def test_equals_the_sources(self, source: Path, tmp_path: Path) -> None:
        config = load(tiny_gguf(tmp_path, source)).config
        original = json.loads((source / "config.json").read_text())
        for key in (
            "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
            "rope_parameters", "bos_token_id", "eos_token_id", "model_type", "hidden_act",
        ):  # fmt: skip
            assert config[key] == original[key], key
        assert config["head_dim"] == original.get("head_dim", 16)
        assert config["rms_norm_eps"] == pytest.approx(original["rms_norm_eps"], rel=1e-6)
        assert config["attention_bias"] == (original["model_type"] == "qwen2")

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "linear", "factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192, "rope_theta": 500000.0},
            {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 64},
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("head_dim", [16, 64, 128])
    def test_rope_scaling(self, tmp_path: Path, rope: dict[str, Any], head_dim: int) -> None:
        source = tiny_checkpoint(
            tmp_path / "m", num_hidden_layers=1, head_dim=head_dim, rope_parameters={"rope_theta": 10000.0, **rope}
        )
        got = load(tiny_gguf(tmp_path, source)).config
        kind = rope["rope_type"]
        assert got["rope_parameters"]["rope_type"] == kind

        def frequencies(parameters: dict[str, Any]) -> tuple[torch.Tensor, float]:
            config = transformers.LlamaConfig(
                head_dim=head_dim, hidden_size=64, num_attention_heads=4, max_position_embeddings=512,
                rope_parameters=parameters,
            )  # fmt: skip
            return transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))

        expected = json.loads((source / "config.json").read_text())["rope_parameters"]
        inverse, scale = frequencies(expected)
        inverse_got, scale_got = frequencies(got["rope_parameters"])
        torch.testing.assert_close(inverse_got, inverse, rtol=2e-6, atol=0)
        assert scale_got == scale
        if kind == "llama3" and head_dim >= 64:
            assert got["rope_parameters"] == expected

    def test_generation_config(self, tmp_path: Path, tiny_llama_gguf: Path) -> None:
        assert load(tiny_llama_gguf).generation_config == {}
        path = shutil.copy(tiny_llama_gguf, tmp_path)
        path = _with(
            path, **{"tokenizer.ggml.eot_token_id": 7, "general.sampling.temp": 0.5, "general.sampling.top_k": 9}
        )
        checkpoint = load(path)
        assert checkpoint.generation_config == {"temperature": 0.5, "top_k": 9}
        assert checkpoint.tokenizer().eos_token_ids == (2, 7)
        assert load(path, generation_config="none").generation_config == {}

    def test_sliding_window(self, tmp_path: Path, tiny_llama_gguf: Path) -> None:
        path = _with(shutil.copy(tiny_llama_gguf, tmp_path), **{"llama.attention.sliding_window": 32})
        config = load(path).config
        assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 32)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"general.architecture": "mamba"}, "'mamba' is not supported; supported: llama, qwen2, qwen3"),
            ({"llama.expert_count": 8}, "mixture-of-experts"),
            ({"llama.block_count": None}, "lacks llama.block_count"),
            ({"llama.block_count": "x"}, "GGUF metadata: llama.block_count: expected `int"),
            ({"llama.attention.head_count": 0}, "GGUF metadata: llama.attention.head_count: expected `int` >= 1"),
            ({"llama.attention.head_count": ["x"]}, "GGUF metadata: llama.attention.head_count: expected `int"),
            ({"llama.embedding_length": "x"}, "GGUF metadata: llama.embedding_length: expected `int"),
            ({"llama.rope.scaling.type": 5}, "GGUF metadata: llama.rope.scaling.type: expected `str"),
            ({"split.count": "x"}, "GGUF metadata: split.count: expected `int"),
            ({"general.alignment": "x"}, "GGUF metadata: general.alignment: expected `int"),
            ({"llama.rope.dimension_count": 8}, "partial rotary"),
            ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
            ({"split.count": 3}, "--merge"),
            ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model 'rwkv' is not supported"),
            ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
            ({"tokenizer.ggml.merges": ["zz qq"]}, "vocabulary is damaged"),
        ],
    )
    def test_unsupported(self, tmp_path: Path, tiny_llama_gguf: Path, changes: dict[str, Any], says: str) -> None:
        path = _with(shutil.copy(tiny_llama_gguf, tmp_path), **changes)
        with pytest.raises(ModelError) as error:
            load(path).tokenizer()
        assert says in str(error.value)
        assert "\n" not in str(error.value)

    def test_tensors_of_another_model(self, tmp_path: Path, tiny_llama_gguf: Path) -> None:
        path = Path(shutil.copy(tiny_llama_gguf, tmp_path))
        path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xy.weight"))
        with pytest.raises(ModelError, match=r"1 tensors are not of a plain llama model: blk\.1\.ffn_xy\.weight"):
            load(path)


class TestDamage:
    def test_not_gguf(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(b"PK\x03\x04 something else")
        with pytest.raises(ModelError, match="not a GGUF file"):
            load(path)
        path.write_bytes(b"")
        with pytest.raises(ModelError, match="not a GGUF file"):
            load(path)

    def test_cut_short_anywhere(self, tmp_path: Path, tiny_llama_gguf: Path) -> None:
        data = tiny_llama_gguf.read_bytes()
        path = tmp_path / "m.gguf"
        for size in [4, 5, 20, *range(24, len(data), len(data) // 60), len(data) - 40]:
            path.write_bytes(data[:size])
            with pytest.raises(ModelError, match="cut short"):
                load(path)

    def test_lengths_beyond_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 2**60) + struct.pack("<Q", 2**62) + bytes(64))
        with pytest.raises(ModelError, match="cut short"):
            load(path)

    def test_arrays_in_arrays_without_end(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        nested = struct.pack("<IQ", 9, 1) * 100_000
        path.write_bytes(struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1) + b"a" + struct.pack("<I", 9) + nested)
        with pytest.raises(ModelError, match="nested too deeply"):
            load(path)

    @pytest.mark.parametrize(
        ("name", "shape", "quant", "says"),
        [
            ("token_embd.weight", (), "F32", "no matrix token_embd.weight"),
            ("blk.0.attn_q.weight", (64, 62), "F32", "model.layers.0.self_attn.q_proj.weight is"),
            ("blk.0.attn_q.weight", (64, 68), "F32", "model.layers.0.self_attn.q_proj.weight is"),
            ("blk.0.ffn_up.weight", (48, 2), "Q4_0", "rows of 48 values are no whole blocks of Q4_0"),
        ],
    )
    def test_tensors_of_odd_shapes(
        self, tmp_path: Path, tiny_llama_gguf: Path, name: str, shape: tuple[int, ...], quant: str, says: str
    ) -> None:
        data = tiny_llama_gguf.read_bytes()
        # Of each tensor the file says: its name, the number of dimensions, these (innermost first), type, offset.
        at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        (dims,) = struct.unpack_from("<I", data, at)
        end = at + 4 + 8 * dims + 12
        kind, offset = gguf.GGMLQuantizationType[quant].value, struct.unpack_from("<Q", data, end - 8)[0]
        new = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        path = tmp_path / "odd.gguf"
        path.write_bytes(data[:at] + new + data[end:] + bytes(64))  # some bytes more, as the odd tensor may have more
        with pytest.raises(ModelError) as error, LLM(str(path), kv_blocks=16, dtype="float32"):
            pass
        assert says in str(error.value)

    def test_other_versions(self, tmp_path: Path, tiny_llama_gguf: Path) -> None:
        data = tiny_llama_gguf.read_bytes()
        path = tmp_path / "m.gguf"
        for version in (struct.pack("<I", 1), struct.pack(">I", 3)):
            path.write_bytes(data[:4] + version + data[8:])
            with pytest.raises(ModelError, match="version"):
                load(path)

    def test_gguf_without_the_suffix(self, tmp_path: Path, tiny_llama_gguf: Path) -> None:
        assert load(Path(shutil.copy(tiny_llama_gguf, tmp_path / "weights"))).num_tensors > 0


def _with(path: Any, **changes: Any) -> Path:
    """Rewrite a GGUF file with changed metadata; None drops a key."""
    reader = gguf.GGUFReader(path)
    arch = changes.pop("general.architecture", "llama")
    out = Path(f"{path}.changed.gguf")
    writer = gguf.GGUFWriter(out, arch)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture" or field.name in changes:
            continue
        sub = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub)
    for key, value in changes.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def oracle(path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


class TestTokenizer:
    def test_byte_level_equals_the_sources(self, tiny_llama: Path, tiny_llama_gguf: Path) -> None:
        ours, source = load(tiny_llama_gguf).tokenizer(), load(tiny_llama).tokenizer()
        _same(ours, source)
        theirs = oracle(tiny_llama_gguf)
        for text in TEXTS:
            assert ours.encode(text) == theirs.encode(text), text

    def test_sentencepiece_equals_the_sources(self, tiny_llama_spm: Path, tmp_path: Path) -> None:
        path = tiny_gguf(tmp_path, tiny_llama_spm)
        ours, source = load(path).tokenizer(), load(tiny_llama_spm).tokenizer()
        _same(ours, source)
        theirs = oracle(path)
        for text in TEXTS:
            # transformers puts the prefix space only at the very start, and none before a space
            if "<" not in text and not text.startswith((" ", "▁")):
                assert ours.encode(text) == theirs.encode(text), text

    def test_sentencepiece_without_prefix_space(self, tiny_llama_spm: Path, tmp_path: Path) -> None:
        path = _with(tiny_gguf(tmp_path, tiny_llama_spm), **{"tokenizer.ggml.add_space_prefix": False})
        tokenizer = load(path).tokenizer()
        for text in ["The dog", " The dog"]:
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert b"".join(map(tokenizer.token_bytes, ids[1:])) == text.encode()

    @pytest.mark.parametrize("bos", [True, False])
    @pytest.mark.parametrize("eos", [True, False])
    def test_bos_and_eos_flags(self, tiny_llama_spm: Path, tmp_path: Path, bos: bool, eos: bool) -> None:
        flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        path = _with(tiny_gguf(tmp_path, tiny_llama_spm), **flags)
        ids = load(path).tokenizer().encode("Hello")
        assert ids == oracle(path).encode("Hello")
        assert (ids[0] == 1, ids[-1] == 2) == (bos, eos)

    @pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-2"])
    def test_pre_tokenizers(self, tiny_llama: Path, tmp_path: Path, pre: str) -> None:
        path = tiny_gguf(tmp_path, tiny_llama, pre=pre)
        ours, theirs = load(path).tokenizer(), oracle(path)
        for text in TEXTS:
            if "\u0301" in text and pre == "qwen2":
                continue  # Qwen's tokenizer composes characters (NFC); transformers drops that for GGUF
            assert ours.encode(text) == theirs.encode(text), text
        if pre == "qwen2":
            assert ours.encode("e\u0301") == ours.encode("é")

    def test_words_cut_as_each_model_does(self, tiny_llama: Path, tmp_path: Path) -> None:
        def cut(pre: str, text: str) -> list[str]:
            backend = load(tiny_gguf(tmp_path / pre, tiny_llama, pre=pre)).tokenizer().backend
            return [text[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]

        assert cut("gpt-2", "it's 12345") == ["it", "'s", " 12345"]
        assert cut("smollm", "it's 12345") == ["it", "'s", " ", "1", "2", "3", "4", "5"]
        assert cut("llama-bpe", "IT'S 12345") == ["IT", "'S", " ", "123", "45"]
        assert cut("qwen2", "IT'S 123") == ["IT", "'S", " ", "1", "2", "3"]
        assert cut("tekken", "camelCase 12") == ["camel", "Case", " ", "1", "2"]

    def test_unknown_pre_tokenizer_is_said(
        self, tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tiny_gguf(tmp_path, tiny_llama, pre="somebodys")
        with caplog.at_level(logging.WARNING):
            ids = load(path).tokenizer().encode("it's 12")
        assert "'somebodys' is unknown" in caplog.text
        assert ids == load(tiny_llama).tokenizer().encode("it's 12")

    def test_whole_words_skip_merges_where_the_model_does(self, tiny_llama: Path, tmp_path: Path) -> None:
        """Llama 3 takes a word of its vocabulary as it is, even where no merges lead to it."""
        path = tiny_gguf(tmp_path, tiny_llama, pre="llama-bpe")
        text, target = "<|endoftext|>", "zqxj"
        data = json.loads((tiny_llama / "tokenizer.json").read_text())
        assert target not in data["model"]["vocab"]
        tokens = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()
        tokens[500] = target
        merges = [m for m in gguf.GGUFReader(path).fields["tokenizer.ggml.merges"].contents()]
        merges = [m for m in merges if m.replace(" ", "") in tokens and all(p in tokens for p in m.split(" "))]
        for pre, count in (("llama-bpe", 1), ("gpt-2", 4)):
            changed = _with(
                path, **{"tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
            )
            tokenizer = load(changed).tokenizer()
            assert len(tokenizer.encode(target, add_special_tokens=False)) == count, pre
            assert tokenizer.encode(text, add_special_tokens=False) == [0]

    def test_chat_template(self, tiny_llama_gguf: Path, tiny_llama: Path, tmp_path: Path) -> None:
        chat = [{"role": "user", "content": "Hi"}]
        assert load(tiny_llama_gguf).tokenizer().render(chat) == load(tiny_llama).tokenizer().render(chat)
        file = tmp_path / "t.jinja"
        file.write_text("mine")
        assert load(tiny_llama_gguf, chat_template=file).tokenizer().render(chat) == "mine"

    def test_vocabulary_padded_to_the_embedding(self, tmp_path: Path) -> None:
        source = tiny_checkpoint(tmp_path / "m", vocab=544, num_hidden_layers=1)
        checkpoint = load(tiny_gguf(tmp_path, source))
        assert checkpoint.config["vocab_size"] == 544
        assert checkpoint.tokenizer().encode(TEXTS[0]) == load(source).tokenizer().encode(TEXTS[0])


@pytest.mark.slow
class TestDemo:
    """The demo weights: a real file by llama.cpp's own converter."""

    def test_tokenizer_equals_transformers(self, demo_model: Path) -> None:
        ours, theirs = load(demo_model).tokenizer(), oracle(demo_model)
        for text in [*TEXTS, *(Path(__file__).read_text().splitlines()[:200])]:
            ids = ours.encode(text)
            assert ids == theirs.encode(text), text
            assert ours.decode(ids) == text.replace("<|im_start|>", "").replace("<|im_end|>", "").replace(
                "<|endoftext|>", ""
            )
        chat = [{"role": "user", "content": "Hello"}]
        assert ours.render(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))

    def test_tensors_are_the_model(self, demo_model: Path) -> None:
        """Names, order of rows and scales are right: transformers' Llama with these weights knows its geography."""
        checkpoint = load(demo_model)
        config = {k: v for k, v in checkpoint.config.items() if k not in ("architectures", "dtype")}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
        model.load_state_dict({name: t.float() for name, t in checkpoint.tensors()}, strict=False)
        model.tie_weights()
        tokenizer = checkpoint.tokenizer()
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.encode(tokenizer.render(chat), add_special_tokens=False)
        answer = tokenizer.encode("The capital of France is Paris.", add_special_tokens=False)
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer


def _same(ours: Tokenizer, source: Tokenizer) -> None:
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == source.encode(text, special), text
            assert ours.decode(ids, special) == source.decode(ids, special), text
    assert ours.vocab_size == source.vocab_size
    assert [ours.token_bytes(i) for i in range(ours.vocab_size)] == [
        source.token_bytes(i) for i in range(source.vocab_size)
    ]
    assert (ours.bos_token_id, ours.eos_token_ids) == (source.bos_token_id, source.eos_token_ids)
