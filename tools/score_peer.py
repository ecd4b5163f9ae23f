"""Score a text with a model that another program trained, in the Python that runs that program.

    python tools/score_peer.py nanochat NAME val.txt

Run in the program's folder. Prints the bits per byte. As in evaluate.py, each token is predicted
once, in windows of the length that the model was trained on.
"""

import json
import math
import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F


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


def score_nanochat(name, text):
    from nanochat.checkpoint_manager import load_model
    model, tokenizer, _ = load_model('base', torch.device('cpu'), 'eval', model_tag=name)
    return bits_per_byte(model, tokenizer.encode(text), len(text.encode()),
                         model.config.sequence_len, tokenizer.get_bos_token_id())


def score_litgpt(folder, text):
    from litgpt import Config
    from litgpt.model import GPT
    from tokenizers import Tokenizer
    model = GPT(Config.from_file(Path(folder, 'model_config.yaml'))).eval()
    weights = torch.load(Path(folder, 'lit_model.pth'), weights_only=True)['model']
    model.load_state_dict({key.removeprefix('_orig_mod.'): w for key, w in weights.items()})
    tokenizer = Tokenizer.from_file(str(Path(folder, 'tokenizer.json')))
    ids = tokenizer.encode(text).ids
    return bits_per_byte(model, ids, len(tokenizer.decode(ids[1:]).encode()),
                         model.config.block_size)


def score_minimind(settings, text):
    """settings: JSON of the arguments of MiniMindConfig, the file of the weights and block_size"""
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
    from transformers import AutoTokenizer
    settings = json.loads(settings)
    model = MiniMindForCausalLM(MiniMindConfig(**settings['model'])).eval()
    model.load_state_dict(torch.load(settings['weights'], weights_only=True))
    tokenizer = AutoTokenizer.from_pretrained('model')
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return bits_per_byte(lambda idx: model(idx).logits, ids, len(text.encode()),
                         settings['block_size'], tokenizer.bos_token_id)


if __name__ == '__main__':
    program, model_name, text_path = sys.argv[1:]
    sys.path.insert(0, os.getcwd())
    scorers = {'nanochat': score_nanochat, 'litgpt': score_litgpt, 'minimind': score_minimind}
    val_text = Path(text_path).read_bytes().decode()
    print(scorers[program](model_name, val_text))
