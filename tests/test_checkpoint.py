import json
import math
import os

import pytest
import torch

import checkpoint as checkpoints
from model import GPT, GPTConfig
from runtime import UserError

CPU = torch.device('cpu')


@pytest.fixture
def run(tmp_path):
    """A model and its optimizer after a step, and a function that saves them."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu')
    idx = torch.randint(0, 65, (2, 16))
    model(idx, idx)[1].backward()
    optimizer.step()

    def save(iter_num=1, val_loss=1.0, **options):
        state = {'iter_num': iter_num, 'val_loss': val_loss, 'rng': checkpoints.rng_state(CPU)}
        return checkpoints.save(tmp_path, model, optimizer, state, **options)

    return model, optimizer, save


def test_weights_and_optimizer_come_back_bit_for_bit(run):
    model, optimizer, save = run
    found = save()
    again = found.load_model()
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    fresh = again.configure_optimizers(0.1, 5e-4, (0.9, 0.95), 'cpu')
    found.load_optimizer(fresh, again)
    expected, got = optimizer.state_dict(), fresh.state_dict()
    assert expected['state'].keys() == got['state'].keys()
    for i, state in expected['state'].items():
        for key, value in state.items():
            assert torch.equal(value, got['state'][i][key])
    assert fresh.param_groups[0]['lr'] == 5e-4  # the config's to say, not the checkpoint's


def test_names_are_nanogpts_and_the_tied_matrix_is_stored_once(run):
    from safetensors.torch import load_file
    _, _, save = run
    weights = load_file(save().path / 'model-00001-of-00001.safetensors')
    assert 'transformer.wte.weight' in weights and 'transformer.h.1.mlp.c_proj.bias' in weights
    assert 'lm_head.weight' not in weights


def test_no_file_is_larger_than_asked_unless_one_tensor_is(run, monkeypatch):
    model, _, save = run
    monkeypatch.setattr(checkpoints, 'MEGABYTE', 1000)
    found = save(chunk_mb=20)  # 20 kB; the embedding alone has 16 kB
    chunks = found.state['chunks']
    assert len(chunks) > 5 and all(c['bytes'] <= 20_000 for c in chunks)
    again = found.load_model()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(),
                                                 strict=True))
    found.load_optimizer(again.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu'), again)


def test_random_numbers_go_on_where_they_were(run):
    _, _, save = run
    state = save().state['rng']
    expected = torch.rand(5)
    torch.manual_seed(99)
    checkpoints.set_rng_state(state, CPU)
    assert torch.equal(torch.rand(5), expected)


def test_latest_best_and_a_number_name_a_checkpoint(run, tmp_path):
    _, _, save = run
    for iter_num, val_loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        save(iter_num, val_loss, keep=5)
    assert checkpoints.find(tmp_path, 'latest').iter_num == 30
    assert checkpoints.find(tmp_path, 'best').iter_num == 20
    assert checkpoints.find(tmp_path, '10').iter_num == 10
    with pytest.raises(UserError, match='latest, best and 10, 20, 30'):
        checkpoints.find(tmp_path, '15')


def test_the_newest_and_the_best_are_kept(run, tmp_path):
    _, _, save = run
    for iter_num, val_loss in ((10, 3.0), (20, 1.0), (30, math.nan), (40, 2.0), (50, 2.5)):
        save(iter_num, val_loss, keep=2)
    kept = [c.iter_num for c in checkpoints.list_checkpoints(tmp_path)]
    assert kept == [20, 40, 50]


def test_not_a_number_is_never_best(run, tmp_path):
    _, _, save = run
    save(10, math.nan)
    save(20, 5.0)
    assert checkpoints.find(tmp_path, 'best').iter_num == 20


def test_a_save_that_fails_leaves_the_earlier_checkpoint(run, tmp_path, monkeypatch):
    _, _, save = run
    save(10)

    def disk_full(*_):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(checkpoints, 'write_chunks', disk_full)
    with pytest.raises(OSError):
        save(20)
    assert [c.iter_num for c in checkpoints.list_checkpoints(tmp_path)] == [10]
    checkpoints.find(tmp_path).load_model()


def test_a_directory_without_its_final_name_is_no_checkpoint(run, tmp_path):
    _, _, save = run
    found = save(10)
    os.rename(found.path, found.path.with_name('iter-00000010.tmp'))
    with pytest.raises(UserError, match='no checkpoint there'):
        checkpoints.find(tmp_path)


def test_a_damaged_chunk_is_named_before_it_is_used(run):
    _, _, save = run
    found = save()
    chunk = found.path / 'model-00001-of-00001.safetensors'
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(UserError, match=r'model-00001-of-00001.safetensors is damaged'):
        found.load_model()
    chunk.unlink()
    with pytest.raises(UserError, match='cannot be read'):
        found.load_model()


@pytest.mark.parametrize('text', ['', '{', '[]', '{"format_version": 1}', '{"format_version": 9}'])
def test_a_damaged_state_json_is_named(run, tmp_path, text):
    _, _, save = run
    (save().path / 'state.json').write_text(text)
    with pytest.raises(UserError, match=r'iter-00000001'):
        checkpoints.find(tmp_path)


def test_weights_of_another_shape_are_refused(run):
    _, _, save = run
    found = save()
    with pytest.raises(UserError, match='another architecture'):
        found.load_weights(GPT(GPTConfig(16, 65, n_layer=3, n_head=2, n_embd=32)))
    with pytest.raises(UserError, match='another architecture'):
        found.load_weights(GPT(GPTConfig(16, 65, n_layer=2, n_head=2, n_embd=64)))


def test_an_earlier_run_is_moved_aside_and_not_lost(run, tmp_path):
    _, _, save = run
    assert checkpoints.set_aside(tmp_path / 'nothing') is None
    for n in (1, 2):
        save(n)
        assert checkpoints.set_aside(tmp_path) == tmp_path / f'old-00{n}'
        assert checkpoints.find(tmp_path / f'old-00{n}').iter_num == n


def test_state_json_says_what_made_it(run):
    _, _, save = run
    state = json.loads((save().path / 'state.json').read_text())
    assert state['model'] == {'block_size': 16, 'vocab_size': 65, 'n_layer': 2, 'n_head': 2,
                              'n_embd': 32, 'dropout': 0.0, 'bias': True}
