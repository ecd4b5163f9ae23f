import pytest
from helpers import fails

import sample


def text_of(capsys, out_dir, *extra):
    sample.main([f'--out_dir={out_dir}', '--device=cpu', '--num_samples=2', '--max_new_tokens=30',
                 *extra])
    head, *samples = capsys.readouterr().out.split('---------------\n')
    return head, samples


def test_a_checkpoint_writes_text_that_goes_on_from_the_start(trained, capsys, tmp_path):
    head, samples = text_of(capsys, trained, '--start=def main')
    assert 'iter-' in head and len(samples) == 2
    assert all(s.startswith('def main') and len(s) == len('def main') + 31 for s in samples)
    (tmp_path / 'prompt.txt').write_text('import sys\n')
    _, samples = text_of(capsys, trained, f'--start=FILE:{tmp_path}/prompt.txt')
    assert all(s.startswith('import sys\n') for s in samples)


def test_a_seed_repeats_the_text(trained, capsys):
    assert text_of(capsys, trained, '--seed=1') == text_of(capsys, trained, '--seed=1')
    assert text_of(capsys, trained, '--seed=1') != text_of(capsys, trained, '--seed=2')


def test_a_checkpoint_is_chosen_by_name(trained, capsys):
    assert 'iter-00000003' in text_of(capsys, trained, '--checkpoint=3')[0]
    assert 'iter-00000006' in text_of(capsys, trained, '--checkpoint=latest')[0]


def test_a_temperature_near_zero_is_greedy(trained, capsys):
    greedy = text_of(capsys, trained, '--temperature=0')
    assert text_of(capsys, trained, '--temperature=1e-42') == greedy


@pytest.mark.parametrize(('arguments', 'words'), [
    (['--start=naïve'], "'ï'"),
    (['--start='], 'start is empty'),
    (['--start=FILE:nowhere.txt'], 'nowhere.txt'),
    (['--checkpoint=5'], '--checkpoint=5'),
    (['--top_p=0'], 'top_p'),
    (['--num_samples=0'], 'num_samples'),
    (['--temperature=-1'], 'temperature'),
    (['--out_dir=nowhere'], 'nowhere: no checkpoint'),
    (['--init_from=gpt5'], 'gpt5'),
    (['--device=cuda:99'], 'cuda'),
])
def test_mistakes_are_one_line(trained, capsys, monkeypatch, arguments, words):
    assert words in fails(capsys, monkeypatch, sample.main, f'--out_dir={trained}', *arguments)
