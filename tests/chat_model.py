"""A tiny model that was tuned on conversations."""

import torch
from sample_data import CHAT

from model import GPT, GPTConfig
from plaingpt.core.checkpoint import Saver

ANSWERS = {'hi': 'Hello there.', 'html': '<b id="bold">b</b>\x1b[31m', 'long': 'la ' * 20,
           'ä?': 'Ä und ö.'}


def train_chat_model(out_dir):
    """A run whose tiny model knows ANSWERS by heart."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(96, CHAT.vocab_size, 2, 4, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    idx = torch.zeros(len(ANSWERS), 96, dtype=torch.long)
    targets = torch.full_like(idx, -1)
    for i, (question, answer) in enumerate(ANSWERS.items()):
        ids, learned = map(torch.from_numpy, CHAT.encode_conversation(
            [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]))
        idx[i, :len(ids)] = ids
        targets[i, :len(ids) - 1] = ids[1:].where(learned[1:], -1)
    for _ in range(80):
        optimizer.zero_grad()
        model(idx, targets)[1].backward()
        optimizer.step()
    return save(model, CHAT, out_dir)


def save(model, tokenizer, out_dir):
    """→ out_dir, where it is the model of a run"""
    optimizer = torch.optim.SGD(model.parameters())
    saver = Saver(out_dir)
    saver.save(model, optimizer, {'iter_num': 1, 'config': {}, 'tokenizer': tokenizer.to_json(),
                                  'rng': {}})
    saver.wait()
    assert not saver.failed
    return out_dir
