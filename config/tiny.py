# The smallest run: it checks in seconds that a code change works. See docs/hacking.md.
#   python train.py config/tiny.py

out_dir = 'out-tiny'
dataset = 'readme'  # this project's, about 9,000 characters; prepared on first use

n_layer = 2
n_head = 2
n_embd = 32
block_size = 32

# 8 sequences · 32 characters = 256 characters per step
batch_size = 8
gradient_accumulation_steps = 1
max_iters = 4
learning_rate = 3e-3  # small networks can take a high one
warmup_iters = 0

eval_interval = 2
eval_iters = 4
report = False
film = True
