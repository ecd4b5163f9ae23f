# A model for 0.2 to 20 MB of your own text, sized to the text and to the time you have.
#   python prepare.py text notes/ --data_dir=data/notes
#   python train.py config/own_text.py --dataset=notes --minutes=10
# To train it on more text, mixed with the old text so that the model does not forget it:
#   python prepare.py text more.txt --tokenizer=out-own-text --data_dir=data/more
#   python train.py config/own_text.py --init_from=out-own-text --dataset=more:0.3333,notes:0.6667

import math

import torch

from plaingpt.core.dataset import has_token_files, open_dataset_spec
from plaingpt.core.start import is_resumed
from plaingpt.experiments.core_speed import core_speed

out_dir = 'out-own-text'
if dataset == 'openwebtext':  # the default: no --dataset was given
    dataset = 'notes'

_data = open_dataset_spec(dataset, vocab_size) if has_token_files(dataset) else None
_epoch = min(len(part.dataset.split('train')) / part.weight for part in _data.components) \
    if _data else 1e6  # tokens until a corpus repeats
_shortest = min(len(_data.split(name)) for name in ('train', 'val')) if _data else 1e6
_vocab = _data.vocab_size if _data else 1024

batch_size = 8
block_size = max(1, min(256, block_size, _shortest - 1))
gradient_accumulation_steps = 1
_step = max(1, total_batch_size or batch_size * block_size * gradient_accumulation_steps)  # tokens

if not is_resumed(out_dir, init_from):  # a resumed run keeps its size, learning rate and length
    # A small GPU computes about 2e13 FLOP/s. A CPU core is measured; the head, the optimizer and
    # evaluations take a fifth of its time. Training takes 6 FLOPs per parameter and token.
    _on_gpu = device != 'cpu' and torch.cuda.is_available()
    _flops_per_s = 2e13 if _on_gpu else 0.8 * core_speed(dtype) * torch.get_num_threads()
    _flops = _flops_per_s * (60 * max(0, minutes) or 600)

    if init_from not in ('scratch', 'auto'):  # more text for a trained model
        # Four epochs of the new text, which is the first corpus of a mixture. At these learning
        # rates, the loss on the old text rose by less than 0.1: see docs/training.md
        _corpora = _data.components if _data else []
        learning_rate = 6e-4 if len(_corpora) > 1 else 3e-5
        weight_decay = 0.1
        _epoch = len(_corpora[0].dataset.split('train')) / _corpora[0].weight if _data else 1e6
        _parameters = 12 * n_layer * n_embd ** 2 + _vocab * n_embd
        max_iters = round(min(4 * _epoch, _flops / (6 * _parameters)) / _step)  # or --minutes
    else:
        # With 3 tokens per parameter, training takes 18 · parameters² FLOPs. 20 are optimal for new
        # text (Hoffmann et al. 2022), but a short text soon repeats: see docs/training.md
        _trained = 3 * math.sqrt(_flops / 18)  # tokens
        # After 8 epochs a text has little left to teach; spend the time on a larger model instead.
        _trained = min(_trained, max(8 * _epoch, 400 * _step))
        _parameters = min(_flops / (6 * _trained), 2e7)

        # Solve 12·L·C² (blocks) + V·C (head) = parameters for C, a multiple of 64. At least 128,
        # since a step with 64 channels is hardly faster.
        n_layer = 4 if _parameters < 5e6 else 6
        _blocks = 24 * n_layer
        _channels = (math.sqrt(_vocab ** 2 + 2 * _blocks * _parameters) - _vocab) / _blocks
        n_embd = 64 * max(2, round(_channels / 64))
        n_head = max(1, n_embd // 64)

        # The architecture of Qwen3, which llama.cpp runs too. After equal time, its loss is within
        # 0.01 bits per byte of that with conv=4, relu2 and LayerNorm: see docs/benchmarks.md
        rotary = rmsnorm = qk_norm = True
        mlp = 'swiglu'
        tied_head = False

        _parameters = max(_parameters, 12 * n_layer * n_embd ** 2 + _vocab * n_embd)
        max_iters = round(min(_trained, _flops / (6 * _parameters)) / _step)  # or --minutes

        # Over many epochs a model memorizes the text, unless the weights decay. With this decay,
        # they are an average of the updates of about the last epoch (Wang and Aitchison 2024).
        # Large random branches at the start also delay memorizing; in a run of a few epochs they
        # only delay learning. Both are measured in docs/results/techniques.md
        learning_rate = 6e-3  # the same for every width, as is the RMS of Muon's updates
        weight_decay = min(12.0, max(0.1, _step / _epoch / max(learning_rate, 1e-9)))
        zero_init = 'head' if max_iters * _step > 5 * _epoch else True

# everything else as in config/shakespeare_char_cpu_fast.py
optimizer = 'normuon'
lr_scales = 'head:2,vector:4'
min_lr = learning_rate / 5
ema_decay = 0.98
lr_schedule = 'linear'
warmup_iters = 10
momentum = 0.9
beta1 = 0.8
beta2 = 0.99

eval_interval = max(1, round(max_iters / 8))
eval_iters = 20
log_interval = max(1, min(50, max_iters // 20))
always_save_checkpoint = False  # keep the best checkpoint
