# A character-level GPT with 5.0M parameters and newer components than GPT-2's, on tiny Shakespeare:
# a minute or two on two CPU cores.
#   python train.py config/shakespeare_char_cpu_fast.py

out_dir = 'out-shakespeare-char-cpu-fast'
dataset = 'shakespeare_char'  # 1,003,854 training characters; downloaded on first use

# 12·L·C² = 12 · 4 · 128² = 0.8M weights in the blocks, and 32,768 · 128 = 4.2M in embeddings of
# the last four characters, which need no matmul
n_layer = 4
n_head = 2
n_embd = 128
rotary = True
qk_norm = True
mlp = 'relu2'
conv = 4
ngram_rows = 32768
ngram = 4
tied_head = False
zero_init = True
dropout = 0.0  # 1.5 epochs: too few to overfit

# 8 sequences · 256 characters = 2,048 characters per step: Muon benefits from larger batches, and
# the cost of its update does not depend on the batch size
batch_size = 8
block_size = 256
gradient_accumulation_steps = 1

# 750 steps · 2,048 = 1.5M characters, as many as in config/shakespeare_char_cpu.py
optimizer = 'normuon'
max_iters = 750
learning_rate = 6e-3
lr_scales = 'ngram:0.5,head:2,vector:4'
min_lr = learning_rate / 5
ema_decay = 0.98  # averages out the noise that a high final learning rate leaves
lr_schedule = 'linear'
warmup_iters = 10
momentum = 0.9
beta1 = 0.8
beta2 = 0.99

eval_interval = 150
eval_iters = 20
log_interval = 50
always_save_checkpoint = False
