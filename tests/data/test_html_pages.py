"""HTML pages: their text where the extractor is installed, their tags where it is not or is not
wanted."""

import importlib.util
import json

import pytest
from corpus_files import split_bytes

import prepare
from plaingpt.data import html_pages
from plaingpt.system.errors import UserError

SENTENCE = 'It was a dark and stormy night, and the rain fell in torrents <b>{}</b> &amp; hail. '
PAGE = ('<!DOCTYPE html><html><head><title>T</title><style>p {{color: red}}</style></head><body>'
        '<nav><a href="/">Home</a> <a href="/b">Blog</a></nav><p>{}</p><script>track()</script>'
        '</body></html>')
installed = pytest.mark.skipif(importlib.util.find_spec('trafilatura') is None,
                               reason='trafilatura is not installed')


@pytest.fixture
def pages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'in').mkdir()
    for n in range(3):
        text = ''.join(SENTENCE.format(f'{n}{i}') for i in range(9))
        (tmp_path / f'in/{n}.html').write_text(PAGE.format(text))
    (tmp_path / 'in/part.HTM').write_text('<p>a short part')
    return tmp_path


def text_of(folder):
    return (split_bytes(folder, 'train') + split_bytes(folder, 'val')).decode()


@installed
def test_the_text_of_pages_is_read_without_tags_menus_and_scripts(pages, capsys, refused):
    command = 'text', 'in', '--tokenizer=byte', f'--data_dir={pages}/d'
    prepare.main([*command])
    text = text_of(pages / 'd')
    assert text.count('torrents') == 27 and 'torrents 00 & hail' in text and 'a short part' in text
    assert not any(word in text for word in ('<', 'track', 'Blog', 'color', '&amp;'))
    assert '4 HTML pages: read as the text in them, by trafilatura' in capsys.readouterr().out
    assert 'holds another dataset (html text, not none)' in refused(*command, '--html=tags')
    prepare.main([*command])
    assert 'is already prepared by this command' in capsys.readouterr().out


def test_pages_are_read_with_their_tags_where_no_extractor_is_there_or_wanted(
        pages, capsys, monkeypatch, refused):
    prepare.main(['text', 'in', '--tokenizer=byte', '--data_dir=a', '--html=tags'])
    assert 'tags' not in capsys.readouterr().out
    monkeypatch.setattr(html_pages, 'is_installed', lambda: False)
    prepare.main(['text', 'in', '--tokenizer=byte', '--data_dir=b'])
    assert '4 HTML pages: their tags are trained on. For their text alone: pip install trafi' \
        in capsys.readouterr().out
    for name in 'ab':
        assert text_of(pages / name) == ''.join(
            path.read_text() + '\n' * (path.name != 'part.HTM')
            for path in sorted((pages / 'in').iterdir()))
        assert 'html' not in json.loads((pages / name / 'meta.json').read_text())['source']
    assert 'needs trafilatura' in refused('text', 'in', '--html=text')


@installed
def test_a_page_without_text_is_no_document_and_a_huge_one_is_refused(monkeypatch):
    for html in ('', ' \n', '<html></html>', '<div>' * 100_000, '\0', '<script>a()</script>'):
        assert html_pages.page_text(html, 'a.html') == '', html[:10]
    monkeypatch.setattr(html_pages, 'PAGE_CHARS', 100)
    with pytest.raises(UserError, match=r'a\.html: a page of more than 100 .* --html=tags'):
        html_pages.page_text('<p>' + 'a ' * 100, 'a.html')
