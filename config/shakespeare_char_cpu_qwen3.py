# config/shakespeare_char_cpu_fast.py for a model that other programs can open: the same data, steps
# and optimizer, in the shape of Qwen3, so that export.py writes it for Hugging Face's transformers.
#   python train.py config/shakespeare_char_cpu_qwen3.py
#   python export.py --out_dir=out-shakespeare-char-cpu-qwen3 --dest=shakespeare-gpt

out_dir = 'out-shakespeare-char-cpu-qwen3'
dataset = 'shakespeare_char'  # 1,003,854 training characters; downloaded when first used

n_layer = 4
n_head = 2
n_embd = 128
dropout = 0.0  # the text is seen once and a half: nothing to overfit

# what Qwen3 is made of
rotary = True
rmsnorm = True
qk_norm = True
mlp = 'swiglu'
bias = False
tied_head = False
zero_init = True

# as in config/shakespeare_char_cpu_fast.py
batch_size = 16
block_size = 128
gradient_accumulation_steps = 1
optimizer = 'normuon'
max_iters = 750
learning_rate = 6e-3
head_lr_scale = 2.0
vector_lr_scale = 4.0
min_lr = 0.0
lr_schedule = 'linear'
warmup_iters = 10
momentum = 0.9
beta1 = 0.8
beta2 = 0.95

eval_interval = 150
eval_iters = 20
log_interval = 50
always_save_checkpoint = False
