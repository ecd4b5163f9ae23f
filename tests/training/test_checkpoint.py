import math
import os
import random
import shutil
from dataclasses import asdict
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from runs import model_of, same
from safetensors.torch import load_file

from model import GPT, GPTConfig
from plaingpt.system.devices import rng_state, set_rng_state
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig

CPU = torch.device('cpu')
CONFIG = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
KINDS = 'model', 'optimizer'
STATE = {'iter_num': 1, 'val_loss': None, 'config': {}, 'tokenizer': {'kind': 'char'}}


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
        saver.save(model, optimizer, {**STATE, 'iter_num': iter_num, 'val_loss': val_loss},
                   rng_state(CPU))
        saver.wait()
        assert not saver.failed
        return checkpoints.find(tmp_path, iter_num)
    return save


def iterations(out_dir, kinds=KINDS):
    """Of the checkpoints that are as they were written."""
    return [c.iter_num for c in checkpoints.intact(checkpoints.checkpoint_paths(out_dir), kinds)]


@pytest.mark.parametrize('kilobytes', [500_000, 5])
def test_weights_and_optimizer_come_back_bit_for_bit_in_files_no_larger_than_asked(
        model, optimizer, save, monkeypatch, kilobytes):
    monkeypatch.setattr(checkpoints, 'CHUNK_BYTES', 1000 * kilobytes)
    found = save()
    names = set()
    for path in found.path.glob('*.safetensors'):
        tensors = load_file(path)
        assert sum(t.nbytes for t in tensors.values()) <= 1000 * kilobytes
        names |= {key.partition('[')[0] for key in tensors}
    assert {name for name in names if '/' not in name} == dict(model.named_parameters()).keys()
    again = model_of(found)
    assert same(model.parameters(), again.parameters())
    fresh = build_optimizer(again, TrainConfig(learning_rate=5e-4))
    found.load_optimizer(fresh, again)
    for key in ('exp_avg', 'exp_avg_sq', 'step'):
        assert same([optimizer.state[p][key] for p in model.parameters()],
                    [fresh.state[p][key] for p in again.parameters()]), key
    assert fresh.param_groups[0]['lr'] == 5e-4  # the config's to say, not the checkpoint's


def test_random_numbers_go_on_where_they_were(save):
    state = save().state['rng']
    expected = torch.rand(5)
    for rank, goes_on in ((0, True), (1, False)):  # rank 1 is one that the saved run did not have
        torch.manual_seed(99)
        set_rng_state(state, rank, CPU)
        assert torch.equal(torch.rand(5), expected) == goes_on


def test_latest_best_and_a_number_name_one_of_the_checkpoints_that_are_kept(
        save, tmp_path, capsys):
    for iter_num, val_loss in ((10, 3.0), (20, 1.0), (30, None), (40, 2.0), (50, 2.5)):
        save(iter_num, val_loss, keep=2)
    assert iterations(tmp_path) == [50, 40, 20]
    assert checkpoints.find(tmp_path).iter_num == 50
    (tmp_path / 'checkpoints/iter-00000050/state.json').write_text('damaged')
    (tmp_path / 'checkpoints/iter-00000040/optimizer-00001-of-00001.safetensors').unlink()
    for which, kinds, iter_num in (('latest', (), 40), ('latest', KINDS, 20), ('best', (), 20),
                                   ('20', KINDS, 20)):
        assert checkpoints.find(tmp_path, which, kinds).iter_num == iter_num
    assert 'iter-00000050/state.json is damaged' in capsys.readouterr().err
    (tmp_path / 'checkpoints/iter-00000020/model-00001-of-00001.safetensors').unlink()
    assert checkpoints.find(tmp_path, 'best', ('model',)).iter_num == 40
    for which, words in (('15', 'latest, best and 20, 40, 50'), ('bst', 'latest, best and'),
                         (50, 'is damaged')):
        with pytest.raises(UserError, match=words):
            checkpoints.find(tmp_path, which)


def test_a_save_in_the_background_writes_what_the_weights_were(model, optimizer, tmp_path):
    before = [p.detach().clone() for p in model.parameters()]
    saver = checkpoints.Saver(tmp_path, background=True)
    saver.save(model, optimizer, STATE, rng_state(CPU))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    saver.wait()
    assert same(model_of(checkpoints.find(tmp_path)).parameters(), before)


@pytest.mark.parametrize('background', [False, True])
def test_a_save_that_fails_is_told_and_leaves_the_one_before(
        model, optimizer, save, tmp_path, monkeypatch, capsys, background):
    full_disk = Mock(side_effect=OSError(28, 'No space left on device'))
    save(10)
    saver = checkpoints.Saver(tmp_path, background=background)
    for name, iter_num in (('save_file', 20), ('write_json', 30)):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, name, full_disk)
            saver.save(model, optimizer, {**STATE, 'iter_num': iter_num}, rng_state(CPU))
            saver.wait()
        err = capsys.readouterr().err
        assert saver.failed and 'No space left' in err and 'earlier ones stay' in err
        assert os.listdir(tmp_path / 'checkpoints') == ['iter-00000010']  # it frees the disk
    saver.save(model, optimizer, {**STATE, 'iter_num': 40}, rng_state(CPU))
    saver.wait()
    assert not saver.failed and iterations(tmp_path)[0] == 40


@pytest.mark.parametrize('which', ['latest', 'best'])
def test_a_checkpoint_that_its_run_removes_meanwhile_gives_way_to_the_one_that_is_there_then(
        which, model, save, tmp_path, monkeypatch, capsys):
    for iter_num in (10, 20, 30):  # each is better than the one before
        model.lm_head.weight.data.fill_(iter_num)
        save(iter_num, 1 / iter_num, keep=3)
    real = {name: getattr(checkpoints, name) for name in ('read_json', 'sha256_of', 'safe_open')}
    calls, out = [], tmp_path / 'out'

    def train_on():  # save the third, and then remove the others
        shutil.copytree(tmp_path / 'checkpoints/iter-00000030', out / 'checkpoints/iter-00000030')
        for path in checkpoints.checkpoint_paths(out)[:2]:
            shutil.rmtree(path.rename(path.with_suffix('.tmp')))

    def call(name, *arguments, **options):
        calls.append(name)
        if len(calls) == moment:
            train_on()
        return real[name](*arguments, **options)

    for name in real:
        monkeypatch.setattr(checkpoints, name, partial(call, name))
    for moment in range(1, 10):  # before each time that something is read
        calls.clear()
        for name in ('iter-00000010', 'iter-00000020'):
            shutil.copytree(tmp_path / 'checkpoints' / name, out / 'checkpoints' / name)
        found = checkpoints.find(out, which, ('model',))
        if len(calls) < moment:
            break
        assert (model_of(found).lm_head.weight == 30).all() and found.iter_num == 30
        shutil.rmtree(out)
    train_on()  # what was found can be read though it is removed
    assert (model_of(found).lm_head.weight == 20).all() and {*calls} == {*real}
    assert 'damaged' not in capsys.readouterr().err
    with pytest.raises(OSError, match='iter-00000020 was removed'):
        found.load_optimizer(None, model)


def test_the_evaluation_is_added_to_a_checkpoint_of_the_same_iteration(save, tmp_path):
    found, again = save(10, val_loss=None), save(10, val_loss=1.5)
    assert again.state == {**found.state, 'val_loss': 1.5} and iterations(tmp_path) == [10]


# -----------------------------------------------------------------------------
# damage


def test_every_flipped_bit_is_found_by_name(save, tmp_path):
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
            with pytest.raises(UserError, match=f'{path.name} is damaged'):
                found.load_into(fresh)
        path.write_bytes(data)
    assert iterations(tmp_path) == [1] and same(fresh.parameters(), before)  # none was used


def test_weights_of_another_architecture_are_refused_by_name(save):
    found = save()
    for other in (dict(n_layer=3), dict(n_layer=1), dict(n_embd=64)):
        with pytest.raises(UserError, match=r"there does not fit.* another architecture"):
            found.load_into(GPT(GPTConfig(**{**asdict(CONFIG), **other})))


def test_weights_that_are_not_finite_are_not_saved(model, save, tmp_path):
    save(10)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = math.inf
    with pytest.raises(UserError, match=r'after iteration 20: .*wte.weight is not finite'):
        save(20)
    assert iterations(tmp_path) == [10]
