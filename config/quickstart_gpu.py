# A model with GPT-2's depth and width that learns to write Python, on one GPU and without a
# download: the recipe of config/gpt2_124m_fast.py, in two minutes on an H100.
#   python train.py config/quickstart_gpu.py
#   python sample.py config/quickstart_sample.py --out_dir=out-quickstart-gpu
# On a slower GPU, set a time such as --minutes=5; with 16 GiB of memory, also --batch_size=16.

out_dir = 'out-quickstart-gpu'
dataset = 'pypackages'  # the Python packages installed here, with a vocabulary of 32,768

# 12·L·C² = 12 · 12 · 768² = 85M weights in the blocks, and 32,768 · 768 = 25M in each of the
# embedding and the head
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

# 2^16 tokens per step; 600 steps = 39M tokens. According to plan.py, batch_size=32 takes 16 GiB of
# memory and batch_size=16 takes 10 GiB.
total_batch_size = 2**16
batch_size = 32
max_iters = 600

optimizer = 'normuon'
learning_rate = 1.5e-3
lr_scales = 'embedding:8,head:2,vector:4'
min_lr = 0.0
lr_schedule = 'linear'
warmup_iters = 30
beta1 = 0.8
beta2 = 0.95

eval_interval = 200
eval_iters = 8
log_interval = 10
