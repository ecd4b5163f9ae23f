# GPT-2 355M: GPT-2 medium, on 10B tokens.
#   python train.py config/gpt2_355m.py
#   torchrun --nproc_per_node=8 train.py config/gpt2_355m.py

out_dir = 'out-gpt2-355m'
dataset = 'openwebtext'  # 9.0B GPT-2 tokens: python prepare.py openwebtext
wandb_run_name = 'gpt2-355m'

n_layer = 24
n_head = 16
n_embd = 1024
block_size = 1024

# 2^19 tokens per step (GPT-3, table 2.1: 0.5M for models up to 760M, 1M for 1.3B). batch_size is
# planned, not measured, to fit on an 80 GB GPU: halve it if memory is short; gradient accumulation
# adapts.
total_batch_size = 2**19
batch_size = 32

# 19,073 steps · 2^19 = 10.0B tokens, 28 per parameter (compute-optimal: 20, Hoffmann et al.
# 2022).
max_iters = 19073
learning_rate = 3e-4  # GPT-3, table 2.1
warmup_iters = 715  # 375M tokens, as in GPT-3
weight_decay = 0.1

eval_interval = 500  # under 1% of the FLOPs
eval_iters = 80  # 80 · 32 sequences = 2.6M tokens of validation text
log_interval = 10
