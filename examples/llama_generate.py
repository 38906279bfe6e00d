"""Text generation with transformers' own generate() and cache on an optimized Llama with random weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import xopt

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2
)
model = xopt.optimize(LlamaForCausalLM(config).eval(), dtype=torch.bfloat16, inplace=True)
prompt = torch.randint(0, config.vocab_size, (1, 12))

tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
print(xopt.report(model))
print("new tokens:", tokens[0, prompt.shape[1] :].tolist())
