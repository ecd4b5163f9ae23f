# GPT-2 124M with newer parts: fewer tokens to the same loss, and as fast a step.
#   python train.py config/gpt2_124m_fast.py
#   torchrun --nproc_per_node=8 train.py config/gpt2_124m_fast.py
# Not measured yet: no GPU was at hand. The recipe is config/shakespeare_char_cpu_fast.py's, at the
# size, batch and learning rate with which others report it (see docs/training.md).

out_dir = 'out-gpt2-124m-fast'
dataset = 'openwebtext'  # 9.0B GPT-2 tokens: python prepare.py openwebtext
wandb_run_name = 'gpt2-124m-fast'

n_layer = 12
n_head = 6  # heads of 128 channels: QK-norm and attention kernels like them wide
n_embd = 768
block_size = 1024
rotary = True
rmsnorm = True
qk_norm = True
mlp = 'relu2'
tied_head = False  # 39M parameters more, and no FLOP
zero_init = True

# 2^19 tokens a step; batch_size is what one GPU holds at once: the accumulation adapts.
total_batch_size = 2**19
batch_size = 16

# 9,537 steps · 2^19 = 5.0B tokens, half of what config/gpt2_124m.py takes
optimizer = 'muon'
max_iters = 9537
learning_rate = 2e-3  # an update of Muon's bears three times AdamW's
min_lr = 0.0
lr_schedule = 'wsd'  # a run can be cut short: only the last wsd_decay of it falls
wsd_decay = 0.4
warmup_iters = 100
weight_decay = 0.1

eval_interval = 250
eval_iters = 160  # 160 · 16 sequences = 2.6M tokens of validation text
log_interval = 10
