# What bench.py measures on a CPU unless a config is named: GPT-2 124M made small.
#   python bench.py

out_dir = 'out-bench-cpu'

# 12·L·C² = 12 · 6 · 256² = 4.7M weights in the blocks and 8,209 · 256 = 2.1M in the embedding: the
# head is a third of a step, as in GPT-2 124M, and its width is odd, like 50,257.
n_layer = 6
n_head = 4
n_embd = 256
vocab_size = 8209
dataset = 'shakespeare_char'  # it has fewer tokens than vocab_size
block_size = 256

# 2 sequences · 256 tokens = 512 tokens a step
batch_size = 2
gradient_accumulation_steps = 1
