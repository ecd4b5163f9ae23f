# nanoGPT's character-level GPT of 10.7M parameters on tiny Shakespeare with newer parts, in fewer
# steps.
#   python train.py config/shakespeare_char_fast.py
# Not measured yet: no GPU was at hand.

out_dir = 'out-shakespeare-char-fast'
dataset = 'shakespeare_char'  # 1,003,854 training characters; downloaded when first used

# 12·L·C² = 12 · 6 · 384² = 10.6M weights in the blocks
n_layer = 6
n_head = 6
n_embd = 384
rotary = True
qk_norm = True
mlp = 'relu2'
conv = 4
tied_head = False
zero_init = True
dropout = 0.2  # the text is seen 16 times: without dropout the model would memorize it

# 64 sequences · 256 characters = 16,384 characters a step
batch_size = 64
block_size = 256
gradient_accumulation_steps = 1

# 1,000 steps · 16,384 = 16M characters, 16 epochs
optimizer = 'normuon'
max_iters = 1000
learning_rate = 3e-3
lr_scales = 'head:2,vector:4'
min_lr = 0.0
lr_schedule = 'linear'
warmup_iters = 20
beta1 = 0.8
beta2 = 0.95

eval_interval = 100
eval_iters = 7  # all of the validation text
log_interval = 10
always_save_checkpoint = False  # it may overfit: keep the best
