# A GPT of 2.6M parameters that learns to write Python: about a minute on two CPU cores.
#   python train.py config/quickstart.py
#   python sample.py config/quickstart_sample.py

out_dir = 'out-quickstart'
dataset = 'pystdlib'  # Python's standard library, 3M tokens of a vocabulary of 2,048

# 12·L·C² = 12 · 4 · 192² = 1.8M weights in the blocks, and 2 · 2,048 · 192 = 0.8M in the embedding
# and the head
n_layer = 4
n_head = 3
n_embd = 192
block_size = 128  # about 400 characters

# newer than GPT-2, and faster to the same loss: see docs/training.md
rotary = True
qk_norm = True
mlp = 'relu2'
tied_head = False
zero_init = True
optimizer = 'muon'

# 16 sequences · 128 tokens = 2,048 tokens a step; 450 steps = 0.9M tokens, a third of an epoch
batch_size = 16
gradient_accumulation_steps = 1
max_iters = 450

learning_rate = 4e-3  # small networks bear a high one
min_lr = 0.0
lr_schedule = 'linear'
warmup_iters = 20
momentum = 0.9
beta2 = 0.99  # few tokens a step make the gradient noisy: average over more steps

eval_interval = 150
eval_iters = 40
log_interval = 50
