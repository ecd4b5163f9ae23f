# GPT-2 124M: the smallest GPT-2, on 10B tokens.
#   python train.py config/gpt2_124m.py
#   torchrun --nproc_per_node=8 train.py config/gpt2_124m.py

out_dir = 'out-gpt2-124m'
dataset = 'openwebtext'  # 9.0B GPT-2 tokens: python prepare.py openwebtext
wandb_run_name = 'gpt2-124m'

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024

# 2^19 tokens per step (GPT-3, table 2.1: 0.5M for models up to 760M, 1M for 1.3B). batch_size
# takes 22 GiB on an H100: halve it if memory is short; gradient accumulation adapts.
total_batch_size = 2**19
batch_size = 64

# 19,073 steps · 2^19 = 10.0B tokens, 80 per parameter: 4× the compute-optimal number (20,
# Hoffmann et al. 2022), which pays off for a small model that will be used a lot.
max_iters = 19073
learning_rate = 6e-4  # GPT-3, table 2.1
warmup_iters = 715  # 375M tokens, as in GPT-3
weight_decay = 0.1

eval_interval = 500  # under 1% of the FLOPs
eval_iters = 40  # 40 · 64 sequences = 2.6M tokens of validation text
log_interval = 10
