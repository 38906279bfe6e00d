"""Language models, and transformers on images and sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xopt.bench.model_case import BEST, Inputs, ModelCase, sizes_if


def _bert(tiny: bool) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**sizes_if(tiny, **_SMALL)))


def _roberta(tiny: bool) -> Any:
    from transformers import RobertaConfig, RobertaModel

    return RobertaModel(RobertaConfig(**sizes_if(tiny, **_SMALL)))


def _distilbert(tiny: bool) -> Any:
    from transformers import DistilBertConfig, DistilBertModel

    return DistilBertModel(DistilBertConfig(**sizes_if(tiny, dim=64, n_layers=2, n_heads=4, hidden_dim=128)))


def _vit(tiny: bool) -> Any:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**sizes_if(tiny, **_SMALL)))


def _gpt2(tiny: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**sizes_if(tiny, n_embd=64, n_layer=2, n_head=4, vocab_size=1000)))


def _llama(tiny: bool) -> Any:
    """The sizes of TinyLlama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    sizes = {"vocab_size": 1000, **_SMALL} if tiny else {"vocab_size": 32000, **sizes}
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=4, **sizes))


def _t5(tiny: bool) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(**sizes_if(tiny, d_model=64, d_kv=16, d_ff=128, num_layers=2)))


def _whisper(tiny: bool) -> Any:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = sizes_if(tiny, d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128)
    return WhisperEncoder(WhisperConfig(**sizes))


_SMALL: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def _words(batch: int, tokens: int, **more: Any) -> Callable[[Any], Inputs]:
    def make(model: Any) -> Inputs:
        return {"input_ids": torch.randint(0, model.config.vocab_size, (batch, tokens)), **more}

    return make


def _words_and_a_step(tokens: int) -> Callable[[Any], Inputs]:
    """For an encoder-decoder: a whole encoder, and the decoder's first token."""
    return lambda model: {**_words(1, tokens, use_cache=False)(model), "decoder_input_ids": torch.zeros(1, 1).long()}


def _pixels(batch: int) -> Callable[[Any], Inputs]:
    return lambda model: {"pixel_values": torch.randn(batch, 3, model.config.image_size, model.config.image_size)}


def _sound(model: Any) -> Inputs:
    return {"input_features": torch.randn(1, model.config.num_mel_bins, 2 * model.config.max_source_positions)}


_PRODUCTS = {("bfloat16", BEST): 1.6, ("float32", BEST): 1.0}  # bound by them
_BERT = {**_PRODUCTS, ("bfloat16", "compile"): 3.28}
_VIT = {**_PRODUCTS, ("bfloat16", "compile"): 1.8}
_DECODING = {("bfloat16", BEST): 1.3, ("float32", BEST): 1.0}

CASES = (
    ModelCase("bert-base 1x128", _bert, _words(1, 128), targets=_BERT),
    ModelCase("bert-base 8x128", _bert, _words(8, 128), targets=_BERT),
    ModelCase("vit-base 1", _vit, _pixels(1), targets=_VIT),
    ModelCase("vit-base 8", _vit, _pixels(8), targets=_VIT),
    ModelCase("llama-1.1b prefill 128", _llama, _words(1, 128, use_cache=False), targets=_PRODUCTS),
    ModelCase("llama-1.1b prefill 1024", _llama, _words(1, 1024, use_cache=False), targets=_PRODUCTS),
    ModelCase("llama-1.1b decode", _llama, _words(1, 128), decodes=True, targets=_DECODING),
    ModelCase("roberta-base 1x128", _roberta, _words(1, 128)),
    ModelCase("distilbert 4x64", _distilbert, _words(4, 64)),
    ModelCase("gpt2 1x128", _gpt2, _words(1, 128, use_cache=False)),
    ModelCase("t5-small 1x128 and a step", _t5, _words_and_a_step(128)),
    ModelCase("whisper-tiny encoder", _whisper, _sound),
)
