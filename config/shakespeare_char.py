# A character-level GPT of 10.7M parameters on tiny Shakespeare, as in nanoGPT: minutes on a GPU.
#   python train.py config/shakespeare_char.py

out_dir = 'out-shakespeare-char'
dataset = 'shakespeare_char'  # 1,003,854 training characters; downloaded when first used

# 12·L·C² = 12 · 6 · 384² = 10.6M weights in the blocks
n_layer = 6
n_head = 6
n_embd = 384
mlp = 'gelu_erf'  # nanoGPT's; on a CPU several times as fast as GPT-2's approximation
dropout = 0.2  # the text is seen 82 times: without dropout the model would memorize it

# 64 sequences · 256 characters = 16,384 characters a step
batch_size = 64
block_size = 256
gradient_accumulation_steps = 1

# 5,000 steps · 16,384 = 82M characters, 82 epochs
max_iters = 5000
learning_rate = 1e-3  # small networks bear a higher one
warmup_iters = 100
beta2 = 0.99  # few tokens a step make the gradient noisy: average over more steps

eval_interval = 250
eval_iters = 200  # more than the 7 batches that the validation text has: all of it, each time
log_interval = 10
always_save_checkpoint = False  # it will overfit: keep the best
