"""The film of a run: film.jsonl and film/."""

import json
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import CHAT, ask, same, train_processes, weights, write_chat
from safetensors.torch import load_file

import train
from model import rotate
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import film

NEWER = ('--rotary=True', '--qk_norm=True', '--n_kv_head=1', '--conv=2')


@pytest.fixture(autouse=True)
def time_for_all(monkeypatch):
    monkeypatch.setattr(film, 'FREE_S', 1e9)


def instants(out_dir):
    return [json.loads(line) for line in (out_dir / 'film.jsonl').read_text().splitlines()]


def iterations(out_dir):
    return [row['iter'] for row in instants(out_dir)]


def test_a_run_with_a_film_ends_with_the_same_weights(tiny, tmp_path):
    train.main([*tiny, '--dropout=0.1', '--average_decay=0.5'])
    train.main([*tiny, '--dropout=0.1', '--average_decay=0.5', '--film', f'--out_dir={tmp_path}/b'])
    assert same(weights(tmp_path / 'out'), weights(tmp_path / 'b'))
    assert iterations(tmp_path / 'b') == [0, 1, 2, 3, 4, 5, 6]
    assert not (tmp_path / 'out/film.jsonl').exists()


@pytest.mark.parametrize('shape', [(), NEWER])
def test_an_instant_is_what_the_model_computes(tiny, tmp_path, char_data, shape):
    train.main([*tiny, '--film', *shape])
    *_, row = instants(tmp_path / 'out')
    model = checkpoints.find(tmp_path / 'out', 'latest').load_model().eval()
    words = [[token for token, *_ in passage] for passage in row['passages']]
    chars = json.loads((char_data / 'meta.json').read_text())['tokenizer']['chars']
    idx = torch.tensor([[chars.index(word) for word in passage] for passage in words])
    qkv = {}
    attention = model.transformer.h[1].attn
    attention.c_attn.register_forward_hook(lambda module, args, out: qkv.update(all=out))
    with torch.no_grad():
        logits, _ = model(idx)
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten(),
                                 reduction='none')
    told = [loss for passage in row['passages'] for _, loss, _ in passage[1:]]
    assert torch.allclose(torch.tensor(told), losses, atol=1e-3)
    assert abs(row['loss'] - losses.mean().item()) < 1e-3
    for passage, of_passage in zip(row['passages'], logits, strict=True):
        for (_, _, guesses), at in zip(passage[1:], of_passage, strict=False):
            assert guesses[0][0] == chars[at.argmax()] and len(guesses) == 5
    assert [word for word, _ in row['lens'][-1]] == [chars[i] for i in logits[0].argmax(dim=-1)]
    q, k, _ = qkv['all'][0].split(attention.sizes, dim=1)  # (T, H·D)
    q, k = (x.unflatten(1, (-1, attention.head_size)).transpose(0, 1) for x in (q, k))
    q, k = attention.q_norm(q), attention.k_norm(k)  # (H or KV, T, D)
    if shape:
        q, k = (rotate(x, model.cos[:16], model.sin[:16]) for x in (q, k))
    scores = q @ k.mT / attention.head_size**0.5
    expected = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf).softmax(dim=-1)
    maps = load_file(tmp_path / 'out/film/iter-00000006.safetensors')['attention']
    assert maps.shape == (2, 2, 16, 16)
    assert (maps[1] / 255 - expected).abs().max() < 0.003
    assert row['norms'].keys() >= {'stream_rms/0', 'stream_rms/2', 'weight_norm/h.1'}


def test_samples_have_the_same_random_numbers_and_one_that_is_late_is_left_out(
        tiny, tmp_path, monkeypatch):
    train.main([*tiny, '--film', '--learning_rate=0', '--min_lr=0', '--max_iters=3',
                '--weight_decay=0', '--report=True'])
    first, *others = [row['sample'] for row in instants(tmp_path / 'out')]
    assert first.startswith('\n') and others == [first] * 3
    monkeypatch.setattr(film, 'FREE_S', 0.0)
    monkeypatch.setattr(film, 'SHARE', 0.0)
    train.main([*tiny, '--film', f'--out_dir={tmp_path}/late'])
    assert iterations(tmp_path / 'late') == [0, 6]  # there is always time for these


def test_a_long_run_has_at_most_forty_instants_ever_further_apart(tiny, tmp_path, monkeypatch):
    made = []
    original = film.Film.__init__
    monkeypatch.setattr(film.Film, '__init__',
                        lambda self, *args: (original(self, *args), made.append(self.instants))[0])
    train.main([*tiny, '--film', '--max_iters=100000', '--lr_decay_iters=100000', '--check'])
    assert not made  # nothing is trained
    monkeypatch.setattr(train, 'train', lambda run: 'tested')
    train.main([*tiny, '--film', '--max_iters=100000', '--lr_decay_iters=100000'])
    [found] = made
    assert found[:3] == [0, 1, 2] and found[-1] == 100000 and 30 < len(found) <= 40
    assert all(b / a < 1.6 for a, b in pairwise(found[4:]))


def test_a_resumed_run_goes_on_from_its_checkpoint(tiny, tmp_path):
    out = tmp_path / 'out'
    train.main([*tiny, '--film'])
    whole = instants(out)
    with open(out / 'film.jsonl', 'a') as f:
        f.write('{"iter": 7, "pass')  # what a kill left
    train.main([*tiny, '--film', '--init_from=resume', '--checkpoint=3'])
    for rows in (whole, again := instants(out)):
        for row in rows:
            row.pop('seconds')
    assert again == whole
    assert (out / 'old-001/film.jsonl').exists()  # what was cut off is kept
    train.main([*tiny, '--film'])
    assert (out / 'old-002/film/iter-00000006.safetensors').exists() and len(instants(out)) == 7


def test_a_film_that_fails_costs_the_film_and_not_the_run(tiny, tmp_path, monkeypatch, capsys):
    original = film.Film.look

    def look(self):
        if len(self.taken) == 2:
            raise RuntimeError('shapes do not fit\nat all')
        return original(self)
    monkeypatch.setattr(film.Film, 'look', look)
    train.main([*tiny, '--film'])
    out = capsys.readouterr().out
    assert out.count('warning: no more film of this run: shapes do not fit') == 1
    assert len(instants(tmp_path / 'out')) == 2 and 'iter 6 |' in out


def test_conversations_and_documents_have_a_film(tiny, tmp_path):
    data = write_chat(tmp_path / 'chat', [ask('How?', 'So.'), ask('Why?', 'Because.')] * 20)
    train.main([*tiny, '--film', f'--dataset={data}', '--block_size=64',
                '--document_attention=True'])
    *_, row = instants(tmp_path / 'out')
    assert row['sample'].count('?') == 1 and len(row['passages']) == 3
    assert row['passages'][0][0][0] == CHAT.decode([CHAT.conversation])


@pytest.mark.slow
@pytest.mark.parametrize('parallel', ['ddp', 'fsdp'])
def test_of_several_processes_the_first_writes_the_film(tiny, tmp_path, parallel):
    train_processes(2, tmp_path, *tiny, '--film', f'--parallel={parallel}')
    log = (tmp_path / 'log0').read_text()
    if parallel == 'fsdp':
        assert 'no film of this run: with parallel=fsdp' in log
        assert not (tmp_path / 'out/film.jsonl').exists()
    else:
        rows = iterations(tmp_path / 'out')
        assert rows[0] == 0 and rows[-1] == 6 and len(set(rows)) == len(rows)
