import hashlib
import json

import numpy as np
import pytest
import torch
from helpers import fails
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare
import train
from plaingpt.system.errors import UserError
from plaingpt.system.files import sha256_of
from plaingpt.tokens.batches import BatchLoader, key, permute
from plaingpt.tokens.dataset import open_dataset
from plaingpt.tokens.token_files import TokenStream, open_tokens


def stream(tmp_path, tokens, vocab_size=50257, files=1, in_ram=False):
    paths = []
    for i, piece in enumerate(np.array_split(np.asarray(tokens), files)):
        paths.append(tmp_path / f'train_{i:06d}.bin')
        piece.astype('<u2').tofile(paths[-1])
    return TokenStream([open_tokens(p, np.dtype('<u2')) for p in paths], vocab_size, in_ram)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=100)
def test_the_keyed_permutation_visits_each_index_once(n, k):
    assert sorted(permute(np.arange(n), n, np.uint64(k)).tolist()) == list(range(n))


def test_the_keyed_permutation_needs_no_memory_for_indices_not_asked_for():
    some = permute(np.array([0, 1, 10**12 - 1]), 10**12, key(1337, 0))
    assert len(set(some.tolist())) == 3 and (some < 10**12).all()


def test_the_order_differs_between_epochs_and_between_seeds():
    orders = [permute(np.arange(1000), 1000, key(*k)).tolist() for k in [(0, 0), (0, 1), (1, 0)]]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    # and looks like chance: neighbours end up far apart, a third of the range on average
    assert 280 < np.abs(np.diff(orders[0])).mean() < 390


@pytest.mark.parametrize('processes', [1, 2, 3, 8])
def test_over_an_epoch_each_sequence_appears_exactly_once(tmp_path, processes):
    tokens = stream(tmp_path, np.arange(255))
    loaders = [BatchLoader(tokens, 10, batch_size=1, micro_steps=24 // processes, rank=rank,
                           world_size=processes) for rank in range(processes)]
    assert loaders[0].sequences_per_epoch == 24
    for epoch in range(3):
        firsts = [int(loader.train_batch(epoch, micro)[0][0, 0])
                  for loader in loaders for micro in range(24 // processes)]
        phase = min(firsts)
        assert sorted(firsts) == [phase + 10 * i for i in range(24)]
        assert 0 <= phase < 15


class NoTokens:
    """A stream of so many tokens, for who asks where sequences begin."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n


@pytest.mark.parametrize('block_size', [1, 2, 7, 10, 64])
def test_every_token_but_the_first_is_a_target_within_six_epochs(block_size):
    for n in range(block_size + 1, 6 * block_size + 2):
        loader = BatchLoader(NoTokens(n), block_size, 1)
        begins = loader.sequence_starts(np.arange(6 * loader.sequences_per_epoch))
        targets = begins[:, None] + np.arange(1, block_size + 1)
        assert np.array_equal(np.unique(targets), np.arange(1, n)), n


def test_the_last_third_of_a_short_split_is_trained_on():
    loader = BatchLoader(NoTokens(3071), 1024, 1)
    begins = loader.sequence_starts(np.arange(6 * loader.sequences_per_epoch))
    assert np.array_equal(np.unique(begins[:, None] + np.arange(1, 1025)), np.arange(1, 3071))


@pytest.mark.parametrize(('n', 'block_size', 'seed', 'sha256'), [
    (3071, 1024, 1337, '5aaaf1b46399219f'), (5000, 16, 5, 'e52650ee8a77f65c'),
    (40, 32, 0, '193f8fb7eec897e2')])
def test_the_even_epochs_are_in_the_order_that_earlier_versions_had(n, block_size, seed, sha256):
    loader = BatchLoader(NoTokens(n), block_size, 1, seed=seed)
    ids = np.concatenate([epoch * loader.sequences_per_epoch
                          + np.arange(loader.sequences_per_epoch) for epoch in range(0, 20, 2)])
    found = hashlib.sha256(loader.sequence_starts(ids).astype('<i8').tobytes()).hexdigest()
    assert found.startswith(sha256)


def test_any_number_of_processes_sees_the_same_sequences_in_the_same_steps(tmp_path):
    tokens = stream(tmp_path, np.arange(5000) % 997)
    for step in (0, 3, 117):
        seen = []
        for processes in (1, 2, 3, 6):
            ids = [BatchLoader(tokens, 16, 4, micro_steps=6 // processes, rank=rank,
                               world_size=processes).sequence_ids(step, micro)
                   for micro in range(6 // processes) for rank in range(processes)]
            seen.append(np.concatenate(ids).tolist())
        assert seen[0] == seen[1] == seen[2] == seen[3]


def test_a_step_asked_for_at_once_is_the_step_reached_from_zero(tmp_path):
    loader = BatchLoader(stream(tmp_path, np.arange(3000) % 256), 8, 4, micro_steps=3, seed=5)
    from_zero = loader.train_batches(0)
    for _ in range(20 * 3):
        next(from_zero)
    at_once = loader.train_batches(20)
    for _ in range(7):
        for a, b in zip(next(from_zero), next(at_once), strict=True):
            assert torch.equal(a, b)
    from_zero.close()
    at_once.close()


def test_a_resumed_loader_counts_what_steps_of_another_size_took(tmp_path):
    loader = BatchLoader(stream(tmp_path, np.arange(3000) % 256), 8, 4, micro_steps=3)
    loader.resume_at(5, 100)
    assert loader.sequences_before(5) == 100 and loader.tokens_before(6) == (100 + 12) * 8
    assert loader.sequence_ids(5, 0).tolist() == [100, 101, 102, 103]


def test_targets_are_the_next_tokens(tmp_path):
    loader = BatchLoader(stream(tmp_path, np.arange(1000)), 8, 4)
    idx, targets = loader.train_batch(3, 0)
    assert idx.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, idx + 1)


@pytest.mark.parametrize('in_ram', [False, True])
def test_sequences_run_over_from_file_to_file(tmp_path, in_ram):
    tokens = np.arange(100)
    pieces = stream(tmp_path, tokens, files=40, in_ram=in_ram)
    sequences = pieces.sequences(np.array([0, 41, 89]), 11)
    assert np.array_equal(sequences, tokens[np.array([[0], [41], [89]]) + np.arange(11)])


@pytest.mark.parametrize('processes', [1, 2, 3])
def test_evaluation_covers_the_whole_split_once_when_asked_for_more(tmp_path, processes):
    tokens = stream(tmp_path, np.arange(1000))
    seen = []
    for rank in range(processes):
        loader = BatchLoader(tokens, 10, 4, rank=rank, world_size=processes)
        for starts in loader.eval_batches(1000):
            idx, targets = loader.eval_batch(starts)
            assert idx.shape == targets.shape == (4, 10)
            seen += targets[targets != -1].tolist()
    assert sorted(seen) == list(range(1, 991))


@pytest.mark.parametrize('processes', [1, 3])
def test_evaluation_can_be_of_the_first_tokens(tmp_path, processes):
    tokens = stream(tmp_path, np.arange(1001))
    seen = []
    for rank in range(processes):
        loader = BatchLoader(tokens, 10, 4, rank=rank, world_size=processes)
        for starts in loader.eval_batches(1, first_tokens=70):
            _, targets = loader.eval_batch(starts)
            seen += targets[targets != -1].tolist()
    assert sorted(seen) == list(range(1, 71))
    whole = loader.eval_batches(1, first_tokens=10**6)  # more than there are: the whole split
    assert sum(map(len, whole)) == len(range(processes - 1, 100, processes))


def test_a_few_evaluation_sequences_are_spread_over_the_split(tmp_path):
    loader = BatchLoader(stream(tmp_path, np.arange(1001)), 10, 2)
    assert np.concatenate(loader.eval_batches(2)).tolist() == [0, 250, 500, 750]


# -----------------------------------------------------------------------------
# files of others


def test_a_shard_with_the_header_of_llm_c_is_read_as_it_is(tmp_path):
    header = np.zeros(256, dtype='<i4')
    header[:3] = 20240520, 1, 500
    path = tmp_path / 'fineweb_train_000001.bin'
    path.write_bytes(header.tobytes() + np.arange(500, dtype='<u2').tobytes())
    (tmp_path / 'fineweb_val_000000.bin').write_bytes(path.read_bytes())
    dataset = open_dataset(tmp_path)
    assert dataset.vocab_size == 50257
    for split in ('train', 'val'):
        tokens = dataset.split(split)
        assert len(tokens) == 500 and tokens.sequences(np.array([7]), 3).tolist() == [[7, 8, 9]]
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match='499 tokens where 500'):
        open_dataset(tmp_path).split('train')


def test_a_bare_folder_of_nanogpt_trains(tmp_path):
    for split in ('train', 'val'):
        np.arange(300, dtype='<u2').tofile(tmp_path / f'{split}.bin')
    dataset = open_dataset(tmp_path)
    assert dataset.vocab_size == 50257 and dataset.tokenizer_json() == {'kind': 'gpt2'}
    assert len(dataset.split('train')) == 300


# -----------------------------------------------------------------------------
# damaged files: one line, from the command that a user would run


@pytest.fixture
def own_data(text_file, tmp_path):
    folder = tmp_path / 'data'
    prepare.main(['text', f'--input={text_file}', '--tokenizer=char', f'--data_dir={folder}'])
    return folder


@pytest.fixture
def train_fails(own_data, tmp_path, capsys, monkeypatch):
    def run(*extra):
        out_dir = tmp_path / 'out'
        return fails(capsys, monkeypatch, train.main, f'--dataset={own_data}', '--device=cpu',
                     f'--out_dir={out_dir}', *extra)
    return run


def test_a_folder_without_token_files_is_named(
        tmp_path, capsys, monkeypatch):
    message = fails(capsys, monkeypatch, train.main, f'--dataset={tmp_path}/owt', '--device=cpu',
                    f'--out_dir={tmp_path}/out')
    assert 'no .bin files there' in message


def test_a_file_of_odd_length_is_named(own_data, train_fails):
    with open(own_data / 'train.bin', 'ab') as f:
        f.write(b'\0')
    assert 'train.bin' in train_fails()


def test_a_file_cut_short_is_named(own_data, train_fails):
    data = (own_data / 'val.bin').read_bytes()
    (own_data / 'val.bin').write_bytes(data[:-100])
    assert 'val.bin' in train_fails() and 'where' in train_fails()


def test_a_file_that_is_gone_is_named(own_data, train_fails):
    (own_data / 'val.bin').unlink()
    assert 'val.bin' in train_fails()


def test_a_split_shorter_than_a_sequence_is_an_error(train_fails):
    assert 'block_size + 1' in train_fails('--block_size=20000')


@pytest.mark.parametrize('in_ram', [False, True])
def test_an_id_beyond_the_vocabulary_is_named_with_its_place(own_data, train_fails, in_ram):
    tokens = np.fromfile(own_data / 'val.bin', '<u2')
    tokens[40] = 60000
    tokens.tofile(own_data / 'val.bin')
    meta = json.loads((own_data / 'meta.json').read_text())
    meta['splits']['val']['files'][0]['sha256'] = sha256_of(own_data / 'val.bin')
    (own_data / 'meta.json').write_text(json.dumps(meta))
    message = train_fails(f'--data_in_ram={in_ram}', '--block_size=64', '--n_layer=1',
                          '--n_embd=32', '--n_head=2', '--batch_size=4', '--eval_iters=1')
    assert 'val.bin: token 40 has id 60000' in message


@pytest.mark.parametrize('text', [
    '', '{', '[]', '{"format_version": 1}', '{"format_version": 99}',
    '{"format_version": 1, "dtype": "float32", "vocab_size": 5, "splits": {}}'])
def test_a_broken_meta_json_is_an_error(own_data, train_fails, text):
    (own_data / 'meta.json').write_text(text)
    assert 'meta.json' in train_fails()


@pytest.mark.parametrize('value', [
    None, 3, -1, 1.5, True, 10**30, 'x', [], {}, [1], {'kind': 'x'}], ids=repr)
@pytest.mark.parametrize('place', [
    'format_version', 'dtype', 'vocab_size', 'tokenizer', 'splits', 'splits/val',
    'splits/val/tokens', 'splits/val/bytes', 'splits/val/files', 'splits/val/files/0',
    'splits/val/files/0/name', 'splits/val/files/0/tokens', 'splits/val/files/0/sha256'])
def test_no_value_in_meta_json_gives_a_traceback(own_data, place, value):
    meta = json.loads((own_data / 'meta.json').read_text())
    *way, last = [int(key) if key == '0' else key for key in place.split('/')]
    inner = meta
    for step in way:
        inner = inner[step]
    if (last, value) in [('sha256', 'x'), ('name', 'x'), ('bytes', 3),
                         ('format_version', True)]:
        return  # possible values; what they misname is found elsewhere
    inner[last] = value
    (own_data / 'meta.json').write_text(json.dumps(meta))
    with pytest.raises(UserError, match=r'meta\.json'):
        open_dataset(own_data)


@pytest.mark.parametrize('name', ['../secret.bin', '/etc/passwd'])
def test_a_meta_json_that_points_out_of_its_folder_is_refused(own_data, train_fails, name):
    meta = json.loads((own_data / 'meta.json').read_text())
    meta['splits']['train']['files'][0]['name'] = name
    (own_data / 'meta.json').write_text(json.dumps(meta))
    assert 'meta.json' in train_fails()


def test_a_small_corpus_is_prepared_when_first_trained_on(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    train.main(['--dataset=pystdlib', '--device=cpu', '--out_dir=out', '--block_size=16',
                '--n_layer=1', '--n_embd=32', '--n_head=2', '--batch_size=4', '--eval_iters=1',
                '--max_iters=0'])
    assert (tmp_path / 'data/pystdlib/meta.json').exists()
    assert 'preparing pystdlib' in capfd.readouterr().out


def test_a_large_corpus_is_not_prepared_unasked(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        train.main(['--dataset=openwebtext', '--device=cpu', '--out_dir=out'])
    assert exit_.value.code == 2
    assert 'run python prepare.py openwebtext' in capfd.readouterr().err
