"""Hugging Face models, small and with random weights: as exact as torch in the same dtype, and nearly all on xopt."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import xopt
from tests.families import as_dtype
from tests.test_chain_programs import lengths_of_chains

transformers = pytest.importorskip("transformers")

WORDS = torch.arange(34).reshape(2, 17) * 7 % 250
PIXELS = torch.linspace(-2, 2, 2 * 3 * 32 * 32).sin().reshape(2, 3, 32, 32)
SOUND = torch.linspace(-2, 2, 2 * 16 * 50).cos().reshape(2, 16, 50)

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
DECODER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(vocab_size=250, **SMALL))


def roberta() -> Any:
    return transformers.RobertaModel(transformers.RobertaConfig(vocab_size=250, **SMALL))


def distilbert() -> Any:
    config = transformers.DistilBertConfig(vocab_size=250, dim=64, n_layers=2, n_heads=4, hidden_dim=128)
    return transformers.DistilBertModel(config)


def vit() -> Any:
    return transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **SMALL))


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=250, num_key_value_heads=2, **SMALL))


def t5() -> Any:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=250, decoder_start_token_id=0, **sizes)
    return transformers.T5Model(config)


def bart() -> Any:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return transformers.BartModel(transformers.BartConfig(vocab_size=250, **DECODER, **heads))


def bert_head() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=250, **SMALL))


def gpt2() -> Any:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=250, **sizes))


def gpt_neox() -> Any:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(vocab_size=250, **SMALL))


def gemma() -> Any:
    sizes = SMALL | {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 8}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(vocab_size=250, **sizes))


def clip_text() -> Any:
    ends = {"bos_token_id": 0, "eos_token_id": 2}
    return transformers.CLIPTextModel(transformers.CLIPTextConfig(vocab_size=250, **ends, **SMALL))


def clip_vision() -> Any:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(image_size=32, patch_size=8, **SMALL))


def whisper() -> Any:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    sizes = {"num_mel_bins": 16, "max_source_positions": 25}
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(vocab_size=250, **DECODER, **heads, **special, **sizes)
    )


def bart_head() -> Any:
    return transformers.BartForConditionalGeneration(bart().config)


def t5_head() -> Any:
    return transformers.T5ForConditionalGeneration(t5().config)


MODELS: dict[str, tuple[Callable[[], Any], dict[str, torch.Tensor], str]] = {
    "bert": (bert, {"input_ids": WORDS}, "last_hidden_state"),
    "roberta": (roberta, {"input_ids": WORDS}, "last_hidden_state"),
    "distilbert": (distilbert, {"input_ids": WORDS}, "last_hidden_state"),
    "vit": (vit, {"pixel_values": PIXELS}, "last_hidden_state"),
    "llama": (llama, {"input_ids": WORDS}, "logits"),
    "t5": (t5, {"input_ids": WORDS, "decoder_input_ids": WORDS[:, :5]}, "last_hidden_state"),
    "bart": (bart, {"input_ids": WORDS, "decoder_input_ids": WORDS[:, :5]}, "last_hidden_state"),
    "bert with head": (bert_head, {"input_ids": WORDS}, "logits"),
    "gpt2": (gpt2, {"input_ids": WORDS}, "logits"),
    "gpt neox": (gpt_neox, {"input_ids": WORDS}, "logits"),
    "gemma": (gemma, {"input_ids": WORDS}, "logits"),
    "clip text": (clip_text, {"input_ids": WORDS}, "last_hidden_state"),
    "clip vision": (clip_vision, {"pixel_values": PIXELS}, "last_hidden_state"),
    "whisper": (whisper, {"input_features": SOUND, "decoder_input_ids": WORDS[:, :5]}, "logits"),
    "t5 with head": (t5_head, {"input_ids": WORDS, "decoder_input_ids": WORDS[:, :5]}, "logits"),
    "bart with head": (bart_head, {"input_ids": WORDS, "decoder_input_ids": WORDS[:, :5]}, "logits"),
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MODELS[name][0]().eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_no_less_exact_than_torch_in_that_dtype(name: str, dtype: torch.dtype) -> None:
    _, inputs, output = MODELS[name]
    check_exactness(make(name), inputs, output, dtype)


def check_exactness(source: Any, inputs: dict[str, torch.Tensor], output: str, dtype: torch.dtype) -> Any:
    """Of the optimized model, which is returned; also its keys, and its share of work on xopt's operators."""
    optimized = xopt.optimize(source, dtype=dtype)
    assert type(optimized) is type(source)
    assert list(optimized.state_dict()) == list(source.state_dict())
    assert xopt.report(optimized).optimized_linear_share >= 0.95
    with torch.no_grad():
        exact = copy.deepcopy(source).double()(**as_dtype(inputs, torch.float64))[output]
        theirs = copy.deepcopy(source).to(dtype)(**as_dtype(inputs, dtype))[output]
        result = optimized(**inputs)[output]
    assert result.dtype == torch.float32
    share = xopt.report(optimized, inputs).multiply_add_share
    assert share is not None
    assert share >= 0.95
    rounding = torch.finfo(torch.float32).eps * 8  # at fp32, both are as good as exact
    assert relative_error(result, exact) <= 1.1 * relative_error(theirs, exact) + rounding
    return optimized


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "t5 with head", "bart with head"])
def test_generate(name: str) -> None:
    model = make(name)
    arguments = {"attention_mask": torch.ones_like(WORDS), "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(WORDS, **arguments)
    assert torch.equal(xopt.optimize(model, dtype=torch.float32).generate(WORDS, **arguments), expected)
    assert xopt.optimize(model, dtype=torch.bfloat16).generate(WORDS, **arguments).shape[0] == 2


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=["", "beams", "static"]
)
@pytest.mark.parametrize("name", ["t5 with head", "bart with head", "whisper"])
def test_decoder_layers_with_both_kinds_of_cache_are_programs(name: str, options: dict[str, Any]) -> None:
    """Also the step in which the encoder's keys are computed, and those in which they are there."""
    model = make(name)
    inputs = SOUND if name == "whisper" else WORDS
    arguments = {"max_new_tokens": 6, "do_sample": False, **options}
    optimized = xopt.optimize(model, dtype=torch.float32)
    assert torch.equal(optimized.generate(inputs, **arguments), model.generate(inputs, **arguments))
    fusions = xopt.report(optimized).fusions
    layers = [each for each in fusions if re.search(r"decoder\.(block|layers)\.\d+$", each.path)]
    whole = [each for each in fusions if each.path in ("", "decoder", "model.decoder") and each.fused]
    programs = layers or whole[:1]  # the model, or its decoder, may be one
    assert len(programs) == (2 if layers else 1)
    assert all(each.problem is None for each in programs)
    assert sum(each.fused.count("attention") for each in programs) == 4
    other = inputs.flip(0)
    assert torch.equal(optimized.generate(other, **arguments), model.generate(other, **arguments))


def test_attention_is_fused_and_hidden_states_can_still_be_had() -> None:
    source = make("bert")
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input={"input_ids": WORDS})
    fused = {fusion.kind: fusion.fused for fusion in xopt.report(optimized).fusions}
    attention = ("merged linear", "attention", "linear+add+layer_norm", "linear+gelu_erf", "linear+add+layer_norm")
    assert fused["BertModel"] == ("add+add", "layer_norm", *attention, *attention, "linear+tanh")
    with torch.no_grad():
        for options in ({"output_hidden_states": True}, {"attention_mask": (WORDS > 40).long()}, {}):
            result, expected = optimized(WORDS, **options), source(WORDS, **options)
            torch.testing.assert_close(result.last_hidden_state, expected.last_hidden_state)
            for ours, theirs in zip(result.hidden_states or (), expected.hidden_states or (), strict=True):
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "vit", "clip text", "clip vision"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_encoder_is_one_chain(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask and without, whichever way attention is written, for sentences of any length."""
    source = make(name)
    source.set_attn_implementation(attention)
    optimized = xopt.optimize(source, dtype=torch.float32)
    _, inputs, output = MODELS[name]
    cases: list[dict[str, torch.Tensor]] = [inputs]
    if "input_ids" in inputs:
        for words in (WORDS, WORDS[:, :7], WORDS[:1]):
            mask = torch.ones_like(words)
            mask[-1, words.shape[1] // 2 :] = 0
            cases.append({"input_ids": words, "attention_mask": mask})
    with torch.no_grad():
        for each in (*cases, *cases):
            torch.testing.assert_close(optimized(**each)[output], source(**each)[output], rtol=1e-4, atol=1e-5)
        lengths = lengths_of_chains(monkeypatch)
        for each in cases:
            optimized(**each)
    # What sums embeddings up is a short chain of its own where a mask is made by the sizes of that.
    assert len([length for length in lengths if length > 3]) == len(cases)


def test_another_attention_can_be_chosen_afterwards() -> None:
    source = make("bert")
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input={"input_ids": WORDS})
    assert source.config._attn_implementation == "sdpa"
    optimized.set_attn_implementation("eager")
    with torch.no_grad():
        result = optimized(WORDS, output_attentions=True)
        expected = source(WORDS)
    assert len(result.attentions) == 2
    torch.testing.assert_close(result.last_hidden_state, expected.last_hidden_state)


def test_static_and_prefilled_caches() -> None:
    source = make("llama")
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        optimized = xopt.optimize(source, dtype=dtype)
        with torch.no_grad():
            static = transformers.StaticCache(config=source.config, max_cache_len=40)
            expected_static = transformers.StaticCache(config=source.config, max_cache_len=40)
            given, expected_given = source(WORDS, use_cache=True), source(WORDS, use_cache=True)
            for cache, other in (
                (static, expected_static),
                (given.past_key_values, expected_given.past_key_values),
            ):
                for words in (WORDS[:, :5], WORDS[:, 5:6], WORDS[:, 6:7]):
                    result = optimized(words, past_key_values=cache, use_cache=True).logits
                    expected = source(words, past_key_values=other, use_cache=True).logits
                    assert relative_error(result, expected.double()) < tolerance


def test_save_pretrained_writes_what_the_source_would(tmp_path: Any) -> None:
    source = make("bert")
    optimized = xopt.optimize(source, dtype=torch.float32)
    optimized.save_pretrained(tmp_path / "ours")
    source.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "ours" / "config.json").read_text() == (tmp_path / "theirs" / "config.json").read_text()
    again = transformers.BertModel.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(WORDS).last_hidden_state, source(WORDS).last_hidden_state)


def test_lora_adapters_before_and_after() -> None:
    peft = pytest.importorskip("peft")
    for before in (True, False):
        torch.manual_seed(0)
        model = make("llama")
        config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        if before:
            torch.manual_seed(1)
            source = peft.get_peft_model(model, config).eval()
            optimized = xopt.optimize(source, dtype=torch.float32)
        else:
            optimized = xopt.optimize(model, dtype=torch.float32, sample_input={"input_ids": WORDS})
            for each in (model, optimized):
                torch.manual_seed(1)
                peft.inject_adapter_in_model(config, each)
                each.eval()
            source = model
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(optimized(WORDS).logits, source(WORDS).logits, rtol=1e-4, atol=1e-4)
            if before:
                with source.disable_adapter(), optimized.disable_adapter():
                    torch.testing.assert_close(optimized(WORDS).logits, source(WORDS).logits, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(optimized(WORDS).logits, source(WORDS).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_outputs_are_what_their_class_makes_them() -> None:
    """Programs make them without its checks."""
    source = vit().eval()
    for dtype in (torch.float32, torch.bfloat16):
        optimized = xopt.optimize(source, dtype=dtype)
        for _ in range(2):
            expected, result = source(PIXELS), optimized(PIXELS)
            assert type(result) is type(expected)
            assert list(result) == list(expected)
            assert len(result.to_tuple()) == len(expected.to_tuple())
            assert {name: value is None for name, value in vars(result).items()} == {
                name: value is None for name, value in vars(expected).items()
            }
            assert result[0] is result.last_hidden_state is result["last_hidden_state"]
            assert result.last_hidden_state.dtype == torch.float32
            result.pooler_output = result[0]
            assert result["pooler_output"] is result[0]
            again = copy.deepcopy(result)
            assert type(again) is type(result)
            assert torch.equal(again[0], result[0])


def test_an_output_with_a_class_of_its_own_is_made_by_it() -> None:
    @dataclass
    class Counted(transformers.utils.ModelOutput):  # type: ignore[name-defined]
        logits: torch.Tensor | None = None
        other: torch.Tensor | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            self.rank = len(self)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return Counted(logits=self.first(x).relu())

    optimized = xopt.optimize(Model().eval(), dtype=torch.float32)
    for _ in range(2):
        with torch.no_grad():
            result = optimized(torch.ones(2, 8))
        assert type(result) is Counted
        assert vars(result)["rank"] == 1
        assert list(result) == ["logits"]


def test_pipeline() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(("[UNK]", "[PAD]", "[MASK]", "a", "small", "model"))}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)
    torch.manual_seed(0)
    source = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(words), **SMALL)).eval()
    texts = ["a [MASK] model", "a small [MASK]"]
    answers = [
        transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, device="cpu")(texts)
        for model in (source, xopt.optimize(source, dtype=torch.float32))
    ]
    for expected, found in zip(*answers, strict=True):
        assert [each["token"] for each in found] == [each["token"] for each in expected]
