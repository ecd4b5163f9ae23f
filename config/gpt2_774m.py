# GPT-2 774M: GPT-2 large, on 15.5B tokens.
#   python train.py config/gpt2_774m.py
#   torchrun --nproc_per_node=8 train.py config/gpt2_774m.py

out_dir = 'out-gpt2-774m'
dataset = 'openwebtext'  # 9.0B GPT-2 tokens: python prepare.py openwebtext
wandb_run_name = 'gpt2-774m'

n_layer = 36
n_head = 20
n_embd = 1280
block_size = 1024

# 2^19 tokens per step (GPT-3, table 2.1: 0.5M for models up to 760M, 1M for 1.3B). batch_size is
# planned, not measured, to fit on an 80 GB GPU: halve it if memory is short; gradient accumulation
# adapts.
total_batch_size = 2**19
batch_size = 16

# 29,527 steps · 2^19 = 15.5B tokens, 20 per parameter (compute-optimal, Hoffmann et al. 2022):
# 1.7 epochs of OpenWebText, where repeating up to 4 times costs little (Muennighoff et al. 2023).
max_iters = 29527
learning_rate = 2.5e-4  # GPT-3, table 2.1
warmup_iters = 715  # 375M tokens, as in GPT-3
weight_decay = 0.1

eval_interval = 500  # under 1% of the FLOPs
eval_iters = 160  # 160 · 16 sequences = 2.6M tokens of validation text
log_interval = 10
