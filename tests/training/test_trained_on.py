"""A run knows which texts its weights were trained on, and says how much of another validation text
was among them."""

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
    """run(text, out_dir, **settings) → (share of the validation text that earlier runs were trained
    on, or None where nothing is said of it; whether that is a warning)"""
    for name, splits in TEXTS.items():
        (tmp_path / name).mkdir()
        for split, ids in zip(('train', 'val'), splits, strict=True):
            ids.astype('<u2').tofile(tmp_path / name / f'{split}.bin')

    def start(text, out_dir, **settings):
        capsys.readouterr()
        train.main([*tiny, *options(dataset=tmp_path / text, vocab_size=100, out_dir=out_dir,
                                    **settings)])
        printed = capsys.readouterr()
        for lines, is_warning in ((printed.out, False), (printed.err, True)):
            for line in lines.splitlines():
                if 'was in the training text of ' in line:
                    return float(line.removeprefix('warning: ').split('%')[0]) / 100, is_warning
        return None, False
    return start


def test_a_run_from_weights_says_how_much_of_its_validation_text_they_were_trained_on(run):
    assert run('first', 'a') == (None, False)
    assert run('second', 'b', init_from='a') == (pytest.approx(0.5, abs=0.02), True)
    assert run('third', 'c', init_from='b') == (pytest.approx(1, abs=0.05), True)  # by way of b
    assert run('first', 'd', init_from='c') == (0, False)
    assert run('second', 'e', init_from='a/checkpoints/iter-00000006', eval_only=True)[1]
    assert [len(read_sketches(f'{name}/trained_on.npz')) for name in 'abcd'] == [1, 2, 3, 3]


def test_what_a_run_was_trained_on_stays_with_it_when_it_resumes_and_moves(run, tmp_path):
    run('first', 'a')
    run('second', 'b', init_from='a')
    before = (tmp_path / 'b/trained_on.npz').read_bytes()
    assert run('second', 'b', init_from='resume', max_iters=9) == (None, False)
    assert (tmp_path / 'b/trained_on.npz').read_bytes() == before
    assert run('third', 'b', init_from='b')[1]  # into its own folder
    assert (tmp_path / 'b/old-001/trained_on.npz').read_bytes() == before
    assert len(read_sketches(tmp_path / 'b/trained_on.npz')) == 3
    run('first', 'b')
    assert len(read_sketches(tmp_path / 'b/trained_on.npz')) == 1


def test_of_a_run_without_the_file_nothing_is_said(run, tmp_path):
    run('first', 'a')
    (tmp_path / 'a/trained_on.npz').unlink()
    assert run('second', 'b', init_from='a') == (None, False)
    assert run('first', 'a', init_from='resume', max_iters=9) == (None, False)
    assert not (tmp_path / 'a/trained_on.npz').exists()
