"""The pickle in a ckpt.pt of others is looked at before torch reads it."""

import pickle
import shutil
import warnings
import zipfile

import pytest
import torch
from helpers import ends_within
from hostile_checkpoints import cases

from plaingpt.inference.pretrained import check_pickle, load_pretrained, read_nanogpt
from plaingpt.system.errors import UserError


def nested(depth):
    """A tuple that holds itself twice, and so on: to hash it takes 2^depth steps."""
    found = ()
    for _ in range(depth):
        found = (found, found)
    return found


class AsKey:
    """Pickled as the key of a dict, by hand: to make such a dict here would hang as well."""

    def __init__(self, key):
        self.key = key

    def bytes(self):
        return b'\x80\x02}' + pickle.dumps(self.key, 2)[2:-1] + b'K\x01s.'


@pytest.mark.parametrize('key', [nested(3), (), 2**61 - 1, -2**40])
def test_keys_are_texts_and_small_numbers(key):
    with pytest.raises(ValueError, match='keys'):
        check_pickle(AsKey(key).bytes())
    check_pickle(pickle.dumps({'a': 1, 2: {'c': [nested(2)], 'd': (None, True)}, None: 1.5}, 2))


def test_numbers_are_of_64_bits():
    check_pickle(pickle.dumps({'a': 2**62}, 2))
    with pytest.raises(ValueError, match='too large'):
        check_pickle(pickle.dumps({'a': 2**20_000}, 2))


def test_a_file_that_would_hang_is_one_line(tmp_path):
    path = tmp_path / 'ckpt.pt'
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('ckpt/data.pkl', AsKey(nested(60)).bytes())
        archive.writestr('ckpt/version', '3\n')
    with pytest.raises(UserError, match=r'ckpt\.pt: damaged, or no checkpoint .*too long'):
        read_nanogpt(path)


def test_what_torch_saves_passes(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 3)).sum().backward()
    optimizer.step()
    torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'iter_num': 5,
                'best_val_loss': torch.tensor(1.5), 'config': {'lr': 1e-3, 'compile': False},
                'model_args': dict(n_layer=1, bias=None)}, tmp_path / 'ckpt.pt')
    with zipfile.ZipFile(tmp_path / 'ckpt.pt') as archive:
        check_pickle(archive.read('ckpt/data.pkl'))


def test_values_that_are_small_only_while_shared_are_refused():
    shared = (0.9, 0.95)
    check_pickle(pickle.dumps([{'betas': shared}, {'betas': shared}], 2))
    with pytest.raises(ValueError, match='too long'):
        check_pickle(pickle.dumps({'a': nested(60)}, 2))
    itself = []
    itself.append(itself)
    with pytest.raises(ValueError, match='holds itself'):
        check_pickle(pickle.dumps(itself, 2))


def test_the_pickle_that_is_checked_is_the_one_that_torch_reads(tmp_path):
    torch.save({'model': {}}, tmp_path / 'ckpt.pt')
    with zipfile.ZipFile(tmp_path / 'ckpt.pt', 'a') as archive:  # torch takes names in any case
        archive.writestr('ckpt/DATA.PKL', AsKey(nested(60)).bytes())
        archive.writestr('ckpt/Data.pkl', AsKey(nested(60)).bytes())
    with pytest.raises(UserError, match='too long'):
        read_nanogpt(tmp_path / 'ckpt.pt')


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Duplicate name')
def test_a_hostile_ckpt_is_read_or_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read, all_cases = [], 0
    for name, write in cases(tmp_path):
        path = tmp_path / f'{all_cases}.pt'
        write(path)
        all_cases += 1
        try:
            with ends_within(10), warnings.catch_warnings(action='error'):
                load_pretrained(path)
            read.append(name)
        except UserError as e:
            assert len(str(e).splitlines()) == 1 and len(str(e)) < 1000, name
        except BaseException as e:
            raise AssertionError(f'{name}: {e!r}') from e
        assert not (tmp_path / 'hacked').exists(), name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert all_cases > 1000
    assert 'no iter_num' in read and not any('bomb' in name or 'deep' in name for name in read)
