# A model for 0.2 to 20 MB of your own text, of a size that suits the text and the time you have.
#   python prepare.py text notes/ --tokenizer=bpe:512 --data_dir=data/notes
#   python train.py config/own_text.py --dataset=notes --minutes=10

import math

import torch

from plaingpt.data.dataset import has_token_files, open_named

out_dir = 'out-own-text'

# A CPU core computes about 7.5e10 FLOPs a second, a small GPU 2e13. Training takes 6 of them for
# each parameter and token; it sees 15 tokens a parameter, so FLOPs = 6 · 15 · parameters²
_flops_per_s = 2e13 if torch.cuda.is_available() else 7.5e10 * torch.get_num_threads()
_parameters = math.sqrt(60 * (minutes or 10) * _flops_per_s / (6 * 15))
_trained = 15 * _parameters  # tokens
n_layer = 4 if _parameters < 5e6 else 6
n_embd = 64 * max(1, round(math.sqrt(_parameters / 12 / n_layer) / 64))
n_head = n_embd // 64
block_size = 256

# A text that is seen many times is learned by heart: dropout slows that down, and the best
# checkpoint is kept
_tokens = len(open_named(dataset).split('train')) if has_token_files(dataset) else 1e6
_epochs = _trained / _tokens
dropout = 0.0 if _epochs < 3 else 0.1 if _epochs < 8 else 0.2
always_save_checkpoint = False

# the rest as in config/shakespeare_char_cpu_fast.py
rotary = True
qk_norm = True
mlp = 'relu2'
conv = 4
tied_head = False
zero_init = True

batch_size = 8
gradient_accumulation_steps = 1
max_iters = round(_trained / (batch_size * block_size))  # --minutes counts what fits

optimizer = 'normuon'
learning_rate = 6e-3  # the same at each width, as Muon's updates are
head_lr_scale = 2.0
vector_lr_scale = 4.0
min_lr = learning_rate / 5
average_decay = 0.98
lr_schedule = 'linear'
warmup_iters = 10
momentum = 0.9
beta1 = 0.8
beta2 = 0.99

eval_interval = 250
eval_iters = 20
log_interval = 50
