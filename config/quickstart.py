# A GPT of 2M parameters that learns to write Python: about two minutes on two CPU cores.
#   python train.py config/quickstart.py
#   python sample.py config/quickstart_sample.py

out_dir = 'out-quickstart'
dataset = 'pystdlib'  # Python's standard library, 3.3M tokens of a vocabulary of 2,048

# 12·L·C² = 12 · 4 · 192² = 1.8M weights in the blocks, and 2,048 · 192 = 0.4M in the embedding
n_layer = 4
n_head = 6
n_embd = 192
block_size = 128  # about 400 characters

# 16 windows · 128 tokens = 2,048 tokens a step; 800 steps = 1.6M tokens, half an epoch
batch_size = 16
gradient_accumulation_steps = 1
max_iters = 800
lr_decay_iters = max_iters

learning_rate = 3e-3  # small networks bear a high one
min_lr = learning_rate / 10
warmup_iters = 100
beta2 = 0.99  # few tokens a step make the gradient noisy: average over more steps

eval_interval = 200
eval_iters = 40
log_interval = 50
