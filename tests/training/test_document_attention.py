"""A run whose attention stays within documents: where it learns what opens one, and who knows."""

import pytest
from helpers import options

import evaluate
import plaingpt
import prepare
import train
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints


@pytest.fixture(scope='module')
def documents(text_file, tmp_path_factory):
    """Lines as documents, in bytes: token 256 opens each."""
    folder = tmp_path_factory.mktemp('documents')
    prepare.main(['text', f'--input={text_file}', '--tokenizer=byte', '--documents=line',
                  f'--data_dir={folder}'])
    return folder


def test_the_tokenizer_tells_what_opens_a_document_and_all_that_follows_knows(
        tiny, documents, tmp_path, capsys):
    run = [*tiny, *options(dataset=documents, eval_iters=3)]
    train.main([*run, '--document_attention', '--max_iters=3'])
    train.main([*run, '--document_attention', '--init_from=resume', '--max_iters=4'])
    with pytest.raises(UserError, match='has document_attention=True, not False'):
        train.main([*run, '--document_attention=False', '--init_from=resume', '--max_iters=5'])
    out = tmp_path / 'out'
    shape = checkpoints.find(out).state['model']
    assert shape['document_attention'] is True and shape['document_start'] == 256
    assert plaingpt.load(out).model.config.document_start == 256
    evaluate.main([*options(out_dir=out, device='cpu', dtype='float32')])


def test_a_tokenizer_that_opens_no_document_is_refused(tiny):
    with pytest.raises(UserError, match='code_char has no end of text'):
        train.main([*tiny, '--document_attention'])
