"""The film of a run: film.jsonl, and the page that plot.py --film makes of it."""

import base64
import json
import re
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from browser import Page, needs_chromium
from processes import launch
from runs import TINY, model_of

import model
import plot
import train
from plaingpt.core import checkpoint as checkpoints
from plaingpt.monitoring import film
from plaingpt.monitoring.run_record import read_rows


def snapshots(out_dir):
    return read_rows(out_dir / 'film.jsonl')


def test_a_film_has_the_losses_and_the_attention_of_the_model(tiny, tmp_path, char_data):
    train.main([*tiny, '--film', '--rotary=True', '--qk_norm=True', '--n_kv_head=1', '--conv=2'])
    gpt = model_of(checkpoints.find(tmp_path / 'out')).eval()
    *_, row = snapshots(tmp_path / 'out')
    chars = json.loads((char_data / 'meta.json').read_text())['tokenizer']['chars']
    [passage] = row['passages']
    idx = torch.tensor([[chars.index(token) for token, *_ in passage]])
    scores = []

    def attention(q, k, v, **how):
        scores.append((q @ k.mT)[0] / q.size(3)**0.5)  # (H, T, T)
        return F.scaled_dot_product_attention(q, k, v, **how)

    gpt.transformer.h[1].attn.sdpa = attention
    logits = gpt(idx)[0][0]  # (T, V)
    losses = F.cross_entropy(logits[:-1], idx[0, 1:], reduction='none').tolist()
    assert [loss for _, loss, _ in passage[1:]] == pytest.approx(losses, abs=1e-3)
    likeliest = [guesses[0][1] for _, _, guesses in passage[1:]]
    assert likeliest == pytest.approx(logits[:-1].softmax(1).amax(1).tolist(), abs=1e-3)
    future = torch.ones(16, 16).triu(1).bool()
    expected = scores[0].masked_fill(future, -torch.inf).softmax(dim=-1)
    maps = np.frombuffer(base64.b64decode(row['maps']), np.uint8).reshape(2, 2, 16, 16)
    assert (torch.tensor(maps[1] / 255) - expected).abs().max() < 0.003


def by_hand(q, k, v, **how):
    mask = torch.ones(q.size(2), q.size(2)).triu(1).bool()
    return (q @ k.mT / q.size(3)**0.5).masked_fill(mask, -torch.inf).softmax(dim=-1) @ v


def in_three_dimensions(q, k, v, **how):  # (B·H, T, D), as torch allows too
    y = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)), is_causal=True)
    return y.view(q.shape)


def twice(q, k, v, **how):
    return F.scaled_dot_product_attention(q, k, v, **how) \
        - 0.5 * F.scaled_dot_product_attention(q, q, v, **how)


@pytest.mark.parametrize(('attention', 'block'), [
    (by_hand, slice(1, 2)), (in_three_dimensions, slice(None)), (twice, slice(1, 2))])
def test_a_film_without_attention_maps_is_made_and_says_so_once(
        attention, block, tiny, tmp_path, monkeypatch, capsys):
    def init(self, config):
        made(self, config)
        for layer in self.transformer.h[block]:
            layer.attn.sdpa = attention
    made = model.GPT.__init__
    monkeypatch.setattr(model.GPT, '__init__', init)
    train.main([*tiny, '--film', '--max_iters=2'])
    rows = snapshots(tmp_path / 'out')
    assert [row['iter'] for row in rows] == [0, 1, 2]
    assert not any('maps' in row for row in rows)
    assert capsys.readouterr().out.count('attention maps') == 1


@pytest.mark.slow
def test_the_film_of_a_resumed_run_matches_the_uninterrupted_one(tiny, tmp_path):
    out = tmp_path / 'out'
    train.main([*tiny, '--film'])
    whole = snapshots(out)
    with open(out / 'film.jsonl', 'a') as f:
        f.write('{"iter": 7, "pass')  # what a kill left
    train.main([*tiny, '--film', '--init_from=resume', '--checkpoint=3'])
    assert snapshots(out) == whole


def test_a_film_that_fails_does_not_end_the_run(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(film.Film, 'snapshot', Mock(side_effect=RuntimeError('shapes do not fit')))
    train.main([*tiny, '--film'])
    assert capsys.readouterr().out.count('shapes do not fit') == 1
    assert checkpoints.find(tmp_path / 'out').iter_num == 6


@pytest.mark.slow
def test_a_run_with_fsdp_says_that_it_has_no_film(tiny, tmp_path):
    said = launch(train.main, 2, tmp_path, *tiny, '--film', '--parallel=fsdp')
    assert 'parallel=fsdp' in said
    assert not (tmp_path / 'out/film.jsonl').exists()


# -----------------------------------------------------------------------------
# the page

HOSTILE = '</script><b id="bold">\u202ebold</b>\x1b[31m'


@pytest.fixture(scope='module')
def page(char_data, tmp_path_factory):
    """→ (the page of a run whose last sample and first prediction look like markup, its rows)"""
    out = tmp_path_factory.mktemp('filmed') / 'out'
    train.main([*TINY, '--film', '--check=False', f'--dataset={char_data}', f'--out_dir={out}'])
    rows = snapshots(out)
    rows[-1]['sample'] = rows[-1]['passages'][0][5][2][0][0] = HOSTILE
    (out / 'film.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    plot.main(['--film', str(out)])
    return out / 'film.html', rows


def test_the_page_contains_the_whole_film_as_text_and_loads_no_other_file(page):
    path, rows = page
    text = path.read_text()
    assert json.loads(re.search(r'application/json">(.*?)</script>', text)[1]) == rows
    assert not re.search(r'https?://|src=|@import|url\(', text)


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize('width', [500, 1600])
def test_a_browser_shows_the_page_and_details_under_the_mouse(page, tmp_path, width):
    path, rows = page
    with Page(path, tmp_path / 'profile', width) as shown:
        assert shown.value("$('#at').textContent") == 'iteration 6'
        assert shown.value("$('.sample').textContent") == HOSTILE
        assert shown.value("$('#bold')") is None
        assert shown.value('document.documentElement.scrollWidth <= innerWidth')

        shown.point_at('.passage span:nth-child(6)')  # a token
        _, loss, predictions = rows[-1]['passages'][0][5]
        assert str(loss) in shown.value("$('.token').textContent")
        assert shown.value("$('bdi').textContent") == HOSTILE.replace(' ', '␣')
        assert shown.value("$('ol').children.length") == len(predictions)

        small = shown.value("$('canvas').clientWidth")
        shown.point_at('canvas', clicks=True)  # an attention map
        assert shown.value("$('canvas').clientWidth") > 1.5 * small
        shown.point_at('canvas', clicks=True)
        assert shown.value("$('canvas').clientWidth") == small

        shown.press('ArrowLeft')
        assert shown.value("$('#at').textContent") == f'iteration {rows[-2]["iter"]}'
        assert shown.value("$('.sample').textContent") == rows[-2]['sample']
        shown.point_at('#slider', clicks=True)  # its middle
        assert shown.value("$('#at').textContent") == f'iteration {rows[len(rows) // 2]["iter"]}'
        pixel = shown.value("[...$('canvas').getContext('2d').getImageData(0, 0, 1, 1).data]")
        assert pixel == [60, 140, 230, 255]  # the first token attends to itself
        assert shown.problems == []
