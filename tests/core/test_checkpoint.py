import math
import os
import random
import shutil
from dataclasses import asdict
from unittest.mock import Mock

import pytest
import torch
from runs import model_of, same

from model import GPT, GPTConfig
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core.optimizers import build_optimizer
from plaingpt.core.settings import TrainConfig
from plaingpt.system.errors import UserError

CPU = torch.device('cpu')
CONFIG = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
KINDS = 'model', 'optimizer'
STATE = {'iter_num': 1, 'val_loss': None, 'config': {}, 'tokenizer': {'kind': 'char'}, 'rng': {}}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(CONFIG)


@pytest.fixture
def optimizer(model):
    """Of the model, after a step."""
    optimizer = build_optimizer(model, TrainConfig(learning_rate=1e-3))
    idx = torch.randint(0, 65, (2, 16))
    model(idx, idx)[1].backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def save(model, optimizer, tmp_path):
    """A function that saves both → the checkpoint."""
    def save(iter_num=1, val_loss=1.0, **options):
        saver = checkpoints.Saver(tmp_path, **options)
        saver.save(model, optimizer, {**STATE, 'iter_num': iter_num, 'val_loss': val_loss})
        saver.wait()
        assert not saver.failed
        return checkpoints.find(tmp_path, iter_num)
    return save


def iterations(out_dir, kinds=KINDS):
    """Of the checkpoints that are as they were written."""
    return [c.iter_num for c in checkpoints.intact(checkpoints.checkpoint_paths(out_dir), kinds)]


def test_a_checkpoint_round_trip_changes_no_bit(model, optimizer, save, monkeypatch):
    monkeypatch.setattr(checkpoints, 'CHUNK_BYTES', 5000)  # most tensors are split
    found = save()
    again = model_of(found)
    assert same(model.parameters(), again.parameters())
    fresh = build_optimizer(again, TrainConfig(learning_rate=5e-4))
    found.load_optimizer(fresh, again)
    for key in ('exp_avg', 'exp_avg_sq', 'step'):
        assert same([optimizer.state[p][key] for p in model.parameters()],
                    [fresh.state[p][key] for p in again.parameters()]), key
    assert fresh.param_groups[0]['lr'] == 5e-4  # the config's to say, not the checkpoint's


def test_the_newest_checkpoints_are_kept_besides_the_best(save, tmp_path):
    for iter_num, val_loss in ((10, 3.0), (20, 1.0), (30, None), (40, 2.0), (50, 2.5)):
        save(iter_num, val_loss, keep=2)
    assert iterations(tmp_path) == [50, 40, 20]
    assert not list(tmp_path.rglob('*.tmp'))  # which older ones became before they went


@pytest.fixture
def three(save, tmp_path):
    """The out_dir of a run with the checkpoints 20, the best, 40 and 50."""
    for iter_num, val_loss in ((20, 1.0), (40, 2.0), (50, 2.5)):
        save(iter_num, val_loss, keep=3)
    return tmp_path


def test_damaged_checkpoints_are_skipped(three, capsys):
    (three / 'checkpoints/iter-00000050/state.json').write_text('damaged')
    (three / 'checkpoints/iter-00000040/optimizer-00001-of-00001.safetensors').unlink()
    assert checkpoints.find(three).iter_num == 40
    assert checkpoints.find(three, kinds=KINDS).iter_num == 20
    assert 'iter-00000050/state.json' in capsys.readouterr().err
    (three / 'checkpoints/iter-00000020/model-00001-of-00001.safetensors').unlink()
    assert checkpoints.find(three, 'best', ('model',)).iter_num == 40
    with pytest.raises(UserError, match='iter-00000050'):
        checkpoints.find(three, 50)


def test_a_checkpoint_is_named_by_latest_or_best_or_its_iteration(three):
    for which, iter_num in (('latest', 50), ('best', 20), ('40', 40)):
        assert checkpoints.find(three, which).iter_num == iter_num
    for which in ('15', 'bst'):
        with pytest.raises(UserError, match=r'latest, best .*20, 40, 50'):
            checkpoints.find(three, which)


def test_a_save_in_the_background_writes_what_the_weights_were(model, optimizer, tmp_path):
    before = [p.detach().clone() for p in model.parameters()]
    saver = checkpoints.Saver(tmp_path, background=True)
    saver.save(model, optimizer, STATE)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    saver.wait()
    assert same(model_of(checkpoints.find(tmp_path)).parameters(), before)


@pytest.mark.parametrize('background', [False, True])
@pytest.mark.parametrize('writes', ['save_file', 'write_json'])
def test_a_save_that_fails_leaves_the_one_before(
        writes, background, model, optimizer, save, tmp_path, monkeypatch, capsys):
    save(10)
    saver = checkpoints.Saver(tmp_path, background=background)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, writes, Mock(side_effect=OSError(28, 'No space left')))
        saver.save(model, optimizer, {**STATE, 'iter_num': 20})
        saver.wait()
    assert saver.failed
    assert 'No space left' in capsys.readouterr().err
    assert os.listdir(tmp_path / 'checkpoints') == ['iter-00000010']  # it frees the disk
    saver.save(model, optimizer, {**STATE, 'iter_num': 30})
    saver.wait()
    assert not saver.failed
    assert iterations(tmp_path) == [30, 10]


@pytest.mark.parametrize('which', ['latest', 'best'])
@pytest.mark.parametrize('reads', ['read_json', 'sha256_of'])
def test_a_checkpoint_that_its_run_removes_meanwhile_gives_way_to_a_newer_one(
        reads, which, model, save, tmp_path, monkeypatch):
    for iter_num in (10, 20):  # each is better than the one before
        model.lm_head.weight.data.fill_(iter_num)
        save(iter_num, 1 / iter_num, keep=2)
    older, newer = (tmp_path / f'checkpoints/iter-000000{n}' for n in (10, 20))
    newer.rename(tmp_path / 'later')
    read = getattr(checkpoints, reads)

    def read_after_the_next_save(*arguments):
        if older.exists():
            (tmp_path / 'later').rename(newer)
            shutil.rmtree(older)
        return read(*arguments)

    monkeypatch.setattr(checkpoints, reads, read_after_the_next_save)
    found = checkpoints.find(tmp_path, which, ('model',))
    assert found.iter_num == 20
    assert (model_of(found).lm_head.weight == 20).all()


def test_the_evaluation_is_added_to_a_checkpoint_of_the_same_iteration(save, tmp_path):
    found, again = save(10, val_loss=None), save(10, val_loss=1.5)
    assert again.state == {**found.state, 'val_loss': 1.5}
    assert iterations(tmp_path) == [10]


# -----------------------------------------------------------------------------
# damage


def test_every_flipped_bit_is_found(save, tmp_path):
    found, fresh = save(), GPT(CONFIG)
    before = [p.detach().clone() for p in fresh.parameters()]
    files, chance = sorted(found.path.iterdir()), random.Random(0)
    for i in range(40):
        path, problems = files[i % len(files)], []
        data = path.read_bytes()
        at = chance.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1:])
        assert not list(checkpoints.intact([found.path], KINDS, problems.append)), (path, at)
        assert len(problems) == 1 and path.name in problems[0]
        if path.name.startswith('model'):
            with pytest.raises(UserError, match=path.name):
                found.load_into(fresh)
        path.write_bytes(data)
    assert iterations(tmp_path) == [1] and same(fresh.parameters(), before)  # none was used


def test_weights_of_another_architecture_are_refused(save):
    found = save()
    for other in (dict(n_layer=3), dict(n_layer=1), dict(n_embd=64)):
        with pytest.raises(UserError, match='iter-00000001'):
            found.load_into(GPT(GPTConfig(**{**asdict(CONFIG), **other})))


def test_weights_that_are_not_finite_are_not_saved(model, save, tmp_path):
    save(10)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = math.inf
    with pytest.raises(UserError, match=r'iteration 20.*wte.weight'):
        save(20)
    assert iterations(tmp_path) == [10]
