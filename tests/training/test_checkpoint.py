import hashlib
import json
import math
import os
import random
from dataclasses import asdict

import pytest
import torch
from helpers import same
from safetensors.torch import load_file, save_file

from model import GPT, GPTConfig
from plaingpt.system.devices import rng_state, set_rng_state
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import checkpoint_writer
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig

CPU = torch.device('cpu')
CONFIG = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
SHAPE = asdict(CONFIG)
# What train.py saves beside weights, optimizer and random numbers.
STATE = {'iter_num': 1, 'sequences': 8, 'val_loss': None, 'evaluated': True, 'best_val_loss': None,
         'evals_since_best': 0, 'elapsed_s': 1.0, 'wandb_id': None, 'config': {}, 'data': [],
         'tokenizer': {'kind': 'char', 'chars': ''.join(map(chr, range(65)))}, 'scaler': {}}


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
        saver = checkpoint_writer.Saver(tmp_path, **options)
        saver.save(model, optimizer, {**STATE, 'iter_num': iter_num, 'val_loss': val_loss},
                   rng_state(CPU))
        saver.wait()
        assert not saver.failed
        return checkpoints.find(tmp_path, iter_num)
    return save


@pytest.mark.parametrize('kilobytes', [None, 5, 20])
def test_weights_and_optimizer_come_back_bit_for_bit_in_files_no_larger_than_asked(
        model, optimizer, save, monkeypatch, kilobytes):
    if kilobytes:
        monkeypatch.setattr(checkpoint_writer, 'CHUNK_BYTES', 1000 * kilobytes)
    found = save()
    if kilobytes:  # the embedding alone has 16 kB
        assert all(chunk['bytes'] <= 1000 * kilobytes for chunk in found.state['chunks'])
    again = found.load_model()
    assert same(model.parameters(), again.parameters())
    fresh = build_optimizer(again, TrainConfig(learning_rate=5e-4))
    found.load_optimizer(fresh, again)
    assert {key for state in optimizer.state.values() for key in state} \
        == {'exp_avg', 'exp_avg_sq', 'step'}
    for key in ('exp_avg', 'exp_avg_sq', 'step'):
        assert same([optimizer.state[p][key] for p in model.parameters()],
                    [fresh.state[p][key] for p in again.parameters()]), key
    assert fresh.param_groups[0]['lr'] == 5e-4  # the config's to say, not the checkpoint's


def test_names_are_nanogpts_and_the_tied_matrix_is_stored_once(save):
    weights = load_file(save().path / 'model-00001-of-00001.safetensors')
    assert 'transformer.wte.weight' in weights and 'transformer.h.1.mlp.c_proj.bias' in weights
    assert 'lm_head.weight' not in weights


def test_random_numbers_go_on_where_they_were(save):
    state = save().state['rng']
    expected = torch.rand(5)
    for rank, goes_on in ((0, True), (1, False)):  # rank 1 is one that the saved run did not have
        torch.manual_seed(99)
        set_rng_state(state, rank, CPU)
        assert torch.equal(torch.rand(5), expected) == goes_on


def test_latest_best_and_a_number_name_a_checkpoint(save, tmp_path):
    for iter_num, val_loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        save(iter_num, val_loss, keep=5)
    assert checkpoints.find(tmp_path, 'latest').iter_num == 30
    (tmp_path / 'checkpoints/iter-00000030/state.json').write_text('damaged')
    assert checkpoints.find(tmp_path, 'best').iter_num == 20
    assert checkpoints.find(tmp_path, '10').iter_num == 10
    with pytest.raises(UserError, match='latest, best and 10, 20, 30'):
        checkpoints.find(tmp_path, '15')


def test_the_newest_and_the_best_are_kept_and_not_a_number_is_never_best(save, tmp_path):
    for iter_num, val_loss in ((10, 3.0), (20, 1.0), (30, math.nan), (40, 2.0), (50, 2.5)):
        save(iter_num, val_loss, keep=2)
    assert [c.iter_num for c in checkpoints.readable_checkpoints(tmp_path)] == [20, 40, 50]
    assert checkpoints.find(tmp_path, 'best').iter_num == 20


@pytest.mark.parametrize('background', [False, True])
def test_a_save_in_the_background_writes_what_the_weights_were(
        model, optimizer, tmp_path, background):
    before = [p.detach().clone() for p in model.parameters()]
    saver = checkpoint_writer.Saver(tmp_path, background=background)
    saver.save(model, optimizer, STATE, rng_state(CPU))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    saver.wait()
    assert same(checkpoints.find(tmp_path).load_model().parameters(), before)


def test_saves_in_the_background_write_from_the_same_memory(model, optimizer, tmp_path):
    saver, places = checkpoint_writer.Saver(tmp_path, background=True, keep=2), []
    for iter_num in (10, 20):
        saver.save(model, optimizer, {**STATE, 'iter_num': iter_num}, rng_state(CPU))
        places.append({key: t.data_ptr() for key, t in saver.copies.items()})
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    saver.wait()
    assert places[0] == places[1] and len({*places[0].values()}) >= len([*model.parameters()])
    first, second = (checkpoints.find(tmp_path, at).load_model().parameters()
                     for at in ('10', '20'))
    assert same([p + 1.0 for p in first], second)


@pytest.mark.parametrize('background', [False, True])
def test_a_save_that_fails_is_tried_again_and_training_goes_on(
        model, optimizer, save, tmp_path, monkeypatch, capsys, background):
    save(10)
    saver = checkpoint_writer.Saver(tmp_path, background=background)

    def save_where_the_disk_is_full(times, iter_num):
        left = iter(range(times))

        def write(*arguments):
            if next(left, None) is not None:
                raise OSError(28, 'No space left on device')
            return save_file(*arguments)
        monkeypatch.setattr(checkpoint_writer, 'save_file', write)
        saver.save(model, optimizer, {**STATE, 'iter_num': iter_num}, rng_state(CPU))
        saver.wait()
        return capsys.readouterr().err

    err = save_where_the_disk_is_full(2, iter_num=20)
    assert saver.failed and 'No space left' in err and 'earlier ones stay' in err
    assert not list((tmp_path / 'checkpoints').glob('*.tmp'))  # they would fill the disk further
    assert [c.iter_num for c in checkpoints.readable_checkpoints(tmp_path)] == [10]
    err = save_where_the_disk_is_full(1, iter_num=30)
    assert not saver.failed and 'trying again' in err
    assert checkpoints.newest_valid(tmp_path)[0].iter_num == 30


def test_an_earlier_checkpoint_that_cannot_be_removed_is_told(save, tmp_path, monkeypatch, capsys):
    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(13, 'Permission denied', str(path))

    save(1, val_loss=2.0)
    monkeypatch.setattr(checkpoint_writer.shutil, 'rmtree', refuse)
    save(2, val_loss=1.0)
    err = capsys.readouterr().err
    assert 'could not be removed' in err and 'iter-00000001' in err


def test_an_earlier_run_is_moved_aside_and_not_lost(save, tmp_path):
    assert checkpoint_writer.archive_previous_run(tmp_path / 'nothing') is None
    for n in (1, 2):
        save(n)
        assert checkpoint_writer.archive_previous_run(tmp_path) == tmp_path / f'old-00{n}'
        assert checkpoints.find(tmp_path / f'old-00{n}').iter_num == n


def test_going_back_moves_later_checkpoints_aside(save, tmp_path):
    for iter_num in (10, 20, 30):
        save(iter_num, keep=9)
    aside = checkpoint_writer.archive_previous_run(tmp_path, after=10)
    assert [c.iter_num for c in checkpoints.readable_checkpoints(tmp_path)] == [10]
    assert [c.iter_num for c in checkpoints.readable_checkpoints(aside)] == [20, 30]
    assert checkpoint_writer.archive_previous_run(tmp_path, after=10) is None


# -----------------------------------------------------------------------------
# damage


def test_a_directory_without_its_final_name_is_no_checkpoint_and_is_removed(save, tmp_path):
    found = save(10)
    half = found.path.with_name('iter-00000010.tmp')
    os.rename(found.path, half)
    with pytest.raises(UserError, match='no checkpoint there'):
        checkpoints.find(tmp_path)
    save(5)
    checkpoint_writer.clean_up(tmp_path)
    assert os.listdir(tmp_path / 'checkpoints') == ['iter-00000005']


def test_every_flipped_bit_is_found_by_name(save, tmp_path):
    files = sorted(save().path.iterdir())
    chance = random.Random(0)
    for i in range(60):
        path = files[i % len(files)]
        data = path.read_bytes()
        at = chance.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1:])
        valid, problems = checkpoints.newest_valid(tmp_path)
        name = path.name.removesuffix('.sha256')
        assert valid is None and len(problems) == 1 and name in problems[0], (path, at)
        path.write_bytes(data)
    assert checkpoints.newest_valid(tmp_path)[1] == []


def test_a_damaged_chunk_is_named_before_any_of_it_is_used(model, save):
    found = save()
    chunk = found.path / 'model-00001-of-00001.safetensors'
    data, fresh = chunk.read_bytes(), GPT(CONFIG)
    before = [p.detach().clone() for p in fresh.parameters()]
    for damaged in (data[:-1], b'', data[:-4] + b'\0\1\2\3'):
        chunk.write_bytes(damaged)
        with pytest.raises(UserError, match=r'model-00001-of-00001.safetensors is damaged'):
            found.load_into(fresh)
    chunk.unlink()
    with pytest.raises(UserError, match='cannot be read'):
        found.load_into(fresh)
    assert same(fresh.parameters(), before)


def test_the_newest_valid_checkpoint_is_found_behind_damaged_ones(save, tmp_path):
    for iter_num in (10, 20, 30, 40):
        save(iter_num, keep=9)
    paths = checkpoints.checkpoint_paths(tmp_path)
    (paths[3] / 'state.json').write_bytes(b'cut')
    (paths[2] / 'optimizer-00001-of-00001.safetensors').unlink()
    found, problems = checkpoints.newest_valid(tmp_path)
    assert found.iter_num == 20 and len(problems) == 2
    assert 'iter-00000040' in problems[0] and 'optimizer' in problems[1]


def test_a_damaged_state_json_is_named(save, tmp_path):
    path = save().path
    for text in ('', '{', '[]', 'null', '{"format_version": 1}',
                 '{"format_version": 1, "model": 5}', '{"format_version": 9, "model": {}}'):
        for checksum in (hashlib.sha256(text.encode()).hexdigest(), 'of another file'):
            (path / 'state.json').write_text(text)
            (path / 'state.json.sha256').write_text(checksum)
            with pytest.raises(UserError, match=r'iter-00000001'):
                checkpoints.find(tmp_path)


def test_weights_of_another_shape_are_refused(save):
    found = save()
    for other in (dict(n_layer=3), dict(n_embd=64)):
        with pytest.raises(UserError, match='another architecture'):
            found.load_into(GPT(GPTConfig(**{**SHAPE, **other})))


def rewrite(found, **changes):
    """Change state.json, and make its checksum right."""
    text = json.dumps({**found.state, **changes})
    (found.path / 'state.json').write_text(text)
    (found.path / 'state.json.sha256').write_text(hashlib.sha256(text.encode()).hexdigest())


@pytest.mark.parametrize('change, words', [
    (lambda w: w['transformer.ln_f.bias'].fill_(math.inf), 'transformer.ln_f.bias is not finite'),
    (lambda w: w.pop('transformer.ln_f.bias'), "'transformer.ln_f.bias' there does not fit"),
    (lambda w: w.update(x=torch.zeros(1)), "'x' there does not fit")])
def test_weights_that_no_run_wrote_are_refused_by_name(save, change, words):
    found = save()
    (chunk,) = (chunk for chunk in found.state['chunks'] if chunk['kind'] == 'model')
    path = found.path / chunk['name']
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    chunk |= {'bytes': path.stat().st_size,
              'sha256': hashlib.sha256(path.read_bytes()).hexdigest()}
    rewrite(found)
    with pytest.raises(UserError, match=words):
        checkpoints.open_checkpoint(found.path).load_model()
