"""What an optimized model holds, and held while it was made: one copy of each weight, and no more than that."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import fresh_process
from tests.test_sanitizer import sanitizer_is_loaded

pytestmark = pytest.mark.skipif(sanitizer_is_loaded(), reason="NOT RUN: a sanitizer keeps memory for itself")
pytest.importorskip("transformers")

# Of T5's layers of a decoder, the keys and values of what the encoder gave are one product, beside one for each layer.
# 87 and 111 million weights, so that what a process holds beside them is little. A tiny model goes first, for what is
# loaded and set up once. Nothing here asks malloc to give anything back.
BERT = """
words = dict(input_ids=torch.arange(16)[None])
small = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 1}
def build(**sizes):
    return transformers.BertModel(transformers.BertConfig(vocab_size=1000, **sizes)).eval()
"""
T5 = """
words = dict(input_ids=torch.arange(16)[None], decoder_input_ids=torch.arange(4)[None])
small = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 100}
def build(**sizes):
    sizes = dict(d_ff=6144) | sizes
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
"""
PROGRAM = """
import gc, json, os, torch, transformers, xopt
{model}

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def peak():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

dtype = torch.{dtype}
torch.set_num_threads(1)
with torch.no_grad():
    xopt.optimize(build(**small), dtype=dtype)(**words)
torch.ones(7 << 20)  # freed: smaller blocks come from glibc's heap from now on, which keeps what is freed there
before = resident()
model = build()
weights = sum(weight.numel() for weight in model.parameters())
largest = max(weight.numel() for weight in model.parameters())
try:
    open("/proc/self/clear_refs", "w").write("5")
    told = True
except OSError:
    told = False
xopt.optimize(model, dtype=dtype, inplace=True)
at_most = peak() - before
with torch.no_grad():
    for _ in range(3):
        model(**words)
fused = sum(fusion.fused.count("merged linear") for fusion in xopt.report(model).fusions)
sizes = dict(weights=weights * dtype.itemsize, source=4 * weights, largest=4 * largest)
print(json.dumps(dict(sizes, steady=resident() - before, peak=at_most if told else None, fused=fused)))
"""
PAGES = 4 * 2 << 20  # weights lie on pages of 2 MB, of which the last of a group is not full


@pytest.mark.parametrize(
    ("model", "dtype", "merged"), [(BERT, "float32", 12), (BERT, "bfloat16", 12), (T5, "bfloat16", 13)]
)
def test_one_copy_of_each_weight_is_held(model: str, dtype: str, merged: int) -> None:
    said: Any = json.loads(fresh_process.output_of(PROGRAM.format(model=model, dtype=dtype)))
    assert said["fused"] == merged, "query, key and value have moved, which leaves gaps"
    assert said["steady"] <= 1.05 * said["weights"]
    if said["peak"] is not None:
        assert said["peak"] <= said["source"] + said["largest"] + PAGES
