# GPT-2 124M with the newer components of config/shakespeare_char_cpu_fast.py and
# config/quickstart.py, on a quarter of config/gpt2_124m.py's tokens. An H100 processes 467,000
# tokens/s; the final loss has not been measured yet.
#   hf download kjj0/fineweb10B-gpt2 --repo-type=dataset --local-dir=data/fineweb10B-gpt2 \
#       --include=*_val_*.bin --include=*_train_00000*.bin --include=*_train_00001*.bin
#   python train.py config/gpt2_124m_fast.py
#   torchrun --nproc_per_node=8 train.py config/gpt2_124m_fast.py

out_dir = 'out-gpt2-124m-fast'
dataset = 'fineweb10B-gpt2'  # GPT-2 tokens, 100M per file
wandb_run_name = 'gpt2-124m-fast'

# 12·L·C² = 12 · 12 · 768² = 85M weights in the blocks, and 50,257 · 768 = 39M in each of the
# embedding and the head. Value embeddings would add 463M with this vocabulary.
n_layer = 12
n_head = 6  # heads of 128 channels
n_embd = 768
block_size = 1024
rotary = True
qk_norm = True
mlp = 'relu2'
conv = 4
tied_head = False
zero_init = True

# 2^19 tokens per step. batch_size takes 24 GiB on an H100: halve it if memory is short; gradient
# accumulation adapts.
total_batch_size = 2**19
batch_size = 64

# 4,768 steps · 2^19 = 2.5B tokens, 20 per parameter of GPT-2: compute-optimal (Hoffmann et
# al. 2022)
max_iters = 4768
optimizer = 'normuon'
learning_rate = 1.5e-3  # not tuned
lr_scales = 'embedding:8,head:2,vector:4'
min_lr = 0.0
lr_schedule = 'linear'
warmup_iters = 100
beta1 = 0.8
beta2 = 0.95

eval_interval = 250  # under 1% of the FLOPs
eval_iters = 16  # 16 · 64 sequences = 1.0M tokens of validation text
log_interval = 10
