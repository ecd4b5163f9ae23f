"""A run knows which texts its weights were trained on, and says how much of another validation text
was among them."""

import re

import numpy as np
import pytest
from processes import options

import train
from plaingpt.data.overlap import read_sketches

IDS = np.random.default_rng(0).integers(100, size=90_000)
TEXTS = {'first': (IDS[:20_000], IDS[80_000:]),  # name: (training, validation) split
         'second': (IDS[20_000:60_000], np.concatenate([IDS[:4000], IDS[60_000:64_000]])),
         'third': (IDS[64_000:66_000], IDS[:3000])}


@pytest.fixture
def run(tiny, tmp_path, capsys):
    """run(text, out_dir, **settings) → the share of the validation text that earlier runs were
    trained on, or None where nothing is said of it"""
    for name, splits in TEXTS.items():
        (tmp_path / name).mkdir()
        for split, ids in zip(('train', 'val'), splits, strict=True):
            ids.astype('<u2').tofile(tmp_path / name / f'{split}.bin')

    def start(text, out_dir, **settings):
        capsys.readouterr()
        train.main([*tiny, *options(dataset=tmp_path / text, vocab_size=100, out_dir=out_dir,
                                    **settings)])
        told = re.search(r'([\d.]+)%.* training text of ', ''.join(capsys.readouterr()))
        return float(told[1]) / 100 if told else None
    return start


@pytest.mark.slow
def test_a_run_tells_how_much_of_its_validation_text_its_weights_were_trained_on(run):
    assert run('first', 'a') is None
    assert run('second', 'b', init_from='a') == pytest.approx(0.5, abs=0.02)
    assert run('third', 'c', init_from='b') == pytest.approx(1, abs=0.05)  # by way of b
    assert run('first', 'd', init_from='c') == 0


def test_what_a_run_was_trained_on_is_kept_in_its_folder(run, tmp_path):
    run('first', 'a')
    run('second', 'b', init_from='a')
    before = (tmp_path / 'b/trained_on.npz').read_bytes()
    assert run('second', 'b', init_from='resume', max_iters=9) is None
    assert (tmp_path / 'b/trained_on.npz').read_bytes() == before
    run('third', 'b', init_from='b')  # into its own folder
    assert (tmp_path / 'b/old-001/trained_on.npz').read_bytes() == before
    assert len(read_sketches(tmp_path / 'b/trained_on.npz')) == 3
