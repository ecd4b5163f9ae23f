# A character-level GPT with 10.7M parameters on tiny Shakespeare, as in nanoGPT: minutes on a GPU.
#   python train.py config/shakespeare_char.py

out_dir = 'out-shakespeare-char'
dataset = 'shakespeare_char'  # 1,003,854 training characters; downloaded on first use

# 12·L·C² = 12 · 6 · 384² = 10.6M weights in the blocks
n_layer = 6
n_head = 6
n_embd = 384
mlp = 'gelu_erf'  # nanoGPT's exact GELU; on a CPU faster than GPT-2's approximation
dropout = 0.2  # 82 epochs: without dropout the model would memorize the text

# 64 sequences · 256 characters = 16,384 characters per step
batch_size = 64
block_size = 256
gradient_accumulation_steps = 1

# 5,000 steps · 16,384 = 82M characters, 82 epochs
max_iters = 5000
learning_rate = 1e-3  # small networks can take a higher one
warmup_iters = 100
beta2 = 0.99  # with few tokens per step, gradients are noisy: average over more steps

eval_interval = 250
eval_iters = 200  # the validation split has 7 batches, so this evaluates on all of it
log_interval = 10
always_save_checkpoint = False  # the model will overfit: keep the best checkpoint
