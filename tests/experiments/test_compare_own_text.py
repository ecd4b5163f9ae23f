import json

import compare_own_text
import pytest


def test_xz_needs_less_for_a_text_that_it_has_seen():
    text = bytes(range(256))
    assert compare_own_text.xz_bits(text) > 8
    assert compare_own_text.xz_bits(text, before=text * 4) < 1


def test_each_program_learns_the_same_split_and_gets_as_many_steps_as_fit(
        monkeypatch, tmp_path, capsys):
    (tmp_path / 'notes.txt').write_text('A line of some words.\n' * 4000)
    commands, scored = [], []

    def run_and_watch(command, folder):
        commands.append(command)  # it starts in 10 s, and 250 steps take 25 s
        return 60.0, [(10.0, 4.0), (35.0, 3.0), (60.0, 2.0)]

    def score_whole_split(model, *_):
        scored.append(model)
        return 1.25 if 'nanogpt' in model else 1.0

    monkeypatch.setattr(compare_own_text, 'run_and_watch', run_and_watch)
    monkeypatch.setattr(compare_own_text, 'score_whole_split', score_whole_split)
    compare_own_text.main(['--nanogpt=nanoGPT', '--minutes=2',
                           f'--save={tmp_path}/found.jsonl', str(tmp_path / 'notes.txt')])
    assert [command[-2] for command in commands[:2]] == ['--max_iters=500', '--max_iters=1100']
    assert all('--minutes=2.0' in command for command in commands[2:])
    assert len(scored) == 3
    rows = [json.loads(line) for line in (tmp_path / 'found.jsonl').read_text().splitlines()]
    assert [row['bits_per_byte'] for row in rows[2:]] == [1.25, 1.0, 1.0]
    assert rows[1]['bits_per_byte'] < rows[0]['bits_per_byte'] < 1
    assert rows[0]['train_bytes'] + rows[0]['val_bytes'] == pytest.approx(88000, rel=0.01)
    assert 'own_text' in capsys.readouterr().out
