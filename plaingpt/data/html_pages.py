"""The text of HTML pages, without tags, menus and scripts, by trafilatura where it is installed."""

import importlib.util
import re
from importlib.metadata import version

from plaingpt.data.readers import inner_suffix
from plaingpt.system.errors import UserError, needs
from plaingpt.system.formatting import count_of

PACKAGES = 'trafilatura lxml_html_clean'
PAGE_CHARS = 2**25  # of a page, which is in memory whole


def is_html(path):
    return inner_suffix(path) in ('.html', '.htm')


def is_installed():
    return importlib.util.find_spec('trafilatura') is not None


def choose_extractor(paths, wanted):
    """Say how the HTML pages among `paths` are read → 'trafilatura 2.3.1', '' for with their tags.
    wanted: 'text', 'tags', or 'auto' for their text where trafilatura is installed. UserError."""
    pages = count_of(sum(map(is_html, paths)), 'HTML page')
    if wanted == 'tags' or not any(map(is_html, paths)):
        return ''
    if wanted == 'auto' and not is_installed():
        print(f'{pages}: their tags are trained on. For their text alone: pip install {PACKAGES}')
        return ''
    if not is_installed():
        raise UserError(f'html=text: it needs trafilatura: pip install {PACKAGES}')
    found = f'trafilatura {version("trafilatura")}'
    print(f'{pages}: read as the text in them, by {found} (--html=tags keeps the tags)')
    return found


def page_text(html, name):
    """HTML → its text, '' where it has none. Raises UserError; name: of the file."""
    with needs(PACKAGES, 'the text of HTML pages'):
        import trafilatura
    if len(html) > PAGE_CHARS:
        raise UserError(f'{name}: a page of more than {PAGE_CHARS:,} characters is not read: cut '
                        'it, or give --html=tags, which reads it with its tags')
    if not re.search('<html|<body', html, re.IGNORECASE):  # a part of a page
        html = f'<html><body>{html}</body></html>'
    # Of very short pages it takes no main text; html2txt takes all that is no menu.
    found = trafilatura.extract(html, favor_recall=True, include_comments=False)
    text = found or trafilatura.html2txt(html)
    return f'{text}\n' if text else ''
