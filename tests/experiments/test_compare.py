import math

import compare
import pytest
from helpers import fails

from model import GPTConfig


def test_what_is_compared_and_with_what_is_asked_for(capsys, monkeypatch):
    for words, said in (('', 'name one comparison: race, own-text, prepare, generation'),
                        ('race', '--nanogpt=FOLDER'),
                        ('own-text --nanogpt=x --minutes=1', 'say which text'),
                        ('race --nanogpt=x --batchsize=3', "unknown key 'batchsize'")):
        assert said in fails(capsys, monkeypatch, compare.main, *words.split()), words


def test_a_race_passes_options_on_and_is_saved(monkeypatch, tmp_path, capsys):
    commands = []

    def run_and_watch(command, folder):
        commands.append(command)
        return 20.0, [(1.0, 4.25), (10.0, 2.5), (20.0, 1.75)]

    monkeypatch.setattr(compare, 'run_and_watch', run_and_watch)
    monkeypatch.setattr(compare, 'score_whole_split', lambda *_: {'loss': 2.0})
    monkeypatch.setattr(compare.subprocess, 'run', lambda *_, **__: None)
    compare.main(['race', '--nanogpt=nanoGPT', '--rounds=2', f'--save={tmp_path}/results',
                  '--dtype=float32'])
    assert ['--dtype=float32' in command for command in commands] == [False, True] * 2
    assert 'plainGPT is below that after 20.0 s' in capsys.readouterr().out
    header, *lines = (tmp_path / 'results' / 'race.csv').read_text().splitlines()
    assert header == 'program,round,seconds,val_loss' and len(lines) == 12
    assert lines[0] == 'nanoGPT,1,1.00,4.25' and lines[-1] == 'plainGPT,2,20.00,1.75'


def test_own_text_is_the_same_split_for_each_and_theirs_gets_as_many_steps_as_fit(
        monkeypatch, tmp_path, capsys):
    (tmp_path / 'notes.txt').write_text('A line of some words.\n' * 4000)
    commands, run_and_watch = [], compare.run_and_watch

    def run(command, folder):
        if command[0] == 'prepare.py':
            return run_and_watch(command, folder)
        commands.append(command)  # it starts in 10 s, and 250 steps take 25 s
        return 60.0, [(10.0, 4.0), (35.0, 3.0), (60.0, 2.0)]

    monkeypatch.setattr(compare, 'run_and_watch', run)
    monkeypatch.setattr(compare, 'train_once', lambda words, folder: commands.append(words))
    monkeypatch.setattr(compare, 'score_whole_split', lambda model, *_: {
        'bits_per_byte': 1.25 if 'nanogpt' in model else 1.0})
    compare.main(['own-text', f'{tmp_path}/notes.txt', '--nanogpt=nanoGPT', '--minutes=2'])
    assert [command[-2] for command in commands[:2]] == ['--max_iters=500', '--max_iters=1100']
    assert '--minutes=2.0' in commands[2] and len(commands) == 3
    xz, theirs, ours = (float(line.split(': ')[1].split()[0])
                        for line in capsys.readouterr().out.splitlines())
    assert xz < 0.5 and (theirs, ours) == (1.25, 1.0)


def test_tokens_are_generated_beside_transformers(monkeypatch, capsys):
    pytest.importorskip('transformers')
    monkeypatch.setattr(compare, 'SHAPES', {'tiny': GPTConfig(128, 65, 2, 2, 32)})
    compare.main(['generation', '--rounds=1', '--device=cpu'])
    out = capsys.readouterr().out
    assert 'tiny, batch 8: 64 tokens after 64' in out
    assert all(math.isfinite(float(line.split()[2])) for line in out.splitlines()
               if line.startswith('  plainGPT'))
