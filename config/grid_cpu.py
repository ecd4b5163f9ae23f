# A grid of 24 CPU runs that take seconds each.
#   python bench.py config/grid_cpu.py --variants=grid

out_dir = 'out-grid-cpu'
dataset = 'shakespeare_char'

# 12·L·C² = 12 · 2 · 32² = 25k weights in the blocks; tiny, because float16 is slow on a CPU
n_layer = 2
n_head = 2
n_embd = 32

# 8 sequences · 32 characters = 256 characters per step; 150 steps = 38k characters
batch_size = 8
block_size = 32
gradient_accumulation_steps = 1
max_iters = 150
learning_rate = 3e-3  # small networks can take a high one
warmup_iters = 15
beta2 = 0.99

eval_interval = 15
eval_iters = 40
log_interval = 5
always_save_checkpoint = False
