"""The film of a run: film.jsonl, and the page that plot.py --film makes of it."""

import base64
import json
import re
import shutil
import subprocess
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import PATIENCE_S, launch
from runs import TINY, model_of

import plot
import train
from plaingpt.core import checkpoint as checkpoints
from plaingpt.monitoring import film
from plaingpt.monitoring.run_record import read_rows


def snapshots(out_dir):
    return read_rows(out_dir / 'film.jsonl')


@pytest.fixture
def filmed(tiny, tmp_path, char_data):
    """→ (the last snapshot of a run, its model, the passage as tokens (1, T))"""
    train.main([*tiny, '--film', '--rotary=True', '--qk_norm=True', '--n_kv_head=1', '--conv=2'])
    model = model_of(checkpoints.find(tmp_path / 'out')).eval()
    *_, row = snapshots(tmp_path / 'out')
    chars = json.loads((char_data / 'meta.json').read_text())['tokenizer']['chars']
    [passage] = row['passages']
    return row, model, torch.tensor([[chars.index(token) for token, *_ in passage]])


def test_a_film_has_the_losses_of_the_model(filmed):
    row, model, idx = filmed
    logits = model(idx)[0][0]  # (T, V)
    losses = F.cross_entropy(logits[:-1], idx[0, 1:], reduction='none').tolist()
    [passage] = row['passages']
    assert [loss for _, loss, _ in passage[1:]] == pytest.approx(losses, abs=1e-3)
    likeliest = [guesses[0][1] for _, _, guesses in passage[1:]]
    assert likeliest == pytest.approx(logits[:-1].softmax(1).amax(1).tolist(), abs=1e-3)


def test_a_film_has_the_attention_of_the_model(filmed):
    row, model, idx = filmed
    seen = []

    def attention(q, k, v, **how):
        seen.append((q @ k.mT)[0] / q.size(3)**0.5)  # (H, T, T)
        return F.scaled_dot_product_attention(q, k, v, **how)

    model.transformer.h[1].attn.sdpa = attention
    model(idx)
    future = torch.ones(16, 16).triu(1).bool()
    expected = seen[0].masked_fill(future, -torch.inf).softmax(dim=-1)
    maps = np.frombuffer(base64.b64decode(row['maps']), np.uint8).reshape(2, 2, 16, 16)
    assert (torch.tensor(maps[1] / 255) - expected).abs().max() < 0.003


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
    """The page of a run whose last sample would like to be markup."""
    one = tmp_path_factory.mktemp('filmed') / 'one'
    train.main([*TINY, '--film', f'--dataset={char_data}', f'--out_dir={one}'])
    rows = snapshots(one)
    rows[-1]['sample'] = rows[-1]['passages'][0][3][0] = HOSTILE
    (one / 'film.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    plot.main(['--film', str(one), f'--output={one}.html'])
    return SimpleNamespace(path=one.with_name('one.html'), folder=one)


def test_the_page_loads_nothing_else(page):
    assert not re.search(r'https?://|src=|@import|url\(', page.path.read_text())


def test_the_page_has_all_of_the_film_as_text(page):
    text = page.path.read_text()
    shown = json.loads(re.search(r'application/json">(.*?)</script>', text)[1])
    assert shown == snapshots(page.folder)
    assert shown[-1]['sample'] == HOSTILE


@pytest.mark.slow
@pytest.mark.parametrize('width', [500, 1600])
def test_a_browser_shows_the_page(page, tmp_path, width):
    if not (browser := shutil.which('chromium')):
        pytest.skip('needs chromium')
    # The page says what is shown, moves the slider, and whether all fits the width.
    told = page.path.read_text() + '''<script>
      onerror = message => { document.title = message; };
      slider.value = 0; slider.oninput();
      const first = $('.passage').innerHTML; go(snapshots.length - 1); $('canvas').click();
      $('.passage span:nth-child(6)').onpointerover();
      document.title = JSON.stringify([$('#at').textContent,
        first !== $('.passage').innerHTML, $('.sample').textContent, $('#bold') === null,
        $('ol').children.length, $('canvas').className,
        document.documentElement.scrollWidth <= innerWidth]);</script>'''
    (tmp_path / 'told.html').write_text(told)
    done = subprocess.run(
        [browser, '--headless', '--no-sandbox', '--disable-gpu', f'--window-size={width},900',
         f'--user-data-dir={tmp_path}/profile', '--dump-dom', f'file://{tmp_path}/told.html'],
        capture_output=True, text=True, timeout=PATIENCE_S)
    [title] = re.findall('<title>(.*?)</title>', done.stdout)
    at, moves, sample, is_text, guesses, large, fits = json.loads(
        title.replace('&lt;', '<').replace('&gt;', '>').replace('&amp;', '&'))
    assert (at, guesses, large) == ('iteration 6', 5, 'large')
    assert (moves, is_text, fits) == (True, True, True)
    assert sample.startswith('</script><b id="bold">')
