# A character-level GPT with 0.8M parameters on tiny Shakespeare: two minutes on two CPU cores.
#   python train.py config/shakespeare_char_cpu.py

out_dir = 'out-shakespeare-char-cpu'
dataset = 'shakespeare_char'  # 1,003,854 training characters; downloaded on first use

# 12·L·C² = 12 · 4 · 128² = 0.8M weights in the blocks
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0  # 1.5 epochs: too few to overfit

# 12 sequences · 64 characters = 768 characters per step
batch_size = 12
block_size = 64
gradient_accumulation_steps = 1

# 2,000 steps · 768 = 1.5M characters, 1.5 epochs
max_iters = 2000
learning_rate = 1e-3
warmup_iters = 100
beta2 = 0.99

eval_interval = 250
eval_iters = 200  # the validation split has 146 batches, so this evaluates on all of it
log_interval = 50
always_save_checkpoint = False
