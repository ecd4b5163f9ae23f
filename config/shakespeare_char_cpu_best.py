# config/shakespeare_char_cpu_fast.py for longer, without n-grams. On two CPU cores with bfloat16 it
# ends below the loss that nanoGPT publishes for its baby GPT, 10.7M parameters on an A100: 1.4697.
#   python train.py config/shakespeare_char_cpu_best.py

out_dir = 'out-shakespeare-char-cpu-best'
dataset = 'shakespeare_char'  # 1,003,854 training characters; downloaded when first used

# 12·L·C² = 12 · 4 · 128² = 0.8M weights in the blocks. With the fast recipe's embeddings of
# n-grams, which memorize a text that is read twice, the loss ends 0.03 higher
n_layer = 4
n_head = 2
n_embd = 128
rotary = True
qk_norm = True
mlp = 'relu2'
conv = 4
tied_head = False
zero_init = True
dropout = 0.0  # the text is seen twice: nothing to overfit

# 8 sequences · 256 characters = 2,048 characters a step: Muon makes more of a larger batch, and
# each of its steps costs the same
batch_size = 8
block_size = 256
gradient_accumulation_steps = 1

# 1,100 steps · 2,048 = 2.3M characters
optimizer = 'normuon'
max_iters = 1100
learning_rate = 6e-3
lr_scales = 'head:2,vector:4'
min_lr = learning_rate / 5
average_decay = 0.98  # of the weights: what falls no further by the rate falls by the average
lr_schedule = 'linear'
warmup_iters = 10
momentum = 0.9
beta1 = 0.8
beta2 = 0.99

eval_interval = 220
eval_iters = 20
log_interval = 50
always_save_checkpoint = False
