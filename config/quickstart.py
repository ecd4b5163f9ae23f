# A GPT that writes Python, from scratch, in two to three minutes on two CPU cores.
#   python train.py config/quickstart.py
#   python sample.py config/quickstart_sample.py

out_dir = 'out-quickstart'
dataset = 'pystdlib'

n_layer = 4
n_head = 4
n_embd = 256
block_size = 128
batch_size = 16
gradient_accumulation_steps = 1

learning_rate = 2e-3
min_lr = 2e-4
beta2 = 0.99
warmup_iters = 50
max_iters = 1200
lr_decay_iters = 1200

eval_interval = 200
eval_iters = 40
log_interval = 20
