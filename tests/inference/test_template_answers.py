"""A model that was tuned in a pretrained model's chat template answers and stops in it."""

import json

import pytest
import torch
from chat_templates import FORMS, save_form
from sample_data import ask

import prepare
from model import GPT, GPTConfig
from plaingpt.core.dataset import open_dataset
from plaingpt.inference.text_generator import Sampling, TextGenerator

ANSWERS = [ask('aaaa', 'Me <|'), ask('bbbb', 'You'), ask('cccc', ' So\n'), ask('dddd', '10'),
           ask('eeee', 'Nor')]


@pytest.fixture(scope='module', params=['mistral', *(
    pytest.param(name, marks=pytest.mark.slow)
    for name in ('chatml, BOS im_start', 'zephyr', 'phi3', 'nemo'))])
def generator(request, tmp_path_factory):
    """A tiny model that has learned ANSWERS from the batches of a dataset."""
    folder = tmp_path_factory.mktemp('form')
    base = save_form(folder / 'base', FORMS[request.param])
    (folder / 'a.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in ANSWERS))
    prepare.main(['chat', f'{folder}/a.jsonl', f'--tokenizer={base}', '--val_fraction=0.4',
                  f'--data_dir={folder}/d'])
    dataset = open_dataset(folder / 'd')
    lengths = [len(dataset.tokenizer().encode_conversation(row)[0]) for row in ANSWERS]
    block_size = max(lengths)  # a sequence has one conversation
    torch.manual_seed(0)
    model = GPT(GPTConfig(2 * block_size, dataset.vocab_size, 2, 4, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loaders = [dataset.loader(split, block_size, 3) for split in ('train', 'val')]
    for step in range(100):
        for loader in loaders:
            idx, targets, _ = loader.train_batch(step, 0)
            model(idx, targets)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return TextGenerator(model.eval(), dataset.tokenizer())


def test_an_answer_is_the_reply_that_was_learned(generator):
    for question, reply in ANSWERS:
        assert generator.answer([question], temperature=0) == reply['content']


def test_a_streamed_answer_is_the_same(generator):
    for question, reply in ANSWERS:
        ids, sampling = generator.prepare_answer([question], Sampling(20, temperature=0))
        pieces = []
        generator.generate_texts([ids], [0], sampling, on_text=pieces.append)
        assert ''.join(pieces) == reply['content']
