"""The film of a run: film.jsonl, and the page that plot.py --film makes of it."""

import base64
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import launch
from runs import TINY, model_of

import plot
import train
from plaingpt.monitoring.run_record import read_rows
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import film


def moments(out_dir):
    return read_rows(out_dir / 'film.jsonl')


def test_a_moment_is_what_the_model_computes(tiny, tmp_path, char_data, monkeypatch):
    train.main([*tiny, '--film', '--rotary=True', '--qk_norm=True', '--n_kv_head=1', '--conv=2'])
    *_, row = moments(tmp_path / 'out')
    model = model_of(checkpoints.find(tmp_path / 'out', 'latest')).eval()
    chars = json.loads((char_data / 'meta.json').read_text())['tokenizer']['chars']
    [passage] = row['passages']
    idx = torch.tensor([[chars.index(token) for token, *_ in passage]])
    seen, attention = [], F.scaled_dot_product_attention  # q, k (1, 2, T, D) of each layer
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda q, k, *rest, **more: (
        seen.append((q, k)), attention(q, k, *rest, **more))[1])
    with torch.no_grad():
        logits = model(idx)[0][0]  # (T, V)
        losses = F.cross_entropy(logits[:-1], idx[0, 1:], reduction='none')
    assert torch.allclose(torch.tensor([loss for _, loss, _ in passage[1:]]), losses, atol=1e-3)
    assert abs(row['loss'] - losses.mean().item()) < 1e-3
    for (_, _, guesses), at in zip(passage[1:], logits, strict=False):
        assert guesses[0][0] == chars[at.argmax()] and len(guesses) == 5
    q, k = seen[1]
    scores = (q @ k.mT)[0] / q.size(3)**0.5
    expected = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf).softmax(dim=-1)
    maps = np.frombuffer(base64.b64decode(row['maps']), np.uint8).reshape(row['maps_shape'])
    assert maps.shape == (2, 2, 16, 16)
    assert (torch.tensor(maps[1] / 255) - expected).abs().max() < 0.003


def test_a_resumed_run_goes_on_from_its_checkpoint(tiny, tmp_path):
    out = tmp_path / 'out'
    train.main([*tiny, '--film'])
    whole = moments(out)
    with open(out / 'film.jsonl', 'a') as f:
        f.write('{"iter": 7, "pass')  # what a kill left
    train.main([*tiny, '--film', '--init_from=resume', '--checkpoint=3'])
    assert moments(out) == whole
    train.main([*tiny, '--film'])  # another run: what the first wrote is kept
    assert list(out.glob('old-*/film.jsonl')) and len(moments(out)) == 7


def test_a_film_that_fails_costs_the_film_and_not_the_run(tiny, tmp_path, monkeypatch, capsys):
    original = film.Film.look

    def look(self):
        if len(moments(tmp_path / 'out')) == 2:
            raise RuntimeError('shapes do not fit\nat all')
        return original(self)
    monkeypatch.setattr(film.Film, 'look', look)
    train.main([*tiny, '--film'])
    out = capsys.readouterr().out
    assert out.count('warning: no more film of this run: shapes do not fit') == 1
    assert len(moments(tmp_path / 'out')) == 2 and 'iter 6 |' in out


@pytest.mark.slow
def test_with_fsdp_there_is_no_film(tiny, tmp_path):
    said = launch(train.main, 2, tmp_path, *tiny, '--film', '--parallel=fsdp')
    assert 'no film: with parallel=fsdp' in said and not (tmp_path / 'out/film.jsonl').exists()


# -----------------------------------------------------------------------------
# the page

HOSTILE = '</script><b id="bold">\u202ebold</b>\x1b[31m'


@pytest.fixture(scope='module')
def page(char_data, tmp_path_factory):
    """The page of a run whose last sample would like to be markup."""
    one = tmp_path_factory.mktemp('filmed') / 'one'
    train.main([*TINY, '--film', f'--dataset={char_data}', f'--out_dir={one}'])
    rows = moments(one)
    rows[-1]['sample'] = rows[-1]['passages'][0][3][0] = HOSTILE
    (one / 'film.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    plot.main(['--film', str(one), f'--output={one}.html'])
    return SimpleNamespace(path=one.with_name('one.html'), folder=one)


def test_the_page_has_all_of_the_film_and_names_no_other_place(page):
    text = page.path.read_text()
    assert not re.search(r'https?://|src=|@import|url\(', text) and len(text) < 500_000
    shown = json.loads(re.search(r'application/json">(.*?)</script>', text)[1])
    assert shown == moments(page.folder) and shown[-1]['sample'] == HOSTILE


@pytest.mark.slow
@pytest.mark.parametrize('width', [500, 1600])
def test_a_browser_shows_it(page, tmp_path, width):
    if not (browser := shutil.which('chromium')):
        pytest.skip('needs chromium')
    # The page says what is shown, moves the slider, and whether all fits the width.
    told = page.path.read_text() + '''<script>
      onerror = message => { document.title = message; };
      slider.value = 0; slider.oninput();
      const first = $('.passage').innerHTML; go(moments.length - 1); $('canvas').click();
      $('.passage span:nth-child(6)').onpointerover();
      document.title = JSON.stringify([$('#at').textContent,
        first !== $('.passage').innerHTML, $('.sample').textContent, $('#bold') === null,
        $('ol').children.length, $('canvas').className,
        document.documentElement.scrollWidth <= innerWidth]);</script>'''
    (tmp_path / 'told.html').write_text(told)
    done = subprocess.run(
        [browser, '--headless', '--no-sandbox', '--disable-gpu', f'--window-size={width},900',
         f'--user-data-dir={tmp_path}/profile', '--dump-dom', f'file://{tmp_path}/told.html'],
        capture_output=True, text=True, timeout=120)
    [title] = re.findall('<title>(.*?)</title>', done.stdout)
    at, moves, sample, is_text, guesses, large, fits = json.loads(
        title.replace('&lt;', '<').replace('&gt;', '>').replace('&amp;', '&'))
    assert (at, guesses, large) == ('iteration 6', 5, 'large')
    assert moves and is_text and fits and sample.startswith('</script><b id="bold">')
