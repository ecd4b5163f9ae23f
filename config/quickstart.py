# A GPT with 6.6M parameters that learns to write Python: minutes on two CPU cores.
#   python train.py config/quickstart.py
#   python sample.py config/quickstart_sample.py

out_dir = 'out-quickstart'
dataset = 'pystdlib'  # Python's standard library, 3M tokens with a vocabulary of 2,048

# 12·L·C² = 12 · 4 · 128² = 0.8M weights in the matmuls of the blocks and 2 · 2,048 · 128 = 0.5M in
# the embedding and the head. Lookup tables, which need no matmul: 4 · 2,048 · 128 = 1.0M for value
# embeddings, and 32,768 · 128 = 4.2M for pairs of tokens
n_layer = 4
n_head = 2
n_embd = 128
block_size = 256  # about 800 characters

# newer than GPT-2, and faster to the same loss: see docs/training.md
rotary = True
qk_norm = True
mlp = 'relu2'
conv = 4
ngram_rows = 32768  # for about 111,000 distinct pairs of tokens in a third of an epoch
value_embeddings = True
tied_head = False
zero_init = True

# 8 sequences · 256 tokens = 2,048 tokens per step; 460 steps = 0.9M tokens, a third of an epoch
batch_size = 8
gradient_accumulation_steps = 1
max_iters = 460

optimizer = 'normuon'
learning_rate = 9e-3  # small networks can take a high one
lr_scales = 'embedding:8,head:2,vector:4'
min_lr = learning_rate / 5
ema_decay = 0.98  # the EMA of the weights has a lower loss at this learning rate
lr_schedule = 'linear'
warmup_iters = 20
momentum = 0.9
beta1 = 0.8
beta2 = 0.99

eval_interval = 230
eval_iters = 20
log_interval = 10
film = True  # python plot.py --film out-quickstart
