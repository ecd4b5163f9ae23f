# GPT-2 1558M: GPT-2 XL, on 31B tokens.
#   python train.py config/gpt2_1558m.py
#   torchrun --nproc_per_node=8 train.py config/gpt2_1558m.py

out_dir = 'out-gpt2-1558m'
dataset = 'openwebtext'  # 9.0B GPT-2 tokens: python prepare.py openwebtext
wandb_run_name = 'gpt2-1558m'

n_layer = 48
n_head = 25
n_embd = 1600
block_size = 1024

# 2^20 tokens per step (GPT-3, table 2.1: 0.5M for models up to 760M, 1M for 1.3B). batch_size is
# planned, not measured, to fit on an 80 GB GPU: halve it if memory is short; gradient accumulation
# adapts.
total_batch_size = 2**20
batch_size = 8

# 29,716 steps · 2^20 = 31.2B tokens, 20 per parameter (compute-optimal, Hoffmann et al. 2022):
# 3.5 epochs of OpenWebText, where repeating up to 4 times costs little (Muennighoff et al. 2023).
max_iters = 29716
learning_rate = 2e-4  # GPT-3, table 2.1, for 1.3B
warmup_iters = 358  # 375M tokens, as in GPT-3
weight_decay = 0.1

eval_interval = 250  # under 1% of the FLOPs
eval_iters = 320  # 320 · 8 sequences = 2.6M tokens of validation text
log_interval = 10
