# The grid of 24 trainings on a CPU, seconds each.
#   python bench.py --grid config/grid_cpu.py

dataset = 'shakespeare_char'

# 12·L·C² = 12 · 2 · 64² = 98k weights in the blocks
n_layer = 2
n_head = 2
n_embd = 64

# 12 windows · 64 characters = 768 characters a step; 300 steps = 230k characters
batch_size = 12
block_size = 64
gradient_accumulation_steps = 1
max_iters = 300
lr_decay_iters = max_iters
learning_rate = 2e-3
min_lr = learning_rate / 10
warmup_iters = 30
beta2 = 0.99

eval_interval = 25
eval_iters = 20
log_interval = 10
checkpoint_interval = 1000000
always_save_checkpoint = False
compile = False
