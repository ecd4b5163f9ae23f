


from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig
from plaingpt.benchmarks import ladder
from plaingpt.benchmarks.ladder import (
    Variant,
    batches,
    build_gpt,
    decode_sequences,
    make_rows,
    measure_variants,
    variants,
)
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import open_dataset
from plaingpt.data.token_files import TokenStream, open_tokens

CPU = torch.device('cpu')
SHAPE = GPTConfig(16, 93, 2, 2, 32, bias=False)


@pytest.fixture
def tokens(char_data):
    stream = open_dataset(char_data).split('train')
    return stream.sequences(np.array([0]), 5000)[0].astype(np.uint16)


def test_every_variant_computes_the_same_loss(tokens, char_data, monkeypatch):
    monkeypatch.setattr(ladder, 'gc', SimpleNamespace(collect=lambda: None))
    monkeypatch.setattr(torch.compiler, 'reset', lambda: None)  # nothing is compiled here
    found = variants(CPU, 'bfloat16', False, 32, has_text=True)
    rows = measure_variants(SHAPE, found, tokens, open_dataset(char_data).tokenizer(),
                            batch_size=4, steps=1, warmup=0, rounds=1, device=CPU)
    assert [row['variant'] for row in rows] == [name for name, _ in found] and len(rows) == 10
    losses = [row['first_loss'] for row in rows]
    assert max(losses[:5]) - min(losses[:5]) < 1e-5  # float32
    assert max(losses) - min(losses) < 1e-2  # and bfloat16
    assert rows[0]['times_first'] == 1 and all(row['tokens_per_s'] > 0 for row in rows)


def test_every_way_of_reading_gives_the_same_batches(tokens, char_data, tmp_path):
    path = tmp_path / 'tokens.bin'
    tokens.tofile(path)
    loader = BatchLoader(TokenStream([open_tokens(path, tokens.dtype)], 93, in_ram=True), 16, 4)
    starts = loader.sequence_starts(np.arange(12))
    tokenizer = open_dataset(char_data).tokenizer()
    texts = decode_sequences(tokens, tokenizer, starts, 17)
    seen = {}
    for data in ('text', 'mapped', 'memory', 'gathered', 'ahead'):
        source = batches(data, loader, path, texts, tokenizer)
        seen[data] = [torch.stack(batch) for batch in islice(source, 3)]
        source.close()
    assert not torch.equal(seen['text'][0], seen['text'][1])
    for data in seen:
        assert all(map(torch.equal, seen[data], seen['text'])), data


def test_the_explicit_model_has_the_gradients_of_the_fast_one():
    weights = GPT(SHAPE).state_dict()
    idx = torch.randint(0, 93, (2, 16))
    grads = []
    fast = Variant(attention='sdpa', padded_vocabulary=True, loss_chunk_tokens=8)
    for variant in (Variant(), fast):
        gpt = build_gpt(SHAPE, variant, weights, CPU)
        gpt(idx, idx)[1].backward()
        grads.append({name: p.grad[:93] for name, p in gpt.named_parameters()})
    for name, slow in grads[0].items():
        torch.testing.assert_close(slow, grads[1][name], msg=name)


def test_each_variant_changes_one_thing_and_those_that_do_not_apply_are_left_out():
    found = variants(torch.device('cuda'), 'bfloat16', True, 2048, has_text=True)
    names = [name for name, _ in found]
    assert len(names) == 12 and {'TF32', 'torch.compile'} < set(names)
    for (_, below), (_, above) in pairwise(found):
        assert sum(vars(below)[key] != vars(above)[key] for key in vars(below)) == 1
    few = variants(CPU, 'float32', False, 0, has_text=False)
    assert [name for name, _ in few] == [name for name in names if name not in (
        'text, tokenized for each batch', 'TF32', 'bfloat16', 'torch.compile',
        'loss in chunks of 2,048')]


def test_ratios_are_of_medians_to_the_variant_before_and_to_the_first():
    rows = make_rows({'a': ([0.8, 0.4, 0.4], (1.0, None)), 'b': ([0.2, 0.1, 9.0], (1.0, None)),
                      'c': ([0.1], (1.0, None))}, step_tokens=100)
    assert [row['step_ms'] for row in rows] == [400, 200, 100]
    assert [row['times_before'] for row in rows] == [1, 2, 2]
    assert [row['times_first'] for row in rows] == [1, 2, 4]
    assert [row['tokens_per_s'] for row in rows] == [250, 500, 1000]
