import compare_nanogpt
import pytest
import torch
from helpers import size_of_png

from plaingpt.training.settings import TrainConfig


def test_settings_of_training_are_told_from_its_own_arguments():
    args, settings = compare_nanogpt.parse_args(['speed', 'nanoGPT', '--rounds=5', '--dropout=0.1'])
    assert (args.what, args.nanogpt, args.rounds) == ('speed', 'nanoGPT', 5)
    assert settings == ['--dropout=0.1']
    with pytest.raises(SystemExit):
        compare_nanogpt.parse_args(['spead', 'nanoGPT'])
    with pytest.raises(SystemExit):
        compare_nanogpt.parse_args(['speed', 'nanoGPT', '--save=results'])


def test_a_race_passes_options_on_and_is_saved_and_drawn(monkeypatch, tmp_path):
    commands = []

    def run_and_watch(command, folder):
        commands.append(command)
        return 20.0, [(1.0, 4.25), (10.0, 2.5), (20.0, 1.75)]

    monkeypatch.setattr(compare_nanogpt, 'run_and_watch', run_and_watch)
    monkeypatch.setattr(compare_nanogpt, 'score_whole_split', lambda *_: 2.0)
    monkeypatch.setattr(compare_nanogpt.subprocess, 'run', lambda *_, **__: None)
    compare_nanogpt.main(['race', 'nanoGPT', '--rounds=2', f'--save={tmp_path}/results',
                          '--dtype=float32'])
    assert ['--dtype=float32' in command for command in commands] == [False, True] * 2
    header, *lines = (tmp_path / 'results' / 'race.csv').read_text().splitlines()
    assert header == 'program,round,seconds,val_loss' and len(lines) == 12
    assert lines[0] == 'nanoGPT,1,1.00,4.25' and lines[-1] == 'plainGPT,2,20.00,1.75'
    width, height = size_of_png(tmp_path / 'results' / 'loss-over-time.png')
    assert width > height > 400


def test_our_trainer_learns():
    config = TrainConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, dtype='float32',
                         warmup_iters=0, learning_rate=1e-2)
    trainer = compare_nanogpt.our_trainer(config, 65, compile=False)
    idx = torch.randint(0, 65, (4, 16))
    before = trainer.evaluate([(idx, idx)])
    for it in range(5):
        trainer.step(idx, idx, it)
    assert trainer.evaluate([(idx, idx)]) < before - 0.5
