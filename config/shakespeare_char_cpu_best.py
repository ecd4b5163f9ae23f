# config/shakespeare_char_cpu_fast.py, longer and without n-grams. On two CPU cores with bfloat16 it
# ends below the 1.4697 that nanoGPT reports for its baby GPT (10.7M parameters, on an A100).
#   python train.py config/shakespeare_char_cpu_best.py

out_dir = 'out-shakespeare-char-cpu-best'
dataset = 'shakespeare_char'  # 1,003,854 training characters; downloaded on first use

# 12·L·C² = 12 · 4 · 128² = 0.8M weights in the blocks. The fast recipe's n-gram embeddings would
# memorize the text over two epochs, and the final loss would be 0.03 higher.
n_layer = 4
n_head = 2
n_embd = 128
rotary = True
qk_norm = True
mlp = 'relu2'
conv = 4
tied_head = False
zero_init = True
dropout = 0.0  # 2 epochs: too few to overfit

# 8 sequences · 256 characters = 2,048 characters per step: Muon benefits from larger batches, and
# the cost of its update does not depend on the batch size
batch_size = 8
block_size = 256
gradient_accumulation_steps = 1

# 1,100 steps · 2,048 = 2.3M characters
optimizer = 'normuon'
max_iters = 1100
learning_rate = 6e-3
lr_scales = 'head:2,vector:4'
min_lr = learning_rate / 5
ema_decay = 0.98  # averages out the noise that a high final learning rate leaves
lr_schedule = 'linear'
warmup_iters = 10
momentum = 0.9
beta1 = 0.8
beta2 = 0.99

eval_interval = 220
eval_iters = 20
log_interval = 50
always_save_checkpoint = False
