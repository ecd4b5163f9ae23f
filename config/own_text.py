# A model for 0.2 to 20 MB of your own text, of a size that suits the text and the time you have.
#   python prepare.py text notes/ --data_dir=data/notes
#   python train.py config/own_text.py --dataset=notes --minutes=10

import math

import torch

from plaingpt.data.dataset import has_token_files, open_dataset_spec
from plaingpt.training.dtype_choice import core_speed
from plaingpt.training.start import is_resumed

out_dir = 'out-own-text'
if dataset == 'openwebtext':  # none was named
    dataset = 'notes'

_data = open_dataset_spec(dataset, vocab_size) if has_token_files(dataset) else None
_epoch = min(len(part.dataset.split('train')) / part.weight for part in _data.components) \
    if _data else 1e6  # tokens until a corpus begins again
_shortest = min(len(_data.split(name)) for name in ('train', 'val')) if _data else 1e6
_vocab = _data.vocab_size if _data else 1024

batch_size = 8
block_size = max(1, min(256, _shortest - 1))
gradient_accumulation_steps = 1
learning_rate = 6e-3  # the same at each width, because Muon's updates are
_step = max(1, total_batch_size or batch_size * block_size * gradient_accumulation_steps)  # tokens

if not is_resumed(out_dir, init_from):  # a resumed run keeps its size and shape
    # A small GPU computes about 2e13 FLOPs a second. A core is measured; the head, the optimizer
    # and evaluations take a fifth of its time. Training takes 6 FLOPs for each parameter and token.
    # With 3 tokens a parameter that makes 18 · parameters²
    _on_gpu = device != 'cpu' and torch.cuda.is_available()
    _flops_per_s = 2e13 if _on_gpu else 0.8 * core_speed(dtype) * torch.get_num_threads()
    _flops = _flops_per_s * (60 * max(0, minutes) or 600)
    _trained = 3 * math.sqrt(_flops / 18)  # tokens
    # A text that was read 8 times has little left to learn: then a larger model uses the time
    _trained = min(_trained, max(8 * _epoch, 400 * _step))
    _parameters = min(_flops / (6 * _trained), 2e7)

    # 12·L·C² in the blocks and V·C in the head make as many, for a C that is a multiple of 64. With
    # 64 channels a step hardly takes less time than with 128
    n_layer = 4 if _parameters < 5e6 else 6
    _blocks = 24 * n_layer
    _channels = (math.sqrt(_vocab ** 2 + 2 * _blocks * _parameters) - _vocab) / _blocks
    n_embd = 64 * max(2, round(_channels / 64))
    n_head = max(1, n_embd // 64)
    _parameters = max(_parameters, _blocks / 2 * n_embd ** 2 + _vocab * n_embd)
    max_iters = round(min(_trained, _flops / (6 * _parameters)) / _step)  # --minutes: what fits

    # The shape of Qwen3, which llama.cpp runs, too. At equal time its loss is within 0.01 bits a
    # byte of that with conv=4, relu2 and LayerNorm: see docs/benchmarks.md
    rotary = rmsnorm = qk_norm = True
    mlp = 'swiglu'
    tied_head = False

# A text that is read again and again is learned by heart, unless the weights decay. With this decay
# they are an average of the updates of about the last epoch (Wang and Aitchison 2024)
weight_decay = min(3.0, max(0.1, _step / _epoch / max(learning_rate, 1e-9)))

# the rest as in config/shakespeare_char_cpu_fast.py
zero_init = True
optimizer = 'normuon'
lr_scales = 'head:2,vector:4'
min_lr = learning_rate / 5
average_decay = 0.98
lr_schedule = 'linear'
warmup_iters = 10
momentum = 0.9
beta1 = 0.8
beta2 = 0.99

eval_interval = max(1, round(max_iters / 8))
eval_iters = 20
log_interval = max(1, min(50, max_iters // 20))
always_save_checkpoint = False  # the best one is kept
