# The quickstart for a model that other programs can open: the same data, steps and optimizer, in
# the shape of Qwen3, so that export.py writes it for Hugging Face's transformers.
#   python train.py config/quickstart_qwen3.py
#   python export.py --out_dir=out-quickstart-qwen3 --dest=python-gpt

out_dir = 'out-quickstart-qwen3'
dataset = 'pystdlib'  # Python's standard library, 3M tokens of a vocabulary of 2,048

n_layer = 4
n_head = 2
n_embd = 128
block_size = 128  # about 400 characters

# what Qwen3 is made of
rotary = True
rmsnorm = True
qk_norm = True
mlp = 'swiglu'
bias = False
tied_head = False
zero_init = True

# as in config/quickstart.py
batch_size = 16
gradient_accumulation_steps = 1
max_iters = 450

optimizer = 'normuon'
learning_rate = 9e-3
embedding_lr_scale = 8.0
head_lr_scale = 2.0
vector_lr_scale = 4.0
min_lr = 0.0
lr_schedule = 'linear'
warmup_iters = 20
momentum = 0.9
beta1 = 0.8
beta2 = 0.95

eval_interval = 150
eval_iters = 40
log_interval = 50
