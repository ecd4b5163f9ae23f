"""End-of-text tokens that are spelled out in text separate documents."""

import pytest
from corpus_files import write_files, write_rows

import prepare
from plaingpt.data import text_files
from plaingpt.data.dataset import open_dataset
from plaingpt.data.documents import Files
from plaingpt.data.rows import TextReader
from plaingpt.data.text_files import Separators

EOT = '<|endoftext|>'
STORIES = ['One day.\nIt rained.\n', '"Hi!" he said.\n', 'The end.']
SEPARATED = [  # text → its documents
    (f'\n{EOT}\n'.join(STORIES), [f'{STORIES[0]}\n', f'{STORIES[1]}\n', STORIES[2]]),
    (f'{EOT}\n{STORIES[0]}{EOT}\n\n{STORIES[1]}{EOT}\n', STORIES[:2]),
    (f'{STORIES[0]}  {EOT} \r\n\r\n{STORIES[1]}', STORIES[:2]),
    (EOT.join(['One.', 'Two!', '"Hi!"', 'Four.', '']), ['One.', 'Two!', '"Hi!"', 'Four.']),
    (f'One.\n{EOT}Two.\n{EOT}Three.', ['One.\n', 'Two.\n', 'Three.']),
    (f'One.{EOT}\nTwo.{EOT}{EOT}\n \n{EOT}', ['One.', 'Two.'])]
MENTIONS = [f'the token {EOT} ends a text\n', f"eot = '{EOT}'\n", f'f("{EOT}", 1)\n', f'[{EOT}]\n',
            f'a `{EOT}`, too\n', f'(as `One.{EOT}Two.`)\n', f'f("One.{EOT}", 1)\n',
            f'x={EOT}\n', f'print("{EOT}")']


@pytest.mark.parametrize('block', [1, 150, 2**20])
def test_an_end_of_text_token_between_documents_separates_them(block, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, 'BLOCK_CHARS', block)
    for text, wanted in SEPARATED:
        [path] = write_files(tmp_path / 'in', text).iterdir()
        source = Files([path], 'in', TextReader())
        assert not source.is_one_text
        found = ['']
        for piece in source.pieces():
            found += [''] * piece.new_document
            found[-1] += piece.text
        assert found[1:] == wanted
        path.unlink()
        path.parent.rmdir()


def test_text_that_mentions_the_token_stays_whole(tmp_path, capsys):
    for text in MENTIONS:
        separators = Separators()
        assert separators.split(text) == [text] and separators.mentions and not separators.count
    [path] = write_files(tmp_path / 'in', ''.join(MENTIONS)).iterdir()
    source = Files([path], 'in', TextReader())
    assert source.is_one_text
    source.report()
    assert 'kept as text' in capsys.readouterr().out


@pytest.mark.parametrize('tokenizer', ['char', 'byte', 'bpe:300'])
def test_separated_documents_are_documents_in_files_lines_and_rows(tokenizer, tmp_path, capsys):
    stories = [f'Story {i} is not long.\n' for i in range(300)]
    (tmp_path / 'a.txt').write_text(f'{EOT}\n'.join(stories))
    write_rows(tmp_path / 'a.jsonl', [f'{EOT}\n'.join(stories[i:i + 10])
                                      for i in range(0, 300, 10)])
    contents = {}
    for name, *options in (['a.txt'], ['a.jsonl'], ['a.txt', '--documents=line']):
        prepare.main(['text', f'{tmp_path}/{name}', f'--tokenizer={tokenizer}', *options,
                      f'--data_dir={tmp_path}/d', '--overwrite'])
        assert f'{EOT} separated documents at ' in capsys.readouterr().out
        dataset = open_dataset(tmp_path / 'd')
        assert sum(entry['documents'] for entry in dataset.meta['splits'].values()) == 300
        ids = dataset.split('train').read(0, 10**9)
        assert EOT not in dataset.tokenizer().decode(ids[ids < 256 + 40].tolist())
        contents[name, *options] = ids.tolist()
    assert contents['a.txt',] == contents['a.jsonl',]


