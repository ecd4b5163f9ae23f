"""Whole documents packed into sequences: the contract is that of every loader, and of the text."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from runs import TINY, lines

import evaluate
import prepare
import train
from plaingpt.core.dataset import open_dataset
from plaingpt.core.packing import DocumentTokens, PackedLoader
from plaingpt.core.token_files import open_tokens
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.system.errors import UserError

EOT = ByteTokenizer.end_of_text
PACKED = [*TINY, '--pack=documents', '--check=False']


def prepare_lines(folder, texts, tokenizer='byte'):
    """Prepare a dataset in which each text is a document."""
    (folder.parent / 'lines.txt').write_text(''.join(f'{text}\n' for text in texts))
    prepare.main(['text', f'--input={folder.parent}/lines.txt', '--documents=line',
                  f'--tokenizer={tokenizer}', f'--data_dir={folder}', '--val_fraction=0.4'])
    return folder


def loader_of(folder, block_size=32, batch_size=2, split='train', **settings):
    return open_dataset(folder).loader(split, block_size, batch_size, pack='documents', **settings)


def loader_of_ids(folder, ids, block_size):
    np.array(ids, '<u2').tofile(folder / 'train.bin')
    stream = DocumentTokens([open_tokens(folder / 'train.bin', np.dtype('<u2'))], 257, 256)
    return PackedLoader(stream, block_size, 1)


def rows_of(loader):
    """(idx, targets) of all sequences of the loader's first epoch."""
    starts = loader.sequence_starts(np.arange(loader.sequences_per_epoch))
    return [part.tolist() for part in loader._on_host(starts)]


def sums(n):
    return [f'{i}+{i * i % 97}={i + i * i % 97}' for i in range(n)]


@pytest.fixture
def data(tmp_path):
    return prepare_lines(tmp_path / 'sums', sums(300))


def test_a_sequence_holds_whole_documents_that_each_end_then_padding(tmp_path):
    [idx], [targets] = rows_of(loader_of_ids(tmp_path, [EOT, *b'abc', EOT, *b'f', EOT, *b'de'], 11))
    a, b, c, d, e, f = b'abcdef'
    assert idx == [EOT, a, b, c, EOT, d, e, EOT, f, EOT, EOT]
    # The last document of the split has no next one, which would end it.
    assert targets == [a, b, c, EOT, d, e, -1, f, EOT, -1, -1]


@pytest.mark.parametrize('tokenizer', ['byte', 'char'])
@pytest.mark.parametrize('block_size', [1, 2, 3, 8, 9, 10, 64, 2000])
def test_each_token_is_predicted_once_from_the_token_before_it(tokenizer, block_size, tmp_path):
    rng = np.random.default_rng(block_size)
    texts = [''.join(rng.choice([*'abcdef'], n)) for n in rng.integers(1, 24, 60)]
    loader = loader_of(prepare_lines(tmp_path / 'data', texts, tokenizer), block_size)
    predicted = [(token, target) for row in zip(*rows_of(loader), strict=True)
                 for token, target in zip(*row, strict=True) if target != -1]
    ids = loader.stream.read(0, len(loader.stream)).tolist()
    assert sorted(predicted) == sorted(pairwise(ids))
    assert loader.num_targets.sum() == len(predicted)


def test_the_lines_of_a_tokenizer_without_end_of_text_are_documents(tmp_path):
    loader = loader_of(prepare_lines(tmp_path / 'sums', sums(300), 'char'), block_size=32)
    tokenizer = open_dataset(tmp_path / 'sums').tokenizer()
    text = '\n'.join(tokenizer.decode(row) for row in rows_of(loader)[0])
    assert {*text.split('\n')} - {''} <= {*sums(300)}


def test_another_piece_of_a_long_document_starts_like_a_document(tmp_path):
    idx, targets = rows_of(loader_of_ids(tmp_path, [EOT, *b'abcdefgh'], 6))
    rows = sorted(zip(idx, targets, strict=True))
    a, b, c, d, e, f, g, h = b'abcdefgh'
    # f is a target of the first piece, and g is predicted from it
    assert rows == [([EOT, f, g, h, EOT, EOT], [-1, g, h, -1, -1, -1]),
                    ([EOT, a, b, c, d, e], [a, b, c, d, e, f])][::-1]


@pytest.mark.parametrize('settings', [[], ['--document_attention=True', '--check=overfit']])
def test_a_run_on_packed_documents_passes_the_preflight(data, settings):
    train.main([*TINY, '--pack=documents', f'--dataset={data}', '--eval_only', *settings])


def test_the_validation_loss_is_over_all_tokens_of_whole_documents(data, tmp_path):
    train.main([*PACKED, f'--dataset={data}', '--max_iters=2', '--eval_iters=1000'])
    *_, validated = lines(tmp_path / 'out', 'val_loss')
    stream = open_dataset(data).split('val')
    predicted = stream.read(1, len(stream))
    bytes_per_token = (predicted != EOT).sum() / len(predicted)
    assert validated['val_bpb'] == pytest.approx(
        validated['val_loss'] / math.log(2) / bytes_per_token)
    evaluate.main(['--out_dir=out', '--device=cpu', '--output=scores.json'])
    scores = json.loads((tmp_path / 'scores.json').read_text())['results']['val']
    assert scores['loss'] == pytest.approx(validated['val_loss'], abs=1e-5)
    assert scores['bits_per_byte'] == pytest.approx(validated['val_bpb'], abs=1e-5)


def test_a_run_cannot_be_resumed_with_another_packing(data):
    train.main([*TINY, '--check=False', f'--dataset={data}', '--max_iters=1'])
    with pytest.raises(UserError, match='pack=stream, not documents'):
        train.main([*PACKED, f'--dataset={data}', '--init_from=resume'])


def test_text_without_documents_is_refused(tmp_path):
    (tmp_path / 'book.txt').write_text('one two three ' * 50)
    for tokenizer in ('byte', 'char'):
        prepare.main(['text', f'--input={tmp_path}/book.txt', f'--tokenizer={tokenizer}',
                      f'--data_dir={tmp_path}/{tokenizer}'])
        with pytest.raises(UserError, match=r'train\.bin: pack=documents.*--documents=line'):
            loader_of(tmp_path / tokenizer)


def test_documents_of_several_lines_are_not_packed_by_lines(tmp_path):
    (tmp_path / 'tunes.txt').write_text('\n\n'.join(f'X:{i}\nCDE' for i in range(30)))
    prepare.main(['text', f'{tmp_path}/tunes.txt', '--documents=paragraph', '--tokenizer=char',
                  f'--data_dir={tmp_path}/tunes'])
    with pytest.raises(UserError, match=r'pack=documents.*--tokenizer=byte'):
        loader_of(tmp_path / 'tunes')


def test_a_mixture_cannot_be_packed(data):
    with pytest.raises(UserError, match=r'pack=documents.*--dataset'):
        train.main([*PACKED, f'--dataset={data}:0.5,{data}/../sums:0.5'])
