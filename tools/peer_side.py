"""What own_text.py runs with another program's Python, in its folder.

    python tools/peer_side.py score_nanochat val.txt NAME

The scores are bits per byte. As in evaluate.py, each token is predicted once, in windows of the
length that the model was trained on.
"""

import json
import math
import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F


def read(path):
    return Path(path).read_bytes().decode()


@torch.no_grad()
def bits_per_byte(logits_of, ids, num_bytes, block_size, bos=None):
    """logits_of: idx (1, T) → logits (1, T, V); num_bytes: UTF-8 bytes of the predicted tokens;
    bos: the token in front of each window, if each training sequence began with it"""
    targets = torch.tensor(ids if bos is not None else ids[1:])
    nats = 0.0
    for start in range(0, len(targets), block_size):
        first = max(0, min(start, len(targets) - block_size))  # the last window is a full one
        window = targets[first:first + block_size]  # (T,)
        previous = ids[first] if bos is None else bos
        idx = torch.cat([torch.tensor([previous]), window[:-1]])
        losses = F.cross_entropy(logits_of(idx[None])[0].float(), window, reduction='none')
        nats += losses[start - first:].sum().item()
    return nats / math.log(2) / num_bytes


def train_gpt2(folder, out, steps, learning_rate, *size):
    """Train a GPT-2 with transformers' Trainer on blocks of 256 tokens, as its run_clm.py does. The
    best of eight evaluations is kept. size: n_layer, n_head, n_embd"""
    from transformers import (
        AutoTokenizer,
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
        default_data_collator,
    )
    tokenizer = AutoTokenizer.from_pretrained(f'{folder}/bpe')
    blocks = {}
    for split in ('train', 'val'):
        ids = tokenizer(read(f'{folder}/{split}.txt'))['input_ids']
        blocks[split] = [{'input_ids': ids[i:i + 256], 'labels': ids[i:i + 256]}
                         for i in range(0, len(ids) - 255, 256)]
    n_layer, n_head, n_embd = map(int, size)
    end = tokenizer.eos_token_id
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=len(tokenizer), n_positions=256, n_layer=n_layer, n_head=n_head, n_embd=n_embd,
        bos_token_id=end, eos_token_id=end))
    interval = max(1, int(steps) // 8)
    trainer = Trainer(model, TrainingArguments(
        f'{out}/checkpoints', max_steps=int(steps), learning_rate=float(learning_rate),
        eval_strategy='steps', eval_steps=interval, save_strategy='steps', save_steps=interval,
        save_total_limit=1, load_best_model_at_end=True, use_cpu=True, report_to='none',
        disable_tqdm=True), default_data_collator, blocks['train'], blocks['val'])
    trainer.train()
    trainer.save_model(f'{out}/best')
    tokenizer.save_pretrained(f'{out}/best')


def cut_for_nanochat(folder, length):
    """Write the texts as the Parquet files that nanochat reads. length: tokens per document; 0: its
    tokenizer is not trained yet"""
    import pyarrow
    import pyarrow.parquet
    from nanochat.tokenizer import get_tokenizer
    for i, split in enumerate(('train', 'val')):
        text = read(f'{folder}/{split}.txt')
        if int(length):
            tokenizer = get_tokenizer()
            ids, n = tokenizer.encode(text), int(length)
            documents = [tokenizer.decode(ids[i:i + n]) for i in range(0, len(ids), n)]
        else:
            documents = [text[i:i + 5000] for i in range(0, len(text), 5000)]
        pyarrow.parquet.write_table(pyarrow.table({'text': documents}),
                                    f'{folder}/nanochat/base_data_climbmix/{i}.parquet')


def score_nanochat(text_path, name):
    from nanochat.checkpoint_manager import load_model
    text = read(text_path)
    model, tokenizer, _ = load_model('base', torch.device('cpu'), 'eval', model_tag=name)
    return bits_per_byte(model, tokenizer.encode(text), len(text.encode()),
                         model.config.sequence_len, tokenizer.get_bos_token_id())


def score_litgpt(text_path, folder):
    from litgpt import Config
    from litgpt.model import GPT
    from tokenizers import Tokenizer
    model = GPT(Config.from_file(Path(folder, 'model_config.yaml'))).eval()
    weights = torch.load(Path(folder, 'lit_model.pth'), weights_only=True)['model']
    model.load_state_dict({key.removeprefix('_orig_mod.'): w for key, w in weights.items()})
    tokenizer = Tokenizer.from_file(str(Path(folder, 'tokenizer.json')))
    ids = tokenizer.encode(read(text_path)).ids
    return bits_per_byte(model, ids, len(tokenizer.decode(ids[1:]).encode()),
                         model.config.block_size)


def score_minimind(text_path, weights, settings):
    """settings: arguments of MiniMindConfig, as JSON"""
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
    from transformers import AutoTokenizer
    text = read(text_path)
    model = MiniMindForCausalLM(MiniMindConfig(**json.loads(settings))).eval()
    model.load_state_dict(torch.load(weights, weights_only=True))
    tokenizer = AutoTokenizer.from_pretrained('model')
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return bits_per_byte(lambda idx: model(idx).logits, ids, len(text.encode()), 340,
                         tokenizer.bos_token_id)


if __name__ == '__main__':
    sys.path.insert(0, os.getcwd())
    print(globals()[sys.argv[1]](*sys.argv[2:]))
