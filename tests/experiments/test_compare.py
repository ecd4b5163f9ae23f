import compare
import torch
from helpers import fails, size_of_png

from plaingpt.training.settings import TrainConfig


def test_what_is_compared_and_with_what_is_asked_for(capsys, monkeypatch):
    for words, said in (('', 'name one comparison: race, speed'),
                        ('speed', '--nanogpt=FOLDER'),
                        ('speed --nanogpt=x --batchsize=3', "unknown key 'batchsize'")):
        assert said in fails(capsys, monkeypatch, compare.main, *words.split()), words


def test_a_race_passes_options_on_and_is_saved_and_drawn(monkeypatch, tmp_path):
    commands = []

    def run_and_watch(command, folder):
        commands.append(command)
        return 20.0, [(1.0, 4.25), (10.0, 2.5), (20.0, 1.75)]

    monkeypatch.setattr(compare, 'run_and_watch', run_and_watch)
    monkeypatch.setattr(compare, 'score_whole_split', lambda *_: 2.0)
    monkeypatch.setattr(compare.subprocess, 'run', lambda *_, **__: None)
    compare.main(['race', '--nanogpt=nanoGPT', '--rounds=2', f'--save={tmp_path}/results',
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
    trainer = compare.our_trainer(config, 65, compile=False)
    idx = torch.randint(0, 65, (4, 16))
    before = trainer.evaluate([(idx, idx)])
    for it in range(5):
        trainer.step(idx, idx, it)
    assert trainer.evaluate([(idx, idx)]) < before - 0.5
