# The smallest run, to see in a second whether a change of the code works: docs/hacking.md.
#   python train.py config/tiny.py

out_dir = 'out-tiny'
dataset = 'readme'  # of this project, some 20,000 characters; the first run prepares it

n_layer = 2
n_head = 2
n_embd = 32
block_size = 32

# 8 sequences · 32 characters = 256 characters a step
batch_size = 8
gradient_accumulation_steps = 1
max_iters = 4
learning_rate = 3e-3  # small networks bear a high one
warmup_iters = 0

eval_interval = 2
eval_iters = 4
report = False
film = True
