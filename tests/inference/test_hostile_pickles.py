"""The pickle in a ckpt.pt of others is looked at before torch reads it."""

import pickle
import zipfile

import pytest
import torch

from plaingpt.inference.pretrained import check_pickle, read_nanogpt
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


@pytest.mark.parametrize('key', [nested(60), (), 2**61 - 1, -2**40])
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
    with pytest.raises(UserError, match=r'ckpt\.pt: damaged, or no checkpoint of nanoGPT .*keys'):
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
